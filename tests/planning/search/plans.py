"""Plans on ledgers, drawn at random, and the schedules that they stand for."""

from __future__ import annotations

from random import Random

from memplan.planning.problem import Problem
from memplan.planning.schedule import Action, Kind, Schedule
from memplan.planning.search.ledger import Ledger, Offload, reconcile
from memplan.planning.search.links import events
from memplan.planning.search.tape import Recording, record


def schedule_of(recording: Recording, ledger: Ledger) -> tuple[Schedule, list[int]]:
    """The actions, and the slot of each."""
    copies = [(slot, Action(kind, recording.values[offload.value])) for slot, kind, offload in events(ledger)]
    found: list[tuple[Action, int]] = []
    for slot, prelude in enumerate(ledger.preludes):
        here = [(action, slot) for at, action in copies if at == slot]
        found += [one for one in here if one[0].kind is Kind.PREFETCHED]
        found += [(Action(Kind.RUN, recording.order[op]), slot) for op in (*prelude, *recording.work[slot])]
        found += [one for one in here if one[0].kind is not Kind.PREFETCHED]
    return tuple(action for action, _ in found), [slot for _, slot in found]


def random_plan(problem: Problem, draw: Random, offloads: bool) -> tuple[Recording, Ledger]:
    recording = reconcile(record(problem))
    ledger, tape = Ledger(recording.tape), recording.tape
    for _ in range(draw.randint(0, 10)):
        value = draw.randrange(len(tape.nbytes))
        maker = tape.maker[value]
        slots = [slot for slot in ledger.needs[value] if slot > tape.home[value] and tape.may_recompute(maker, slot)]
        if slots and (slot := draw.choice(slots)) and maker not in ledger.preludes[slot]:
            ledger.recompute(maker, slot)
    for value, needs in enumerate(ledger.needs if offloads else []):
        room = needs[0] - tape.home[value] if needs else 0
        if room > 3 and draw.random() < 0.5:
            start = tape.home[value] + draw.randint(0, 1)
            end = draw.randint(start, needs[0] - 2)
            ledger.offload(Offload(value, start, end, draw.randint(end + 1, needs[0] - 1)))
    return recording, ledger
