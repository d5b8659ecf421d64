"""Does a planned step compute what the plain one computes, to the last bit? On the CPU, for whoever has small steps.

Each is trained for three steps by `jax.jit`, and planned within 70 and within 50 % of the bytes that this takes; where
nothing fits such a share, within that of the smallest plan that was found. What a step returns has to be equal to the
bit: a plan is made of the plain step's own kernels. Where its loops stack other residuals the kernels are others, and
memplan's numbers gate has to pass.

Programs with loops, branches and effects (`random_programs.py`) are asked for two steps, within 65 and 85 %; where no
plan is as small, within the smallest and halfway from there to the plain step. Their effects have to be those of the
plain step: the ordered ones once and in its order, the others as often.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import memplan
from experiments.bench.cases import Case
from experiments.bench.random_programs import Effect, drawn_program, taken
from experiments.bench.random_steps import drawn_step
from experiments.bench.results import Found
from experiments.compiled import device_bytes
from memplan.compilation.outcome import Outcome
from memplan.results.execute import numbers_gate
from memplan.stages import Planned

STEPS = 3
SHARES = (70, 50)
NESTED_SHARES = (65, 85)
_IN_SLABS = 10  # every tenth program with loops and branches may run in slabs: to look for them takes a minute
_QUICK = {"xla_backend_optimization_level": 0}  # LLVM's, of those programs: XLA's own passes are the same
_TOLD = 300  # characters of an error
_NEAR = 0.02  # of a number that an effect writes, from 1: four roundings of bfloat16
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
    gated: bool = False  # its loops stack other residuals or run slabs, and the numbers gate passed
    effects: int = 0  # of all steps, of those that have to be as often
    other_effects: str = ""  # where they are not those of the plain step


@dataclass(frozen=True)
class Training:
    """A step, its first arguments as arrays, and the positions of those that it replaces, which are donated."""

    step: Callable[..., Any]
    args: Sequence[Any]
    donated: tuple[int, ...] = (0,)
    steps: int = STEPS
    split: str | bool = False
    flags: dict[str, Any] | None = None  # `compiler_options`

    def plain(self) -> Any:
        """Compiled by `jax.jit`."""
        return jax.jit(self.step, donate_argnums=self.donated).lower(*self.args).compile(self.flags)

    def fitting(self, nbytes: int, asked: int) -> tuple[int, Planned]:
        """The share that was asked for, or that of the smallest plan found, in whole percents; and the plan."""
        try:
            return asked, self._planned(nbytes * asked // 100)
        except memplan.InfeasibleBudgetError as error:
            percent = math.ceil(100 * error.smallest_bytes / nbytes)
        return percent, self._planned(nbytes * percent // 100)

    def _planned(self, budget: int) -> Planned:
        options = {"split": self.split, "compiler_options": self.flags}
        return memplan.jit(self.step, budget=budget, donate_argnums=self.donated, **options).plan(*self.args)

    def passes_gate(self, planned: Planned) -> bool:
        """Do its numbers agree within what recompilation alone causes?"""
        assert isinstance(planned._outcome, Outcome)
        return numbers_gate(planned._outcome, self.args, {}).passes

    def run(self, step: Callable[..., Any]) -> list[dict[str, bytes]]:
        """The bits of everything that each step returns, by name."""
        args, found = jax.tree.map(jnp.copy, list(self.args)), []
        for _ in range(self.steps):
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
    taken()
    expected, written = training.run(plain), taken()
    before, least = 100, 0
    for share in shares:
        started = time.perf_counter()
        # Once a smaller share was too little, the next plan is halfway between the smallest and the plain step.
        asked = (least + 100) // 2 if before < share <= least else share
        percent, planned = training.fitting(nbytes, asked)
        unequal = tuple(differing(training.run(planned.compile()), expected))
        effects = taken()
        other_kernels = planned.plan is not None and bool(planned.plan.loops or planned.plan.slabs)
        gated = other_kernels and (not unequal or training.passes_gate(planned))
        taken()
        before, least = share, percent if percent > asked else 0
        report, seconds = planned.report, time.perf_counter() - started
        assert report.compiled_peak_bytes is not None
        found = report.compiled_peak_bytes, report.recomputations_found or 0, training.steps, len(expected[0]), unequal
        told = len(lasting(written)), other_effects(effects, written, gated)
        yield Numbers(asked, percent, nbytes, *found, seconds, gated, *told)


def differing(found: Iterable[dict[str, bytes]], expected: Iterable[dict[str, bytes]]) -> Iterator[str]:
    """What differs in any bit, step by step."""
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True), 1):
        yield from (f"step {number}: {path}" for path in theirs if theirs[path] != ours[path])


def lasting(effects: Iterable[Effect]) -> list[Effect]:
    """Those that have to be there as often as the program says: without those of pure callbacks."""
    return [one for one in effects if one.kind != "pure"]


def other_effects(found: Sequence[Effect], expected: Sequence[Effect], gated: bool) -> str:
    """Where effects are not those of the plain step; "" where they are. Other kernels write about the same numbers."""
    for kind in ("ordered", "unordered"):
        ours, theirs = ([one for one in effects if one.kind == kind] for effects in (found, expected))
        if kind == "unordered":
            ours, theirs = (sorted(effects, key=lambda one: (one.tag, one.value)) for effects in (ours, theirs))
        if [one.tag for one in ours] != [one.tag for one in theirs]:
            more, fewer = (
                dict(Counter(one.tag for one in a) - Counter(one.tag for one in b))
                for a, b in ((ours, theirs), (theirs, ours))
            )
            return f"{kind}: more {more}, fewer {fewer}" if more or fewer else f"{kind}: in another order"
        near = _NEAR if gated else 0
        for a, b in zip(ours, theirs, strict=True):
            if not abs(a.value - b.value) <= near * max(1, abs(b.value)):
                return f"{kind}: {b.tag} wrote {a.value!r} instead of {b.value!r}"
    return ""


def measure(case: Case) -> Found:
    """A row for each share."""
    return Found([asdict(one) for one in compared(Training(*case.built()))])


def measure_drawn(case: Case) -> Found:
    """One row of all plans for so many steps that are drawn; what differs is named."""
    if case.facts.get("nested"):
        return measure_drawn_nested(case)
    plans = [(number, one) for number, found in _of_all(_drawn, case) for one in found]
    return Found([_sums(plans, case)])


def measure_drawn_nested(case: Case) -> Found:
    """The same of programs with loops, branches and effects; errors of memplan and of the compiler are told, too."""
    told = _of_all(_drawn_nested, case)
    plans = [(number, one) for number, found, _ in told for one in found]
    row = _sums(plans, case) | {
        "infeasible": sum(one.percent > one.asked for _, one in plans),  # and planned for what the error says
        "gated": sum(one.gated for _, one in plans),
        "bits_of_gated": sum(one.gated and not one.unequal for _, one in plans),
        "effects": sum(one.effects for _, one in plans),
        "other_effects": {_named(number, one): one.other_effects for number, one in plans if one.other_effects},
        "wrong": {str(number): error for number, _, error in told if error},
    }  # fmt: skip
    return Found([row])


def _of_all[T](measured: Callable[[int], T], case: Case) -> list[T]:
    with get_context("spawn").Pool(maxtasksperchild=50) as pool:
        return list(pool.imap(measured, range(case.facts["count"])))


def _sums(plans: Sequence[tuple[int, Numbers]], case: Case) -> dict[str, Any]:
    return {
        "steps": case.facts["count"], "plans": len(plans), "with_kernels_again": sum(one.again > 0 for _, one in plans),
        "kernels_again": sum(one.again for _, one in plans),
        "arrays": sum(one.outputs * one.steps for _, one in plans),
        "unequal": {_named(number, one): one.unequal for number, one in plans if one.unequal and not one.gated},
    }  # fmt: skip


def _named(number: int, one: Numbers) -> str:
    return f"{number} at {one.percent} %"


def _drawn(number: int) -> tuple[int, list[Numbers]]:
    jax.clear_caches()
    shares = SHARES if number % _BOTH == 0 else SHARES[:1]
    return number, list(compared(Training(*drawn_step(number)), shares))


def _drawn_nested(number: int) -> tuple[int, list[Numbers], str]:
    """Its plans, up to the first error."""
    jax.clear_caches()
    found: list[Numbers] = []
    try:
        split = "auto" if number % _IN_SLABS == 0 else False
        training = Training(*drawn_program(number), steps=2, split=split, flags=_QUICK)
        found.extend(compared(training, NESTED_SHARES))
    except Exception as error:
        return number, found, f"{type(error).__name__}: {error}"[:_TOLD]
    return number, found, ""
