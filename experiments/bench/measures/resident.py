"""The peak resident set of a training process and the seconds of its steps, on this machine.

The step runs plain, or planned within the case's budget. The peak is the kernel's figure for the
whole process, including the interpreter, compilation and data.
"""

import time
from pathlib import Path
from typing import Any

import jax

import memplan
from experiments.bench.cases import Case
from experiments.bench.measures.planned import limit_of
from experiments.bench.results import Measurement
from experiments.compiled import device_bytes

STEPS = 3


def measure(case: Case) -> Measurement:
    """Run three steps whose first argument is the state."""
    step, args, donated = case.built()
    clock = time.perf_counter()
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)
    plain = jax.jit(step, donate_argnums=donated).lower(*shapes).compile()
    row: dict[str, Any] = {
        "plain_bytes": device_bytes(plain),
        "machine_bytes": _kernel_says("meminfo", "MemTotal"),
    }
    run = plain
    if case.budget is not None:
        del plain
        row["budget_bytes"] = limit_of(case, row["plain_bytes"])
        planned = memplan.jit(step, budget=row["budget_bytes"], donate_argnums=donated).plan(
            *shapes
        )
        run, report = planned.compile(), planned.report
        row |= {"compiled_bytes": report.compiled_peak_bytes, "slab_loops": len(report.slab_loops)}
    row |= {"ready_s": time.perf_counter() - clock, "losses": [], "seconds": [], "cpu_seconds": []}
    state, batch = args
    del args
    for _ in range(STEPS):
        clock, cpu = time.perf_counter(), time.process_time()
        state, metrics = run(state, batch)
        row["losses"].append(float(metrics["loss"]))
        row["seconds"].append(time.perf_counter() - clock)
        row["cpu_seconds"].append(time.process_time() - cpu)
    return Measurement([{**row, "peak_rss": _kernel_says("self/status", "VmHWM")}])


def _kernel_says(file: str, name: str) -> int:
    """The bytes of an entry in a file of /proc."""
    lines = (Path("/proc") / file).read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
