"""The order in which the programs of a step are compiled, and the choice of an outcome.

memplan compiles one program after another until one fits: the step itself, the step with loops that
read their stacks by index, with as few residuals fewer as needed, and with parts in slabs. A
program that copies is compiled by XLA's latency-hiding scheduler first, then by the serial one,
which uses less memory. Where a compilation exceeds its prediction, the program is compiled again
with a budget that is lower by the excess. A plan that fits but is slow is compared with the other
programs.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from memplan.compilation.compiler import Compiler, Notify, Profile
from memplan.compilation.limits import Headroom
from memplan.compilation.outcome import CompilationSummary, Outcome, SlabAttempt
from memplan.compilation.scheduled import ScheduledModule
from memplan.planning.loops import Residuals
from memplan.planning.plan import Plan
from memplan.program.slabs.choose import SlabCandidate
from memplan.program.trace import Program

# Compile one program by one schedule at most this often. Each time corrects the last prediction.
MOST_TRIES = 3
# A plan above 1.25 times its bound is slow, and compared with fewer residuals and with slabs.
_SLOW_RATIO = 1.25
# If a step uses less than this share of the budget, its loops may keep more residuals.
_FULL_SHARE = 0.8
# More bytes than any step has: with this excess, loops keep as few residuals as they can.
_EXCEEDS_ALL = 1 << 62
# Raise the excess by at least a hundredth of the budget, so that a near miss or a slow plan does
# not select the same residuals again. A GRU of 1,000 trips missed half its bytes by 1 MiB, less
# than a trip stacks; the same residuals were chosen again, and at last all were on the host: 253
# ms instead of 191. On an A100, a value went to the host and back in each trip: 241 ms instead of
# 39.
_STEP_PARTS = 100
# Compile a program without host copies if copies stall more than this share of a step.
_STALL_SHARE = 0.05
# Compile at most three programs in slabs: the estimate orders them, the compiler decides. For a
# ResNet of 14 layers in a loop the first missed 40 % by 12 %; without a second, copies that no
# kernel hides made a trip 19 times as long.
_MOST_SLAB_PROGRAMS = 3


@dataclass
class _History:
    """All compilations of a step."""

    profiles: int = 0  # compilations that only measure collectives
    # the first compilation's module, if its program was unmodified
    unmodified: ScheduledModule | None = None
    # of all compilations in slabs, the one that exceeds the limits least
    closest_slab_attempt: SlabAttempt | None = None
    # of all compilations but profiles, in order
    summaries: list[CompilationSummary] = field(default_factory=list)

    @property
    def compilations(self) -> int:
        return self.profiles + len(self.summaries)

    def add(self, outcome: Outcome) -> None:
        if not self.summaries:
            self.unmodified = outcome.unmodified
        self.summaries.append(outcome.summary)
        if outcome.program.in_slabs:
            sizes = outcome.device_bytes, outcome.host_bytes
            attempt = SlabAttempt(outcome.program.in_slabs, *sizes, outcome.limits.excess(*sizes))
            closest = self.closest_slab_attempt
            if closest is None or attempt.excess_bytes < closest.excess_bytes:
                self.closest_slab_attempt = attempt


@dataclass(frozen=True)
class Attempts:
    """Compiles the programs of one step until one fits."""

    compiler: Compiler
    # program -> the same with stacks that loops read by index; None if it has no large stacks
    indexed_stacks: Callable[[Program], Program | None]
    # (program, bytes, may use the host) -> the fastest program whose loops keep that many bytes
    # fewer, or else the one whose loops keep the fewest; None if no choice keeps fewer
    fewer_residuals: Callable[[Program, int, bool], Program | None]
    # (program, factor) -> programs in slabs, the fastest first, none estimated to take more than
    # factor times as long
    in_slabs: Callable[[Program, float], Iterator[SlabCandidate]]
    notify: Notify
    follow: Plan | None = None  # a saved plan to follow; no other program is compiled
    tries: int = MOST_TRIES  # most compilations of one program by one schedule
    copies_overlap: bool = True  # the target runs copies and kernels at the same time
    history: _History = field(default_factory=_History)  # what `run` has compiled

    def run(self, program: Program) -> Outcome:
        """The first outcome that fits, a faster one if that is slow, or the smallest if none
        fits.
        """
        best = self._compile_schedules(program)
        if self.follow is None:
            if _needs_better(best) and (indexed := self.indexed_stacks(program)) is not None:
                self.notify("compiling with its stacks read by index", None)
                candidate = self._compile_schedules(indexed)
                best = _better(best, candidate)
                if best is candidate:
                    program = indexed
            if _needs_better(best):
                best = self._with_fewer_residuals(program, best)
            # A value in slabs never exists as a whole, so no pin can hold on it.
            if not best.fits or (_is_slow(best) and not program.pins):
                best = self._with_slabs(program, best)
        rejected = self.history.summaries.copy()
        rejected.remove(best.summary)
        return replace(
            best,
            rejected=tuple(rejected),
            unmodified=self.history.unmodified,
            compilations=self.history.compilations,
            closest_slab_attempt=self.history.closest_slab_attempt,
        )

    def _with_fewer_residuals(self, program: Program, best: Outcome) -> Outcome:
        """The best outcome, also with as few residuals fewer in the program's loops as needed.

        If its residuals' host copies stall the step, it is compared with one without host copies.
        """
        baseline = best
        if best.fits:
            baseline = self.history.unmodified or best.planned.plain
        excess = baseline.device_bytes - best.limits.device_bytes
        for may_use_host in (True, False):
            candidate = self._fit_residuals(program, excess, may_use_host)
            if candidate is None:
                break
            best = _better(best, candidate)
            replay = candidate.planned.result.replay
            if replay.copy_s - replay.hidden_copy_s < _STALL_SHARE * candidate.step_s:
                break
        return best

    def _fit_residuals(self, program: Program, excess: int, may_use_host: bool) -> Outcome | None:
        """The best outcome with fewer residuals; None if no choice keeps fewer.

        The first choice keeps `excess` bytes fewer. Each compilation corrects that figure for the
        next. If none fits, the choice with the fewest residuals is the last.
        """
        tried = set[tuple[Residuals | None, ...]]()
        best: Outcome | None = None
        while (choice := self.fewer_residuals(program, excess, may_use_host)) is not None:
            is_new = choice.residuals not in tried
            if is_new:
                tried.add(choice.residuals)
                self.notify("compiling with fewer residuals in its loops", None)
                candidate = self._compile_schedules(choice)
                best = candidate if best is None else _better(best, candidate)
                limit = candidate.limits.device_bytes
                is_good = not _needs_better(candidate)
                is_full = candidate.device_bytes > _FULL_SHARE * limit
                if excess == _EXCEEDS_ALL or (is_good and is_full):
                    break
                overshoot = candidate.device_bytes - limit
                excess += overshoot if is_good else max(overshoot, limit // _STEP_PARTS)
            if not is_new or len(tried) >= self.tries:
                if excess == _EXCEEDS_ALL or best is None or best.fits:
                    break
                excess = _EXCEEDS_ALL
        return best

    def _with_slabs(self, program: Program, best: Outcome) -> Outcome:
        """The best outcome, also with parts of the program in slabs.

        If a candidate misses the limit by x %, or fits by a slow plan only, the next is the fastest
        whose estimate is x % lower, else the smallest. It goes by the ratio because on a mesh the
        estimate may be the bytes of several devices.
        """
        slowdown = best.step_s / best.planned.bound_s if best.fits else math.inf
        candidates = list(self.in_slabs(program, slowdown))
        estimate_limit = math.inf
        for _ in range(min(_MOST_SLAB_PROGRAMS, len(candidates))):
            self.notify("compiling in slabs", None)
            small_enough = (slabs for slabs in candidates if slabs.expected_bytes <= estimate_limit)
            smallest = min(candidates, key=lambda slabs: slabs.expected_bytes)
            candidate = next(small_enough, smallest)
            candidates.remove(candidate)
            outcome = self._compile_schedules(candidate.write())
            best = _better(best, outcome)
            if not _needs_better(outcome):
                break
            size = outcome.planned.plain if outcome.fits else outcome
            overshoot = size.device_bytes / outcome.limits.device_bytes
            estimate_limit = candidate.expected_bytes / max(1.0, overshoot)
        return best

    def _compile_schedules(self, program: Program) -> Outcome:
        """Compile by the latency-hiding scheduler if the program copies, then by the serial one.

        A program in slabs is compiled by the first alone. A saved plan fits only the schedule that
        it was made for.
        """
        profile = self.compiler.profile(program)
        self.history.profiles += profile is not None
        planned_for = self.follow.hides_latency if self.follow else None
        if planned_for is not None:
            return self._compile_within_limits(program, profile, planned_for)
        copies = copies_by_itself(program)
        best = self._compile_within_limits(program, profile, hides_latency=copies)
        if not best.fits and copies and self.copies_overlap and not program.in_slabs:
            self.notify("compiling again, its copies one after another", None)
            serial = self._compile_within_limits(program, profile, hides_latency=False)
            best = _better(best, serial)
        return best

    def _compile_within_limits(
        self, program: Program, profile: Profile | None, hides_latency: bool
    ) -> Outcome:
        """Compile by one of XLA's schedulers, again with more headroom if a prediction was too low.

        It stops when the outcome fits, is predicted not to fit, or has used all tries.
        """
        self.notify("compiling", None)
        headroom = Headroom()
        outcome = self._compile(program, profile, hides_latency, headroom)
        for _ in range(self.tries - 1):
            if outcome.fits or not outcome.planned.fits or self.follow is not None:
                break
            self.notify("compiling again, within what the first plan missed by", None)
            sizes = outcome.device_bytes, outcome.host_bytes
            headroom = headroom.plus_overshoot(outcome.limits, *sizes)
            outcome = self._compile(program, profile, hides_latency, headroom)
        return outcome

    def _compile(
        self, program: Program, profile: Profile | None, hides_latency: bool, headroom: Headroom
    ) -> Outcome:
        outcome = self.compiler.compile(program, profile, hides_latency, headroom)
        self.history.add(outcome)
        return outcome


def _is_slow(outcome: Outcome) -> bool:
    return outcome.step_s > _SLOW_RATIO * outcome.planned.bound_s


def _needs_better(outcome: Outcome) -> bool:
    """Whether other programs are worth compiling: the outcome does not fit, or is slow."""
    return not outcome.fits or _is_slow(outcome)


def _better(best: Outcome, candidate: Outcome) -> Outcome:
    """The better of two outcomes by `Outcome.rank`, the first if they are equal."""
    return min(best, candidate, key=lambda outcome: outcome.rank)


def copies_by_itself(program: Program) -> bool:
    """Whether the program copies between host and device without a plan."""
    return (
        bool(program.on_host)
        or any(residuals and residuals.uses_host for residuals in program.residuals)
        or any(part.slabs.on_host for part in program.in_slabs)
    )
