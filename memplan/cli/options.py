"""Arguments and options that several commands share."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from memplan import api
from memplan.cli.output import check_writable, exit_on_error
from memplan.libraries import PlainStep
from memplan.request import Request

FactoryArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FACTORY",
        help=(
            "A function that returns (step, args); with literal arguments: "
            "'models.train:unet3d_step(size=64)'."
        ),
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(help="Device memory: bytes, '16GiB' or '80%'. Default: jax's pool there."),
]
Json = Annotated[
    Path | None,
    typer.Option(
        "--json", help="Write JSON to this file, or with '-' to standard output instead of tables."
    ),
]
Html = Annotated[
    Path | None, typer.Option("--html", help="Write one self-contained page to this file.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@dataclass(frozen=True, kw_only=True)
class PlanCommandOptions:
    """Options of every command that plans a step."""

    host_budget: Annotated[
        str | None, typer.Option(help="Host memory for offloaded values, in the same form.")
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            help="Plan for this device: a name (see `memplan devices`) or a measured PATH.json."
        ),
    ] = None
    split: Annotated[
        bool | None,
        typer.Option(
            "--split/--no-split",
            help="Run slab by slab a step that does not fit otherwise (the default), or never.",
        ),
    ] = None
    donate: Annotated[
        str | None,
        typer.Option(
            metavar="0,1|none",
            help="Arguments whose buffers the step may overwrite. Default: what its jit donates; "
            "of a plain function the first of several, as in step(state, batch), for doctor none.",
        ),
    ] = None
    host_state: Annotated[
        list[str] | None,
        typer.Option(
            metavar="0,1", help="Arguments whose large arrays live in host memory; may be repeated."
        ),
    ] = None
    pin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=device|host|recompute", help="Where named values are; may be repeated."
        ),
    ] = None
    time_limit: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Look for nothing better after so many seconds; keep the best that fits.",
        ),
    ] = None
    debug: Debug = False

    @property
    def replaces(self) -> bool:
        """True if an option replaces one of the step's own, not only one for the output."""
        return any(
            getattr(self, field.name) != field.default
            for field in fields(PlanCommandOptions)
            if field.name != "debug"
        )

    def of(self, step: PlainStep) -> api.RequestOptions:
        """The request for a step: its own options, with those of the command in their place.

        By default the first of several arguments of a plain function, the state, is donated.
        """
        args = step.args
        request: dict[str, Any] = {
            "donate_argnums": (0,) if len(args) > 1 else (),
            **_own_request(step),
            **step.options,
        }
        if self.host_budget is not None:
            request["host_budget"] = self.host_budget
        if self.device is not None:
            request["device"] = self.device
        if self.split is not None:
            request["split"] = "auto" if self.split else False
        if self.donate is not None:
            request["donate_argnums"] = (
                ()
                if self.donate == "none"
                else _positions(self.donate, args, "--donate", "0, 0,1 or none")
            )
        if self.host_state:
            on_host = ",".join(self.host_state)
            request["host_state"] = _positions(on_host, args, "--host-state", "0 or 0,1")
        if self.pin:
            request["pin"] = dict(map(_pin, self.pin))
        if self.time_limit is not None:
            request["time_limit"] = self.time_limit
        return cast(api.RequestOptions, request)


@dataclass(frozen=True, kw_only=True)
class StepCommandOptions(PlanCommandOptions):
    """Also options of a command whose result can be written to files."""

    json: Json = None
    html: Html = None


def _own_request(step: PlainStep) -> dict[str, Any]:
    """memplan's options of a step that every command takes; `Request`'s own defaults if none."""
    request = step.request or Request()
    names = {field.name for field in fields(Request)} - {"budget", "plan", "verify"}
    return {name: getattr(request, name) for name in names}


def _pin(text: str) -> tuple[str, str]:
    name, equals, where = text.rpartition("=")
    if not equals:
        raise typer.BadParameter(f"{text!r} has no '='. Write NAME=host.", param_hint="--pin")
    return name, where


def _positions(text: str, args: tuple[Any, ...], option: str, examples: str) -> tuple[int, ...]:
    positions = text.split(",")
    if not all(
        position.strip().isdecimal() and int(position) < len(args) for position in positions
    ):
        raise typer.BadParameter(
            f"{text!r} does not name positions of the {len(args)} arguments. Write {examples}.",
            param_hint=option,
        )
    return tuple(map(int, positions))


def step_command(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command for typer from a function with a parameter `options: PlanCommandOptions`, or
    `StepCommandOptions`.

    Typer takes options from parameters, so the command has a parameter for each. An error becomes a
    message and an exit code. Files that cannot be written are refused before the function runs.
    """
    own = inspect.signature(command, eval_str=True).parameters
    options_class = own["options"].annotation
    shared = list(inspect.signature(options_class, eval_str=True).parameters.values())
    parameters = []
    for parameter in own.values():
        if parameter.name == "options":
            parameters += shared
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def wrapper(**arguments: Any) -> None:
        options = options_class(**{option.name: arguments.pop(option.name) for option in shared})
        with exit_on_error(options.debug):
            if isinstance(options, StepCommandOptions):
                check_writable(options.json, options.html)
            command(**arguments, options=options)

    setattr(wrapper, "__signature__", inspect.Signature(parameters))  # noqa: B010  typer reads it
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper
