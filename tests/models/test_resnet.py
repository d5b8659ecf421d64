from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.resnet import Backbone, Bottleneck, ResNet, ResNetConfig
from tests.models.drawn import drawn

TINY = ResNet(ResNetConfig(depth=14, filters=4, classes=5))


@pytest.fixture(scope="module")
def tiny():
    """A batch of images and the tiny model's variables."""
    image = jax.random.normal(jax.random.key(1), (2, 32, 32, 3))
    return image, drawn(TINY.init, image)


@pytest.mark.parametrize(("depth", "parameters"), [(50, 25_557_032), (101, 44_549_160), (152, 60_192_808)])
def test_parameter_counts_of_imagenet_models(depth, parameters):
    """The published counts, as in torchvision."""
    variables = jax.eval_shape(ResNet(ResNetConfig(depth)).init, jax.random.key(0), jnp.zeros((1, 224, 224, 3)))
    assert sum(leaf.size for leaf in jax.tree.leaves(variables["params"])) == parameters


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_logits_and_variables_are_float32(dtype):
    model = ResNet(ResNetConfig(depth=14, filters=4, classes=5, dtype=dtype))
    image = jax.ShapeDtypeStruct((3, 32, 32, 3), jnp.float32)
    logits, variables = jax.eval_shape(lambda image: model.init_with_output(jax.random.key(0), image), image)
    assert (logits.shape, logits.dtype) == ((3, 5), jnp.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}


def test_the_spatial_convolution_carries_the_stride():
    """v1.5: the 1x1 reduction before it still reads the larger image."""
    jaxpr = jax.make_jaxpr(lambda image: TINY.init_with_output(jax.random.key(0), image)[0])(jnp.zeros((1, 32, 32, 3)))
    strided = {
        equation.invars[1].aval.shape[:2]
        for equation in jaxpr.eqns
        if equation.primitive.name == "conv_general_dilated" and equation.params["window_strides"] == (2, 2)
    }
    assert strided == {(7, 7), (3, 3), (1, 1)}
    shortcuts = [
        equation.invars[1].aval.shape
        for equation in jaxpr.eqns
        if equation.primitive.name == "conv_general_dilated"
        and equation.params["window_strides"] == (2, 2)
        and equation.invars[1].aval.shape[:2] == (1, 1)
    ]
    assert all(leaving == 2 * entering for *_, entering, leaving in shortcuts)


def test_running_statistics_change_in_training_only(tiny, quick_jit):
    image, variables = tiny
    before = variables["batch_stats"]
    apply = quick_jit(partial(TINY.apply, mutable=["batch_stats"]), static_argnames="train")
    after = apply(variables, image, train=True)[1]["batch_stats"]
    evaluated = apply(variables, image, train=False)[1]
    assert all(
        jax.tree.leaves(jax.tree.map(lambda a, b: bool((a != b).all()), before["norm_stem"], after["norm_stem"]))
    )
    jax.tree.map(np.testing.assert_array_equal, evaluated.get("batch_stats", before), before)


def test_evaluation_sees_each_image_alone(tiny, quick_jit):
    image, variables = tiny
    changed = image.at[1].set(0)
    logits, changed_logits = (quick_jit(TINY.apply)(variables, batch) for batch in (image, changed))
    np.testing.assert_allclose(logits[0], changed_logits[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("output_stride", "strides"), [(32, [4, 8, 16, 32]), (16, [4, 8, 16, 16]), (8, [4, 8, 8, 8]), (4, [4, 4, 4, 4])]
)
def test_backbone_gives_every_stage_at_its_stride(output_stride, strides):
    """It has the classifier's parameters without the head: dilation changes no shape."""
    image = jax.ShapeDtypeStruct((2, 64, 128, 3), jnp.float32)
    model = Backbone(ResNetConfig(depth=14, filters=4, output_stride=output_stride))
    outputs, variables = jax.eval_shape(lambda image: model.init_with_output(jax.random.key(0), image), image)
    assert [output.shape for output in outputs] == [
        (2, 64 // stride, 128 // stride, 16 * 2**stage) for stage, stride in enumerate(strides)
    ]
    classifier = jax.eval_shape(TINY.init, jax.random.key(0), image)
    del classifier["params"]["head"]
    assert jax.tree.map(jnp.shape, variables) == jax.tree.map(jnp.shape, classifier)


def test_an_impulse_passes_a_dilated_block_to_nine_pixels(quick_jit):
    block = Bottleneck(TINY.config, 1, 1, dilation=4)
    impulse = jnp.zeros((1, 15, 15, 4)).at[0, 7, 7].set(1)
    variables = jax.eval_shape(partial(block.init, train=False), jax.random.key(0), impulse)
    ones = jax.tree.map_with_path(
        lambda path, leaf: np.full(leaf.shape, path[-1].key not in ("bias", "mean"), leaf.dtype), variables
    )
    response = quick_jit(partial(block.apply, train=False))(ones, impulse)
    reached = {tuple(map(int, pixel)) for pixel in np.argwhere(np.asarray(response)[0, :, :, 0] > 0)}
    assert reached == {(row, column) for row in (3, 7, 11) for column in (3, 7, 11)}


@pytest.mark.parametrize(("depth", "parameters"), [(101, 44_549_160), (152, 60_192_808)])
def test_head_of_imagenet_22k(depth, parameters):
    """2048 weights and a bias for each of 20,841 additional classes."""
    variables = jax.eval_shape(
        ResNet(ResNetConfig(depth, classes=21841)).init, jax.random.key(0), jnp.zeros((1, 64, 64, 3))
    )
    assert sum(leaf.size for leaf in jax.tree.leaves(variables["params"])) == parameters + 20_841 * 2049


def test_unknown_output_stride_is_refused():
    with pytest.raises(ValueError, match="4, 8, 16 or 32, not 64"):
        ResNetConfig(output_stride=64)


def test_unknown_depth_is_refused():
    with pytest.raises(ValueError, match="No ResNet of depth 51"):
        _ = ResNetConfig(depth=51).blocks
