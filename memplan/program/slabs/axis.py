"""One axis through a program: the dimension of each array that slabs split, and the equations.

The axis begins at one dimension of one array. It is followed through all equations whose records
(`ops`) relate dimensions of operands and results.
"""

import functools
import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from memplan.planning.graph import Rows
from memplan.planning.slabs.slabs import AlongOp, SlabGraph
from memplan.program import compat, ops
from memplan.program.flat import Flat
from memplan.program.ops import Axes, axes_of, shape_of

Scale = Fraction
"""Rows of an array per row of the array at which the axis begins."""


@dataclass(frozen=True)
class AlongAxis:
    """An equation on the axis."""

    axes: Axes  # the equation's axes
    axis: int  # the one that is on the program's axis
    sliced: tuple[int, ...]  # positions of operands that it reads by slabs, not whole

    @property
    def reduces(self) -> bool:
        return self.axis in self.axes.reduced

    @property
    def carries(self) -> bool:
        return self.axis in self.axes.carried

    @property
    def reads_all_by_slabs(self) -> bool:
        """Are all operands on this axis also on the program's axis?

        One operand of `a + a.T` is not.
        """
        return len(self.sliced) == sum(self.axis in side for side in self.axes.operands)


@dataclass(frozen=True)
class SlabAxis:
    """An axis through a flat jaxpr."""

    flat: Flat
    dims: Mapping[Any, int]  # variable -> its dimension on the axis
    # variable -> its rows per row of the array at which the axis begins
    scales: Mapping[Any, Scale]
    equations: Mapping[int, AlongAxis]  # number of an equation on the axis -> how it is on the axis
    # numbers of equations that read arrays of the axis but cannot be split along it
    blocked: frozenset[int] = frozenset()

    @functools.cached_property
    def graph(self) -> SlabGraph:
        """The axis as planners see it; values and ops have the numbers of `flat`."""
        number_of = self.flat.number_of
        along_ops = dict[int, AlongOp]()
        for number, along in self.equations.items():
            eqn = self.flat.eqns[number]
            base, *_ = next(iter(_base(eqn, along.axes, along.axis, Fraction(1))))
            reads = list[tuple[int, Rows]]()
            for position in along.sliced:
                rows = along.axes.rows_of(position, along.axis)
                reads.append((number_of[eqn.invars[position]], rows))
            op = AlongOp(tuple(reads), number_of[base], along.reduces, along.carries)
            along_ops[number] = op
        return SlabGraph(
            self.flat.graph,
            frozenset(number_of[var] for var in self.flat.returned),
            {number_of[var]: scale for var, scale in self.scales.items()},
            {number_of[var]: shape_of(var)[dim] for var, dim in self.dims.items()},
            along_ops,
            frozenset(number for number, eqn in enumerate(self.flat.eqns) if eqn.effects),
        )


def slab_axis(flat: Flat, var: Any, dim: int) -> SlabAxis:
    """The axis that begins at a dimension of a variable, followed from the largest arrays first."""
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
    # variables to follow: (-bytes, order of arrival, variable)
    waiting: list[tuple[int, int, Any]] = field(default_factory=list)

    def run(self) -> SlabAxis:
        eqns = self.flat.eqns
        self.equations_of: dict[Any, list[int]] = {}
        for number, eqn in enumerate(eqns):
            for atom in filter(compat.is_var, (*eqn.invars, *eqn.outvars)):
                numbers = self.equations_of.setdefault(atom, [])
                if not numbers or numbers[-1] != number:
                    numbers.append(number)
        self._add(self.var, self.dim, Fraction(1))
        while self.waiting:
            *_, var = heapq.heappop(self.waiting)
            for number in self.equations_of.get(var, ()):
                if number not in self.equations:
                    self._follow(number, eqns[number], var)
        read = {number: self._read(eqns[number], along) for number, along in self.equations.items()}
        by_slabs = {number: along for number, along in read.items() if along.reads_all_by_slabs}
        blocked = frozenset(self.blocked | read.keys()) - by_slabs.keys()
        return SlabAxis(self.flat, self.dims, self.scales, by_slabs, blocked)

    def _add(self, var: Any, dim: int, scale: Scale) -> None:
        self.dims[var] = dim
        self.scales[var] = scale
        heapq.heappush(self.waiting, (-compat.nbytes_of(var.aval), len(self.dims), var))

    def _follow(self, number: int, eqn: compat.JaxprEqn, var: Any) -> None:
        """Add an equation of a variable, and its other arrays, to the axis if their rows agree."""
        axes = axes_of(eqn) if not eqn.effects and ops.of(eqn).can_run_rows(eqn) else None
        if axes is None:
            self.blocked.add(number)
            return
        dim = self.dims[var]
        for axis, base in _axes_through(eqn, axes, var, dim, self.scales[var]):
            if self._agrees(eqn, axes, axis, base):
                self.equations[number] = AlongAxis(axes, axis, ())
                for atom, member_dim, member_scale in _members(eqn, axes, axis, base):
                    if compat.is_var(atom) and atom not in self.dims:
                        self._add(atom, member_dim, member_scale)
                return
        self.blocked.add(number)

    def _agrees(self, eqn: compat.JaxprEqn, axes: Axes, axis: int, base: Scale) -> bool:
        """Do the results, or a reduction's last operand, agree with what is on the axis already?"""
        if base <= 0:
            return False
        for atom, dim, scale in _base(eqn, axes, axis, base):
            if not compat.is_var(atom):
                return False
            if atom in self.dims and (self.dims[atom], self.scales[atom]) != (dim, scale):
                return False
        return True

    def _read(self, eqn: compat.JaxprEqn, along: AlongAxis) -> AlongAxis:
        """The equation with the operands that it reads by slabs."""
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


def _axes_through(
    eqn: compat.JaxprEqn,
    axes: Axes,
    var: Any,
    dim: int,
    scale: Scale,
) -> Iterator[tuple[int, Scale]]:
    """Yield an equation's axes through a variable's dimension, and the results' scale on each."""
    for position, (atom, side) in enumerate(zip(eqn.invars, axes.operands, strict=True)):
        axis = side[dim] if atom is var else None
        if axis is not None and (rows_scale := axes.rows_of(position, axis).scale):
            yield axis, scale / rows_scale
    for atom, side in zip(eqn.outvars, axes.results, strict=True):
        axis = side[dim] if atom is var else None
        if axis is not None:
            yield axis, scale


def _base(
    eqn: compat.JaxprEqn,
    axes: Axes,
    axis: int,
    base: Scale,
) -> Iterable[tuple[Any, int, Scale]]:
    """The arrays whose rows an equation counts.

    They are its results or, if it reduces the axis, the last operand.
    """
    if axis in axes.reduced:
        position = axes.last_on(axis)
        return [(eqn.invars[position], axes.operands[position].index(axis), base)]
    return [
        (var, names.index(axis), base)
        for var, names in zip(eqn.outvars, axes.results, strict=True)
        if axis in names and not isinstance(var, compat.DropVar)
    ]


def _members(
    eqn: compat.JaxprEqn,
    axes: Axes,
    axis: int,
    base: Scale,
) -> Iterator[tuple[Any, int, Scale]]:
    """Yield all arrays on an axis of an equation, with their dimensions and scales."""
    yield from _base(eqn, axes, axis, base)
    for position, (atom, side) in enumerate(zip(eqn.invars, axes.operands, strict=True)):
        if axis in side:
            yield atom, side.index(axis), base * axes.rows_of(position, axis).scale
