"""The measurements on a card, most informative first, and toy ones to try the script."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import jax.numpy as jnp

from models.train import (
    Built,
    decoder_step,
    deeplab_step,
    googlenet_step,
    nnunet2d_step,
    resnet_step,
    unet2d_step,
    unet3d_step,
)
from models.transformer import DecoderConfig
from models.unet3d import UNet3DConfig

_TOY_DECODER = DecoderConfig(vocab=128, layers=3, width=32, heads=4, context=64)

MODELS: Mapping[str, Callable[..., Built]] = {
    **{f"resnet50-b{batch}": partial(resnet_step, batch=batch) for batch in (64, 256)},
    **{f"unet3d-{size}": partial(unet3d_step, size) for size in (64, 128, 256, 384, 512)},
    "decoder-8-bf16": partial(decoder_step, config=DecoderConfig(layers=8, dtype=jnp.bfloat16)),
    "decoder-8-scan": partial(decoder_step, config=DecoderConfig(layers=8, scan=True)),
    "unet2d-512": partial(unet2d_step, 512, batch=4),
    "deeplab-b16": partial(deeplab_step, batch=16),
    "googlenet-bf16": partial(googlenet_step, batch=128, dtype="bfloat16"),
    "nnunet2d": partial(nnunet2d_step),
    "toy-unet3d": partial(unet3d_step, 16, config=UNet3DConfig(levels=1, filters=4)),
    "toy-decoder": partial(decoder_step, batch=4, tokens=64, config=_TOY_DECODER),
    "toy-decoder-scan": partial(
        decoder_step, batch=4, tokens=64, config=_TOY_DECODER, layers=4, scan=True
    ),
}
"""`MODELS[name](concrete=True, seed=0)` is `(step, (state, batch))`."""


@dataclass(frozen=True)
class Row:
    """One measurement, in a process of its own."""

    name: str
    measure: str  # one of `measure.MEASURES`
    model: str = ""  # one of `MODELS`
    share: float = 0.0  # the budget, as a share of the plain step's bytes
    budget: str = ""  # or as `memplan.jit` takes it
    smallest: bool = False  # if nothing fits, take the smallest feasible budget
    host_state: bool = False  # the state lives in host memory
    plain: bool = True  # the plain step runs too, and the numbers of both are compared
    seeds: int = 1  # states and batches that are compared
    groups: Sequence[str] = ()  # beginnings of names in `operations.GROUPS`
    fresh_kernels: bool = False  # do not share XLA's kernel choices with other rows
    environment: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 240  # time limit, including the wait for the card


_PREALLOCATED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
_REPEATABLE = {"XLA_FLAGS": "--xla_gpu_exclude_nondeterministic_ops=true"}
_WITHOUT_GRAPHS = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="}
_SMALL_CARD = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1"}
_SMALL_POOL = {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "1"}
# Skips XLA's autotuning: for large convolutions, an H100 was not ready after 300 s, where a
# described one takes 37 s.
_UNTIMED = {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}
_LARGEST = {
    **_UNTIMED,
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
    "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "100",
}

# Disables CUDA graphs, in which the profiler does not know a kernel's instruction.
_Kernels = partial(Row, measure="step_kernels", environment=_WITHOUT_GRAPHS)
_Operations = partial(Row, measure="operations", environment=_WITHOUT_GRAPHS)
_CALLS = "launches", "trips", "arguments"
_Slabs = partial(Row, measure="planned", smallest=True)

ROWS = (
    Row("rates", "rates"),
    Row("ResNet-50, half, by both clocks", "clocks", "resnet50-b64", 0.5),
    Row("decoder, half, by both clocks", "clocks", "decoder-8-bf16", 0.5),
    Row("2D U-Net, half, by both clocks", "clocks", "unet2d-512", 0.5),
    Row("ResNet-50, batch 64, half", "planned", "resnet50-b64", 0.5),
    Row("3D U-Net 128^3, half", "planned", "unet3d-128", 0.5),
    Row("decoder of 8 layers, bfloat16, half", "planned", "decoder-8-bf16", 0.5),
    _Slabs(
        "3D U-Net 256^3, slabs",
        model="unet3d-256",
        budget="8GiB",
        limit_s=300,
        environment=_UNTIMED,
    ),
    Row("ResNet-50, batch 64, jax.checkpoint", "checkpoint", "resnet50-b64"),
    Row("decoder of 8 layers, bfloat16, jax.checkpoint", "checkpoint", "decoder-8-bf16"),
    Row(
        "ResNet-50, repeatable kernels",
        "planned",
        "resnet50-b64",
        0.5,
        seeds=3,
        environment=_REPEATABLE,
    ),
    Row("scanned decoder, loops", "planned", "decoder-8-scan", 0.6),
    Row("ResNet-50, no CUDA graphs", "planned", "resnet50-b64", 0.5, environment=_WITHOUT_GRAPHS),
    Row("scanned decoder, state on the host", "planned", "decoder-8-scan", 0.6, host_state=True),
    Row(
        "ResNet-50, batch 256, a tenth of the card",
        "planned",
        "resnet50-b256",
        budget="90%",
        environment=_SMALL_CARD,
    ),
    Row(
        "ResNet-50, batch 64, next start",
        "restart",
        "resnet50-b64",
        0.5,
        fresh_kernels=True,
        limit_s=240,
    ),
    Row("3D U-Net 64^3, slabs, gate", "gate", "unet3d-64", 0.35, limit_s=240),
    Row("scanned decoder, loops, gate", "gate", "decoder-8-scan", 0.6),
    Row("3D U-Net 256^3, a third", "planned", "unet3d-256", budget="10GiB", limit_s=240),
    Row(
        "ResNet-50, batch 256, a pinned pool of 1 GiB",
        "attempt",
        "resnet50-b256",
        0.4,
        environment=_SMALL_POOL,
    ),
    Row("3D U-Net 128^3, jax.checkpoint", "checkpoint", "unet3d-128"),
    Row("ResNet-50, batch 64, 30 %", "planned", "resnet50-b64", 0.3),
    _Slabs(
        "3D U-Net 384^3, slabs",
        model="unet3d-384",
        budget="16GiB",
        plain=False,
        limit_s=400,
        environment=_UNTIMED,
    ),
    _Slabs(
        "3D U-Net 512^3, slabs",
        model="unet3d-512",
        budget="68GiB",
        plain=False,
        limit_s=400,
        environment=_LARGEST,
    ),
    Row(
        "ResNet-50, preallocated",
        "planned",
        "resnet50-b64",
        0.5,
        plain=False,
        environment=_PREALLOCATED,
    ),
    _Operations("convolutions", groups=("images", "volumes")),
    _Operations(
        "products and memory",
        groups=("products", "bandwidth", "reductions", "movements", "library"),
    ),
    _Operations("calls", groups=_CALLS),
    Row("calls, CUDA graphs", "operations", groups=_CALLS),
    Row("link", "link"),
    _Kernels("kernels of ResNet-50", model="resnet50-b64"),
    _Kernels("kernels of 3D U-Net 128^3", model="unet3d-128"),
    _Kernels("kernels of decoder, bfloat16", model="decoder-8-bf16"),
    _Kernels("kernels of decoder, scanned, loops", model="decoder-8-scan", share=0.6),
    _Kernels("kernels of 3D U-Net 128^3, half", model="unet3d-128", share=0.5),
    _Kernels("kernels of ResNet-50, half", model="resnet50-b64", share=0.5),
    _Kernels("kernels of 2D U-Net", model="unet2d-512"),
    _Kernels("kernels of DeepLabV3+", model="deeplab-b16"),
    _Kernels("kernels of GoogLeNet, bfloat16", model="googlenet-bf16"),
    _Kernels("kernels of nnU-Net 2D", model="nnunet2d"),
)

# Kernels are interpreted. The toy decoder takes the smallest budget: on an H100 most of its bytes
# are cuBLAS's workspace of 32 MiB.
_Toy = partial(Row, limit_s=600)
TOY_ROWS = (
    _Toy("rates", "rates"),
    _Toy("3D U-Net, seeds", "planned", "toy-unet3d", 0.75, seeds=2),
    _Toy("3D U-Net, slabs", "planned", "toy-unet3d", 0.5),
    _Toy("scanned decoder, loops", "planned", "toy-decoder-scan", 0.9, smallest=True),
    _Toy(
        "scanned decoder, state on the host",
        "planned",
        "toy-decoder-scan",
        0.9,
        smallest=True,
        host_state=True,
    ),
    _Toy("3D U-Net, jax.checkpoint", "checkpoint", "toy-unet3d"),
    _Toy("3D U-Net, by both clocks", "clocks", "toy-unet3d", 0.75),
    _Toy("3D U-Net, next start", "restart", "toy-unet3d", 0.75, fresh_kernels=True),
    _Toy("3D U-Net, slabs, gate", "gate", "toy-unet3d", 0.5),
    _Toy(
        "3D U-Net, preallocated",
        "planned",
        "toy-unet3d",
        0.75,
        plain=False,
        environment=_PREALLOCATED,
    ),
    _Toy("kernels of 3D U-Net", "step_kernels", "toy-unet3d"),
    _Toy("calls", "operations", groups=("trips", "arguments, 10")),
    _Toy("3D U-Net, a pinned pool of 1 GiB", "attempt", "toy-unet3d", 0.5, environment=_SMALL_POOL),
)
