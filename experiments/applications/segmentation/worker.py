"""One training run in a process of its own, so that its resident set is its own: prints a JSON object per line.

python -m experiments.applications.segmentation.worker ROOT --way planned --size 96 --steps 4 --budget 440MiB
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

WAYS = ("plain", "planned")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, help="data set in the Decathlon layout")
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--size", type=int, required=True, help="voxels along each side")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--filters", type=int, required=True, help="filters of the first level")
    parser.add_argument("--budget", help="of the planned step, as memplan.jit takes it")
    parser.add_argument("--report", type=Path, help="where the planned run writes its report, as JSON")
    options = parser.parse_args()
    dataset = open_dataset(options.root)
    config = UNet3DConfig(filters=options.filters, in_channels=len(dataset.modalities), classes=len(dataset.labels))
    step, (state, batch) = factory(options.size, config)
    start = time.perf_counter()
    run, nbytes = build(options.way, step, (state, batch), options.budget, options.report)
    tell(compiled_bytes=nbytes, ready_s=time.perf_counter() - start)
    state = initial(options.size, config)
    give_back()
    tell(idle_rss=resident_bytes())
    with highest_resident() as highest:
        volumes = batches(dataset, options.size)
        for number in range(options.steps):
            batch = next(volumes)
            start, cpu = time.perf_counter(), time.process_time()
            state, metrics = run(state, batch)
            del batch  # before the next one is read
            loss = float(metrics["loss"])
            spent = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
            tell(step=number + 1, loss=loss, **spent)
    tell(peak_rss=highest(), process_peak_rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def build(
    way: str, step: Any, shapes: Any, budget: str | None, report: Path | None
) -> tuple[Callable[..., Any], int | None]:
    """The step as it is, or planned; and what the compiler says that it takes."""
    if way == "plain":
        compiled = jax.jit(step, donate_argnums=0).lower(*shapes).compile()
        return compiled, device_bytes(compiled)
    planned = memplan.jit(step, budget=budget, donate_argnums=0).plan(*shapes)
    if report is not None:
        planned.report.save_json(report)
    return planned.compile(), planned.report.compiled_peak_bytes


def give_back() -> None:
    """What compiling left free in the heap goes back, so that it hides nothing of what a step takes."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def initial(size: int, config: UNet3DConfig) -> Any:
    """The same seeded initial state for every way; the random volume that comes with it is dropped."""
    _, (state, _) = factory(min(size, 32), config, concrete=True)
    return state


def batches(dataset: Dataset, size: int) -> Iterator[Any]:
    """Whole volumes, round and round, one in memory at a time."""
    for case in itertools.cycle(dataset.cases):
        yield jax.tree.map(jnp.asarray, batch_of(load_case(dataset, case, size)))


@contextmanager
def highest_resident() -> Iterator[Callable[[], int]]:
    """Samples the resident set while the block runs; calling what it yields gives the largest, in bytes."""
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
    """Resident set of this process, by the kernel."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
