"""Rewrite pairs with other residuals; the backward bodies recompute the others.

A pair is of loops, of conditionals, or of `shard_map`s. Its bodies are joined to one flat jaxpr
(`joint`), in which pairs that cross its boundary are pairs like any other: they are rewritten
first, then the pair itself. So a residual may cross any boundaries, in any order.

The caller decides for every pair, in an order that a list of decisions reproduces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memplan.errors import PlanMismatchError, UnsupportedProgramError
from memplan.planning.loops import Loop, Residuals, can_segment, recomputed_ops
from memplan.planning.problem import Pin
from memplan.planning.transforms import LoopResiduals
from memplan.program import compat
from memplan.program.flat import Flat, flatten
from memplan.program.interpret import interpret
from memplan.program.loops.joint import Halves, Joint, Replacement, Store, rule_of
from memplan.program.loops.pairs import Pair, last_chained, loop_of, pairs
from memplan.program.loops.regions import RegionPair
from memplan.program.loops.write import LoopPair
from memplan.program.trace import Program, WithResiduals

Decide = Callable[[Loop], Residuals | None]
"""None leaves a pair as the user wrote it."""


def with_residuals(program: Program, decide: Decide, across: bool = False) -> Program:
    """The program with the residuals that `decide` returns; itself if all of them are None.

    Args:
      across: see `rewrite`.
    """
    decisions: list[tuple[Loop, Residuals | None]] = []

    def record(loop: Loop) -> Residuals | None:
        decisions.append((loop, decide(loop)))
        return decisions[-1][1]

    rewritten = rewrite(program.flat, record, program.pins, across).closed
    residuals = tuple(decision for _, decision in decisions)
    if not any(residuals):
        return program
    loops = tuple(loop for loop, _ in decisions)
    return program.transformed(WithResiduals(LoopResiduals(residuals, across), loops), rewritten)


def outer_loops(program: Program, across: bool = False) -> list[Loop]:
    """The step's pairs that are not inside the backward part of other pairs."""
    loops: list[Loop] = []
    rewrite(program.flat, loops.append, program.pins, across)
    return loops


def follow_residuals(program: Program, transform: LoopResiduals) -> Program:
    """The program with the residuals of a plan.

    Raises:
      PlanMismatchError: the program has other loops than the plan.
    """
    remaining = list(reversed(transform.residuals))

    def next_of(loop: Loop) -> Residuals | None:
        residuals = remaining.pop() if remaining else None
        if residuals is not None and not _fits(residuals, loop):
            raise _mismatch()
        return residuals

    rewritten = with_residuals(program, next_of, transform.across)
    if remaining or tuple(residuals for _, residuals in rewritten.loops) != transform.residuals:
        raise _mismatch()
    return rewritten


def _fits(residuals: Residuals, loop: Loop) -> bool:
    """Can the loop stack these residuals, recompute the others, and run in these segments?"""
    if residuals.segments and not can_segment(loop, residuals):
        return False
    values = set(range(len(loop.body.values)))
    recomputed = recomputed_ops(loop, residuals) if values.issuperset(residuals.stacked) else ()
    ops = [loop.body.ops[op] for op in recomputed]
    available = loop.available.union(residuals.stacked, *(op.outputs for op in ops))
    return (
        values.issuperset(residuals.stacked)
        and available.issuperset(loop.needed)
        and all(available.issuperset(op.inputs) and op.recomputable for op in ops)
    )


def _mismatch() -> PlanMismatchError:
    return PlanMismatchError(
        "the plan stacks residuals that the loops of this step do not have: it was made for "
        "another function, other shapes, or another jax version. Plan again."
    )


def rewrite(flat: Flat, decide: Decide, pins: Sequence[Pin] = (), across: bool = False) -> Flat:
    """A flat jaxpr with the residuals that `decide` returns; itself if nothing changes.

    Args:
      decide: called once per pair.
      across: pairs inside a pair of loops decide for themselves what crosses those loops.
    """
    return _Way(decide, tuple(pins), across).rewritten(flat)


