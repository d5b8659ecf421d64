"""Plans on ledgers, drawn at random, and their schedules."""

from random import Random

from memplan.planning.problem import Problem
from memplan.planning.schedule import Action, Kind, Schedule
from memplan.planning.search.ledger import Ledger, Offload, reconcile
from memplan.planning.search.links import events
from memplan.planning.search.tape import record


def schedule_of(ledger: Ledger) -> tuple[Schedule, list[int]]:
    """The actions, and the slot of each."""
    copies = [
        (slot, Action(kind, ledger.tape.values[offload.value].buffer))
        for slot, kind, offload in events(ledger)
    ]
    entries: list[tuple[Action, int]] = []
    for slot, prelude in enumerate(ledger.preludes):
        slot_copies = [(action, slot) for copy_slot, action in copies if copy_slot == slot]
        entries += [entry for entry in slot_copies if entry[0].kind is Kind.PREFETCHED]
        work = ledger.tape.slots[slot].operation
        for op in prelude if work is None else (*prelude, work):
            entries.append((Action(Kind.RUN, ledger.tape.operations[op].kernel), slot))
        entries += [entry for entry in slot_copies if entry[0].kind is not Kind.PREFETCHED]
    return tuple(action for action, _ in entries), [slot for _, slot in entries]


def random_plan(problem: Problem, draw: Random, offloads: bool) -> Ledger:
    tape = reconcile(problem, record(problem))
    ledger = Ledger(tape)
    for _ in range(draw.randint(0, 10)):
        value = draw.randrange(len(tape.nbytes))
        maker = tape.values[value].maker
        slots = [
            slot
            for slot in ledger.needs[value]
            if slot > tape.values[value].first_slot and tape.may_recompute(maker, slot)
        ]
        if slots and (slot := draw.choice(slots)) and maker not in ledger.preludes[slot]:
            ledger.recompute(maker, slot)
    for value, needs in enumerate(ledger.needs if offloads else []):
        gap = needs[0] - tape.values[value].first_slot if needs else 0
        if gap > 3 and draw.random() < 0.5:
            start = tape.values[value].first_slot + draw.randint(0, 1)
            end = draw.randint(start, needs[0] - 2)
            ledger.offload(Offload(value, start, end, draw.randint(end + 1, needs[0] - 1)))
    return ledger
