"""Commands that plan one step of the user's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from memplan import api
from memplan.cli import factory
from memplan.cli.options import (
    Budget,
    Debug,
    DeviceName,
    Donate,
    FactoryArgument,
    HostBudget,
    Html,
    Json,
    Split,
    Verify,
    argnums,
    split_way,
    verify_level,
)  # fmt: skip
from memplan.cli.output import INFEASIBLE, check_extra, check_writable, exit_on_error, print_result, progress, save
from memplan.report.progress import Stages


def inspect(
    step: FactoryArgument,
    budget: Budget = None,
    host_budget: HostBudget = None,
    device: DeviceName = None,
    verify: Verify = "compile",
    split: Split = True,
    donate: Donate = None,
    json: Json = None,
    html: Html = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace for ui.perfetto.dev to this file; needs the extra trace.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw memory over the step here; needs the extra plots.")] = None,
    debug: Debug = False,
) -> None:
    """Plan one step, compile it and report what it takes; runs nothing unless --verify numbers."""
    with exit_on_error(debug):
        check_writable(json, html)
        check_extra(trace, "--trace", "perfetto", "trace", json, html)
        check_extra(png, "--png", "matplotlib", "plots", json, html, trace)
        options: dict[str, Any] = {"budget": budget, "host_budget": host_budget, "device": device}
        with progress() as stage:
            function, args = load(step, stage)
            if not hasattr(function, "plan"):
                options |= {"verify": verify_level(verify), "split": split_way(split)}
                function = api.jit(function, **options, donate_argnums=argnums(donate, args))
            elif donate is not None or verify != "compile" or not split or any(options.values()):
                raise typer.BadParameter(
                    "the factory returns a step that memplan.jit already made, with options of its own. Leave out "
                    "--budget, --host-budget, --device, --verify, --no-split and --donate, or return the "
                    "plain step."
                )
            report = function.plan(*args).report
        print_result(report, json, html)
        for path, write in ((trace, report.save_trace), (png, report.save_png)):
            if path is not None:
                save(path, write)


def compare(
    step: FactoryArgument,
    budget: Budget = None,
    host_budget: HostBudget = None,
    device: DeviceName = None,
    split: Split = True,
    donate: Donate = None,
    json: Json = None,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Compile one step in several ways, memplan's among them, and say which fit. Exit code 3 where none does."""
    with exit_on_error(debug):
        check_writable(json, html)
        with progress() as stage:
            function, args = plain_step(step, stage)
            limits = {"budget": budget, "host_budget": host_budget, "device": device, "split": split_way(split)}
            comparison = api.compare(function, args, **limits, donate_argnums=argnums(donate, args))
        print_result(comparison, json, html)
        if not comparison.any_fits:
            raise typer.Exit(INFEASIBLE)


def curve(
    step: FactoryArgument,
    points: Annotated[int, typer.Option(min=1, help="Budgets, from the floor up to the plain step.")] = 8,
    share: Annotated[
        list[float] | None, typer.Option(help="A budget, as a share of the plain step's peak; may be repeated.")
    ] = None,
    host_budget: HostBudget = None,
    device: DeviceName = None,
    split: Split = True,
    donate: Donate = None,
    json: Json = None,
    html: Html = None,
    png: Annotated[Path | None, typer.Option(help="Draw the curve into this file; needs the extra plots.")] = None,
    debug: Debug = False,
) -> None:
    """Step time against memory: planned for several budgets, beside what jax and XLA do without a plan."""
    with exit_on_error(debug):
        check_writable(json, html)
        check_extra(png, "--png", "matplotlib", "plots", json, html)
        with progress() as stage:
            function, args = plain_step(step, stage)
            limits = {"host_budget": host_budget, "device": device, "split": split_way(split)}
            found = api.curve(function, args, points=share or points, **limits, donate_argnums=argnums(donate, args))
        if png is not None:
            save(png, found.save_png)
        print_result(found, json, html)


def largest(
    step: FactoryArgument,
    vary: Annotated[
        list[str],
        typer.Option(metavar="NAME=LOW:HIGH[:STEP]", help="An integer argument of the factory, and its range."),
    ],
    budget: Budget = None,
    host_budget: HostBudget = None,
    device: DeviceName = None,
    split: Split = True,
    donate: Donate = None,
    json: Json = None,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """The biggest size whose step fits."""
    with exit_on_error(debug):
        check_writable(json, html)
        if len(vary) > 1:  # of which typer would take the last
            raise typer.BadParameter("one size at a time; search it for each value of the other.", param_hint="--vary")
        name, low, high, by = _range(vary[0])
        reference = factory.parse(step)

        def make(size: int) -> tuple[Any, tuple[Any, ...]]:
            return factory.load(reference.with_arguments({name: size}))

        with progress():
            _, args = make(low)
            found = api.frontier(
                make, name=name, low=low, high=high, step=by, budget=budget, host_budget=host_budget, device=device,
                donate_argnums=argnums(donate, args), split=split_way(split),
            )  # fmt: skip
        print_result(found, json, html)


def _range(text: str) -> tuple[str, int, int, int]:
    """`batch=1:64` or `image=224:1024:32`."""
    name, _, limits = text.partition("=")
    bounds = limits.split(":")
    if not name.isidentifier() or len(bounds) not in (2, 3) or not all(bound.strip().isdecimal() for bound in bounds):
        raise typer.BadParameter(f"{text!r} is no range. Write batch=1:64 or image=224:1024:32.", param_hint="--vary")
    low, high, *step = map(int, bounds)
    return name, low, high, step[0] if step else 1


def load(step: str, stage: Stages) -> tuple[Any, tuple[Any, ...]]:
    reference = factory.parse(step)
    stage(f"loading {reference}")
    return factory.load(reference)


def plain_step(step: str, stage: Stages) -> tuple[Any, tuple[Any, ...]]:
    function, args = load(step, stage)
    if hasattr(function, "plan"):
        raise typer.BadParameter("comparing needs the plain step: return it without memplan.jit around it.")
    return function, args
