"""Evictions keep their limit if they say so, by the cheapest decisions, and prune the others."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.planners.evict import tape_of_stages
from experiments.planners.stages import stages_of_nodes
from memplan.planning.search.evict import Eviction, prune, undo_offload
from memplan.planning.search.ledger import Ledger, Offload, reconcile
from memplan.planning.search.links import CopyScheduler, Links
from memplan.planning.search.tape import record
from tests.planning.steps import training


def copy_s(nbytes: int) -> float:
    return nbytes / 2**23


def there_and_back(length: int) -> Ledger:
    """A chain forward, and one back that reads it in reverse; a byte and a second each."""
    inputs = [[node - 1] if node else [] for node in range(length)]
    inputs += [[node - 1, 2 * length - 1 - node] for node in range(length, 2 * length)]
    return Ledger(tape_of_stages(stages_of_nodes([1] * 2 * length, [1] * 2 * length, inputs, 0)))


@given(st.integers(3, 10), st.integers(0, 99), st.sampled_from([0.9, 0.7, 0.5]), st.booleans())
def test_it_says_whether_the_limit_is_kept(
    layers: int, seed: int, share: float, offloads: bool
) -> None:
    problem = training(layers, seed)
    ledger = Ledger(reconcile(problem, record(problem)))
    limit = int(share * ledger.peak_nbytes)
    scheduler = CopyScheduler(ledger, copy_s, 2**40) if offloads else None
    eviction = Eviction(ledger, limit, scheduler=scheduler)
    is_kept = eviction.run()
    assert is_kept == (ledger.peak_nbytes <= limit) == (eviction.excess() == 0)
    if scheduler is not None:  # the links are those of the ledger's plan
        assert scheduler.links.stalls_s == pytest.approx(Links(ledger, copy_s).stalls_s)
        assert scheduler.links.ends == pytest.approx(Links(ledger, copy_s).ends)
    before = ledger.peak_nbytes
    decisions = {*ledger.recomputations(), *ledger.offloads.values()}
    prune(ledger, limit)
    assert ledger.peak_nbytes <= max(limit, before)
    assert decisions.issuperset([*ledger.recomputations(), *ledger.offloads.values()])


def test_a_byte_less_takes_one_recomputation() -> None:
    ledger = there_and_back(6)
    assert ledger.peak_nbytes == 7
    assert Eviction(ledger, 6).run() and len(ledger.recomputations()) == 1


def test_offloads_are_made_where_they_cost_less() -> None:
    for copy_s, offloaded in ((0.1, True), (50.0, False)):
        ledger = there_and_back(6)
        scheduler = CopyScheduler(ledger, lambda nbytes, took_s=copy_s: took_s, 100)
        assert Eviction(ledger, 6, scheduler=scheduler).run()
        assert bool(ledger.offloads) == offloaded != bool(ledger.recomputations())


def test_what_nothing_is_above_stays_as_it_is() -> None:
    ledger = there_and_back(4)
    assert Eviction(ledger, ledger.peak_nbytes).run() and not ledger.recomputations()
    ledger.recompute(0, 7)
    prune(ledger, 100)
    assert not ledger.recomputations()


def test_with_an_offload_go_those_of_the_same_bytes() -> None:
    ledger = Ledger(
        tape_of_stages(
            stages_of_nodes([1] * 8, [1] * 8, [[], [0], [1], [2], [0, 3], [4], [5], [0, 6]], 0)
        )
    )
    empty = ledger.load.copy()
    first = Offload(0, 0, 0, 2)
    again = Offload(0, None, 4, 5)
    ledger.offload(first)
    ledger.offload(again)
    assert undo_offload(ledger, again) == [again]
    ledger.offload(again)
    assert undo_offload(ledger, first) == [first, again]
    assert not ledger.offloads and np.array_equal(ledger.load, empty)
