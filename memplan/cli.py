"""The command `memplan`: plan a step, compare ways to run it, draw its curve, list and measure devices, show the demo.

Results go to standard output, progress and errors to standard error. Exit codes: 0 the step fits, 1 the step itself
or memplan failed, 2 usage, 3 infeasible.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from memplan import api, calibrating, factory, parallel, scaling
from memplan.errors import InfeasibleBudgetError, MemplanError
from memplan.parallel import launch as launching
from memplan.parallel.measure import measured
from memplan.planning import devices as hardware
from memplan.planning import spec
from memplan.planning.topology import TOPOLOGIES
from memplan.report.catalogue import Catalogue, Entry
from memplan.report.progress import Stages
from memplan.report.told import Told

FAILED, USAGE, INFEASIBLE = 1, 2, 3
STDOUT = Path("-")

app = typer.Typer(
    help="jax.jit with a device-memory budget.",
    epilog="Exit codes: 0 fits, 1 the step or memplan failed, 2 usage, 3 infeasible.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

FactoryArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FACTORY",
        help="A function that returns (step, args); with literal arguments: 'models.train:unet3d_step(size=64)'.",
    ),
]
Budget = Annotated[str | None, typer.Option(help="Device memory: bytes, '16GiB', '80%'. Default: what the device has.")]
HostBudget = Annotated[str | None, typer.Option(help="Host memory for offloaded values, written likewise.")]
DeviceName = Annotated[
    str | None,
    typer.Option("--device", help="Plan for this device: a name (see `memplan devices`) or a measured PATH.json."),
]
Planner = Annotated[str | None, typer.Option(help="Who makes the plan.")]
Verify = Annotated[str, typer.Option(help="compile, numbers (also runs both steps and compares), or none.")]
Donate = Annotated[
    str | None,
    typer.Option(
        metavar="0,1|none",
        help="Arguments whose buffers the step may overwrite. Default: the first of several, as in step(state, batch).",
    ),
]
Json = Annotated[Path | None, typer.Option("--json", help="Write JSON to this file; '-' for standard output alone.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write one self-contained page to this file.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.command()
def inspect(
    step: FactoryArgument,
    budget: Budget = None,
    host_budget: HostBudget = None,
    device: DeviceName = None,
    planner: Planner = None,
    verify: Verify = "compile",
    donate: Donate = None,
    json: Json = None,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Plan one step, compile it and report what it takes; runs nothing unless --verify numbers."""
    with _errors_told(debug):
        _check_writable(json, html)
        options: dict[str, Any] = {"budget": budget, "host_budget": host_budget, "device": device, "planner": planner}
        with _working() as stage:
            function, args = _load(step, stage)
            if not hasattr(function, "plan"):
                options["verify"] = _verify(verify)
                function = api.jit(function, **options, donate_argnums=_donated(donate, args))
            elif donate is not None or verify != "compile" or any(options.values()):
                raise typer.BadParameter(
                    "the factory returns a step that memplan.jit already made, with options of its own. Leave out "
                    "--budget, --host-budget, --device, --planner, --verify and --donate, or return the plain step."
                )
            report = function.plan(*args).report
        _tell(report, json, html)


