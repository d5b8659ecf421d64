"""A planner that may only move, and the table of links."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from experiments.link_speed import run
from memplan.planning.problem import Buffer, Kernel, Problem, Role
from memplan.planning.schedule import Kind


def chain(length: int) -> Problem:
    """Each kernel reads what the last one wrote, on the way there and on the way back."""
    made = [Buffer(f"value.{n}", 1024, Role.TEMPORARY, n, n) for n in range(2 * length)]
    there = [Kernel(f"there.{n}", (n - 1,) if n else (), (n,), seconds=1.0) for n in range(length)]
    back = [Kernel(f"back.{n}", (n - 1, 2 * length - 1 - n), (n,), seconds=1.0) for n in range(length, 2 * length)]
    return Problem(tuple(made), (*there, *back), frozenset({2 * length - 1}), frozenset())


def test_nothing_runs_twice_and_what_does_not_fit_is_moved() -> None:
    problem = chain(8)
    found = run.Swapping().plan(problem, 6 * 1024, 2**20, lambda nbytes: 0.1)
    swapped = Counter(one.kind for one in found.schedule)
    assert swapped[Kind.RUN] == len(problem.kernels)
    assert swapped[Kind.OFFLOAD] > 0


def test_every_link_is_told_against_the_slowest(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    links = {link: {"step_s": 1 / (n + 1), "copy_s": 0.1, "hidden_copy_s": 0.0} for n, link in enumerate(run.LINKS)}
    found = {"device_bytes": 2**30, "host_bytes": 2**31, "batch": 5, "image": 1000, "links": links}
    (tmp_path / "swapping.json").write_text(json.dumps(found))
    lines = run.table().splitlines()[2:]
    assert [line.split(" | ")[-1] for line in lines] == [f"{n + 1}.00x |" for n in range(len(run.LINKS))]
    assert lines[0].startswith("| swapping | pcie3x16 |") and "| 1024 | 2048 | 100 | 1000 | 5.0 |" in lines[0]
