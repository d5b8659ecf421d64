"""What a process gives: numbered, told once, and waited for where it is new."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from memplan.parallel.runtime import given as module
from memplan.parallel.runtime.given import Given
from memplan.parallel.runtime.ledger import PROGRAM, ROWS, VALUES, Said, said


def one(kind: str, text: str, key: str = "step") -> Said:
    return said(kind, key, key, [text], (0, 1))


@pytest.fixture
def told() -> tuple[Given, list[Said]]:
    """Everything is settled as soon as it is said."""
    given, heard = Given(), list[Said]()

    def post(one: Said) -> None:
        heard.append(one)
        given.settle([one.place])

    given.attach(post)
    return given, heard


def waits(call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    return thread


def test_only_what_is_new_is_told(told: tuple[Given, list[Said]]) -> None:
    given, heard = told
    for text in ("full", "full", "full", "partial", "full", "full"):
        given.rows(one(ROWS, text))
    assert [one.number for one in heard] == [1, 4, 5] and given.reached == {"step": 6}
    given.values(one(VALUES, "restored"))
    given.rows(one(ROWS, "full"))
    assert [one.kind for one in heard[3:]] == [VALUES, ROWS]  # so that values are compared before the next batch


def test_new_rows_wait_until_all_bring_them_and_others_do_not() -> None:
    given = Given()
    given.attach(lambda one: None)
    first = waits(lambda: given.rows(one(ROWS, "full")))
    given.settle([("step", 1)])
    first.join(5.0)
    assert not first.is_alive()
    given.rows(one(ROWS, "full"))


def test_a_program_is_waited_for_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROGRAM_S", 0.05)
    given, heard = Given(), list[Said]()
    given.attach(heard.append)
    begun = time.monotonic()
    given.program(one(PROGRAM, "a"))
    given.program(one(PROGRAM, "b"))
    given.settle([heard[0].place, heard[1].place])
    given.program(one(PROGRAM, "a"))
    assert [one.number for one in heard] == [0, 1] and 0.1 <= time.monotonic() - begun < 3


def test_what_was_said_before_the_ranks_met_is_told_then() -> None:
    given, heard = Given(), list[Said]()
    given.values(one(VALUES, "v"))
    thread = waits(lambda: given.rows(one(ROWS, "full")))
    given.attach(heard.append)
    given.settle([("step", 1)])
    thread.join(5.0)
    assert [one.kind for one in heard] == [VALUES, ROWS] and not thread.is_alive()


def test_nobody_waits_where_ranks_cannot_be_compared() -> None:
    given = Given()
    thread = waits(lambda: given.rows(one(ROWS, "full")))
    given.silence()
    thread.join(5.0)
    assert not thread.is_alive()
    given.rows(one(ROWS, "partial"))


def test_who_waits_long_says_so(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "TOLD_S", 0.02)
    given = Given()
    thread = waits(lambda: given.rows(one(ROWS, "full")))
    given.silence()
    thread.join(5.0)
    assert "memplan: waiting for the other ranks to bring batch 1 of step." in capfd.readouterr().err
