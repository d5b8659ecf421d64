"""What the local backend does in a second: matrix products, convolutions, elementwise work, memory, the host link.

Every operation is timed on growing sizes until one run takes long enough; each size is compiled, run once unmeasured,
then several times. Sizes that end too soon to time do not count unless there is no other.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from memplan.hardware import measured
from memplan.hardware.measured import Measurement, Timing

Run = Callable[[], Any]
"""Runs once; what it returns is waited for."""

_MATRIX_DTYPES = ("float32", "bfloat16", "float16")
_MEMORY_COPY = "a memory copy: host memory is device memory"
_CHAIN = 64  # multiply-adds for each element, so that arithmetic and not memory sets the pace


@dataclass(frozen=True)
class Patience:
    """How long to measure.

    Attributes:
      runs: at each size.
      least_s: a run shorter than this is mostly its own start, and counts only where nothing longer was run.
      enough_s: no larger size after one that took this long.
      most_nbytes: of the largest array.
    """

    runs: int = 7
    least_s: float = 2e-3
    enough_s: float = 0.06
    most_nbytes: int = 2**30


@dataclass(frozen=True)
class Size:
    """One size of one operation: FLOPs or bytes of a run, bytes of its largest array, and what makes it runnable."""

    label: str
    work: float
    nbytes: int
    make: Callable[[], Run]


@dataclass(frozen=True)
class Task:
    """A measurement to be made, its sizes growing."""

    name: str
    unit: str
    sizes: Sequence[Size]
    note: str = ""

    def measure(self, patience: Patience) -> Measurement:
        """Time it, from the smallest size up."""
        timings: list[Timing] = []
        for size in self.sizes:
            if timings and size.nbytes > patience.most_nbytes:
                break
            timings.append(time_runs(size, patience.runs))
            if timings[-1].best_s >= patience.enough_s:
                break
        long_enough = [timing for timing in timings if timing.best_s >= patience.least_s or self.unit == "s"]
        return Measurement(self.name, self.unit, patience.runs, tuple(long_enough or timings[-1:]), self.note)


def tasks() -> tuple[Task, ...]:
    """Everything there is to measure on the default backend's first device."""
    return tuple(_operations()) + tuple(_copies(jax.devices()[0]))


def time_runs(size: Size, runs: int) -> Timing:
    """Seconds of single runs, the first one left out."""
    run = size.make()
    jax.block_until_ready(run())
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return Timing(size.label, size.work, min(seconds), statistics.median(seconds), max(seconds))


def _operations() -> Iterator[Task]:
    for dtype in _MATRIX_DTYPES:
        sides = [2**power for power in range(8, 15)]
        yield Task(measured.MATRIX.format(dtype), "FLOP/s", [_product(side, dtype) for side in sides])
    for rank, sides, channels in ((2, (28, 56, 112, 224), 64), (3, (16, 32, 64, 128), 32)):
        for gradient in (False, True):
            name = f"convolution {rank}D float32{', gradient of the filter' if gradient else ''}"
            note = f"3^{rank} filter, {channels} channels; not used by plans"
            sizes = [_convolution(rank, side, channels, 4 if rank == 2 else 1, gradient) for side in sides]
            yield Task(name, "FLOP/s", sizes, note)
    yield Task(
        measured.ELEMENTWISE, "FLOP/s", [_chain(2**power) for power in range(18, 29, 2)], "multiply-adds in place"
    )
    yield Task(
        measured.MEMORY,
        "bytes/s",
        [_sweep(2**power, in_place=True) for power in range(28, 33)],
        "read and written in place",
    )
    yield Task(
        f"{measured.MEMORY}, fresh result",
        "bytes/s",
        [_sweep(2**power, in_place=False) for power in range(28, 31)],
        "into memory just allocated; not used by plans",
    )


def _product(side: int, dtype: str) -> Size:
    def make() -> Run:
        one, other = (_random((side, side), dtype, seed) for seed in (0, 1))
        return functools.partial(_compiled(jnp.matmul, one, other), one, other)

    return Size(f"{side}^3", 2.0 * side**3, side**2 * jnp.dtype(dtype).itemsize, make)


