"""Flat jaxprs as graphs: ids, bytes and costs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memplan.program import compat
from memplan.program.flat import Flat

X, W = jax.ShapeDtypeStruct((2, 3), jnp.float32), jax.ShapeDtypeStruct((3, 3), jnp.float32)


def traced(function: Callable[..., Any], *args: Any) -> compat.ClosedJaxpr:
    return jax.make_jaxpr(function)(*args)


def test_values_are_inputs_constants_and_results_in_this_order() -> None:
    table = np.ones((3, 3), np.float32)
    closed = traced(lambda x, w: jnp.tanh(x @ w) @ table, X, W)
    graph = Flat(closed).graph
    names = ["x", "w", "constant:0", "dot_general:0", "tanh:0", "dot_general:0"]
    assert [value.name for value in graph.values] == names
    assert [value.nbytes for value in graph.values] == [24, 36, 36, 24, 24, 24]
    assert [var.aval.shape for var in Flat(closed).values] == [
        value.shape for value in graph.values
    ]
    assert [(op.name, op.inputs, op.outputs) for op in graph.ops] == [
        ("dot_general", (0, 1), (3,)), ("tanh", (3,), (4,)), ("dot_general", (4, 2), (5,)),
    ]  # fmt: skip


def test_operations_have_their_costs_and_lines() -> None:
    product, tanh = Flat(traced(lambda x, w: jnp.tanh(x @ w), X, W)).graph.ops
    assert product.flops == 2 * 2 * 3 * 3 and product.flops_dtype == "float32"
    assert product.recomputable and tanh.recomputable
    assert "test_flat.py:" in product.source


def test_literals_are_no_values() -> None:
    (op,) = Flat(traced(lambda x: x * 2.0, X)).graph.ops
    assert op.inputs == (0,)


def test_what_is_on_the_host_takes_no_bytes_of_the_device() -> None:
    graph = Flat(traced(lambda x: jax.device_put(x, jax.memory.Space.Host), X)).graph
    assert [value.nbytes for value in graph.values] == [24, 0]


def test_readers_count_an_equation_once() -> None:
    closed = traced(lambda x: (x * x, jnp.sin(x)), X)
    assert Flat(closed).readers == {closed.jaxpr.invars[0]: {0, 1}}
