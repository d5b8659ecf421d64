"""The programs that are explored if the step does not fit, or fits by a slow plan only.

Each transform proposes programs, one at a time, and learns from what the last one takes.
"""

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass

from memplan.compilation.compiler import Notify
from memplan.compilation.outcome import Explored
from memplan.compilation.scheduled import ScheduledModule
from memplan.planning.transforms import Transform
from memplan.program.candidates import Candidates
from memplan.program.loops.choose import ResidualChoice
from memplan.program.trace import Program

# A plan above 1.25 times its bound is slow, and compared with other programs.
_SLOW_RATIO = 1.25
# Where a choice of residuals fits, explore another only if it promises to save 2 % of the step.
# The first choice fits with room where its estimate was too high: five steps of layers in nested
# boundaries on an A100 took 9 to 48 % less after a second compilation. Promises are off by up to
# 4 % of a step (eleven choices for a scan of ten layers on a V100).
_LEAST_GAIN = 0.02
# More bytes than any step has: with this excess, loops keep as few residuals as they can.
_EXCEEDS_ALL = 1 << 62
# Raise the excess by at least a hundredth of the budget, so that a near miss or a slow plan does
# not select the same residuals again. A GRU of 1,000 trips missed half its bytes by 1 MiB, less
# than a trip stacks; the same residuals were chosen again, and at last all were on the host: 253
# ms instead of 191. On an A100, a value went to the host and back in each trip: 241 ms instead of
# 39.
_STEP_PARTS = 100
# After a choice that fits, try one whose estimate exceeds the limit by a twentieth at most: a plan
# of kernels may save that, and estimates are off by as much. The layers of a scan that two losses
# read took 7 % longer than by hand for 2 MiB of 254 that were estimated too much.
_DOUBT_PARTS = 20
# Explore a program without host copies if copies stall more than this share of a step.
_STALL_SHARE = 0.05
# Explore at most three programs in slabs: the estimate orders them, XLA's schedule decides. For a
# ResNet of 14 layers in a loop the first missed 40 % by 12 %; without a second, copies that no
# kernel hides made a trip 19 times as long.
_MOST_SLAB_PROGRAMS = 3


@dataclass(frozen=True)
class Proposal:
    """A program to explore.

    Attributes:
      is_last: whether no other program of this kind is proposed after it.
    """

    program: Program
    is_last: Callable[[Explored], bool] = lambda explored: not needs_better(explored)

    def commits(self, explored: Explored) -> bool:
        """Whether the program is compiled at once."""
        return explored.fits and self.is_last(explored)


type Proposals[Result] = Generator[Proposal, Explored, Result]
"""Yields programs to explore, and receives what each takes."""


