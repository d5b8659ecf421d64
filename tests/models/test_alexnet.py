import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.alexnet import AlexNet, AlexNetConfig
from tests.models.drawn import count, drawn

TINY = AlexNet(AlexNetConfig(width=1 / 32, classes=5))


@pytest.mark.parametrize("side", [224, 1000])
def test_parameter_count_whatever_the_size(side):
    """The published count of the one-column network, as in torchvision."""
    variables = jax.eval_shape(AlexNet().init, jax.random.key(0), jnp.zeros((1, side, side, 3)))
    assert count(variables) == 61_100_840


def test_convolutions_end_at_six_by_six():
    """The adaptive pool leaves a 224^2 image alone, else there would be dot_generals of rank 4."""
    jaxpr = jax.make_jaxpr(lambda image: TINY.init_with_output(jax.random.key(0), image)[0])
    ranks = {
        side: {
            equation.invars[0].aval.ndim
            for equation in jaxpr(jnp.zeros((1, side, side, 3))).eqns
            if equation.primitive.name == "dot_general"
        }
        for side in (224, 256)
    }
    assert ranks == {224: {2}, 256: {2, 4}}


def test_training_drops_by_its_key(quick_jit):
    image = jax.random.normal(jax.random.key(1), (1, 63, 63, 3))
    variables = drawn(TINY.init, image)
    apply = quick_jit(lambda key: TINY.apply(variables, image, train=True, rngs={"dropout": key}))
    first, again, other_key = (apply(jax.random.key(seed)) for seed in (2, 2, 3))
    np.testing.assert_array_equal(first, again)
    assert (first != other_key).any()


def test_image_that_the_pools_would_use_up_is_refused():
    with pytest.raises(ValueError, match="63 pixels"):
        jax.eval_shape(TINY.init, jax.random.key(0), jnp.zeros((1, 63, 62, 3)))
