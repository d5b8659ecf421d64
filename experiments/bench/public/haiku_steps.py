"""Steps of google-deepmind/dm-haiku's examples, with the library from the same clone."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench.public.checkouts import Repository, folder_of, imported
from experiments.bench.public.training import Make, TrainingStep, images, integers, of_one_replica

HAIKU = Repository(
    "google-deepmind/dm-haiku", "f4d858a5cbb29140855d68f81f5fd625e078a5ae", "Apache-2.0"
)
STAND_INS = ("tensorflow", "tensorflow_datasets")  # For data.


def _example(checkouts: Path, name: str) -> Any:
    return imported(folder_of(checkouts, HAIKU), f"examples.{name}.train", STAND_INS)


def imagenet(
    checkouts: Path, make: Make, *, batch: int, size: int, blocks: tuple[int, ...] | None = None
) -> TrainingStep:
    """ResNet-50 v2 in float16 with float32 norms and jmp's dynamic loss scale.

    Non-finite updates are skipped. The state is passed as its leaves, because `jax.jit(...).lower`
    cannot describe jmp 0.0.4's loss scale. `blocks` gives a shallow network in place of ResNet-50.
    """
    train = _example(checkouts, "imagenet")
    flags, hk = train.FLAGS, train.hk
    flags.mp_policy, flags.mp_bn_policy = "p=f32,c=f16,o=f16", "p=f32,c=f32,o=f32"
    flags.mp_scale_type, flags.mp_skip_nonfinite = "Dynamic", True
    flags.train_device_batch_size = batch
    inner, network = train.get_policy(), hk.nets.ResNet50
    if blocks is not None:
        network = hk.nets.ResNet
        narrow = {"bottleneck": False, "channels_per_group": (8, 16, 32, 64)}
        hk.nets.ResNet50 = partial(network, blocks, **narrow)
    hk.mixed_precision.set_policy(
        hk.BatchNorm, train.get_bn_policy().with_output_dtype(inner.compute_dtype)
    )
    hk.mixed_precision.set_policy(network, inner)
    form: list[Any] = []

    def args() -> Any:
        shown = {
            "images": images(batch, size, size, 3, dtype=jnp.float16),
            "labels": integers(batch, below=1000),
        }
        leaves, tree = jax.tree.flatten(train.initial_state(jax.random.key(0), shown))
        form.append(tree)
        return leaves, shown

    def step(leaves: Any, shown: Any) -> Any:
        state, scalars = train.train_step.__wrapped__(jax.tree.unflatten(form[0], leaves), shown)
        return jax.tree.leaves(state), scalars

    return TrainingStep(of_one_replica(step, "i"), make(args), (0,))


def transformer(
    checkouts: Path, make: Make, *, layers: int, heads: int, width: int, batch: int, tokens: int
) -> TrainingStep:
    """A float32 decoder of characters; dropout, clipped gradients, Adam."""
    train = _example(checkouts, "transformer")
    train.NUM_LAYERS, train.NUM_HEADS, train.MODEL_SIZE, train.KEY_SIZE = (
        layers,
        heads,
        width,
        width // heads,
    )

    def args() -> Any:
        words = integers(batch, tokens, below=train.dataset.VOCAB_SIZE, low=1)
        data = train.dataset.Batch(inputs=words, targets=jnp.roll(words, -1, axis=1))
        return train.init(jax.random.key(0), data), data

    return TrainingStep(train.update, make(args), (0,))


def rnn(checkouts: Path, make: Make, *, batch: int, tokens: int, width: int) -> TrainingStep:
    """A model of characters with two LSTMs in a loop; Adam."""
    train = _example(checkouts, "rnn")
    train.HIDDEN_SIZE.value = width
    init, _ = train.hk.without_apply_rng(train.hk.transform(train.sequence_loss))

    def args() -> Any:
        words = integers(tokens, batch, below=train.dataset.NUM_CHARS)
        data = {"input": words, "target": jnp.roll(words, -1, axis=0)}
        params = init(jax.random.key(0), data)
        return train.TrainingState(
            params=params, opt_state=train.make_optimizer().init(params)
        ), data

    return TrainingStep(train.update, make(args), (0,))
