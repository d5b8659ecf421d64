"""The command `memplan`: plans steps, compares them, measures devices, shows the demo.

Results go to standard output, progress and errors to standard error. Exit codes: 0 the step fits, 1
the step itself or memplan failed, or the step grew, 2 usage, 3 infeasible; of the doctor 0 nothing
to gain, 1 findings; of report-bug 0 the file was written.
"""

from pathlib import Path
from typing import Annotated

import typer

import memplan
from memplan.cli import bug, factory, machines, steps
from memplan.cli.options import Budget, Debug
from memplan.cli.output import exit_on_error, print_line, progress

app = typer.Typer(
    help="jax.jit with a device-memory budget.",
    epilog="Exit codes: 0 fits, 1 the step or memplan failed, or the step grew, 2 usage, "
    "3 infeasible. Of doctor: 0 nothing to gain, 1 findings. Of report-bug: 0 the file was "
    "written.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        print_line(memplan.__version__)
        raise typer.Exit


def demo(
    size: Annotated[
        int | None, typer.Option(min=1, help="Voxels along each side of a volume.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps.")] = None,
    budget: Budget = None,
    data: Annotated[
        Path | None, typer.Option(help="A data set in the Medical Segmentation Decathlon layout.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the files of the demo.")] = None,
    debug: Debug = False,
) -> None:
    """Train a 3D U-Net on small phantoms, or on your own volumes, within a budget."""
    with exit_on_error(debug):
        options = {"size": size, "steps": steps, "budget": budget, "data": data, "out": out}
        main = factory.demo()
        with progress(results=True):
            code = main(**{name: value for name, value in options.items() if value is not None})
        raise typer.Exit(code or 0)


_PLANNING = steps.inspect, steps.doctor, steps.check, steps.compare, steps.curve, steps.largest
for command in (*_PLANNING, bug.report_bug, machines.devices, machines.calibrate, demo):
    app.command()(command)
app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(
    machines.launch
)
app.command()(machines.topology)


def main() -> None:
    """The console script."""
    app(prog_name="memplan")
