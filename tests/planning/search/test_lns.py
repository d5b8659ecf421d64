"""Neighbourhood search: no worse than its start, and deterministic."""

from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.planning.search.evict import Eviction
from memplan.planning.search.ledger import Ledger, reconcile
from memplan.planning.search.links import CopyScheduler
from memplan.planning.search.lns import NeighbourhoodSearch
from memplan.planning.search.tape import record
from tests.planning.steps import training


def evicted(layers: int, seed: int, offloads: bool) -> tuple[Ledger, int, CopyScheduler | None]:
    problem = training(layers, seed)
    ledger = Ledger(reconcile(problem, record(problem)))
    limit = int(0.75 * ledger.peak_nbytes)
    scheduler = CopyScheduler(ledger, lambda nbytes: nbytes / 2**23, 2**40) if offloads else None
    Eviction(ledger, limit, scheduler=scheduler).run()
    return ledger, limit, scheduler


def seconds_of(ledger: Ledger, scheduler: CopyScheduler | None) -> float:
    if scheduler is None:
        return float(ledger.slot_seconds.sum())
    scheduler.refresh()
    return scheduler.links.seconds


@settings(max_examples=20)
@given(st.integers(3, 8), st.integers(0, 99), st.booleans())
def test_what_fits_becomes_no_slower_and_the_limit_is_reached_or_told(
    layers: int, seed: int, offloads: bool
) -> None:
    ledger, limit, scheduler = evicted(layers, seed, offloads)
    before = seconds_of(ledger, scheduler)
    if ledger.peak_nbytes <= limit:
        search = NeighbourhoodSearch(ledger, limit, scheduler)
        search.improve(lambda: max(0, ledger.peak_nbytes - limit), 300)
        assert ledger.peak_nbytes <= limit
        assert seconds_of(ledger, scheduler) <= before * (1 + 1e-12)  # sums in another order
    ledger, limit, scheduler = evicted(layers, seed, offloads)
    limit = max(int(0.95 * limit), int(ledger.tape.floor_nbytes.max()))
    peak = ledger.peak_nbytes
    reached = NeighbourhoodSearch(ledger, limit, scheduler).reach_limit(300)
    assert reached == (ledger.peak_nbytes <= limit)
    assert reached or peak > limit


def test_the_seed_decides() -> None:
    def recomputations(seed: int) -> list[tuple[int, int]]:
        ledger, limit, _ = evicted(10, 3, offloads=False)
        NeighbourhoodSearch(ledger, limit, seed=seed).improve(
            lambda: max(0, ledger.peak_nbytes - limit), 300
        )
        return ledger.recomputations()

    assert recomputations(1) == recomputations(1)


def test_what_is_fast_enough_stays() -> None:
    ledger, limit, _ = evicted(10, 3, offloads=False)
    assert ledger.peak_nbytes <= limit
    before, seconds = ledger.recomputations(), seconds_of(ledger, None)
    search = NeighbourhoodSearch(ledger, limit)
    search.improve(lambda: 0, 2_000, enough_s=1.001 * seconds)
    assert ledger.recomputations() == before
    search.improve(lambda: 0, 2_000, enough_s=0.999 * seconds)
    assert seconds_of(ledger, None) < seconds
