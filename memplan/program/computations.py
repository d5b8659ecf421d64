"""The computations of a program: branches, bodies of loops and of `shard_map`s, at any depth."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from memplan.errors import UnsupportedProgramError
from memplan.planning.slabs.slabs import ComputationPath
from memplan.program import compat, ops
from memplan.program.flat import Flat


@dataclass(frozen=True, eq=False)
class PlacedComputation:
    """A computation, and what surrounds it in the program.

    Attributes:
      place: path to the computation; empty for the program itself.
      trips: how often it runs in a step; a `while_loop` counts as one trip.
      around_nbytes: bytes that the surrounding computations keep while it runs, without the
        program's arguments.
      parts: into how many parts a mesh divides each dimension of a variable, if that is known;
        none inside a `shard_map`, where a variable is one device's part.
      overwritable: inputs that its results may overwrite: donated arguments, carries of a loop.
    """

    place: ComputationPath
    flat: Flat
    trips: int
    around_nbytes: int
    parts: dict[compat.Var, tuple[int, ...]]
    overwritable: frozenset[compat.Var]

    def nbytes_of(self, atom: Any) -> int:
        """Bytes that one device has of a variable or literal."""
        parts = self.parts.get(atom, ()) if compat.is_var(atom) else ()
        return compat.nbytes_of(atom.aval) // math.prod(parts)

    @property
    def kernel_nbytes(self) -> int:
        """Bytes that its own most demanding kernel reads and writes."""
        graph = self.flat.graph
        kernels = (
            op
            for op, eqn in zip(graph.ops, self.flat.eqns, strict=True)
            if op.fusion == "kernel" and not compat.bodies_of(eqn)
        )
        return max((graph.touched_nbytes(op) for op in kernels), default=0)


def computations(outer: PlacedComputation) -> Iterator[PlacedComputation]:
    """Yield a computation and its nested ones.

    Those that write into mutable operands are left out, and bodies of `shard_map`s that XLA divides
    over further axes: nobody knows how.
    """
    yield outer
    for number, eqn in enumerate(outer.flat.eqns):
        for index, inner in enumerate(compat.bodies_of(eqn)):
            try:
                flat = outer.flat.inner(number, index)
            except UnsupportedProgramError:
                continue
            if compat.automatic_axes(flat.shard_maps):
                continue
            parts = dict[compat.Var, tuple[int, ...]]()
            for var, atom in zip(flat.invars, inner.operands, strict=True):
                if compat.is_var(atom) and atom in outer.parts and not compat.is_shard_map(eqn):
                    parts[var] = outer.parts[atom][len(outer.parts[atom]) - var.aval.ndim :]
            ending = _ending(outer, number)
            overwritable = {
                var
                for var, atom in zip(flat.invars, inner.operands, strict=True)
                if compat.is_var(atom) and atom in ending
            }
            overwritable.update(flat.invars[position] for position in inner.carried)
            yield from computations(
                PlacedComputation(
                    place=(*outer.place, (number, index)),
                    flat=flat,
                    trips=outer.trips * inner.trips,
                    around_nbytes=outer.around_nbytes
                    + _nbytes_around(
                        outer,
                        number,
                        inner,
                        ending,
                    ),
                    parts=parts,
                    overwritable=frozenset(overwritable),
                )
            )


def _ending(outer: PlacedComputation, number: int) -> set[Any]:
    """Variables whose last reader is this equation; its results may overwrite them."""
    flat = outer.flat
    inputs = set(flat.invars)
    read = set(filter(compat.is_var, flat.eqns[number].invars)) - flat.returned
    return {
        var
        for var in read
        if max(
            flat.readers[var],
        )
        == number
        and (var not in inputs or var in outer.overwritable)
    }


def _nbytes_around(
    outer: PlacedComputation,
    number: int,
    inner: compat.InnerJaxpr,
    ending: set[Any],
) -> int:
    """Bytes that the outer computation keeps while an equation runs one of its computations.

    They are the values that are made before and read later, the equation's results, and the slices
    that a trip reads.
    """
    flat = outer.flat
    alive = [
        var
        for eqn in flat.eqns[:number]
        if ops.of(
            eqn,
        ).fusion
        in ("kernel", "reduction")  # other results are made where they are read
        for var in eqn.outvars
        if max(flat.readers.get(var, ()), default=-1) >= number or var in flat.returned
    ]
    alive_nbytes = sum(map(outer.nbytes_of, alive))
    result_nbytes = sum(map(outer.nbytes_of, flat.eqns[number].outvars))
    overwritten = ending.intersection({*alive, *outer.overwritable})
    overwritten_nbytes = sum(map(outer.nbytes_of, overwritten))
    return alive_nbytes + max(0, result_nbytes - overwritten_nbytes) + inner.sliced_nbytes


def computation_at(flat: Flat, place: ComputationPath) -> Flat:
    """The jaxpr of a computation.

    Raises:
      LookupError: the program has no computation at this place.
    """
    for number, index in place:
        flat = flat.inner(number, index)
    return flat


def with_computation(
    flat: Flat, place: ComputationPath, body: compat.ClosedJaxpr
) -> compat.ClosedJaxpr:
    """The program with another jaxpr at a place; the surrounding equations keep their numbers."""
    if not place:
        return body
    (number, index), *inner_place = place
    inner = with_computation(flat.inner(number, index), tuple(inner_place), body)
    changed = compat.with_computation(flat.eqns[number], index, inner)
    return compat.with_eqns(flat.closed, [*flat.eqns[:number], changed, *flat.eqns[number + 1 :]])