@dataclass(frozen=True)
class _Way:
    """How to rewrite a jaxpr.

    Attributes:
      runs: how often it runs in a step.
      copies: how many values of it exist at once, if its backward part is in other bodies.
      may_use_host: residuals may be in host memory.
      may_segment: loops may run in segments.
      in_branch: its backward part is in the branches of another conditional.
      place: the equations and bodies around it.
      branches: see `Loop.branches`.
    """

    decide: Decide
    pins: tuple[Pin, ...]
    across: bool
    runs: int = 1
    copies: int = 1
    may_use_host: bool = True
    may_segment: bool = True
    in_branch: bool = False
    place: tuple[int, ...] = ()
    branches: tuple[tuple[tuple[int, ...], int], ...] = ()

    def rewritten(self, flat: Flat) -> Flat:
        """A flat jaxpr after all its pairs, the chained ones first.

        Of these the last is the first, so that each makes its residuals as the user wrote it.
        """
        end = len(flat.eqns)
        while (pair := last_chained(flat, end)) is not None:
            rewriter = _Rewriter(flat, replace(self, may_segment=False), len(flat.eqns))
            rewriter.rewrite_pair(pair)
            flat, end = rewriter.result(), pair.forward
        rewriter = _Rewriter(flat, self, len(flat.eqns))
        rewriter.run()
        return rewriter.result()

    def rewrite(self, body: compat.ClosedJaxpr) -> compat.ClosedJaxpr:
        """The same for a jaxpr that is not flat yet."""
        return self.rewritten(Flat(flatten(body))).closed


