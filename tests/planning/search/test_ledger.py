"""The ledger's updated bytes equal those of the layout, of a replay, and of a new ledger."""

from collections.abc import Set
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.planners.evict import tape_of_stages
from experiments.planners.stages import replay, stages_of_nodes
from memplan.planning.liveness import eliminate_dead
from memplan.planning.packing import live_nbytes
from memplan.planning.schedule import Kind
from memplan.planning.search.ledger import Ledger, Recomputation, reconcile
from memplan.planning.search.tape import record
from tests.planning.search.plans import drop_dead, random_plan, schedule_of
from tests.planning.steps import MIB, Builder, training

DRAWS = st.randoms(use_true_random=False)


def anew(ledger: Ledger, without: Set[Recomputation] = frozenset()) -> Ledger:
    """A new ledger with the same plan, without some of its recomputations."""
    fresh = Ledger(ledger.tape)
    fresh.restore(set(ledger.recomputations()) - without, ledger.offloads.values())
    return fresh


@given(st.integers(2, 12), DRAWS)
def test_stages_replayed(count: int, draw: Random) -> None:
    """Any recomputations, in any order of adding and removing: the bytes of the worst step of every stage."""
    inputs = [[source for source in range(node) if draw.random() < 0.4] for node in range(count)]
    stages = stages_of_nodes(
        [draw.randint(1, 9) for _ in inputs], [draw.randint(1, 9) for _ in inputs], inputs, 0
    )
    ledger = Ledger(tape_of_stages(stages))
    recomputed: set[tuple[int, int]] = set()
    for _ in range(12):
        item, stage = sorted(draw.sample(range(count), 2))
        if (item, stage) in recomputed:
            ledger.undo_recompute(item, stage)
        else:
            ledger.recompute(item, stage)
        recomputed ^= {(item, stage)}
        replayed = replay(stages, recomputed)
        worst = [0] * count
        for (step_stage, _), nbytes in zip(replayed.steps, replayed.step_nbytes, strict=True):
            worst[step_stage] = max(worst[step_stage], nbytes)
        assert ledger.load.tolist() == worst
        assert sorted(ledger.recomputations()) == sorted(recomputed)
        assert ledger.slot_seconds.sum() == sum(stages.own_ticks) + sum(
            stages.own_ticks[item] for item, _ in recomputed
        )


@settings(max_examples=30)
@given(st.integers(3, 10), st.integers(0, 99), DRAWS, st.booleans())
def test_the_layout_counts_the_same(layers: int, seed: int, draw: Random, offloads: bool) -> None:
    """A slot's bytes are those of its runs, where nothing is shared and every run is read.

    The layout has four more for each copy that is in flight.
    """
    problem = training(layers, seed, sharing=False)
    ledger = random_plan(problem, draw, offloads)
    drop_dead(problem, ledger)
    schedule, slots = schedule_of(ledger)
    assert eliminate_dead(problem, schedule) == schedule
    in_flight = 0
    peaks = np.zeros(ledger.tape.count, np.int64)
    for action, slot, nbytes in zip(schedule, slots, live_nbytes(problem, schedule), strict=True):
        if action.kind is Kind.RUN:
            peaks[slot] = max(peaks[slot], nbytes - 4 * in_flight)
        else:
            in_flight += 1 if action.kind in (Kind.OFFLOAD, Kind.PREFETCH) else -1
    assert (peaks == ledger.load).all()


@given(st.integers(3, 10), st.integers(0, 99), DRAWS)
def test_kept_up_to_date(layers: int, seed: int, draw: Random) -> None:
    ledger = random_plan(training(layers, seed), draw, offloads=True)
    fresh = anew(ledger)
    assert (fresh.load == ledger.load).all()
    assert np.allclose(fresh.slot_seconds, ledger.slot_seconds)
    ledger.restore((), ())
    assert (ledger.load == Ledger(ledger.tape).load).all()
    assert ledger.recomputations() == [] and not ledger.offloads


@given(st.integers(3, 10), st.integers(0, 99), DRAWS, st.booleans())
def test_what_is_needed_cannot_be_undone(
    layers: int, seed: int, draw: Random, offloads: bool
) -> None:
    """Of a recomputation that is said to be needed for a limit, undoing it always goes above."""
    ledger = random_plan(training(layers, seed), draw, offloads)
    for op, slot in ledger.recomputations():
        without = anew(ledger, without={(op, slot)})
        for limit in (without.peak_nbytes, without.peak_nbytes - 1, ledger.peak_nbytes):
            assert without.peak_nbytes > limit or not ledger.is_needed(op, slot, limit)


@given(st.integers(3, 10), st.integers(0, 99), DRAWS, st.booleans())
def test_a_recomputation_is_undone_where_the_rest_keeps_the_limit(
    layers: int, seed: int, draw: Random, offloads: bool
) -> None:
    """One after another; the bytes are those of a new ledger, whether it is undone or not."""
    ledger = random_plan(training(layers, seed), draw, offloads)
    for op, slot in ledger.recomputations():
        without = anew(ledger, without={(op, slot)})
        limit = draw.choice((without.peak_nbytes, without.peak_nbytes - 1, ledger.peak_nbytes))
        assert ledger.undo_within(op, slot, limit) == (without.peak_nbytes <= limit)
        fresh = anew(ledger)
        assert ((op, slot) in ledger.recomputations()) == (without.peak_nbytes > limit)
        assert (fresh.load == ledger.load).all()
        assert fresh.needs == ledger.needs


def test_a_recomputation_that_all_bytes_depend_on_is_needed() -> None:
    """A large value is made again for its last reader, over a narrow place."""
    b = Builder()
    (wide,) = b.kernel((b.argument(),), 8 * MIB)
    (narrow,) = b.kernel((wide,), MIB)
    (full,) = b.kernel((narrow,), 9 * MIB)
    (small,) = b.kernel((full,), MIB)
    b.kernel((wide, small), MIB, output=True)
    ledger = Ledger(record(b.problem()))
    ledger.recompute(0, 4)
    assert ledger.is_needed(0, 4, ledger.peak_nbytes)
    assert not ledger.is_needed(0, 4, 30 * MIB)


def test_what_is_recomputed_writes_over_what_it_reads_last() -> None:
    """In a prelude as in a slot's own work."""
    b = Builder()
    small_argument = b.argument()
    large_argument = b.argument(4 * MIB)
    (first,) = b.kernel((small_argument,), 4 * MIB)
    (second,) = b.kernel((first,), 4 * MIB, over=True)
    (third,) = b.kernel((second,), MIB)
    (fourth,) = b.kernel((third, large_argument), MIB)
    b.kernel((second, fourth), MIB // 2, output=True)
    problem = b.problem()
    ledger = Ledger(reconcile(problem, record(problem)))
    for op in (0, 1):
        ledger.recompute(op, 4)
    schedule, slots = schedule_of(ledger)
    peaks = np.zeros(ledger.tape.count, np.int64)
    np.maximum.at(peaks, slots, live_nbytes(problem, schedule))
    assert first in problem.kernels[1].may_alias[second]
    assert ledger.load.tolist() == peaks.tolist() == [4 * MIB, 4 * MIB, 5 * MIB, 2 * MIB, 5 * MIB]
