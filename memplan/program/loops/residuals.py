"""Rewrite pairs of loops with other residuals; the backward body recomputes the others.

The caller decides for every pair, outer loops before inner ones, so that a list of decisions in
this order reproduces the program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memplan.errors import PlanMismatchError, UnsupportedProgramError
from memplan.planning.loops import Loop, Residuals, can_segment, recomputed_ops
from memplan.planning.problem import Pin
from memplan.planning.transforms import LoopResiduals
from memplan.program import compat
from memplan.program.flat import Flat, flatten
from memplan.program.interpret import interpret
from memplan.program.loops.joint import Halves, Joint, Replacement, Store
from memplan.program.loops.pairs import Pair, branch_of, loop_of, pairs
from memplan.program.loops.regions import RegionPair
from memplan.program.loops.write import LoopPair
from memplan.program.trace import Program, WithResiduals

Decide = Callable[[Loop], Residuals | None]  # None leaves the loops unchanged


def with_residuals(program: Program, decide: Decide) -> Program:
    """The program with the residuals that `decide` returns; itself if all of them are None."""
    decisions: list[tuple[Loop, Residuals | None]] = []

    def record(loop: Loop) -> Residuals | None:
        decisions.append((loop, decide(loop)))
        return decisions[-1][1]

    rewritten = rewrite(program.flat, record, program.pins).closed
    residuals = tuple(decision for _, decision in decisions)
    if not any(residuals):
        return program
    loops = tuple(loop for loop, _ in decisions)
    return program.transformed(WithResiduals(LoopResiduals(residuals), loops), rewritten)


def outer_loops(program: Program) -> list[Loop]:
    """The step's pairs of loops that are not inside other pairs."""
    loops: list[Loop] = []
    rewrite(program.flat, loops.append, program.pins)
    return loops


def follow_residuals(program: Program, loops: Sequence[Residuals | None]) -> Program:
    """The program with the loops of a plan.

    Raises:
      PlanMismatchError: the program has other loops than the plan.
    """
    remaining = list(reversed(loops))

    def next_of(loop: Loop) -> Residuals | None:
        residuals = remaining.pop() if remaining else None
        if residuals is not None and not _fits(residuals, loop):
            raise _mismatch()
        return residuals

    rewritten = with_residuals(program, next_of)
    if remaining or tuple(residuals for _, residuals in rewritten.loops) != tuple(loops):
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


def rewrite(
    flat: Flat,
    decide: Decide,
    pins: Sequence[Pin] = (),
    runs: int = 1,
    may_use_host: bool = True,
) -> Flat:
    """A flat jaxpr with the residuals that `decide` returns; itself if nothing changes.

    Args:
      decide: called once per pair.
      runs: how often the jaxpr runs in a step.
      may_use_host: residuals may be in host memory.
    """
    rewriter = _Rewriter(flat, decide, pins, runs, may_use_host)
    rewriter.rewrite(len(flat.eqns))
    return rewriter.result()


