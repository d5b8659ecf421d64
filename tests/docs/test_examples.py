"""Every example of the documentation, run whole: planned for its budget, and the losses of `jax.jit` bit for bit."""

from __future__ import annotations

import runpy
from pathlib import Path

import jax
import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "docs" / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 9


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_trains_as_without_a_budget(path: Path) -> None:
    example = runpy.run_path(str(path))
    (compiled,) = example["train_step"]._compiled.values()
    report, losses = compiled.report, example["losses"]
    assert report.planner != "none"
    assert report.compiled_peak_bytes <= report.budget_bytes
    assert 0.55 < report.budget_bytes / report.baseline_peak_bytes < 0.75
    assert any(row.decision == "recompute" for row in report.decisions)

    plain = jax.jit(example["train_step"].__wrapped__)
    *state, batch = example["start"]()
    expected = []
    for _ in losses:
        *state, loss = plain(*state, batch)
        expected.append(float(loss))
    assert losses == expected  # to the last bit
    assert losses[-1] < losses[0]
