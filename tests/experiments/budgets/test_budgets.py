"""The committed results belong to the cases, the README to the results, and every case can be traced."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from experiments.budgets import run, table
from experiments.budgets.cases import CASES, OTHERS, REQUIRED
from experiments.budgets.numbers import MODELS, NUMBERS
from experiments.budgets.rows import Row, Rows, former, summary
from experiments.budgets.run import BEFORE, RESULTS, selected

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
    assert selected(None) == list(CASES.values())
    assert {case.program.name for case in selected(["mlp"])} == {"mlp_24"}
    with pytest.raises(SystemExit, match="no case begins with nothing"):
        selected(["nothing"])


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
    names = [path.stem for path in RESULTS.folder.glob("*.json")]
    assert {row.name: row.device for row in RESULTS.all(names)} == {name: CASES[name].device for name in names}
    assert all(row.environment["jaxlib"] for row in RESULTS.all(names))


def test_every_case_is_known_of_the_former_version():
    before = former(BEFORE)
    assert set(before) == set(CASES)
    assert all(row.fits and row.step_s for row in before.values())


def test_bits_that_were_compared_are_equal():
    rows = json.loads(NUMBERS.read_text())["rows"]
    assert rows and {row["name"] for row in rows} <= set(MODELS)
    assert not [row for row in rows if row["unequal"] or not row["outputs"]]


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


def test_only_rows_of_another_version_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run, "RESULTS", Rows(tmp_path))
    monkeypatch.setattr(run, "version_here", lambda: "2")
    old, new, none = cases = selected(["unet3d_144-v100"])
    run.RESULTS.keep(replace(ROW, name=old.name, version="1"))
    run.RESULTS.keep(replace(ROW, name=new.name, version="2"))
    assert list(run.missing(cases, force=False, keep=False)) == [old, none]
    assert list(run.missing(cases, force=False, keep=True)) == [none]
    assert list(run.missing(cases, force=True, keep=False)) == cases


def test_marks_in_the_readme_are_needed():
    with pytest.raises(ValueError, match="put the two lines back"):
        table.inserted("no marks", "new")
