"""The choice of residuals is the fastest that saves enough, else the one that stacks least."""

import numpy as np
import pytest

from memplan.hardware import catalog
from memplan.planning.loops import Loop, Residuals, extra_seconds, stacked_nbytes
from memplan.program.loops.choose import ResidualChoices
from memplan.program.loops.residuals import outer_loops
from memplan.program.trace import Program, trace
from tests.program.scans import layers, traced

DEVICE = catalog.named("v100")
GIB = 2**30


def chosen(program: Program) -> list[Residuals]:
    return [residuals for _, residuals in program.loops if residuals is not None]


def outer(program: Program) -> list[tuple[Loop, Residuals]]:
    """Those pairs, and their residuals, that are not inside another's backward body."""
    loops = outer_loops(program.original)
    return [(loop, kept) for loop, kept in program.loops if kept is not None and loop in loops]


def nbytes(program: Program) -> int:
    return sum(stacked_nbytes(loop, residuals) for loop, residuals in outer(program))


def seconds(program: Program) -> float:
    return sum(extra_seconds(loop, residuals, DEVICE) for loop, residuals in outer(program))


@pytest.fixture
def program() -> Program:
    return trace(*layers(), {}, {})


def stacked(program: Program) -> int:
    return sum(stacked_nbytes(loop, None) for loop in outer_loops(program))


def fewer(program: Program, excess: int, host: int = 0) -> Program:
    choices = ResidualChoices(program, DEVICE)
    choice = choices.fewer(program, host, excess)
    assert choice is not None
    return choices.write(choice)


def test_without_a_host_nothing_is_on_it(program: Program) -> None:
    for excess in (1, GIB):
        assert not any(residuals.uses_host for residuals in chosen(fewer(program, excess)))


@pytest.mark.parametrize("name", ["layers", "branching", "stacked_twice"])
def test_what_is_enough_is_as_fast_as_it_can_be(name: str) -> None:
    """More bytes make the step faster."""
    program, _ = traced(name)
    whole, fewest = stacked(program), nbytes(fewer(program, GIB))
    limits = np.linspace(fewest, whole - 1, 9).astype(int).tolist()
    programs = [fewer(program, whole - limit) for limit in limits]
    assert all(nbytes(smaller) <= limit for smaller, limit in zip(programs, limits, strict=True))
    times = [seconds(smaller) for smaller in programs]
    assert times == sorted(times, reverse=True) and times[-1] == 0


def test_where_nothing_is_enough_the_least_is_all(program: Program) -> None:
    fewest = nbytes(fewer(program, GIB, GIB))
    excesses = (1, stacked(program) // 2, stacked(program))
    assert fewest <= min(nbytes(fewer(program, excess, GIB)) for excess in excesses)


def test_a_program_whose_loops_are_decided_has_no_other(program: Program) -> None:
    smallest = fewer(program, GIB)
    assert smallest.loops and ResidualChoices(program, DEVICE).fewer(smallest, 0, 1) is None


def test_a_step_without_pairs_has_none() -> None:
    program = trace(lambda x: x + 1, (1.0,), {}, {})
    assert ResidualChoices(program, DEVICE).fewer(program, GIB, 1) is None


def test_loops_are_decided_together() -> None:
    program, _ = traced("stacked_twice")
    assert len(fewer(program, 1, GIB).loops) == 2
