"""The timeline of the links, and placements of another offload."""

from collections.abc import Sequence
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from experiments.planners.evict import tape_of_stages
from experiments.planners.stages import stages_of_nodes
from memplan.planning.schedule import Kind, seconds
from memplan.planning.search.ledger import Ledger, Offload
from memplan.planning.search.links import (
    CopyScheduler,
    Links,
    Placement,
    events,
    plan_seconds,
    slot_actions,
)
from memplan.planning.search.tape import record
from tests.planning.search.plans import random_plan, schedule_of
from tests.planning.small import looping
from tests.planning.steps import in_a_loop, training

DRAWS = st.randoms(use_true_random=False)


@given(st.integers(3, 10), st.integers(0, 99), DRAWS)
def test_the_clock_of_the_links(layers: int, seed: int, draw: Random) -> None:
    """The same seconds as a replay of the schedule."""
    problem = training(layers, seed)
    ledger = random_plan(problem, draw, offloads=True)

    def copy_s(nbytes: int) -> float:
        return 0.1 + nbytes / 2**21

    schedule, _ = schedule_of(ledger)
    assert np.isclose(Links(ledger, copy_s).seconds, seconds(problem, schedule, copy_s))


def test_what_comes_back_for_nobody_is_not_fetched() -> None:
    stages = stages_of_nodes([1] * 6, [1] * 6, [[], [0], [1], [2], [3], [0, 4]], 0)
    ledger = Ledger(tape_of_stages(stages))
    offloaded = [(1, Kind.OFFLOAD), (1, Kind.OFFLOADED)]
    ledger.offload(Offload(0, 1, 1, 2))
    ledger.offload(Offload(0, None, 2, 3))  # comes back again before anybody has read it
    fetched = [(3, Kind.PREFETCH), (5, Kind.PREFETCHED)]
    assert [(slot, kind) for slot, kind, _ in events(ledger)] == offloaded + fetched
    ledger.recompute(0, 5)
    assert [(slot, kind) for slot, kind, _ in events(ledger)] == offloaded


def spanned(between: int) -> Ledger:
    """A value that is read once more after so many slots; every slot takes a second."""
    inputs = [[], *([node] for node in range(between)), [0, between]]
    return Ledger(
        tape_of_stages(stages_of_nodes([4] + [1] * (between + 1), [1] * len(inputs), inputs, 0))
    )


def test_an_offload_goes_where_nobody_stalls() -> None:
    scheduler = CopyScheduler(spanned(8), lambda nbytes: nbytes / 2, 100)  # two seconds each way
    first, *stalling = scheduler.placements(0, 9, (4, 5))
    assert first.offload == Offload(0, 0, 2, 6) and (first.busy_s, first.stall_s) == (4, 0)
    assert not stalling  # the first is on the host in the crowded slots already


def test_where_all_between_is_crowded_the_kernels_stall() -> None:
    scheduler = CopyScheduler(spanned(8), lambda nbytes: nbytes / 2, 100)
    first, second = scheduler.placements(0, 9, (2, 8))
    assert (first.offload, first.stall_s) == (Offload(0, 0, 2, 6), 0)
    assert (second.offload, second.stall_s) == (Offload(0, 0, 1, 8), 1 + 2)


@given(st.integers(3, 8), st.integers(0, 99))
def test_a_body_has_the_copies_of_a_straight_line_in_every_trip(layers: int, seed: int) -> None:
    problem = training(layers, seed)
    ledger = Ledger(record(problem))
    straight = CopyScheduler(ledger, lambda nbytes: nbytes / 2**21, 2**40)
    body_ledger = Ledger(record(in_a_loop(problem, 3)))
    body = CopyScheduler(body_ledger, lambda nbytes: nbytes / 2**21, 2**40)
    for value in range(len(ledger.tape.values)):
        readers = [slot for slot, work in enumerate(ledger.tape.slots) if value in work.reads]
        for reader in readers:
            crowded = ledger.tape.values[value].first_slot, reader
            expected = [*straight.placements(value, reader, crowded)]
            placements = [*body.placements(value, reader + 1, (crowded[0] + 1, reader + 1))]
            offloads = [placement.offload for placement in placements]
            assert offloads == [shifted(placement.offload) for placement in expected]
            assert np.allclose(3 * seconds_of(expected), seconds_of(placements))


