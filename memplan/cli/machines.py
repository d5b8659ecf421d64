"""Commands about devices: the known ones, and the one that is here."""

from pathlib import Path
from typing import Annotated

import typer

from memplan.cli.options import Debug, Html, Json
from memplan.cli.output import check_writable, exit_on_error, print_result, progress, save
from memplan.hardware import catalog, measured
from memplan.report.hardware import Calibration, Devices
from memplan.studies.calibrate import calibrate as calibrate_device
from memplan.studies.calibrate import rates_of
from memplan.xla.local import local_device


def devices(json: Json = None, html: Html = None, debug: Debug = False) -> None:
    """List the known devices and host links."""
    with exit_on_error(debug):
        check_writable(json, html)
        print_result(Devices(tuple(catalog.DEVICES.values()), tuple(catalog.LINKS)), json, html)


def calibrate(
    out: Annotated[
        Path | None, typer.Option(help="Write the device to this file; --device PATH.json then uses its rates.")
    ] = None,
    json: Json = None,
    debug: Debug = False,
) -> None:
    """Measure this machine's device and its link to the host. Takes half a minute; the machine should be idle."""
    with exit_on_error(debug):
        if out is not None and not measured.is_path(str(out)):
            raise typer.BadParameter(f"{out} would not be known as a file: let it end in .json.", param_hint="--out")
        if out is not None and out == json:
            raise typer.BadParameter(f"{out} cannot hold both --out and --json.")
        check_writable(json)
        check_writable(out)
        with progress() as stage:
            found = calibrate_device(stage)
        if out is not None:
            save(out, found.save)
        print_result(Calibration(found.device, rates_of(found.device), rates_of(local_device())), json, None)
