"""A problem on a tape: which values and slots there are, and what may be recomputed where."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memplan.planning.search.ledger import Ledger, reconcile
from memplan.planning.search.tape import record
from tests.planning.small import calling, fetching, looping, updating
from tests.planning.steps import training


def test_temporaries_are_values_and_kernels_are_slots_and_operations() -> None:
    recording = record(updating())
    tape = recording.tape
    assert (recording.order, recording.values) == ((0, 1, 2, 3), (1, 2))
    assert (tape.home, tape.slot_reads) == ((0, 1), ((), (0,), (1,), (0, 1)))
    assert [one is None for one in tape.seconds] == [False, False, True, True]  # outputs are made once


def test_what_reads_an_argument_is_recomputed_before_its_update_alone() -> None:
    tape = record(updating()).tape
    assert tape.may_recompute(0, 2) and not tape.may_recompute(0, 3)
    assert tape.may_recompute(1, 3)


def test_in_another_order_the_slots_are_others() -> None:
    recording = record(updating(), (0, 1, 3, 2))
    assert recording.tape.slot_reads == ((), (0,), (0, 1), (1,))
    assert recording.tape.may_recompute(0, 2) and recording.tape.may_recompute(0, 3)


def test_what_is_made_outside_of_a_loop_is_recomputed_before_its_body() -> None:
    tape = record(looping()).tape
    assert tape.slot_level[:2] == (-1, -1) and tape.slot_level[2:5] == (5, 5, 5) and tape.slot_level[6] == -1
    assert tape.may_recompute(0, 1) and not tape.may_recompute(0, 3)


def test_what_a_call_makes_is_read_behind_it() -> None:
    assert record(calling()).tape.slot_reads == ((), (0,), (), (0,), (1, 2))


def test_what_a_pair_writes_is_whole_behind_its_end() -> None:
    assert record(fetching()).tape.whole == (2, 1)


@given(st.integers(2, 8), st.integers(0, 99), st.sets(st.integers(0, 20)))
def test_empty_slots_take_nothing_that_was_not_there(layers: int, seed: int, slots: set[int]) -> None:
    recording = reconcile(record(training(layers, seed)))
    slots = {slot for slot in slots if slot < recording.tape.count}
    more = recording.with_empty_slots(slots)
    load = iter(Ledger(recording.tape).load.tolist())
    for work, nbytes, least in zip(more.work, Ledger(more.tape).load.tolist(), more.tape.least_nbytes, strict=True):
        assert nbytes == next(load) if work else least == 0
    assert [op for work in more.work for op in work] == list(range(recording.tape.count))
