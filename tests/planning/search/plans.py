"""Plans on ledgers, drawn at random, and their schedules."""

from random import Random

from memplan.planning.liveness import eliminate_dead
from memplan.planning.problem import Problem
from memplan.planning.schedule import Schedule
from memplan.planning.search.ledger import Ledger, Offload, reconcile
from memplan.planning.search.links import slot_actions
from memplan.planning.search.tape import record


def schedule_of(ledger: Ledger) -> tuple[Schedule, list[int]]:
    """The actions, and the slot of each."""
    slots = enumerate(slot_actions(ledger))
    entries = [(action, slot) for slot, actions in slots for action in actions]
    return tuple(action for action, _ in entries), [slot for _, slot in entries]


def drop_dead(problem: Problem, ledger: Ledger) -> None:
    """Undo recomputations and offloads until every run and every copy is needed."""
    recomputations = ledger.recomputations()
    offloads = [*ledger.offloads.values()]
    ledger.restore((), ())
    for op, slot in recomputations:
        ledger.recompute(op, slot)
        if _has_dead(problem, ledger):
            ledger.undo_recompute(op, slot)
    for offload in offloads:
        ledger.offload(offload)
        if _has_dead(problem, ledger):
            ledger.undo_offload(offload)


def _has_dead(problem: Problem, ledger: Ledger) -> bool:
    schedule, _ = schedule_of(ledger)
    return eliminate_dead(problem, schedule) != schedule


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
    for value in range(len(tape.nbytes) if offloads else 0):
        offload = _random_offload(ledger, value, draw)
        if offload is not None:
            ledger.offload(offload)
    return ledger


def _random_offload(ledger: Ledger, value: int, draw: Random) -> Offload | None:
    """An offload from one use of a value to its next; None if there is no room, or by chance."""
    if not ledger.tape.values[value].may_offload:
        return None
    rooms: list[tuple[int, int, int]] = []  # slot that makes the value, its last use, its reader
    for reader in ledger.needs[value]:
        maker_slot = ledger.version(value, reader)[0] >> 1
        last_use = ledger.last_touch(value, reader)
        if maker_slot <= last_use < reader - 2:
            rooms.append((maker_slot, last_use, reader))
    if not rooms or draw.random() < 0.5:
        return None
    maker_slot, last_use, reader = draw.choice(rooms)
    end = draw.randint(last_use, reader - 2)
    start = draw.randint(maker_slot, end)
    return Offload(value, start, end, draw.randint(end + 1, reader - 1))
