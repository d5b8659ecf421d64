from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from models.googlenet import GoogLeNet, GoogLeNetConfig
from tests.models.drawn import count, drawn

TINY = GoogLeNetConfig(width=1 / 16, classes=5)


def test_convolutions_have_the_published_parameters():
    """6,998,552 with a bias per convolution; here a norm's scale and bias replace each."""
    variables = jax.eval_shape(GoogLeNet().init, jax.random.key(0), jnp.zeros((1, 224, 224, 3)))
    by_name = {"kernel": 0, "scale": 0, "bias": 0}
    for path, leaf in jax.tree_util.tree_leaves_with_path(variables["params"]):
        by_name[path[-1].key] += leaf.size
    assert by_name["kernel"] + by_name["bias"] == 6_998_552
    assert by_name["bias"] == by_name["scale"] + 1000


@pytest.mark.parametrize("side", [224, 2240])
def test_auxiliary_classifiers_have_the_published_parameters_whatever_the_size(side):
    """torchvision has 13,004,888 with them and 6,624,904 without."""
    image = jnp.zeros((1, side, side, 3))
    plain, auxiliary = (
        jax.eval_shape(GoogLeNet(GoogLeNetConfig(aux=aux)).init, jax.random.key(0), image)["params"]
        for aux in (False, True)
    )
    added = auxiliary.keys() - plain.keys()
    assert added == {"auxiliary_0", "auxiliary_1"}
    assert count([auxiliary[name] for name in added]) == 13_004_888 - 6_624_904
    assert jax.tree.map(jnp.shape, plain) == {
        name: jax.tree.map(jnp.shape, auxiliary[name]) for name in plain
    }


def test_auxiliary_classifiers_speak_in_training_only():
    model = GoogLeNet(replace(TINY, aux=True))
    image = jax.ShapeDtypeStruct((2, 64, 64, 3), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), image)

    def apply(variables, image, train):
        options = (
            {"mutable": ["batch_stats"], "rngs": {"dropout": jax.random.key(0)}} if train else {}
        )
        return model.apply(variables, image, train=train, **options)

    outputs, _ = jax.eval_shape(partial(apply, train=True), variables, image)
    assert [(output.shape, output.dtype) for output in outputs] == [((2, 5), jnp.float32)] * 3
    assert jax.eval_shape(partial(apply, train=False), variables, image).shape == (2, 5)


def test_auxiliary_classifiers_need_their_blocks():
    with pytest.raises(ValueError, match="4a and 4d"):
        replace(TINY, stages=TINY.stages[:1], aux=True)


def test_blocks_concatenate_their_branches():
    """The input channels of each stage's first block are the sum of the previous branches."""
    variables = jax.eval_shape(GoogLeNet(TINY).init, jax.random.key(0), jnp.zeros((1, 64, 64, 3)))
    for stage in (1, 2):
        single, _, three, _, five, project = map(TINY.channels, TINY.stages[stage - 1][-1])
        entering = variables["params"][f"stage_{stage}_block_0"]["one"]["conv"]["kernel"].shape[2]
        assert entering == single + three + five + project


@pytest.mark.slow
def test_evaluation_needs_no_statistics_of_the_batch(quick_jit):
    image = jax.random.normal(jax.random.key(1), (2, 64, 64, 3))
    model = GoogLeNet(replace(TINY, stages=TINY.stages[:1]))
    variables = drawn(model.init, image)
    both, alone = (quick_jit(model.apply)(variables, part) for part in (image, image[:1]))
    assert jnp.allclose(both[:1], alone, atol=1e-5)
