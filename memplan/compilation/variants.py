"""The programs that are explored if the step does not fit, or fits by a slow plan only.

Each transform proposes programs, one at a time, and learns from what the last one takes.
"""

import functools
import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from memplan.compilation.compiler import Notify
from memplan.compilation.outcome import Explored
from memplan.compilation.scheduled import ScheduledModule
from memplan.planning.transforms import Transform
from memplan.program.candidates import Candidates
from memplan.program.loops.choose import ResidualChoice
from memplan.program.slabs.choose import SlabCandidate
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
# After a program in slabs of more than 1,500 kernels that does not fit, explore no other whose
# estimate, corrected by what that takes, exceeds the limit by a tenth. Slabs of one step take 1.02
# to 1.06 times their estimates (three of a ResNet-50 within 1,250 MiB), 0.97 to 1.00 (a U-Net of
# 304^3); within 8 % of a ResNet-50's bytes, slabs of one row took 2.3 times theirs, and their
# 13,110 kernels ten minutes. Steps of a few KiB fit at 1.4 times; U-Nets of 1,221 kernels take 4 s.
_SLAB_DOUBT = 1.1
_SLAB_KERNELS = 1_500
# Choose slabs again if they leave more than a twentieth of the limit free, and explore them if they
# promise to save 2 % of the step's kernels. On a V100 of 15 GiB, a U-Net of 304^3 left 9.6 %: 5,803
# ms, then 5,507. One of 240^3 left 9.8 %, for 0.8 % of its time.
_FREE_PARTS = 20


@dataclass(frozen=True)
class Proposal:
    """A program to explore.

    Attributes:
      what: names it in a progress line.
      is_last: whether no other program of this kind is proposed after it.
    """

    program: Program
    what: str
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
            yield Proposal(indexed, "with stacks read by index")

    def fewer_residuals(
        self, best: Explored, unmodified: ScheduledModule | None
    ) -> Proposals[None]:
        """The best program with as few residuals fewer in its loops as needed.

        If its residuals' host copies stall the step, it is compared with one without host copies.
        """
        baseline = (unmodified or best.planned.plain) if best.fits else best
        excess = baseline.device_bytes - best.limits.device_bytes
        for may_use_host in (True, False):
            search = _ResidualSearch(self.candidates, self.tries, best, excess, may_use_host)
            fitted = yield from search.run()
            if fitted is None or not _stalls(fitted):
                return

    def in_slabs(self, best: Explored) -> Proposals[None]:
        """Parts of the step in slabs.

        If a candidate misses the limit by x %, or fits by a slow plan only, the next is the fastest
        whose estimate is x % lower, else the smallest; of many kernels, only if that is almost as
        low.
        """
        # A value in slabs never exists as a whole, so no pin can hold on it.
        if not self.candidates.splits or (best.fits and best.program.pins):
            return
        self.notify("choosing slabs", None)
        slowdown = best.step_s / best.planned.bound_s if best.fits else math.inf
        candidates = list(self.candidates.in_slabs(slowdown))
        estimate_limit = math.inf
        is_costly = False
        for _ in range(min(_MOST_SLAB_PROGRAMS, len(candidates))):
            small_enough = (slabs for slabs in candidates if slabs.expected_bytes <= estimate_limit)
            smallest = min(candidates, key=lambda slabs: slabs.expected_bytes)
            candidate = next(small_enough, smallest)
            if is_costly and candidate.expected_bytes > _SLAB_DOUBT * estimate_limit:
                return
            candidates.remove(candidate)
            search = _LargerSlabs(self.candidates, self.notify, candidate)
            outcome = yield Proposal(candidate.write(), "in slabs", search.is_last)
            if not needs_better(outcome):
                yield from search.run(outcome)
                return
            size = outcome.planned.plain if outcome.fits else outcome
            overshoot = size.device_bytes / outcome.limits.device_bytes
            estimate_limit = candidate.expected_bytes / max(1.0, overshoot)
            is_costly = len(outcome.planned.plain.problem.kernels) > _SLAB_KERNELS


