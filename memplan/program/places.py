"""Computations inside of a program: branches of its conditionals and bodies of its loops, to any depth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from memplan.errors import UnsupportedProgramError
from memplan.planning.slabs.slabs import ComputationPath
from memplan.program import compat, ops
from memplan.program.flat import Flat


@dataclass(frozen=True, eq=False)
class Inner:
    """A computation of a program.

    Attributes:
      place: of it; that of the program itself is empty.
      trips: how often it runs in a step; a `while_loop` counts as one trip.
      around_nbytes: bytes that the computations around it keep while it runs, without the program's arguments.
      parts: by variable, into how many parts each dimension is divided over a mesh, as far as that is known.
      own: its inputs that its results may be written over: donated arguments, what a loop carries.
    """

    place: ComputationPath
    flat: Flat
    trips: int
    around_nbytes: int
    parts: dict[compat.Var, tuple[int, ...]]
    own: frozenset[compat.Var]

    @property
    def kernel_nbytes(self) -> int:
        """Bytes that its own most demanding kernel reads and writes."""
        graph = self.flat.graph
        kernels = (
            op
            for op, eqn in zip(graph.ops, self.flat.eqns, strict=True)
            if op.fusion == "kernel" and not compat.computations_of(eqn)
        )
        return max((graph.touched_nbytes(op) for op in kernels), default=0)


def computations(outer: Inner) -> Iterator[Inner]:
    """A computation, and all inside of it; not those that write into their operands."""
    yield outer
    for number, eqn in enumerate(outer.flat.eqns):
        for index, one in enumerate(compat.computations_of(eqn)):
            try:
                flat = outer.flat.inner(number, index)
            except UnsupportedProgramError:
                continue
            parts = dict[compat.Var, tuple[int, ...]]()
            for var, atom in zip(flat.invars, one.operands, strict=True):
                if compat.is_var(atom) and atom in outer.parts:
                    parts[var] = outer.parts[atom][len(outer.parts[atom]) - var.aval.ndim :]
            ending, given = _ending(outer, number), zip(flat.invars, one.operands, strict=True)
            around = outer.around_nbytes + _nbytes_around(outer, number, one, ending)
            own = {var for var, atom in given if compat.is_var(atom) and atom in ending}
            own.update(flat.invars[position] for position in one.carried)
            yield from computations(
                Inner((*outer.place, (number, index)), flat, outer.trips * one.trips, around, parts, frozenset(own))
            )


def _ending(outer: Inner, number: int) -> set[Any]:
    """What only an equation reads from then on, so that its results may be written over it."""
    flat, given = outer.flat, set(outer.flat.invars)
    read = set(filter(compat.is_var, flat.eqns[number].invars)) - flat.returned
    return {var for var in read if max(flat.readers[var]) == number and (var not in given or var in outer.own)}


def _nbytes_around(outer: Inner, number: int, one: compat.InnerJaxpr, ending: set[Any]) -> int:
    """Bytes of what is made before and read later, of an equation's results, and of slices that its trip reads."""
    flat = outer.flat
    kept = [
        var
        for eqn in flat.eqns[:number]
        if ops.of(eqn).fusion in ("kernel", "reduction")  # others are made where they are read
        for var in eqn.outvars
        if max(flat.readers.get(var, ()), default=-1) >= number or var in flat.returned
    ]
    made = sum(compat.nbytes_of(var.aval) for var in flat.eqns[number].outvars)
    over = sum(compat.nbytes_of(var.aval) for var in ending.intersection({*kept, *outer.own}))
    return sum(compat.nbytes_of(var.aval) for var in kept) + max(0, made - over) + one.sliced_nbytes


def at(flat: Flat, place: ComputationPath) -> Flat:
    """The jaxpr of a computation.

    Raises:
      LookupError: there is none at this place.
    """
    for number, index in place:
        flat = flat.inner(number, index)
    return flat


def with_computation(flat: Flat, place: ComputationPath, body: compat.ClosedJaxpr) -> compat.ClosedJaxpr:
    """The program with another jaxpr at a place; equations around it keep their numbers."""
    if not place:
        return body
    (number, index), *rest = place
    inner = with_computation(flat.inner(number, index), tuple(rest), body)
    changed = compat.with_computation(flat.eqns[number], index, inner)
    return compat.with_eqns(flat.closed, [*flat.eqns[:number], changed, *flat.eqns[number + 1 :]])
