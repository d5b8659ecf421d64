"""Loops over slabs as rows of a report, with the arrays that each reads and writes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memplan.report.timeline import MemoryKind
from memplan.report.views.table import Table, largest, short_source
from memplan.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class SlabArray:
    """An array that loops read or write in slabs.

    Attributes:
      name: as in the graph.
      shape, dtype: of the full array.
      place: a memory that has it, or a part of it.
      nbytes: that are there.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    place: MemoryKind


@dataclass(frozen=True, slots=True)
class SlabLoopRow:
    """A loop over slabs.

    Attributes:
      number: from 1, in the order of the step; its operations are in a layer `slabs_1`.
      axis: where the axis starts, for example `dimension 1 of float32[1,512,512,96]`.
      trips: number of slabs.
      rows: rows of that array in each slab.
      halo: maximum rows of an array that a trip reads before or after its own slab.
      ops: number of its operations, recomputed ones included.
      reads, writes: arrays that it reads from and writes to memory in slabs.
      sums: number of operations whose results it sums over the slabs.
      seconds: predicted, of all trips; None if the compiled program does not say.
      source: `file:line` of its largest operation, or ''.
      copies, kernels: transfers between device and host per trip of the compiled program, by memcpy
        and by kernels of XLA; kernels delay compute.
    """

    number: int
    axis: str
    trips: int
    rows: int
    halo: int
    ops: int
    reads: tuple[SlabArray, ...]
    writes: tuple[SlabArray, ...]
    sums: int
    seconds: float | None
    source: str
    copies: int = 0
    kernels: int = 0


@dataclass(frozen=True, slots=True)
class Unsplit:
    """An operation on arrays of the axis that cannot run in slabs: it runs unsplit between loops.

    Attributes:
      name: of the operation.
      nbytes: of its operands and results.
      source: `file:line`, or ''.
    """

    name: str
    nbytes: int
    source: str


def loops_table(loops: Sequence[SlabLoopRow]) -> Table:
    """One row per loop; empty without loops."""
    rows = tuple(
        (
            str(loop.number),
            f"{loop.trips} of {loop.rows}",
            str(loop.halo),
            str(loop.ops),
            _arrays(loop.reads),
            _arrays(loop.writes),
            str(loop.sums),
            f"{loop.copies} of {loop.copies + loop.kernels}"
            if loop.copies or loop.kernels
            else "-",
            format_seconds(loop.seconds),
            short_source(loop.source),
        )
        for loop in loops
    )
    axes = "; ".join(dict.fromkeys(loop.axis for loop in loops))
    columns = (
        *(">loop", ">slabs", ">halo", ">ops", "reads", "writes"),
        *(">sums", ">by memcpy", ">takes", "source"),
    )
    return Table(f"Loops over slabs: {axes}", columns, rows)


def unsplit_table(ops: Sequence[Unsplit], limit: int) -> Table:
    """Operations that were not split, largest first."""
    largest_ops = sorted(ops, key=lambda op: -op.nbytes)[:limit]
    rows = tuple((format_bytes(op.nbytes), op.name, short_source(op.source)) for op in largest_ops)
    title = largest("Not in slabs", len(rows), len(ops))
    return Table(title, (">bytes", "operation", "source"), rows)


def _arrays(arrays: Iterable[SlabArray]) -> str:
    """Bytes as `12.0 MiB` on the device, or `12.0 MiB, 3.00 GiB host`; a dash for none."""
    nbytes = {"device": 0, "host": 0}
    for array in arrays:
        nbytes[array.place] += array.nbytes
    parts = []
    if nbytes["device"]:
        parts.append(format_bytes(nbytes["device"]))
    if nbytes["host"]:
        parts.append(f"{format_bytes(nbytes['host'])} host")
    return ", ".join(parts) or "-"
