"""Programs with an axis, written down by name, and random ones."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from hypothesis import strategies as st

from memplan.planning.graph import ALIGNED, Fusion, Graph, Op, Rows, Value
from memplan.planning.slabs.slabs import AlongOp, LoopOverSlabs, SlabGraph, Slabs, arrange
from tests.planning.unit import UNIT

HALO, POOL, UPSAMPLE = Rows(1, 1, 1, 3), Rows(2, 1, 0, 2), Rows(1, 2, 1, 2)
SOLVABLE = replace(UNIT, memory_bandwidth=math.inf)
"""Kernels take a second per FLOP, copies a second per byte, and nothing else anything."""


@dataclass(frozen=True)
class NamedOp:
    """An op with one result, of its name.

    Attributes:
      reads: values that it reads by slabs, with their rows.
      whole: values that it reads whole.
      on_axis: may it run in slabs?
      shape: by default one that no value with other bytes has.
    """

    reads: Mapping[str, Rows]
    whole: Sequence[str] = ()
    rows: int = 8
    scale: Fraction = Fraction(1)
    nbytes: int = 8
    seconds: float = 1.0
    reduces: bool = False
    carries: bool = False
    on_axis: bool = True
    fusion: Fusion = "kernel"
    shape: tuple[int, ...] | None = None

    @property
    def dims(self) -> tuple[int, ...]:
        return (self.nbytes,) if self.shape is None else self.shape


@dataclass(frozen=True)
class NamedGraph:
    """A graph, and numbers by name."""

    graph: SlabGraph
    values: Mapping[str, int]
    ops: Mapping[str, int]

    def slabs(
        self, rows: int, ops: Sequence[str] | None = None, stored: Sequence[str] = ()
    ) -> Slabs:
        """In loops: ops by name, or all that may be; nothing on the host."""
        numbers = self.graph.along if ops is None else map(self.ops.__getitem__, ops)
        values = map(self.values.__getitem__, stored)
        return Slabs(0, 0, rows, frozenset(numbers), frozenset(values), frozenset())

    def on_host(self, slabs: Slabs, *names: str) -> Slabs:
        return replace(slabs, on_host=frozenset(map(self.values.__getitem__, names)))

    def named(self, numbers: Any) -> set[str]:
        return {name for name, number in self.values.items() if number in numbers}

    def arranged(self, slabs: Slabs) -> list[str | tuple[Any, ...]]:
        """Ops by name; loops as (ops, reads, writes, sums, spans) by name."""
        parts = arrange(self.graph, slabs)
        return [self._loop(p) if isinstance(p, LoopOverSlabs) else self._op(p) for p in parts]

    def _op(self, number: int) -> str:
        return next(name for name, op in self.ops.items() if op == number)

    def _loop(self, loop: LoopOverSlabs) -> tuple[Any, ...]:
        spans = {
            name: loop.spans[value] for name, value in self.values.items() if value in loop.spans
        }
        ops = [*map(self._op, loop.ops)]
        sums = {*map(self._op, loop.sums)}
        return ops, self.named(loop.reads), self.named(loop.writes), sums, spans


def named_graph(
    inputs: Mapping[str, int],
    ops: Mapping[str, NamedOp],
    outputs: Sequence[str],
) -> NamedGraph:
    """A graph whose inputs, on the axis, have so many rows."""
    values = {name: number for number, name in enumerate([*inputs, *ops])}
    graph_values = [Value(name, 8, (8,)) for name in inputs]
    graph_ops = []
    for name, op in ops.items():
        graph_values.append(Value(name, op.nbytes, op.dims))
        sources = tuple(values[source] for source in (*op.reads, *op.whole))
        graph_ops.append(Op(name, sources, (values[name],), flops=op.seconds, fusion=op.fusion))
    graph = Graph(tuple(graph_values), tuple(graph_ops))
    on_axis = {name: op for name, op in ops.items() if op.on_axis and not op.reduces}
    along = {
        number: AlongOp(
            tuple((values[source], rows) for source, rows in op.reads.items()),
            values[[*op.reads][-1] if op.reduces else name],
            op.reduces,
            op.carries,
        )
        for number, (name, op) in enumerate(ops.items())
        if op.on_axis
    }
    scales = {values[name]: Fraction(1) for name in inputs}
    scales |= {values[name]: op.scale for name, op in on_axis.items()}
    sizes = {values[name]: rows for name, rows in inputs.items()}
    sizes |= {values[name]: op.rows for name, op in on_axis.items()}
    results = frozenset(values[name] for name in outputs)
    slab_graph = SlabGraph(graph, results, scales, sizes, along)
    return NamedGraph(slab_graph, values, {name: number for number, name in enumerate(ops)})


def norm(nbytes: int = 8, seconds: float = 40.0) -> NamedGraph:
    """A convolution, its results less their sum, and the sum of that."""
    return named_graph(
        {"x": 8},
        {
            "a": NamedOp({"x": HALO}, nbytes=nbytes, seconds=seconds),
            "mean": NamedOp({"a": ALIGNED}, reduces=True, nbytes=1, fusion="reduction"),
            "b": NamedOp({"a": ALIGNED}, ["mean"], nbytes=nbytes, fusion="elementwise"),
            "loss": NamedOp({"b": ALIGNED}, reduces=True, nbytes=1, fusion="reduction"),
        },
        ["loss"],
    )


@st.composite
def slab_graphs(draw: st.DrawFn, max_ops: int = 9, halves: bool = True) -> NamedGraph:
    """Ops of 12 rows, or of half as many: by slabs, whole, added up, and such as run outside of loops.

    None takes as long as four copies of any value, so that all may be made again.
    """
    # what may be read by slabs, and its scale
    sides: dict[str, Fraction] = {"x": Fraction(1), "y": Fraction(1)}
    sums: list[str] = []
    ops: dict[str, NamedOp] = {}
    for number in range(draw(st.integers(1, max_ops))):
        name = f"op{number}"
        source = draw(st.sampled_from([*sides]))
        scale = sides[source]
        readable = [*sums, *(value for value in sides if value in ops)]
        whole = draw(st.lists(st.sampled_from(readable), max_size=1)) if ops else []
        costs = {"nbytes": draw(st.integers(16, 60)), "seconds": float(draw(st.integers(0, 7)))}
        match draw(st.sampled_from(["aligned", "halo", "two", "scaled", "sum", "sum", "outside"])):
            case "scaled" if halves:
                rows, scale = (POOL, Fraction(1, 2)) if scale == 1 else (UPSAMPLE, Fraction(1))
                ops[name] = NamedOp({source: rows}, whole, **costs)
            case "two":
                alike = [name for name, side_scale in sides.items() if side_scale == scale]
                second = draw(st.sampled_from(alike))
                ops[name] = NamedOp({source: HALO, second: ALIGNED}, whole, **costs)
            case "sum":
                costs |= {"reduces": True, "fusion": "reduction"}
                ops[name] = NamedOp({source: ALIGNED}, whole, **costs)
            case "outside":
                ops[name] = NamedOp({}, [source, *whole], on_axis=False, **costs)
            case kind:
                ops[name] = NamedOp({source: HALO if kind == "halo" else ALIGNED}, whole, **costs)
        if ops[name].reduces or not ops[name].on_axis:
            sums.append(name)
        else:
            ops[name] = replace(ops[name], rows=int(12 * scale), scale=scale)
            sides[name] = scale
    outputs = draw(st.sets(st.sampled_from([*ops]), min_size=1))
    return named_graph({"x": 12, "y": 12}, ops, sorted(outputs | {name}))


@st.composite
def slabs_of(draw: st.DrawFn, program: NamedGraph) -> Slabs:
    """Some ops, some values stored."""
    names = [name for name, op in program.ops.items() if op in program.graph.along]
    ops = [name for name in names if draw(st.integers(0, 5))]
    rows = draw(st.sampled_from([2, 4, 6]))
    return program.slabs(rows, ops, [name for name in ops if draw(st.booleans())])
