"""One axis through a program: the dimension of each array that is split into slabs, and the equations that do it.

The axis begins at one dimension of one array and is followed through all equations whose records (`ops`) relate it.
"""

import functools
import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from memplan.planning.slabs.slabs import AlongOp, SlabGraph
from memplan.program import compat, ops
from memplan.program.flat import Flat
from memplan.program.ops import Axes, axes_of, shape_of

Scale = Fraction
"""Rows of an array per row of the array at which the axis begins."""


@dataclass(frozen=True)
class AlongAxis:
    """An equation on the axis."""

    # axes, axis: the equation's axes, and the one that is on the program's axis
    axes: Axes
    axis: int
    sliced: tuple[int, ...]  # positions of operands that it reads by slabs; it reads the others whole

    @property
    def reduces(self) -> bool:
        return self.axis in self.axes.reduced

    @property
    def carries(self) -> bool:
        return self.axis in self.axes.carried

    @property
    def reads_all_by_slabs(self) -> bool:
        """Are all operands on this axis also on the program's axis? In `a + a.T` one is not."""
        return len(self.sliced) == sum(self.axis in side for side in self.axes.operands)


@dataclass(frozen=True)
class SlabAxis:
    """An axis through a flat jaxpr."""

    flat: Flat
    dims: Mapping[Any, int]  # variable -> its dimension on the axis
    scales: Mapping[Any, Scale]  # variable -> its rows per row of the array at which the axis begins
    equations: Mapping[int, AlongAxis]  # number of an equation -> its position on the axis
    blocked: frozenset[int] = frozenset()  # numbers of equations that read arrays of the axis, but have no rule for it

    @functools.cached_property
    def graph(self) -> SlabGraph:
        """The axis as planners see it; values and ops have the numbers of `flat`."""
        number_of, along = self.flat.number_of, {}
        for number, one in self.equations.items():
            eqn = self.flat.eqns[number]
            base, *_ = next(iter(_base(eqn, one.axes, one.axis, Fraction(1))))
            reads = ((number_of[eqn.invars[position]], one.axes.rows_of(position, one.axis)) for position in one.sliced)
            along[number] = AlongOp(tuple(reads), number_of[base], one.reduces, one.carries)
        return SlabGraph(
            self.flat.graph,
            frozenset(number_of[var] for var in self.flat.returned),
            {number_of[var]: scale for var, scale in self.scales.items()},
            {number_of[var]: shape_of(var)[dim] for var, dim in self.dims.items()},
            along,
            frozenset(number for number, eqn in enumerate(self.flat.eqns) if eqn.effects),
        )


def slab_axis(flat: Flat, var: Any, dim: int) -> SlabAxis:
    """The axis that begins at a dimension of a variable, followed along the largest arrays first."""
    return _Follower(flat, var, dim).run()


