from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.resnet import Backbone, Bottleneck, ResNet, ResNetConfig
from tests.models.drawn import count, drawn, ones, reached

TINY = ResNet(ResNetConfig(depth=14, filters=4, classes=5))


@pytest.fixture(scope="module")
def tiny():
    """A batch of images and the tiny model's variables."""
    image = jax.random.normal(jax.random.key(1), (2, 32, 32, 3))
    return image, drawn(TINY.init, image)


@pytest.mark.parametrize(
    ("depth", "parameters"),
    [
        (50, 25_557_032),
        pytest.param(101, 44_549_160, marks=pytest.mark.slow),
        pytest.param(152, 60_192_808, marks=pytest.mark.slow),
    ],
)
def test_parameter_counts_of_imagenet_models(depth, parameters):
    """The published counts, as in torchvision; 2048 weights and a bias per additional class."""
    for classes in 1000, 21841:
        model = ResNet(ResNetConfig(depth, classes=classes))
        variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 64, 64, 3)))
        assert count(variables["params"]) == parameters + (classes - 1000) * 2049


def test_the_spatial_convolution_carries_the_stride():
    """v1.5: the 1x1 reduction before it still reads the larger image."""
    jaxpr = jax.make_jaxpr(lambda image: TINY.init_with_output(jax.random.key(0), image)[0])(
        jnp.zeros((1, 32, 32, 3))
    )
    strided = [
        equation.invars[1].aval.shape
        for equation in jaxpr.eqns
        if equation.params.get("window_strides") == (2, 2)
        and equation.primitive.name.startswith("conv")
    ]
    assert {shape[:2] for shape in strided} == {(7, 7), (3, 3), (1, 1)}
    assert all(leaving == 2 * entering for high, *_, entering, leaving in strided if high == 1)


def test_running_statistics_change_in_training_only(tiny, quick_jit):
    image, variables = tiny
    before = variables["batch_stats"]
    apply = quick_jit(partial(TINY.apply, mutable=["batch_stats"]), static_argnames="train")
    after = apply(variables, image, train=True)[1]["batch_stats"]
    evaluated = apply(variables, image, train=False)[1]
    changed = jax.tree.map(
        lambda a, b: bool((a != b).all()), before["norm_stem"], after["norm_stem"]
    )
    assert jax.tree.all(changed)
    jax.tree.map(np.testing.assert_array_equal, evaluated.get("batch_stats", before), before)


def test_evaluation_sees_each_image_alone(tiny, quick_jit):
    image, variables = tiny
    changed = image.at[1].set(0)
    logits, changed_logits = (quick_jit(TINY.apply)(variables, batch) for batch in (image, changed))
    np.testing.assert_allclose(logits[0], changed_logits[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("output_stride", "strides"),
    [(32, [4, 8, 16, 32]), (16, [4, 8, 16, 16]), (8, [4, 8, 8, 8]), (4, [4, 4, 4, 4])],
)
def test_backbone_gives_every_stage_at_its_stride(output_stride, strides):
    """It has the classifier's parameters without the head: dilation changes no shape."""
    image = jax.ShapeDtypeStruct((2, 64, 128, 3), jnp.float32)
    model = Backbone(ResNetConfig(depth=14, filters=4, output_stride=output_stride))
    outputs, variables = jax.eval_shape(
        lambda image: model.init_with_output(jax.random.key(0), image), image
    )
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
    response = quick_jit(partial(block.apply, train=False))(ones(variables), impulse)
    assert reached(response) == set(product((3, 7, 11), repeat=2))


@pytest.mark.parametrize(
    ("field", "message"),
    [({"output_stride": 64}, "4, 8, 16 or 32, not 64"), ({"depth": 51}, "No ResNet of depth 51")],
)
def test_unknown_output_stride_and_depth_are_refused(field, message):
    with pytest.raises(ValueError, match=message):
        _ = ResNetConfig(**field).blocks