@dataclass
class _Rewriter:
    """Rewrites pairs of one flat jaxpr.

    Attributes:
      end: the number of the first equation that is in another body (`Joint`), or the count of all.
      replacements: id of an equation -> the function that replaces it.
      decided: pairs whose backward equations are in another body.
    """

    flat: Flat
    way: _Way
    end: int
    replacements: dict[int, Replacement] = field(default_factory=dict)
    decided: list[Pair] = field(default_factory=list)

    def run(self) -> None:
        """Rewrite the pairs whose forward equation is before the end, and the bodies before it."""
        paired = {number: pair for pair in pairs(self.flat) for number in pair.numbers}
        for number, eqn in enumerate(self.flat.eqns):
            pair = paired.get(number)
            if pair is None:
                if number < self.end:
                    self._rewrite_bodies(number, eqn)
            elif number == pair.backwards[0] and pair.forward < self.end:
                self.rewrite_pair(pair)

    def result(self) -> Flat:
        """The rewritten jaxpr."""
        if not self.replacements:
            return self.flat
        return Flat(compat.dce(self.flat.retraced(self._results)))

    def _results(self, *inputs: Any) -> list[Any]:
        return interpret(self.flat.closed, inputs, rule_of(self.replacements, {}))

    def _rewrite_bodies(self, number: int, eqn: compat.JaxprEqn) -> None:
        """Rewrite the pairs in the bodies of an equation that is in no pair."""
        written = eqn
        for index, inner in enumerate(compat.bodies_of(eqn)):
            flat = self._inner(number, index)
            if flat is None:
                continue
            with compat.inside(eqn):
                body = self._inside(number, index, inner.trips).rewritten(flat)
            if body is not flat:
                written = compat.with_computation(written, index, body.closed)
        if written is not eqn:
            self.replacements[id(eqn)] = lambda operands, _: compat.bind(written, operands)

    def _inner(self, number: int, index: int) -> Flat | None:
        """A body of an equation; None if it writes into mutable arrays."""
        try:
            return self.flat.inner(number, index)
        except UnsupportedProgramError:
            return None

    def _inside(self, number: int, index: int, trips: int) -> _Way:
        """How to rewrite a body of an equation, and what it computes for itself alone."""
        kind = self.flat.eqns[number].primitive.name
        way = self.way
        branch = ((*way.place, number), index)
        return replace(
            way,
            runs=way.runs * trips,
            copies=1,
            may_use_host=way.may_use_host and kind == "scan",
            in_branch=False,
            place=(*way.place, number, index),
            branches=(*way.branches, branch) if kind == "cond" else way.branches,
        )

    def rewrite_pair(self, pair: Pair) -> None:
        """Rewrite pairs that are in a pair of equations, then the pair itself."""
        bodies = [
            self._rewritten_body(pair, index)
            for index in range(len(compat.bodies_of(pair.forward_eqn)))
        ]
        if self._leaves(pair):
            self.decided.append(pair)
        if any(body.is_changed for body in bodies):
            with compat.inside(pair.forward_eqn):
                halves = [body.halves() for body in bodies]
            self._write(pair, halves, bodies[0].residuals)
        elif pair.kind != "scan":
            for number, eqn in zip(pair.backwards, pair.backward_eqns, strict=True):
                self._rewrite_bodies(number, eqn)

    def _rewritten_body(self, pair: Pair, index: int) -> _RewrittenBody:
        """What changes in one of the bodies of a pair's equations.

        XLA inlines a `shard_map`, so what a plan of kernels can recompute is left to it. It reads
        nothing across a loop or a branch.
        """
        eqn = pair.forward_eqn
        trips = compat.bodies_of(eqn)[index].trips
        leaves = self._leaves(pair)
        copies = self.way.copies if leaves else 1
        in_branch = self.way.in_branch and leaves
        inside = self._inside(pair.forward, index, trips)
        across = replace(inside, copies=trips * copies, in_branch=in_branch or pair.kind == "cond")
        with compat.inside(eqn):
            joint = Joint.of(pair, index)
            rewriter = _Rewriter(joint.flat, across, joint.ends[0])
            if pair.kind != "scan" or self.way.across:
                rewriter.run()
            body = _RewrittenBody(joint, rewriter.replacements, inside)
            if pair.kind == "shard_map" and not leaves:
                return body
            loop = replace(
                loop_of(pair, index, self.way.runs, self.way.pins, rewriter.decided),
                copies=copies,
                branches=inside.branches,
                may_use_host=pair.kind == "scan" and self.way.may_use_host and not leaves,
                is_in_branch=in_branch,
            )
            if not self.way.may_segment:
                loop = replace(loop, reverses=False)
            decides = loop.needed or pair.kind == "scan"
            return replace(body, loop=loop, residuals=self.way.decide(loop) if decides else None)

    def _leaves(self, pair: Pair) -> bool:
        """Are the backward equations in another body than the forward equation?"""
        return self.end <= pair.backwards[0]

    def _write(self, pair: Pair, halves: Sequence[Halves], residuals: Residuals | None) -> None:
        """Replace the equations of a pair by equations with these bodies."""
        if pair.kind == "scan":
            forward, backwards = LoopPair(pair, halves[0], residuals or Residuals(())).write()
            self._replace(pair, forward.run, [backward.run for backward in backwards])
            return
        regions = RegionPair(pair, halves)
        numbers = range(len(pair.backwards))
        run_backwards = [functools.partial(regions.run_backward, number) for number in numbers]
        self._replace(pair, regions.run_forward, run_backwards)

    def _replace(
        self,
        pair: Pair,
        run_forward: Callable[[list[Any]], tuple[list[Any], Any]],
        run_backwards: Sequence[Callable[[list[Any], Any], list[Any]]],
    ) -> None:
        """Replace the equations of a pair.

        Args:
          run_forward: operands -> results, and what the backward equations get.
          run_backwards: (operands, what the forward equation saved for them) -> results.
        """

        def forward(operands: list[Any], store: Store) -> list[Any]:
            results, store[pair.forward] = run_forward(operands)
            return results

        self.replacements[id(pair.forward_eqn)] = forward
        for eqn, run in zip(pair.backward_eqns, run_backwards, strict=True):
            self.replacements[id(eqn)] = lambda operands, store, run=run: run(
                operands, store[pair.forward]
            )


@dataclass(frozen=True)
class _RewrittenBody:
    """A body of the equations of a pair, with what changes in it."""

    joint: Joint
    replacements: Mapping[int, Replacement]
    inside: _Way  # how to rewrite its backward part
    loop: Loop | None = None
    residuals: Residuals | None = None  # None: those that the user's program has

    @property
    def is_changed(self) -> bool:
        return bool(self.replacements) or self.residuals is not None

    def halves(self) -> Halves:
        """The body's halves after the change."""
        rewrite = self.inside.rewrite
        return self.joint.halves(self.replacements, rewrite, self.loop, self.residuals)
