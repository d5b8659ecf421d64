"""The ledger's bytes, kept up to date, are those of the layout, of a replay, and of a ledger made anew."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from experiments.planners.evict import tape_of_stages
from experiments.planners.stages import of_nodes, replay
from memplan.planning.packing import live_nbytes, needed
from memplan.planning.problem import Problem
from memplan.planning.schedule import Action, Kind, Schedule
from memplan.planning.search.ledger import Copy, Ledger
from memplan.planning.search.links import Links, events
from memplan.planning.search.tape import Taped, settled, tape_of
from memplan.planning.timing import seconds
from tests.planning.steps import MIB, Building, training

DRAWS = st.randoms(use_true_random=False)


@given(st.integers(2, 12), DRAWS)
def test_stages_replayed(count: int, draw: Random) -> None:
    """Any repetitions, in any order of adding and removing: the bytes of the worst step of every stage."""
    inputs = [[source for source in range(node) if draw.random() < 0.4] for node in range(count)]
    stages = of_nodes([draw.randint(1, 9) for _ in inputs], [draw.randint(1, 9) for _ in inputs], inputs, 0)
    ledger = Ledger(tape_of_stages(stages))
    chosen: set[tuple[int, int]] = set()
    for _ in range(12):
        item, stage = sorted(draw.sample(range(count), 2))
        if (item, stage) in chosen:
            ledger.remove(item, stage)
        else:
            ledger.add(item, stage)
        chosen ^= {(item, stage)}
        played = replay(stages, chosen)
        worst = [0] * count
        for (at, _), nbytes in zip(played.steps, played.step_nbytes, strict=True):
            worst[at] = max(worst[at], nbytes)
        assert ledger.load.tolist() == worst
        assert sorted(ledger.pairs()) == sorted(chosen)
        assert ledger.slot_seconds.sum() == sum(stages.own_ticks) + sum(stages.own_ticks[one] for one, _ in chosen)


def schedule_of(taped: Taped, ledger: Ledger) -> tuple[Schedule, list[int]]:
    """The actions, and the slot of each."""
    kinds = (Kind.PREFETCHED, Kind.OFFLOAD, Kind.OFFLOADED, Kind.PREFETCH)
    copies = events(ledger)
    found: list[tuple[Action, int]] = []
    for slot, ops in enumerate(ledger.again):
        found += [(Action(kinds[k], taped.values[c.value]), slot) for at, k, c in copies if at == slot and not k]
        found += [(Action(Kind.RUN, taped.order[op]), slot) for op in (*ops, slot)]
        found += [(Action(kinds[k], taped.values[c.value]), slot) for at, k, c in copies if at == slot and k]
    return tuple(action for action, _ in found), [slot for _, slot in found]


def random_plan(problem: Problem, draw: Random, copies: bool) -> tuple[Taped, Ledger]:
    taped = tape_of(problem)
    taped = settled(taped, Ledger(taped.tape).load)
    ledger, tape = Ledger(taped.tape), taped.tape
    for _ in range(draw.randint(0, 10)):
        value = draw.randrange(len(tape.nbytes))
        slots = [slot for slot in ledger.needs[value] if slot > tape.home[value] and tape.may(tape.maker[value], slot)]
        if slots and (slot := draw.choice(slots)) and tape.maker[value] not in ledger.again[slot]:
            ledger.add(tape.maker[value], slot)
    for value, needs in enumerate(ledger.needs if copies else []):
        room = needs[0] - tape.home[value] if needs else 0
        if room > 3 and draw.random() < 0.5:
            out = tape.home[value] + draw.randint(0, 1)
            gone = draw.randint(out, needs[0] - 2)
            ledger.move(Copy(value, out, gone, draw.randint(gone + 1, needs[0] - 1)))
    return taped, ledger


@given(st.integers(3, 10), st.integers(0, 99), DRAWS, st.booleans())
def test_the_layout_counts_the_same(layers: int, seed: int, draw: Random, copies: bool) -> None:
    """Where nothing is shared and every run is read, what is there in a slot at the most is what the ledger says."""
    problem = training(layers, seed, sharing=False)
    taped, ledger = random_plan(problem, draw, copies)
    schedule, slots = schedule_of(taped, ledger)
    assume(needed(problem, schedule) == schedule)
    there = np.zeros(taped.tape.count, np.int64)
    np.maximum.at(there, slots, live_nbytes(problem, schedule))
    assert (there == ledger.load).all()


@given(st.integers(3, 10), st.integers(0, 99), DRAWS)
def test_kept_up_to_date(layers: int, seed: int, draw: Random) -> None:
    taped, ledger = random_plan(training(layers, seed), draw, copies=True)
    fresh = Ledger(taped.tape)
    fresh.become(ledger.pairs(), ledger.copies.values())
    assert (fresh.load == ledger.load).all()
    assert np.allclose(fresh.slot_seconds, ledger.slot_seconds)
    ledger.become((), ())
    assert (ledger.load == Ledger(taped.tape).load).all()
    assert ledger.pairs() == [] and not ledger.copies


@given(st.integers(3, 10), st.integers(0, 99), DRAWS)
def test_the_clock_of_the_links(layers: int, seed: int, draw: Random) -> None:
    """The same seconds as a replay of the schedule."""
    problem = training(layers, seed)
    taped, ledger = random_plan(problem, draw, copies=True)

    def copy_s(nbytes: int) -> float:
        return 0.1 + nbytes / 2**21

    schedule, _ = schedule_of(taped, ledger)
    assert np.isclose(Links(ledger, copy_s).seconds, seconds(problem, schedule, copy_s))


def test_what_comes_back_for_nobody_is_not_fetched() -> None:
    stages = of_nodes([1] * 6, [1] * 6, [[], [0], [1], [2], [3], [0, 4]], 0)
    ledger = Ledger(tape_of_stages(stages))
    ledger.move(Copy(0, 1, 1, 2))
    ledger.move(Copy(0, None, 2, 3))  # comes back again before anybody has read it
    assert [(slot, kind) for slot, kind, _ in events(ledger)] == [(1, 1), (1, 2), (3, 3), (5, 0)]
    ledger.add(0, 5)
    assert [(slot, kind) for slot, kind, _ in events(ledger)] == [(1, 1), (1, 2)]


def test_what_runs_again_writes_over_what_it_reads_last() -> None:
    """In a prelude as in a slot's own work."""
    b = Building()
    given_one, other = b.argument(), b.argument(4 * MIB)
    (first,) = b.kernel((given_one,), 4 * MIB)
    (second,) = b.kernel((first,), 4 * MIB, over=True)
    (third,) = b.kernel((second,), MIB)
    (rest,) = b.kernel((third, other), MIB)
    b.kernel((second, rest), MIB // 2, output=True)
    problem = b.problem()
    taped = tape_of(problem)
    taped = settled(taped, Ledger(taped.tape).load)
    ledger = Ledger(taped.tape)
    for op in (0, 1):
        ledger.add(op, 4)
    schedule, slots = schedule_of(taped, ledger)
    there = np.zeros(taped.tape.count, np.int64)
    np.maximum.at(there, slots, live_nbytes(problem, schedule))
    assert first in problem.kernels[1].over[second]
    assert ledger.load.tolist() == there.tolist() == [4 * MIB, 4 * MIB, 5 * MIB, 2 * MIB, 5 * MIB]