@app.command()
def compare(
    step: FactoryArgument,
    budget: Budget = None,
    host_budget: HostBudget = None,
    device: DeviceName = None,
    donate: Donate = None,
    json: Json = None,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Compile one step in several ways, memplan's among them, and say which fit. Exit code 3 where none does."""
    with _errors_told(debug):
        _check_writable(json, html)
        with _working() as stage:
            function, args = _plain_step(step, stage)
            donated = _donated(donate, args)
            limits = {"budget": budget, "host_budget": host_budget, "device": device}
            comparison = api.compare(function, args, **limits, donate_argnums=donated)
        _tell(comparison, json, html)
        if not comparison.any_fits:
            raise typer.Exit(INFEASIBLE)


@app.command()
def curve(
    step: FactoryArgument,
    points: Annotated[int, typer.Option(min=1, help="Budgets, from the floor up to the plain step.")] = 8,
    share: Annotated[
        list[float] | None, typer.Option(help="A budget, as a share of the plain step's peak; may be repeated.")
    ] = None,
    host_budget: HostBudget = None,
    device: DeviceName = None,
    planner: Planner = None,
    donate: Donate = None,
    json: Json = None,
    html: Html = None,
    png: Annotated[Path | None, typer.Option(help="Draw the curve into this file; needs the extra plots.")] = None,
    debug: Debug = False,
) -> None:
    """Step time against memory: planned for several budgets, beside what jax and XLA do without a plan."""
    with _errors_told(debug):
        _check_writable(json, html)
        _check_writable(png)
        if png is not None and png in (STDOUT, json, html):
            raise typer.BadParameter("name a file of its own for the picture.", param_hint="--png")
        if png is not None and importlib.util.find_spec("matplotlib") is None:
            raise typer.BadParameter("it needs matplotlib: pip install 'memplan[plots]'.", param_hint="--png")
        with _working() as stage:
            function, args = _plain_step(step, stage)
            limits = {"host_budget": host_budget, "device": device, "planner": planner}
            found = api.curve(function, args, points=share or points, **limits, donate_argnums=_donated(donate, args))
        if png is not None:
            _save(png, found.save_png)
        _tell(found, json, html)


@app.command()
def devices(json: Json = None, html: Html = None, debug: Debug = False) -> None:
    """List the devices that can be planned for, and the host links they can be put behind."""
    with _errors_told(debug):
        _check_writable(json, html)
        _tell(_catalogue(), json, html)


@app.command()
def calibrate(
    out: Annotated[
        Path | None, typer.Option(help="Write the device here; --device PATH.json then plans with these rates.")
    ] = None,
    json: Json = None,
    debug: Debug = False,
) -> None:
    """Measure this machine's device and the way to its host: half a minute, best on a machine that is idle."""
    with _errors_told(debug):
        if out is not None and not spec.is_path(str(out)):
            raise typer.BadParameter(f"{out} would not be known as a file: let it end in .json.", param_hint="--out")
        if out is not None and out == json:
            raise typer.BadParameter(f"{out} cannot hold both --out and --json.")
        _check_writable(json)
        _check_writable(out)
        with _working() as stage:
            found = calibrating.calibrate(stage)
        if out is not None:
            _save(out, found.save)
        _tell(calibrating.told(found), json, None)


@app.command()
def demo(
    size: Annotated[int | None, typer.Option(min=1, help="Voxels along each side of a volume.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps.")] = None,
    budget: Budget = None,
    data: Annotated[Path | None, typer.Option(help="A data set in the Medical Segmentation Decathlon layout.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for what the demo writes.")] = None,
    debug: Debug = False,
) -> None:
    """Train a 3D U-Net on small phantoms, or on your own volumes, within a budget."""
    with _errors_told(debug):
        options = {"size": size, "steps": steps, "budget": budget, "data": data, "out": out}
        main = factory.demo()
        with _working(results=True):
            code = main(**{name: value for name, value in options.items() if value is not None})
        raise typer.Exit(code or 0)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def launch(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="What to start: python train.py ...")],
    processes: Annotated[int, typer.Option("-n", "--processes", min=1, help="How many to start on this machine.")],
    devices: Annotated[int | None, typer.Option(min=1, help="CPU devices of each process.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Of rank 0. Default: a free one.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that processes wait for one another.")] = 60.0,
    restarts: Annotated[int, typer.Option(min=0, help="How often to start again after a failure.")] = 0,
    min_processes: Annotated[
        int | None, typer.Option(min=1, help="Start again without those that failed, down to this many.")
    ] = None,
    grace: Annotated[float, typer.Option(min=0, help="Seconds for the others to end after a failure.")] = 10.0,
    debug: Debug = False,
) -> None:
    """Start the processes of a data-parallel run here. Exit code: of the first that failed, 128 + its signal."""
    with _errors_told(debug):
        wanted = launching.Launch(tuple(command), processes, devices, port, timeout, restarts, min_processes, grace)
        raise typer.Exit(launching.launch(wanted))


topologies = typer.Typer(invoke_without_command=True, help="Links between devices: known, measured, simulated on.")
app.add_typer(topologies, name="topology")


