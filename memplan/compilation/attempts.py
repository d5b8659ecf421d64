"""The order in which programs are compiled, and when to stop: what fits, or else what takes the least.

A program is compiled as it copies fastest, then as it holds least; after a prediction that missed, again within what it
missed by; then with loops that stack less, then in slabs. Knows of a compiler nothing but what comes of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from memplan.compilation.compiler import Notify, Profile
from memplan.compilation.limits import Reserve
from memplan.compilation.outcome import Outcome
from memplan.planning.plan import Plan
from memplan.program.trace import Program

MOST_TRIES = 3  # a prediction that misses is corrected by what it missed by
_SLOW = 1.25  # times what the step takes as it is: a plan that costs more is compared with slabs
_MOST_SLABS = 3  # programs in slabs: the estimate orders them, the compiler decides


class Compiles(Protocol):
    """Whoever compiles a program once; see `compiler.Compiler`."""

    def profile(self, program: Program) -> Profile | None: ...

    def compile(self, program: Program, profile: Profile | None, hides_latency: bool, reserve: Reserve) -> Outcome: ...


@dataclass(frozen=True)
class Attempts:
    """Compilations of one step.

    Attributes:
      stack_less: (program, bytes that it takes too many) -> programs whose loops stack less, the likeliest first.
      in_slabs: (program, seconds) -> programs that run in slabs what is large in it and are expected to take no longer,
        the likeliest first.
      follow: a plan to carry out; nothing is tried beside it.
      tries: compilations with a plan in the middle, at most.
      copies_overlap: the target copies beside its kernels.
    """

    compiler: Compiles
    stack_less: Callable[[Program, int], Iterator[Program]]
    in_slabs: Callable[[Program, float], Iterator[Program]]
    notify: Notify
    follow: Plan | None = None
    tries: int = MOST_TRIES
    copies_overlap: bool = True

    def run(self, program: Program) -> Outcome:
        """The program, or where it does not fit, it with loops that stack less, or in slabs, unless a plan says so."""
        found = self._program(program)
        if self.follow is not None:
            return found
        if not found.fits:
            fewer = self.stack_less(program, found.device_bytes - found.limits.device_bytes)
            found = self._first_that_fits(found, fewer, "compiling with fewer residuals in its loops")
        if not found.fits:
            slabs = itertools.islice(self.in_slabs(program, math.inf), _MOST_SLABS)
            return self._first_that_fits(found, slabs, "compiling in slabs")
        return self._faster(program, found)

    def _faster(self, program: Program, found: Outcome) -> Outcome:
        """In slabs, where the plan takes much longer than the bound and slabs are expected to be faster than it."""
        if found.step_s <= _SLOW * found.planned.bound_s:
            return found
        for other in itertools.islice(self.in_slabs(program, found.step_s), 1):
            self.notify("compiling in slabs", None)
            return found.faster(self._program(other))
        return found

    def _first_that_fits(self, found: Outcome, programs: Iterator[Program], stage: str) -> Outcome:
        for other in programs:
            self.notify(stage, None)
            found = found.better(self._program(other))
            if found.fits:
                break
        return found

    def _program(self, program: Program) -> Outcome:
        """As it copies fastest; where it does not fit so, as it holds least (what is in slabs does either way)."""
        profile = self.compiler.profile(program)
        # Each of the two schedules is a module of its own: a plan fits only the one that it was made for.
        known = self.follow.hides_latency if self.follow else None
        copies = copies_by_itself(program)
        found = self._schedule(program, profile, hides_latency=copies if known is None else known)
        if known is None and not found.fits and copies and self.copies_overlap and not program.in_slabs:
            self.notify("compiling again, its copies one after another", None)
            found = found.better(self._schedule(program, profile, hides_latency=False))
        return found if profile is None else replace(found, compilations=found.compilations + 1)

    def _schedule(self, program: Program, profile: Profile | None, hides_latency: bool) -> Outcome:
        """By one of XLA's schedulers; again where the prediction missed."""
        self.notify("compiling", None)
        reserve = Reserve()
        found = self.compiler.compile(program, profile, hides_latency, reserve)
        for compilations in range(2, self.tries + 1):
            if found.fits or not found.planned.fits or self.follow is not None:
                break
            self.notify("compiling again, within what the first plan missed by", None)
            reserve = reserve.grown(found.limits, found.device_bytes, found.host_bytes)
            found = self.compiler.compile(program, profile, hides_latency, reserve)
            found = replace(found, compilations=compilations)
        return found


def copies_by_itself(program: Program) -> bool:
    """Does it copy between host and device without a plan?"""
    return (
        bool(program.on_host)
        or any(known and known.on_host for known in program.residuals)
        or any(one.slabs.on_host for one in program.in_slabs)
    )
