"""Are the results of planned steps bit-identical to the plain step's? Small steps on the CPU.

Each step is trained for three steps by `jax.jit`, and planned within 70 and 50 % of its bytes; if
nothing fits a share, within the bytes of the smallest plan. Results must be bit-identical, as a
plan consists of the plain step's own kernels. If a plan's loops stack other residuals, its kernels
differ, and memplan's numbers gate must pass.

Programs with loops, branches and effects (`random_programs.py`) run for two steps, within 65 and 85
%; if no plan is that small, within the smallest plan's bytes and halfway from there to the plain
step. Their effects must be those of the plain step: ordered ones once and in order, others as
often.
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
from experiments.bench.random_programs import Effect, drain_effects, drawn_program
from experiments.bench.random_steps import drawn_step
from experiments.bench.results import Measurement
from experiments.compiled import device_bytes
from memplan.compilation.outcome import Outcome
from memplan.planning.slabs.slabs import Slabs
from memplan.planning.transforms import LoopResiduals
from memplan.results.execute import numbers_gate
from memplan.stages import Planned

STEPS = 3
SHARES = (70, 50)
NESTED_SHARES = (65, 85)
_IN_SLABS = 10  # Allow slabs in every tenth nested program: searching for them takes a minute.
_QUICK = {"xla_backend_optimization_level": 0}  # Speeds up LLVM; XLA's own passes stay the same.
_ERROR_LENGTH = 300  # Characters of an error message to keep.
_NEAR = 0.02  # Allowed error of an effect's number, relative to 1 or more: four bfloat16 roundings.
_BOTH = 5  # Plan every fifth random step within both shares: a plan takes ten seconds.


@dataclass(frozen=True)
class Numbers:
    """A step planned within a share of its plain bytes."""

    asked: int  # the requested share, in percent
    percent: int  # the share that it was planned for
    plain_bytes: int
    compiled_bytes: int  # of the planned step, by the compiler
    again: int  # recomputed kernels
    steps: int
    outputs: int  # arrays of state and metrics, compared after every step
    unequal: tuple[str, ...]  # arrays that differ in any bit, over all steps
    seconds: float
    gated: bool = False  # it has other kernels (loops, slabs), and the numbers gate passed
    effects: int = 0  # number of repeatable effects, over all steps
    other_effects: str = ""  # how the effects differ from the plain step's


@dataclass(frozen=True)
class Training:
    """A step, its first arguments as arrays, and the positions of the donated ones."""

    step: Callable[..., Any]
    args: Sequence[Any]
    donated: tuple[int, ...] = (0,)
    steps: int = STEPS
    split: str | bool = False
    flags: dict[str, Any] | None = None  # `compiler_options`

    def plain(self) -> Any:
        """Compiled by `jax.jit`."""
        return jax.jit(self.step, donate_argnums=self.donated).lower(*self.args).compile(self.flags)

    def fitting(self, nbytes: int, share: int) -> tuple[int, Planned]:
        """The requested share, or that of the smallest plan, in percent; and the plan."""
        try:
            return share, self._planned(nbytes * share // 100)
        except memplan.InfeasibleBudgetError as error:
            percent = math.ceil(100 * error.smallest_bytes / nbytes)
        return percent, self._planned(nbytes * percent // 100)

    def _planned(self, budget: int) -> Planned:
        options = {"split": self.split, "compiler_options": self.flags}
        return memplan.jit(self.step, budget=budget, donate_argnums=self.donated, **options).plan(
            *self.args
        )

    def passes_gate(self, planned: Planned) -> bool:
        """Whether its error is within that of recompilation alone."""
        assert isinstance(planned._outcome, Outcome)
        return numbers_gate(planned._outcome, self.args, {}).passes

    def run(self, step: Callable[..., Any]) -> list[dict[str, bytes]]:
        """The bits of all results of each step, by name."""
        args, outputs = jax.tree.map(jnp.copy, list(self.args)), []
        for _ in range(self.steps):
            results = step(*args)
            leaves = jax.tree_util.tree_leaves_with_path(results)
            outputs.append({jax.tree_util.keystr(path): bits(leaf) for path, leaf in leaves})
            # The first results of a step replace its donated arguments.
            old, form = jax.tree.flatten([args[number] for number in self.donated])
            new = jax.tree.unflatten(form, [leaf for _, leaf in leaves[: len(old)]])
            replaced = dict(zip(self.donated, new, strict=True))
            args = [replaced.get(number, arg) for number, arg in enumerate(args)]
        return outputs


def bits(leaf: Any) -> bytes:
    """The bits of an array or a key."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes()


def compared(training: Training, shares: Iterable[int] = SHARES) -> Iterator[Numbers]:
    """Train, plan and compare for each share."""
    plain = training.plain()
    nbytes = device_bytes(plain)
    drain_effects()
    expected, written = training.run(plain), drain_effects()
    before, smallest = 100, 0
    for share in shares:
        # After a share that was too small, plan halfway from the smallest plan to plain.
        target = (smallest + 100) // 2 if before < share <= smallest else share
        numbers = _numbers(training, nbytes, target, expected, written)
        before, smallest = share, numbers.percent if numbers.percent > target else 0
        yield numbers


