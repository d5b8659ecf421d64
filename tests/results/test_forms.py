"""Each form of a step is a file: equations, transforms, module, kernels, bytes, decisions, written module, verdict."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import memplan
from tests.hlo import read_module

NAMES = (
    "program",
    "transforms",
    "module",
    "kernels",
    "liveness",
    "decisions",
    "written",
    "verdict",
)


def step(weights: Any, x: jax.Array) -> Any:
    def loss(weights: Any) -> jax.Array:
        hidden = x
        for weight in weights:
            hidden = jnp.tanh(hidden @ weight)
        return (hidden**2).mean()

    return jax.tree.map(
        lambda weight, slope: weight - 0.1 * slope, weights, jax.grad(loss)(weights)
    )


ARGS = [jnp.ones((64, 64))] * 6, jnp.ones((1024, 64))


def planned(share: float, **options: Any) -> Any:
    plain = memplan.jit(step).plan(*ARGS).report.compiled_peak_bytes
    assert plain is not None
    return memplan.jit(step, budget=int(share * plain), **options).plan(*ARGS)


def texts(files: Any) -> dict[str, str]:
    return {re.sub(r"^\d-", "", file.stem): file.read_text() for file in files}


def test_forms_of_a_planned_step(tmp_path: Path) -> None:
    plan = planned(0.85, split=False)
    files = plan.dump(tmp_path / "new" / "folder")
    assert [file.name for file in files] == [f"{n}-{name}.txt" for n, name in enumerate(NAMES, 1)]
    forms = texts(files)
    assert "tanh" in forms["program"] and "No transform" in forms["transforms"]
    module, written = read_module(forms["module"]), read_module(forms["written"])
    outcome = plan._outcome.planned
    assert [*module.instructions] == [*outcome.plain.module.instructions]
    assert [*written.instructions] == [*outcome.result.module.instructions]
    for kernel in outcome.base.problem.kernels:
        assert f" {kernel.name}  " in forms["kernels"]
    assert "test_forms.py:" in forms["kernels"]
    assert forms["decisions"].count("recompute") == plan.report.recomputations_found > 0
    assert (
        "as XLA scheduled the step" in forms["liveness"]
        and "as it was planned" in forms["liveness"]
    )
    assert re.search(r"^fits +yes$", forms["verdict"], re.MULTILINE)
    assert "computes an expression" in forms["verdict"]


def test_forms_of_a_step_that_fits(tmp_path: Path) -> None:
    forms = texts(memplan.jit(step).plan(*ARGS).dump(tmp_path))
    assert forms["module"] == forms["written"]
    assert "No plan" in forms["decisions"] and "unmodified" in forms["verdict"]
    assert "as it was planned" not in forms["liveness"]


def test_forms_of_a_transformed_step(tmp_path: Path) -> None:
    plan = planned(0.6)
    assert plan.report.slab_loops
    forms = texts(plan.dump(tmp_path))
    assert "slabs: Slabs(" in forms["transforms"]
    assert "scan" in forms["transforms"] and "scan" not in forms["program"]
    assert 'verify="numbers"' in forms["verdict"] and "not chosen: " in forms["verdict"]


def test_an_environment_variable_dumps_every_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMPLAN_DUMP", str(tmp_path))
    for rows in (8, 16):
        memplan.jit(step).plan(ARGS[0], jnp.ones((rows, 64)))
    folders = sorted(tmp_path.iterdir())
    assert len(folders) == 2 and all(folder.name.endswith("-step") for folder in folders)
    assert all(len(list(folder.iterdir())) == len(NAMES) for folder in folders)
