"""Arguments and options that several commands share, and what their text means."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

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
Verify = Annotated[str, typer.Option(help="compile, numbers (also runs both steps and compares), or none.")]
Split = Annotated[
    bool, typer.Option("--split/--no-split", help="Run slab by slab what does not fit as it is, or leave all whole.")
]
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


def verify_level(verify: str) -> str | None:
    """As `memplan.jit` takes it."""
    if verify not in ("compile", "numbers", "none"):
        raise typer.BadParameter(f"{verify!r} is none of compile, numbers, none.", param_hint="--verify")
    return None if verify == "none" else verify


def split_way(split: bool) -> str | bool:
    """As `memplan.jit` takes it."""
    return "auto" if split else False


def argnums(donate: str | None, args: tuple[Any, ...]) -> tuple[int, ...]:
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
