"""A step that calls Python runs in slabs, and calls it once, in order."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import memplan

Call = Callable[[Callable[..., None], jax.Array], None]

CALLS: dict[str, Call] = {
    "jax.debug.callback": jax.debug.callback,
    "jax.debug.callback, ordered": lambda tell, x: jax.debug.callback(tell, x, ordered=True),
    "io_callback": lambda tell, x: io_callback(tell, None, x),
    "io_callback, ordered": lambda tell, x: io_callback(tell, None, x, ordered=True),
}


def arguments() -> tuple[list[jax.Array], jax.Array]:
    key = jax.random.key(0)
    weights = [
        jax.random.normal(jax.random.fold_in(key, layer), (32, 32)) / 6 for layer in range(4)
    ]
    return weights, jax.random.normal(key, (4000, 32))


def step_that(tells: Callable[[str, jax.Array], None]) -> Callable[..., Any]:
    """Tells the loss, then what is known before it, then a norm of the gradients, then what is known at once."""

    def step(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> Any:
            y, means = x, []
            for w in weights:
                y = jnp.tanh(y @ w)
                means.append(y.mean())
            return (y * y).mean(), means

        (value, means), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
        tells("loss", value)
        for layer, mean in enumerate(means):
            tells(f"mean {layer}", mean)
        tells("norm", sum((gradient * gradient).sum() for gradient in gradients))
        tells("weights", weights[0].sum())
        return jax.tree.map(lambda w, gradient: w - 0.1 * gradient, weights, gradients), value

    return step


@pytest.mark.parametrize(
    "call",
    [
        "jax.debug.callback, ordered",
        "io_callback",
        *(
            pytest.param(call, marks=pytest.mark.slow)
            for call in ("jax.debug.callback", "io_callback, ordered")
        ),
    ],
)
def test_every_effect_happens_once_and_in_order(call: str) -> None:
    calls: list[tuple[str, float]] = []
    step = step_that(lambda name, x: CALLS[call](lambda y: calls.append((name, float(y))), x))

    def heard(run: Callable[..., Any]) -> list[tuple[str, float]]:
        jax.block_until_ready(run(*arguments()))
        jax.effects_barrier()
        heard_calls, calls[:] = list(calls), []
        return heard_calls if "ordered" in call else sorted(heard_calls)

    plain = memplan.jit(step).plan(*arguments())
    planned = memplan.jit(step, budget=int(0.4 * plain.report.baseline_peak_bytes)).plan(
        *arguments()
    )
    assert planned.report.slab_loops and not calls
    expected, in_slabs = heard(jax.jit(step)), heard(planned.compile())
    assert [name for name, _ in in_slabs] == [name for name, _ in expected]
    np.testing.assert_allclose(
        [x for _, x in in_slabs], [x for _, x in expected], rtol=1e-5, atol=1e-8
    )


def test_an_effect_that_keeps_an_array_whole_is_named() -> None:
    def step(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            y = x
            for w in weights:
                y = jnp.tanh(y @ w)
                jax.debug.callback(lambda y: None, y)
            return (y * y).mean()

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, gradient: w - 0.1 * gradient, weights, gradients), value

    nbytes = memplan.jit(step).plan(*arguments()).report.baseline_peak_bytes
    with pytest.raises(
        memplan.InfeasibleBudgetError,
        match=r"; debug_callback \(.*test_effects.py:\d+\) cannot run in",
    ):
        memplan.jit(step, budget=int(0.4 * nbytes)).plan(*arguments())
