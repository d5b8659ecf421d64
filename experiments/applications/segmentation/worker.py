"""One training run in a process of its own, for its resident set: prints JSON lines.

python -m experiments.applications.segmentation.worker ROOT --way planned --size 96 --steps 4
"""

import argparse
import ctypes
import gc
import itertools
import json
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import memplan
from experiments.applications.segmentation.decathlon import Dataset, load_case, open_dataset
from experiments.applications.segmentation.training import batch_of, factory
from experiments.compiled import device_bytes
from models.unet3d import UNet3DConfig

VARIANTS = ("plain", "planned")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, help="data set in the Decathlon layout")
    parser.add_argument("--way", choices=VARIANTS, required=True)
    parser.add_argument("--size", type=int, required=True, help="voxels along each side")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--filters", type=int, required=True, help="filters of the first level")
    parser.add_argument("--budget", help="of the planned step, as memplan.jit takes it")
    parser.add_argument(
        "--report", type=Path, help="where the planned run writes its report, as JSON"
    )
    options = parser.parse_args()
    dataset = open_dataset(options.root)
    config = UNet3DConfig(
        filters=options.filters, in_channels=len(dataset.modalities), classes=len(dataset.labels)
    )
    step, (state, batch) = factory(options.size, config)
    start = time.perf_counter()
    run, nbytes = build(options.way, step, (state, batch), options.budget, options.report)
    print_json(compiled_bytes=nbytes, ready_s=time.perf_counter() - start)
    state = initial(options.size, config)
    release_heap()
    print_json(idle_rss=resident_bytes())
    with highest_resident() as highest:
        volumes = batches(dataset, options.size)
        for number in range(options.steps):
            batch = next(volumes)
            start, cpu = time.perf_counter(), time.process_time()
            state, metrics = run(state, batch)
            del batch  # free it before the next one is read
            loss = float(metrics["loss"])
            spent = {
                "seconds": time.perf_counter() - start,
                "cpu_seconds": time.process_time() - cpu,
            }
            print_json(step=number + 1, loss=loss, **spent)
    print_json(
        peak_rss=highest(),
        process_peak_rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def build(
    variant: str, step: Any, shapes: Any, budget: str | None, report: Path | None
) -> tuple[Callable[..., Any], int | None]:
    """The plain or the planned step, and its device bytes."""
    if variant == "plain":
        compiled = jax.jit(step, donate_argnums=0).lower(*shapes).compile()
        return compiled, device_bytes(compiled)
    planned = memplan.jit(step, budget=budget, donate_argnums=0).plan(*shapes)
    if report is not None:
        planned.report.save_json(report)
    return planned.compile(), planned.report.compiled_peak_bytes


def release_heap() -> None:
    """Return free heap to the system, so that the resident set shows what a step allocates."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def initial(size: int, config: UNet3DConfig) -> Any:
    """The same seeded initial state for both variants, without its random volume."""
    _, (state, _) = factory(min(size, 32), config, concrete=True)
    return state


def batches(dataset: Dataset, size: int) -> Iterator[Any]:
    """Whole volumes, in a cycle, one in memory at a time."""
    for case in itertools.cycle(dataset.cases):
        yield jax.tree.map(jnp.asarray, batch_of(load_case(dataset, case, size)))


@contextmanager
def highest_resident() -> Iterator[Callable[[], int]]:
    """Sample the resident set during the block; yields a function that returns its maximum."""
    largest, done = [resident_bytes()], threading.Event()

    def sample() -> None:
        while not done.wait(0.002):
            largest[0] = max(largest[0], resident_bytes())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield lambda: largest[0]
    finally:
        done.set()
        thread.join()


def resident_bytes() -> int:
    """Resident set of this process, from the kernel."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def print_json(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
