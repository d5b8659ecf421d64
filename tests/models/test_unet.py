from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.unet import InstanceNorm, upsample_nearest
from models.unet2d import UNet2D, UNet2DConfig
from models.unet3d import UNet3D, UNet3DConfig
from tests.models.drawn import count


def expected_count(config, rank):
    """The number of parameters of an instance-normalised U-Net with nearest upsampling."""
    widths = [config.filters * 2**level for level in range(config.levels)]
    down = zip([config.in_channels, *widths], widths, strict=False)
    up = ((above + below, below) for below, above in pairwise(widths))
    blocks = [*down, *up]
    convolutions = sum(3**rank * (entering + leaving) * leaving for entering, leaving in blocks)
    norms = sum(4 * leaving for _, leaving in blocks)
    return convolutions + norms + (config.filters + 1) * config.classes


@pytest.mark.parametrize(
    ("model", "side"),
    [(UNet3D(), 8), (UNet2D(), 8), (UNet3D(UNet3DConfig(levels=3, filters=8)), 4)],
    ids=["3d", "2d", "3d-small"],
)
def test_parameter_counts(model, side):
    image = jnp.zeros((1, *(side,) * model.rank, model.config.in_channels))
    variables = jax.eval_shape(model.init, jax.random.key(0), image)
    assert count(variables["params"]) == expected_count(model.config, model.rank)


def test_last_decoder_level_concatenates_96_channels():
    model = UNet3D()
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8, 8, 8, 4)))
    assert variables["params"]["up_0"]["Conv_0"]["kernel"].shape == (3, 3, 3, 96, 32)


@pytest.mark.parametrize("size", [(12, 16), (16, 12), (4, 8), (0, 8)])
def test_size_that_cannot_be_halved_is_refused(size):
    with pytest.raises(ValueError, match="divisible by 8"):
        jax.eval_shape(UNet2D().init, jax.random.key(0), jnp.zeros((1, *size, 3)))


@pytest.mark.parametrize("shape", [(1, 8, 8, 4), (1, 8, 8, 8, 3), (8, 8, 3)])
def test_image_of_another_rank_or_channels_is_refused(shape):
    with pytest.raises(ValueError, match="channels last"):
        jax.eval_shape(UNet2D().init, jax.random.key(0), jnp.zeros(shape))


@pytest.mark.parametrize("option", [{"norm": "batch"}, {"upsampling": "cubic"}])
def test_unknown_option_is_refused(option):
    model = UNet2D(UNet2DConfig(levels=2, filters=4, **option))
    with pytest.raises(ValueError, match="Unknown"):
        jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4, 4, 3)))


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 2, 3, 2, 1)], ids=["2d", "3d"])
def test_nearest_upsampling_repeats(shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    expected = x
    for axis in range(1, x.ndim - 1):
        expected = expected.repeat(2, axis)
    np.testing.assert_array_equal(upsample_nearest(jnp.asarray(x)), expected)


def test_gradient_of_upsampling_has_no_scatter():
    gradient = jax.make_jaxpr(jax.grad(lambda x: jnp.square(upsample_nearest(x)).sum()))(
        jnp.ones((1, 2, 2, 1))
    )
    assert "scatter" not in str(gradient)


def test_instance_norm_takes_statistics_per_sample_and_channel_in_float32():
    x = np.random.default_rng(0).normal(300.0, 2.0, (2, 4, 4, 3))
    x = jnp.asarray(x, jnp.bfloat16)
    y, variables = InstanceNorm().init_with_output(jax.random.key(0), x)
    exact = np.asarray(x, np.float64)
    deviation = np.sqrt(exact.var((1, 2), keepdims=True) + 1e-5)
    expected = (exact - exact.mean((1, 2), keepdims=True)) / deviation
    assert y.dtype == jnp.bfloat16
    assert set(variables["params"]) == {"scale", "bias"}
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, atol=2e-2)
