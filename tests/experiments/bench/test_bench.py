"""The committed results match the cases, the README matches the results; what is remeasured."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from experiments.bench import __main__, questions, results, runner, tables
from experiments.bench.cases import Case, by_name
from experiments.bench.questions import QUESTIONS, Question, all_tables
from experiments.bench.results import Measurement, Result, measured_here, source_here, stored_result
from experiments.bench.tables import Column, Rows, mib, ms, table
from memplan.hardware import catalog

CASES = [(question, case) for question in QUESTIONS.values() for case in question.cases.values()]


def test_readme_is_what_the_results_say() -> None:
    text = tables.README.read_text()
    assert text == tables.regenerated(all_tables(), text)


def test_every_question_has_a_section() -> None:
    text = tables.README.read_text()
    assert all(text.count(f"<!-- {name} -->") == 1 for name in QUESTIONS)


def test_every_result_belongs_to_a_case() -> None:
    stored = {
        path.relative_to(results.RESULTS).with_suffix("")
        for path in results.RESULTS.rglob("*.json")
    }
    assert stored and stored <= {Path(question.name) / case.name for question, case in CASES}


@pytest.mark.parametrize("name", QUESTIONS)
def test_results_are_of_their_case_and_none_failed(name: str) -> None:
    for result in QUESTIONS[name].results():
        assert (
            result.path == results.RESULTS / name / f"{result.case}.json" and result.path.exists()
        )
        assert result.status != "failed" and result.rows and len(result.source) == 12


@pytest.mark.parametrize("name", QUESTIONS)
def test_what_fits_is_within_its_budget(name: str) -> None:
    rows = [
        row for row in QUESTIONS[name].rows() if row["status"] == "fits" and "budget_bytes" in row
    ]
    assert all(row["compiled_bytes"] <= row["budget_bytes"] for row in rows)


def test_cases_name_devices_that_there_are() -> None:
    assert all(catalog.named(case.device).target is not None for _, case in CASES if case.device)
    assert all("/" not in case.name for _, case in CASES)


def test_the_readme_of_the_project_quotes_twelve_cases() -> None:
    required = [case for case in QUESTIONS["budgets"].cases.values() if case.facts.get("required")]
    assert len(required) == 12


@pytest.mark.parametrize(
    "name", ["mlp_24-b200-70", "unet3d_96_transpose-a100-50", "decoder_8_scan-a100-95"]
)
def test_arguments_are_shapes_and_the_step_keeps_the_state(name: str) -> None:
    step, args, donated = QUESTIONS["budgets"].cases[name].built()
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args))
    state, metrics = jax.eval_shape(step, *args)
    assert donated == (0,) and jax.tree.structure(state) == jax.tree.structure(args[0])
    assert metrics["loss"].shape == ()


# What is measured, and what is skipped.


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Question:
    """Three cases, each asked only if the previous one does not fit; results go to `tmp_path`."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    step = lambda: None  # noqa: E731
    cases = [
        Case("50", step),
        Case("60", step, after=("50", False)),
        Case("75", step, after=("60", False)),
    ]

    def view(rows: Rows) -> str:
        return table([Column("case", "case"), Column("ms", "step_s", "{:.1f}", 1e-3)], rows)

    return Question(
        "toy", by_name(cases), lambda case: Measurement([{"step_s": 0.5}], "fits"), view
    )


def keep(case: str, status: str = "fits", **more: Any) -> Result:
    result = replace(
        measured_here("toy", case, Measurement([{"step_s": 0.5}], status), results.SOURCES), **more
    )
    result.keep()
    return result


def names(question: Question, **how: bool) -> list[str]:
    missing = runner.missing(
        question, question.cases.values(), **({"force": False, "keep": False} | how)
    )
    return [case.name for case in missing]


def test_a_result_comes_back_from_its_file(toy: Question) -> None:
    kept, stored = keep("50"), stored_result("toy", "50")
    assert stored is not None and stored_result("toy", "60") is None
    assert replace(stored, rows=()) == replace(kept, rows=()) and [*stored.rows] == [*kept.rows]
    assert json.loads(kept.path.read_text())["versions"]["jax"] == jax.__version__


def test_only_what_another_source_or_package_measured_is_measured_again(toy: Question) -> None:
    assert names(toy) == ["50"]
    today = keep("50")
    assert today.source == source_here() and names(toy) == []
    assert names(toy, force=True) == ["50"]
    for stale in ({"source": "another"}, {"versions": {**today.versions, "jax": "0.1"}}):
        keep("50", **stale)
        assert names(toy) == ["50"] and names(toy, keep=True) == []