def seconds_of(placements: Sequence[Placement]) -> np.ndarray:
    return np.array([(placement.busy_s, placement.stall_s) for placement in placements])


def shifted(offload: Offload) -> Offload:
    """The same one slot later."""
    start = None if offload.start is None else offload.start + 1
    return Offload(offload.value, start, offload.end + 1, offload.prefetch + 1)


def test_copies_of_a_block_begin_and_end_between_its_kernels() -> None:
    scheduler = CopyScheduler(Ledger(record(looping())), lambda nbytes: 0.0, 2**40)
    assert scheduler.copy_slots(5) == ([1, 1, 2, 3, 7, 7, 7, 7], [-1, 1, 2, 3, 3, 3, 3, -1])
    assert scheduler.copy_slots(-1) == ([0, 5, 5, 5, 5, 5, 6, 7], [0, 0, 0, 0, 0, 5, 6, -1])


def test_a_host_that_is_full_takes_nothing() -> None:
    ledger = spanned(8)
    assert not CopyScheduler(ledger, lambda nbytes: 1.0, 3).may_offload(0)
    assert not list(CopyScheduler(ledger, lambda nbytes: 1.0, 3).placements(0, 9, (4, 5)))


def test_a_link_that_is_busy_is_waited_for() -> None:
    ledger = spanned(8)
    ledger.offload(Offload(0, 0, 2, 6))
    links = Links(ledger, lambda nbytes: 2.0)
    assert (links.offloads, links.prefetches, links.seconds) == ([(1, 3)], [(7, 9)], 10)
    assert Links(ledger, lambda nbytes: 3.0).seconds == 12  # kernels stall one second for each copy


def returning() -> Ledger:
    """A value that comes back a second late for its reader, which also needs the one before it.

    The slots' own work takes 10 seconds, a copy two.
    """
    inputs = [[], [], [1], [2], [3], [4], [0, 1]]
    stages = stages_of_nodes([4, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 4], inputs, 0)
    ledger = Ledger(tape_of_stages(stages))
    ledger.offload(Offload(0, 0, 2, 4))
    return ledger


def two_seconds(nbytes: int) -> float:
    return 2.0


def kinds_before(ledger: Ledger, slot: int) -> list[Kind]:
    """The actions before a slot's own work, which is no kernel in a tape of stages."""
    return [action.kind for action in slot_actions(ledger)[slot]]


def test_a_recomputation_runs_before_the_wait_for_another_value() -> None:
    ledger = returning()
    scheduler = CopyScheduler(ledger, two_seconds, 2**40)
    assert scheduler.links.seconds == 10 + 1
    ledger.recompute(1, 6)  # takes one second
    assert plan_seconds(ledger, scheduler) == 10 + 1
    assert not scheduler.links.stalls_s
    assert kinds_before(ledger, 6) == [Kind.RUN, Kind.PREFETCHED]


def test_a_recomputation_waits_for_what_it_reads() -> None:
    ledger = returning()
    ledger.recompute(1, 6)
    ledger.recompute(6, 6)  # reads what comes back, and runs after the other
    assert ledger.lead_s(0, 6) == 1
    assert kinds_before(ledger, 6) == [Kind.RUN, Kind.PREFETCHED, Kind.RUN]


def test_a_copy_back_starts_later_by_what_runs_before_its_value_is_read() -> None:
    ledger = spanned(8)
    ledger.recompute(5, 9)
    first, *_ = CopyScheduler(ledger, lambda nbytes: nbytes / 2, 100).placements(0, 9, (4, 5))
    assert first.offload == Offload(0, 0, 2, 7) and first.stall_s == 0
