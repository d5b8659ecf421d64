"""The largest image and the largest batch that fit, per device and way to make them fit.

    python -m experiments.large_images.run [--only CASE-DEVICE ...] [--minutes 10]   # what is missing, into results/
    python -m experiments.large_images.run --table                                   # rewrites the tables of README.md

Sizes that were found are kept, one file for each case and device; a run goes on where the last one stopped.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from experiments.large_images import speed
from experiments.large_images.cases import WAYS, Case, limits, on_devices
from experiments.large_images.compiling import Compiled, compiled
from experiments.large_images.table import tables
from experiments.readme import insert
from memplan.io import write_atomic
from memplan.outcome.summary import versions
from memplan.studies.bisect import last_fitting

HERE = Path(__file__).parent
RESULTS, README = HERE / "results", HERE / "README.md"


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


def measure(case: Case, device: str, way: str) -> Found:
    """By compiling sizes, ever larger ones and then between."""
    start = time.perf_counter()
    tried: dict[int, list[Compiled]] = {}

    def fits(position: int) -> bool:
        if position not in tried:
            tried[position] = list(compiled(case, device, case.sizes[position], way))
        return any(not one.refused for one in tried[position])

    last = last_fitting(count_to_try(len(case.sizes), fits), fits)
    compilations, spent = sum(map(len, tried.values())), time.perf_counter() - start
    limit = tried[last + 1][-1].refused if last + 1 in tried else ""
    if last < 0:
        return Found(way, None, None, None, None, limit, compilations, spent)
    one = next(one for one in tried[last] if not one.refused)
    return Found(way, case.sizes[last], one.device_bytes, one.host_bytes, one.step_s, limit, compilations, spent)


def count_to_try(count: int, fits: Callable[[int], bool]) -> int:
    """So many of `count` sizes, doubling, that the last one does not fit, or all: large ones compile for hours."""
    few = 1
    while few < count and fits(few - 1):
        few *= 2
    return min(few, count)


def known(path: Path) -> dict[str, Found]:
    if not path.exists():
        return {}
    return {row["way"]: Found(**row) for row in json.loads(path.read_text())["rows"]}


def sized(path: Path, case: Case, device: str, way: str) -> str:
    rows = known(path)
    rows[way] = found = measure(left(case, way, rows), device, way)
    content = limits(case, device) | {"rows": [asdict(row) for row in rows.values()], "versions": dict(versions())}
    write_atomic(path, json.dumps(content, indent=1) + "\n")
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
