"""Who is named: on paper, without processes."""

from __future__ import annotations

import pytest

from memplan.parallel.runtime.heartbeats import Heartbeat, Member, Peer, dead, silent, stalled

NOW = 1000.0


def peer(rank: int, count: int = 8, age_s: float = 1.0, *, heard_s: float = 0.1, finished: bool = False) -> Peer:
    limit_s = None if finished else 5.0
    beat = Heartbeat(count, count // 2, NOW - age_s, limit_s, finished)
    return Peer(Member(rank, "host", 100 + rank), beat, NOW - heard_s)


def test_nobody_is_late_within_the_limit() -> None:
    assert stalled([peer(0, 9), peer(1, 8, 4.9), peer(2, 2)], NOW) is None


def test_whoever_is_not_watched_is_never_late() -> None:
    unwatched = Peer(Member(0, "host", 1), Heartbeat(at_s=0.0), NOW)
    assert stalled([unwatched, peer(1)], NOW) is None
    assert stalled([Peer(Member(0, "host", 1), peer(0, age_s=99.0).heartbeat.unwatched(), NOW), peer(1)], NOW) is None


@pytest.mark.parametrize(
    ("peers", "told"),
    [
        ([peer(0, 9, 6.0), peer(1, 9, 5.9), peer(2, 8, 5.5)], "rank 2 (host host, pid 102) is late, last beat at"),
        ([peer(0, 9, 6.0), peer(1, 9, 5.9, heard_s=5.0)], "rank 1 (host host, pid 101) has been silent for 5.0 s"),
        ([peer(0, 9, 6.0), peer(1, 8, 9.0, finished=True)], "rank 1 (host host, pid 101) finished"),
        ([peer(0, 9, 6.0), peer(1, 9, 6.5)], "no rank moves: all made as many beats; rank 1"),
    ],
    ids=["behind", "silent", "left", "all"],
)
def test_the_culprit_is_named_not_who_waits(peers: list[Peer], told: str) -> None:
    found = stalled(peers, NOW)
    assert found is not None and found.startswith(told)
    assert "the limit is 5 s" in found or "silent" in found


def test_a_late_rank_is_told_with_those_that_wait() -> None:
    found = stalled([peer(rank, 9, 6.0) for rank in (0, 1, 3)] + [peer(2, 8, 6.0)], NOW)
    assert found is not None and "waiting further on: rank 0, 1, 3" in found


def test_the_gone_and_the_silent_are_told_with_their_last_beat() -> None:
    assert dead(peer(2, 34, 0.4), NOW) == (
        "rank 2 (host host, pid 102) is gone: its connection closed; last beat at step 17, 0.4 s ago"
    )
    assert "it had not begun a step" in silent(Peer(Member(0, "host", 1), Heartbeat(), NOW - 70), NOW)


def test_beats_count_on() -> None:
    beat = Heartbeat().next(7, 3.0, 60.0).next(7, 4.0, 60.0)
    assert (beat.count, beat.step, beat.at_s, beat.limit_s) == (2, 7, 4.0, 60.0)
    assert beat.unwatched(finished=True).finished
