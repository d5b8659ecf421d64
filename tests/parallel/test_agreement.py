"""Processes compare all that must be equal, and nothing that belongs to one process alone."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memplan
from memplan.errors import MemplanError
from memplan.parallel import agreement, meshes
from memplan.parallel.step import data_parallel
from memplan.program import compat
from memplan.program.trace import comparable, trace
from tests.parallel.printed import ROOT

Parts = dict[str, str]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[Parts]:
    """The parts that are compared, as if the mesh spanned several processes."""
    calls: list[Parts] = []
    monkeypatch.setattr(agreement, "_are_all", lambda processes: True)
    monkeypatch.setattr(
        agreement, "_refuse_differences", lambda step, parts: calls.append(dict(parts))
    )
    return calls


def regression(rate: float = 0.1, act: Callable[[Any], Any] = jnp.tanh, offset: Any = 0.0) -> Any:
    def step(state: Any, x: Any) -> Any:
        return {**state, "w": state["w"] - rate * act(x @ state["w"] + offset).mean()}

    return step


STATE = {"w": jnp.ones(3), "key": jax.random.key(0)}
X = np.ones((4, 3), np.float32)
DIVISION = compat.Division(2, None, (None, None, None), ())


def programs(compared: list[Parts], *steps: Any) -> list[Parts]:
    for step in steps:
        traced = trace(step, (STATE, X), {}, {})
        divided = replace(traced, traced=replace(traced.traced, division=DIVISION))
        agreement.same_step((0, 1), divided, {})
    return compared


def differing(first: Mapping[str, str], second: Mapping[str, str]) -> set[str]:
    return {name for name in first if first[name] != second[name]}


def test_nothing_is_compared_or_paid_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        agreement, "_refuse_differences", lambda step, parts: pytest.fail("compared")
    )
    step = data_parallel(regression(), meshes.mesh({"batch": 1}))
    memplan.jit(step).plan(step.place(STATE), step.assemble(X))


def test_the_same_step_made_again_is_the_same(compared: list[Parts]) -> None:
    first, second = programs(compared, regression(), regression())
    assert first == second


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        (regression(rate=0.2), "its equations"),
        (regression(act=jax.nn.relu), "its equations"),
        (regression(offset=np.float32(1.0)), "its equations"),
        (regression(offset=jnp.arange(4.0)), "the constants that it captures"),
    ],
    ids=["rate", "activation", "captured number", "captured array"],
)
def test_another_step_is_another(compared: list[Parts], changed: Any, part: str) -> None:
    plain, another = programs(compared, regression(), changed)
    assert part in differing(plain, another)


def test_captured_values_count(compared: list[Parts]) -> None:
    arrays = [jnp.array([1.0, 2.0, 3.0, value]) for value in (4.0, 4.0, 5.0)]
    first, same, last = programs(compared, *(regression(offset=array) for array in arrays))
    assert first == same and differing(first, last) == {"the constants that it captures"}


def test_state_is_compared_by_leaf(compared: list[Parts]) -> None:
    step = data_parallel(regression(), meshes.mesh({"batch": 1}))
    for seed in (0, 0, 1):
        step.place({"w": jnp.full(3, 1.0, jnp.bfloat16), "key": jax.random.key(seed)})
    types, values = compared[::2], compared[1::2]
    assert types[0] == types[1] == types[2]
    assert values[0] == values[1] and differing(values[0], values[2]) == {"state['key']"}


@pytest.mark.parametrize(
    ("texts", "odd"), [(["a", "a", "b"], "2"), (["b", "a", "a"], "0"), (["a", "b", "b"], "0")]
)
def test_the_ranks_that_differ_from_most_are_named(
    monkeypatch: pytest.MonkeyPatch, texts: list[str], odd: str
) -> None:
    def gathered(own: np.ndarray) -> np.ndarray:
        digest = agreement.hashlib.blake2b
        return np.array(
            [[list(digest(text.encode(), digest_size=16).digest())] for text in texts], np.uint8
        )

    monkeypatch.setattr(agreement.multihost_utils, "process_allgather", gathered)
    message = f"'step': its rate on rank {odd}. Here, on rank 0, its rate is: {texts[0]}"
    with pytest.raises(MemplanError, match=message):
        agreement._refuse_differences(regression(), {"its rate": texts[0]})


def test_what_belongs_to_one_process_is_left_out() -> None:
    text = "callback=<function f at {}> axes=frozenset({{{}}}) at {}:12"
    first = text.format("0x7f1", "'a', 'b'", "/home/one/t.py")
    assert comparable(first) == comparable(text.format("0x9e2", "'b', 'a'", "/srv/t.py"))
    assert comparable("mul 0.1") != comparable("mul 0.2")


FINGERPRINT = """
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_num_cpu_devices", 4)
from memplan.parallel import agreement, meshes
from memplan.parallel.step import data_parallel
from memplan.pipeline import best
from memplan.request import Request
agreement._are_all = lambda processes: True
agreement._refuse_differences = lambda step, parts: print(parts)
def step(state, x):
    def body(w, row):
        jax.debug.callback(print, w)
        return w - 0.1 * jax.nn.relu(row).sum() * jax.random.normal(jax.random.key(0)), None
    return jax.lax.scan(jax.checkpoint(body), state, x.reshape(2, -1))[0] + jnp.asarray(np.arange(3.0))
divided = data_parallel(step, meshes.mesh({"host": 2, "device": 2}))
best(divided, (jnp.ones(3), np.ones((8, 3), np.float32)), {}, {}, Request())
"""


def test_every_process_finds_the_same() -> None:
    """Regardless of addresses and the order of sets."""
    command, outputs = [sys.executable, "-c", FINGERPRINT], set[str]()
    options = {"cwd": ROOT, "capture_output": True, "text": True, "check": True, "timeout": 60}
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu", "PATH": ""}
        outputs.add(subprocess.run(command, env=environment, **options).stdout)
    assert len(outputs) == 1 and "callback" in outputs.pop()
