"""Steps of google-research/vision_transformer and google-research/big_vision."""

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from experiments.bench.public.checkouts import Repository, cut, folder_of, imported
from experiments.bench.public.training import Make, TrainingStep, images, integers, of_one_replica

VISION_TRANSFORMER = Repository(
    "google-research/vision_transformer", "c6de1e5378c9831a8477feb30994971bdc409e46", "Apache-2.0"
)
BIG_VISION = Repository(
    "google-research/big_vision", "0127fb6b337ee2a27bf4e54dea79cff176527356", "Apache-2.0"
)
STAND_INS = (  # For data, logs and checkpoints.
    "tensorflow", "tensorflow_datasets", "tensorflow_text", "clu.metric_writers",
    "clu.periodic_actions",
    "flax.training.checkpoints", "pandas", "vit_jax.checkpoint", "vit_jax.input_pipeline",
    "vit_jax.models_lit",
)  # fmt: skip


def fine_tuned(
    checkouts: Path,
    make: Make,
    *,
    model: str,
    batch: int,
    accumulated: int,
    size: int,
    classes: int,
) -> TrainingStep:
    """A float32 vision transformer or mixer; its gradient accumulates over parts of the batch."""
    train = imported(folder_of(checkouts, VISION_TRANSFORMER), "vit_jax.train", STAND_INS)
    network = train.models.get_model(model, num_classes=classes)
    rate = train.utils.create_learning_rate_schedule(10_000, 0.03, "cosine", 500)
    sgd = optax.sgd(rate, momentum=0.9, accumulator_dtype="bfloat16")
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), sgd)
    update = train.make_update_fn(
        apply_fn=network.apply, accum_steps=accumulated, tx=optimizer
    ).__wrapped__

    def args() -> Any:
        params = network.init(jax.random.key(0), jnp.ones((1, size, size, 3)), train=False)[
            "params"
        ]
        labels = jax.nn.one_hot(integers(batch, below=classes), classes)
        shown = {"image": images(batch, size, size, 3), "label": labels}
        return params, optimizer.init(params), shown, jax.random.key(3)

    return TrainingStep(of_one_replica(update, "batch"), make(args), (0, 1))


def big_vision(checkouts: Path, make: Make, *, variant: str, batch: int, size: int) -> TrainingStep:
    """The ViT of `configs/vit_s16_i1k.py` without mixup; `update_fn` is cut out of `main`."""
    root = folder_of(checkouts, BIG_VISION)
    config = imported(root, "big_vision.configs.vit_s16_i1k", STAND_INS).get_config()
    config.mixup.p, config.model.variant = 0.0, variant
    vit, optimizers = (
        imported(root, f"big_vision.{name}", STAND_INS)
        for name in (f"models.{config.model_name}", "optax")
    )
    model = vit.Model(num_classes=config.num_classes, **config.model)

    def params() -> Any:
        return nn.unbox(model.init(jax.random.key(0), jnp.ones((1, size, size, 3)))["params"])

    schedule = {"total_steps": 100_000, "batch_size": batch, "data_size": 1_281_167}
    optimizer, _ = optimizers.make(config, jax.eval_shape(params), sched_kw=schedule)
    names = {
        "config": config,
        "model": model,
        "tx": optimizer,
        "u": optimizers.u,
        "bv_optax": optimizers,
    }
    libraries = {"jax": jax, "jnp": jnp, "optax": optax}
    update = cut(root / "big_vision/train.py", "update_fn", {**names, **libraries})

    def args() -> Any:
        weights = params()
        labels = jax.nn.one_hot(integers(batch, below=config.num_classes), config.num_classes)
        shown = {"image": images(batch, size, size, 3), "labels": labels}
        return {"params": weights, "opt": optimizer.init(weights)}, jax.random.key(3), shown

    return TrainingStep(update, make(args), (0,))
