"""The committed results belong to the cases, the README to the results, and every case can be traced."""

import json

import jax
import pytest

from experiments.budgets import table
from experiments.budgets.cases import CASES, OTHERS, REQUIRED, Case
from experiments.budgets.run import RESULTS, selected

PROGRAMS = {case.program.name: case.program for case in CASES.values()}


def test_cases_are_named_once_and_named_by_what_they_are():
    assert len(CASES) == len(REQUIRED) + len(OTHERS)
    assert len(OTHERS) >= 12
    assert all(0 < case.percent < 100 for case in CASES.values())


def test_selected_takes_beginnings_of_names_and_refuses_others():
    assert selected(None) == list(CASES.values())
    assert {case.program.name for case in selected(["mlp"])} == {"mlp_24"}
    with pytest.raises(SystemExit, match="no case begins with nothing"):
        selected(["nothing"])


@pytest.mark.parametrize("name", PROGRAMS)
def test_reduced_step_keeps_the_state(name: str):
    step, args = PROGRAMS[name].reduced()
    state, metrics = jax.eval_shape(step, *args)
    assert jax.tree.structure(state) == jax.tree.structure(args[0])
    assert metrics["loss"].shape == ()


@pytest.mark.parametrize("name", ["mlp_24", "unet3d_96_transpose"])
def test_arguments_at_full_size_are_shapes(name: str):
    _, args = PROGRAMS[name].make()
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args))


def test_readme_is_what_the_results_say():
    assert table.README.read_text() == table.regenerate()


def test_every_result_belongs_to_a_case():
    for path in RESULTS.glob("*.json"):
        found = json.loads(path.read_text())
        case = CASES[path.stem]
        assert isinstance(case, Case)
        assert (found["case"], found["device"], found["percent"]) == (case.name, case.device, case.percent)
        assert found["environment"]["jaxlib"]


def test_relative_tells_nothing_apart_below_a_mebibyte():
    assert table.relative(2**20 - 1, 0) == 0.0
    assert table.relative(11 * 2**20, 10 * 2**20) == pytest.approx(0.1)


def test_marks_in_the_readme_are_needed():
    with pytest.raises(ValueError, match="put the two lines back"):
        table.inserted("no marks", "new")