def test_a_case_waits_for_the_one_before_it(toy: Question) -> None:
    keep("50", "does not fit")
    assert names(toy) == ["60"]
    keep("60")
    keep("75")  # of an earlier planner
    assert names(toy) == [] and [row["case"] for row in toy.rows()] == ["50", "60"]
    keep("50", "failed")
    assert [row["case"] for row in toy.rows()] == ["50"]
    larger = replace(
        toy, cases=by_name([toy.cases["50"], Case("more", lambda: None, after=("50", True))])
    )
    assert not larger.asks(larger.cases["more"])
    keep("50")
    assert larger.asks(larger.cases["more"])


def test_tables_say_what_is_not_measured_and_what_measured(toy: Question) -> None:
    assert toy.tables() == "Not measured: 50."
    keep("50", "does not fit", source="0123456789ab", versions={"jax": "1"}, hardware="a machine")
    assert toy.tables().splitlines() == [
        "| case | ms |", "|---|---|", "| 50 | 500.0 |", "", "Not measured: 60.", "",
        "Measured by memplan 0123456789ab with jax 1, a machine.",
    ]  # fmt: skip


def test_a_case_runs_in_a_process_of_its_own_and_one_that_fails_says_why() -> None:
    question = replace(QUESTIONS["overhead"], name="overhead")
    done = runner.apart(question, Case("no such case", lambda: None))
    assert (done.question, done.case, done.status) == ("overhead", "no such case", "failed")
    assert "KeyError" in done.reason and not done.rows
    late = runner.apart(question, question.cases["first_call"], minutes=0.001)
    assert late.status == "failed" and "was not ready after 0.001 minutes" in late.reason


# The command line.


def test_it_measures_what_is_missing(
    toy: Question,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(QUESTIONS, "toy", toy)
    monkeypatch.setattr(
        __main__, "apart", lambda question, case, minutes: runner.alone(question, case)
    )
    monkeypatch.setattr(tables, "README", tmp_path / "README.md")
    tables.README.write_text("".join(f"<!-- {name} -->\n<!-- end -->\n" for name in QUESTIONS))
    assert __main__.main(["toy"]) == 0
    assert capsys.readouterr().out == "toy 50: fits, step_s 0.5\n"
    assert "| 50 | 500.0 |" in tables.README.read_text()
    assert __main__.main(["toy"]) == 0 and capsys.readouterr().out == ""
    assert __main__.main(["toy", "--alone", "60"]) == 0
    assert Result(**json.loads(capsys.readouterr().out)).rows == [{"step_s": 0.5}]


def test_a_question_of_another_jax_is_not_asked(toy: Question, monkeypatch, capsys) -> None:
    monkeypatch.setitem(QUESTIONS, "toy", replace(toy, jax="0.1."))
    monkeypatch.setattr(tables, "rewrite", lambda tables: pytest.fail("nothing was measured"))
    assert __main__.main(["toy"]) == 0
    assert "toy: is asked of jax 0.1.; installed is" in capsys.readouterr().out


def test_it_lists_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["size", "--list"]) == 0
    assert capsys.readouterr().out.split() == [
        word for name in QUESTIONS["size"].cases for word in ("size", name)
    ]
    with pytest.raises(SystemExit, match="nothing begins with something"):
        __main__.main(["size", "--only", "something"])
    with pytest.raises(SystemExit):
        __main__.main(["nothing"])
    assert "'nothing' is none of budgets" in capsys.readouterr().err


def test_a_missing_clone_ends_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert __main__.main(["public", "--checkouts", str(tmp_path / "nowhere")]) == 1
    assert "is not a folder" in capsys.readouterr().err


# Tables.


def test_columns_are_names_or_functions_with_units() -> None:
    columns = [
        Column("name", "name"),
        mib("MiB", "nbytes"),
        ms("ms", lambda row: row["s"]),
        Column("none", "lost"),
    ]
    assert table(columns, [{"name": "a", "nbytes": 3 * 2**20, "s": 0.0125}]).splitlines() == [
        "| name | MiB | ms | none |", "|---|---|---|---|", "| a | 3 | 12.5 |  |",
    ]  # fmt: skip


def test_marks_in_the_readme_are_needed() -> None:
    with pytest.raises(ValueError, match="put the two lines back"):
        tables.regenerated({"budgets": ""}, "no marks")


def test_sources_of_public_steps_are_theirs() -> None:
    files = {
        path.name for pattern in QUESTIONS["public"].sources for path in results.ROOT.glob(pattern)
    }
    assert {"pipeline.py", "checkouts.py", "steps.py", "haiku_steps.py"} <= files
    assert not {"cases.py", "resnet.py"} & files
    assert questions.QUESTIONS["budgets"].sources == results.SOURCES
