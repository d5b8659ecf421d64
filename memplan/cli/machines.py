"""Commands about devices: the known ones, and the one that is here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memplan.cli.options import Debug, Html, Json
from memplan.cli.output import check_writable, errors_told, save, tell, working
from memplan.hardware import catalog as hardware
from memplan.hardware import measured
from memplan.report.catalogue import Catalogue, Entry
from memplan.studies.calibrate import calibrate as calibrate_device
from memplan.studies.calibrate import told


def devices(json: Json = None, html: Html = None, debug: Debug = False) -> None:
    """List the devices that can be planned for, and the host links they can be put behind."""
    with errors_told(debug):
        check_writable(json, html)
        tell(catalogue(), json, html)


def calibrate(
    out: Annotated[
        Path | None, typer.Option(help="Write the device here; --device PATH.json then plans with these rates.")
    ] = None,
    json: Json = None,
    debug: Debug = False,
) -> None:
    """Measure this machine's device and the way to its host: half a minute, best on a machine that is idle."""
    with errors_told(debug):
        if out is not None and not measured.is_path(str(out)):
            raise typer.BadParameter(f"{out} would not be known as a file: let it end in .json.", param_hint="--out")
        if out is not None and out == json:
            raise typer.BadParameter(f"{out} cannot hold both --out and --json.")
        check_writable(json)
        check_writable(out)
        with working() as stage:
            found = calibrate_device(stage)
        if out is not None:
            save(out, found.save)
        tell(told(found), json, None)


def catalogue() -> Catalogue:
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
