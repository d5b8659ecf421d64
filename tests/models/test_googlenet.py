from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from models.googlenet import GoogLeNet, GoogLeNetConfig

TINY = GoogLeNetConfig(width=1 / 16, classes=5)


def test_convolutions_have_the_published_parameters():
    """6,998,552 with a bias in each convolution, of which batch norm has a scale and a bias instead."""
    variables = jax.eval_shape(GoogLeNet().init, jax.random.key(0), jnp.zeros((1, 224, 224, 3)))
    by_name = {"kernel": 0, "scale": 0, "bias": 0}
    for path, leaf in jax.tree_util.tree_leaves_with_path(variables["params"]):
        by_name[path[-1].key] += leaf.size
    assert by_name["kernel"] + by_name["bias"] == 6_998_552
    assert by_name["bias"] == by_name["scale"] + 1000


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_logits_and_variables_are_float32(dtype):
    model = GoogLeNet(GoogLeNetConfig(1 / 16, 5, dtype=dtype))
    image = jax.ShapeDtypeStruct((3, 64, 64, 3), jnp.float32)
    logits, variables = jax.eval_shape(lambda image: model.init_with_output(jax.random.key(0), image), image)
    assert (logits.shape, logits.dtype) == ((3, 5), jnp.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}


def test_blocks_concatenate_their_branches():
    """The channels that enter each stage's first block are the sum of the branches before."""
    variables = jax.eval_shape(GoogLeNet(TINY).init, jax.random.key(0), jnp.zeros((1, 64, 64, 3)))
    for stage in (1, 2):
        one, _, three, _, five, project = map(TINY.channels, TINY.stages[stage - 1][-1])
        entering = variables["params"][f"stage_{stage}_block_0"]["one"]["conv"]["kernel"].shape[2]
        assert entering == one + three + five + project


def test_evaluation_needs_no_statistics_of_the_batch():
    image = jax.random.normal(jax.random.key(1), (2, 64, 64, 3))
    model = GoogLeNet(replace(TINY, stages=TINY.stages[:1]))
    variables = model.init(jax.random.key(0), image)
    both, alone = (jax.jit(model.apply)(variables, part) for part in (image, image[:1]))
    assert jnp.allclose(both[:1], alone, atol=1e-5)
