"""Versions of buffers: live ranges, overwrites, and dead actions."""

from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from memplan.planning.legal import fault
from memplan.planning.liveness import Liveness, eliminate_dead
from memplan.planning.schedule import runs
from tests.planning.small import actions, looping, problem
from tests.planning.steps import training

KIB = 1024


def test_a_version_is_there_from_its_run_to_its_last_read() -> None:
    step = problem([[], [0], [1, 0], [2]], [KIB, 8, 8, 8], outputs=[3])
    live = Liveness(step, runs([0, 1, 0, 2, 3]))
    assert [(version.buffer, version.start, version.end) for version in live.versions] == [
        (0, 0, 1), (1, 1, 3), (0, 2, 3), (2, 3, 4), (3, 4, 5)]  # fmt: skip
    assert live.outputs == [4]


def test_what_is_prefetched_is_a_version_of_its_own() -> None:
    step = problem([[], [0], [1, 0]], [KIB, 8, 8], outputs=[2])
    copies = "run 0, offload 0, offloaded 0, run 1, prefetch 0, prefetched 0, run 2"
    live = Liveness(step, actions(copies))
    whole = [(version.start, version.end) for version in live.versions if version.nbytes == KIB]
    assert whole == [(0, 3), (4, 6)]  # what reads it before the prefetch reads the first
    assert [(version.start, version.end) for version in live.on_host] == [(1, 5)]


def test_in_one_place_a_version_ends_when_the_next_begins() -> None:
    live = Liveness(problem([[], [0], [0, 1]], [KIB] * 3, alias_sets={1: 0}), runs([0, 1, 2]))
    assert [(version.start, version.end) for version in live.versions[:2]] == [(0, 1), (1, 2)]


def test_what_a_loop_takes_over_ends_where_its_body_begins() -> None:
    """In one place with its carry, whose old value is free to be written over within the body."""
    step = looping()
    alias_sets = [0 if number in (1, 3, 4) else number for number in range(len(step.buffers))]
    pairs = zip(step.buffers, alias_sets, strict=True)
    buffers = (replace(buffer, alias_set=alias_set) for buffer, alias_set in pairs)
    kernels = (*step.kernels[:6], replace(step.kernels[6], reads=(4,)))
    update = replace(step.kernels[3], reads=(2,))  # the new value is made without the old one
    kernels = (*kernels[:3], update, *kernels[4:])
    live = Liveness(replace(step, buffers=tuple(buffers), kernels=kernels), runs(range(7)))
    names = [step.buffers[version.buffer].name for version in live.versions]
    ranges = [(version.start, version.end) for version in live.versions]
    spans = dict(zip(names, ranges, strict=True))
    expected = {
        "before": (0, 1),
        "state": (1, 2),
        "inner": (2, 3),
        "next": (3, 4),
        "result": (5, 6),
    }
    assert spans == {**expected, "after": (6, 7)}


def test_only_an_operand_that_ends_may_be_written_over() -> None:
    step = problem([[], [0], [1, 0]], [KIB] * 3, over={1: (0,), 2: (0,)})
    live = Liveness(step, runs([0, 1, 2]))
    assert live.may_overwrite(2, 0) and not live.interfere(2, 0)
    assert not live.may_overwrite(2, 1)
    assert live.interfere(1, 0)  # that is read once more
    assert not live.interfere(0, 0 + 2)


def test_a_run_that_nobody_reads_is_dead() -> None:
    step = problem([[], [0], [1]], [KIB, 8, 8], outputs=[2])
    assert eliminate_dead(step, runs([0, 1, 0, 1, 2])) == runs([0, 1, 2])
    assert eliminate_dead(step, runs([0, 0, 1, 2])) == runs([0, 1, 2])


def test_copies_that_nobody_reads_are_dead() -> None:
    step = problem([[], [0], [1]], [KIB, 8, 8], outputs=[2])
    idle = (
        "run 0",
        "offload 0",
        "offloaded 0",
        "prefetch 0",
        "prefetched 0",
        "run 1",
        "prefetch 0",
        "prefetched 0",
    )
    assert eliminate_dead(step, actions(*idle, "run 2")) == actions(*idle[:6], "run 2")
    assert eliminate_dead(step, actions(*idle[:3], "run 1", "run 2")) == runs([0, 1, 2])


def test_a_value_that_is_read_after_each_prefetch_is_fetched_twice() -> None:
    step = problem([[], [0], [1, 0], [2, 0]], [KIB, 8, 8, 8], outputs=[3])
    twice = actions(
        "run 0, offload 0, run 1, offloaded 0, prefetch 0, prefetched 0, run 2, prefetch 0, prefetched 0, run 3"
    )
    assert eliminate_dead(step, twice) == twice


@given(st.integers(2, 8), st.integers(0, 99), st.randoms(use_true_random=False))
def test_without_what_is_dead_the_rest_is_legal_and_alive(
    layers: int, seed: int, draw: Random
) -> None:
    step = training(layers, seed)
    numbers = list(range(len(step.kernels)))
    for _ in range(draw.randint(0, 5)):
        at = draw.randrange(len(numbers))
        numbers.insert(at + 1, numbers[draw.randint(0, at)])
    if fault(step, runs(numbers)) is not None:
        return
    alive = eliminate_dead(step, runs(numbers))
    assert fault(step, alive) is None
    assert eliminate_dead(step, alive) == alive
