"""From a file to a judged answer, on random graphs, and on the published ones if they exist."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.planners.graphs import random_layered, read
from experiments.planners.run import plan
from experiments.planners.validate import measure

PUBLISHED = Path(os.environ.get("MEMPLAN_BENCHMARKS", "absent")) / "moccasin"
PEAKS = {
    "random_layered_n100": 46_319,
    "random_layered_n250": 146_840,
    "fcn8_vgg_b32_train": 13_484_795_520,
    "resnet50_b256_train": 38_059_356_160,
}
published = pytest.mark.skipif(
    not PUBLISHED.is_dir(), reason="the published graphs are not part of the repository"
)


def judged(path: Path, result: dict) -> None:
    verdict = measure(json.loads(path.read_text()), result["order"])
    assert (verdict.peak, verdict.duration) == (result["peak"], result["duration"])
    assert verdict.peak <= result["budget"]
    assert list(verdict.first) == list(read(path).names)


@published
@pytest.mark.parametrize("name", PEAKS)
def test_peaks_of_the_given_orders(name: str) -> None:
    path = PUBLISHED / f"{name}.json"
    document = json.loads(path.read_text())
    assert measure(document, read(path).names).peak == PEAKS[name]


@published
@pytest.mark.parametrize(
    ("name", "percent"), [("fcn8_vgg_b32_train", 0.14), ("resnet50_b256_train", 0.30)]
)
def test_training_graphs_at_four_fifths(name: str, percent: float) -> None:
    path = PUBLISHED / f"{name}.json"
    result = plan(path, 0.8, 60)
    judged(path, result)
    assert result["status"] == "optimal" and result["tdi_percent"] <= percent


@published
@pytest.mark.slow
@pytest.mark.parametrize(("ratio", "percent"), [(0.9, 0.79), (0.8, 2.30)])
def test_a_hundred_nodes_are_proven(ratio: float, percent: float) -> None:
    path = PUBLISHED / "random_layered_n100.json"
    result = plan(path, ratio, 120)
    judged(path, result)
    assert result["status"] == "optimal" and round(result["tdi_percent"], 2) == percent


@pytest.mark.parametrize(("schema", "own_process"), [("layered", True), ("training", False)])
def test_a_generated_graph_from_file_to_answer(
    tmp_path: Path, schema: str, own_process: bool
) -> None:
    path = tmp_path / "graph.json"
    document = random_layered(40, seed=3)
    if schema == "training":
        document["nodes"] = [
            {"id": n["name"], "cost_ram": n["out_cost"], "cost_cpu": n["duration"]}
            for n in document["nodes"]
        ]
        document["links"] = [
            {"source": link["0"], "target": link["1"]} for link in document["links"]
        ]
        document["graph"] = {}
    path.write_text(json.dumps(document))
    if own_process:
        options = ["--ratio", "0.9", "--seconds", "3"]
        command = [sys.executable, "-m", "experiments.planners", str(path), *options]
        process = subprocess.run(command, capture_output=True, text=True, check=True)
        result = json.loads(process.stdout)
    else:
        result = plan(path, 0.9, 3)
    assert result["status"] in ("optimal", "feasible")
    judged(path, result)


def test_an_order_that_cannot_be_is_refused(tmp_path: Path) -> None:
    document = random_layered(20)
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(document))
    names = read(path).names
    with pytest.raises(ValueError, match="runs before"):
        measure(document, [*reversed(names)])
    with pytest.raises(ValueError, match="missing"):
        measure(document, names[:-1])
