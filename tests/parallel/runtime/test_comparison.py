"""Who is named where ranks give different things: on paper, without processes."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from memplan.parallel.runtime.comparison import (
    APART,
    PATIENCE_S,
    PROGRAM,
    ROWS,
    VALUES,
    Comparison,
    Submission,
    from_message,
    majority_rank,
    submission,
)
from memplan.parallel.runtime.heartbeats import Member

ALL = (0, 1, 2)
NOW = 100.0


def comparison() -> Comparison:
    return Comparison({rank: Member(rank, "host", 100 + rank) for rank in ALL})


def rows(text: str, number: int, key: str = "step/1") -> Submission:
    return replace(submission(ROWS, key, "'step'", [text], ALL), number=number)


def values(*lines: str) -> Submission:
    return submission(VALUES, "step", "'step'", lines, ALL)


def program(*lines: str, shapes: str = "a") -> Submission:
    return submission(PROGRAM, f"step/{shapes}", "'step'", lines, ALL)


def brings(found: Comparison, rank: int, text: str | None, number: int) -> None:
    if text is not None:
        found.add(rank, rows(text, number))
    found.advance(rank, {"step/1": number})


def test_what_all_give_is_settled_once_all_have_given_it() -> None:
    found = comparison()
    for rank in (2, 0):
        brings(found, rank, "float32[4]", 1)
        assert found.judge(NOW + 60.0) == ([], None)  # a slow rank is no failure
    brings(found, 1, "float32[4]", 1)
    assert found.judge(NOW + 60.0) == ([("step/1", 1)], None)


@pytest.mark.parametrize("odd", ALL)
def test_the_odd_rank_is_named_at_once_where_all_are_known(odd: int) -> None:
    found = comparison()
    for rank in ALL:
        found.add(rank, program("same", "tanh" if rank != odd else "relu"))
    _, verdict = found.judge(NOW)
    assert verdict is not None and verdict.startswith(f"rank {odd} (host host, pid {100 + odd}) has another program")
    assert "'relu' against 'tanh'" in verdict


def test_of_two_that_differ_nobody_is_named_before_the_third_or_some_time() -> None:
    found = comparison()
    brings(found, 1, "odd", 1)
    brings(found, 2, "usual", 1)
    assert found.judge(NOW) == ([], None) and found.judge(NOW + 0.9 * PATIENCE_S) == ([], None)
    _, late = found.judge(NOW + PATIENCE_S)
    assert late is not None and late.startswith("rank 2")  # of two halves the first is right
    brings(found, 0, "usual", 1)
    _, verdict = found.judge(NOW)
    assert verdict is not None and verdict.startswith("rank 1") and "batch 1" in verdict


def test_who_says_nothing_new_brings_what_it_brought_before() -> None:
    found = comparison()
    for rank in ALL:
        brings(found, rank, "full", 1)
    found.judge(NOW)
    brings(found, 2, "partial", 8)
    brings(found, 0, None, 7)
    assert found.judge(NOW + 60.0) == ([], None)  # the others may yet bring a partial eighth batch too
    brings(found, 0, None, 8)
    brings(found, 1, None, 8)
    _, verdict = found.judge(NOW)
    assert verdict is not None and verdict.startswith("rank 2") and "'partial' against 'full'" in verdict


def test_rows_that_change_for_all_are_settled_whoever_is_first() -> None:
    found = comparison()
    for number, text in ((1, "full"), (8, "partial"), (9, "full")):
        for rank in ALL:
            brings(found, rank, text, number)
        assert found.judge(NOW) == ([("step/1", number)], None)


def test_values_are_compared_when_all_next_give_something() -> None:
    found = comparison()
    for rank in ALL:
        found.add(rank, values("state['b'] 0", f"state['w'] {int(rank == 1)}"))
        assert found.judge(NOW + 60.0) == ([], None)
        brings(found, rank, "full", 1)
    _, verdict = found.judge(NOW)
    assert verdict is not None and verdict.startswith("rank 1") and "\"state['w'] 1\"" in verdict


def test_a_rank_may_look_at_values_and_shapes_by_itself() -> None:
    found = comparison()
    found.add(0, values("zeros"))
    found.add(0, program("other", shapes="other"))
    for rank in ALL:
        found.add(rank, values("real"))
        found.add(rank, program("real"))
    assert found.judge(NOW) == ([("step/a", 0)], None)
    assert found.judge(NOW + 60.0) == ([], None)


def test_a_step_with_other_shapes_is_named_while_all_wait_for_it() -> None:
    found = comparison()
    for rank in ALL:
        found.add(rank, program(f"shapes {rank == 1}", shapes=str(rank == 1)))
    assert found.judge(NOW) == ([], None)
    _, verdict = found.judge(NOW + PATIENCE_S)
    assert verdict is not None and verdict.startswith("rank 1") and "'shapes True' against 'shapes False'" in verdict


def test_who_left_while_others_wait_for_its_next_rows_is_named() -> None:
    found = comparison()
    for rank in ALL:
        brings(found, rank, "full", 1)
    found.judge(NOW)
    found.advance(2, {"step/1": 7})
    brings(found, 0, "partial", 8)
    assert found.judge(NOW) == ([], None)
    _, verdict = found.judge(NOW, {2})
    assert verdict is not None and verdict.startswith("rank 2 (host host, pid 102) left after batch 7 of 'step'")


def test_a_thread_may_be_ahead_of_the_last_step() -> None:
    found = comparison()
    found.add(0, rows("next", 8, "step/1" + APART))
    assert found.judge(NOW, {1, 2}) == ([], None)


def test_what_is_sent_is_what_arrives() -> None:
    one = program("a", "b" * 300_000)
    assert from_message(asdict(one)) == one and len(one.text) < 10_000
    assert program("a", "b" * 300_000 + "c").digest != one.digest


def test_the_usual_is_what_most_give_and_else_what_rank_0_gives() -> None:
    assert majority_rank({0: "a", 1: "b", 2: "b"}) == 1
    assert majority_rank({0: "a", 1: "b"}) == 0 and majority_rank({1: "b", 2: "a"}) == 1