@topologies.callback()
def topology(
    context: typer.Context,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time the links between the devices that are here.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write what was measured here, for topology=PATH.json.")] = None,
    json: Json = None,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """List the known topologies, or measure the links that are here (under memplan launch: between processes)."""
    if context.invoked_subcommand:
        return
    with _errors_told(debug):
        if out is not None and not measure:
            raise typer.BadParameter("only what --measure finds is written.", param_hint="--out")
        _check_writable(json, html)
        _check_writable(out)
        if not measure:
            _tell(scaling.told(tuple(TOPOLOGIES.values())), json, html)
            return
        cluster = parallel.initialize()
        with _working() as stage:
            stage("timing all-reduces", None)
            found = measured(parallel.mesh())
        if cluster.process == 0:
            if out is not None:
                _save(out, found.save)
            _tell(scaling.told((found,)), json, html)


@topologies.command()
def simulate(
    step: FactoryArgument,
    on: Annotated[str, typer.Option(help="Known topology, with other sizes as 'ddl@16x4', or a measured PATH.json.")],
    device: Annotated[str, typer.Option(help="What each of its devices is (memplan devices).")],
    budget: Budget = None,
    statistics: Annotated[str, typer.Option(help="Of the batch: global, or device (each its own).")] = "global",
    donate: Donate = None,
    json: Json = None,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Simulate step time on up to 4,096 devices; the factory's batch is that of one device."""
    with _errors_told(debug):
        _check_writable(json, html)
        with _working() as stage:
            function, args = _plain_step(step, stage)
            limits = {"budget": budget, "donate_argnums": _donated(donate, args), "statistics": statistics}
            found = scaling.simulate(function, args, on, device, notify=stage, **limits)
        _tell(found, json, html)


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        try:
            _print_line(importlib.metadata.version("memplan"))
        except importlib.metadata.PackageNotFoundError:
            _print_line("not installed, run from its source")
        raise typer.Exit


def main() -> None:
    """The console script."""
    app(prog_name="memplan")


@contextlib.contextmanager
def _errors_told(debug: bool) -> Iterator[None]:
    """One message on standard error and the exit code that goes with the error."""
    try:
        yield
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:
        if debug:
            traceback.print_exc()
        message, code = _explained(error)
        Console(stderr=True, highlight=False).print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
        raise typer.Exit(code) from None


def _explained(error: Exception) -> tuple[str, int]:
    if isinstance(error, InfeasibleBudgetError):
        return str(error), INFEASIBLE
    if isinstance(error, MemplanError):
        return str(error), USAGE
    return f"{type(error).__name__}: {error}\nRun again with --debug for the traceback.", FAILED


@contextlib.contextmanager
def _working(*, results: bool = False) -> Iterator[Stages]:
    """Progress on standard error. Unless it prints results, what the user's code prints goes there too."""
    with contextlib.ExitStack() as stack:
        stage = stack.enter_context(Stages(Console(stderr=True), lines=results))
        stack.enter_context(api.progress(stage))
        if not results:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield stage


def _load(step: str, stage: Stages) -> tuple[Any, tuple[Any, ...]]:
    reference = factory.parse(step)
    stage(f"loading {reference}")
    return factory.load(reference)


def _plain_step(step: str, stage: Stages) -> tuple[Any, tuple[Any, ...]]:
    function, args = _load(step, stage)
    if hasattr(function, "plan"):
        raise typer.BadParameter("comparing needs the plain step: return it without memplan.jit around it.")
    return function, args


def _verify(verify: str) -> str | None:
    if verify not in ("compile", "numbers", "none"):
        raise typer.BadParameter(f"{verify!r} is none of compile, numbers, none.", param_hint="--verify")
    return None if verify == "none" else verify


def _donated(donate: str | None, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Positions to donate. By default the first of several: the training state, which a step replaces."""
    if donate is None:
        return (0,) if len(args) > 1 else ()
    if donate == "none":
        return ()
    positions = donate.split(",")
    if not all(position.strip().isdecimal() and int(position) < len(args) for position in positions):
        raise typer.BadParameter(
            f"{donate!r} are not positions among {len(args)} arguments. Write 0, 0,1 or none.", param_hint="--donate"
        )
    return tuple(int(position) for position in positions)


def _check_writable(json: Path | None, html: Path | None = None) -> None:
    """Refuse before minutes of work what could not be written after it."""
    if html == STDOUT:
        raise typer.BadParameter("only JSON can go to standard output: name a file for the page.", param_hint="--html")
    if json is not None and json == html:
        raise typer.BadParameter(f"{json} cannot hold both --json and --html.")
    for path in (json, html):
        if path is None or path == STDOUT:
            continue
        folder = path.parent
        if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            reason = "it is a folder" if path.is_dir() else f"{folder} is not a folder that may be written to"
            raise typer.BadParameter(f"{path} cannot be written: {reason}.")


def _tell(result: Told, json: Path | None, html: Path | None) -> None:
    """Write what was asked for, and the tables unless standard output is for JSON alone."""
    if json == STDOUT:
        _print_line(result.to_json())
    elif json is not None:
        _save(json, result.save_json)
    if html is not None:
        _save(html, result.save_html)
    if json != STDOUT:
        console = Console()
        if console.is_terminal:
            console.print(result)
        else:  # a file or a pipe has no width of its own
            _print_line(str(result))


def _save(path: Path, write: Callable[[Path], None]) -> None:
    try:
        write(path)
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written: {error.strerror or error}.") from error
    Console(stderr=True).print(Text(f"memplan: wrote {path}"), soft_wrap=True)


def _print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def _catalogue() -> Catalogue:
    listed = [
        Entry(
            name=device.name,
            description=device.description,
            memory_bytes=device.memory_bytes,
            memory_bandwidth=device.memory_bandwidth,
            float32_flops=device.flops["float32"],
            bfloat16_flops=device.flops["bfloat16"],
            link=device.link.name,
            link_bandwidth=device.link.bandwidth,
            sources=device.sources,
        )
        for device in hardware.DEVICES.values()
    ]
    return Catalogue(tuple(listed), tuple(hardware.LINKS))
