"""Loops over slabs as report rows: which arrays each reads, computes and writes that are never whole on the device."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memplan.report.timeline import Place
from memplan.report.views.table import Table, largest, short_source
from memplan.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class SlabArray:
    """An array that loops read or write in slabs.

    Attributes:
      name: as in the graph.
      shape, dtype, nbytes: of the whole array.
      place: its memory.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    place: Place


@dataclass(frozen=True, slots=True)
class SlabLoop:
    """A loop over slabs.

    Attributes:
      number: from 1, in the order of the step; its operations are in a layer `slabs_1`.
      axis: where the axis begins, for example `dimension 1 of float32[1,512,512,96]`.
      trips: number of slabs.
      rows: rows of that array in each slab.
      halo: the most rows of an array that a trip reads before or after its own slab.
      ops: number of operations in it, recomputed ones included.
      reads, writes: arrays that it reads from and writes to memory in slabs.
      sums: number of operations whose results it sums over the slabs.
      seconds: predicted, of all trips; None if the compiled program does not tell.
      source: `file:line` of its largest operation, or ''.
      copies, kernels: transfers between device and host per trip of the compiled program, by memcpy and by kernels of
        XLA; the latter delay computation.
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
    """An operation that reads arrays of the axis but cannot run in slabs: it runs whole between loops.

    Attributes:
      name: of the operation.
      nbytes: of its operands and results.
      source: `file:line`, or ''.
    """

    name: str
    nbytes: int
    source: str


def loops_table(loops: Sequence[SlabLoop]) -> Table:
    """One row per loop; empty without loops."""
    rows = tuple(
        (
            str(one.number),
            f"{one.trips} of {one.rows}",
            str(one.halo),
            str(one.ops),
            _arrays(one.reads),
            _arrays(one.writes),
            str(one.sums),
            f"{one.copies} of {one.copies + one.kernels}" if one.copies or one.kernels else "-",
            format_seconds(one.seconds),
            short_source(one.source),
        )
        for one in loops
    )
    axes = "; ".join(dict.fromkeys(one.axis for one in loops))
    columns = (">loop", ">slabs", ">halo", ">ops", "reads", "writes", ">sums", ">by memcpy", ">takes", "source")
    return Table(f"Loops over slabs: {axes}", columns, rows)


def unsplit_table(ops: Sequence[Unsplit], limit: int) -> Table:
    """Operations that were not split, largest first."""
    shown = sorted(ops, key=lambda one: -one.nbytes)[:limit]
    rows = tuple((format_bytes(one.nbytes), one.name, short_source(one.source)) for one in shown)
    return Table(largest("Not in slabs", len(rows), len(ops)), (">bytes", "operation", "source"), rows)


def _arrays(arrays: Iterable[SlabArray]) -> str:
    """Bytes as `12.0 MiB` on the device, or `12.0 MiB, 3.00 GiB host`; a dash for none."""
    sums = {place: sum(one.nbytes for one in arrays if one.place == place) for place in ("device", "host")}
    parts = [f"{format_bytes(nbytes)}{' host' * (place == 'host')}" for place, nbytes in sums.items() if nbytes]
    return ", ".join(parts) or "-"
