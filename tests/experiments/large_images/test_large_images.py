"""Sizes that were found, told; and cases that are what they say."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

from experiments.large_images import run
from experiments.large_images.cases import BUDGETS, WAYS, cases
from experiments.large_images.run import Found
from experiments.large_images.table import tables


def write(folder: Path, name: str, *rows: Found) -> None:
    (folder / f"{name}.json").write_text(json.dumps({"rows": [asdict(row) for row in rows]}))


def test_only_what_is_missing_is_measured(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    write(tmp_path, "resnet50-batch-v100", Found("plain", 240, 1, 0, 0.1, "", 4, 1.0))
    left = [(case.name, device, way) for _, case, device, way in run.missing(["resnet50-batch-v100"])]
    assert left == [("resnet50-batch", "v100", way) for way in WAYS if way != "plain"]
    assert len(list(run.missing(None))) == len(list(cases())) * len(BUDGETS) * len(WAYS) - 1


def test_the_tables_tell_every_way(tmp_path: Path) -> None:
    write(
        tmp_path,
        "resnet50-batch-v100",
        Found("plain", 240, 2**30, 0, 0.5, "", 4, 1.0),
        Found("xla", None, None, None, None, "", 3, 1.0),
        Found("memplan", 480, 2**30, 2**20, 1.0, "floor 16.00 GiB, conv (net.py:7)", 8, 1.0),
    )
    told = tables(tmp_path)
    assert "| resnet50-batch | v100 | 240 |  |  | 480 | 2.00x | floor 16.00 GiB, conv (net.py:7) |" in told
    assert f"| resnet50-batch | v100 | memplan | 480 | 1024 | 1 | 1000 | {480 * 224**2 / 1e6:.1f} |" in told


def test_pixels_are_those_of_the_batch() -> None:
    for case in cases():
        if case.name in ("resnet50-image", "resnet50-batch", "unet3d-volume"):
            _, (_, batch) = case.make(case.low, True)
            assert case.pixels(case.low) == math.prod(batch["image"].shape[:-1])
