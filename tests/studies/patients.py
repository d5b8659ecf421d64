"""Steps with a planted fault, and the same steps without it, for the doctor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.xla.steps import array

WIDTH, ROWS, LAYERS, WORDS = 512, 1024, 3, 1536
HALF = jnp.bfloat16
TABLE = np.cos(np.arange(ROWS * WIDTH, dtype=np.float32)).reshape(ROWS, WIDTH)
LISTED = [
    np.sin(np.arange(WIDTH * WIDTH, dtype=np.float32) + n).reshape(WIDTH, WIDTH)
    for n in range(LAYERS)
]

Step = Callable[..., Any]


def weights(layers: int = LAYERS, dtype: Any = jnp.float32) -> list[jax.ShapeDtypeStruct]:
    return [array(WIDTH, WIDTH, dtype=dtype)] * layers


X = array(ROWS, WIDTH)


@dataclass(frozen=True)
class Patient:
    """A step with a fault, its kind of finding, and the step without the fault."""

    kind: str
    step: Step
    args: Sequence[Any]
    cured: Step
    cured_args: Sequence[Any]
    # arguments that they donate
    donated: tuple[int, ...] = (0,)
    cured_donated: tuple[int, ...] = (0,)
    mark: str = ""  # stands in the line with the fault


def network(params: Any, x: jax.Array) -> jax.Array:
    for weight in params:
        x = jnp.tanh(x @ weight)  # a layer
    return x


def descend(params: Any, gradient: Any) -> Any:
    return jax.tree.map(lambda weight, slope: weight - 0.1 * slope, params, gradient)


def train(params: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    def loss(params: Any) -> jax.Array:
        return ((network(params, x) - y) ** 2).mean()  # the loss

    value, gradient = jax.value_and_grad(loss)(params)
    return descend(params, gradient), value


def with_momentum(
    params: Any, momentum: Any, x: jax.Array, y: jax.Array
) -> tuple[Any, Any, jax.Array]:
    value, gradient = jax.value_and_grad(lambda params: ((network(params, x) - y) ** 2).mean())(
        params
    )
    momentum = jax.tree.map(lambda old, slope: 0.9 * old + slope, momentum, gradient)
    return descend(params, momentum), momentum, value


def with_state(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    params, momentum, value = with_momentum(*state, x, y)
    return (params, momentum), value


def closing_over_a_table(params: Any, x: jax.Array) -> Any:
    return train(params, x, TABLE)


def closing_over_weights(x: jax.Array) -> Any:
    return network(LISTED, x).mean()


def folding(params: Any, x: jax.Array) -> Any:
    y = jnp.asarray(TABLE)[: ROWS - 8].astype(HALF)
    return jnp.tanh(network(params, x)[: ROWS - 8].astype(HALF) + y)  # what is folded


def one_hot_rows(weight: Any, x: jax.Array) -> Any:
    rows = jax.nn.one_hot(jnp.arange(ROWS) % 7, WIDTH)  # the rows
    hidden = jnp.tanh(x @ weight)
    return weight - 0.1 * (hidden.T @ rows), (rows.T @ hidden).sum()


def with_logits(params: Any, head: jax.Array, x: jax.Array, y: jax.Array) -> Any:
    params, value = train(params, x, y)
    logits = network(params, x) @ head  # the logits
    return params, {"loss": value, "logits": logits}


def without_logits(params: Any, head: jax.Array, x: jax.Array, y: jax.Array) -> Any:
    params, value = train(params, x, y)
    return params, {"loss": value}


WIDE = array(ROWS, WIDTH, dtype=jnp.float64)
