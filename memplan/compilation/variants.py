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
from memplan.program.candidates import MORE_THAN_ANY, Candidates
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
# Ask for less workspace if that of a convolution takes 1 % of the limit: less decides no plan, and
# XLA times all convolutions again. On an H100, a U-Net of 128^3 took 12 % more than compiled for
# one that is absent. The share was not measured.
_WORKSPACE_SHARE = 0.01
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

    def less_workspace(self, best: Explored) -> Proposals[None]:
        """The best program with convolutions by algorithms that need less workspace."""
        nbytes = best.planned.plain.largest_workspace_bytes
        if nbytes < _WORKSPACE_SHARE * best.limits.device_bytes:
            return
        program = self.candidates.less_workspace(best.program)
        if program is not None:
            yield Proposal(program, "with less workspace")

    def in_slabs(self, best: Explored) -> Proposals[None]:
        """Parts of the step in slabs (see `_SlabSearch`)."""
        # A value in slabs never exists as a whole, so no pin can hold on it.
        if not self.candidates.splits or (best.fits and best.program.pins):
            return
        slowdown = best.step_s / best.planned.bound_s if best.fits else math.inf
        search = _SlabSearch(self.candidates, self.notify, slowdown)
        yield from search.run()
        if not best.fits and not search.fits:
            self.notify("choosing the smallest slabs", None)
            for program in self.candidates.in_smallest_slabs:
                outcome = yield Proposal(program, "in the smallest slabs")
                if outcome.fits:
                    return


@dataclass
class _SlabSearch:
    """Explores programs in slabs. The bytes of each correct the estimates of the next.

    After one that misses the limit, or fits by a slow plan only, the next takes fewer bytes. After
    one that leaves bytes free, the next takes more, if that promises to be faster.
    """

    candidates: Candidates
    notify: Notify
    slowdown: float  # no candidate is expected to take more than this many times as long
    tried: list[SlabCandidate] = field(default_factory=list)
    ranked: list[SlabCandidate] = field(default_factory=list)  # those of the last choice
    # the best that fits, not by a slow plan, and its outcome
    fitting: SlabCandidate | None = None
    in_hand: Explored | None = None
    fits = False  # does any candidate fit, if by a slow plan only?
    # the choice after each candidate that was tried; None: nothing more is explored
    choices: list[SlabCandidate | None] = field(default_factory=list)

    def run(self) -> Proposals[None]:
        choice = self._choice("choosing slabs", None)
        while choice is not None:
            self.tried.append(choice)
            outcome = yield Proposal(choice.write(), "in slabs", self._is_last)
            self.fits |= outcome.fits
            choice = self._following(outcome)

    def _is_last(self, outcome: Explored) -> bool:
        """Is nothing else explored after this outcome, and is it the best?"""
        is_best = self._is_best(outcome)
        return is_best and not needs_better(outcome) and self._following(outcome) is None

    def _is_best(self, outcome: Explored) -> bool:
        return self.in_hand is None or _is_better_than(self.in_hand)(outcome)

    def _following(self, outcome: Explored) -> SlabCandidate | None:
        """What is explored after the outcome of the last candidate."""
        if len(self.choices) < len(self.tried):
            self.choices.append(self._corrected(outcome))
        return self.choices[-1]

    def _corrected(self, outcome: Explored) -> SlabCandidate | None:
        """The choice by an estimate that the outcome of the last candidate corrects."""
        if len(self.tried) == _MOST_SLAB_PROGRAMS:
            return None
        last = self.tried[-1]
        limit = outcome.limits.device_bytes
        if needs_better(outcome):
            size = outcome.planned.plain if outcome.fits else outcome
            estimate = last.expected_bytes / size.device_bytes
            smallest = min(slabs.expected_bytes for slabs in self.ranked)
            is_costly = len(outcome.planned.plain.problem.kernels) > _SLAB_KERNELS
            if is_costly and smallest > _SLAB_DOUBT * estimate * limit:
                return None
            return self._choice("choosing smaller slabs", estimate)
        if self._is_best(outcome):
            self.fitting, self.in_hand = last, outcome
        if outcome.device_bytes >= limit - limit // _FREE_PARTS:
            return None
        estimate = last.expected_bytes / outcome.device_bytes
        return self._choice("choosing slabs for the bytes that are left", estimate)

    def _choice(self, stage: str, estimate: float | None) -> SlabCandidate | None:
        """The best candidate that was not tried, and promises to be faster than what fits."""
        self.notify(stage, None)
        self.ranked = list(self.candidates.in_slabs(self.slowdown, estimate))
        tried = {slabs.slabs for slabs in self.tried}
        choice = next((slabs for slabs in self.ranked if slabs.slabs not in tried), None)
        if choice is None or self.fitting is None:
            return choice
        promises = choice.expected_s <= (1 - _LEAST_GAIN) * self.fitting.expected_s
        return choice if promises else None


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
                if self.excess == MORE_THAN_ANY:
                    break
                self.excess = self._next_excess(outcome)
            if not is_new or len(self.tried) >= self.tries:
                if self.excess == MORE_THAN_ANY or best is None or best.fits:
                    break
                self.excess = MORE_THAN_ANY
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
            self.baseline.program, MORE_THAN_ANY, may_use_host=False, may_segment=False
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
        if len(self.tried) >= self.tries or self.excess == MORE_THAN_ANY:
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
    bound_s = outcome.planned.bound_s - outcome.planned.plain.replay.slower_s
    return not outcome.fits or outcome.step_s > _SLOW_RATIO * bound_s


def better(best: Explored, candidate: Explored) -> Explored:
    """The better of two outcomes by `Outcome.rank`, the first if they are equal."""
    return min(best, candidate, key=lambda outcome: outcome.rank)


def _is_better_than(best: Explored) -> Callable[[Explored], bool]:
    return lambda outcome: better(best, outcome) is outcome


def _stalls(outcome: Explored) -> bool:
    """Do copies between host and device stall the step?"""
    replay = outcome.planned.result.replay
    return replay.copy_s - replay.hidden_copy_s >= _STALL_SHARE * outcome.step_s
