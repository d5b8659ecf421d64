"""Loops that belong together: a forward `scan` stacks residuals, a backward one reads them and is their only reader.

Such a pair is written anew with other residuals; what is not stacked any more, the backward body computes again. A
choice is asked for at every pair, outer loops before what is in their bodies, so a list of choices in that order is
enough to write the same program again. Chooses nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from memplan.errors import PlanMismatchError
from memplan.planning.loop import Loop, Residuals, repeated
from memplan.program import compat
from memplan.program.extract import body_graph, variables
from memplan.program.trace import Program, flatten
from memplan.program.transforms.layerwise_state import fetch

Decide = Callable[[Loop], Residuals | None]  # None leaves the loops as they are


@dataclass(frozen=True)
class _Pair:
    """A forward and a backward loop in one flat jaxpr.

    Attributes:
      forward, backward: indices of their equations.
      stacks: results of the forward loop (counted after its carries) that only the backward one reads, by the number
        of the stack that the backward loop takes them as.
      body: of the forward loop, flat.
    """

    forward: int
    backward: int
    stacks: dict[int, int]
    body: compat.ClosedJaxpr


def with_residuals(program: Program, decide: Decide) -> Program:
    """The program with its loops as decided; itself where there is no pair of loops."""
    found: list[tuple[Loop, Residuals | None]] = []

    def record(loop: Loop) -> Residuals | None:
        found.append((loop, decide(loop)))
        return found[-1][1]

    rewritten = rewrite_loops(program.jaxpr, record)
    decided = any(chosen is not None for _, chosen in found)
    return replace(program, loops=tuple(found), rewritten=rewritten) if decided else program


def pairs_of(program: Program) -> list[Loop]:
    """The pairs of loops of a step that are not inside others."""
    found: list[Loop] = []
    rewrite_loops(program.jaxpr, found.append)
    return found


def with_loops(program: Program, loops: Sequence[Residuals | None]) -> Program:
    """The program with its loops as a plan has them.

    Raises:
      PlanMismatchError: it has other loops.
    """
    waiting = list(reversed(loops))

    def next_of(loop: Loop) -> Residuals | None:
        residuals = waiting.pop() if waiting else None
        if residuals is not None and not _are_of(residuals, loop):
            raise _other_loops()
        return residuals

    found = with_residuals(program, next_of)
    if waiting or found.residuals != tuple(loops):
        raise _other_loops()
    return found


def _are_of(residuals: Residuals, loop: Loop) -> bool:
    """Do they name values of this loop's body from which the rest can be computed?"""
    known = set(range(len(loop.body.values)))
    again = repeated(loop, residuals) if known.issuperset(residuals.stacked) else ()
    there = loop.given.union(residuals.stacked, *(loop.body.ops[op].outputs for op in again))
    return (
        known.issuperset(residuals.stacked)
        and there.issuperset(loop.needed)
        and all(there.issuperset(loop.body.ops[op].inputs) and loop.body.ops[op].recomputable for op in again)
    )


def _other_loops() -> PlanMismatchError:
    return PlanMismatchError(
        "the plan stacks residuals that the loops of this step do not have: it was made for another function, other "
        "shapes, or another jax version. Plan again."
    )


def rewrite_loops(closed: compat.ClosedJaxpr, decide: Decide, runs: int = 1) -> compat.ClosedJaxpr:
    """A flat jaxpr with the residuals of all its pairs of loops as decided; itself where nothing changes.

    Args:
      decide: asked once per pair.
      runs: how often the jaxpr runs in a step.
    """
    return _Rewriter(closed, decide, runs).run()


@dataclass
class _Rewriter:
    closed: compat.ClosedJaxpr
    decide: Decide
    runs: int
    bodies: dict[int, Callable[..., list[Any]]] = field(default_factory=dict)  # equation -> what stands in its place

    def run(self) -> compat.ClosedJaxpr:
        eqns = self.closed.jaxpr.eqns
        paired = {pair.backward: pair for pair in _pairs(self.closed)}
        partners = {pair.forward for pair in paired.values()}
        for number, eqn in enumerate(eqns):
            scan = compat.scan_of(eqn)
            pair = paired.get(number)
            if scan is None or number in partners:
                continue
            if pair is None:
                self._alone(number, scan)
            else:
                self._together(pair)
        if not self.bodies:
            return self.closed
        avals = [compat.as_struct(var.aval) for var in self.closed.jaxpr.invars]
        return compat.drop_dead(jax.make_jaxpr(self._evaluate)(*avals))

    def _alone(self, number: int, scan: compat.Scan) -> None:
        """A loop of its own: there may be pairs in its body."""
        flat = flatten(scan.body)
        body = rewrite_loops(flat, self.decide, self.runs * scan.trips)
        if body is not flat:
            self.bodies[number] = lambda operands: scan.run(compat.jaxpr_as_fun(body), operands)

    def _together(self, pair: _Pair) -> None:
        eqns = self.closed.jaxpr.eqns
        forward, backward = compat.scan_of(eqns[pair.forward]), compat.scan_of(eqns[pair.backward])
        assert forward is not None and backward is not None
        loop = _loop(pair, forward, self.runs)
        residuals = self.decide(loop)
        if residuals is not None:
            ends = _Ends(pair, forward, backward, loop, residuals)
            within = self.runs * forward.trips
            ends.write(lambda body: rewrite_loops(body, self.decide, within))
            self.bodies[pair.forward] = ends.run_forward
            self.bodies[pair.backward] = ends.run_backward

    def _evaluate(self, *inputs: Any) -> list[Any]:
        env: dict[compat.Var, Any] = dict(compat.consts_of(self.closed))
        env.update(zip(self.closed.jaxpr.invars, inputs, strict=True))

        for number, eqn in enumerate(self.closed.jaxpr.eqns):
            operands = [compat.read(env, atom) for atom in eqn.invars]
            with compat.as_written(eqn):
                body = self.bodies.get(number)
                results = compat.bind(eqn, operands) if body is None else body(operands)
            env.update(zip(eqn.outvars, results, strict=True))
        return [compat.read(env, atom) for atom in self.closed.jaxpr.outvars]


