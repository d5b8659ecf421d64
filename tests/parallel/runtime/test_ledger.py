"""Who is named where ranks give different things: on paper, without processes."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from memplan.parallel.runtime.ledger import (
    APART,
    PATIENCE_S,
    PROGRAM,
    ROWS,
    VALUES,
    Ledger,
    Said,
    received,
    said,
    typical,
)
from memplan.parallel.runtime.roster import Member

ALL = (0, 1, 2)
NOW = 100.0


def ledger() -> Ledger:
    return Ledger({rank: Member(rank, "host", 100 + rank) for rank in ALL})


def rows(text: str, number: int, key: str = "step/1") -> Said:
    return replace(said(ROWS, key, "'step'", [text], ALL), number=number)


def values(*lines: str) -> Said:
    return said(VALUES, "step", "'step'", lines, ALL)


def program(*lines: str, shapes: str = "a") -> Said:
    return said(PROGRAM, f"step/{shapes}", "'step'", lines, ALL)


def brings(book: Ledger, rank: int, text: str | None, number: int) -> None:
    if text is not None:
        book.hear(rank, rows(text, number))
    book.reached(rank, {"step/1": number})


def test_what_all_give_is_settled_once_all_have_given_it() -> None:
    book = ledger()
    for rank in (2, 0):
        brings(book, rank, "float32[4]", 1)
        assert book.judge(NOW + 60.0) == ([], None)  # a slow rank is no failure
    brings(book, 1, "float32[4]", 1)
    assert book.judge(NOW + 60.0) == ([("step/1", 1)], None)


@pytest.mark.parametrize("odd", ALL)
def test_the_odd_rank_is_named_at_once_where_all_are_known(odd: int) -> None:
    book = ledger()
    for rank in ALL:
        book.hear(rank, program("same", "tanh" if rank != odd else "relu"))
    _, verdict = book.judge(NOW)
    assert verdict is not None and verdict.startswith(f"rank {odd} (host host, pid {100 + odd}) has another program")
    assert "'relu' against 'tanh'" in verdict


def test_of_two_that_differ_nobody_is_named_before_the_third_or_some_time() -> None:
    book = ledger()
    brings(book, 1, "odd", 1)
    brings(book, 2, "usual", 1)
    assert book.judge(NOW) == ([], None) and book.judge(NOW + 0.9 * PATIENCE_S) == ([], None)
    _, late = book.judge(NOW + PATIENCE_S)
    assert late is not None and late.startswith("rank 2")  # of two halves the first is right
    brings(book, 0, "usual", 1)
    _, verdict = book.judge(NOW)
    assert verdict is not None and verdict.startswith("rank 1") and "batch 1" in verdict


def test_who_says_nothing_new_brings_what_it_brought_before() -> None:
    book = ledger()
    for rank in ALL:
        brings(book, rank, "full", 1)
    book.judge(NOW)
    brings(book, 2, "partial", 8)
    brings(book, 0, None, 7)
    assert book.judge(NOW + 60.0) == ([], None)  # the others may yet bring a partial eighth batch too
    brings(book, 0, None, 8)
    brings(book, 1, None, 8)
    _, verdict = book.judge(NOW)
    assert verdict is not None and verdict.startswith("rank 2") and "'partial' against 'full'" in verdict


def test_rows_that_change_for_all_are_settled_whoever_is_first() -> None:
    book = ledger()
    for number, text in ((1, "full"), (8, "partial"), (9, "full")):
        for rank in ALL:
            brings(book, rank, text, number)
        assert book.judge(NOW) == ([("step/1", number)], None)


def test_values_are_compared_when_all_next_give_something() -> None:
    book = ledger()
    for rank in ALL:
        book.hear(rank, values("state['b'] 0", f"state['w'] {int(rank == 1)}"))
        assert book.judge(NOW + 60.0) == ([], None)
        brings(book, rank, "full", 1)
    _, verdict = book.judge(NOW)
    assert verdict is not None and verdict.startswith("rank 1") and "\"state['w'] 1\"" in verdict


def test_a_rank_may_look_at_values_and_shapes_by_itself() -> None:
    book = ledger()
    book.hear(0, values("zeros"))
    book.hear(0, program("other", shapes="other"))
    for rank in ALL:
        book.hear(rank, values("real"))
        book.hear(rank, program("real"))
    assert book.judge(NOW) == ([("step/a", 0)], None)
    assert book.judge(NOW + 60.0) == ([], None)


def test_a_step_with_other_shapes_is_named_while_all_wait_for_it() -> None:
    book = ledger()
    for rank in ALL:
        book.hear(rank, program(f"shapes {rank == 1}", shapes=str(rank == 1)))
    assert book.judge(NOW) == ([], None)
    _, verdict = book.judge(NOW + PATIENCE_S)
    assert verdict is not None and verdict.startswith("rank 1") and "'shapes True' against 'shapes False'" in verdict


def test_who_left_while_others_wait_for_its_next_rows_is_named() -> None:
    book = ledger()
    for rank in ALL:
        brings(book, rank, "full", 1)
    book.judge(NOW)
    book.reached(2, {"step/1": 7})
    brings(book, 0, "partial", 8)
    assert book.judge(NOW) == ([], None)
    _, verdict = book.judge(NOW, {2})
    assert verdict is not None and verdict.startswith("rank 2 (host host, pid 102) left after batch 7 of 'step'")


def test_a_thread_may_be_ahead_of_the_last_step() -> None:
    book = ledger()
    book.hear(0, rows("next", 8, "step/1" + APART))
    assert book.judge(NOW, {1, 2}) == ([], None)


def test_what_is_sent_is_what_arrives() -> None:
    one = program("a", "b" * 300_000)
    assert received(asdict(one)) == one and len(one.text) < 10_000
    assert program("a", "b" * 300_000 + "c").digest != one.digest


def test_the_usual_is_what_most_give_and_else_what_rank_0_gives() -> None:
    assert typical({0: "a", 1: "b", 2: "b"}) == 1
    assert typical({0: "a", 1: "b"}) == 0 and typical({1: "b", 2: "a"}) == 1
