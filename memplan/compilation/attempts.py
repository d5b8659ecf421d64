"""Which programs are compiled for a step, in which order, and which of them is taken.

One after another until one fits: the program itself; its loops with stacks read by index; with as few residuals as
needed; parts of it in slabs. Each is compiled by XLA's latency-hiding schedule where it copies, then by the serial one,
which holds less, and again with the budget lowered by what a prediction missed. A plan that fits but is slow is
compared with the others.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from memplan.compilation.compiler import Compiler, Notify, Profile
from memplan.compilation.limits import Headroom
from memplan.compilation.outcome import Compiled, Outcome, SlabAttempt
from memplan.compilation.scheduled import ScheduledModule
from memplan.planning.loops import Residuals
from memplan.planning.plan import Plan
from memplan.program.slabs.choose import SlabCandidate
from memplan.program.trace import Program

MOST_TRIES = 3  # compilations of one program by one schedule, each corrected by what the last prediction missed
_SLOW = 1.25  # times the bound: a plan that takes longer is compared with fewer residuals in its loops, and with slabs
_USED = 0.8  # of the budget: where a program leaves more than a fifth, its loops may keep more
_ALL = 1 << 62  # bytes
# Of the budget: a hundredth at least is asked for where something is missing, or kernels make up for it slowly. A GRU
# of 1,000 trips missed half its bytes by 1 MiB, less than a trip stacks; the same was chosen again, and at last all was
# on the host: 253 ms for 191. On an A100, a value went to the host and back in each trip: 241 ms for 39.
_STEP = 100
_WAITS = 0.05  # of a step, for copies: less is no reason to compile a program without them
# Programs in slabs that are compiled: the estimate orders them, the compiler decides. For a ResNet of 14 layers in
# a loop the first missed 40 % by 12 %; without a second, copies that nothing hides made a trip 19 times as long.
_MOST_SLABS = 3


@dataclass
class _History:
    """Facts from all compilations of a step."""

    profiles: int = 0  # compilations for the seconds of collectives alone
    unmodified: ScheduledModule | None = None  # the first module, if it was the unmodified step's
    closest_slab_attempt: SlabAttempt | None = None  # of those in slabs, the one that came closest to the limits
    compiled: list[Compiled] = field(default_factory=list)  # by all others

    @property
    def compilations(self) -> int:
        return self.profiles + len(self.compiled)

    def add(self, found: Outcome) -> None:
        if not self.compiled:
            self.unmodified = found.unmodified
        self.compiled.append(found.summary)
        if found.program.in_slabs:
            excess = found.limits.excess(found.device_bytes, found.host_bytes)
            one = SlabAttempt(found.program.in_slabs, found.device_bytes, found.host_bytes, excess)
            known = (self.closest_slab_attempt, one)
            self.closest_slab_attempt = min(filter(None, known), key=lambda attempt: attempt.excess_bytes)


@dataclass(frozen=True)
class Attempts:
    """Compilations of one step."""

    compiler: Compiler
    # the program whose loops read their stacks by index; None if none has large ones
    indexed_stacks: Callable[[Program], Program | None]
    # (program, bytes, may use the host) -> the fastest program whose loops keep that many bytes fewer, or else the one
    # whose loops keep the fewest; None if no choice keeps fewer
    fewer_residuals: Callable[[Program, int, bool], Program | None]
    # (program, factor) -> programs in slabs, the fastest first, none estimated to take more than factor times as long
    in_slabs: Callable[[Program, float], Iterator[SlabCandidate]]
    notify: Notify
    follow: Plan | None = None  # a plan to carry out; nothing is tried beside it
    tries: int = MOST_TRIES  # compilations of one program by one schedule, at most
    copies_overlap: bool = True  # the target copies beside its kernels
    history: _History = field(default_factory=_History)  # of what `run` has compiled

    def run(self, program: Program) -> Outcome:
        """The first that fits, in slabs if they are faster than a slow plan; else the one with the fewest bytes."""
        found = self._program(program)
        if self.follow is None:
            if (not found.fits or _is_slow(found)) and (other := self.indexed_stacks(program)) is not None:
                self.notify("compiling with its stacks read by index", None)
                made = self._program(other)
                if (found := _better(found, made)) is made:
                    program = other
            if not found.fits or _is_slow(found):
                found = self._with_fewer_residuals(program, found)
            if not found.fits or (_is_slow(found) and not program.pins):  # what is in slabs is nowhere whole
                found = self._with_slabs(program, found)
        others = self.history.compiled.copy()
        others.remove(found.summary)
        return replace(
            found,
            others=tuple(others),
            unmodified=self.history.unmodified,
            compilations=self.history.compilations,
            closest_slab_attempt=self.history.closest_slab_attempt,
        )

    def _with_fewer_residuals(self, program: Program, found: Outcome) -> Outcome:
        """With as few residuals in its loops as needed; where it waits for those on the host, compared without."""
        missing = (self.history.unmodified or found.planned.plain).device_bytes if found.fits else found.device_bytes
        missing -= found.limits.device_bytes
        for moves in (True, False):
            made = self._as_few_as_needed(program, missing, moves)
            if made is None:
                break
            found = _better(found, made)
            waits_s = made.planned.result.replay.copy_s - made.planned.result.replay.hidden_copy_s
            if waits_s < _WAITS * made.step_s:
                break
        return found

    def _as_few_as_needed(self, program: Program, missing: int, moves: bool) -> Outcome | None:
        """Residuals that are `missing` bytes fewer, corrected by what the compiler takes; if none fits, the fewest.

        None if there are no others.
        """
        known, best = set[tuple[Residuals | None, ...]](), None
        while (other := self.fewer_residuals(program, missing, moves)) is not None:
            is_new = other.residuals not in known
            if is_new:
                known.add(other.residuals)
                self.notify("compiling with fewer residuals in its loops", None)
                made = self._program(other)
                best = made if best is None else _better(best, made)
                is_good = made.fits and not _is_slow(made)
                if missing == _ALL or (is_good and made.device_bytes > _USED * made.limits.device_bytes):
                    break
                beyond = made.device_bytes - made.limits.device_bytes
                missing += beyond if is_good else max(beyond, made.limits.device_bytes // _STEP)
            if not is_new or len(known) >= self.tries:
                if missing == _ALL or best is None or best.fits:
                    break
                missing = _ALL
        return best

    def _with_slabs(self, program: Program, found: Outcome) -> Outcome:
        """The fastest of some in slabs, if it is faster than what was found or that does not fit.

        After one that misses, or that only a slow plan makes fit, the first that are expected to take less by as much,
        else the smallest. By its share: over a mesh, the bytes that are expected may be those of several devices.
        """
        slower = found.step_s / found.planned.bound_s if found.fits else math.inf
        left, most = list(self.in_slabs(program, slower)), math.inf
        for _ in range(min(_MOST_SLABS, len(left))):
            self.notify("compiling in slabs", None)
            fewer = (one for one in left if one.expected_bytes <= most)
            other = next(fewer, None) or min(left, key=lambda one: one.expected_bytes)
            left.remove(other)
            made = self._program(other.write())
            found = _better(found, made)
            if made.fits and not _is_slow(made):
                break
            taken = made.planned.plain.device_bytes if made.fits else made.device_bytes
            most = other.expected_bytes / max(1.0, taken / made.limits.device_bytes)
        return found

    def _program(self, program: Program) -> Outcome:
        """By the latency-hiding schedule if the program copies, then by the serial one; in slabs by the first alone."""
        profile = self.compiler.profile(program)
        self.history.profiles += profile is not None
        # Each of the two schedules is a module of its own: a plan fits only the one that it was made for.
        known = self.follow.hides_latency if self.follow else None
        copies = copies_by_itself(program)
        found = self._schedule(program, profile, hides_latency=copies if known is None else known)
        if known is None and not found.fits and copies and self.copies_overlap and not program.in_slabs:
            self.notify("compiling again, its copies one after another", None)
            found = min(found, self._schedule(program, profile, hides_latency=False), key=_smallest)
        return found

    def _schedule(self, program: Program, profile: Profile | None, hides_latency: bool) -> Outcome:
        """By one of XLA's schedules; again where a prediction missed, until it fits or is predicted not to."""
        self.notify("compiling", None)
        headroom = Headroom()
        found = self._compile(program, profile, hides_latency, headroom)
        for _ in range(self.tries - 1):
            if found.fits or not found.planned.fits or self.follow is not None:
                break
            self.notify("compiling again, within what the first plan missed by", None)
            headroom = headroom.plus_overshoot(found.limits, found.device_bytes, found.host_bytes)
            found = self._compile(program, profile, hides_latency, headroom)
        return found

    def _compile(self, program: Program, profile: Profile | None, hides_latency: bool, headroom: Headroom) -> Outcome:
        found = self.compiler.compile(program, profile, hides_latency, headroom)
        self.history.add(found)
        return found


def _is_slow(found: Outcome) -> bool:
    return found.step_s > _SLOW * found.planned.bound_s


def _better(found: Outcome, made: Outcome) -> Outcome:
    """The faster one that fits; if none does, the one with fewer bytes."""
    return min(found, made, key=_fastest if found.fits or made.fits else _smallest)


def _fastest(found: Outcome) -> tuple[bool, float]:
    """Outcomes that fit come first, then those that take less time."""
    return not found.fits, found.step_s


def _smallest(found: Outcome) -> tuple[bool, int]:
    """Outcomes that fit come first, then those with fewer bytes."""
    return not found.fits, found.device_bytes


def copies_by_itself(program: Program) -> bool:
    """Does it copy between host and device without a plan?"""
    return (
        bool(program.on_host)
        or any(known and known.moves for known in program.residuals)
        or any(one.slabs.on_host for one in program.in_slabs)
    )
