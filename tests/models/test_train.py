from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import train
from models.alexnet import AlexNetConfig
from models.deeplab import DeepLabConfig
from models.googlenet import STAGES, GoogLeNetConfig
from models.resnet import ResNetConfig
from models.transformer import DecoderConfig
from models.unet2d import UNet2DConfig
from models.unet3d import UNet3DConfig
from tests.models.drawn import count

SHORT = ((), STAGES[1][:4])
TINY = {
    "unet3d": partial(train.unet3d_step, 4, config=UNet3DConfig(levels=2, filters=4)),
    "unet2d": partial(
        train.unet2d_step, (4, 8), 2, UNet2DConfig(levels=2, filters=4, norm="group")
    ),
    "resnet": partial(train.resnet_step, 32, 4, 14, ResNetConfig(filters=4, classes=5)),
    "googlenet": partial(train.googlenet_step, 32, 4, GoogLeNetConfig(1 / 16, 5, STAGES[:1])),
    "googlenet-aux": partial(
        train.googlenet_step, 32, 4, GoogLeNetConfig(1 / 16, 5, SHORT, aux=True, dropout=0.1)
    ),
    "alexnet": partial(train.alexnet_step, 63, 4, AlexNetConfig(1 / 16, 5, dropout=0.1)),
    "deeplab": partial(
        train.deeplab_step,
        32,
        2,
        14,
        DeepLabConfig(filters=4, classes=3, rates=(2,), width=8, shallow=4),
    ),
    "nnunet3d": partial(train.nnunet3d_step, 8, 1, filters=4),
    "nnunet2d": partial(train.nnunet2d_step, (16, 32), 2, 3, filters=4),
    "decoder": partial(train.decoder_step, 2, 8, 2, 5, DecoderConfig(heads=2, vocab=11)),
    "decoder-scan": partial(
        train.decoder_step, 2, 8, 2, 5, DecoderConfig(heads=2, vocab=11, scan=True)
    ),
    "decoder-bfloat16": partial(
        train.decoder_step, 1, 8, 2, 5, DecoderConfig(heads=2, vocab=11, dtype=jnp.bfloat16)
    ),
}
smallest = partial(train.unet2d_step, 2, config=UNet2DConfig(levels=1, filters=1, norm=None))
builders = pytest.mark.parametrize("name", TINY)


@cache
def built(name):
    """The step and concrete arguments of a tiny model, shared by the tests of this module."""
    return TINY[name](concrete=True)


@cache
def compiled(name):
    """The step, compiled without optimization."""
    step, args = built(name)
    return (
        jax.jit(step).lower(*args).compile(compiler_options={"xla_backend_optimization_level": 0})
    )


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
@pytest.mark.slow
def test_concrete_arguments_match_the_abstract_ones(name):
    assert types(built(name)[1]) == types(TINY[name]()[1])


@builders
@pytest.mark.slow
def test_loss_falls(name):
    state, batch = built(name)[1]
    losses = []
    for _ in range(4):
        state, metrics = compiled(name)(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    assert int(state.step) == 4


@pytest.mark.slow
def test_seed_decides_state_and_batch():
    args, again, other_seed = (smallest(concrete=True, seed=seed)[1] for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, args, again)
    assert (args[1]["image"] != other_seed[1]["image"]).any()
    assert (args[0].params["head"]["kernel"] != other_seed[0].params["head"]["kernel"]).any()


def test_state_can_be_donated():
    step, (state, batch) = smallest(concrete=True)
    after, _ = jax.jit(step, donate_argnums=0)(state, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(after))


@pytest.mark.parametrize(
    ("name", "entry", "classes"),
    [
        ("unet2d", "label", 2),
        pytest.param("resnet", "label", 5, marks=pytest.mark.slow),
        ("decoder", "targets", 11),
    ],
)
def test_labels_are_classes(name, entry, classes):
    labels = built(name)[1][1][entry]
    assert labels.dtype == jnp.int32
    assert 0 <= labels.min() <= labels.max() < classes


def test_targets_are_the_next_tokens():
    batch = built("decoder")[1][1]
    np.testing.assert_array_equal(batch["targets"][:, :-1], batch["tokens"][:, 1:])


@pytest.mark.slow
def test_running_statistics_are_part_of_the_state():
    state, batch = built("resnet")[1]
    after, _ = compiled("resnet")(state, batch)
    before, after = state.batch_stats["norm_stem"]["mean"], after.batch_stats["norm_stem"]["mean"]
    assert (before != after).all()


def test_default_optimizers_are_momentum_and_adamw():
    """One momentum per parameter; two moments and a count for AdamW."""
    for name, copies in ("unet3d", 1), ("resnet", 1), ("decoder", 2):
        state = TINY[name]()[1][0]
        moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape]
        assert count(moments) == copies * count(state.params)


