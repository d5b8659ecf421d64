"""Stacks of layers in host memory, a layer at a time: slices that a scan reads, and updates of all their elements.

A stack that scans take slices of, and that is otherwise only updated element by element (an optimizer's work, with the
moments that go into it), never comes to the device whole: each trip of a scan has its slice fetched during the trip
before, and is updated in place in host memory. Where the gradients come out of one scan and nothing has to be known of
all of them first, each trip of that scan updates its layer, and no stack of gradients is made; its copies to and from
the host lie beside the next layer's gradient. Otherwise the update is a loop of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax

from memplan.program import compat, primitives

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
      near: stacks on the device that they read.
      whole: scalars that they read.
    """

    eqns: tuple[int, ...]
    trips: int
    host: tuple[Any, ...]
    made: tuple[Any, ...]
    near: tuple[Any, ...]
    whole: tuple[Any, ...]


@dataclass
class Slices:
    """What of a flat jaxpr is done slice by slice.

    Attributes:
      held: variables of inputs in host memory.
      taken: result of the program -> input in host memory whose buffer it takes.
      stacks: those of the inputs that never come to the device whole.
      place: result of an update -> stack that it is written over.
      updates: what is done to them, by the number of the last equation of each.
      fused: the same for updates in a scan, by the number of that.
      order: of the equations; a scan with an update comes after the scalars that the update reads.
    """

    closed: compat.ClosedJaxpr
    held: frozenset[Any]
    taken: Mapping[Any, Any]
    stacks: frozenset[Any] = field(init=False)
    place: dict[Any, Any] = field(init=False)
    updates: dict[int, Update] = field(init=False)
    fused: dict[int, Update] = field(init=False)
    order: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._scans = {number: scan for number, eqn in enumerate(self._eqns) if (scan := compat.scan_of(eqn))}
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
        updates = [one for count in sorted(trips) if (one := self._update(count, eqns, stacks, returned))]
        made = {var for one in updates for var in one.made}
        self.place = {var: stack for var, stack in self.taken.items() if var in made and stack in stacks}
        before: dict[int, list[int]] = {}  # scan with an update -> equations that it waits for
        self.fused, self.updates = {}, {}
        for one in updates:
            scan = self._scan_of(one, returned)
            earlier = self._behind(one.whole)
            if scan is None or scan in earlier or scan in self.fused:
                self.updates[one.eqns[-1]] = one
            else:
                self.fused[scan], before[scan] = one, earlier
        self.order = list(
            dict.fromkeys(n for number in range(len(self._eqns)) for n in (*before.get(number, ()), number))
        )

    @property
    def within(self) -> frozenset[int]:
        """Equations that run in an update."""
        updates = (*self.updates.values(), *self.fused.values())
        return frozenset(number for one in updates for number in one.eqns)

    @property
    def _eqns(self) -> Sequence[compat.JaxprEqn]:
        return self.closed.jaxpr.eqns

    @cached_property
    def _readers(self) -> dict[Any, set[int]]:
        """Equations that read each variable."""
        readers: dict[Any, set[int]] = {}
        for number, eqn in enumerate(self._eqns):
            for atom in eqn.invars:
                if not isinstance(atom, compat.Literal):
                    readers.setdefault(atom, set()).add(number)
        return readers

    def _scan_of(self, update: Update, returned: frozenset[Any]) -> int | None:
        """The scan that stacks all that an update reads on the device, for nobody else; if all is written in place."""
        if not update.near or not self.place.keys() >= set(update.made):
            return None
        for number, scan in self._scans.items():
            stacked = self._eqns[number].outvars[scan.carries :]
            if scan.trips == update.trips and set(stacked).issuperset(update.near):
                readers = set().union(*(self._readers[var] for var in update.near))
                return number if readers.issubset(update.eqns) and returned.isdisjoint(update.near) else None
        return None

    def _behind(self, variables: Sequence[Any]) -> list[int]:
        """Equations that these are computed by, in order."""
        wanted, found = set(variables), []
        for number, eqn in reversed(list(enumerate(self._eqns))):
            if wanted.intersection(eqn.outvars):
                found.append(number)
                wanted.update(atom for atom in eqn.invars if not isinstance(atom, compat.Literal))
        return found[::-1]

    def reads(self, number: int) -> dict[int, Any]:
        """Operand position -> stack in host memory, of the scan that an equation is."""
        eqn = self._eqns[number]
        sliced = self._sliced(number, self.stacks) if number in self._scans else ()
        return {place: atom for place, atom in enumerate(eqn.invars) if _is_in(atom, sliced)}

    def _sliced(self, number: int, among: Collection[Any]) -> list[Any]:
        """Variables that a scan takes slices of."""
        eqn, scan = self._eqns[number], self._scans[number]
        return [atom for atom in scan.split(eqn.invars)[2] if _is_in(atom, among)]

    def _forward(self, stacks: frozenset[Any]) -> tuple[set[int], frozenset[Any]]:
        """Elementwise equations behind the stacks, and the stacks behind anything else."""
        eqns: set[int] = set()
        behind: dict[Any, frozenset[Any]] = {var: frozenset({var}) for var in stacks}
        refused: frozenset[Any] = frozenset()
        for number, eqn in enumerate(self._eqns):
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
        consts, carries, _ = self._scans[number].split(self._eqns[number].invars)
        return stacks.issuperset(touched) and not any(_is_in(atom, touched) for atom in (*consts, *carries))

    def _backward(self, eqns: set[int], returned: frozenset[Any]) -> set[int]:
        """Elementwise equations that only those read."""
        found, readers = set(eqns), self._readers
        for number, eqn in reversed(list(enumerate(self._eqns))):
            made = [var for var in eqn.outvars if not isinstance(var, compat.DropVar)]
            is_free = number not in found and _is_layerwise(eqn) and not returned.intersection(made)
            if is_free and all(readers.get(var) and found.issuperset(readers[var]) for var in made):
                found.add(number)
        return found

    def _update(self, trips: int, eqns: set[int], stacks: frozenset[Any], returned: frozenset[Any]) -> Update | None:
        known = self._eqns
        own = sorted(number for number in eqns if compat.aval_of(known[number].outvars[0]).shape[0] == trips)
        if not own:
            return None
        made = dict.fromkeys(var for number in own for var in known[number].outvars)
        read = dict.fromkeys(a for number in own for a in known[number].invars if not isinstance(a, compat.Literal))
        given = [var for var in read if var not in made]
        return Update(
            tuple(own),
            trips,
            tuple(var for var in given if var in stacks),
            tuple(var for var in made if var in returned),
            tuple(var for var in given if compat.aval_of(var).ndim and var not in stacks),
            tuple(var for var in given if not compat.aval_of(var).ndim),
        )


