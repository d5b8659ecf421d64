"""Seconds of each kernel of a compiled function by HLO instruction, stored next to its module."""

import gzip
import json
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from experiments.gpu.trace import copies, kernels, length, traced
from memplan.io import write_atomic
from memplan.program import compat

Run = Callable[..., Any]

_RUNS = 10  # Runs timed by the host's clock; the median is kept.
FOLDER = "kernels"


def record(name: str, compiled: Any, run: Run, folder: Path) -> dict[str, Any]:
    """Time a function; write `folder/kernels/NAME.json` and the compiled module, `NAME.hlo.gz`.

    The JSON has `seconds`: for each instruction the seconds of its kernels in one run (the median
    of three), their number, and the name of the first; `launches`: the number of all kernels;
    `clock_s`: the duration of a run on the host. The profiler does not report the instruction of
    kernels inside CUDA graphs; they are counted under "".
    """
    jax.block_until_ready(run())
    clock = [_clock_s(run) for _ in range(_RUNS)]
    runs = [kernels(events := traced(run)) for _ in range(3)]
    seconds, names = defaultdict[str, list[float]](list), {}
    for events_of_run in runs:
        spent = defaultdict[str, list[float]](list)
        for event in events_of_run:
            spent[event.op].append(event.span[1] - event.span[0])
            names.setdefault(event.op, event.name)
        for op, spans in spent.items():
            seconds[op].append(sum(spans))
    counts = defaultdict[str, int](int)
    for event in runs[-1]:
        counts[event.op] += 1
    result = {
        "name": name,
        "clock_s": statistics.median(clock),
        "first_clocks_s": clock[:3],
        "busy_s": length([event.span for event in runs[-1]]),
        "launches": len(runs[-1]),
        "host_copies": [
            [event.name, event.nbytes, event.span[1] - event.span[0]]
            for event in copies(events, "")
        ],
        "seconds": {
            op: [statistics.median(each), counts[op], names[op]]
            for op, each in sorted(seconds.items())
        },
    }
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    (folder / FOLDER / f"{stem}.hlo.gz").write_bytes(gzip.compress(compat.module_of(compiled), 9))
    write_atomic(folder / FOLDER / f"{stem}.json", json.dumps(result) + "\n")
    return result


def link(sizes: Sequence[int] = (2**12, 2**16, 2**20, 2**24, 2**28, 2**31)) -> dict[str, Any]:
    """Time copies to the host and back, by size, on the card and on the host; and next to kernels.

    The second shows how much copies and kernels slow each other down.
    """
    device = jax.devices()[0]
    on_device, on_host = (
        jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
        for kind in ("device", "pinned_host")
    )
    results: dict[str, Any] = {"alone": [], "together": []}
    for nbytes in sizes:
        array = jax.device_put(jax.numpy.ones(nbytes, "uint8"), on_device)
        host_array = jax.device_put(array, on_host)
        for direction, source, target in (("D2H", array, on_host), ("H2D", host_array, on_device)):
            run = partial(jax.device_put, source, target)
            jax.block_until_ready(run())
            clock = statistics.median(_clock_s(run) for _ in range(5))
            spans = [event.span for event in copies(traced(run), direction)]
            results["alone"].append([direction, nbytes, length(spans), clock])
    heavy = jax.device_put(jax.numpy.ones(2**31, "uint8"), on_device)
    waiting = jax.device_put(heavy, on_host)
    for name, (compiled, args) in _loads().items():
        jax.block_until_ready(compiled(*args))
        out, back = (heavy, on_host), (waiting, on_device)
        for direction, moves in (
            ("D2H", [out]),
            ("H2D", [back]),
            ("both", [out, back]),
            ("none", []),
        ):
            events = traced(partial(_run_beside, compiled, args, moves))
            moved = [event.span for event in copies(events, "")]
            busy = [event.span for event in kernels(events) if event.op]
            results["together"].append(
                [name, direction, [list(span) for span in moved], [list(span) for span in busy]]
            )
    return results


def _run_beside(compiled: Run, args: Sequence[Any], moves: Sequence[tuple[Any, Any]]) -> Any:
    """Start copies, then kernels; returns what to wait for."""
    return [jax.device_put(source, target) for source, target in moves], compiled(*args)


def _loads() -> dict[str, Any]:
    """Memory-bound and compute-bound kernels; each load outlasts a copy of 2 GiB."""
    memory = jax.numpy.ones(2**28, "float32")
    square = jax.random.uniform(jax.random.key(0), (8192, 8192), "bfloat16", -1, 1)

    def stream(x: jax.Array) -> jax.Array:
        for _ in range(48):
            x = jax.lax.optimization_barrier(x * 0.9 + 0.1)
        return x

    def multiply(x: jax.Array) -> jax.Array:
        for _ in range(40):
            x = jax.lax.optimization_barrier(x @ square)
        return x

    loads = {"memory": (stream, memory), "arithmetic": (multiply, square)}
    return {
        name: (jax.jit(function).lower(x).compile(), (x,)) for name, (function, x) in loads.items()
    }


def _clock_s(run: Run) -> float:
    began = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - began
