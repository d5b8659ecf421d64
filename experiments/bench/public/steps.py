"""The corpus: training steps of public repositories, at realistic sizes and at sizes for a CPU."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from experiments.bench.public import equinox_steps as equinox
from experiments.bench.public import flax_steps as flax
from experiments.bench.public import haiku_steps as haiku
from experiments.bench.public import vision_steps as vision
from experiments.bench.public.checkouts import Repository
from experiments.bench.public.equinox_steps import EQUINOX
from experiments.bench.public.flax_steps import FLAX
from experiments.bench.public.haiku_steps import HAIKU
from experiments.bench.public.training import TrainingStep
from experiments.bench.public.vision_steps import BIG_VISION, VISION_TRANSFORMER


@dataclass(frozen=True)
class PublicStep:
    """One step of the corpus."""

    name: str
    repository: Repository
    path: str  # of its training code
    device: str  # a described GPU of realistic size
    build: Callable[..., TrainingStep]  # builds it from the clones and `full` or `small`
    ours: str  # differences from the repository
    full: Mapping[str, Any]  # keywords of `build` for a realistic size
    small: Mapping[str, Any]  # for a size that a CPU steps in seconds

    def factory(self, checkouts: Path) -> Callable[[], TrainingStep]:
        """`() -> (step, args, donate_argnums)` at full size; args are `jax.ShapeDtypeStruct`s."""
        return lambda: self.build(checkouts, jax.eval_shape, **self.full)

    def small_factory(self, checkouts: Path) -> Callable[[], TrainingStep]:
        """The same at small size, with arrays: initial weights and random data."""
        return lambda: self.build(checkouts, lambda build: jax.jit(build)(), **self.small)


STEPS = {
    step.name: step
    for step in (
        PublicStep("flax-imagenet", FLAX, "examples/imagenet/train.py", "v100", flax.imagenet,
            "one replica instead of pmap", {"model": "ResNet50", "batch": 128, "size": 224},
            {"model": "_ResNet1", "batch": 2, "size": 32}),
        PublicStep("flax-lm1b", FLAX, "examples/lm1b/train.py", "a100", flax.lm1b, "no mesh",
            {"batch": 64, "tokens": 256},
            {"batch": 4, "tokens": 16, "vocab_size": 50, "num_layers": 2, "emb_dim": 16,
             "qkv_dim": 16, "mlp_dim": 32,
             "num_heads": 2}),
        PublicStep("flax-wmt", FLAX, "examples/wmt/train.py", "v100", flax.wmt,
            "one replica instead of pmap",
            {"batch": 32, "tokens": 256},
            {"batch": 2, "tokens": 16, "vocab_size": 50, "num_layers": 2, "emb_dim": 16,
             "qkv_dim": 16, "mlp_dim": 32,
             "num_heads": 2}),
        PublicStep("flax-nlp-seq", FLAX, "examples/nlp_seq/train.py", "v100", flax.nlp_seq,
            "one replica instead of pmap; optax.MultiSteps around the optimizer",
            {"batch": 64, "tokens": 256, "accumulated": 4},
            {"batch": 16, "tokens": 64, "accumulated": 2, "num_layers": 1, "emb_dim": 16,
             "qkv_dim": 16, "mlp_dim": 32,
             "num_heads": 2}),
        PublicStep("flax-ogbg-molpcba", FLAX, "examples/ogbg_molpcba/train.py", "a100",
            flax.ogbg_molpcba, "nothing",
            {"graphs": 2048, "nodes": 26 * 2048, "edges": 56 * 2048},
            {"graphs": 16, "nodes": 26 * 16, "edges": 56 * 16}),
        PublicStep("flax-seq2seq", FLAX, "examples/seq2seq/train.py", "v100", flax.seq2seq,
            "nothing",
            {"batch": 1024, "digits": 100, "width": 512}, {"batch": 16, "digits": 3, "width": 16}),
        PublicStep("flax-vae", FLAX, "examples/vae/train.py", "v100", flax.vae,
            "nothing; a batch far larger than the example's 128", {"batch": 2**17, "latents": 20},
            {"batch": 2048, "latents": 4}),
        PublicStep("flax-gemma", FLAX, "examples/gemma/train.py", "a100", flax.gemma, "no mesh",
            {"version": "gemma3_270m", "batch": 16, "tokens": 512},
            {"version": "gemma3_270m", "batch": 2, "tokens": 16, "num_layers": 2, "embed_dim": 16,
             "hidden_dim": 32,
             "num_heads": 2, "head_dim": 8}),
        PublicStep("haiku-imagenet", HAIKU, "examples/imagenet/train.py", "v100", haiku.imagenet,
            "one replica instead of pmap; the state as its leaves", {"batch": 128, "size": 224},
            {"batch": 2, "size": 32, "blocks": (1, 1, 1, 1)}),
        PublicStep("haiku-transformer", HAIKU, "examples/transformer/train.py", "a100",
            haiku.transformer, "nothing",
            {"layers": 12, "heads": 12, "width": 768, "batch": 16, "tokens": 512},
            {"layers": 1, "heads": 2, "width": 16, "batch": 8, "tokens": 8}),
        PublicStep("haiku-rnn", HAIKU, "examples/rnn/train.py", "v100", haiku.rnn, "nothing",
            {"batch": 128, "tokens": 512, "width": 1024}, {"batch": 8, "tokens": 8, "width": 16}),
        PublicStep("equinox-vit", EQUINOX, "docs/examples/vision_transformer.ipynb", "v100",
            equinox.vision_transformer,
            "nothing", {"batch": 256, "size": 64},
            {"batch": 16, "size": 8, "embedding_dim": 16, "hidden_dim": 8, "num_heads": 2,
             "num_layers": 1}),
        PublicStep("equinox-bert", EQUINOX, "docs/examples/bert.ipynb", "v100", equinox.bert,
            "one replica instead of pmap; BERT-base instead of the tiny one",
            {"batch": 32, "tokens": 256, "hidden_size": 768, "num_hidden_layers": 12,
             "num_attention_heads": 12,
             "intermediate_size": 3072},
            {"batch": 16, "tokens": 8, "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1,
             "num_attention_heads": 2, "intermediate_size": 32}),
        PublicStep("equinox-gan", EQUINOX, "docs/examples/deep_convolutional_gan.ipynb", "v100",
            equinox.convolutional_gan,
            "both steps of an iteration in one; the optimizer keeps no moments for flags",
            {"batch": 1024, "filters": 64}, {"batch": 8, "filters": 2}),
        PublicStep("equinox-unet", EQUINOX,
            "docs/examples/unet.ipynb and score_based_diffusion.ipynb", "a100",
            equinox.unet_diffusion, "the model of one notebook in the step of the other",
            {"batch": 64, "size": 64, "width": 128, "levels": (1, 2, 4)},
            {"batch": 8, "size": 8, "width": 16, "levels": (1, 2)}),
        PublicStep("vit-jax-b16", VISION_TRANSFORMER, "vit_jax/train.py", "a100", vision.fine_tuned,
            "one replica instead of pmap",
            {"model": "ViT-B_16", "batch": 512, "accumulated": 8, "size": 224, "classes": 100},
            {"model": "testing", "batch": 16, "accumulated": 2, "size": 32, "classes": 10}),
        PublicStep("big-vision-s16", BIG_VISION, "big_vision/train.py", "a100", vision.big_vision,
            "update_fn is cut out of main; no mesh, no mixup",
            {"variant": "S/16", "batch": 128, "size": 224},
            {"variant": "mu/16", "batch": 8, "size": 32}),
    )
}  # fmt: skip
