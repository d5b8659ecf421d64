"""A report with a row of every kind, some of them hostile."""

import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from memplan.report.decisions import Choices, Decision
from memplan.report.model import CandidateRow, LiveValue, Report
from memplan.report.slabs import SlabArray, SlabLoopRow, Unsplit
from tests.report.plain import plain_report
from tests.report.timelines import HOSTILE, lines_of, random_timeline

MIB = 2**20
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

VOLUME = SlabArray("x", (512, 512), "float32", MIB, "device")
STORED = SlabArray("conv:3", (512, 512, 32), "float32", 32 * MIB, "host")
CHOICES = {
    "keep": Choices(0, None, 1e-3, 5e-4, "what it reads is overwritten"),
    "offload": Choices(MIB, 2e-3, 1e-3, 0.0),
    "recompute": Choices(MIB, 1e-3, None, None, "", "no link"),
}
AXIS = "dimension 0 of float32[512,512,32]"
AT = "/home/a/b/net.py:7"
LOOPS = (
    SlabLoopRow(1, AXIS, 16, 32, 1, 2, (VOLUME,), (STORED,), 1, 1e-3, AT, copies=2, kernels=1),
    SlabLoopRow(2, AXIS, 16, 32, 4, 9, (VOLUME, STORED), (), 3, None, ""),
)


@pytest.fixture
def report() -> Report:
    kinds = enumerate(("keep", "offload", "recompute") * 10)
    values = [("float32", index * MIB, f"/a/b/net.py:{index}", kind) for index, kind in kinds]
    return plain_report(
        status="fits",
        planner="greedy",
        budget_bytes=2048 * MIB,
        host_budget_bytes=64 * 1024 * MIB,
        baseline_peak_bytes=5881 * MIB,
        predicted_peak_bytes=1700 * MIB,
        compiled_peak_bytes=1800 * MIB,
        host_peak_bytes=1372 * MIB,
        offloaded_bytes=1372 * MIB,
        recomputed_flops=1.5e12,
        baseline_step_s=0.21,
        predicted_step_s=0.25,
        floor_bytes=900 * MIB,
        lower_bound_s=None,
        attempts=3,
        decisions=tuple(
            Decision(f"conv:{index}", (64, 112, 112, index), *value, 1e-3, CHOICES[value[-1]])
            for index, value in enumerate(values)
        ),
        live_at_peak=(
            LiveValue("state.params['w']", 3 * MIB, "f32[3,3]", "train.py:7", ""),
            LiveValue(HOSTILE, 5 * MIB, "f32[9]", "", "keep"),
        ),
        candidates=(
            CandidateRow("greedy", 1800 * MIB, 1372 * MIB, 0.25, "chosen"),
            CandidateRow("xla", None, None, None, "gave up"),
        ),
        versions=(("jax", "0.10.2"), ("python", "3.11.7")),
        slab_loops=LOOPS,
        unsplit=(Unsplit("sort", 3 * MIB, "/a/b/net.py:40"), Unsplit(HOSTILE, 7, "")),
    )


@pytest.fixture
def drawn_report(report: Report) -> Report:
    """The report with a timeline, and a value whose name is a script."""
    timeline = random_timeline(random.Random(7), 40, 60)
    first, *more = timeline.values
    timeline = replace(timeline, values=(replace(first, name=HOSTILE), *more))
    decisions = (replace(report.decisions[0], name=HOSTILE, nbytes=999 * MIB), *report.decisions)
    return replace(report, timeline=timeline, lines=lines_of(timeline), decisions=decisions)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Headless Chromium, if installed."""
    sync_api = pytest.importorskip("playwright.sync_api")
    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser_path is None:
        pytest.skip(
            f"none of {', '.join(BROWSERS)} is installed (Debian: apt-get install chromium)"
        )
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        yield browser
        browser.close()
