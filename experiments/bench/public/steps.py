"""The corpus: training steps of public repositories, at sizes that people train and at sizes for a CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from experiments.bench.public import equinox_steps, flax_steps, haiku_steps, vision_steps
from experiments.bench.public.checkouts import Repository
from experiments.bench.public.training import TrainingStep


@dataclass(frozen=True)
class PublicStep:
    """One step of the corpus.

    Attributes:
      repository, path: where its training code is.
      device: a described GPU that people could train it on.
      build: makes it of the clones; takes `full` or `small` by name.
      full: a realistic size, in the words of `build`.
      small: one that a CPU steps in seconds.
      ours: what of the step is not the repository's.
    """

    name: str
    repository: Repository
    path: str
    device: str
    build: Callable[..., TrainingStep]
    full: Mapping[str, Any]
    small: Mapping[str, Any]
    ours: str

    def factory(self, checkouts: Path) -> Callable[[], TrainingStep]:
        """`() -> (step, args, donate_argnums)` at the full size; args are `jax.ShapeDtypeStruct`s."""
        return lambda: self.build(checkouts, jax.eval_shape, **self.full)

    def small_factory(self, checkouts: Path) -> Callable[[], TrainingStep]:
        """The same at the small size, with arrays: initial weights, random data."""
        return lambda: self.build(checkouts, lambda made: jax.jit(made)(), **self.small)


STEPS = {
    step.name: step
    for step in (
        PublicStep(
            name="flax-imagenet",
            repository=flax_steps.FLAX,
            path="examples/imagenet/train.py",
            device="v100",
            build=flax_steps.imagenet,
            full={"model": "ResNet50", "batch": 128, "size": 224},
            small={"model": "_ResNet1", "batch": 2, "size": 32},
            ours="one replica instead of pmap",
        ),
        PublicStep(
            name="flax-lm1b",
            repository=flax_steps.FLAX,
            path="examples/lm1b/train.py",
            device="a100",
            build=flax_steps.lm1b,
            full={"batch": 64, "tokens": 256},
            small={
                "batch": 4, "tokens": 16, "vocab_size": 50, "num_layers": 2, "emb_dim": 16, "qkv_dim": 16,
                "mlp_dim": 32, "num_heads": 2,
            },
            ours="no mesh",
        ),
        PublicStep(
            name="flax-wmt",
            repository=flax_steps.FLAX,
            path="examples/wmt/train.py",
            device="v100",
            build=flax_steps.wmt,
            full={"batch": 32, "tokens": 256},
            small={
                "batch": 2, "tokens": 16, "vocab_size": 50, "num_layers": 2, "emb_dim": 16, "qkv_dim": 16,
                "mlp_dim": 32, "num_heads": 2,
            },
            ours="one replica instead of pmap",
        ),
        PublicStep(
            name="flax-nlp-seq",
            repository=flax_steps.FLAX,
            path="examples/nlp_seq/train.py",
            device="v100",
            build=flax_steps.nlp_seq,
            full={"batch": 64, "tokens": 256, "accumulated": 4},
            small={
                "batch": 16, "tokens": 64, "accumulated": 2, "num_layers": 1, "emb_dim": 16, "qkv_dim": 16,
                "mlp_dim": 32, "num_heads": 2,
            },
            ours="one replica instead of pmap; optax.MultiSteps around the optimizer",
        ),
        PublicStep(
            name="flax-ogbg-molpcba",
            repository=flax_steps.FLAX,
            path="examples/ogbg_molpcba/train.py",
            device="a100",
            build=flax_steps.ogbg_molpcba,
            full={"graphs": 2048, "nodes": 26 * 2048, "edges": 56 * 2048},
            small={"graphs": 16, "nodes": 26 * 16, "edges": 56 * 16},
            ours="nothing",
        ),
        PublicStep(
            name="flax-seq2seq",
            repository=flax_steps.FLAX,
            path="examples/seq2seq/train.py",
            device="v100",
            build=flax_steps.seq2seq,
            full={"batch": 1024, "digits": 100, "width": 512},
            small={"batch": 16, "digits": 3, "width": 16},
            ours="nothing",
        ),
        PublicStep(
            name="flax-vae",
            repository=flax_steps.FLAX,
            path="examples/vae/train.py",
            device="v100",
            build=flax_steps.vae,
            full={"batch": 2**17, "latents": 20},
            small={"batch": 2048, "latents": 4},
            ours="nothing; a batch far larger than the example's 128",
        ),
        PublicStep(
            name="flax-gemma",
            repository=flax_steps.FLAX,
            path="examples/gemma/train.py",
            device="a100",
            build=flax_steps.gemma,
            full={"version": "gemma3_270m", "batch": 16, "tokens": 512},
            small={
                "version": "gemma3_270m", "batch": 2, "tokens": 16, "num_layers": 2, "embed_dim": 16,
                "hidden_dim": 32, "num_heads": 2, "head_dim": 8,
            },
            ours="no mesh",
        ),
        PublicStep(
            name="haiku-imagenet",
            repository=haiku_steps.HAIKU,
            path="examples/imagenet/train.py",
            device="v100",
            build=haiku_steps.imagenet,
            full={"batch": 128, "size": 224},
            small={"batch": 2, "size": 32, "blocks": (1, 1, 1, 1)},
            ours="one replica instead of pmap; the state as its leaves",
        ),
        PublicStep(
            name="haiku-transformer",
            repository=haiku_steps.HAIKU,
            path="examples/transformer/train.py",
            device="a100",
            build=haiku_steps.transformer,
            full={"layers": 12, "heads": 12, "width": 768, "batch": 16, "tokens": 512},
            small={"layers": 1, "heads": 2, "width": 16, "batch": 8, "tokens": 8},
            ours="nothing",
        ),
        PublicStep(
            name="haiku-rnn",
            repository=haiku_steps.HAIKU,
            path="examples/rnn/train.py",
            device="v100",
            build=haiku_steps.rnn,
            full={"batch": 128, "tokens": 512, "width": 1024},
            small={"batch": 8, "tokens": 8, "width": 16},
            ours="nothing",
        ),
        PublicStep(
            name="equinox-vit",
            repository=equinox_steps.EQUINOX,
            path="docs/examples/vision_transformer.ipynb",
            device="v100",
            build=equinox_steps.vision_transformer,
            full={"batch": 256, "size": 64},
            small={"batch": 16, "size": 8, "embedding_dim": 16, "hidden_dim": 8, "num_heads": 2, "num_layers": 1},
            ours="nothing",
        ),
        PublicStep(
            name="equinox-bert",
            repository=equinox_steps.EQUINOX,
            path="docs/examples/bert.ipynb",
            device="v100",
            build=equinox_steps.bert,
            full={
                "batch": 32, "tokens": 256, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
                "intermediate_size": 3072,
            },
            small={
                "batch": 16, "tokens": 8, "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1,
                "num_attention_heads": 2, "intermediate_size": 32,
            },
            ours="one replica instead of pmap; BERT-base instead of the tiny one",
        ),
        PublicStep(
            name="equinox-gan",
            repository=equinox_steps.EQUINOX,
            path="docs/examples/deep_convolutional_gan.ipynb",
            device="v100",
            build=equinox_steps.convolutional_gan,
            full={"batch": 1024, "filters": 64},
            small={"batch": 8, "filters": 2},
            ours="both steps of an iteration in one; the optimizer keeps no moments for flags",
        ),
        PublicStep(
            name="equinox-unet",
            repository=equinox_steps.EQUINOX,
            path="docs/examples/unet.ipynb and score_based_diffusion.ipynb",
            device="a100",
            build=equinox_steps.unet_diffusion,
            full={"batch": 64, "size": 64, "width": 128, "levels": (1, 2, 4)},
            small={"batch": 8, "size": 8, "width": 16, "levels": (1, 2)},
            ours="the model of one notebook in the step of the other",
        ),
        PublicStep(
            name="vit-jax-b16",
            repository=vision_steps.VISION_TRANSFORMER,
            path="vit_jax/train.py",
            device="a100",
            build=vision_steps.fine_tuned,
            full={"model": "ViT-B_16", "batch": 512, "accumulated": 8, "size": 224, "classes": 100},
            small={"model": "testing", "batch": 16, "accumulated": 2, "size": 32, "classes": 10},
            ours="one replica instead of pmap",
        ),
        PublicStep(
            name="big-vision-s16",
            repository=vision_steps.BIG_VISION,
            path="big_vision/train.py",
            device="a100",
            build=vision_steps.big_vision,
            full={"variant": "S/16", "batch": 128, "size": 224},
            small={"variant": "mu/16", "batch": 8, "size": 32},
            ours="update_fn is cut out of main; no mesh, no mixup",
        ),
    )
}  # fmt: skip
