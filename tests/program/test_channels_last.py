"""Convolutions in loops, as XLA:CPU hands them to a library."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from memplan.program import compat
from memplan.program.interpret import interpret
from memplan.program.lowerable import channels_last
from tests.arrays import assert_close

Numbers = tuple[str, str, str]
FORMS: tuple[Numbers, ...] = (
    ("NCDHW", "OIDHW", "NCDHW"),
    ("NDHWC", "DHWIO", "NDHWC"),
    ("CDHWN", "IDHWO", "DHWNC"),
    ("DNHWC", "DOHWI", "CNDHW"),
)


def looped(numbers: Numbers, groups: int) -> tuple[compat.ClosedJaxpr, list[Any]]:
    """A convolution of three batches in a scan, with its gradients, sides all different."""
    random = np.random.default_rng(0)
    sizes = (
        {"N": 2, "C": 4, "D": 5, "H": 6, "W": 7},
        {"O": 6, "I": 4 // groups, "D": 3, "H": 2, "W": 1},
    )
    orders = zip(sizes, numbers, strict=False)
    shapes = [tuple(size_of[letter] for letter in order) for size_of, order in orders]
    x, kernel = (
        jnp.asarray(random.normal(size=shape), jnp.float32)
        for shape in ((3, *shapes[0]), shapes[1])
    )

    def convolved(x: Any, kernel: Any) -> Any:
        return lax.conv_general_dilated(
            x, kernel, (1, 2, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
        )

    def step(total: Any, x: Any) -> Any:
        loss, gradients = jax.value_and_grad(
            lambda *args: jnp.sin(convolved(*args)).sum(), argnums=(0, 1)
        )(x, kernel)
        return total + gradients[1], (loss, gradients[0])

    closed = jax.make_jaxpr(lambda x, kernel: lax.scan(step, jnp.zeros_like(kernel), x))(x, kernel)
    return closed, [x, kernel]


@pytest.mark.parametrize("numbers", FORMS)
@pytest.mark.parametrize("groups", [1, 2])
def test_numbers_stay(numbers: Numbers, groups: int) -> None:
    closed, args = looped(numbers, groups)
    results = interpret(channels_last(closed), args)
    assert_close(results, interpret(closed, args), rtol=1e-4, atol=1e-4)


def test_no_convolution_in_a_loop_is_left_to_be_made_element_by_element() -> None:
    """XLA wraps those into fusions."""
    closed, args = looped(("NDHWC", "DHWIO", "NDHWC"), 1)

    def wrapped(closed: compat.ClosedJaxpr) -> list[str]:
        text = jax.jit(compat.jaxpr_as_fun(closed)).lower(*args).compile().as_text()
        assert text is not None
        return re.findall(r"convolution\S* = .* fusion\(", text)

    assert wrapped(closed) and not wrapped(channels_last(closed))


def test_loops_in_a_shard_map_are_changed_and_the_rest_of_its_body_stays() -> None:
    closed, args = looped(("NCDHW", "OIDHW", "NCDHW"), 1)
    whole = PartitionSpec()
    mesh = AbstractMesh((1,), ("d",), axis_types=(AxisType.Auto,))
    convolution = partial(lax.conv, window_strides=(1, 1, 1), padding="SAME")
    x, kernel = args
    changed = []
    for function, args in (
        (compat.jaxpr_as_fun(closed), (x, kernel)),
        (convolution, (x[0], kernel)),
    ):
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False
        )
        plain = jax.make_jaxpr(mapped)(*args)
        changed.append(str(channels_last(plain)) != str(plain))
    assert changed == [True, False]


def test_what_is_in_no_loop_stays_as_it_is() -> None:
    x, kernel = jnp.ones((1, 3, 8, 8)), jnp.ones((2, 3, 3, 3))
    closed = jax.make_jaxpr(lambda x, kernel: lax.conv(x, kernel, (1, 1), "SAME"))(x, kernel)
    assert str(channels_last(closed)) == str(closed)
