"""What a process gives: numbered, told once, and waited for where it is new."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from memplan.parallel.runtime import submissions as module
from memplan.parallel.runtime.comparison import PROGRAM, ROWS, VALUES, Submission, submission
from memplan.parallel.runtime.submissions import Submissions


def one(kind: str, text: str, key: str = "step") -> Submission:
    return submission(kind, key, key, [text], (0, 1))


@pytest.fixture
def confirmed() -> tuple[Submissions, list[Submission]]:
    """Everything is settled as soon as it is said."""
    submissions, heard = Submissions(), list[Submission]()

    def post(one: Submission) -> None:
        heard.append(one)
        submissions.confirm([one.place])

    submissions.attach(post)
    return submissions, heard


def waits(call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    return thread


def test_only_what_is_new_is_told(confirmed: tuple[Submissions, list[Submission]]) -> None:
    submissions, heard = confirmed
    for text in ("full", "full", "full", "partial", "full", "full"):
        submissions.submit_rows(one(ROWS, text))
    assert [one.number for one in heard] == [1, 4, 5] and submissions.batches == {"step": 6}
    submissions.submit_values(one(VALUES, "restored"))
    submissions.submit_rows(one(ROWS, "full"))
    assert [one.kind for one in heard[3:]] == [VALUES, ROWS]  # so that values are compared before the next batch


def test_new_rows_wait_until_all_bring_them_and_others_do_not() -> None:
    submissions = Submissions()
    submissions.attach(lambda one: None)
    first = waits(lambda: submissions.submit_rows(one(ROWS, "full")))
    submissions.confirm([("step", 1)])
    first.join(5.0)
    assert not first.is_alive()
    submissions.submit_rows(one(ROWS, "full"))


def test_a_program_is_waited_for_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROGRAM_S", 0.05)
    submissions, heard = Submissions(), list[Submission]()
    submissions.attach(heard.append)
    begun = time.monotonic()
    submissions.submit_program(one(PROGRAM, "a"))
    submissions.submit_program(one(PROGRAM, "b"))
    submissions.confirm([heard[0].place, heard[1].place])
    submissions.submit_program(one(PROGRAM, "a"))
    assert [one.number for one in heard] == [0, 1] and 0.1 <= time.monotonic() - begun < 3


def test_what_was_said_before_the_ranks_met_is_told_then() -> None:
    submissions, heard = Submissions(), list[Submission]()
    submissions.submit_values(one(VALUES, "v"))
    thread = waits(lambda: submissions.submit_rows(one(ROWS, "full")))
    submissions.attach(heard.append)
    submissions.confirm([("step", 1)])
    thread.join(5.0)
    assert [one.kind for one in heard] == [VALUES, ROWS] and not thread.is_alive()


def test_nobody_waits_where_ranks_cannot_be_compared() -> None:
    submissions = Submissions()
    thread = waits(lambda: submissions.submit_rows(one(ROWS, "full")))
    submissions.disable()
    thread.join(5.0)
    assert not thread.is_alive()
    submissions.submit_rows(one(ROWS, "partial"))


def test_who_waits_long_says_so(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "WARN_S", 0.02)
    submissions = Submissions()
    thread = waits(lambda: submissions.submit_rows(one(ROWS, "full")))
    submissions.disable()
    thread.join(5.0)
    assert "memplan: waiting for the other ranks to bring batch 1 of step." in capfd.readouterr().err
