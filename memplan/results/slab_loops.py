"""Rows of a report: the loops over slabs of a step."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from memplan.compilation.outcome import Outcome
from memplan.planning.slabs.slabs import (
    LoopOverSlabs,
    SlabGraph,
    Slabs,
    device_share,
    slab_rows,
    trips_of,
)
from memplan.program import compat
from memplan.program.trace import InSlabs, Program
from memplan.report.slabs import SlabArray, SlabLoopRow
from memplan.results.infeasible import axis_of
from memplan.results.memory import Origins


def slab_loops(
    outcome: Outcome,
    origins: Origins,
    transfers_of_loops: Mapping[str, tuple[int, int]],
) -> Iterator[SlabLoopRow]:
    """One row per loop over slabs.

    Args:
      transfers_of_loops: loop of the compiled program -> transfers between device and host per
        trip.
    """
    blocks = outcome.planned.result.replay.blocks
    records = outcome.program.in_slabs
    loop_of_scope = {origins.scope(name).rpartition("/")[2]: name for name in transfers_of_loops}
    arrays = _Arrays(outcome.program)
    numbered = (
        (record, number, loop)
        for record in records
        for number, loop in enumerate(record.loops, record.first)
    )
    for record, number, loop in numbered:
        graph = record.graph.graph
        name = loop_of_scope.get(record.scope(number), "")
        copies, kernels = transfers_of_loops.get(name, (0, 0))
        slabs = record.transform.in_level(loop.level)
        yield SlabLoopRow(
            number=number,
            axis=axis_of(record),
            trips=trips_of(record.graph, slabs),
            rows=slabs.rows,
            halo=_halo(record.graph, slabs, loop),
            ops=len(loop.ops),
            reads=tuple(row for value in loop.reads for row in arrays.rows(record, value)),
            writes=tuple(row for value in loop.writes for row in arrays.rows(record, value)),
            sums=len(loop.sums),
            seconds=blocks.get(name),
            source=graph.ops[loop.largest_op(graph)].source,
            copies=copies,
            kernels=kernels,
        )


def _halo(graph: SlabGraph, slabs: Slabs, loop: LoopOverSlabs) -> int:
    """The most rows that a loop reads beside a slab."""
    halos = [0]
    for value in loop.reads:
        low, high = loop.spans[value]
        halos += [-low, high - slab_rows(graph, slabs, value)]
    return max(halos)


class _Arrays:
    """Rows of the arrays that loops over slabs read and write."""

    def __init__(self, program: Program) -> None:
        self._on_host = program.on_host
        # The first values of every graph are the inputs.
        self._inputs = compat.input_names(program.traced.jaxpr) if program.in_slabs else ()

    def rows(self, record: InSlabs, value: int) -> Iterator[SlabArray]:
        """One for each memory that has a part of the array."""
        array = record.graph.graph.values[value]
        is_input = value < len(self._inputs) and not record.transform.inside
        on_host = value in record.transform.on_host or value in self._on_host
        row = SlabArray(
            name=self._inputs[value] if is_input else array.name,
            shape=array.shape,
            dtype=array.dtype,
            nbytes=array.nbytes,
            place="host" if on_host else "device",
        )
        on_device = int(array.nbytes * device_share(record.graph, record.transform, value))
        if on_device:
            yield replace(row, nbytes=on_device, place="device")
        yield replace(row, nbytes=array.nbytes - on_device)
