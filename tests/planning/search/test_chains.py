"""Chains that recompute a value, priced by hand; every operation takes a second."""

import numpy as np
import pytest

from experiments.planners.evict import tape_of_stages
from experiments.planners.stages import stages_of_nodes
from memplan.planning.search.chains import Chains, Excess
from memplan.planning.search.ledger import Ledger


def chains(nbytes: list[int], inputs: list[list[int]], limit: int) -> Chains:
    ledger = Ledger(tape_of_stages(stages_of_nodes(nbytes, [1] * len(nbytes), inputs, limit)))
    return Chains(ledger, Excess(limit), 0.0)


INPUTS = [[], [0], [1], [2], [3], [1, 4]]  # the second value is read again by the last node
LONGER = [[], [0], [1], [2], [3], [4], [5], [6], [1, 7]]


def test_what_is_small_to_read_is_kept_for_it() -> None:
    chain = chains([1, 8, 2, 2, 2, 1], INPUTS, 4).best(1, 5, 10)
    assert (chain.operations, chain.slot, chain.seconds) == ((1,), 5, 1.0)


def test_what_is_large_to_read_is_recomputed_with_it() -> None:
    chain = chains([8, 8, 2, 2, 2, 2, 2, 2, 1], LONGER, 9).best(1, 8, 10)
    assert (chain.operations, chain.seconds) == ((0, 1), 2.0)


def test_no_chain_is_longer_than_it_may_be() -> None:
    assert chains([8, 8, 2, 2, 2, 2, 2, 2, 1], LONGER, 9).best(1, 8, 1) is None


@pytest.mark.parametrize(("value", "slot"), [(1, 3), (5, 5)])
def test_what_nobody_needs_there_is_not_recomputed(value: int, slot: int) -> None:
    assert chains([1, 8, 2, 2, 2, 1], INPUTS, 4).best(value, slot, 10) is None


def test_it_is_recomputed_once() -> None:
    candidates = chains([1, 8, 2, 2, 2, 1], INPUTS, 4)
    candidates.ledger.recompute(1, 5)
    assert candidates.best(1, 5, 10) is None


LOAD = np.array([5, 20, 10, 15])


@pytest.mark.parametrize(("power", "weight"), [(1.0, 1.0 + 0.5), (2.0, 1.0 + 0.25)])
def test_bytes_above_the_limit_as_shares_of_it(power: float, weight: float) -> None:
    excess = Excess(10, power)
    assert excess.of(LOAD) == weight == sum(excess.of_slot(nbytes) for nbytes in LOAD.tolist())


@pytest.mark.parametrize("power", [1.0, 1.5, 2.0])
def test_a_byte_weighs_what_it_takes_off(power: float) -> None:
    excess = Excess(10**6, power)
    load = LOAD * 10**5
    below = excess.of_a_byte(load)
    for slot in range(len(load)):
        less = load - (np.arange(len(load)) == slot)
        removed = (excess.of(load) - excess.of(less)) * 10**6
        assert below[slot + 1] - below[slot] == pytest.approx(removed, rel=1e-5)
