"""What is told of a step, its values and its rows: all of what counts, and nothing of one process alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memplan.parallel import agreement, meshes
from memplan.parallel.runtime import cluster
from memplan.parallel.runtime.comparison import PROGRAM, ROWS, VALUES, Submission
from memplan.parallel.step import data_parallel


class Told:
    """In the place of what would be told to rank 0 and waited for."""

    def __init__(self) -> None:
        self.said: list[Submission] = []
        self.submit_values = self.submit_program = self.submit_rows = self.said.append

    def digests(self, kind: str) -> list[str]:
        return [one.digest for one in self.said if one.kind == kind]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """As if the mesh were of two processes."""
    monkeypatch.setattr(cluster, "submissions", here := Told())
    monkeypatch.setattr(agreement, "_among", lambda mesh: (0, 1))
    monkeypatch.setattr(agreement, "_compared", {})
    return here


def regression(rate: float = 0.1, act: Callable[[Any], Any] = jnp.tanh, offset: Any = 0.0) -> Any:
    def step(state: Any, x: Any) -> Any:
        return {**state, "w": state["w"] - rate * act(x @ state["w"] + offset).mean()}

    return step


STATE = {"w": jnp.ones(3), "key": jax.random.key(0)}
X = np.ones((4, 3), np.float32)


def programs(told: Told, *steps: Any) -> list[str]:
    for step in steps:
        data_parallel(step, meshes.mesh({"batch": 1})).divided((STATE, X))
    return told.digests(PROGRAM)


def test_alone_nothing_is_told_or_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "submissions", told := Told())
    step = data_parallel(regression(), meshes.mesh({"batch": 1}))
    step.divided((step.place(STATE), step.assemble(X)))
    assert not told.said


def test_the_same_step_made_again_is_the_same(told: Told) -> None:
    one, other = programs(told, regression(), regression())
    assert one == other


@pytest.mark.parametrize(
    "other",
    [
        regression(rate=0.2),
        regression(act=jax.nn.relu),
        regression(offset=jnp.arange(4.0)),
        regression(offset=np.float32(1.0)),
    ],
    ids=["rate", "activation", "captured array", "captured number"],
)
def test_another_step_is_another(told: Told, other: Any) -> None:
    one, another = programs(told, regression(), other)
    assert one != another


def test_captured_values_count(told: Told) -> None:
    arrays = [jnp.array([1.0, 2.0, 3.0, value]) for value in (4.0, 4.0, 5.0)]
    one, same, other = programs(told, *(regression(offset=array) for array in arrays))
    assert one == same != other


def test_values_are_told_by_leaf_and_only_the_first_few_times(told: Told) -> None:
    step = data_parallel(regression(), meshes.mesh({"batch": 1}))
    for seed in range(7):
        step.place({"w": jnp.full(3, 1.0, jnp.bfloat16), "key": jax.random.key(seed)})
    assert len(set(told.digests(VALUES))) == len(told.digests(VALUES)) == agreement.COMPARED


def test_rows_are_told_by_shape_and_type(told: Told) -> None:
    step = data_parallel(regression(), meshes.mesh({"batch": 1}))
    for batch in (X, 2 * X, X[:3], X.astype(np.float16)):
        step.assemble(batch)
    one, same, fewer, other = told.digests(ROWS)
    assert one == same and len({one, fewer, other}) == 3


def test_what_differs_between_like_processes_is_left_out() -> None:
    texts = [
        f"callback=<function f at {address}> axes=frozenset({{{names}}}) at {path}:12"
        for address, names, path in (("0x7f1", "'a', 'b'", "/home/one/t.py"), ("0x9e2", "'b', 'a'", "/srv/t.py"))
    ]
    assert agreement._plain(texts[0]) == agreement._plain(texts[1])
    assert agreement._plain("mul 0.1") != agreement._plain("mul 0.2")


FINGERPRINT = """
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_num_cpu_devices", 4)
from memplan.parallel import agreement, meshes
from memplan.parallel.runtime import cluster
from memplan.parallel.step import data_parallel
agreement._among = lambda mesh: (0, 1)
cluster.submissions.submit_program = lambda one: print(one.digest)
def step(state, x):
    def body(w, row):
        jax.debug.callback(print, w)
        return w - 0.1 * jax.nn.relu(row).sum() * jax.random.normal(jax.random.key(0)), None
    return jax.lax.scan(jax.checkpoint(body), state, x.reshape(2, -1))[0] + jnp.asarray(np.arange(3.0))
data_parallel(step, meshes.mesh({"host": 2, "device": 2})).divided((jnp.ones(3), np.ones((8, 3), np.float32)))
"""


def test_every_process_finds_the_same() -> None:
    """Whatever its order of sets and its addresses."""
    found = {
        subprocess.run(
            [sys.executable, "-c", FINGERPRINT],
            cwd=Path(__file__).parents[2],
            env={"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu", "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1 and len(found.pop()) > 30