def _numbers(
    training: Training,
    plain_bytes: int,
    share: int,
    expected: list[dict[str, bytes]],
    written: Sequence[Effect],
) -> Numbers:
    """Plan within a share, and compare with the plain step's results and effects."""
    started = time.perf_counter()
    percent, planned = training.fitting(plain_bytes, share)
    unequal = tuple(differing(training.run(planned.compile()), expected))
    effects = drain_effects()
    gated = has_other_kernels(planned) and (not unequal or training.passes_gate(planned))
    drain_effects()
    report = planned.report
    assert report.compiled_peak_bytes is not None
    return Numbers(
        asked=share,
        percent=percent,
        plain_bytes=plain_bytes,
        compiled_bytes=report.compiled_peak_bytes,
        again=report.recomputations_found or 0,
        steps=training.steps,
        outputs=len(expected[0]),
        unequal=unequal,
        seconds=time.perf_counter() - started,
        gated=gated,
        effects=len(repeatable(written)),
        other_effects=effect_difference(effects, written, gated),
    )


def has_other_kernels(planned: Planned) -> bool:
    """Whether a plan changes the kernels of the step: its loops stack other residuals, or slabs."""
    transforms = planned.plan.transforms if planned.plan else ()
    return any(isinstance(transform, LoopResiduals | Slabs) for transform in transforms)


def differing(
    outputs: Iterable[dict[str, bytes]], expected: Iterable[dict[str, bytes]]
) -> Iterator[str]:
    """The results that differ in any bit, step by step."""
    for number, (ours, theirs) in enumerate(zip(outputs, expected, strict=True), 1):
        yield from (f"step {number}: {path}" for path in theirs if theirs[path] != ours[path])


def repeatable(effects: Iterable[Effect]) -> list[Effect]:
    """The effects whose number is determined: all but those of pure callbacks."""
    return [effect for effect in effects if effect.kind != "pure"]


def effect_difference(
    effects_of_plan: Sequence[Effect], expected: Sequence[Effect], gated: bool
) -> str:
    """How effects differ from the plain step's, else "". Gated plans may round differently."""
    for kind in ("ordered", "unordered"):
        ours, theirs = (
            [effect for effect in effects if effect.kind == kind]
            for effects in (effects_of_plan, expected)
        )
        if kind == "unordered":
            ours, theirs = (
                sorted(effects, key=lambda effect: (effect.tag, effect.value))
                for effects in (ours, theirs)
            )
        if [effect.tag for effect in ours] != [effect.tag for effect in theirs]:
            more, fewer = (
                dict(Counter(effect.tag for effect in a) - Counter(effect.tag for effect in b))
                for a, b in ((ours, theirs), (theirs, ours))
            )
            return (
                f"{kind}: more {more}, fewer {fewer}"
                if more or fewer
                else f"{kind}: in another order"
            )
        near = _NEAR if gated else 0
        for a, b in zip(ours, theirs, strict=True):
            if not abs(a.value - b.value) <= near * max(1, abs(b.value)):
                return f"{kind}: {b.tag} wrote {a.value!r} instead of {b.value!r}"
    return ""


def measure(case: Case) -> Measurement:
    """A row for each share."""
    return Measurement([asdict(numbers) for numbers in compared(Training(*case.built()))])


def measure_drawn(case: Case) -> Measurement:
    """One row for the plans of many random steps; names what differs."""
    if case.facts.get("nested"):
        return measure_drawn_nested(case)
    plans = [
        (number, plan) for number, plans_of_step in _of_all(_drawn, case) for plan in plans_of_step
    ]
    return Measurement([_sums(plans, case)])


def measure_drawn_nested(case: Case) -> Measurement:
    """The same for programs with loops, branches and effects; includes errors."""
    outcomes = _of_all(_drawn_nested, case)
    plans = [(number, plan) for number, plans_of_step, _ in outcomes for plan in plans_of_step]
    row = _sums(plans, case) | {
        "infeasible": sum(plan.percent > plan.asked for _, plan in plans),
        "gated": sum(plan.gated for _, plan in plans),
        "bits_of_gated": sum(plan.gated and not plan.unequal for _, plan in plans),
        "effects": sum(plan.effects for _, plan in plans),
        "other_effects": {
            _named(number, plan): plan.other_effects for number, plan in plans if plan.other_effects
        },
        "wrong": {str(number): error for number, _, error in outcomes if error},
    }  # fmt: skip
    return Measurement([row])


def _of_all[T](measured: Callable[[int], T], case: Case) -> list[T]:
    with get_context("spawn").Pool(maxtasksperchild=50) as pool:
        return list(pool.imap(measured, range(case.facts["count"])))


def _sums(plans: Sequence[tuple[int, Numbers]], case: Case) -> dict[str, Any]:
    return {
        "steps": case.facts["count"], "plans": len(plans),
        "with_kernels_again": sum(plan.again > 0 for _, plan in plans),
        "kernels_again": sum(plan.again for _, plan in plans),
        "arrays": sum(plan.outputs * plan.steps for _, plan in plans),
        "unequal": {
            _named(number, plan): plan.unequal
            for number, plan in plans
            if plan.unequal and not plan.gated
        },
    }  # fmt: skip


def _named(number: int, plan: Numbers) -> str:
    return f"{number} at {plan.percent} %"


def _drawn(number: int) -> tuple[int, list[Numbers]]:
    jax.clear_caches()
    shares = SHARES if number % _BOTH == 0 else SHARES[:1]
    return number, list(compared(Training(*drawn_step(number)), shares))


def _drawn_nested(number: int) -> tuple[int, list[Numbers], str]:
    """The plans of a random nested program, up to the first error."""
    jax.clear_caches()
    plans: list[Numbers] = []
    try:
        split = "auto" if number % _IN_SLABS == 0 else False
        training = Training(*drawn_program(number), steps=2, split=split, flags=_QUICK)
        plans.extend(compared(training, NESTED_SHARES))
    except Exception as error:
        return number, plans, f"{type(error).__name__}: {error}"[:_ERROR_LENGTH]
    return number, plans, ""
