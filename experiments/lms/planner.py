"""IBM's Large Model Support (LMS) as a planner: everything moves, nothing is computed again."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from memplan.planning.packing import pack
from memplan.planning.problem import Problem
from memplan.planning.schedule import CopySeconds, Schedule, Solution, runs, seconds
from memplan.planning.search.ledger import Ledger, Offload, reconcile
from memplan.planning.search.links import CopyScheduler, slot_actions
from memplan.planning.search.streaming import overlap_copies
from memplan.planning.search.tape import record

# Smaller values stay on the device. IBM's example, in KB: `-lms 1000` (github.com/ibmsoe/caffe, branch master-lms).
THRESHOLD_NBYTES = 1000 * 1024
# The layout takes a few percent more than the live bytes, so the limit of live bytes is lowered by the difference.
# Four times are enough for memplan's own planner, too.
_LIMITS = 4


class LargeModelSupport:
    """A planner that copies every value of the forward pass to the host that the backward pass reads.

    A copy to the host begins after the last forward use, and the copy back ends before the first backward use. The
    kernels keep the order of XLA. Copies run beside the kernels as far as the budget has room for the values, unless
    `overlaps` is False: kernels then wait for each copy.
    """

    def __init__(self, overlaps: bool = True) -> None:
        self.name = "LMS" if overlaps else "LMS, waiting"
        self._limits = _LIMITS if overlaps else 0

    def plan(
        self,
        problem: Problem,
        budget_nbytes: int,
        host_nbytes: int = 0,
        copy_s: CopySeconds | None = None,
    ) -> Solution:
        """Move everything; of the plans that fit, the one with the most overlap."""
        assert copy_s is not None, "LMS needs memory on the host"
        ledger = Ledger(reconcile(problem, record(problem)))
        scheduler = CopyScheduler(ledger, copy_s, host_nbytes)
        for offload in _swaps(ledger, scheduler):
            ledger.offload(offload)
        waiting = list(ledger.offloads.values())
        limit = budget_nbytes - problem.tables_nbytes
        for _ in range(self._limits):
            overlap_copies(ledger, scheduler, limit)
            solution = _solution(problem, _schedule(ledger), budget_nbytes, copy_s)
            if solution.fits:
                return solution
            limit -= solution.nbytes - budget_nbytes
            ledger.restore((), waiting)
        return _solution(problem, _schedule(ledger), budget_nbytes, copy_s)


def crossing(ledger: Ledger) -> Iterator[tuple[int, int]]:
    """The large values that are made before the turn and read after it, each with its first reader after the turn.

    The turn from the forward to the backward pass is where the most large values wait for a reader.
    """
    values = ledger.tape.values
    large = [
        n for n, value in enumerate(values) if value.nbytes >= THRESHOLD_NBYTES and ledger.needs[n]
    ]
    change = np.zeros(ledger.tape.count + 1, np.int64)
    for number in large:
        change[values[number].first_slot] += 1
        change[ledger.needs[number][-1]] -= 1
    turn = int(np.argmax(np.cumsum(change)))
    for number in large:
        readers = [slot for slot in ledger.needs[number] if slot > turn]
        if readers and values[number].first_slot <= turn:
            yield number, readers[0]


def _swaps(ledger: Ledger, scheduler: CopyScheduler) -> Iterator[Offload]:
    """Offloads from the last forward use to the first backward use; kernels wait for both copies."""
    for value, reader in list(crossing(ledger)):
        if offload := scheduler.shortest_residency(value, reader):
            yield replace(offload, start=offload.end)


def _schedule(ledger: Ledger) -> Schedule:
    """The ledger's kernels and copies in order."""
    return tuple(action for actions in slot_actions(ledger) for action in actions)


def _solution(
    problem: Problem, schedule: Schedule, budget_nbytes: int, copy_s: CopySeconds
) -> Solution:
    packing = pack(problem, schedule)
    return Solution(
        schedule,
        packing.nbytes,
        seconds(problem, schedule, copy_s),
        packing.host_nbytes,
        bound_s=seconds(problem, runs(range(len(problem.kernels)))),
        fits=packing.nbytes <= budget_nbytes,
    )