@dataclass
class _LargerSlabs:
    """Explores slabs for the bytes that a candidate leaves free.

    Their estimates are corrected by what the candidate takes.
    """

    candidates: Candidates
    notify: Notify
    first: SlabCandidate
    choice: SlabCandidate | None = None  # if it promises to be faster
    is_chosen: bool = False  # `choice` is known

    def is_last(self, outcome: Explored) -> bool:
        """Is nothing else explored after the first candidate's outcome?"""
        return not needs_better(outcome) and self._chosen(outcome) is None

    def run(self, outcome: Explored) -> Proposals[None]:
        """Compares the outcome of the first candidate, which fits, with larger slabs."""
        larger = self._chosen(outcome)
        if larger is not None:
            yield Proposal(larger.write(), "in larger slabs", _is_better_than(outcome))

    def _chosen(self, outcome: Explored) -> SlabCandidate | None:
        limit = outcome.limits.device_bytes
        if not self.is_chosen and outcome.device_bytes < limit - limit // _FREE_PARTS:
            self.notify("choosing slabs for the bytes that are left", None)
            estimate = self.first.expected_bytes / outcome.device_bytes
            larger = next(self.candidates.in_slabs(math.inf, estimate), None)
            if larger and larger.expected_s <= (1 - _LEAST_GAIN) * self.first.expected_s:
                self.choice = larger
        self.is_chosen = True
        return self.choice


