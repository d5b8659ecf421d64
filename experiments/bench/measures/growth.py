"""The largest size of a network that grows, in each way to make it fit, and memplan.largest against every size."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import memplan
from experiments.bench.cases import Case, Growth
from experiments.bench.results import Found
from memplan import api, pipeline
from memplan.compilation.outcome import Outcome
from memplan.errors import InfeasibleBudgetError
from memplan.request import Request, target_of
from memplan.results.infeasible import floor_of
from memplan.studies.baselines import Baseline, Baselines
from memplan.studies.largest import last_fitting
from memplan.units import parse_bytes, show_bytes

_OPTIONS = {"donate_argnums": 0}


@dataclass(frozen=True)
class Compiled:
    """One program: bytes by the compiler, seconds by the replay; why it does not fit, "" where it does."""

    device_bytes: int
    host_bytes: int
    step_s: float
    refused: str


def largest_of_a_way(case: Case) -> Found:
    """By compiling sizes, ever larger ones and then between. One row, without a size where none fits."""
    growth: Growth = case.facts["growth"]
    tried: dict[int, list[Compiled]] = {}

    def fits(position: int) -> bool:
        if position not in tried:
            tried[position] = list(compiled(case, growth.sizes[position]))
        return any(not one.refused for one in tried[position])

    last = last_fitting(count_to_try(len(growth.sizes), fits), fits)
    limit = tried[last + 1][-1].refused if last + 1 in tried else ""
    row = {"limit": limit, "compilations": sum(map(len, tried.values()))}
    if last < 0:
        return Found([row])
    one = next(one for one in tried[last] if not one.refused)
    found = {"compiled_bytes": one.device_bytes, "host_bytes": one.host_bytes, "step_s": one.step_s}
    return Found([{"size": growth.sizes[last], **found, **row}])


def count_to_try(count: int, fits: Callable[[int], bool]) -> int:
    """So many of `count` sizes, doubling, that the last one does not fit, or all: large ones compile for hours."""
    few = 1
    while few < count and fits(few - 1):
        few *= 2
    return min(few, count)


def compiled(case: Case, size: int) -> Iterator[Compiled]:
    """The step of this size; of XLA's own rematerialization as it is, and if that does not fit, held to the budget."""
    way, budget = case.facts["way"], parse_bytes(str(case.budget), 0)
    step, args = case.make(size, way == "jax.checkpoint")
    if way == "memplan":
        request = Request(case.budget, case.host_budget, case.device)
        found = pipeline.best(step, args, {}, _OPTIONS, request)
        yield Compiled(found.device_bytes, found.host_bytes, found.step_s, "" if found.fits else _limit(found))
        return
    ways = Baselines(step, args, _OPTIONS, target_of(case.device))
    plain = ways.plain()
    yield _within(plain, budget)
    if way == "xla" and plain.device_bytes > budget:
        yield _within(ways.xla(plain.resident_bytes, budget), budget)


def _limit(found: Outcome) -> str:
    """One kernel whose operands alone are over the budget, or what the least plan takes."""
    floor, kernel = floor_of(found)
    if floor > found.limits.device_bytes:
        return f"floor {show_bytes(floor)}, {kernel}"
    if found.device_bytes > found.limits.device_bytes:
        return f"the next needs {show_bytes(found.device_bytes)}"
    return f"the next needs {show_bytes(found.host_bytes)} of the host"


def _within(found: Baseline, budget: int) -> Compiled:
    refused = "" if found.device_bytes <= budget else f"the next needs {show_bytes(found.device_bytes)}"
    return Compiled(found.device_bytes, found.host_bytes, found.step_s, refused)


def against_every_size(case: Case) -> Found:
    """`memplan.largest`, then every size of its range planned by itself; the planner puts nothing on the host."""
    sizes: range = case.facts["sizes"]
    limits = {"budget": case.budget, "host_budget": 0, "device": case.device}
    start = time.perf_counter()
    found = api.frontier(case.make, low=sizes.start, high=sizes[-1], step=sizes.step, **limits)
    between = time.perf_counter()
    fitting = []
    for size in sizes:
        step, args = case.make(size)
        with suppress(InfeasibleBudgetError):
            memplan.jit(step, **limits, donate_argnums=0).plan(*args)
            fitting.append(size)
    return Found([{
        "low": sizes.start, "high": sizes[-1], "largest": found.largest, "of_every_size": max(fitting, default=None),
        "traced": len(found.tried), "compilations": found.compilations,
        "seconds": between - start, "every_size_s": time.perf_counter() - between,
    }])  # fmt: skip