@dataclass
class _Rewriter:
    """Rewrites the pairs of one flat jaxpr, those inside a pair first."""

    flat: Flat
    decide: Decide
    pins: Sequence[Pin]
    runs: int
    may_use_host: bool
    branch_end: int | None = None  # the end of a forward branch: later equations are in another
    # id of an equation -> the function that replaces it
    replacements: dict[int, Replacement] = field(default_factory=dict)

    def rewrite(self, end: int) -> None:
        """Rewrite the pairs whose forward equation is before equation `end`, and bodies before."""
        paired = {number: pair for pair in pairs(self.flat) for number in pair.numbers}
        for number, eqn in enumerate(self.flat.eqns):
            pair = paired.get(number)
            if pair is None:
                if number < end:
                    self._rewrite_bodies(number, eqn)
            elif number == pair.backwards[0] and pair.forward < end:
                self._rewrite_pair(pair)

    def result(self) -> Flat:
        """The rewritten jaxpr."""
        if not self.replacements:
            return self.flat
        return Flat(compat.dce(self.flat.retraced(self._results)))

    def _results(self, *inputs: Any) -> list[Any]:
        store: Store = {}

        def rule(eqn: compat.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
            replacement = self.replacements.get(id(eqn))
            return replacement(operands, store) if replacement else compat.bind(eqn, operands)

        return interpret(self.flat.closed, inputs, rule)

    def _rewrite_bodies(self, number: int, eqn: compat.JaxprEqn) -> None:
        """Rewrite the pairs in the bodies of an equation that is in no pair."""
        written = eqn
        for index, inner in enumerate(compat.bodies_of(eqn)):
            flat = self._inner(number, index)
            if flat is None:
                continue
            with compat.inside(eqn):
                body = self._inside(eqn, inner.trips).rewritten(flat)
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

    def _inside(self, eqn: compat.JaxprEqn, trips: int = 1) -> _Body:
        """How to rewrite the bodies of an equation."""
        may_use_host = self.may_use_host and eqn.primitive.name == "scan"
        return _Body(self.decide, self.pins, self.runs * trips, may_use_host)

    def _leaves_branch(self, pair: Pair) -> bool:
        """Are the backward equations in another branch than the forward equation?"""
        return self.branch_end is not None and pair.backwards[0] >= self.branch_end

    def _rewrite_pair(self, pair: Pair) -> None:
        if pair.kind == "scan":
            self._rewrite_loops(pair)
        else:
            self._rewrite_regions(pair)

    def _rewrite_loops(self, pair: Pair) -> None:
        loop = loop_of(pair, self.runs, self.pins)
        in_branch = self._leaves_branch(pair)
        loop = replace(loop, may_use_host=self.may_use_host, is_in_branch=in_branch)
        residuals = self.decide(loop)
        if residuals is None:
            return
        body = self._inside(pair.forward_eqn, loop.trips)
        forward, backwards = LoopPair(pair, loop, residuals).write(body.rewrite)
        self._replace(pair, forward.run, [backward.run for backward in backwards])

    def _rewrite_regions(self, pair: Pair) -> None:
        """Rewrite pairs that are in the bodies of the equations, and across; then the bodies."""
        eqn = pair.forward_eqn
        count = len(compat.bodies_of(eqn))
        with compat.inside(eqn):
            body = self._inside(eqn)
            in_branch = self._leaves_branch(pair)
            halves = [body.halves(pair, index, in_branch) for index in range(count)]
        if any(is_changed for _, is_changed in halves):
            written = RegionPair(pair, [half for half, _ in halves])
            numbers = range(len(pair.backwards))
            backwards = [functools.partial(written.run_backward, number) for number in numbers]
            self._replace(pair, written.run_forward, backwards)

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
class _Body:
    """How to rewrite a body of an equation."""

    decide: Decide
    pins: Sequence[Pin]
    runs: int
    may_use_host: bool

    def rewritten(self, flat: Flat) -> Flat:
        """The body with the residuals that `decide` returns."""
        return rewrite(flat, self.decide, self.pins, self.runs, self.may_use_host)

    def rewrite(self, body: compat.ClosedJaxpr) -> compat.ClosedJaxpr:
        """The same, for a body that is not flat yet."""
        return self.rewritten(Flat(flatten(body))).closed

    def halves(self, pair: Pair, index: int, in_branch: bool) -> tuple[Halves, bool]:
        """The bodies of a pair, rewritten; and did they change?

        XLA inlines a `shard_map`, so what a plan of kernels can recompute is left to it. What a
        loop makes stays a residual, as its own pair decides.

        Args:
          in_branch: the pair's equations are in the branches of another pair.
        """
        joint = Joint.of(pair, index)
        is_branch = pair.kind == "cond"
        loop = residuals = None
        if is_branch:
            loop = branch_of(joint.forward, joint.read_later, pair.source, self.runs, self.pins)
            residuals = self.decide(loop) if loop.needed else None
        rewriter = _Rewriter(
            joint.flat,
            self.decide,
            self.pins,
            self.runs,
            self.may_use_host,
            branch_end=joint.ends[0] if is_branch or in_branch else None,
        )
        rewriter.rewrite(joint.ends[0])
        is_changed = residuals is not None or bool(rewriter.replacements)
        return joint.halves(rewriter.replacements, self.rewrite, loop, residuals), is_changed
