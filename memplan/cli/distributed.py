"""Commands about many devices: start the processes of a run, look at the links between devices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memplan import parallel
from memplan.cli.options import Budget, Debug, Donate, FactoryArgument, Html, Json, argnums
from memplan.cli.output import check_writable, exit_on_error, print_result, progress, save
from memplan.cli.steps import plain_step
from memplan.hardware.overheads import Overheads
from memplan.hardware.topology import TOPOLOGIES
from memplan.parallel.launch import Launch
from memplan.parallel.launch import launch as launch_processes
from memplan.parallel.measure import measure_topology
from memplan.report.hardware import Topologies
from memplan.studies import scaling

_USUAL = Overheads()


def launch(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="What to start: python train.py ...")],
    processes: Annotated[int, typer.Option("-n", "--processes", min=1, help="How many to start on this machine.")],
    devices: Annotated[int | None, typer.Option(min=1, help="CPU devices of each process.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Of rank 0. Default: a free one.")] = None,
    timeout: Annotated[int, typer.Option(min=1, help="Seconds that processes wait for one another.")] = 60,
    restarts: Annotated[int, typer.Option(min=0, help="How often to start again after a failure.")] = 0,
    grace: Annotated[float, typer.Option(min=0, help="Seconds for the others to end, half after SIGTERM.")] = 5.0,
    debug: Debug = False,
) -> None:
    """Start the processes of a data-parallel run here. Exit code: of the first that failed, 128 + its signal."""
    with exit_on_error(debug):
        run = Launch(tuple(command), processes, devices, port, timeout, restarts, grace)
        raise typer.Exit(launch_processes(run))


topologies = typer.Typer(invoke_without_command=True, help="Links between devices: known, measured, simulated on.")


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
    with exit_on_error(debug):
        if out is not None and not measure:
            raise typer.BadParameter("only what --measure finds is written.", param_hint="--out")
        check_writable(json, html)
        check_writable(out)
        if not measure:
            print_result(Topologies(tuple(TOPOLOGIES.values())), json, html)
            return
        cluster = parallel.initialize()
        with progress() as stage:
            stage("timing all-reduces", None)
            found = measure_topology(parallel.mesh())
        if cluster.process == 0:
            if out is not None:
                save(out, found.save)
            print_result(Topologies((found,)), json, html)


@topologies.command()
def simulate(
    step: FactoryArgument,
    on: Annotated[str, typer.Option(help="Known topology, with other sizes as 'ddl@16x4', or a measured PATH.json.")],
    device: Annotated[str, typer.Option(help="What each of its devices is (memplan devices).")],
    budget: Budget = None,
    statistics: Annotated[str, typer.Option(help="Of the batch: global, or device (each its own).")] = "global",
    donate: Donate = None,
    spread: Annotated[
        float, typer.Option(help="Of step times between devices: standard deviation over mean, 0.02 for 2 %.")
    ] = _USUAL.spread,
    roofline_share: Annotated[
        float, typer.Option(help="Speed of kernels over that of their roofline; below 1 as measured.")
    ] = _USUAL.roofline_share,
    kernel_launch: Annotated[
        float, typer.Option(help="Seconds from the end of a kernel to the start of the next.")
    ] = _USUAL.kernel_launch_s,
    collective_launch: Annotated[
        float, typer.Option(help="Seconds of a collective before its first byte.")
    ] = _USUAL.collective_launch_s,
    accesses_per_byte: Annotated[
        float, typer.Option(help="Accesses of device memory for each byte sent; kernels get so much less bandwidth.")
    ] = _USUAL.accesses_per_byte,
    input_bytes: Annotated[
        int, typer.Option(help="That each device gets in every step over the outermost links.")
    ] = _USUAL.input_bytes,
    copies_share_links: Annotated[
        bool, typer.Option("--copies-share-links", help="Copies to and from host memory go over the same links.")
    ] = _USUAL.copies_share_links,
    json: Json = None,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Simulate step time on up to 4,096 devices; the factory's batch is that of one device."""
    with exit_on_error(debug):
        check_writable(json, html)
        overheads = Overheads(
            spread, roofline_share, kernel_launch, collective_launch, accesses_per_byte, input_bytes, copies_share_links
        )
        with progress() as stage:
            function, args = plain_step(step, stage)
            limits = {"budget": budget, "donate_argnums": argnums(donate, args), "statistics": statistics}
            found = scaling.simulate(function, args, on, device, overheads=overheads, notify=stage, **limits)
        print_result(found, json, html)