def test_optimizer_can_be_chosen():
    state = TINY["unet2d"](optimizer=optax.sgd(1e-3))[1][0]
    assert jax.tree.leaves(state.opt_state) == []


def test_full_size_models_are_described_without_allocation():
    for build in (partial(train.unet3d_step, 512), train.decoder_step):
        _, (state, _) = build()
        assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("name", ["alexnet", "googlenet-aux"])
@pytest.mark.slow
def test_dropout_follows_from_seed_and_step(name):
    """A recomputed step has the same masks; the next step and another seed have others."""
    state, batch = built(name)[1]
    loss = compiled(name)(state, batch)[1]["loss"]
    assert loss == compiled(name)(state, batch)[1]["loss"]
    assert loss != compiled(name)(replace(state, step=state.step + 1), batch)[1]["loss"]
    reseeded, _ = TINY[name](seed=1)
    assert str(jax.make_jaxpr(reseeded)(state, batch)) != str(
        jax.make_jaxpr(built(name)[0])(state, batch)
    )


def test_literals_reach_the_architecture():
    """Keywords and dtype names override fields of the config."""
    _, (state, batch) = train.resnet_step(32, 2, depth=14, classes=21841, filters=4)
    assert state.params["head"]["kernel"].shape == (128, 21841)
    config = UNet2DConfig(levels=2, filters=4)
    step, (state, batch) = train.unet2d_step(
        8, config=config, norm=None, dtype="bfloat16", in_channels=1
    )
    assert batch["image"].shape == (1, 8, 8, 1)
    assert "InstanceNorm_0" not in state.params["down_0"]
    assert "bf16[3,3,1,4]" in str(jax.make_jaxpr(step)(state, batch))


def test_unknown_field_is_refused():
    with pytest.raises(TypeError, match="clases"):
        train.googlenet_step(clases=5)


def test_nnunet_takes_its_stages_from_the_size():
    """Six for 128^3, or fewer on request."""
    for stages, coarsest in (None, "down_5"), (3, "down_2"):
        params = train.nnunet3d_step(128, stages=stages)[1][0].params
        assert max(name for name in params if name.startswith("down")) == coarsest


@pytest.mark.slow
def test_enlarged_images_keep_the_state():
    """GoogLeNet with auxiliary classifiers on images of ten times the side."""
    googlenet, deeplab = (
        partial(train.googlenet_step, batch=5, aux=True),
        partial(train.deeplab_step, depth=14),
    )
    for build in googlenet, deeplab, train.alexnet_step:
        (usual, _), (enlarged, batch) = (build(image=image)[1] for image in (224, 2240))
        assert types(usual) == types(enlarged)
        assert batch["image"].shape[1:] == (2240, 2240, 3)


def test_volume_that_cannot_be_halved_is_refused():
    with pytest.raises(ValueError, match="divisible by 8"):
        train.unet3d_step((16, 16, 20))


@pytest.mark.parametrize("build", [train.unet3d_step, train.nnunet3d_step])
def test_size_of_another_rank_is_refused(build):
    with pytest.raises(ValueError, match="one side or 3, not 2"):
        build((16, 16))


@pytest.mark.parametrize(
    ("build", "fields", "blocks"),
    [
        (train.resnet_step, {"depth": 14, "filters": 4, "classes": 3}, 4),
        (
            train.deeplab_step,
            {"depth": 14, "filters": 4, "width": 4, "shallow": 2, "classes": 3},
            4,
        ),
        (train.googlenet_step, {"width": 0.05, "classes": 3}, 9),
        (train.unet2d_step, {"levels": 2, "filters": 2}, 3),
    ],
)
@pytest.mark.slow
def test_blocks_are_checkpointed_and_the_state_stays(build, fields, blocks):
    step, args = build(32, batch=2, **fields)
    checkpointed, same = build(32, batch=2, remat=True, **fields)
    assert jax.tree.structure(same) == jax.tree.structure(args)
    assert [
        str(jax.make_jaxpr(function)(*args)).count("remat") for function in (step, checkpointed)
    ] == [0, blocks]
