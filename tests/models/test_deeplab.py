from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.deeplab import ConvNorm, DeepLab, DeepLabConfig, upsample_bilinear
from tests.models.drawn import count, ones, reached

TINY = DeepLabConfig(depth=14, filters=4, classes=3, width=8, shallow=4)


def interpolated(x, size, axis):
    """The oracle along an axis: interpolates the pixels around each center; edges repeat."""
    extent = x.shape[axis]
    at = np.clip((np.arange(size) + 0.5) * extent / size - 0.5, 0, extent - 1)
    below = np.floor(at).astype(int)
    above = np.minimum(below + 1, extent - 1)
    share = (at - below).reshape(-1, *(1,) * (x.ndim - 1 - axis))
    return x.take(below, axis) * (1 - share) + x.take(above, axis) * share


@pytest.mark.parametrize("side", [64, 513])
def test_parameter_counts(side):
    """The encoder has the 60,996,202 of torchvision's DeepLabV3 on ResNet-101, less its heads."""
    variables = jax.eval_shape(DeepLab().init, jax.random.key(0), jnp.zeros((1, side, side, 3)))
    params = variables["params"]
    classifier = 256 * 21 + 21
    heads = (9 * 256 * 256 + 2 * 256 + classifier) + (9 * 1024 * 256 + 2 * 256 + classifier)
    assert count((params["backbone"], params["pyramid"])) == 60_996_202 - heads
    decoder = (
        (256 * 48 + 2 * 48) + (9 * 304 * 256 + 2 * 256) + (9 * 256 * 256 + 2 * 256) + classifier
    )
    assert count(params) == 60_996_202 - heads + decoder


def test_pyramid_sees_the_image_at_output_stride_sixteen():
    jaxpr = jax.make_jaxpr(
        lambda image: DeepLab(TINY).init_with_output(jax.random.key(0), image)[0]
    )
    rates = {
        equation.params["rhs_dilation"]: equation.invars[0].aval.shape[1:3]
        for equation in jaxpr(jnp.zeros((1, 128, 128, 3))).eqns
        if equation.primitive.name == "conv_general_dilated"
    }
    assert {rate: rates[rate, rate] for rate in (2, 6, 12, 18)} == dict.fromkeys(
        (2, 6, 12, 18), (8, 8)
    )


@pytest.mark.parametrize("rate", [6, 12, 18])
def test_an_impulse_reaches_nine_pixels_one_rate_apart(rate, quick_jit):
    branch = ConvNorm(TINY, 1, 3, rate)
    impulse = jnp.zeros((1, 41, 41, 1)).at[0, 20, 20].set(1)
    variables = jax.eval_shape(partial(branch.init, train=False), jax.random.key(0), impulse)
    response = quick_jit(partial(branch.apply, train=False))(ones(variables), impulse)
    offsets = 20 - rate, 20, 20 + rate
    assert reached(response) == set(product(offsets, offsets))


@pytest.mark.parametrize("size", [(12, 8), (7, 11), (3, 5)], ids=str)
def test_bilinear_upsampling_is_that_of_the_two_pixels_around(size):
    x = np.random.default_rng(0).normal(size=(2, 3, 2, 4)).astype(np.float32)
    expected = interpolated(interpolated(x, size[0], 1), size[1], 2)
    np.testing.assert_allclose(
        upsample_bilinear(jnp.asarray(x), size), expected, rtol=1e-5, atol=1e-6
    )


def test_gradient_of_upsampling_has_no_scatter():
    gradient = jax.make_jaxpr(jax.grad(lambda x: jnp.square(upsample_bilinear(x, (8, 8))).sum()))
    assert "scatter" not in str(gradient(jnp.ones((1, 2, 2, 1))))