@dataclass
class _Follower:
    flat: Flat
    var: Any
    dim: int
    dims: dict[Any, int] = field(default_factory=dict)
    scales: dict[Any, Scale] = field(default_factory=dict)
    equations: dict[int, AlongAxis] = field(default_factory=dict)
    blocked: set[int] = field(default_factory=set)
    waiting: list[tuple[int, int, Any]] = field(default_factory=list)

    def run(self) -> SlabAxis:
        eqns = self.flat.eqns
        self.of_var: dict[Any, list[int]] = {}
        for number, eqn in enumerate(eqns):
            for atom in filter(compat.is_var, (*eqn.invars, *eqn.outvars)):
                numbers = self.of_var.setdefault(atom, [])
                if not numbers or numbers[-1] != number:
                    numbers.append(number)
        self._add(self.var, self.dim, Fraction(1))
        while self.waiting:
            *_, var = heapq.heappop(self.waiting)
            for number in self.of_var.get(var, ()):
                if number not in self.equations:
                    self._follow(number, eqns[number], var)
        read = {number: self._read(eqns[number], along) for number, along in self.equations.items()}
        by_slabs = {number: along for number, along in read.items() if along.reads_all_by_slabs}
        return SlabAxis(
            self.flat, self.dims, self.scales, by_slabs, frozenset(self.blocked | read.keys()) - by_slabs.keys()
        )

    def _add(self, var: Any, dim: int, scale: Scale) -> None:
        self.dims[var], self.scales[var] = dim, scale
        heapq.heappush(self.waiting, (-compat.nbytes_of(var.aval), len(self.dims), var))

    def _follow(self, number: int, eqn: compat.JaxprEqn, var: Any) -> None:
        axes = axes_of(eqn) if not eqn.effects and ops.of(eqn).can_run_rows(eqn) else None
        if axes is None:
            self.blocked.add(number)
            return
        dim, scale = self.dims[var], self.scales[var]
        for axis, base in _places(eqn, axes, var, dim, scale):
            if self._agrees(eqn, axes, axis, base):
                self.equations[number] = AlongAxis(axes, axis, ())
                for atom, at, its in _members(eqn, axes, axis, base):
                    if compat.is_var(atom) and atom not in self.dims:
                        self._add(atom, at, its)
                return
        self.blocked.add(number)

    def _agrees(self, eqn: compat.JaxprEqn, axes: Axes, axis: int, base: Scale) -> bool:
        """Can all results, and the last operand of a reduction, be on the axis as it is there?"""
        return (
            all(
                compat.is_var(atom) and (atom not in self.dims or (self.dims[atom], self.scales[atom]) == (at, its))
                for atom, at, its in _base(eqn, axes, axis, base)
            )
            and base > 0
        )

    def _read(self, eqn: compat.JaxprEqn, along: AlongAxis) -> AlongAxis:
        axes, axis = along.axes, along.axis
        base = next(self.scales[atom] for atom, _, _ in _base(eqn, axes, axis, Fraction(1)))
        sliced = tuple(
            position
            for position, (atom, side) in enumerate(zip(eqn.invars, axes.operands, strict=True))
            if axis in side
            and compat.is_var(atom)
            and self.dims.get(atom) == side.index(axis)
            and self.scales[atom] == base * axes.rows_of(position, axis).scale
        )
        return AlongAxis(axes, axis, sliced)


def _places(eqn: compat.JaxprEqn, axes: Axes, var: Any, dim: int, scale: Scale) -> Iterator[tuple[int, Scale]]:
    """The axes of an equation that contain a variable's dimension, and the scale of the results there."""
    for position, (atom, names) in enumerate(zip(eqn.invars, axes.operands, strict=True)):
        axis = names[dim] if atom is var else None
        if axis is not None and (along := axes.rows_of(position, axis).scale):
            yield axis, scale / along
    for atom, names in zip(eqn.outvars, axes.results, strict=True):
        axis = names[dim] if atom is var else None
        if axis is not None:
            yield axis, scale


def _base(eqn: compat.JaxprEqn, axes: Axes, axis: int, base: Scale) -> Iterable[tuple[Any, int, Scale]]:
    """The arrays whose rows an equation counts: its results, or the last operand if it reduces the axis."""
    if axis in axes.reduced:
        position = axes.last_on(axis)
        return [(eqn.invars[position], axes.operands[position].index(axis), base)]
    return [
        (var, names.index(axis), base)
        for var, names in zip(eqn.outvars, axes.results, strict=True)
        if axis in names and not isinstance(var, compat.DropVar)
    ]


def _members(eqn: compat.JaxprEqn, axes: Axes, axis: int, base: Scale) -> Iterator[tuple[Any, int, Scale]]:
    """All arrays on an axis of an equation, their dimension, and their scale."""
    yield from _base(eqn, axes, axis, base)
    for position, (atom, side) in enumerate(zip(eqn.invars, axes.operands, strict=True)):
        if axis in side:
            yield atom, side.index(axis), base * axes.rows_of(position, axis).scale