def _convolution(rank: int, side: int, channels: int, batch: int, gradient: bool) -> Size:
    """A 3-wide filter over a batch of cubes, or the gradient of that filter; the FLOPs are the same."""
    shape, axes = (batch, *[side] * rank, channels), "DHW"[-rank:]
    labels = (f"N{axes}C", f"{axes}IO", f"N{axes}C")

    def convolve(x: jax.Array, filters: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, filters, (1,) * rank, "SAME", dimension_numbers=labels)

    def of_filter(x: jax.Array, filters: jax.Array, cotangent: jax.Array) -> jax.Array:
        return jax.vjp(lambda weights: convolve(x, weights), filters)[1](cotangent)[0]

    def make() -> Run:
        arrays = [_random(shape, "float32", 0), _random((*[3] * rank, channels, channels), "float32", 1)]
        if not gradient:
            return functools.partial(_compiled(convolve, *arrays), *arrays)
        arrays.append(_random(shape, "float32", 2))
        return functools.partial(_compiled(of_filter, *arrays), *arrays)

    work = 2.0 * batch * side**rank * channels**2 * 3**rank
    return Size(f"{batch} x {side}^{rank} x {channels}", work, 4 * batch * side**rank * channels, make)


def _chain(count: int) -> Size:
    def chain(x: jax.Array, factor: jax.Array, term: jax.Array) -> jax.Array:
        for _ in range(_CHAIN):
            x = x * factor + term
        return x

    def make() -> Run:
        factor, term = jnp.float32(0.9), jnp.float32(0.1)
        return _in_place(lambda x: chain(x, factor, term), jnp.ones(count, jnp.float32))

    return Size(f"{count} x {_CHAIN}", 2.0 * _CHAIN * count, 4 * count, make)


def _sweep(nbytes: int, in_place: bool) -> Size:
    def make() -> Run:
        array = jnp.ones(nbytes // 4, jnp.float32)
        if in_place:
            return _in_place(lambda x: x + 1, array)
        return functools.partial(_compiled(lambda x: x + 1, array), array)

    return Size(_size(nbytes), 2.0 * nbytes, nbytes, make)


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 2**20 else f"{nbytes >> 10} KiB"


def _random(shape: tuple[int, ...], dtype: str, seed: int) -> jax.Array:
    """Ordinary numbers: zeros and ones draw less power, and some chips clock higher for them."""
    return jax.random.uniform(jax.random.key(seed), shape, jnp.dtype(dtype), -1, 1)


def _compiled(function: Callable[..., Any], *args: jax.Array) -> Callable[..., Any]:
    return jax.jit(function).lower(*args).compile()


def _in_place(function: Callable[[jax.Array], jax.Array], array: jax.Array) -> Run:
    """Repeated on its own result, in the same buffer: new memory costs the system time of its own."""
    compiled = jax.jit(function, donate_argnums=0).lower(array).compile()
    held = [array]

    def run() -> jax.Array:
        held[0] = compiled(held[0])
        return held[0]

    return run


def _copies(device: Any) -> Iterator[Task]:
    """The host link alone each way, both ways at once, and a copy so small that only its start counts."""
    make, note = (_memory_copies, _MEMORY_COPY) if device.platform == "cpu" else (_link_copies(device), "pinned memory")

    def sizes(ways: str, count: Iterable[int]) -> list[Size]:
        return [Size(_size(nbytes), nbytes, nbytes, functools.partial(make, nbytes, ways)) for nbytes in count]

    large = [2**power for power in range(27, 31)]
    yield Task(measured.TO_HOST, "bytes/s", sizes("out", large), note)
    yield Task(measured.TO_DEVICE, "bytes/s", sizes("in", large), note)
    yield Task(measured.BOTH_WAYS, "bytes/s", sizes("out in", large), f"{note}, two at once")
    yield Task(measured.LATENCY, "s", sizes("out", (4096,)), note)


def _memory_copies(nbytes: int, ways: str) -> Run:
    """Copies between arrays that are there already, one thread for each way."""
    pairs = [(np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)) for _ in ways.split()]
    if len(pairs) == 1:
        return functools.partial(np.copyto, *pairs[0])
    pool = ThreadPoolExecutor(len(pairs))

    def run() -> None:
        for copied in [pool.submit(np.copyto, *pair) for pair in pairs]:
            copied.result()

    return run


def _link_copies(device: Any) -> Callable[[int, str], Run]:
    """Copies between the device and pinned host memory, as a planned step makes them."""
    here, host = (SingleDeviceSharding(device, memory_kind=kind) for kind in ("device", "pinned_host"))

    def make(nbytes: int, ways: str) -> Run:
        inside = jax.device_put(jnp.ones(nbytes, jnp.uint8), here)
        outside = jax.device_put(inside, host)
        moves = {"out": (inside, host), "in": (outside, here)}
        chosen = [moves[way] for way in ways.split()]
        return lambda: [jax.device_put(array, to) for array, to in chosen]

    return make
