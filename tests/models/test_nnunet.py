from dataclasses import replace
from itertools import pairwise
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.nnunet import ConvPair, NNUNet, NNUNetConfig, planned_strides
from tests.models.drawn import count

TINY = NNUNetConfig(((1, 1), (2, 2), (2, 1)), filters=4, classes=3, in_channels=2)


def shapes(config, size):
    """Shapes of the network's parameters and outputs for an image."""
    image = jax.ShapeDtypeStruct((1, *size, config.in_channels), jnp.float32)
    outputs, variables = jax.eval_shape(
        lambda image: NNUNet(config).init_with_output(jax.random.key(0), image), image
    )
    return variables["params"], outputs


def expected_count(config):
    """The number of parameters: each convolution has a bias, each norm a scale and a bias."""
    widths, cube = config.widths, 3**config.rank
    down = list(pairwise([config.in_channels, *widths]))
    up = [(2 * above, above) for above in widths[:-1]]
    blocks = sum(
        cube * (entering + leaving) * leaving + 6 * leaving for entering, leaving in down + up
    )
    wider = zip(pairwise(widths), config.strides[1:], strict=True)
    widen = sum((prod(strides) * below + 1) * above for (above, below), strides in wider)
    heads = sum((above + 1) * config.classes for above in widths[:-1])
    return blocks + widen + heads


@pytest.mark.parametrize(
    ("size", "halvings"),
    [((128, 128, 128), 5), ((40, 56, 40), 3), ((192, 160), 5), ((512, 512), 7), ((7, 7), 0)],
)
def test_stages_of_published_patches(size, halvings):
    """The Decathlon's brain tumours and hippocampus, in 3D and 2D (Isensee et al., 2021)."""
    rank = len(size)
    assert planned_strides(size) == ((1,) * rank, *((2,) * rank,) * halvings)


def test_short_axes_stop_and_a_last_one_needs_three_edges():
    assert planned_strides((16, 64, 64)) == ((1, 1, 1), (2, 2, 2), (2, 2, 2), (1, 2, 2), (1, 2, 2))
    assert planned_strides((64, 16)) == ((1, 1), (2, 2), (2, 2), (2, 1))


@pytest.mark.parametrize(
    ("config", "size", "widths"),
    [
        (NNUNetConfig(), (32, 32, 64), [32, 64, 128, 256, 320, 320]),
        (
            NNUNetConfig(planned_strides((512, 512))),
            (128, 128),
            [32, 64, 128, 256, 512, 512, 512, 512],
        ),
        (TINY, (8, 6), [4, 8, 16]),
    ],
    ids=["3d", "2d", "tiny"],
)
def test_widths_and_parameter_counts_whatever_the_size(config, size, widths):
    assert config.widths == widths
    for factor in 1, 2:
        params, _ = shapes(config, tuple(factor * side for side in size))
        assert count(params) == expected_count(config)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_every_decoder_stage_has_logits(dtype):
    params, outputs = shapes(replace(TINY, dtype=dtype), (8, 6))
    assert [output.shape for output in outputs] == [(1, 8, 6, 3), (1, 4, 3, 3)]
    assert {leaf.dtype for leaf in jax.tree.leaves((params, outputs))} == {jnp.dtype(jnp.float32)}


def test_block_is_convolution_norm_and_leaky_relu(quick_jit):
    """With the leaky ReLU inverted, each channel has mean 0 and variance 1."""
    x = np.random.default_rng(0).normal(size=(2, 16, 16, 3)).astype(np.float32)
    y, variables = quick_jit(ConvPair(TINY, 4, (2, 2)).init_with_output)(jax.random.key(0), x)
    assert y.shape == (2, 8, 8, 4)
    assert set(variables["params"]["Conv_0"]) == {"kernel", "bias"}
    normalized = np.where(y < 0, y / 0.01, y)
    np.testing.assert_allclose(normalized.mean((1, 2)), 0, atol=1e-4)
    np.testing.assert_allclose(normalized.var((1, 2)), 1, atol=1e-3)


@pytest.mark.parametrize("size", [(8, 7), (6, 6), (0, 6)])
def test_size_that_the_strides_do_not_divide_is_refused(size):
    with pytest.raises(ValueError, match=r"shrinks its 2 axes by \(4, 2\)"):
        shapes(TINY, size)


def test_image_of_another_rank_is_refused():
    with pytest.raises(ValueError, match="channels last"):
        shapes(TINY, (8, 8, 8))


@pytest.mark.parametrize("strides", [((1, 1),), ((1,), (2,)), ((1, 1), (2, 2, 2))])
def test_strides_without_sense_are_refused(strides):
    with pytest.raises(ValueError, match="two stages or more"):
        NNUNetConfig(strides)
