"""What of an outcome runs slab by slab, as report rows, and what could not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from memplan.compilation.outcome import Outcome
from memplan.compilation.scheduled import ScheduledModule
from memplan.hardware.roofline import copy_seconds
from memplan.outcome.timeline import Origins
from memplan.planning.graph import Graph, Op
from memplan.planning.slabs.slabs import SlabLoop, Slabs, slab_rows, trips_of
from memplan.program import compat
from memplan.program.axes import shape_of
from memplan.program.extract import variables
from memplan.program.trace import InSlabs, Program
from memplan.program.transforms.slabs import axis_at
from memplan.report.model import Decision
from memplan.report.slabs import SlabArray, Unsplit
from memplan.report.slabs import SlabLoop as LoopRow
from memplan.report.views.table import shape
from memplan.xla.module import Instruction


def loop_rows(outcome: Outcome, origins: Origins, moved: Mapping[str, tuple[int, int]]) -> Iterator[LoopRow]:
    """One for each loop over slabs.

    Args:
      moved: loop -> transfers between device and host in a trip (`transfers`).
    """
    records, result = outcome.program.in_slabs, outcome.planned.result
    compiled = {origins.scope(loop.name): loop for loop in loops_of(result)} if len(records) == 1 else {}
    numbered = [(one, loop, number) for one in records for number, loop in enumerate(one.loops, 1)]
    for position, (one, loop, number) in enumerate(numbered, 1):
        made = compiled.get(one.scope(number))
        copies, kernels = moved[made.name] if made else (0, 0)
        seconds = result.replay.blocks.get(made.name) if made else None
        yield _loop_row(one, loop, position, outcome.program, seconds, copies, kernels)


def split_decisions(outcome: Outcome) -> Iterator[Decision]:
    """What happens to every array that is made slab by slab and written down."""
    for one in outcome.program.in_slabs:
        known, copies = one.graph.graph.values, _copies(one)
        for loop in one.loops:
            for value in loop.writes:
                array, on_host = known[value], value in one.slabs.on_host
                name = f"{array.name} in {trips_of(one.graph, one.slabs)} slabs{' on the host' if on_host else ''}"
                seconds = copies[value] * copy_seconds(array.nbytes, outcome.target.device)
                source = _source_of(one.graph.graph, value)
                yield Decision(name, array.shape, array.dtype, array.nbytes, source, "split", seconds)


def unsplit(records: Iterable[InSlabs], most: int) -> tuple[Unsplit, ...]:
    """The largest operations that read arrays of an axis and could not be split along it; a line of code once."""
    found: dict[tuple[str, str], Unsplit] = {}
    for one in records:
        graph = one.graph.graph
        for op in sorted((graph.ops[number] for number in one.blocked), key=lambda op: -_touched(graph, op)):
            found.setdefault((op.name, op.source), Unsplit(op.name, _touched(graph, op), op.source))
    return tuple(sorted(found.values(), key=lambda row: -row.nbytes)[:most])


def longest_axis(program: Program) -> InSlabs | None:
    """The axis through a step's largest array that most bytes lie on, with nothing in slabs; None without an array."""
    known = variables(program.jaxpr)
    value = max(range(len(known)), key=lambda number: compat.nbytes_of(known[number].aval), default=None)
    dims = [dim for dim, size in enumerate(shape_of(known[value])) if size > 1] if value is not None else []
    if value is None or not dims:
        return None
    axes = {dim: axis_at(program.jaxpr, value, dim) for dim in dims}
    dim = max(dims, key=lambda dim: sum(map(axes[dim].graph.graph.nbytes, axes[dim].graph.sizes)))
    axis, none = axes[dim], frozenset[int]()
    begins = variables(axis.closed).index(known[value])
    return InSlabs(Slabs(value, dim, 1, none, none, none), axis.graph, begins, (), axis.along.blocked)


def axis_of(one: InSlabs) -> str:
    """Where the axis begins, in words."""
    array = one.graph.graph.values[one.begins]
    return f"dimension {one.slabs.dim} of {shape(array.shape, array.dtype)}"


def loops_of(result: ScheduledModule) -> list[Instruction]:
    """The loops in a module's entry."""
    return [op for op in result.module.entry.ops.values() if op.opcode == "while"]


def _loop_row(
    one: InSlabs, loop: SlabLoop, number: int, program: Program, seconds: float | None, copies: int, kernels: int
) -> LoopRow:
    graph = one.graph.graph
    largest = max((graph.ops[op] for op in loop.ops), key=lambda op: _touched(graph, op))
    return LoopRow(
        number=number,
        axis=axis_of(one),
        trips=trips_of(one.graph, one.slabs),
        rows=one.slabs.rows,
        halo=max((_halo(one, loop, value) for value in loop.reads), default=0),
        ops=len(loop.ops),
        reads=tuple(_array(one, value, program) for value in loop.reads),
        writes=tuple(_array(one, value, program) for value in loop.writes),
        sums=len(loop.sums),
        seconds=seconds,
        source=largest.source,
        copies=copies,
        kernels=kernels,
    )


def _array(one: InSlabs, value: int, program: Program) -> SlabArray:
    """The first values are the inputs of the step."""
    known, inputs = one.graph.graph.values[value], compat.input_names(program.per_device)
    name = inputs[value] if value < len(inputs) else known.name
    on_host = value in one.slabs.on_host or value in program.on_host
    return SlabArray(name, known.shape, known.dtype, known.nbytes, "host" if on_host else "device")


def _halo(one: InSlabs, loop: SlabLoop, value: int) -> int:
    low, high = loop.spans[value]
    return max(-low, high - slab_rows(one.graph, one.slabs, value), 0)


def _copies(one: InSlabs) -> Counter[int]:
    """How often each value on the host is copied: when it is written, and by every loop that reads it."""
    return Counter(value for loop in one.loops for value in (*loop.writes, *loop.reads) if value in one.slabs.on_host)


def _source_of(graph: Graph, value: int) -> str:
    made = graph.producer[value]
    return graph.ops[made].source if made is not None else ""


def _touched(graph: Graph, op: Op) -> int:
    return sum(map(graph.nbytes, {*op.inputs, *op.outputs}))