@dataclass
class _ResidualSearch:
    """Explores programs that keep fewer residuals in their loops than a program does.

    The first choice keeps `excess` bytes fewer. Each outcome corrects that figure for the next.
    After one that fits, the next must promise to be faster. If none fits, the choice with the
    fewest residuals is the last. If the best runs loops in segments, the fastest choice without
    segments is compared: the windows of segments take longer than estimated. So is the choice with
    the fewest residuals, if it may be faster.
    """

    candidates: Candidates
    tries: int
    baseline: Explored  # the program
    excess: int
    may_use_host: bool
    tried: dict[tuple[Transform, ...], ResidualChoice] = field(default_factory=dict)

    def run(self) -> Proposals[Explored | None]:
        """Returns the best outcome with fewer residuals; None if no choice keeps fewer."""
        best: Explored | None = None
        offset: float = math.inf  # least bytes that an outcome takes over its estimate
        while choice := self._fewer(self.excess):
            candidate = self.candidates.with_residuals(choice)
            is_new = candidate.transforms not in self.tried
            if is_new and best and not needs_better(best) and not self._promises(choice, best):
                break
            if is_new:
                self.tried[candidate.transforms] = choice
                outcome = yield Proposal(candidate, "with fewer residuals", self._is_last)
                best = outcome if best is None else better(best, outcome)
                offset = min(offset, outcome.planned.plain.device_bytes - choice.nbytes)
                if self.excess == _EXCEEDS_ALL:
                    break
                self.excess = self._next_excess(outcome)
            if not is_new or len(self.tried) >= self.tries:
                if self.excess == _EXCEEDS_ALL or best is None or best.fits:
                    break
                self.excess = _EXCEEDS_ALL
        if best is None or not best.fits:
            return best
        if self._choice(best).has_segments:
            limit = best.limits.device_bytes
            excess = self._nbytes + int(offset) - limit - limit // _DOUBT_PARTS
            whole = self._fewer(excess, may_segment=False)
            best = yield from self._compared(best, whole, "with loops in one piece")
        if self._fewest_promises(best):
            best = yield from self._compared(best, self._fewest, "with the fewest residuals")
        return best

    def _compared(
        self, best: Explored, choice: ResidualChoice | None, what: str
    ) -> Proposals[Explored]:
        """The better of an outcome and a choice."""
        if choice is None:
            return best
        candidate = self.candidates.with_residuals(choice)
        if candidate.transforms in self.tried:
            return best
        self.tried[candidate.transforms] = choice
        outcome = yield Proposal(candidate, what, _is_better_than(best))
        return better(best, outcome)

    def _fewer(self, excess: int, may_segment: bool = True) -> ResidualChoice | None:
        return self.candidates.fewer_residuals(
            self.baseline.program, excess, self.may_use_host, may_segment
        )

    @functools.cached_property
    def _fewest(self) -> ResidualChoice | None:
        """The choice with the fewest residuals, without segments and the host."""
        return self.candidates.fewer_residuals(
            self.baseline.program, _EXCEEDS_ALL, may_use_host=False, may_segment=False
        )

    def _fewest_promises(self, outcome: Explored) -> bool:
        """Do the fewest residuals promise to be faster, if stacks cost as much as they may?"""
        fewest, choice = self._fewest, self._choice(outcome)
        if fewest is None or fewest.nbytes >= choice.nbytes:
            return False
        return self._saves(fewest.most_seconds - choice.most_seconds, outcome)

    def _choice(self, outcome: Explored) -> ResidualChoice:
        return self.tried[outcome.program.transforms]

    def _is_last(self, outcome: Explored) -> bool:
        """Is no other choice explored after this outcome?"""
        if needs_better(outcome) or _stalls(outcome):
            return False
        if self._choice(outcome).has_segments or self._fewest_promises(outcome):
            return False
        if len(self.tried) >= self.tries or self.excess == _EXCEEDS_ALL:
            return True
        following = self._fewer(self._next_excess(outcome))
        return following is None or not self._promises(following, outcome)

    def _promises(self, choice: ResidualChoice, outcome: Explored) -> bool:
        """Does a choice promise to be faster, without a plan, than an outcome that fits?"""
        return self._saves(choice.seconds - self._choice(outcome).seconds, outcome)

    @staticmethod
    def _saves(more_s: float, outcome: Explored) -> bool:
        """Does a choice that takes `more_s` longer, without a plan, save time?"""
        promised_s = outcome.planned.plain.replay.step_s + more_s
        return promised_s <= (1 - _LEAST_GAIN) * outcome.step_s

    @functools.cached_property
    def _nbytes(self) -> int:
        """Bytes of the program's residuals."""
        return self.candidates.residuals.nbytes(self.baseline.program)

    def _next_excess(self, outcome: Explored) -> int:
        """How many bytes fewer the next choice keeps.

        If a plan of kernels makes this outcome fit and takes time, the next should fit without one.
        """
        fewer = self._nbytes - self._choice(outcome).nbytes
        limit = outcome.limits.device_bytes
        overshoot = outcome.device_bytes - limit
        unplanned = outcome.planned.plain
        if needs_better(outcome):
            return fewer + max(overshoot, limit // _STEP_PARTS)
        if outcome.step_s - unplanned.replay.step_s > _LEAST_GAIN * outcome.step_s:
            return fewer + max(unplanned.device_bytes - limit, limit // _STEP_PARTS)
        return min(self.excess, fewer + overshoot) - limit // _DOUBT_PARTS


def needs_better(outcome: Explored) -> bool:
    """Whether other programs are worth exploring: the outcome does not fit, or is slow."""
    return not outcome.fits or outcome.step_s > _SLOW_RATIO * outcome.planned.bound_s


def better(best: Explored, candidate: Explored) -> Explored:
    """The better of two outcomes by `Outcome.rank`, the first if they are equal."""
    return min(best, candidate, key=lambda outcome: outcome.rank)


def _is_better_than(best: Explored) -> Callable[[Explored], bool]:
    return lambda outcome: better(best, outcome) is outcome


def _stalls(outcome: Explored) -> bool:
    """Do copies between host and device stall the step?"""
    replay = outcome.planned.result.replay
    return replay.copy_s - replay.hidden_copy_s >= _STALL_SHARE * outcome.step_s
