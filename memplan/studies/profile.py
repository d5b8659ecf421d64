"""Seconds of every kernel of a step, by jax's profiler.

The profiler records a kernel with the instruction that launched it: on a GPU in the lines
`Stream #...` of the device's plane, on a CPU in the lines of the threads that ran it.
"""

import statistics
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.profiler import ProfileData

from memplan.errors import UnknownDeviceError
from memplan.program import compat
from memplan.xla.kernel_fingerprint import kernel_fingerprint
from memplan.xla.module import BLOCKS, Computation, Instruction, Module
from memplan.xla.replay import is_free

_RUNS = 3  # traced; the median counts
# XLA:GPU launches kernels one by one, for the profiler names none inside a CUDA graph.
_NO_GRAPHS = {"xla_gpu_graph_min_graph_size": 2**30}


def seconds_of_kernels(step: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, float]:
    """Compile and run a step; the seconds of one run of each kernel, by fingerprint.

    `jax.ShapeDtypeStruct`s are filled. Of kernels that compute the same, the mean counts. A kernel
    in a loop whose trips XLA does not know is left out.

    Raises:
      UnknownDeviceError: the profiler recorded none.
    """
    on_gpu = jax.devices()[0].platform == "gpu"
    lowered = jax.jit(lambda *args: step(*args)).lower(*args)
    compiled: Any = lowered.compile(compiler_options=_NO_GRAPHS if on_gpu else None)
    module = Module.read(compat.module_of(compiled))
    arrays = jax.tree.map(_filled, args)
    jax.block_until_ready(compiled(*arrays))
    runs = [_traced(compiled, arrays) for _ in range(_RUNS)]
    seconds = by_fingerprint(module, _medians(runs))
    if not seconds:
        raise UnknownDeviceError(
            "jax's profiler recorded no kernel of the step. On a GPU it needs CUPTI, and the "
            "permission to use performance counters; `memplan calibrate` without a step needs "
            "neither."
        )
    return seconds


def by_fingerprint(module: Module, seconds: Mapping[str, float]) -> dict[str, float]:
    """The seconds of one run of each kernel, from those of an instruction in all its trips."""
    measured = defaultdict[str, list[float]](list)
    for body, op, trips in _kernels(module, module.entry, 1):
        if seconds.get(op.name, 0.0) > 0:
            measured[kernel_fingerprint(module, body, op)].append(seconds[op.name] / trips)
    return {fingerprint: statistics.mean(values) for fingerprint, values in measured.items()}


def _kernels(
    module: Module, body: Computation, trips: int
) -> Iterator[tuple[Computation, Instruction, int]]:
    """Each kernel, its computation, and how often it runs in a step.

    Not of loops whose trips XLA does not know, nor of conditionals, whose branches may not run.
    """
    for op in body.ops.values():
        if op.opcode == "while" and op.trip_count:
            yield from _kernels(module, module[op.body], trips * op.trip_count)
        elif op.opcode == "call":
            yield from _kernels(module, module[op.called[0]], trips)
        elif op.opcode not in BLOCKS and not is_free(op):
            yield body, op, trips


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """The median of the runs by instruction, of those that every run recorded."""
    names = set.intersection(*map(set, runs))
    return {name: statistics.median(run[name] for run in runs) for name in sorted(names)}


def _traced(run: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, float]:
    """Seconds of each instruction in one run."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run(*args))
        profiles = [ProfileData.from_file(str(path)) for path in Path(folder).rglob("*.xplane.pb")]
    seconds = defaultdict[str, float](float)
    for profile in profiles:
        for name, event_s in _events(profile):
            seconds[name] += event_s
    return seconds


def _events(profile: Any) -> Iterator[tuple[str, float]]:
    """The instruction and the seconds of every event that has an instruction."""
    for plane in profile.planes:
        on_gpu = plane.name.startswith("/device:GPU")
        for line in plane.lines:
            if on_gpu and not line.name.startswith("Stream"):
                continue  # a summary of the streams
            for event in line.events:
                if name := _instruction(event):
                    yield name, 1e-9 * event.duration_ns


def _instruction(event: Any) -> str:
    with warnings.catch_warnings():
        # jax's type that iterates over stats warns.
        warnings.simplefilter("ignore", DeprecationWarning)
        return str(dict(event.stats).get("hlo_op", ""))


def _filled(leaf: Any) -> Any:
    """An array for a shape: zeros, which are indices everywhere, or halves."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), leaf.shape)
    value = 0.5 if jnp.issubdtype(leaf.dtype, jnp.inexact) else 0
    return jnp.full(leaf.shape, value, leaf.dtype)