@dataclass
class _Ends:
    """A pair written anew.

    The forward body returns what is to be stacked after its own results; the backward body takes it, and the constants
    and slices of the forward loop, after its own. A stack that is gone is None between the two.
    """

    pair: _Pair
    forward: compat.Scan
    backward: compat.Scan
    loop: Loop
    residuals: Residuals
    known: list[Any] = field(init=False)  # variables of the forward body by value id
    forward_body: compat.ClosedJaxpr = field(init=False)
    backward_body: compat.ClosedJaxpr = field(init=False)
    given: list[Any] = field(default_factory=list)  # constants and stacks of the forward loop
    stacked: list[Any] = field(default_factory=list)

    def write(self, within: Callable[[compat.ClosedJaxpr], compat.ClosedJaxpr]) -> None:
        """Trace the new bodies; `within` rewrites the loops inside them."""
        flat = self.pair.body
        inputs = [compat.as_struct(var.aval) for var in flat.jaxpr.invars]
        self.known = variables(flat)
        residuals = [compat.as_struct(self.known[value].aval) for value in self.residuals.stacked]
        consts, _, slices = self.forward.split(inputs)
        theirs = [compat.as_struct(var.aval) for var in self.backward.body.jaxpr.invars]
        own_consts, own_carries, own_slices = self.backward.split(theirs)
        kept = [aval for number, aval in enumerate(own_slices) if number not in self.pair.stacks.values()]
        self.forward_body = within(flatten(jax.make_jaxpr(self._stack)(*inputs)))
        traced = jax.make_jaxpr(self._again)(consts, own_consts, own_carries, kept, slices, residuals)
        self.backward_body = within(flatten(traced))

    def _stack(self, *inputs: Any) -> list[Any]:
        """The forward body: its carries, the stacks that stay, the new residuals."""
        flat = self.pair.body
        env = dict(compat.consts_of(flat))
        env.update(zip(flat.jaxpr.invars, inputs, strict=True))
        for eqn in flat.jaxpr.eqns:
            with compat.as_written(eqn):
                env.update(
                    zip(eqn.outvars, compat.bind(eqn, [compat.read(env, atom) for atom in eqn.invars]), strict=True)
                )
        results = [compat.read(env, atom) for atom in flat.jaxpr.outvars]
        carries, stacks = results[: self.forward.carries], results[self.forward.carries :]
        stay = [stack for number, stack in enumerate(stacks) if number not in self.pair.stacks]
        return [*carries, *stay, *(env[self.known[value]] for value in self.residuals.stacked)]

    def _again(
        self, consts: Any, own_consts: Any, own_carries: Any, kept: Any, slices: Any, residuals: Any
    ) -> list[Any]:
        """The backward body, with what it is not given any more computed again."""
        flat = self.pair.body
        env = dict(compat.consts_of(flat))
        first, _, last = self.forward.split(flat.jaxpr.invars)
        env.update(zip([*first, *last], [*consts, *slices], strict=True))
        env.update({self.known[v]: value for v, value in zip(self.residuals.stacked, residuals, strict=True)})
        for op in repeated(self.loop, self.residuals):
            eqn = flat.jaxpr.eqns[op]
            with compat.as_written(eqn):
                results = compat.bind(eqn, [compat.read(env, atom) for atom in eqn.invars])
            for var, result in zip(eqn.outvars, results, strict=True):
                env.setdefault(var, result)
        results = flat.jaxpr.outvars[self.forward.carries :]
        source = {taken: results[made] for made, taken in self.pair.stacks.items()}
        rest = iter(kept)
        count = len(kept) + len(source)
        own = [compat.read(env, source[number]) if number in source else next(rest) for number in range(count)]
        return compat.jaxpr_as_fun(self.backward.body)(*own_consts, *own_carries, *own)

    def run_forward(self, operands: Sequence[Any]) -> list[Any]:
        """In place of the forward equation; the stacks that are gone are None."""
        consts, _, stacks = self.forward.split(operands)
        self.given = [*consts, *stacks]
        results = self.forward.run(self._forward_trip, operands)
        own = len(results) - len(self.residuals.stacked)
        carries, rest, self.stacked = (
            results[: self.forward.carries],
            results[self.forward.carries : own],
            results[own:],
        )
        left = iter(rest)
        count = len(rest) + len(self.pair.stacks)
        return [*carries, *(None if number in self.pair.stacks else next(left) for number in range(count))]

    def run_backward(self, operands: Sequence[Any]) -> list[Any]:
        """In place of the backward equation. What comes from the host arrives a trip before it is read."""
        taken = set(self.pair.stacks.values())
        own_consts, carries, own = self.backward.split(operands)
        kept = [stack for number, stack in enumerate(own) if number not in taken]
        consts, stacks = self.given[: self.forward.consts], self.given[self.forward.consts :]
        moves = self.residuals.on_host
        on_host = [stack for stack, moved in zip(self.stacked, moves, strict=True) if moved]
        on_device = [stack for stack, moved in zip(self.stacked, moves, strict=True) if not moved]
        begin = self.backward.trips - 1 if self.backward.reverse else 0

        def body(carry: Any, slices: Any) -> Any:
            carried, arrived = carry
            following, own, theirs, there = slices
            coming = [fetch(stack, following) for stack in on_host]
            near, far = iter(there), iter(arrived)
            residuals = [next(far) if moved else next(near) for moved in moves]
            backward = compat.jaxpr_as_fun(self.backward_body)
            results = backward(*consts, *own_consts, *carried, *own, *theirs, *residuals)
            return (results[: len(carries)], coming), results[len(carries) :]

        first = [fetch(stack, begin) for stack in on_host] if self.backward.trips else []
        (carried, _), made = jax.lax.scan(
            body, (carries, first), (self.backward.following, kept, stacks, on_device), length=self.backward.trips,
            reverse=self.backward.reverse, unroll=self.backward.unroll,
        )  # fmt: skip
        return [*carried, *made]

    def _forward_trip(self, *inputs: Any) -> list[Any]:
        results = list(compat.jaxpr_as_fun(self.forward_body)(*inputs))
        own = len(results) - len(self.residuals.stacked)
        rest = zip(results[own:], self.residuals.on_host, strict=True)
        return [*results[:own], *(jax.device_put(v, jax.memory.Space.Host) if moves else v for v, moves in rest)]


