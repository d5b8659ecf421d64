"""Convolutions differentiated twice, in slabs. One that XLA cannot compile ends the process: they have their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.cases.within_share import Made, assert_same, descended, normal, within_share

LAYOUTS = {1: ("NHC", "HIO", "NHC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}


def conv(x: jax.Array, kernel: jax.Array, stride: int = 1, **options: Any) -> jax.Array:
    rank = x.ndim - 2
    return lax.conv_general_dilated(
        x, kernel, (stride,) * rank, "SAME", dimension_numbers=LAYOUTS[rank], **options
    )


def trained(loss: Callable[..., jax.Array], kernels: Any, x: jax.Array) -> Made:
    def step(kernels: Any, x: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(kernels, x)
        return descended(kernels, gradients), value

    return step, (kernels, x)


def gradient_norm(score: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Of every sample by itself."""
    slopes = jax.vmap(jax.grad(lambda sample: score(sample[None]).sum()))(x)
    return jnp.sqrt((slopes**2).reshape(len(x), -1).sum(1) + 1e-6)


def penalized_sound() -> Made:
    """A critic of sound with strides, whose gradient is to have norm one."""

    def score(kernels: Any, x: jax.Array) -> jax.Array:
        for kernel in kernels:
            x = jax.nn.leaky_relu(conv(x, kernel, 2), 0.2)
        return x.mean((1, 2))

    def loss(kernels: Any, x: jax.Array) -> jax.Array:
        return (
            score(kernels, x).mean() + ((gradient_norm(partial(score, kernels), x) - 1) ** 2).mean()
        )

    kernels = [normal(9, 2, 8, scale=0.3), normal(9, 8, 8, seed=1, scale=0.2)]
    return trained(loss, kernels, normal(4, 512, 2, seed=9))


def kernels_larger_than_images() -> Made:
    """Images of few rows and many columns, kernels of more rows than those, dilated; curvature along the gradient."""

    def loss(kernels: Any, x: jax.Array) -> jax.Array:
        def score(x: jax.Array) -> jax.Array:
            return (jnp.tanh(conv(x, kernels[0], rhs_dilation=(2, 1))) ** 2).mean()

        slope = jax.grad(score)(x)
        return score(x) + (jax.jvp(jax.grad(score), (x,), (slope,))[1] ** 2).sum()

    return trained(loss, [normal(5, 3, 2, 8, scale=0.3)], normal(8, 3, 128, 2, seed=9))


def clipped_by_sample() -> Made:
    """Gradients of each sample, clipped and summed, of grouped convolutions: `vmap` makes more groups of them."""

    def step(kernels: Any, x: jax.Array) -> Any:
        def loss(kernels: Any, sample: jax.Array) -> jax.Array:
            y = jax.nn.gelu(conv(sample[None], kernels[0], feature_group_count=4))
            return (conv(y, kernels[1], 2) ** 2).mean()

        gradients = jax.vmap(jax.grad(loss), (None, 0))(kernels, x)
        norms = jnp.sqrt(sum((gradient.reshape(len(x), -1) ** 2).sum(1) for gradient in gradients))
        summed = [jnp.tensordot(jnp.minimum(1, 0.1 / norms), gradient, 1) for gradient in gradients]
        return descended(kernels, summed), norms

    return step, (
        [normal(3, 3, 1, 8, scale=0.3), normal(2, 2, 8, 4, seed=1, scale=0.2)],
        normal(6, 32, 32, 4, seed=9),
    )


def pulled_apart_volumes() -> Made:
    """A generator by transposed convolutions of volumes, with a penalty on the length of its path."""

    def loss(kernels: Any, z: jax.Array) -> jax.Array:
        def made(z: jax.Array) -> jax.Array:
            for kernel in kernels:
                up = lax.conv_transpose(z, kernel, (2, 2, 2), "SAME", dimension_numbers=LAYOUTS[3])
                z = jnp.tanh(up)
            return z

        image, back = jax.vjp(made, z)
        (slope,) = back(jnp.cos(jnp.arange(image.size).reshape(image.shape)) / image.size)
        return (image**2).mean() + ((jnp.sqrt((slope**2).sum() + 1e-6) - 1) ** 2)

    return trained(
        loss,
        [normal(4, 2, 3, 4, 4, scale=0.3)],
        normal(1, 8, 6, 6, 4, seed=9),
    )


def pooled_to_a_row() -> Made:
    """Pooling by windows and strides that do not divide the image, down to one row, with a penalty on the gradient."""

    def score(kernels: Any, x: jax.Array) -> jax.Array:
        for kernel in kernels:
            x = jax.nn.softplus(conv(x, kernel))
            x = lax.reduce_window(x, 0.0, lax.add, (1, 3, 2, 1), (1, 3, 1, 1), "SAME") / 6
        return x.mean((1, 2, 3))

    def loss(kernels: Any, x: jax.Array) -> jax.Array:
        return score(kernels, x).mean() + gradient_norm(partial(score, kernels), x).mean()

    return trained(loss, [normal(4, 3, 2, 8, scale=0.3)], normal(4, 3, 255, 2, seed=9))


SHARES: dict[Callable[[], Made], float] = {
    penalized_sound: 0.3,
    kernels_larger_than_images: 0.6,
    clipped_by_sample: 0.6,
    pulled_apart_volumes: 0.5,
    pooled_to_a_row: 0.5,
}
SLOW = (penalized_sound, kernels_larger_than_images, pooled_to_a_row)


def check(make: Callable[[], Made]) -> int:
    """Plans it, runs it, and returns the number of its loops over slabs."""
    step, args = make()
    run = within_share(SHARES[make], step, args)
    assert_same(run.planned.compile()(*args), run.plain(*args), run)
    return len(run.planned.report.slab_loops)


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """Another process: what is submitted to it fails if it ends."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        yield process


@pytest.mark.parametrize(
    "make",
    [pytest.param(maker, marks=pytest.mark.slow) if maker in SLOW else maker for maker in SHARES],
)
def test_xla_compiles_what_slabs_write(
    make: Callable[[], Made], process: ProcessPoolExecutor
) -> None:
    assert process.submit(check, make).result()