def run_update(closed: compat.ClosedJaxpr, update: Update, env: Env, place: Mapping[Any, Any]) -> Env:
    """The results of an update as a loop of its own.

    Args:
      env: what its equations read, stacks in host memory among it.
      place: result -> the stack in host memory that it is written over; results on the device are in none.
    """
    written = {result: place[result] for result in update.made if result in place}
    rest = [result for result in update.made if result not in written]

    def trip(buffers: list[Any], slices: tuple[Any, list[Any]]) -> tuple[list[Any], list[Any]]:
        layer, near = slices
        stacks = {**env, **dict(zip(written.values(), buffers, strict=True))}
        local = dict(zip(update.near, near, strict=True)) | {var: fetch(stacks[var], layer) for var in update.host}
        new = _of_one_layer(closed, update, env, local)
        return _written(buffers, [new[result] for result in written], layer), [new[result] for result in rest]

    begin = [env[stack] for stack in written.values()]
    layers = jax.numpy.arange(update.trips)
    buffers, made = jax.lax.scan(trip, begin, (layers, [env[var] for var in update.near]))
    return dict(zip([*written, *rest], [*buffers, *made], strict=True))


def run_fused(
    closed: compat.ClosedJaxpr,
    number: int,
    update: Update,
    env: Env,
    stacks: Mapping[int, Any],
    place: Mapping[Any, Any],
) -> Env:
    """The results of a scan that updates in every trip the layer whose gradients it makes.

    A trip writes the layer of the trip before, then fetches from the same stacks, so that XLA writes in place; neither
    has anything to do with what the trip computes.

    Args:
      number: of the scan's equation.
      env: what it and the update read, stacks in host memory among it.
      stacks: operand position -> stack in host memory that the scan reads.
      place: result of the update -> the stack that it is written over.
    """
    eqn = closed.jaxpr.eqns[number]
    scan = compat.scan_of(eqn)
    assert scan is not None
    consts, carries, sliced = scan.split([compat.read(env, atom) for atom in eqn.invars])
    first = len(consts) + len(carries)
    near = [operand for p, operand in enumerate(sliced, first) if p not in stacks]
    ahead = list(dict.fromkeys(stacks.values()))
    late = [var for var in update.host if var not in ahead]
    written = {result: place[result] for result in update.made}
    made = eqn.outvars[len(carries) :]
    rest = [var for var in made if var not in update.near]

    def body(carry: Any, x: Any) -> Any:
        (carried, buffers, finished, arrived), (layer, following, before, near) = carry, x
        buffers = _written(buffers, finished, before)
        there = {**env, **dict(zip(written.values(), buffers, strict=True))}
        coming = [fetch(there[var], following) for var in ahead]
        local = {var: fetch(there[var], layer) for var in late} | dict(zip(ahead, arrived, strict=True))
        others = iter(near)
        own = [local[stacks[p]] if p in stacks else next(others) for p in range(first, len(eqn.invars))]
        results = compat.jaxpr_as_fun(scan.body)(*consts, *carried, *own)
        local |= dict(zip(made, results[len(carries) :], strict=True))
        new = _of_one_layer(closed, update, env, local)
        state = results[: len(carries)], buffers, [new[result] for result in written], coming
        return state, [local[var] for var in rest]

    start, end = (scan.trips - 1, 0) if scan.reverse else (0, scan.trips - 1)
    buffers = [env[stack] for stack in written.values()]
    begin = carries, buffers, [fetch(stack, start) for stack in buffers], [fetch(env[var], start) for var in ahead]
    layers = jax.numpy.arange(scan.trips)
    before = jax.numpy.minimum(layers + 1, start) if scan.reverse else jax.numpy.maximum(layers - 1, start)
    (carried, buffers, finished, _), others = jax.lax.scan(
        body, begin, (layers, scan.following, before, near), length=scan.trips, reverse=scan.reverse, unroll=scan.unroll
    )
    buffers = _written(buffers, finished, end)
    names = [*eqn.outvars[: len(carries)], *rest, *written]
    return dict(zip(names, [*carried, *others, *buffers], strict=True))


def _written(buffers: Sequence[Any], results: Sequence[Any], layer: Any) -> list[Any]:
    """Stacks in host memory with one layer written anew."""
    return [
        jax.lax.dynamic_update_index_in_dim(stack, jax.device_put(result, _HOST), layer, 0)
        for stack, result in zip(buffers, results, strict=True)
    ]


def _of_one_layer(closed: compat.ClosedJaxpr, update: Update, env: Env, local: Env) -> Env:
    """What the equations of an update make of one layer, `local`."""
    local = {**{var: env[var] for var in update.whole}, **local}
    for number in update.eqns:
        eqn = closed.jaxpr.eqns[number]
        operands = [compat.read(local, atom) for atom in eqn.invars]
        with compat.as_written(eqn):
            local.update(zip(eqn.outvars, _of_layer(eqn, operands), strict=True))
    return local


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
    return primitives.fusion_of(eqn) == "elementwise" and name not in _MOVES_ELEMENTS and alike and same


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
