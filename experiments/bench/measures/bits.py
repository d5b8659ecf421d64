"""Does a planned step compute what the plain one computes, to the last bit? On the CPU, for whoever has small steps.

Each is trained for three steps by `jax.jit`, and planned within 70 and within 50 % of the bytes that this takes; where
nothing fits such a share, within that of the smallest plan that was found. What a step returns has to be equal to the
bit: a plan is made of the plain step's own kernels. Where its loops stack other residuals the kernels are others, and
memplan's numbers gate has to pass.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import memplan
from experiments.bench.cases import Case
from experiments.bench.random_steps import drawn_step
from experiments.bench.results import Found
from experiments.compiled import device_bytes
from memplan.api import Planned

STEPS = 3
SHARES = (70, 50)
_BOTH = 5  # every fifth step that is drawn is planned within half of its bytes, too: it takes ten seconds


@dataclass(frozen=True)
class Numbers:
    """A step within a share of its plain bytes."""

    asked: int  # the share
    percent: int  # the share that it was planned for
    plain_bytes: int
    compiled_bytes: int  # of the planned step, by the compiler
    again: int  # kernels that run again in it
    steps: int
    outputs: int  # arrays of state and metrics that were compared after every step
    unequal: tuple[str, ...]  # those that differ in any bit, of all steps
    seconds: float
    gated: bool = False  # its loops stack other residuals, and the numbers gate passed


@dataclass(frozen=True)
class Training:
    """A step, its first arguments as arrays, and the positions of those that it replaces, which are donated."""

    step: Callable[..., Any]
    args: Sequence[Any]
    donated: tuple[int, ...] = (0,)

    def plain(self) -> Any:
        """Compiled by `jax.jit`."""
        return jax.jit(self.step, donate_argnums=self.donated).lower(*self.args).compile()

    def fitting(self, nbytes: int, asked: int) -> tuple[int, Planned]:
        """The share that was asked for, or that of the smallest plan found, in whole percents; and the plan."""
        try:
            return asked, self._planned(nbytes * asked // 100)
        except memplan.InfeasibleBudgetError as error:
            percent = math.ceil(100 * error.smallest_bytes / nbytes)
        return percent, self._planned(nbytes * percent // 100)

    def passes_gate(self, budget: int) -> bool:
        """Do its numbers agree within what recompilation alone causes?"""
        try:
            self._planned(budget, verify="numbers")
        except memplan.WrongProgramError:
            return False
        return True

    def _planned(self, budget: int, verify: str = "compile") -> Planned:
        step = memplan.jit(self.step, budget=budget, donate_argnums=self.donated, verify=verify, split=False)
        return step.plan(*self.args)

    def run(self, step: Callable[..., Any]) -> list[dict[str, bytes]]:
        """The bits of everything that each of three steps returns, by name."""
        args, found = jax.tree.map(jnp.copy, list(self.args)), []
        for _ in range(STEPS):
            results = step(*args)
            leaves = jax.tree_util.tree_leaves_with_path(results)
            found.append({jax.tree_util.keystr(path): bits(leaf) for path, leaf in leaves})
            # A step returns first the arrays that replace its donated arguments.
            old, form = jax.tree.flatten([args[number] for number in self.donated])
            new = jax.tree.unflatten(form, [leaf for _, leaf in leaves[: len(old)]])
            replaced = dict(zip(self.donated, new, strict=True))
            args = [replaced.get(number, arg) for number, arg in enumerate(args)]
        return found


def bits(leaf: Any) -> bytes:
    """Of an array, or of a key."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes()


def compared(training: Training, shares: Iterable[int] = SHARES) -> Iterator[Numbers]:
    """One for each share."""
    plain = training.plain()
    nbytes = device_bytes(plain)
    expected = training.run(plain)
    for asked in shares:
        started = time.perf_counter()
        percent, planned = training.fitting(nbytes, asked)
        unequal = tuple(differing(training.run(planned.compile()), expected))
        other_loops = planned.plan is not None and bool(planned.plan.loops)
        gated = other_loops and training.passes_gate(nbytes * percent // 100)
        report, seconds = planned.report, time.perf_counter() - started
        assert report.compiled_peak_bytes is not None
        found = report.compiled_peak_bytes, report.recomputations_found or 0, STEPS, len(expected[0]), unequal
        yield Numbers(asked, percent, nbytes, *found, seconds, gated)


def differing(found: Iterable[dict[str, bytes]], expected: Iterable[dict[str, bytes]]) -> Iterator[str]:
    """What differs in any bit, step by step."""
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True), 1):
        yield from (f"step {number}: {path}" for path in theirs if theirs[path] != ours[path])


def measure(case: Case) -> Found:
    """A row for each share."""
    return Found([asdict(one) for one in compared(Training(*case.built()))])


def measure_drawn(case: Case) -> Found:
    """One row of all plans for so many steps that are drawn; what differs is named."""
    with get_context("spawn").Pool(maxtasksperchild=50) as pool:
        plans = [one for found in pool.imap(_drawn, range(case.facts["count"])) for one in found]
    row = {
        "steps": case.facts["count"], "plans": len(plans), "with_kernels_again": sum(one.again > 0 for _, one in plans),
        "kernels_again": sum(one.again for _, one in plans),
        "arrays": sum(one.outputs * one.steps for _, one in plans),
        "unequal": {f"{number} at {one.percent} %": one.unequal for number, one in plans if one.unequal},
    }  # fmt: skip
    return Found([row])


def _drawn(number: int) -> list[tuple[int, Numbers]]:
    jax.clear_caches()
    shares = SHARES if number % _BOTH == 0 else SHARES[:1]
    return [(number, one) for one in compared(Training(*drawn_step(number)), shares)]
