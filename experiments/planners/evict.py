"""memplan's own eviction, asked to plan a bare graph: its stages as a tape."""

from __future__ import annotations

from collections.abc import Iterable

from experiments.planners.stages import Recomputation, Stages
from memplan.planning.search.evict import Eviction
from memplan.planning.search.evict import prune as prune_ledger
from memplan.planning.search.ledger import Ledger
from memplan.planning.search.tape import Tape


def tape_of_stages(stages: Stages) -> Tape:
    """Every item an operation; recomputations of stages are those of slots."""
    count, last = len(stages.nbytes), stages.count
    return Tape(
        nbytes=stages.nbytes,
        maker=tuple(range(count)),
        home=stages.home,
        whole=stages.home,
        reads=stages.inputs,
        writes=tuple((item,) for item in range(count)),
        seconds=tuple(None if ticks is None else float(ticks) for ticks in stages.ticks),
        until=(last,) * count,
        drops_dead_outputs=(False,) * count,
        over=((),) * count,
        level=(-1,) * count,
        slot_reads=stages.reads,
        slot_writes=stages.made,
        slot_over=((),) * last,
        slot_nbytes=stages.working_nbytes,
        slot_seconds=tuple(map(float, stages.own_ticks)),
        slot_level=(-1,) * last,
    )


def evict(stages: Stages) -> frozenset[Recomputation]:
    """Repetitions with which the stages fit the budget, or nearly so."""
    ledger = Ledger(tape_of_stages(stages))
    Eviction(ledger, stages.budget_bytes).run()
    return frozenset(ledger.recomputations())


def prune(stages: Stages, recomputed: Iterable[Recomputation]) -> frozenset[Recomputation]:
    """Undo what the budget does not need."""
    ledger = Ledger(tape_of_stages(stages))
    for op, slot in sorted(recomputed, key=lambda pair: (pair[1], pair[0])):
        ledger.recompute(op, slot)
    prune_ledger(ledger, stages.budget_bytes)
    return frozenset(ledger.recomputations())
