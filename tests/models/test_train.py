from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import train
from models.googlenet import STAGES, GoogLeNetConfig
from models.resnet import ResNetConfig
from models.transformer import DecoderConfig
from models.unet2d import UNet2DConfig
from models.unet3d import UNet3DConfig

TINY = {
    "unet3d": partial(train.unet3d_step, 4, config=UNet3DConfig(levels=2, filters=4)),
    "unet2d": partial(train.unet2d_step, (4, 8), 2, UNet2DConfig(levels=2, filters=4, norm="group")),
    "resnet": partial(train.resnet_step, 32, 4, 14, ResNetConfig(filters=4, classes=5)),
    "googlenet": partial(train.googlenet_step, 32, 4, GoogLeNetConfig(1 / 16, 5, STAGES[:1])),
    "decoder": partial(train.decoder_step, 2, 8, 2, 5, DecoderConfig(heads=2, vocab=11)),
    "decoder-scan": partial(train.decoder_step, 2, 8, 2, 5, DecoderConfig(heads=2, vocab=11, scan=True)),
    "decoder-bfloat16": partial(train.decoder_step, 1, 8, 2, 5, DecoderConfig(heads=2, vocab=11, dtype=jnp.bfloat16)),
}
smallest = partial(train.unet2d_step, 2, config=UNet2DConfig(levels=1, filters=1, norm=None))
builders = pytest.mark.parametrize("name", TINY)


@cache
def built(name):
    """The step and concrete arguments of a tiny model, shared by the tests of this module."""
    return TINY[name](concrete=True)


@cache
def compiled(name):
    """The step as XLA compiles it quickly."""
    step, args = built(name)
    return jax.jit(step).lower(*args).compile(compiler_options={"xla_backend_optimization_level": 0})


def types(tree):
    """The tree with every leaf replaced by its shape, dtype and weak type."""
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree)


@builders
def test_arguments_are_abstract_and_the_step_keeps_their_types(name):
    step, args = TINY[name]()
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args))
    state, metrics = jax.eval_shape(step, *args)
    assert types(state) == types(args[0])
    assert set(metrics) == {"loss"}
    assert (metrics["loss"].shape, metrics["loss"].dtype) == ((), jnp.float32)


@builders
def test_concrete_arguments_match_the_abstract_ones(name):
    assert types(built(name)[1]) == types(TINY[name]()[1])


@builders
def test_loss_falls(name):
    state, batch = built(name)[1]
    losses = []
    for _ in range(4):
        state, metrics = compiled(name)(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    assert int(state.step) == 4


def test_seed_decides_state_and_batch():
    args, again, other = (smallest(concrete=True, seed=seed)[1] for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, args, again)
    assert (args[1]["image"] != other[1]["image"]).any()
    assert (args[0].params["head"]["kernel"] != other[0].params["head"]["kernel"]).any()


def test_state_can_be_donated():
    step, (state, batch) = smallest(concrete=True)
    after, _ = jax.jit(step, donate_argnums=0)(state, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(after))


@pytest.mark.parametrize(
    ("name", "entry", "classes"), [("unet2d", "label", 2), ("resnet", "label", 5), ("decoder", "targets", 11)]
)
def test_labels_are_classes(name, entry, classes):
    labels = built(name)[1][1][entry]
    assert labels.dtype == jnp.int32
    assert 0 <= labels.min() <= labels.max() < classes


def test_targets_are_the_next_tokens():
    batch = built("decoder")[1][1]
    np.testing.assert_array_equal(batch["targets"][:, :-1], batch["tokens"][:, 1:])


def test_running_statistics_are_part_of_the_state():
    state, batch = built("resnet")[1]
    after, _ = compiled("resnet")(state, batch)
    before, after = state.batch_stats["norm_stem"]["mean"], after.batch_stats["norm_stem"]["mean"]
    assert (before != after).all()


def test_default_optimizers_are_momentum_and_adamw():
    """One momentum per parameter; two moments and a count for AdamW."""
    for name, copies in ("unet3d", 1), ("resnet", 1), ("decoder", 2):
        state = TINY[name]()[1][0]
        size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        moments = sum(leaf.size for leaf in jax.tree.leaves(state.opt_state) if leaf.shape)
        assert moments == copies * size


def test_optimizer_can_be_chosen():
    state = TINY["unet2d"](optimizer=optax.sgd(1e-3))[1][0]
    assert jax.tree.leaves(state.opt_state) == []


def test_full_size_models_are_described_without_allocation():
    for build in (partial(train.unet3d_step, 512), train.resnet_step, train.decoder_step):
        _, (state, _) = build()
        assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state))


def test_volume_that_cannot_be_halved_is_refused():
    with pytest.raises(ValueError, match="divisible by 8"):
        train.unet3d_step((16, 16, 20))


def test_cross_entropy_equals_optax_and_has_no_scatter():
    draw = np.random.default_rng(0)
    logits, labels = draw.normal(size=(3, 4, 5)).astype(np.float32), draw.integers(5, size=(3, 4))
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    np.testing.assert_allclose(train.cross_entropy(logits, labels), expected, rtol=1e-5)
    assert "scatter" not in str(jax.make_jaxpr(jax.grad(train.cross_entropy))(logits, labels))


def test_dice_loss_is_zero_for_the_truth_and_one_for_its_opposite():
    labels = jnp.array([[[0, 1], [1, 0]]])
    certain = 100.0 * jax.nn.one_hot(labels, 2)
    np.testing.assert_allclose(train.soft_dice_loss(certain, labels), 0.0, atol=1e-5)
    np.testing.assert_allclose(train.soft_dice_loss(certain, 1 - labels), 1.0, atol=1e-5)