def _loop(pair: _Pair, forward: compat.Scan, runs: int) -> Loop:
    """The pair as a planner sees it."""
    flat = pair.body
    graph = body_graph(flat)
    carried = range(forward.consts, forward.consts + forward.carries)
    number = {var: value for value, var in enumerate(variables(flat))}
    results = [flat.jaxpr.outvars[forward.carries + made] for made in pair.stacks]
    needed = {number[atom] for atom in results if not isinstance(atom, compat.Literal)}
    given = frozenset(set(range(len(graph.values))).difference(carried, *(op.outputs for op in graph.ops)))
    # A jaxlib before August 2026 can take a slice at an index like `n - 1 - i` from the wrong end of a stack on the
    # host (openxla/xla#46231). The backward loop here looks its indices up in an array; a reversed forward loop writes
    # at such an index.
    return Loop(graph, forward.trips, runs, given, frozenset(needed - given), movable=not forward.reverse)


def _pairs(closed: compat.ClosedJaxpr) -> Iterator[_Pair]:
    """Every backward loop with the forward loop that stacks most for it."""
    eqns = closed.jaxpr.eqns
    readers: dict[Any, set[int]] = {}
    for number, eqn in enumerate(eqns):
        for atom in eqn.invars:
            if not isinstance(atom, compat.Literal):
                readers.setdefault(atom, set()).add(number)
    returned = {atom for atom in closed.jaxpr.outvars if not isinstance(atom, compat.Literal)}
    made: dict[Any, tuple[int, int]] = {}  # a stack -> its loop, its number among that loop's stacks
    taken: set[int] = set()
    for number, eqn in enumerate(eqns):
        scan = compat.scan_of(eqn)
        if scan is None:
            continue
        consts, carries, stacks = scan.split(eqn.invars)
        found: dict[int, dict[int, int]] = {}
        for position, atom in enumerate(stacks):
            if atom in made and readers[atom] == {number} and atom not in returned and stacks.count(atom) == 1:
                forward, stack = made[atom]
                if atom not in consts and atom not in carries and forward not in taken:
                    found.setdefault(forward, {})[stack] = position
        for forward, matches in sorted(found.items(), key=lambda item: -len(item[1]))[:1]:
            source = compat.scan_of(eqns[forward])
            if source is not None and source.trips == scan.trips:
                taken.update((forward, number))
                yield _Pair(forward, number, matches, flatten(source.body))
        for stack, var in enumerate(eqn.outvars[scan.carries :]):
            made[var] = (number, stack)
