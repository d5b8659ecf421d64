"""Stacks of layers in host memory, a layer at a time: slices that a scan reads, and updates of all their elements.

A stack that scans take slices of, and that is otherwise only updated element by element (an optimizer's work, with the
moments that go into it), never comes to the device whole: each trip of a scan has its slice fetched during the trip
before, and the update is a loop of its own over the layers, in place in host memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from memplan.program import compat, rules

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
_MOVES_ELEMENTS = {"concatenate", "dynamic_slice", "dynamic_update_slice", "gather", "pad", "slice", "split",
                   "transpose", "random_bits", "random_fold_in", "random_seed", "random_split"}  # fmt: skip

Env = dict[Any, Any]


@dataclass(frozen=True)
class Update:
    """Elementwise equations on whole stacks, to be run layer by layer.

    Attributes:
      eqns: their numbers in the jaxpr, in order; they run where the last one stands.
      trips: layers.
      host: stacks in host memory that they read.
      made: results that the program returns.
    """

    eqns: tuple[int, ...]
    trips: int
    host: tuple[Any, ...]
    made: tuple[Any, ...]


@dataclass
class Slices:
    """What of a flat jaxpr is done slice by slice.

    Attributes:
      held: variables of inputs in host memory.
      stacks: those of them that never come to the device whole.
      updates: what is done to them, by the number of the last equation of each.
    """

    closed: compat.ClosedJaxpr
    held: frozenset[Any]
    stacks: frozenset[Any] = field(init=False)
    updates: dict[int, Update] = field(init=False)

    def __post_init__(self) -> None:
        self._scans = {
            number: scan for number, eqn in enumerate(self.closed.jaxpr.eqns) if (scan := compat.scan_of(eqn))
        }
        layered = {
            (var, scan.trips)
            for number, scan in self._scans.items()
            for var in self._sliced(number, self.held)
            if scan.trips > 1
        }
        trips = {count for _, count in layered}
        stacks = frozenset(var for var in self.held if var.aval.ndim and var.aval.shape[0] in trips)
        returned = frozenset(atom for atom in self.closed.jaxpr.outvars if not isinstance(atom, compat.Literal))
        stacks -= returned
        while True:
            eqns, refused = self._forward(stacks)
            if not refused:
                break
            stacks -= refused
        eqns |= self._backward(eqns, returned)
        self.stacks = stacks
        self.updates = {one.eqns[-1]: one for count in trips if (one := self._update(count, eqns, stacks, returned))}

    @property
    def within(self) -> frozenset[int]:
        """Equations that run in an update."""
        return frozenset(number for one in self.updates.values() for number in one.eqns)

    def reads(self, number: int) -> dict[int, Any]:
        """Operand position -> stack in host memory, of the scan that an equation is."""
        eqn = self.closed.jaxpr.eqns[number]
        sliced = self._sliced(number, self.stacks) if number in self._scans else ()
        return {place: atom for place, atom in enumerate(eqn.invars) if _is_in(atom, sliced)}

    def _sliced(self, number: int, among: Collection[Any]) -> list[Any]:
        """Variables that a scan takes slices of."""
        eqn, scan = self.closed.jaxpr.eqns[number], self._scans[number]
        return [atom for atom in scan.split(eqn.invars)[2] if _is_in(atom, among)]

    def _forward(self, stacks: frozenset[Any]) -> tuple[set[int], frozenset[Any]]:
        """Elementwise equations behind the stacks, and the stacks behind anything else."""
        eqns: set[int] = set()
        behind: dict[Any, frozenset[Any]] = {var: frozenset({var}) for var in stacks}
        refused: frozenset[Any] = frozenset()
        for number, eqn in enumerate(self.closed.jaxpr.eqns):
            touched = [atom for atom in eqn.invars if _is_in(atom, behind)]
            if not touched:
                continue
            if _is_layerwise(eqn):
                eqns.add(number)
                behind.update(dict.fromkeys(eqn.outvars, frozenset().union(*(behind[atom] for atom in touched))))
            elif number not in self._scans or not self._takes_slices(number, touched, stacks):
                refused = refused.union(*(behind[atom] for atom in touched))
        return eqns, refused

    def _takes_slices(self, number: int, touched: Sequence[Any], stacks: frozenset[Any]) -> bool:
        """Does a scan read the stacks as slices only?"""
        consts, carries, _ = self._scans[number].split(self.closed.jaxpr.eqns[number].invars)
        return stacks.issuperset(touched) and not any(_is_in(atom, touched) for atom in (*consts, *carries))

    def _backward(self, eqns: set[int], returned: frozenset[Any]) -> set[int]:
        """Elementwise equations that only those read."""
        readers: dict[Any, set[int]] = {}
        for number, eqn in enumerate(self.closed.jaxpr.eqns):
            for atom in eqn.invars:
                if not isinstance(atom, compat.Literal):
                    readers.setdefault(atom, set()).add(number)
        found = set(eqns)
        for number, eqn in reversed(list(enumerate(self.closed.jaxpr.eqns))):
            made = [var for var in eqn.outvars if not isinstance(var, compat.DropVar)]
            is_free = number not in found and _is_layerwise(eqn) and not returned.intersection(made)
            if is_free and all(readers.get(var) and found.issuperset(readers[var]) for var in made):
                found.add(number)
        return found

    def _update(self, trips: int, eqns: set[int], stacks: frozenset[Any], returned: frozenset[Any]) -> Update | None:
        known = self.closed.jaxpr.eqns
        own = sorted(number for number in eqns if compat.aval_of(known[number].outvars[0]).shape[0] == trips)
        made = (var for number in own for var in known[number].outvars)
        host = dict.fromkeys(atom for number in own for atom in known[number].invars if _is_in(atom, stacks))
        return Update(tuple(own), trips, tuple(host), tuple(var for var in made if var in returned)) if own else None


def run_update(closed: compat.ClosedJaxpr, update: Update, env: Mapping[Any, Any], place: Mapping[Any, Any]) -> Env:
    """The results of an update.

    Args:
      env: what its equations read, stacks in host memory among it.
      place: result -> the stack in host memory that it is written over; results on the device are in none.
    """
    eqns = [closed.jaxpr.eqns[number] for number in update.eqns]
    own = {var for eqn in eqns for var in eqn.outvars}
    given = dict.fromkeys(
        atom for eqn in eqns for atom in eqn.invars if not isinstance(atom, compat.Literal) and atom not in own
    )
    device = {var: env[var] for var in given if var.aval.ndim and var not in update.host}
    whole = {var: env[var] for var in given if not var.aval.ndim}
    written = {result: place[result] for result in update.made if result in place}
    fixed = {var: env[var] for var in update.host if var not in written.values()}

    def trip(buffers: Env, slices: tuple[Any, Env]) -> tuple[Env, Env]:
        layer, near = slices
        local = {**whole, **near, **{var: fetch(stack, layer) for var, stack in (buffers | fixed).items()}}
        for eqn in eqns:
            operands = [compat.read(local, atom) for atom in eqn.invars]
            with compat.as_written(eqn):
                local.update(zip(eqn.outvars, _of_layer(eqn, operands), strict=True))
        new = {
            stack: jax.lax.dynamic_update_index_in_dim(buffers[stack], jax.device_put(local[result], _HOST), layer, 0)
            for result, stack in written.items()
        }
        return buffers | new, {var: local[var] for var in update.made if var not in written}

    buffers = {stack: env[stack] for stack in written.values()}
    buffers, made = _scan(trip, buffers, device, update.trips)
    return {**made, **{result: buffers[stack] for result, stack in written.items()}}


def run_scan(scan: compat.Scan, operands: Sequence[Any], stacks: Mapping[int, Any]) -> list[Any]:
    """A scan that reads slices of stacks in host memory (by operand position), each fetched a trip ahead."""
    consts, carries, sliced = scan.split(operands)
    first = len(consts) + len(carries)
    distinct = {var: operands[place] for place, var in stacks.items()}
    number = {var: number for number, var in enumerate(distinct)}
    near = [stack for place, stack in enumerate(sliced, first) if place not in stacks]

    def body(carry: Any, slices: Any) -> Any:
        carried, arrived = carry
        following, near = slices
        rest = iter(near)
        own = [arrived[number[stacks[p]]] if p in stacks else next(rest) for p in range(first, len(operands))]
        results = compat.jaxpr_as_fun(scan.body)(*consts, *carried, *own)
        coming = [fetch(stack, following) for stack in distinct.values()]
        return (results[: len(carries)], coming), results[len(carries) :]

    begin = [fetch(stack, scan.trips - 1 if scan.reverse else 0) for stack in distinct.values()]
    (carried, _), made = jax.lax.scan(
        body, (carries, begin), (scan.following, near), length=scan.trips, reverse=scan.reverse, unroll=scan.unroll
    )
    return [*carried, *made]


def fetch(stack: Any, layer: Any) -> Any:
    """A slice of a stack in host memory, on the device. Where `layer` is looked up in an array, XLA reads it right."""
    return jax.device_put(jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False), _DEVICE)


def _scan(trip: Any, carry: Env, slices: Env, trips: int) -> tuple[Env, Env]:
    """`lax.scan` over dictionaries by variable, which jax cannot sort."""
    names, stacks = list(carry), list(slices)
    made: list[Any] = []

    def body(values: list[Any], x: tuple[Any, list[Any]]) -> tuple[list[Any], list[Any]]:
        new, results = trip(dict(zip(names, values, strict=True)), (x[0], dict(zip(stacks, x[1], strict=True))))
        made[:] = results
        return [new[name] for name in names], list(results.values())

    layers = jax.numpy.arange(trips)
    values, results = jax.lax.scan(body, list(carry.values()), (layers, list(slices.values())))
    return dict(zip(names, values, strict=True)), dict(zip(made, results, strict=True))


def _of_layer(eqn: compat.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """A layerwise equation on one layer."""
    if eqn.primitive.name == "broadcast_in_dim":
        return [jax.numpy.broadcast_to(operands[0], compat.aval_of(eqn.outvars[0]).shape[1:])]
    return compat.bind(eqn, operands)


def _is_layerwise(eqn: compat.JaxprEqn) -> bool:
    """Does an equation compute every element of its results from the elements at its place, or from scalars?"""
    name, shape = eqn.primitive.name, getattr(compat.aval_of(eqn.outvars[0]), "shape", ()) if eqn.outvars else ()
    if eqn.effects or not shape or compat.sub_jaxprs(eqn):
        return False
    shapes = [getattr(compat.aval_of(atom), "shape", None) for atom in eqn.invars]
    if name == "broadcast_in_dim":
        return shapes == [()]
    alike = all(one in ((), shape) for one in shapes)
    same = all(getattr(compat.aval_of(var), "shape", None) == shape for var in eqn.outvars)
    return rules.fusion_of(eqn) == "elementwise" and name not in _MOVES_ELEMENTS and alike and same


def _is_in(atom: Any, variables: Collection[Any]) -> bool:
    return not isinstance(atom, compat.Literal) and atom in variables


def pairs(inputs: Sequence[Any], outputs: Sequence[Any], donated: Collection[int]) -> Iterator[tuple[int, int]]:
    """(output, donated input whose buffer it takes) by position: of equal type, first come, as jax pairs them."""
    free: dict[Any, list[int]] = {}
    for position in sorted(donated):
        aval = inputs[position].aval
        free.setdefault((aval.shape, aval.dtype), []).append(position)
    for number, atom in enumerate(outputs):
        waiting = free.get((atom.aval.shape, atom.aval.dtype))
        if waiting and not isinstance(atom, compat.Literal):
            yield number, waiting.pop(0)
