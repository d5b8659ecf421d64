"""Steps made of layers, optimizers and losses of libraries: rows of the report name the user's lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

from tests.cases.within_share import Made, Make, normal, within_share

WIDTH, ROWS = 32, 2048


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        y = nn.LayerNorm()(x)
        return x + jnp.tanh(nn.Dense(WIDTH)(y)), None


def linen_in_a_scan() -> Made:
    """Layers by `nn.scan` and `nn.remat`, whose code calls the user's block from within flax; a `TrainState`."""
    layers = nn.scan(
        nn.remat(Block, prevent_cse=False),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=4,
    )()
    x = normal(ROWS, WIDTH, seed=9)
    params = jax.jit(layers.init)(jax.random.key(0), x[:1], None)
    state = TrainState.create(apply_fn=layers.apply, params=params, tx=optax.sgd(0.1))

    def step(state: Any, x: jax.Array) -> Any:
        loss = lambda params: (state.apply_fn(params, x, None)[0] ** 2).mean()  # noqa: E731
        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    return step, (state, x)


def equinox_under_vmap() -> Made:
    """A model of equinox for one sample, under `vmap`, with its filtered gradient; an optimizer with a schedule."""
    model = eqx.nn.MLP(WIDTH, WIDTH, WIDTH, 3, jax.nn.silu, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_array)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(1e-3, 9))
    )

    def step(state: Any, x: jax.Array) -> Any:
        params, moments = state

        def loss(params: Any) -> jax.Array:
            return (jax.vmap(eqx.combine(params, static))(x) ** 2).mean()

        value, gradients = eqx.filter_value_and_grad(loss)(params)
        updates, moments = optimizer.update(gradients, moments)
        return (eqx.apply_updates(params, updates), moments), value

    return step, ((params, optimizer.init(params)), normal(ROWS, WIDTH, seed=9))


def wide_optimizer() -> Made:
    """What is large is the optimizer's: a hand-written line calls it all."""
    optimizer = optax.lamb(1e-3)

    def step(state: Any, gradients: Any) -> Any:
        weights, moments = state
        noisy = jax.tree.map(lambda gradient: jnp.tanh(gradient @ gradient), gradients)
        updates, moments = optimizer.update(noisy, moments, weights)
        return optax.apply_updates(weights, updates), moments

    weights = [normal(128, 128, seed=layer) for layer in range(4)]
    return step, ((weights, optimizer.init(weights)), weights)


def loss_of_a_library() -> Made:
    """One line calls a loss with a loop, whose body has no line of the user's."""
    labels = jnp.asarray(abs(normal(8, 16)) * 3, jnp.int32)
    step = jax.value_and_grad(lambda *args: optax.ctc_loss(*args).mean())
    return step, (normal(8, 64, 16), jnp.zeros((8, 64)), labels, jnp.zeros((8, 16)))


def sources(share: float, make: Make, **options: Any) -> set[str]:
    """Files of what the rows of its report are about; large arrays all have a line."""
    report = within_share(share, *make(), **options).planned.report
    values = [*report.decisions, *(row for row in report.live_at_peak if row.source != "argument")]
    lines = [value.source for value in values if value.nbytes > 4096]
    assert lines and all(lines)
    lines += [row.source for row in (*report.slab_loops, *report.unsplit)]
    return {line.rpartition(":")[0] for line in lines}


@pytest.mark.parametrize(
    ("make", "share", "split"),
    [
        pytest.param(linen_in_a_scan, 0.75, False, marks=pytest.mark.slow),
        (equinox_under_vmap, 0.6, "auto"),
        (wide_optimizer, 0.9, "auto"),
        pytest.param(loss_of_a_library, 0.75, False, marks=pytest.mark.slow),
    ],
)
def test_rows_name_the_users_lines(make: Make, share: float, split: Any) -> None:
    assert sources(share, make, split=split) == {"tests/cases/test_library_lines.py"}


def test_rows_of_a_step_without_a_line_of_the_users_name_the_library() -> None:
    step = jax.vmap(jax.value_and_grad(optax.losses.poly_loss_cross_entropy))
    files = sources(0.8, lambda: (step, (normal(4096, 64), abs(normal(4096, 64, seed=1)))))
    assert {Path(file).absolute().parent for file in files} == {
        Path(optax.__file__).absolute().parent / "losses"
    }
