"""Sizes that were found, told; and cases that are what they say."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from experiments.large_images import run
from experiments.large_images.cases import BUDGETS, WAYS, Case, cases, on_devices
from experiments.large_images.compiling import compiled
from experiments.large_images.run import Found
from experiments.large_images.speed import Speed, series
from experiments.large_images.table import tables
from tests import dense


def write(folder: Path, name: str, *rows: Found) -> None:
    (folder / f"{name}.json").write_text(json.dumps({"rows": [asdict(row) for row in rows]}))


def test_only_what_is_missing_is_measured(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    write(tmp_path, "resnet50-batch-v100", Found("plain", 240, 1, 0, 0.1, "", 4, 1.0))
    left = [(case.name, device, way) for _, case, device, way in arguments(["resnet50-batch-v100"])]
    assert left == [("resnet50-batch", "v100", way) for way in WAYS if way != "plain"]
    drawn = sum(case.axis != "batch" for case in cases("v100"))
    assert len(arguments(None)) == (len(list(cases("v100"))) * len(WAYS) + drawn) * len(BUDGETS) - 1


def arguments(only: list[str] | None) -> list[Any]:
    return [work.args for work in run.missing(only)]


def test_the_tables_tell_every_way(tmp_path: Path) -> None:
    write(
        tmp_path,
        "resnet50-batch-v100",
        Found("plain", 240, 2**30, 0, 0.5, "", 4, 1.0),
        Found("xla", None, None, None, None, "", 3, 1.0),
        Found("memplan", 480, 2**30, 2**20, 1.0, "floor 16.00 GiB, conv (net.py:7)", 8, 1.0),
    )
    told = tables(tmp_path)
    assert "| resnet50-batch | v100 | 240 |  |  | 480 | 2.0x |  | floor 16.00 GiB, conv (net.py:7) |" in told
    assert f"| resnet50-batch | v100 | memplan | 480 | 1024 | 1 | 1000 | {480 * 224**2 / 1e6:.1f} |" in told


def test_what_fits_as_it_is_is_not_rematerialized() -> None:
    case, plain = next(cases("v100")), Found("plain", 2176, 9, 0, 0.5, "", 4, 1.0)
    assert run.left(case, "xla", {"plain": plain}).sizes == range(2176, case.high + 1, case.step)
    assert run.left(case, "xla", {"plain": replace(plain, size=None)}) is case
    assert run.left(case, "memplan", {"plain": plain}) is case


def test_speeds_are_told_where_a_way_fits(tmp_path: Path) -> None:
    rows = [asdict(Speed(512, 0.5, None, 0.25, 2**30, 2**20))]
    (tmp_path / "speed-unet3d-volume-v100.json").write_text(json.dumps({"rows": rows}))
    speeds = (f"{512**3 / seconds / 1e6:.1f}" for seconds in (0.5, 0.25))
    assert "| unet3d-volume | v100 | 512 | {} |  | {} | 1024 | 1 |".format(*speeds) in tables(tmp_path)


def growing(low: int) -> Case:
    """Four layers of equal width; more rows than 2**20 are not looked at."""

    def make(rows: int, remat: bool) -> Any:
        layers = [jax.ShapeDtypeStruct((2**13, 2**13), jnp.float32)] * 4
        return dense.step, (layers, jax.ShapeDtypeStruct((rows, 2**13), jnp.float32))

    return Case("dense", "rows", low, 2**20, low, make, lambda rows: rows)


@pytest.mark.gpu_aot
@pytest.mark.slow
def test_the_largest_of_each_way_fits_and_the_next_one_does_not() -> None:
    case = growing(2**15)
    for way in ("plain", "memplan"):
        found = run.measure(case, "v100", way)
        assert found.size is not None and found.device_bytes is not None and found.device_bytes <= 15 * 2**30
        [refused] = compiled(case, "v100", found.size + case.step, way)
        assert refused.refused == found.limit != ""


@pytest.mark.parametrize(("fitting", "tried"), [(0, 1), (1, 2), (3, 4), (4, 8), (70, 100)])
def test_ever_larger_sizes_are_tried(fitting: int, tried: int) -> None:
    assert run.count_to_try(100, lambda position: position < fitting) == tried


@pytest.mark.gpu_aot
@pytest.mark.slow
def test_sizes_double_until_no_plan_fits() -> None:
    low = 3 * 2**13
    rows = list(series(growing(low), "v100"))
    assert [row.size for row in rows] == [low * 2**doubled for doubled in range(len(rows))]
    assert rows[0].plain_s is not None and rows[0].host_bytes == 0
    assert rows[-1].plain_s is None and rows[-1].size < 2**20
    assert all(row.device_bytes <= 15 * 2**30 for row in rows)


def test_pixels_are_those_of_the_batch() -> None:
    for case, _ in on_devices():
        if case.name in ("resnet50-image", "resnet50-batch", "unet3d-volume"):
            _, (_, batch) = case.make(case.low, True)
            assert case.pixels(case.low) == math.prod(batch["image"].shape[:-1])
