"""Streaming plans: legal, within the limit if they can be, with copies that overlap."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.planners.evict import tape_of_stages
from experiments.planners.stages import stages_of_nodes
from memplan.planning.legal import fault
from memplan.planning.problem import Problem
from memplan.planning.search.effort import Streaming
from memplan.planning.search.ledger import Ledger, Offload
from memplan.planning.search.links import CopyScheduler, plan_seconds
from memplan.planning.search.streaming import stream
from memplan.planning.search.tape import record
from tests.planning.search.plans import random_plan, schedule_of
from tests.planning.steps import accumulating, in_a_loop, training

STREAMINGS = st.builds(Streaming, st.sampled_from([0.0, 0.3, 1.0]), st.booleans())


def streamed(ledger: Ledger, limit: int, streaming: Streaming, host_nbytes: int = 2**40) -> Ledger:
    scheduler = CopyScheduler(ledger, lambda nbytes: nbytes / 2**22, host_nbytes)
    stream(ledger, scheduler, limit, streaming, min_nbytes=1)
    return ledger


def check(problem: Problem, ledger: Ledger, share: float, streaming: Streaming) -> None:
    limit = int(share * ledger.peak_nbytes)
    streamed(ledger, limit, Streaming(streaming.reserve, overlap=False))
    tight = ledger.peak_nbytes
    plan = ledger.recomputations(), list(ledger.offloads.values())
    assert fault(problem, schedule_of(ledger)[0]) is None
    streamed(ledger, limit, streaming)
    assert ledger.peak_nbytes <= max(limit, tight)
    assert fault(problem, schedule_of(ledger)[0]) is None
    assert (ledger.recomputations(), len(ledger.offloads)) == (plan[0], len(plan[1]))


@given(st.integers(3, 10), st.integers(0, 99), st.sampled_from([0.8, 0.5, 0.2]), STREAMINGS)
def test_plans_are_legal_and_copies_keep_the_limit(
    layers: int, seed: int, share: float, streaming: Streaming
) -> None:
    straight = training(layers, seed)
    for problem in (straight, accumulating(layers, 3, seed), in_a_loop(straight, 3)):
        check(problem, Ledger(record(problem)), share, streaming)


DRAWS = st.randoms(use_true_random=False)


@given(st.integers(3, 10), st.integers(0, 99), st.sampled_from([0.8, 0.5]), STREAMINGS, DRAWS)
def test_a_plan_goes_on_from_any_other(
    layers: int, seed: int, share: float, streaming: Streaming, draw: Random
) -> None:
    problem = training(layers, seed)
    check(problem, random_plan(problem, draw, offloads=True), share, streaming)


@given(st.integers(4, 10), st.integers(0, 99), st.sampled_from([0.8, 0.5]))
def test_nothing_is_left_to_add(layers: int, seed: int, share: float) -> None:
    """A second time, the plan stays as it is."""
    ledger = Ledger(record(training(layers, seed)))
    limit = int(share * ledger.peak_nbytes)
    once = dict(streamed(ledger, limit, Streaming(0.0, overlap=False)).offloads)
    assert streamed(ledger, limit, Streaming(0.0, overlap=False)).offloads == once


def chain(inputs: list[list[int]], nbytes: list[int]) -> Ledger:
    """A node per slot, of a second each."""
    return Ledger(tape_of_stages(stages_of_nodes(nbytes, [1] * len(inputs), inputs, 0)))


# the first value is read once more by the last slot
SPANNED = [[], *([node] for node in range(8)), [0, 8]]


@pytest.mark.parametrize(
    ("limit", "buffers", "offload"),
    [
        # eight bytes are too many in slots 5 and 6; kernels wait for both copies
        (7, False, Offload(0, 0, 1, 8)),
        # copies of two seconds end beside slot 2, and begin after slot 6
        (7, True, Offload(0, 0, 2, 6)),
        (5, True, Offload(0, 0, 1, 8)),  # no room beside two values of a byte: kernels wait
    ],
)
def test_copies_take_the_room_that_there_is(limit: int, buffers: bool, offload: Offload) -> None:
    ledger = chain(SPANNED, [4, 1, 1, 1, 1, 3, 1, 1, 1, 1])
    scheduler = CopyScheduler(ledger, lambda nbytes: nbytes / 2, 100)
    stream(ledger, scheduler, limit, Streaming(0.0, buffers), min_nbytes=1)
    assert list(ledger.offloads.values()) == [offload]


def test_what_is_needed_latest_leaves() -> None:
    ledger = chain([[], [], [1], [2], [1, 3], [0, 4]], [4, 4, 1, 1, 1, 1])
    streamed(ledger, 9, Streaming(0.0))
    assert {offload.value for offload in ledger.offloads.values()} == {0}


def test_a_host_that_is_full_takes_nothing() -> None:
    ledger = chain(SPANNED, [4] + [1] * 9)
    assert not streamed(ledger, 5, Streaming(0.0), host_nbytes=3).offloads


def test_kernels_wait_for_no_copy_that_a_buffer_hides() -> None:
    """A chain and its reverse, with a second for each copy and a kernel: half of the values travel for nothing."""
    forward = [[], *([node] for node in range(9))]
    ledger = chain([*forward, *([9 + node, 9 - node] for node in range(10))], [1] * 20)
    scheduler = CopyScheduler(ledger, lambda nbytes: 1.0, 100)
    plain_s = plan_seconds(ledger, scheduler)
    stream(ledger, scheduler, 6, Streaming(0.0), min_nbytes=1)
    assert ledger.peak_nbytes <= 6 and ledger.offloads
    assert plan_seconds(ledger, scheduler) == plain_s
