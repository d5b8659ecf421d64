"""Predicted against compiled memory: where they differ, and what stands at the compiled peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memplan.planning.graph import Graph
from memplan.program.hlo import Schedule
from memplan.xla.target import Executable


@dataclass(frozen=True)
class Standing:
    """A buffer that is alive at the compiled peak.

    Attributes:
      name: the value of the graph it belongs to, or the compiler's own name.
      nbytes: bytes.
      source: `file:line`, or ''.
      value: value id, -1 where it is none.
    """

    name: str
    nbytes: int
    source: str
    value: int


def excess(predicted: Sequence[int], ops: Sequence[int], measured: Mapping[int, int]) -> dict[int, int]:
    """Bytes that segments need beyond their prediction, by the operation at the predicted peak of the segment.

    Args:
      predicted: device bytes per segment; ops: operation at the peak of each segment.
      measured: device bytes by segment number, as far as the compiler tells.
    """
    found: dict[int, int] = {}
    for segment, nbytes in measured.items():
        if segment < len(predicted) and nbytes > predicted[segment]:
            op = ops[segment]
            found[op] = max(found.get(op, 0), nbytes - predicted[segment])
    return found


def standing_at_peak(executable: Executable, graph: Graph, most: int = 30) -> tuple[Standing, ...]:
    """The largest buffers alive at the compiled peak, mapped back to values; () where the compiler tells nothing."""
    schedule = executable.schedule
    if schedule is None:
        return ()
    arguments = [Standing(graph.values[value].name, graph.nbytes(value), "argument", value) for value in graph.inputs]
    buffers = []
    for buffer in schedule.alive(schedule.peak_step):
        mark = schedule.mark(buffer.name)
        if mark is None:
            path = schedule.paths.get(buffer.name.partition("{")[0], "")
            buffers.append(Standing(path or buffer.name, buffer.nbytes, "", -1))
            continue
        value = _value_of(graph, schedule, mark, buffer.nbytes)
        op = graph.ops[graph.producer[value] or 0]
        buffers.append(Standing(graph.values[value].name, buffer.nbytes, op.source or op.scope, value))
    return tuple(sorted([*arguments, *buffers], key=lambda row: -row.nbytes)[:most])


def _value_of(graph: Graph, schedule: Schedule, mark: tuple[int, int], nbytes: int) -> int:
    """The value in a buffer: of the operation it is marked with, or of one fused with that, where the bytes agree.

    A fusion of several results carries the mark of one of them.
    """
    segment, marked = mark
    own = graph.ops[marked].outputs
    fused = sorted({op for number, op in schedule.marks.values() if number == segment}, key=lambda op: abs(op - marked))
    others = (value for op in fused for value in graph.ops[op].outputs)
    exact = next((value for value in (*own, *others) if graph.nbytes(value) == nbytes), None)
    return min(own, key=lambda value: abs(graph.nbytes(value) - nbytes)) if exact is None else exact
