"""memplan's own eviction on a bare graph, whose stages become a tape."""

from collections.abc import Iterable

from experiments.planners.stages import Recomputation, Stages
from memplan.planning.search.evict import Eviction
from memplan.planning.search.evict import prune as prune_ledger
from memplan.planning.search.ledger import Ledger
from memplan.planning.search.tape import Operation, Slot, Tape, TapeValue


def tape_of_stages(stages: Stages) -> Tape:
    """Each item becomes an operation and each stage a slot."""
    values = (
        TapeValue(stages.nbytes[item], item, slot, slot) for item, slot in enumerate(stages.home)
    )
    operations = (
        Operation(
            stages.inputs[item], (item,), None if ticks is None else float(ticks), stages.count
        )
        for item, ticks in enumerate(stages.ticks)
    )
    work = zip(stages.reads, stages.writes, stages.working_nbytes, stages.own_ticks, strict=True)
    slots = (
        Slot(reads=reads, writes=writes, nbytes=nbytes, seconds=float(ticks))
        for reads, writes, nbytes, ticks in work
    )
    return Tape(tuple(values), tuple(operations), tuple(slots))


def evict(stages: Stages) -> frozenset[Recomputation]:
    """Recomputations with which the stages fit the budget, or nearly fit."""
    ledger = Ledger(tape_of_stages(stages))
    Eviction(ledger, stages.budget_bytes).run()
    return frozenset(ledger.recomputations())


def prune(stages: Stages, recomputed: Iterable[Recomputation]) -> frozenset[Recomputation]:
    """Drop the recomputations that the budget does not need."""
    ledger = Ledger(tape_of_stages(stages))
    for op, slot in sorted(recomputed, key=lambda pair: (pair[1], pair[0])):
        ledger.recompute(op, slot)
    prune_ledger(ledger, stages.budget_bytes)
    return frozenset(ledger.recomputations())
