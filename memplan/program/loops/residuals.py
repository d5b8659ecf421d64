"""Rewrite pairs of loops with other residuals; the backward body recomputes those that are no longer stacked.

The choices are made elsewhere, one for every pair, outer loops before inner ones, so that a list of choices in this
order reproduces the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from memplan.errors import PlanMismatchError
from memplan.planning.loops import Loop, Residuals, recomputed_ops
from memplan.program import compat
from memplan.program.flat import Flat, flatten
from memplan.program.host_memory import HostArray
from memplan.program.interpret import bindings, interpret, interpret_eqns
from memplan.program.trace import LoopResiduals, Program

Decide = Callable[[Loop], Residuals | None]  # None leaves the loops unchanged


def with_residuals(program: Program, decide: Decide) -> Program:
    """The program with its loops as decided; itself if there is no pair of loops."""
    found: list[tuple[Loop, Residuals | None]] = []

    def record(loop: Loop) -> Residuals | None:
        found.append((loop, decide(loop)))
        return found[-1][1]

    rewritten = rewrite_loops(program.flat, record).closed
    decided = any(chosen is not None for _, chosen in found)
    return program.transform(LoopResiduals(tuple(found)), rewritten) if decided else program


def outer_loops(program: Program) -> list[Loop]:
    """The pairs of loops of a step that are not inside others."""
    found: list[Loop] = []
    rewrite_loops(program.flat, found.append)
    return found


def follow_residuals(program: Program, loops: Sequence[Residuals | None]) -> Program:
    """The program with the loops of a plan.

    Raises:
      PlanMismatchError: it has other loops.
    """
    waiting = list(reversed(loops))

    def next_of(loop: Loop) -> Residuals | None:
        residuals = waiting.pop() if waiting else None
        if residuals is not None and not _fits(residuals, loop):
            raise _mismatch()
        return residuals

    found = with_residuals(program, next_of)
    if waiting or found.residuals != tuple(loops):
        raise _mismatch()
    return found


def _fits(residuals: Residuals, loop: Loop) -> bool:
    """Are they values of this loop's body from which the rest can be computed?"""
    known = set(range(len(loop.body.values)))
    again = recomputed_ops(loop, residuals) if known.issuperset(residuals.stacked) else ()
    there = loop.given.union(residuals.stacked, *(loop.body.ops[op].outputs for op in again))
    return (
        known.issuperset(residuals.stacked)
        and there.issuperset(loop.needed)
        and all(there.issuperset(loop.body.ops[op].inputs) and loop.body.ops[op].recomputable for op in again)
    )


def _mismatch() -> PlanMismatchError:
    return PlanMismatchError(
        "the plan stacks residuals that the loops of this step do not have: it was made for another function, other "
        "shapes, or another jax version. Plan again."
    )


def rewrite_loops(flat: Flat, decide: Decide, runs: int = 1) -> Flat:
    """A flat jaxpr with the residuals of all its pairs of loops as decided; itself if nothing changes.

    Args:
      decide: called once per pair.
      runs: how often the jaxpr runs in a step.
    """
    return _Rewriter(flat, decide, runs).run()


@dataclass
class _Rewriter:
    flat: Flat
    decide: Decide
    runs: int
    replacements: dict[int, Callable[..., list[Any]]] = field(default_factory=dict)  # by the id of an equation

    def run(self) -> Flat:
        paired = {pair.backward: pair for pair in loop_pairs(self.flat)}
        partners = {pair.forward for pair in paired.values()}
        for number, eqn in enumerate(self.flat.eqns):
            scan = compat.scan_of(eqn)
            pair = paired.get(number)
            if scan is None or number in partners:
                continue
            if pair is None:
                self._rewrite_body(eqn, scan)
            else:
                self._rewrite_pair(pair)
        if not self.replacements:
            return self.flat
        return Flat(compat.dce(self.flat.retraced(self._results)))

    def _rewrite_body(self, eqn: compat.JaxprEqn, scan: compat.Scan) -> None:
        """Rewrite pairs in the body of an unpaired loop."""
        flat = Flat(flatten(scan.body))
        body = rewrite_loops(flat, self.decide, self.runs * scan.trips)
        if body is not flat:
            self.replacements[id(eqn)] = lambda operands: scan.run(compat.jaxpr_as_fun(body.closed), operands)

    def _rewrite_pair(self, pair: LoopPair) -> None:
        first, second = self.flat.eqns[pair.forward], self.flat.eqns[pair.backward]
        forward, backward = compat.scan_of(first), compat.scan_of(second)
        assert forward is not None and backward is not None
        loop = loop_of(pair, forward, self.runs)
        residuals = self.decide(loop)
        if residuals is not None:
            rewritten = _RewrittenPair(pair, forward, backward, loop, residuals)
            within = self.runs * forward.trips
            rewritten.write(lambda body: rewrite_loops(Flat(flatten(body)), self.decide, within).closed)
            self.replacements[id(first)] = rewritten.run_forward
            self.replacements[id(second)] = rewritten.run_backward

    def _results(self, *inputs: Any) -> list[Any]:
        def rule(eqn: compat.JaxprEqn, operands: list[Any]) -> list[Any]:
            replacement = self.replacements.get(id(eqn))
            return compat.bind(eqn, operands) if replacement is None else replacement(operands)

        return interpret(self.flat.closed, inputs, rule)


