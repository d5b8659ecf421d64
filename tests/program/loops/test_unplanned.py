"""What crosses a boundary and stays as the user wrote it, with the reason."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memplan.program.loops.unplanned import Unplanned, unplanned
from memplan.program.trace import trace
from tests.program.boundaries import STEPS, scanned, trained
from tests.program.scans import traced_step

Step = Callable[..., Any]
WS, X = trained(scanned)[1]
STACK = WS.shape[0] * X.nbytes


def rows(step: Step) -> list[Unplanned]:
    return unplanned(trace(step, (WS, X), {}, {}))


@pytest.mark.parametrize("name", STEPS)
def test_what_is_planned_is_no_row(name: str) -> None:
    assert not unplanned(traced_step(STEPS[name])[0])


def test_a_gradient_in_a_branch_leaves_the_stacks_of_a_loop_outside() -> None:
    def step(ws: Any, x: Any) -> Any:
        y, pull = jax.vjp(lambda ws: scanned(ws, x), ws)
        return jax.lax.cond(jnp.isfinite(y).all(), lambda: pull(y)[0], lambda: jnp.zeros_like(ws))

    (row,) = rows(step)
    assert (row.kind, row.may_checkpoint) == ("scan", True)
    assert row.nbytes % STACK == 0 and row.nbytes >= STACK
    assert "test_unplanned.py" in row.reason and row.reason.startswith("cond")
    assert row.reason.endswith("reads them, which runs other bodies")


@pytest.mark.parametrize("has_effect", [False, True])
def test_what_runs_once_is_no_residual_to_compute_again(has_effect: bool) -> None:
    def sine(x: Any) -> Any:
        call = jax.experimental.io_callback if has_effect else jax.pure_callback
        return call(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.stop_gradient(x))

    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(sine(x) * (x @ w)), None

    def step(ws: Any, x: Any) -> Any:
        return jax.grad(lambda ws: jnp.square(jax.lax.scan(layer, x, ws)[0]).sum())(ws)

    (row,) = rows(step)
    assert row.kind == "scan" and row.nbytes == STACK
    assert "callback" in row.reason and row.reason.endswith("makes them, which runs once")
    assert row.may_checkpoint != has_effect


def test_a_stack_that_the_step_itself_reads_is_no_row() -> None:
    def step(ws: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            y = jnp.tanh(x @ w)
            return y, y

        def loss(ws: Any) -> Any:
            _, ys = jax.lax.scan(layer, x, ws)
            return jax.lax.cond(ws[0, 0, 0] > 0, lambda: jnp.sin(ys).sum(), lambda: 0.0) + ys.sum()

        return jax.grad(loss)(ws)

    assert not rows(step)
