"""Rewrite pairs of loops with other residuals; the backward body recomputes the others.

The caller decides for every pair, outer loops before inner ones, so that a list of decisions in
this order reproduces the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from memplan.errors import PlanMismatchError
from memplan.planning.loops import Loop, Residuals, can_segment, recomputed_ops
from memplan.planning.problem import Pin
from memplan.planning.transforms import LoopResiduals
from memplan.program import compat
from memplan.program.flat import Flat, flatten
from memplan.program.interpret import interpret
from memplan.program.loops.pairs import LoopPair, loop_of, loop_pairs
from memplan.program.loops.write import PairBodies, SavedForBackward
from memplan.program.trace import Program, WithResiduals

Decide = Callable[[Loop], Residuals | None]  # None leaves the loops unchanged


def with_residuals(program: Program, decide: Decide) -> Program:
    """The program with the residuals that `decide` returns; itself if all of them are None."""
    decisions: list[tuple[Loop, Residuals | None]] = []

    def record(loop: Loop) -> Residuals | None:
        decisions.append((loop, decide(loop)))
        return decisions[-1][1]

    rewritten = rewrite_loops(program.flat, record, program.pins).closed
    residuals = tuple(decision for _, decision in decisions)
    if not any(residuals):
        return program
    loops = tuple(loop for loop, _ in decisions)
    return program.transformed(WithResiduals(LoopResiduals(residuals), loops), rewritten)


def outer_loops(program: Program) -> list[Loop]:
    """The step's pairs of loops that are not inside other pairs."""
    loops: list[Loop] = []
    rewrite_loops(program.flat, loops.append, program.pins)
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


def rewrite_loops(flat: Flat, decide: Decide, pins: Sequence[Pin] = (), runs: int = 1) -> Flat:
    """A flat jaxpr with the residuals that `decide` returns; itself if nothing changes.

    Args:
      decide: called once per pair of loops.
      runs: how often the jaxpr runs in a step.
    """
    return _Rewriter(flat, decide, pins, runs).run()


@dataclass
class _Rewriter:
    flat: Flat
    decide: Decide
    pins: Sequence[Pin]
    runs: int
    # id of an equation -> the function that replaces it
    replacements: dict[int, Callable[..., list[Any]]] = field(default_factory=dict)

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
        """Rewrite the pairs in the body of an unpaired loop."""
        eqn = self.flat.eqns[number]
        flat = self.flat.inner(number, 0)
        body = rewrite_loops(flat, self.decide, self.pins, self.runs * scan.trips)
        if body is not flat:
            run_body = compat.jaxpr_as_fun(body.closed)
            self.replacements[id(eqn)] = lambda operands: scan.run(run_body, operands)

    def _rewrite_pair(self, pair: LoopPair) -> None:
        forward_eqn = self.flat.eqns[pair.forward]
        backward_eqn = self.flat.eqns[pair.backward]
        forward = compat.scan_of(forward_eqn)
        backward = compat.scan_of(backward_eqn)
        assert forward is not None and backward is not None
        loop = loop_of(pair, forward, backward, self.runs, self.pins)
        residuals = self.decide(loop)
        if residuals is None:
            return
        runs = self.runs * forward.trips

        def rewrite(body: compat.ClosedJaxpr) -> compat.ClosedJaxpr:
            return rewrite_loops(Flat(flatten(body)), self.decide, self.pins, runs).closed

        written = PairBodies(pair, forward, backward, loop, residuals).write(rewrite)
        saved = list[SavedForBackward]()

        def run_forward(operands: list[Any]) -> list[Any]:
            results, saved_values = written.run_forward(operands)
            saved.append(saved_values)
            return results

        def run_backward(operands: list[Any]) -> list[Any]:
            return written.run_backward(operands, saved.pop())

        self.replacements[id(forward_eqn)] = run_forward
        self.replacements[id(backward_eqn)] = run_backward

    def _results(self, *inputs: Any) -> list[Any]:
        def rule(eqn: compat.JaxprEqn, operands: list[Any]) -> list[Any]:
            replacement = self.replacements.get(id(eqn))
            return compat.bind(eqn, operands) if replacement is None else replacement(operands)

        return interpret(self.flat.closed, inputs, rule)
