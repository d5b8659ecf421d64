"""One step under one budget, planned and compiled for a described GPU: `python -m experiments.budgets.measure CASE`.

Prints the row as JSON. A process of its own measures one case: what XLA or memplan keep from an earlier compilation
makes nothing cheaper. The plain compilation has XLA's file of compiled kernels switched off. The planned one begins
with that file empty, as `memplan.jit` does; the second compilation of a step, where one is needed, finds in it what the
first one made. Plans that were kept on disk are not looked for.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp

from experiments.budgets.cases import CASES
from experiments.budgets.rows import SOURCES, Row, environment, version_here
from memplan import pipeline
from memplan.outcome.infeasible import floor_of, infeasible
from memplan.pipeline import Outcome, Request
from memplan.planning.schedule import Kind
from memplan.units import parse_bytes
from memplan.xla.target import Executable, Target

_NO_KERNEL_FILE = {"xla_gpu_kernel_cache_file": ""}


def measure(
    name: str,
    step: Callable[..., Any],
    args: Sequence[Any],
    device: str,
    budget: int | str,
    donated: tuple[int, ...] = (0,),
    sources: tuple[str, ...] = SOURCES,
) -> Row:
    """Compile a step as it is, and planned.

    Args:
      args: arrays or shapes.
      device: a described GPU's name.
      budget: percents of the plain step's bytes, or bytes such as "15GiB".
      donated: positions of arguments.
      sources: see `version_here`.
    """
    target, options = pipeline.target_of(device), {"donate_argnums": donated}
    _warm_up(target)
    clock = Clock()
    plain, plain_spent = compile_plain(target, step, args, options), clock.spent
    nbytes = plain.memory.device_bytes
    limit = nbytes * budget // 100 if isinstance(budget, int) else parse_bytes(budget, 0)
    del plain  # executables are large
    jax.clear_caches()
    clock = Clock()
    found = pipeline.best(step, args, {}, options, Request(limit, device=device))
    return _row(name, version_here(sources), found, nbytes, plain_spent, clock.spent)


@dataclass(frozen=True)
class Spent:
    """Seconds by the clock, and of all threads of the process."""

    clock_s: float
    cpu_s: float


class Clock:
    """Begins to count when it is made."""

    def __init__(self) -> None:
        self._started = time.perf_counter(), time.process_time()

    @property
    def spent(self) -> Spent:
        clock, cpu = self._started
        return Spent(time.perf_counter() - clock, time.process_time() - cpu)


def compile_plain(
    target: Target, step: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> Executable:
    """`jax.jit(step, **options).lower(*args).compile()`, for a GPU that need not be here."""
    return target.compile(step, args, {}, options, _NO_KERNEL_FILE)


def _warm_up(target: Target) -> None:
    """What the first compilation of a process loads should not count."""
    compile_plain(target, lambda x: x + 1, [jax.ShapeDtypeStruct((8,), jnp.float32)], {})


def _row(name: str, version: str, found: Outcome, plain_bytes: int, plain: Spent, ready: Spent) -> Row:
    made = found.planned
    status = "does not fit" if not found.fits else "fits" if found.plan is not None else "untouched"
    floor_bytes, _ = floor_of(found)
    runs = sum(one.kind is Kind.RUN for one in made.schedule)
    return Row(
        name=name,
        device=found.target.device.name,
        version=version,
        status=status,
        budget_bytes=found.limits.device_bytes,
        reason="" if found.fits else str(infeasible(found)),
        plain_bytes=plain_bytes,
        plain_step_s=made.plain.traffic.step_s,
        plain_compile_s=plain.clock_s,
        plain_compile_cpu_s=plain.cpu_s,
        predicted_bytes=made.predicted_bytes,
        compiled_bytes=found.device_bytes,
        host_bytes=found.host_bytes,
        step_s=found.step_s,
        bound_s=made.bound_s,
        floor_bytes=floor_bytes,
        compilations=found.compilations,
        again=runs - len(made.base.problem.kernels) if made.plan is not None else 0,
        offloaded_bytes=int(made.result.traffic.copied_out_nbytes),
        planning_s=made.planning_s,
        ready_s=ready.clock_s,
        ready_cpu_s=ready.cpu_s,
        environment=environment(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    case = CASES[parser.parse_args().case]
    os.environ["MEMPLAN_CACHE"] = "off"
    step, args = case.program.make()
    print(json.dumps(asdict(measure(case.name, step, args, case.device, case.budget)), allow_nan=False))


if __name__ == "__main__":
    main()
