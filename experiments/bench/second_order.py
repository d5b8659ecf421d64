"""Random training steps that differentiate convolutions twice, each generated from its number.

A step has one or two convolutions of one to three dimensions, with strides, dilation of both
operands, every kind of padding, and feature groups. Per-image gradients under `vmap` are grouped
convolutions.
"""

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array
Step = Callable[..., Any]
_SIZES = {1: (24, 40), 2: (9, 16), 3: (5, 8)}  # Smallest and largest side of an image, by rank.
_CHANNELS = (2, 4)


def drawn_step(number: int) -> tuple[Step, tuple[Any, ...]]:
    """A step and its arguments: the kernels and a batch of images."""
    draw = random.Random(number)
    rank = draw.choice((1, 2, 2, 2, 3))
    normal = np.random.default_rng(number).standard_normal
    sides = [draw.randint(2, 4), *(draw.randint(*_SIZES[rank]) for _ in range(rank))]
    images = normal((*sides, draw.choice(_CHANNELS)), np.float32)
    kernels, layers, shape = [], [], images.shape
    for _ in range(draw.randint(1, 2)):
        kernel, layer = _layer(draw, shape)
        kernels.append(np.float32(0.4) * normal(kernel, np.float32))
        layers.append(layer)
        shape = jax.eval_shape(layer, jax.ShapeDtypeStruct(shape, jnp.float32), kernels[-1]).shape
    activation = draw.choice((jnp.tanh, jax.nn.softplus, lambda x: jax.nn.leaky_relu(x, 0.2)))

    def score(kernels: Any, x: Array) -> Array:
        for kernel, layer in zip(kernels, layers, strict=True):
            x = activation(layer(x, kernel))
        weights = 1 + jnp.cos(jnp.arange(x.size).reshape(x.shape)) / 2
        return (x**2 * weights).mean()  # weighted, so that nothing cancels down to rounding

    loss = draw.choice((_gradient_penalty, _norm_of_the_gradient, _after_a_step, _curvature))

    def step(kernels: Any, x: Array) -> Any:
        value, gradients = jax.value_and_grad(lambda kernels: loss(score, kernels, x))(kernels)
        return [
            kernel - 0.1 * gradient for kernel, gradient in zip(kernels, gradients, strict=True)
        ], value

    return step, (kernels, images)


def _layer(
    draw: random.Random, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], Callable[[Array, Array], Array]]:
    """The shape of a kernel, and a convolution whose result has two or more rows per dimension."""
    rank = len(shape) - 2
    sizes = [draw.randint(1, 4) for _ in range(rank)]
    strides = [draw.choice((1, 1, 2, 3)) for _ in range(rank)]
    before, between = ([draw.choice((1, 1, 1, 2)) for _ in range(rank)] for _ in range(2))
    groups = draw.choice((1, 1, 1, 2))
    space = "DHW"[-rank:]
    kind = draw.choice(("SAME", "VALID", "by rows"))
    padding: Any = kind
    if kind == "by rows" or max(before) > 1:  # jax needs explicit padding for dilated images
        padding = [(draw.randint(0, size), draw.randint(0, size)) for size in sizes]
    if padding != "SAME":
        low_high = [(0, 0)] * rank if padding == "VALID" else padding
        needed = [
            (size - 1) * apart + 1 + stride
            for size, apart, stride in zip(sizes, between, strides, strict=True)
        ]
        if any(
            rows + sum(pair) < need
            for rows, pair, need in zip(shape[1:-1], low_high, needed, strict=True)
        ):
            padding = [(need, size) for need, size in zip(needed, sizes, strict=True)]

    def convolve(x: Array, kernel: Array) -> Array:
        return lax.conv_general_dilated(
            x,
            kernel,
            strides,
            padding,
            before,
            between,
            (f"N{space}C", f"{space}IO", f"N{space}C"),
            groups,
        )

    return (*sizes, shape[-1] // groups, draw.choice(_CHANNELS)), convolve


def _gradient_penalty(score: Step, kernels: Any, x: Array) -> Array:
    """A penalty on the norm of each image's own gradient."""
    slopes = jax.vmap(jax.grad(lambda image: score(kernels, image[None])))(x)
    return (
        score(kernels, x) + ((jnp.sqrt((slopes**2).sum(range(1, x.ndim)) + 1e-6) - 1) ** 2).mean()
    )


def _norm_of_the_gradient(score: Step, kernels: Any, x: Array) -> Array:
    return jnp.asarray(sum((gradient**2).sum() for gradient in jax.grad(score)(kernels, x)))


def _after_a_step(score: Step, kernels: Any, x: Array) -> Array:
    """The score after a gradient step on one image, averaged over the images."""

    def fitted(image: Array) -> Array:
        gradients = jax.grad(score)(kernels, image[None])
        return score(
            [kernel - 0.1 * gradient for kernel, gradient in zip(kernels, gradients, strict=True)],
            x,
        )

    return jax.vmap(fitted)(x).mean()


def _curvature(score: Step, kernels: Any, x: Array) -> Array:
    """The curvature along the images themselves."""
    return (jax.jvp(jax.grad(lambda x: score(kernels, x)), [x], [x])[1] ** 2).sum()
