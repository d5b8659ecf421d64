"""The detector finds a byte to race exactly where brute force does."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu_runtime.operations import Access, Kind, Op
from tests.gpu_runtime.races import races
from tests.gpu_runtime.reachability import racing_bytes

BYTES = 12


@st.composite
def logs(draw: st.DrawFn) -> list[Op]:
    """Of three streams, two threads, graphs of a few nodes, a dozen bytes."""
    ops: list[Op] = []
    marks, ends = 0, [0]  # ends: numbers that a thread may have seen the end of

    def submit(kind: Kind, stream: int, **fields: Any) -> None:
        ops.append(Op(len(ops), draw(st.integers(1, 2)), kind, stream, len(ops) + 1, **fields))
        if "launch" not in fields:
            ends.append(len(ops))

    def accesses() -> tuple[Access, ...]:
        starts = draw(st.lists(st.integers(0, BYTES - 1), min_size=1, max_size=2))
        return tuple(
            Access(draw(st.booleans()), start, draw(st.integers(start + 1, BYTES)))
            for start in starts
        )

    for _ in range(draw(st.integers(2, 12))):
        stream = draw(st.integers(1, 3))
        match draw(
            st.sampled_from(
                ["work", "work", "work", "record", "wait", "seen", "sync", "told", "after", "graph"]
            )
        ):
            case "work":
                submit(Kind.WORK, stream, accesses=accesses())
            case "record":
                marks += 1
                submit(Kind.RECORD, stream, mark=marks)
            case "wait" if marks:
                submit(Kind.WAIT, stream, mark=draw(st.integers(1, marks)))
            case "seen" if marks:
                ops.append(
                    Op(
                        len(ops),
                        draw(st.integers(1, 2)),
                        Kind.SEEN,
                        mark=draw(st.integers(1, marks)),
                    )
                )
            case "sync" | "told" as what:
                kind = Kind[what.upper()]
                ops.append(
                    Op(len(ops), draw(st.integers(1, 2)), kind, stream, draw(st.sampled_from(ends)))
                )
            case "after" if len(ends) > 1:
                submit(
                    Kind.WORK, stream, accesses=accesses(), after=(draw(st.sampled_from(ends[1:])),)
                )
            case "graph":
                launch = len(ops) + 1
                submit(Kind.WORK, stream, launch=launch)
                for node in range(1, draw(st.integers(2, 5))):
                    before = draw(st.sets(st.integers(0, node - 1), min_size=1))
                    fields = {
                        "accesses": accesses(),
                        "launch": launch,
                        "node": node,
                        "after_nodes": tuple(before),
                    }
                    submit(Kind.WORK, stream, **fields)
                submit(Kind.WORK, stream)
    return ops


@settings(max_examples=300, deadline=None)
@given(logs())
def test_the_bytes_that_race_are_those_of_brute_force(ops: list[Op]) -> None:
    addresses = {byte for race in races(ops) for byte in range(race.start, race.stop)}
    assert addresses == racing_bytes(ops)
