"""Rewrite pairs of loops with other residuals; the backward body recomputes those that are no longer stacked.

The choices are made elsewhere, one for every pair, outer loops before inner ones, so that a list of choices in this
order reproduces the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from memplan.errors import PlanMismatchError
from memplan.planning.loops import Loop, Residuals, can_segment, recomputed_ops
from memplan.planning.problem import Pin
from memplan.program import compat
from memplan.program.flat import Flat, flatten
from memplan.program.interpret import interpret
from memplan.program.loops.pairs import LoopPair, loop_of, loop_pairs
from memplan.program.loops.write import WrittenPair
from memplan.program.trace import LoopResiduals, Program

Decide = Callable[[Loop], Residuals | None]  # None leaves the loops unchanged


def with_residuals(program: Program, decide: Decide) -> Program:
    """The program with its loops as decided; itself if there is no pair of loops."""
    found: list[tuple[Loop, Residuals | None]] = []

    def record(loop: Loop) -> Residuals | None:
        found.append((loop, decide(loop)))
        return found[-1][1]

    rewritten = rewrite_loops(program.flat, record, program.pins).closed
    decided = any(chosen is not None for _, chosen in found)
    return program.transform(LoopResiduals(tuple(found)), rewritten) if decided else program


def outer_loops(program: Program) -> list[Loop]:
    """The pairs of loops of a step that are not inside others."""
    found: list[Loop] = []
    rewrite_loops(program.flat, found.append, program.pins)
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
    """Are they values of this loop's body from which the rest can be computed, and segments of its trips?"""
    if residuals.segments and not can_segment(loop, residuals):
        return False
    known = set(range(len(loop.body.values)))
    again = recomputed_ops(loop, residuals) if known.issuperset(residuals.stacked) else ()
    there = loop.available.union(residuals.stacked, *(loop.body.ops[op].outputs for op in again))
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


def rewrite_loops(flat: Flat, decide: Decide, pins: Sequence[Pin] = (), runs: int = 1) -> Flat:
    """A flat jaxpr with the residuals of all its pairs of loops as decided; itself if nothing changes.

    Args:
      decide: called once per pair.
      runs: how often the jaxpr runs in a step.
    """
    return _Rewriter(flat, decide, pins, runs).run()


@dataclass
class _Rewriter:
    flat: Flat
    decide: Decide
    pins: Sequence[Pin]
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
                self._rewrite_body(number, scan)
            else:
                self._rewrite_pair(pair)
        if not self.replacements:
            return self.flat
        return Flat(compat.dce(self.flat.retraced(self._results)))

    def _rewrite_body(self, number: int, scan: compat.Scan) -> None:
        """Rewrite pairs in the body of an unpaired loop."""
        eqn, flat = self.flat.eqns[number], self.flat.inner(number, 0)
        body = rewrite_loops(flat, self.decide, self.pins, self.runs * scan.trips)
        if body is not flat:
            self.replacements[id(eqn)] = lambda operands: scan.run(compat.jaxpr_as_fun(body.closed), operands)

    def _rewrite_pair(self, pair: LoopPair) -> None:
        first, second = self.flat.eqns[pair.forward], self.flat.eqns[pair.backward]
        forward, backward = compat.scan_of(first), compat.scan_of(second)
        assert forward is not None and backward is not None
        loop = loop_of(pair, forward, backward, self.runs, self.pins)
        residuals = self.decide(loop)
        if residuals is not None:
            rewritten = WrittenPair(pair, forward, backward, loop, residuals)
            within = self.runs * forward.trips
            rewritten.write(lambda body: rewrite_loops(Flat(flatten(body)), self.decide, self.pins, within).closed)
            self.replacements[id(first)] = rewritten.run_forward
            self.replacements[id(second)] = rewritten.run_backward

    def _results(self, *inputs: Any) -> list[Any]:
        def rule(eqn: compat.JaxprEqn, operands: list[Any]) -> list[Any]:
            replacement = self.replacements.get(id(eqn))
            return compat.bind(eqn, operands) if replacement is None else replacement(operands)

        return interpret(self.flat.closed, inputs, rule)
