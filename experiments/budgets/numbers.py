"""Does a planned step compute what the plain one computes, to the last bit? Every model, at small size, on the CPU.

    python -m experiments.budgets.numbers [--only NAME ...] [--out FILE]

How it is asked: `bits`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import jax.numpy as jnp

from experiments.budgets.bits import Training, compare_all
from models.alexnet import AlexNetConfig
from models.deeplab import DeepLabConfig
from models.googlenet import GoogLeNetConfig
from models.resnet import ResNetConfig
from models.train import (
    Built,
    alexnet_step,
    decoder_step,
    deeplab_step,
    googlenet_step,
    nnunet2d_step,
    nnunet3d_step,
    resnet_step,
    unet2d_step,
    unet3d_step,
)
from models.transformer import DecoderConfig
from models.unet2d import UNet2DConfig
from models.unet3d import UNet3DConfig

NUMBERS = Path(__file__).parent / "numbers.json"

_BLOCK = (8, 8, 8, 8, 8, 8)
_DECODER = partial(DecoderConfig, layers=3, width=32, heads=4, vocab=128, context=64)
MODELS: Mapping[str, Callable[[], Built]] = {
    "alexnet": lambda: alexnet_step(95, 32, AlexNetConfig(width=1 / 16, classes=10), concrete=True),
    "googlenet": lambda: googlenet_step(
        64, 8, GoogLeNetConfig(width=1 / 4, classes=10, stages=((), (_BLOCK, _BLOCK)), aux=False), concrete=True
    ),
    "resnet": lambda: resnet_step(64, 4, config=ResNetConfig(depth=14, filters=8, classes=10), concrete=True),
    "resnet_deep": lambda: resnet_step(32, 4, config=ResNetConfig(depth=26, filters=8, classes=10), concrete=True),
    "deeplab": lambda: deeplab_step(
        65, 2, config=DeepLabConfig(depth=14, filters=8, classes=5, width=16, shallow=8), concrete=True
    ),
    "unet2d": lambda: unet2d_step(64, 2, UNet2DConfig(filters=8), concrete=True),
    "unet3d": lambda: unet3d_step(32, config=UNet3DConfig(filters=8, levels=3), concrete=True),
    "unet3d_bf16": lambda: unet3d_step(32, config=UNet3DConfig(filters=8, levels=3, dtype=jnp.bfloat16), concrete=True),
    "unet3d_transpose": lambda: unet3d_step(
        32, config=UNet3DConfig(filters=8, levels=3, upsampling="transpose"), concrete=True
    ),
    "nnunet2d": lambda: nnunet2d_step(64, 2, filters=8, concrete=True),
    "nnunet3d": lambda: nnunet3d_step(32, 1, filters=8, concrete=True),
    "decoder": lambda: decoder_step(batch=4, tokens=64, config=_DECODER(), concrete=True),
    "decoder_bf16": lambda: decoder_step(batch=4, tokens=64, config=_DECODER(dtype=jnp.bfloat16), concrete=True),
    "decoder_scan": lambda: decoder_step(batch=4, tokens=64, config=_DECODER(scan=True), concrete=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=MODELS, default=list(MODELS))
    parser.add_argument("--out", type=Path, default=NUMBERS)
    args = parser.parse_args()
    compare_all(args.only, lambda name: Training(*MODELS[name]()), args.out)


if __name__ == "__main__":
    main()
