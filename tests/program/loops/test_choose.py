"""Of all choices of residuals, the one that is enough and fastest, then the one that stacks least."""

from __future__ import annotations

import pytest

from memplan.hardware import catalog
from memplan.planning.loops import Residuals, extra_seconds, stacked_nbytes
from memplan.program.loops.choose import fewer_residuals
from memplan.program.loops.residuals import outer_loops
from memplan.program.trace import Program, trace
from tests.program.scans import layers, traced

DEVICE = catalog.named("v100")
GIB = 2**30


def chosen(found: Program) -> list[Residuals]:
    return [residuals for _, residuals in found.loops if residuals is not None]


def nbytes(found: Program) -> int:
    return sum(stacked_nbytes(loop, residuals) for loop, residuals in found.loops)


def seconds(found: Program) -> float:
    return sum(extra_seconds(loop, residuals, DEVICE) for loop, residuals in found.loops if residuals is not None)


@pytest.fixture
def program() -> Program:
    return trace(*layers(), {}, {})


def stacked(program: Program) -> int:
    return sum(stacked_nbytes(loop, None) for loop in outer_loops(program))


def test_without_a_host_nothing_is_on_it(program: Program) -> None:
    found = list(fewer_residuals(program, DEVICE, 0, 1))
    assert found and not any(residuals.on_host for one in found for residuals in chosen(one))


def test_the_first_is_the_fastest_that_is_enough_and_the_last_stacks_least() -> None:
    program, _ = traced("branching")
    free, least = fewer_residuals(program, DEVICE, GIB, 1)
    assert seconds(free) == 0 and nbytes(least) < nbytes(free) < stacked(program)
    second, last = fewer_residuals(program, DEVICE, GIB, stacked(program) - nbytes(free) + 1)
    assert nbytes(least) == nbytes(last) < nbytes(second) < nbytes(free)
    assert 0 < seconds(second) < seconds(last)


def test_where_nothing_is_enough_the_least_is_all(program: Program) -> None:
    (least,) = fewer_residuals(program, DEVICE, GIB, GIB)
    assert nbytes(least) == min(nbytes(one) for one in fewer_residuals(program, DEVICE, GIB, 1))


def test_a_program_whose_loops_are_decided_has_no_other(program: Program) -> None:
    (decided,) = fewer_residuals(program, DEVICE, 0, GIB)
    assert decided.loops and list(fewer_residuals(decided, DEVICE, 0, 1)) == []


def test_a_step_without_pairs_has_none() -> None:
    assert list(fewer_residuals(trace(lambda x: x + 1, (1.0,), {}, {}), DEVICE, GIB, 1)) == []


def test_loops_are_decided_together() -> None:
    program, _ = traced("stacked_twice")
    assert {len(one.loops) for one in fewer_residuals(program, DEVICE, GIB, 1)} == {2}