@dataclass
class _RewrittenPair:
    """Rewrites one pair.

    The forward body returns the new residuals after its own results; the backward body takes them, and the constants
    and slices of the forward loop, after its own operands. A stack that is gone is None between the two.
    """

    pair: LoopPair
    forward: compat.Scan
    backward: compat.Scan
    loop: Loop
    residuals: Residuals
    forward_body: compat.ClosedJaxpr = field(init=False)
    backward_body: compat.ClosedJaxpr = field(init=False)
    given: list[Any] = field(default_factory=list)  # constants and stacks of the forward loop
    on_host: list[HostArray] = field(default_factory=list)  # residuals that the forward loop stacked
    on_device: list[Any] = field(default_factory=list)

    def write(self, within: Callable[[compat.ClosedJaxpr], compat.ClosedJaxpr]) -> None:
        """Trace the new bodies; `within` flattens them, and rewrites the loops inside."""
        inputs = [compat.as_struct(var.aval) for var in self.pair.body.invars]
        residuals = [compat.as_struct(self._var(value).aval) for value in self.residuals.stacked]
        consts, _, slices = self.forward.split(inputs)
        theirs = [compat.as_struct(var.aval) for var in self.backward.body.jaxpr.invars]
        own_consts, own_carries, own_slices = self.backward.split(theirs)
        kept = [aval for number, aval in enumerate(own_slices) if number not in self.pair.stacks.values()]
        self.forward_body = within(jax.make_jaxpr(self._stack)(*inputs))
        traced = jax.make_jaxpr(self._recompute)(consts, own_consts, own_carries, kept, slices, residuals)
        self.backward_body = within(traced)

    def _var(self, value: int) -> Any:
        return self.pair.body.values[value]

    def _stack(self, *inputs: Any) -> list[Any]:
        """The forward body: its carries, the remaining stacks, the new residuals."""
        flat, carries = self.pair.body, self.forward.carries
        stay = [atom for n, atom in enumerate(flat.outvars[carries:]) if n not in self.pair.stacks]
        outputs = [*flat.outvars[:carries], *stay, *map(self._var, self.residuals.stacked)]
        return interpret_eqns(flat.eqns, bindings(flat.closed, inputs), outputs)

    def _recompute(
        self, consts: Any, own_consts: Any, own_carries: Any, kept: Any, slices: Any, residuals: Any
    ) -> list[Any]:
        """The backward body, which recomputes the values that it no longer receives."""
        flat = self.pair.body
        first, _, last = self.forward.split(flat.invars)
        known = dict(compat.consts_of(flat.closed))
        known.update(zip([*first, *last], [*consts, *slices], strict=True))
        known.update((self._var(v), value) for v, value in zip(self.residuals.stacked, residuals, strict=True))
        eqns = [flat.eqns[op] for op in recomputed_ops(self.loop, self.residuals)]
        results = flat.outvars[self.forward.carries :]
        source = {taken: results[made] for made, taken in self.pair.stacks.items()}
        replaced = dict(zip(source, interpret_eqns(eqns, known, list(source.values())), strict=True))
        rest = iter(kept)
        own = [replaced[n] if n in replaced else next(rest) for n in range(len(kept) + len(source))]
        return compat.jaxpr_as_fun(self.backward.body)(*own_consts, *own_carries, *own)

    def run_forward(self, operands: Sequence[Any]) -> list[Any]:
        """Replaces the forward equation; stacks that are gone are None."""
        scan, carries = self.forward, self.forward.carries
        consts, begin, stacks = scan.split(operands)
        self.given = [*consts, *stacks]

        def body(carry: Any, slices: Any) -> Any:
            trip, carried, hosts = carry
            results = list(compat.jaxpr_as_fun(self.forward_body)(*consts, *carried, *slices))
            own = len(results) - len(self.residuals.stacked)
            far, near = self._apart(results[own:])
            layer = scan.trips - 1 - trip if scan.reverse else trip
            hosts = [host.written(layer, value[None]) for host, value in zip(hosts, far, strict=True)]
            return (trip + 1, results[:carries], hosts), (results[carries:own], near)

        hosts, _ = self._apart([self._empty(value) for value in self.residuals.stacked])
        (_, carried, self.on_host), (rest, self.on_device) = jax.lax.scan(
            body, (jnp.int32(0), begin, hosts), stacks, length=scan.trips, reverse=scan.reverse, unroll=scan.unroll
        )
        left = iter(rest)
        count = len(rest) + len(self.pair.stacks)
        return [*carried, *(None if number in self.pair.stacks else next(left) for number in range(count))]

    def _empty(self, value: int) -> HostArray:
        """A stack in host memory. The backward loop's last trip fetches a layer beyond the last one."""
        aval, trips = self._var(value).aval, self.forward.trips
        spare = (1, 0) if self.backward.reverse else (0, 1)
        return HostArray.empty((trips, *aval.shape), aval.dtype, dim=0, rows=1, trips=trips, spare=spare)

    def _apart(self, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Residuals on the host, and the others."""
        moved = list(zip(values, self.residuals.stacked_on_host, strict=True))
        return [value for value, moves in moved if moves], [value for value, moves in moved if not moves]

    def run_backward(self, operands: Sequence[Any]) -> list[Any]:
        """Replaces the backward equation. Values from the host arrive one trip before they are read."""
        scan, taken = self.backward, set(self.pair.stacks.values())
        own_consts, carries, own = scan.split(operands)
        kept = [stack for number, stack in enumerate(own) if number not in taken]
        consts, stacks = self.given[: self.forward.consts], self.given[self.forward.consts :]

        def fetch(trip: Any) -> list[Any]:
            layer = scan.trips - 1 - trip if scan.reverse else trip
            return [host.rows(layer, (0, 1))[0] for host in self.on_host]

        def body(carry: Any, slices: Any) -> Any:
            trip, carried, arrived = carry
            own, theirs, there = slices
            coming = fetch(trip + 1)
            near, far = iter(there), iter(arrived)
            residuals = [next(far) if moved else next(near) for moved in self.residuals.stacked_on_host]
            backward = compat.jaxpr_as_fun(self.backward_body)
            results = backward(*consts, *own_consts, *carried, *own, *theirs, *residuals)
            return (trip + 1, results[: len(carries)], coming), results[len(carries) :]

        first = fetch(0) if scan.trips else []
        (_, carried, _), made = jax.lax.scan(
            body, (jnp.int32(0), carries, first), (kept, stacks, self.on_device), length=scan.trips,
            reverse=scan.reverse, unroll=scan.unroll,
        )  # fmt: skip
        return [*carried, *made]


@dataclass(frozen=True)
class LoopPair:
    """A forward and a backward loop in one flat jaxpr."""

    # forward, backward: indices of their equations
    forward: int
    backward: int
    # result of the forward loop (counted after its carries) that only the backward one reads -> its stack there
    stacks: dict[int, int]
    body: Flat  # of the forward loop


def loop_pairs(flat: Flat) -> Iterator[LoopPair]:
    """Every backward loop with the forward loop that stacks most for it."""
    made: dict[Any, tuple[int, int]] = {}  # a stack -> its loop, its number among that loop's stacks
    taken: set[int] = set()
    for number, eqn in enumerate(flat.eqns):
        scan = compat.scan_of(eqn)
        if scan is None:
            continue
        consts, carries, stacks = scan.split(eqn.invars)
        found: dict[int, dict[int, int]] = {}
        for position, atom in enumerate(stacks):
            is_alone = atom in made and flat.readers[atom] == {number} and stacks.count(atom) == 1
            if is_alone and atom not in flat.returned:
                forward, stack = made[atom]
                if atom not in consts and atom not in carries and forward not in taken:
                    found.setdefault(forward, {})[stack] = position
        for forward, matches in sorted(found.items(), key=lambda item: -len(item[1]))[:1]:
            source = compat.scan_of(flat.eqns[forward])
            if source is not None and source.trips == scan.trips:
                taken.update((forward, number))
                yield LoopPair(forward, number, matches, Flat(flatten(source.body)))
        for stack, var in enumerate(eqn.outvars[scan.carries :]):
            made[var] = (number, stack)


def loop_of(pair: LoopPair, forward: compat.Scan, runs: int) -> Loop:
    """The pair as planners see it."""
    flat, graph = pair.body, pair.body.graph
    carried = range(forward.consts, forward.consts + forward.carries)
    results = [flat.outvars[forward.carries + made] for made in pair.stacks]
    needed = {flat.number_of[atom] for atom in results if compat.is_var(atom)}
    given = frozenset(set(range(len(graph.values))).difference(carried, *(op.outputs for op in graph.ops)))
    return Loop(graph, forward.trips, runs, given, frozenset(needed - given))
