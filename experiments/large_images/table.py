"""The tables of README.md, from the results that are there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.large_images import speed
from experiments.large_images.cases import WAYS, on_devices

MIB = 2**20


def tables(results: Path) -> str:
    return "\n".join([*_sizes(results), "", *_at_the_largest(results), "", *_speeds(results)]) + "\n"


def _known(results: Path) -> Iterator[tuple[Any, str, dict[str, Any]]]:
    """(case, device, rows by way) of every file, in the order of the cases."""
    for case, device in on_devices():
        path = results / f"{case.name}-{device}.json"
        if path.exists():
            yield case, device, {row["way"]: row for row in json.loads(path.read_text())["rows"]}


def _sizes(results: Path) -> Iterator[str]:
    over = "pixels, plain's", "jax.checkpoint's"
    names = ("largest", "device", *WAYS, *over, "what refuses the next")
    yield f"| {' | '.join(names)} |"
    yield "|---" * len(names) + "|"
    for case, device, rows in _known(results):
        sizes = [rows[way]["size"] if way in rows else None for way in WAYS]
        plain, checkpoint, _, own = sizes
        times = (
            f"{case.pixels(own) / case.pixels(other):.1f}x" if own and other else "" for other in (plain, checkpoint)
        )
        limit = rows["memplan"]["limit"] if "memplan" in rows else ""
        cells = (case.name, device, *("" if size is None else str(size) for size in sizes), *times, limit)
        yield f"| {' | '.join(cells)} |"


def _at_the_largest(results: Path) -> Iterator[str]:
    names = ("largest", "device", "way", "size", "device MiB", "host MiB", "step ms", "Mpixel/s")
    yield f"| {' | '.join(names)} |"
    yield "|---" * len(names) + "|"
    for case, device, rows in _known(results):
        for way in WAYS:
            row = rows.get(way)
            if row is None or row["size"] is None:
                continue
            memory = f"{row['device_bytes'] / MIB:.0f}", f"{row['host_bytes'] / MIB:.0f}"
            times = f"{1e3 * row['step_s']:.0f}", f"{case.pixels(row['size']) / row['step_s'] / 1e6:.1f}"
            yield f"| {' | '.join((case.name, device, way, str(row['size']), *memory, *times))} |"


def _speeds(results: Path) -> Iterator[str]:
    memplan = "memplan", "its device MiB", "its host MiB"
    names = ("speed", "device", "size", "plain Mpixel/s", "jax.checkpoint", *memplan)
    yield f"| {' | '.join(names)} |"
    yield "|---" * len(names) + "|"
    for case, device in on_devices():
        for row in speed.known(results / f"speed-{case.name}-{device}.json"):
            seconds = row.plain_s, row.checkpoint_s, row.memplan_s
            speeds = (f"{case.pixels(row.size) / one / 1e6:.1f}" if one else "" for one in seconds)
            memory = f"{row.device_bytes / MIB:.0f}", f"{row.host_bytes / MIB:.0f}"
            yield f"| {' | '.join((case.name, device, str(row.size), *speeds, *memory))} |"
