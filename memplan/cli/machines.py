"""Commands about machines: devices, topologies, and the processes of a run on this machine."""

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from memplan import parallel
from memplan.cli.options import Debug, Html, Json
from memplan.cli.output import check_writable, exit_on_error, print_result, progress, save
from memplan.cli.steps import load_step
from memplan.hardware import catalog, measured
from memplan.hardware.topology import TOPOLOGIES
from memplan.parallel.launch import Launch
from memplan.parallel.launch import launch as launch_processes
from memplan.parallel.meshes import measure_topology
from memplan.report.hardware import Calibration, Devices, Topologies
from memplan.studies.calibrate import calibrate as calibrate_device
from memplan.studies.calibrate import rates_of, with_kernels
from memplan.studies.profile import seconds_of_kernels
from memplan.xla.local import local_device


def devices(json: Json = None, html: Html = None, debug: Debug = False) -> None:
    """List the known devices and host links."""
    with exit_on_error(debug):
        check_writable(json, html)
        print_result(Devices(tuple(catalog.DEVICES.values()), tuple(catalog.LINKS)), json, html)


def calibrate(
    step: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODULE:FACTORY]",
            help=(
                "A function that returns (step, args): its step also runs four times, and plans "
                "use the seconds of its kernels wherever they are known again."
            ),
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the device to this file; --device PATH.json then uses its rates."),
    ] = None,
    json: Json = None,
    debug: Debug = False,
) -> None:
    """Measure what kernels of each class achieve on this machine's device, and its link to the
    host. Takes one to three minutes; the machine should be idle.
    """
    with exit_on_error(debug):
        if out is not None and not measured.is_path(str(out)):
            raise typer.BadParameter(
                f"{out} would not be known as a file: let it end in .json.", param_hint="--out"
            )
        if out is not None and out == json:
            raise typer.BadParameter(f"{out} cannot hold both --out and --json.")
        check_writable(json)
        check_writable(out)
        with progress() as stage:
            plain = load_step(step, stage) if step is not None else None
            measured_device = calibrate_device(stage)
            if plain is not None:
                stage("running the step", None)
                seconds = seconds_of_kernels(plain.function, plain.args)
                measured_device = with_kernels(measured_device, seconds)
        if out is not None:
            save(out, measured_device.save)
        device = measured_device.device
        calibration = Calibration(device, rates_of(device), rates_of(local_device()))
        print_result(calibration, json, None)


def launch(
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- COMMAND...", help="What to start: python train.py ..."),
    ],
    processes: Annotated[
        int,
        typer.Option(
            "-n", "--processes", min=1, help="Number of processes to start on this machine."
        ),
    ],
    devices: Annotated[int | None, typer.Option(min=1, help="CPU devices of each process.")] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of rank 0. Default: a free one.")
    ] = None,
    timeout: Annotated[
        int,
        typer.Option(min=1, help="Seconds for which processes wait for one another at the start."),
    ] = 60,
    restarts: Annotated[int, typer.Option(min=0, help="Number of restarts after a failure.")] = 0,
    grace: Annotated[
        float,
        typer.Option(
            min=0,
            help=(
                "Seconds for the other processes to end after a failure; SIGTERM after half of "
                "them."
            ),
        ),
    ] = 5.0,
    debug: Debug = False,
) -> None:
    """Start the processes of a run on this machine. Exit code: of the first process that failed
    (128 + signal).
    """
    with exit_on_error(debug):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: sys.exit(128 + number))
        run = Launch(tuple(command), processes, devices, port, timeout, restarts, grace)
        raise typer.Exit(launch_processes(run))


def topology(
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the links between the local devices.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the measured topology to this file, for topology=PATH.json."),
    ] = None,
    json: Json = None,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """List the known topologies, or measure the local links (under memplan launch: between
    processes).
    """
    with exit_on_error(debug):
        if out is not None and not measure:
            raise typer.BadParameter("--out needs --measure.", param_hint="--out")
        check_writable(json, html)
        check_writable(out)
        if not measure:
            print_result(Topologies(tuple(TOPOLOGIES.values())), json, html)
            return
        cluster = parallel.initialize()
        with progress() as stage:
            stage("timing all-reduces", None)
            links = measure_topology(parallel.mesh())
        if cluster.process == 0:
            if out is not None:
                save(out, links.save)
            print_result(Topologies((links,)), json, html)