@dataclass(frozen=True)
class Variants:
    """The other programs of a step, by the transform that makes them, in the order of trial."""

    candidates: Candidates
    notify: Notify
    tries: int  # most programs with other residuals, with and without the host each

    def indexed_stacks(self, best: Explored) -> Proposals[None]:
        """The best program with stacks that loops read by index."""
        indexed = self.candidates.indexed_stacks(best.program)
        if indexed is not None:
            self.notify("compiling with its stacks read by index", None)
            yield Proposal(indexed)

    def fewer_residuals(
        self, best: Explored, unmodified: ScheduledModule | None
    ) -> Proposals[None]:
        """The best program with as few residuals fewer in its loops as needed.

        If its residuals' host copies stall the step, it is compared with one without host copies.
        """
        baseline = (unmodified or best.planned.plain) if best.fits else best
        excess = baseline.device_bytes - best.limits.device_bytes
        for may_use_host in (True, False):
            fitted = yield from self._fit_residuals(best.program, excess, may_use_host)
            if fitted is None or not _stalls(fitted):
                return

    def _fit_residuals(
        self, program: Program, excess: int, may_use_host: bool
    ) -> Proposals[Explored | None]:
        """Returns the best outcome with fewer residuals; None if no choice keeps fewer.

        The first choice keeps `excess` bytes fewer. Each outcome corrects that figure for the next.
        After one that fits, the next must promise to be faster. If none fits, the choice with the
        fewest residuals is the last. If the best runs loops in segments, the fastest choice without
        segments is compared: the windows of segments take longer than estimated.
        """
        candidates = self.candidates
        nbytes = candidates.residuals.nbytes(program)
        tried = dict[tuple[Transform, ...], ResidualChoice]()
        best: Explored | None = None
        offset: float = math.inf  # least bytes that an outcome takes over its estimate

        def promises(choice: ResidualChoice, outcome: Explored) -> bool:
            """Does a choice promise to be faster, without a plan, than an outcome that fits?"""
            more_s = choice.seconds - tried[outcome.program.transforms].seconds
            promised_s = outcome.planned.plain.replay.step_s + more_s
            return promised_s <= (1 - _LEAST_GAIN) * outcome.step_s

        def is_last(outcome: Explored) -> bool:
            chosen = tried[outcome.program.transforms]
            if needs_better(outcome) or _stalls(outcome) or chosen.has_segments:
                return False
            if len(tried) >= self.tries or excess == _EXCEEDS_ALL:
                return True
            more = _next_excess(excess, nbytes - chosen.nbytes, outcome)
            following = candidates.fewer_residuals(program, more, may_use_host)
            return following is None or not promises(following, outcome)

        while choice := candidates.fewer_residuals(program, excess, may_use_host):
            candidate = candidates.with_residuals(choice)
            is_new = candidate.transforms not in tried
            if is_new and best and not needs_better(best) and not promises(choice, best):
                break
            if is_new:
                tried[candidate.transforms] = choice
                self.notify("compiling with fewer residuals in its loops", None)
                outcome = yield Proposal(candidate, is_last)
                best = outcome if best is None else better(best, outcome)
                offset = min(offset, outcome.planned.plain.device_bytes - choice.nbytes)
                if excess == _EXCEEDS_ALL:
                    break
                excess = _next_excess(excess, nbytes - choice.nbytes, outcome)
            if not is_new or len(tried) >= self.tries:
                if excess == _EXCEEDS_ALL or best is None or best.fits:
                    break
                excess = _EXCEEDS_ALL
        if best is None or not best.fits or not tried[best.program.transforms].has_segments:
            return best
        limit = best.limits.device_bytes
        excess = nbytes + int(offset) - limit - limit // _DOUBT_PARTS
        choice = candidates.fewer_residuals(program, excess, may_use_host, may_segment=False)
        candidate = None if choice is None else candidates.with_residuals(choice)
        if candidate is None or candidate.transforms in tried:
            return best
        self.notify("compiling with its loops in one piece", None)
        return better(best, (yield Proposal(candidate)))

    def in_slabs(self, best: Explored) -> Proposals[None]:
        """Parts of the step in slabs.

        If a candidate misses the limit by x %, or fits by a slow plan only, the next is the fastest
        whose estimate is x % lower, else the smallest. It goes by the ratio because on a mesh the
        estimate may be the bytes of several devices.
        """
        # A value in slabs never exists as a whole, so no pin can hold on it.
        if not self.candidates.splits or (best.fits and best.program.pins):
            return
        self.notify("choosing slabs", None)
        slowdown = best.step_s / best.planned.bound_s if best.fits else math.inf
        candidates = list(self.candidates.in_slabs(slowdown))
        estimate_limit = math.inf
        for _ in range(min(_MOST_SLAB_PROGRAMS, len(candidates))):
            self.notify("compiling in slabs", None)
            small_enough = (slabs for slabs in candidates if slabs.expected_bytes <= estimate_limit)
            smallest = min(candidates, key=lambda slabs: slabs.expected_bytes)
            candidate = next(small_enough, smallest)
            candidates.remove(candidate)
            outcome = yield Proposal(candidate.write())
            if not needs_better(outcome):
                return
            size = outcome.planned.plain if outcome.fits else outcome
            overshoot = size.device_bytes / outcome.limits.device_bytes
            estimate_limit = candidate.expected_bytes / max(1.0, overshoot)


def needs_better(outcome: Explored) -> bool:
    """Whether other programs are worth exploring: the outcome does not fit, or is slow."""
    return not outcome.fits or outcome.step_s > _SLOW_RATIO * outcome.planned.bound_s


def better(best: Explored, candidate: Explored) -> Explored:
    """The better of two outcomes by `Outcome.rank`, the first if they are equal."""
    return min(best, candidate, key=lambda outcome: outcome.rank)


def _next_excess(excess: int, fewer: int, outcome: Explored) -> int:
    """How many bytes fewer the next choice of residuals keeps.

    If a plan of kernels makes the last choice fit and takes time, the next should fit without one.

    Args:
      excess: how many fewer the last choice was asked to keep.
      fewer: how many fewer it keeps, by the estimate.
      outcome: of the last choice.
    """
    limit = outcome.limits.device_bytes
    overshoot = outcome.device_bytes - limit
    unplanned = outcome.planned.plain
    if needs_better(outcome):
        return fewer + max(overshoot, limit // _STEP_PARTS)
    if outcome.step_s - unplanned.replay.step_s > _LEAST_GAIN * outcome.step_s:
        return fewer + max(unplanned.device_bytes - limit, limit // _STEP_PARTS)
    return min(excess, fewer + overshoot) - limit // _DOUBT_PARTS


def _stalls(outcome: Explored) -> bool:
    """Do copies between host and device stall the step?"""
    replay = outcome.planned.result.replay
    return replay.copy_s - replay.hidden_copy_s >= _STALL_SHARE * outcome.step_s
