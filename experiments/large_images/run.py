"""The largest image and the largest batch that fit, per device and way to make them fit.

    python -m experiments.large_images.run [--only CASE-DEVICE ...] [--minutes 10]   # what is missing, into results/
    python -m experiments.large_images.run --table                                   # rewrites the tables of README.md

Sizes that were found are kept, one file for each case and device; a run goes on where the last one stopped.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import memplan
from experiments.large_images import speed
from experiments.large_images.cases import BUDGETS, HOST_BUDGET, WAYS, Case, limits, on_devices
from experiments.large_images.searches import search_for
from experiments.large_images.table import tables
from experiments.readme import insert
from memplan import api
from memplan.files import write_whole
from memplan.planning.budget import parse_bytes
from memplan.planning.frontier import last_fitting
from memplan.summary import versions

HERE = Path(__file__).parent
RESULTS, README = HERE / "results", HERE / "README.md"
_NUMBER_NBYTES = 4
_GUESSED = 150.0  # numbers for a pixel


@dataclass(frozen=True)
class Found:
    """The largest size of one way.

    Attributes:
      size: None where not even the smallest fits.
      device_bytes, host_bytes, step_s: there; seconds by the roofline.
      limit: what refuses the next size.
      compilations: programs compiled to find it.
      seconds: that it took.
    """

    way: str
    size: int | None
    device_bytes: int | None
    host_bytes: int | None
    step_s: float | None
    limit: str
    compilations: int
    seconds: float


def without_a_plan(case: Case, device: str, way: str) -> Found:
    """By the compiler alone, the step as it is, with `jax.checkpoint` around its blocks, or squeezed by XLA."""
    start = time.perf_counter()
    budget = parse_bytes(BUDGETS[device], 0)
    compiled: list[Any] = []
    fitting: dict[int, Any] = {}

    def lowest(size: int) -> int:
        return _NUMBER_NBYTES * case.pixels(case.sizes[size])

    def candidates(size: int) -> Iterator[Any]:
        search = search_for(case, device, case.sizes[size], way == "jax.checkpoint")
        yield search.plain()
        if way == "xla":
            yield from search.rematerialized()

    @cache
    def tried(size: int) -> tuple[bool, int]:
        needed: list[int] = []
        for one in candidates(size):
            compiled.append(one)
            needed.append(one.device_bytes)
            if one.device_bytes <= budget:
                fitting[size] = one
                return True, one.device_bytes
        return False, min(needed)

    share = shown(case, way)
    last = last_fitting(
        len(case.sizes), budget, lowest, lambda size: int(share * lowest(size)), lambda size, _: tried(size)
    )
    spent = time.perf_counter() - start
    if last < 0:
        return Found(way, None, None, None, None, "", len(compiled), spent)
    one = fitting[last]
    return Found(way, case.sizes[last], one.device_bytes, one.host_bytes, one.step_s, "", len(compiled), spent)


def shown(case: Case, way: str) -> float:
    """How many numbers this way keeps for each pixel, as far as another device or size of this network has shown it."""
    network, _, _ = case.name.partition("-")
    for path in sorted(RESULTS.glob(f"{network}-*.json")):
        row = known(path).get(way)
        if row and row.size and row.device_bytes:
            return row.device_bytes / (_NUMBER_NBYTES * case.pixels(row.size))
    return _GUESSED


def by_memplan(case: Case, device: str) -> Found:
    """`memplan.largest`, and then the plan that `memplan.jit` makes there."""
    start = time.perf_counter()
    given: dict[str, Any] = {"device": device, "budget": BUDGETS[device], "host_budget": HOST_BUDGET}
    found = api.frontier(
        lambda size: case.make(size, False), low=case.low, high=case.high, step=case.step, names=(case.axis,), **given
    )
    [(size,)], [refused] = found.largest, found.refused
    function, args = case.make(size, False)
    report = memplan.jit(function, **given, donate_argnums=0).plan(*args).report
    return Found(
        "memplan", size, report.compiled_peak_bytes, report.host_peak_bytes, report.predicted_step_s,
        found.limit(refused), found.compilations, time.perf_counter() - start,
    )  # fmt: skip


def measure(case: Case, device: str, way: str) -> Found:
    return by_memplan(case, device) if way == "memplan" else without_a_plan(case, device, way)


def known(path: Path) -> dict[str, Found]:
    if not path.exists():
        return {}
    return {row["way"]: Found(**row) for row in json.loads(path.read_text())["rows"]}


def sized(path: Path, case: Case, device: str, way: str) -> str:
    rows = known(path)
    rows[way] = found = measure(left(case, way, rows), device, way)
    content = limits(case, device) | {"rows": [asdict(row) for row in rows.values()], "versions": dict(versions())}
    write_whole(path, json.dumps(content, indent=1) + "\n")
    return f"{path.stem} {found}"


def left(case: Case, way: str, rows: Mapping[str, Found]) -> Case:
    """Sizes that are not known to fit: what fits as it is needs no rematerialization."""
    plain = rows.get("plain")
    return replace(case, low=plain.size) if way == "xla" and plain and plain.size else case


def timed(path: Path, case: Case, device: str) -> str:
    speed.measure(case, device, path)
    return f"{path.stem}: {len(speed.known(path))} sizes"


def missing(only: list[str] | None) -> Iterator[partial[str]]:
    for case, device in on_devices():
        name = f"{case.name}-{device}"
        if only and not name.startswith(tuple(only)):
            continue
        path, drawn = RESULTS / f"{name}.json", RESULTS / f"speed-{name}.json"
        if not drawn.exists() and case.axis != "batch":
            yield partial(timed, drawn, case, device)
        yield from (partial(sized, path, case, device, way) for way in WAYS if way not in known(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", metavar="CASE-DEVICE")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin nothing new after that")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    until = time.monotonic() + 60 * args.minutes
    for work in [] if args.table else list(missing(args.only)):
        if time.monotonic() > until:
            print("time is over: run it again for the rest")
            break
        print(work(), flush=True)
    insert(README, tables(RESULTS))


if __name__ == "__main__":
    main()
