"""The committed results belong to the cases, the README to the results, and every case can be traced."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from experiments.budgets import harness, table
from experiments.budgets.bits import Training, compared, differing
from experiments.budgets.cases import CASES, OTHERS, REQUIRED
from experiments.budgets.drawn import DRAWN, drawn
from experiments.budgets.harness import Suite
from experiments.budgets.numbers import MODELS, NUMBERS
from experiments.budgets.rows import Row, Rows, former, summary, version_here
from experiments.budgets.run import BEFORE, SUITE

PROGRAMS = {case.program.name: case.program for case in CASES.values()}
ROW = Row(
    "a", "v100", "1", "fits", budget_bytes=60, plain_bytes=100, plain_step_s=1.0, plain_compile_s=2.0,
    predicted_bytes=51, compiled_bytes=50, host_bytes=0, step_s=1.1, compilations=1, ready_s=6.0,
)  # fmt: skip


def test_cases_are_named_once_and_named_by_what_they_are():
    assert len(CASES) == len(REQUIRED) + len(OTHERS)
    assert len(REQUIRED) == 12
    assert all(0 < case.budget < 100 for case in CASES.values() if isinstance(case.budget, int))


def test_selected_takes_beginnings_of_names_and_refuses_others():
    assert SUITE.selected(None) == list(CASES)
    assert {CASES[name].program.name for name in SUITE.selected(["mlp"])} == {"mlp_24"}
    with pytest.raises(SystemExit, match="nothing begins with something"):
        SUITE.selected(["something"])


@pytest.mark.parametrize("name", ["mlp_24", "unet3d_96_transpose", "resnet50_b1152", "decoder_8_scan"])
def test_arguments_are_shapes_and_the_step_keeps_the_state(name: str):
    step, args = PROGRAMS[name].make()
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args))
    state, metrics = jax.eval_shape(step, *args)
    assert jax.tree.structure(state) == jax.tree.structure(args[0])
    assert metrics["loss"].shape == ()


def test_readme_is_what_the_results_say():
    assert table.README.read_text() == table.regenerate()


def test_every_result_belongs_to_a_case():
    names = {path.stem for path in SUITE.results.folder.glob("*.json")}
    assert {row.name: row.device for row in SUITE.rows()} == {name: CASES[name].device for name in names}
    assert all(row.environment["jaxlib"] for row in SUITE.rows())


def test_every_case_is_known_of_the_former_version():
    before = former(BEFORE)
    assert set(before) == set(CASES)
    assert all(row.fits and row.step_s for row in before.values())


def test_bits_that_were_compared_are_equal():
    rows = json.loads(NUMBERS.read_text())["rows"]
    assert rows and {row["name"] for row in rows} <= set(MODELS)
    assert not [row for row in rows if (row["unequal"] and not row["gated"]) or not row["outputs"]]


@pytest.mark.parametrize("number", range(3))
def test_steps_drawn_at_random_keep_every_bit(number: int):
    plans = list(compared(str(number), drawn(number), [70]))
    assert any(one.again for one in plans)
    assert not any(one.unequal or one.gated for one in plans)


def test_all_that_were_drawn_were_equal():
    told = json.loads(DRAWN.read_text())
    assert told["steps"] == 500 and told["plans"] == 600
    assert told["with_kernels_again"] > 400 and not told["unequal"]


def test_a_row_comes_back_from_its_file(tmp_path: Path):
    rows = Rows(tmp_path / "new")
    rows.keep(ROW)
    assert rows.all(["b", "a"]) == [ROW]
    assert rows.find("b") is None


def test_what_a_row_says_of_itself():
    assert ROW.missed == pytest.approx(0.02)
    assert ROW.slower == pytest.approx(0.1)
    assert ROW.cost == pytest.approx(3.0)
    untouched = replace(ROW, status="untouched", predicted_bytes=100)
    assert untouched.fits and untouched.missed is None
    assert replace(ROW, status="does not fit").slower is None
    assert Row("a", "v100", "1", "failed").cost is None


def test_the_summary_counts_what_missed_and_what_became_slower():
    rows = [
        ROW,
        replace(ROW, name="b", compilations=2, step_s=1.3),
        replace(ROW, name="c", status="untouched", compilations=1, step_s=1.0),
        Row("d", "v100", "1", "failed", reason="no time"),
    ]
    before = {"a": replace(ROW, step_s=1.0945), "b": replace(ROW, step_s=1.2), "d": ROW}
    fits, truth, over, cost, compilations, slower = summary(rows, before, {"b", "d"})
    assert fits == "fits: 3 of 4 (d)"
    assert truth.endswith(
        "off by median 2.00%, 90th percentile 2.00%, worst 2.00%; right at the first compilation: 1 of 3"
    )
    assert "median 30.0%" in over
    assert "by the clock median 3.0" in cost and "threads not measured" in cost
    assert "worst 2.0" in compilations
    assert slower == "slower than before by more than 1 %: 1 of 2 (b +8.3%)"


def suite(folder: Path, *names: str, **more: Any) -> Suite:
    return Suite("no.module", dict.fromkeys(names, "v100"), Rows(folder), **more)


def test_only_rows_of_another_version_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(harness, "version_here", lambda sources: "2")
    cases = suite(tmp_path, "old", "new", "none")
    cases.results.keep(replace(ROW, name="old", version="1"))
    cases.results.keep(replace(ROW, name="new", version="2"))
    assert list(cases.missing(cases.devices, force=False, keep=False)) == ["old", "none"]
    assert list(cases.missing(cases.devices, force=False, keep=True)) == ["none"]
    assert list(cases.missing(cases.devices, force=True, keep=False)) == ["old", "new", "none"]


def test_a_larger_budget_waits_for_the_smaller_one_not_to_fit(tmp_path: Path):
    cases = suite(tmp_path, "50", "60", "75", after={"60": "50", "75": "60"})
    asked = cases.missing(cases.devices, force=False, keep=True)
    assert next(asked) == "50"
    cases.results.keep(replace(ROW, name="50", status="does not fit"))
    assert next(asked) == "60"
    cases.results.keep(replace(ROW, name="60"))
    assert list(asked) == []
    cases.results.keep(replace(ROW, name="75"))  # of an earlier planner
    assert [row.name for row in cases.rows()] == ["50", "60"]
    cases.results.keep(replace(ROW, name="50", status="failed"))
    assert [row.name for row in cases.rows()] == ["50"]


def test_a_process_that_fails_is_a_row_that_says_why(tmp_path: Path):
    row = suite(tmp_path, "a").measured("a", minutes=1.0, arguments=["--more"])
    assert (row.name, row.device, row.status, row.version) == ("a", "v100", "failed", version_here())
    assert "No module named" in row.reason


def test_steps_whose_state_is_donated_in_parts_are_compared():
    def step(weights: Any, count: Any, key: Any, x: Any) -> Any:
        noise = jax.random.normal(key, x.shape)
        return weights - 0.1 * jnp.tanh(x + noise).T @ x @ weights, count + 1, {"key": key, "sum": weights.sum()}

    args = jnp.eye(64), jnp.zeros((), jnp.int32), jax.random.key(0), jnp.ones((512, 64))
    training = Training(step, args, donated=(0, 1))
    first, second, third = training.run(training.plain())
    assert first["[1]"] != second["[1]"] != third["[1]"] and first["[0]"] != second["[0]"]
    assert first["[2]['key']"] == jax.random.key_data(args[2]).tobytes()
    assert list(differing([first, first], [first, {**first, "[1]": b""}])) == ["step 2: [1]"]
    for found in compared("step", training):
        assert not found.unequal and found.outputs == 4 and found.percent >= found.asked


def test_marks_in_the_readme_are_needed():
    with pytest.raises(ValueError, match="put the two lines back"):
        table.inserted("no marks", "new")
