"""The cases: a training step, the device it is planned for, and a budget. A new case is a new line.

Shares are in percent of the plain step's bytes on that device, as the compiler reports them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench import boundaries, field_steps, second_order, situations
from experiments.bench.long_scans import LONG_SCANS, nested
from experiments.bench.public.checkouts import checkouts_folder
from experiments.bench.public.mesh_steps import MESH_STEPS
from experiments.bench.public.steps import STEPS
from experiments.bench.random_programs import drawn_program
from experiments.bench.random_steps import drawn_step
from experiments.bench.slab_steps import FACES, parcellation
from experiments.bench.steps import (
    BF16,
    DECODER_8,
    DECODER_24,
    F32,
    GROWING,
    SMALL,
    decoder,
    least_halo_bytes,
    mlp_step,
    resnet,
    sharded_decoder,
    small_resnet,
    spread_unet3d,
    unet3d,
)
from memplan.cli import factory
from models import train
from models.resnet import ResNetConfig
from models.transformer import CHECKPOINTS, DecoderConfig
from models.unet2d import UNet2DConfig
from models.unet3d import UNet3DConfig


@dataclass(frozen=True)
class Case:
    """A step to measure."""

    name: str  # of the case within its question; names its result
    make: Callable[..., Any]  # () -> (step, args), or with the donated positions if not (0,)
    device: str = ""  # a described GPU, such as "v100" or "v100@pcie3x16"; "": the local device
    # Percent of the plain step's bytes, or bytes such as "15GiB"; None: the plain step.
    budget: int | str | None = None
    host_budget: str | None = None
    host_state: tuple[int, ...] = ()  # positions of arguments that stay in host memory
    # Another case; this one is asked only if that one fits (True) or does not (False).
    after: tuple[str, bool] | None = None
    minutes: float = 10.0  # time limit
    facts: Mapping[str, Any] = field(default_factory=dict)  # for the measure or the table

    def built(self) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]:
        """The step, its arguments, and the positions of the donated ones."""
        step, args, *donated = self.make()
        return step, tuple(args), donated[0] if donated else (0,)


Cases = Mapping[str, Case]
Where = tuple[str, tuple[int | str, ...]]
"""A device and budgets for it."""


def by_name(cases: Iterable[Case]) -> Cases:
    return {case.name: case for case in cases}


def under(name: str, make: Callable[..., Any], *where: Where, **facts: Any) -> Iterator[Case]:
    """Cases of one step on devices under budgets."""
    for device, budgets in where:
        yield from (
            Case(f"{name}-{device}-{budget}", make, device, budget, facts=facts)
            for budget in budgets
        )


# First the cases that README.md quotes, then other models, types and devices, to avoid overfitting.
UNET3D_144, RESNET50_64 = unet3d(144), resnet(64)
BUDGETS = by_name((
    *under("unet3d_144", UNET3D_144, ("v100", (75, 60, 55)), ("h200", (75, 60, 55)), required=True),
    *under("resnet50_b64", RESNET50_64, ("v100", (75, 50, 30)), required=True),
    *under("decoder_24_bf16", decoder(**DECODER_24, dtype=BF16), ("a100", (75, 50, 35)),
        required=True),
    *under("mlp_24", mlp_step, ("b200", (70, 50)), ("gh200", (40,))),
    *under("unet3d_96_f16", unet3d(96, filters=16), ("p100", (70, 50)), ("a100", (50,))),
    *under("unet3d_96_transpose", unet3d(96, filters=16, upsampling="transpose"),
        ("a100", (70, 50))),
    *under("unet3d_96_bf16", unet3d(96, dtype=BF16), ("h200", (70, 50))),
    *under("unet2d_256_b8", partial(train.unet2d_step, 256, batch=8), ("v100", (70, 50, 40)),
        ("h200", (50,))),
    *under("decoder_8_f32", decoder(**DECODER_8, dtype=F32), ("v100", (70, 50))),
    *under("decoder_8_bf16", decoder(**DECODER_8, dtype=BF16), ("h100", (70, 50))),
    *under("decoder_8_scan", decoder(**DECODER_8, dtype=F32, scan=True), ("a100", (95,))),
    *under("resnet50_b32", resnet(32), ("h100", (70, 40)), ("p100", (50,))),
    *under("resnet101_b16", resnet(16, depth=101), ("rtx4090", (50,))),
    *under("resnet50_b64", RESNET50_64, ("v100", ("1250MiB",))),
    *under("resnet50_b1152", resnet(1152), ("v100", ("15GiB",))),
))  # fmt: skip
TPU = by_name(
    Case(f"{name}-{chip}", make, chip, minutes=60, facts={"shares": (75, 50, 35)})
    for chip in ("v5e", "v5p", "v6e")
    for name, make in (
        ("mlp_8", partial(mlp_step, 8)),
        ("mlp_8_odd", partial(mlp_step, 8, 1000, 30001)),
        ("decoder_8_scan", decoder(**DECODER_8, dtype=BF16, scan=True)),
        ("decoder_8_bf16", decoder(**DECODER_8, dtype=BF16)),
        ("resnet50_b64", RESNET50_64),
        ("unet3d_96", unet3d(96)),
    )
)
# Of these steps, both clocks plan and both time the plans.
CLOCKS = {
    name: BUDGETS[name]
    for name in (
        "resnet50_b64-v100-50", "resnet50_b32-h100-40", "unet3d_144-h200-55",
        "unet3d_96_bf16-h200-50", "unet2d_256_b8-h200-50", "decoder_8_bf16-h100-50",
        "decoder_24_bf16-a100-50", "mlp_24-b200-50",
    )
}  # fmt: skip


def _public(name: str, small: bool = False) -> Any:
    step, folder = STEPS[name], checkouts_folder()
    return (step.small_factory if small else step.factory)(folder)()


def _called(call: str) -> Any:
    return factory.load(factory.parse(call))


def _meshed(name: str) -> Any:
    return MESH_STEPS[name].build(checkouts_folder())


def _ladder(name: str, device: str) -> Iterator[Case]:
    """Cases within 50 % of the bytes; if nothing fits, within 60, then 75 %."""
    after = None
    for share in (50, 60, 75):
        case = Case(f"{name}-{device}-{share}", partial(_public, name), device, share, after=after)
        yield case
        after = case.name, False


PUBLIC = by_name(case for step in STEPS.values() for case in _ladder(step.name, step.device))

BITS = by_name(Case(name, make) for name, make in SMALL.items())
PUBLIC_BITS = by_name(Case(name, partial(_public, name, small=True)) for name in STEPS)
DRAWN = by_name([
    Case("500", drawn_step, minutes=90, facts={"count": 500}),
    Case("nested_300", drawn_program, minutes=90, facts={"count": 300, "nested": True}),
])  # fmt: skip
ABORTS = by_name(
    Case(
        f"{first}-{first + 49}",
        second_order.drawn_step,
        minutes=20,
        facts={"first": first, "count": 50},
    )
    for first in range(0, 500, 50)
)
JUDGED = by_name(
    Case(f"{name}-{device}", make, device, minutes=20)
    for device in ("v100", "a100")
    for name, make in (
        ("unet3d", partial(train.unet3d_step, 32, config=UNet3DConfig(levels=3, filters=8))),
        (
            "unet2d",
            partial(train.unet2d_step, 128, 2, UNet2DConfig(levels=3, filters=8, norm="group")),
        ),
        ("resnet", partial(train.resnet_step, 64, 8, 14, ResNetConfig(filters=8, classes=5))),
        ("decoder", partial(train.decoder_step, 2, 64, 4, 128, DecoderConfig(heads=2, vocab=1024))),
        (
            "decoder_scan",
            partial(
                train.decoder_step, 4, 64, 8, 128, DecoderConfig(heads=2, vocab=128, scan=True)
            ),
        ),
    )
)

RIVALS = by_name(
    Case(f"{name}-{device}", make, device)
    for name, make, devices in (
        ("unet3d_144", UNET3D_144, ("v100", "h200")),
        ("resnet50_b64", RESNET50_64, ("v100", "h200")),
        ("resnet152_b32", resnet(32, depth=152), ("v100", "h200")),
        ("googlenet_b128", partial(train.googlenet_step, batch=128), ("v100", "h200")),
        ("decoder_8_f32", decoder(**DECODER_8, dtype=F32), ("v100",)),
        ("decoder_24_bf16", decoder(**DECODER_24, dtype=BF16), ("h200",)),
    )
    for device in devices
)

SIZE = by_name(
    Case(f"resnet50_b{batch}-v100", resnet(batch), "v100", budget, host_budget,
        facts={"batch": batch})
    for batch, budget, host_budget in (
        (64, "1250MiB", "0"), *((batch, "15GiB", "0") for batch in (240, 448)),
        *((batch, "15GiB", "256GiB") for batch in (768, 1024, 1152, 1216)),
    )
)  # fmt: skip


def _long(batch: int, tokens: int, layers: int = 12, **config: Any) -> Callable[[], Any]:
    config |= {"layers": layers, "width": 1024, "vocab": 131072, "context": tokens, "dtype": BF16}
    return decoder(batch, tokens, **config)


_CT = 512, 512, 192  # The shape of a volume of computed tomography.
_WIDE_MLP = decoder(32, 1024, layers=2, width=1024, heads=8, mlp_ratio=64, vocab=4096, dtype=BF16)
SLABS = by_name(
    Case(f"{name}-{device}-{budget}", make, device, budget, "256GiB", minutes=30,
        facts={"samples": n, "of": unit})
    for name, make, device, budget, n, unit in (
        ("unet3d_240", unet3d(240), "v100", "15GiB", 240**3 / 1e6, "Mvoxel"),
        ("unet3d_304", unet3d(304), "v100", "15GiB", 304**3 / 1e6, "Mvoxel"),
        ("unet3d_512", unet3d(512), "v100", "15GiB", 512**3 / 1e6, "Mvoxel"),
        ("unet3d_512", unet3d(512), "v100@power9-nvlink2", "15GiB", 512**3 / 1e6, "Mvoxel"),
        ("unet3d_768", unet3d(768), "a100", "75GiB", 768**3 / 1e6, "Mvoxel"),
        ("unet3d_768_bf16", unet3d(768, dtype=BF16), "a100", "75GiB", 768**3 / 1e6, "Mvoxel"),
        ("unet2d_8192", partial(train.unet2d_step, 8192), "v100", "11GiB", 8192**2 / 1e6, "Mpixel"),
        ("nnunet3d_512x512x192", partial(train.nnunet3d_step, _CT, 1), "v100", "15GiB",
            prod(_CT) / 1e6, "Mvoxel"),
        ("deeplab_16384", partial(train.deeplab_step, 16384, batch=1), "v100", "11GiB",
            16384**2 / 1e6, "Mpixel"),
        ("resnet50_b1920", resnet(1920), "v100", "15GiB", 1920, "images"),
        ("resnet50_b160", resnet(160), "v100", "15GiB", 160, "images"),
        ("decoder_12_128k", _long(8, 4096), "a100", "40GiB", 8 * 4096, "tokens"),
        ("decoder_12_128k", _long(8, 4096), "a100", "20GiB", 8 * 4096, "tokens"),
        ("decoder_4_128k", _long(8, 4096, layers=4), "a100", "12GiB", 8 * 4096, "tokens"),
        ("decoder_12_32768", _long(1, 32768), "a100", "20GiB", 32768, "tokens"),
        ("decoder_12_34816_remat", _long(1, 34816, checkpoint="nothing"), "a100", "75GiB", 34816,
            "tokens"),
        ("decoder_12_139264", _long(1, 139264), "a100", "75GiB", 139264, "tokens"),
        ("decoder_2_mlp65536", _WIDE_MLP, "a100", "9GiB", 32 * 1024, "tokens"),
        ("pair_inference_6000", partial(field_steps.pair_inference, 6000, blocks=48), "a100",
            "37GiB", 6000, "residues"),
        ("pair_training_1536", partial(field_steps.pair_training, 1536, blocks=8), "a100",
            "37GiB", 1536, "residues"),
        ("pair_training_768", partial(field_steps.pair_training, 768, blocks=2), "a100",
            "5GiB", 768, "residues"),
        ("weather", field_steps.weather_training, "a100", "75GiB", field_steps.GRID, "points"),
        ("natural_gradient", field_steps.natural_gradient, "h100", 10, 4096, "samples"),
    )
)  # fmt: skip
# One case of each kind: loops with copies in each direction, GPUs below and above capability 8.0.
SLABS_JAX011 = by_name(SLABS[f"{name}GiB"] for name in (
    "unet3d_304-v100-15", "unet3d_512-v100-15", "unet3d_768_bf16-a100-75", "unet2d_8192-v100-11",
    "nnunet3d_512x512x192-v100-15", "resnet50_b1920-v100-15",
))  # fmt: skip

RESIDENT = by_name(
    Case(
        f"volume_{size}-{budget or 'plain'}", partial(parcellation, size), budget=budget, minutes=30
    )
    for size, budget in ((64, None), (64, 28), (208, "8GiB"))
)
SLAB_NUMBERS = by_name(
    Case(name, face.make, minutes=15, facts={"face": face}) for name, face in FACES.items()
)
SLAB_TIME = by_name([
    Case("unet3d_144", UNET3D_144, "v100", facts={"dim": 1, "part": 32, "counts": (2, 8)}),
    Case("unet3d_192", unet3d(192), "v100", facts={"dim": 1, "part": 32, "counts": (2, 8)}),
    Case("decoder_4_128k", _long(8, 4096, layers=4), "a100",
        facts={"dim": 0, "part": 1, "counts": (2, 8)}),
])  # fmt: skip

LINKS = by_name(
    Case(f"{name}-{link}", make, device, "2GiB", host)
    for name, make in (
        ("googlenet", partial(train.googlenet_step, image=1120, batch=5)),
        ("unet3d_144", UNET3D_144),
    )
    for link, device, host in (
        ("none", "v100", "0"),
        *(
            (link, f"v100@{link}", "256GiB")
            for link in ("pcie3x16", "pcie4x16", "pcie5x16", "power9-nvlink2", "nvlink-c2c")
        ),
    )
)


DEPTH = by_name(
    Case(
        f"decoder_{layers}-a100",
        decoder(4, 512, layers=layers, width=512, heads=8, vocab=4096, context=512, dtype=BF16),
        "a100", facts={"layers": layers},
    )
    for layers in (6, 12, 24, 48, 96)
)  # fmt: skip


STATE = by_name(
    Case(
        f"{device}-{width}-b{batch}" + ("-scan" if scan else ""),
        decoder(batch, 1024, width=width, heads=width // 64, scan=scan), device, budget, "64GiB",
        host_state=(0,),
    )
    for device, width, batch, budget, scan in (
        ("v100", 3072, 1, "15GiB", False),
        ("v100", 3072, 1, "15GiB", True),
        ("h200", 3072, 8, "15GiB", False),
        ("h200", 3072, 16, "24GiB", False),
        ("h200", 3072, 16, "24GiB", True),
        ("h200", 3072, 32, "36GiB", False),
    )
)  # fmt: skip


def _loop_methods(device: str, kind: str, dtype: Any) -> Iterator[Case]:
    """A decoder scanned over its layers: plain, with policies of `jax.checkpoint`, and planned."""
    network = partial(decoder, **DECODER_24, scan=True, dtype=dtype)
    facts = {"of": f"{device}-{kind}"}
    yield Case(f"{device}-{kind}-plain", network(), device, facts=facts)
    for policy in CHECKPOINTS:
        yield Case(
            f"{device}-{kind}-{policy}",
            network(checkpoint=policy),
            device,
            facts=facts | {"policy": policy},
        )
    yield from (
        Case(f"{device}-{kind}-{share}", network(), device, share, facts=facts)
        for share in (50, 30, 20)
    )


LOOPS = by_name(
    case
    for device in ("h200", "a100")
    for kind, dtype in (("f32", F32), ("bf16", BF16))
    for case in _loop_methods(device, kind, dtype)
)

LONG = by_name(
    Case(f"{name}-{device}-{share}", make, device, share, minutes=20, facts=facts)
    for name, (make, trips) in LONG_SCANS.items()
    for facts in ({"of": name, "nested": nested(make, trips)},)
    for device in ("v100", "a100")
    for share in (50, 20, 5)
)

CARDS: Mapping[str, tuple[str, int]] = {
    "p100": ("15GiB", 1), "v100": ("15GiB", 1), "a100": ("75GiB", 8), "h200": ("130GiB", 8),
}  # fmt: skip
"""Budget of a step on cards of 16, 16, 80 and 141 GB, less libraries; and the growth of batches."""
METHODS = ("plain", "jax.checkpoint", "xla", "memplan")
_NETWORKS: Mapping[str, tuple[Callable[..., Any], int, int]] = {
    "googlenet": (partial(train.googlenet_step, aux=True), 5, 16),
    "resnet50": (partial(train.resnet_step, depth=50), 5, 16),
    "deeplab": (train.deeplab_step, 2, 8),
}
"""Builder, batch for growing images (IBM's 5 for classifiers), step between batches at 224^2."""


@dataclass(frozen=True)
class Growth:
    """A network, and one size of it that grows."""

    name: str
    # (size, remat=False) -> (step, args); `remat` puts `jax.checkpoint` around each block.
    make: Callable[..., Any]
    sizes: range
    pixels: Callable[[int], int]  # size -> pixels or voxels of a batch


def growths(faster: int) -> Iterator[Growth]:
    """The networks that grow, on a card with `faster` times larger steps between batches."""
    for name, (builder, batch, apart) in _NETWORKS.items():
        images, batches = range(256, 24577, 64), range(apart * faster, 16385, apart * faster)
        enlarged = partial(_grown, builder, "image", batch=batch)
        multiplied = partial(_grown, builder, "batch", image=224)
        yield Growth(f"{name}-image", enlarged, images, lambda size, n=batch: n * size**2)
        yield Growth(f"{name}-batch", multiplied, batches, lambda size: 224**2 * size)
    yield Growth(
        "unet3d-volume",
        partial(_grown, train.unet3d_step, "size"),
        range(64, 769, 8),
        lambda size: size**3,
    )


def _grown(
    builder: Callable[..., Any], grows: str, size: int, remat: bool = False, **fields: int
) -> Any:
    return builder(**{grows: size}, remat=remat, **fields)


LARGE_IMAGES = by_name(
    Case(f"{growth.name}-{device}-{method}", growth.make, device, budget, "256GiB", minutes=60,
         facts={"of": growth.name, "way": method, "growth": growth})
    for device, (budget, faster) in CARDS.items()
    for growth in growths(faster)
    for method in METHODS
)  # fmt: skip


def _speeds(device: str, growth: Growth) -> Iterator[Case]:
    """Sizes that double the pixels, for as long as a plan fits."""
    smaller, pixels = "", 0
    for size in growth.sizes:
        if growth.pixels(size) < 2 * pixels:
            continue
        pixels, name = growth.pixels(size), f"{growth.name}-{device}-{size}"
        plain, checkpointed = partial(growth.make, size), partial(growth.make, size, remat=True)
        facts = {"of": growth.name, "size": size, "pixels": pixels, "checkpoint": checkpointed}
        after = (smaller, True) if smaller else None
        yield Case(name, plain, device, CARDS[device][0], "256GiB", after=after, facts=facts)
        smaller = name


SPEED = by_name(
    case
    for device, (_, faster) in CARDS.items()
    for growth in growths(faster)
    if not growth.name.endswith("-batch")
    for case in _speeds(device, growth)
)

LARGEST = by_name(
    Case(name, GROWING[name], "v100", budget, "0", facts={"sizes": range(low, high + 1, step)})
    for name, low, high, step, budget in (
        ("alexnet-batch", 2, 128, 8, "20MiB"),
        ("googlenet-batch", 2, 128, 8, "14MiB"),
        ("resnet14-size", 32, 536, 32, "30MiB"),
        ("unet2d-size", 16, 268, 16, "3MiB"),
        ("unet3d-size", 8, 134, 8, "60MiB"),
        ("decoder-batch", 1, 64, 4, "32MiB"),
    )
)


def layers(width: int, count: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step of `count` square tanh layers with 1024 rows per device."""

    def step(weights: list[jax.Array], batch: Any) -> Any:
        def loss_of(weights: list[jax.Array]) -> jax.Array:
            x = batch["x"]
            for weight in weights:
                x = jnp.tanh(x @ weight)
            return ((x - batch["y"]) ** 2).mean()

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        return [
            weight - 0.1 * gradient for weight, gradient in zip(weights, gradients, strict=True)
        ], loss

    rows = jax.ShapeDtypeStruct((1024, width), F32)
    return step, ([jax.ShapeDtypeStruct((width, width), F32)] * count, {"x": rows, "y": rows})


_DDL = {"published": ("ResNet-50, ImageNet-1k, 32 images each", 0.95)}
MESHES = by_name(
    Case(
        f"{name}-{device}-{topology.partition('@')[2]}",
        make,
        device,
        facts={"topology": topology, **facts},
    )
    for name, make, device, topology, facts in (
        ("mlp", partial(layers, 2048, 8), "a100", "today@2x4", {}),
        ("mlp", partial(layers, 2048, 8), "a100", "today@8x8", {}),
        *(
            ("resnet50", resnet(32), device, f"today@{shape}", {})
            for device in ("v100", "a100", "h100")
            for shape in ("2x4", "8x8", "32x8")
        ),
        ("resnet50-ddl", resnet(32), "p100", "ddl@64x4", _DDL),
    )
)


def _sharded(kind: str, layers: int, hosts: int) -> Iterator[Case]:
    """Budgets as shares, and as the bytes of two per-layer policies of `jax.checkpoint`."""
    per_host = 4 if hosts == 2 else 8
    name, facts = f"{kind}_{layers}-{hosts}x{per_host}", {"topology": f"today@{hosts}x{per_host}"}
    make = partial(sharded_decoder, kind, layers, hosts, per_host)
    yield from (Case(f"{name}-{share}", make, "a100", share, facts=facts) for share in (80, 60, 45))
    for policy in ("dots", "nothing"):
        beside = {"policy": policy, "checkpoint": partial(make, policy)}
        yield Case(f"{name}-{policy}", make, "a100", facts={**facts, **beside})


SHARDED = by_name((
    *(
        case
        for layers in (8, 24)
        for hosts in (2, 8)
        for kind in ("fsdp", "tensor", "both")
        for case in _sharded(kind, layers, hosts)
    ),
    # Within the last three, it runs in slabs inside of its `shard_map`.
    *(
        Case(f"ring_attention-1x8-{budget}", partial(situations.ring_attention, False), "h100",
            budget, facts={"topology": "today@1x8"})
        for budget in ("2GiB", "700MiB", "400MiB", "300MiB")
    ),
))  # fmt: skip

PUBLIC_MESHES = by_name(
    Case(
        f"{name}-70",
        partial(_meshed, name),
        step.device,
        70,
        minutes=20,
        facts={"topology": step.topology},
    )
    for name, step in MESH_STEPS.items()
)

# A volume split over V100s of 15 GiB by depth; with `height`, by height inside a host.
SPACE = by_name(
    Case(
        f"unet3d_{size}-{hosts}x{per_host}{'-height' if height else ''}",
        partial(spread_unet3d, size, hosts, per_host, "depth", 2 if height else "depth"), "v100",
        "15GiB", host_budget,
        minutes=30,
        facts={
            "topology": f"today@{hosts}x{per_host}", "single": f"unet3d_{size}-v100-15GiB",
            "least_bytes": least_halo_bytes(
                size, (hosts, per_host, 1) if height else (hosts * per_host, 1, 1)
            ),
        },
    )
    for size, hosts, per_host, height, host_budget in (
        (512, 1, 8, False, "0"),
        (512, 2, 4, False, "0"),
        (512, 1, 2, False, "256GiB"),
        (1024, 8, 8, False, "0"),
        (1024, 8, 8, True, "0"),
    )
)  # fmt: skip

INSIDE = by_name(
    Case(f"{name}-{device}", make, device, minutes=20, facts={"network": name})
    for device in ("v100", "a100", "gh200")
    for name, make in (
        ("mlp", partial(mlp_step, 10, 1024)),
        ("resnet14", resnet(64, depth=14, image=128)),
        ("decoder_6", decoder(8, 512, layers=6, width=512, heads=8, vocab=8192)),
        ("unet3d_96", unet3d(96, filters=16)),
    )
)


def _bounded(program: boundaries.Program, on_cpu: bool, by_hand: bool) -> Any:
    args = program.arrays() if on_cpu else program.args()
    return program.step(by_hand), args, program.donated


def _by_hand(device: str, numbers: range, topology: str | None = None) -> Iterator[Case]:
    """Programs of these numbers on a device, or on each device of a mesh."""
    size = boundaries.ON_GPU if device else boundaries.ON_CPU
    mesh = boundaries.mesh_of(topology) if topology else None
    place = "_".join(filter(None, (device or "cpu", topology)))
    for number in numbers:
        recipe = boundaries.recipe_of(number, mesh is not None)
        make = partial(_bounded, boundaries.Program(recipe, size, mesh), not device)
        facts = {"place": place, "topology": topology, "recipe": recipe}
        yield Case(
            f"{place}-{number:03}",
            partial(make, by_hand=False),
            device,
            facts={**facts, "checkpoint": partial(make, by_hand=True)},
        )


BY_HAND = by_name((
    *_by_hand("", range(150)), *_by_hand("a100", range(36)), *_by_hand("a100", range(16), "2x4"),
    *_by_hand("a100", range(12, 24), "1x4"), *_by_hand("v100", range(24, 44)),
    *_by_hand("h100", range(36, 56)),
))  # fmt: skip

SITUATIONS = by_name(
    Case(
        name, partial(make, False), "h100" if topology else "a100",
        facts={"checkpoint": partial(make, True), "topology": topology, "place": topology or "one"},
    )
    for name, (make, topology) in situations.SITUATIONS.items()
)  # fmt: skip

RELEASES = by_name(
    Case(name, partial(_called, call), "a100", facts={"call": call})
    for name, call in (
        ("resnet50_b16", "models.train:resnet_step(batch=16)"),
        ("unet2d_256_b4", "models.train:unet2d_step(size=256, batch=4)"),
        ("unet3d_64", "models.train:unet3d_step(size=64)"),
        ("decoder_4", "models.train:decoder_step(batch=4, tokens=512, layers=4, width=512)"),
        ("googlenet_b16", "models.train:googlenet_step(batch=16)"),
        ("mlp_24", "experiments.bench.steps:mlp_step"),
    )
)

OVERHEAD = by_name(
    Case(name, small_resnet, budget=budget, facts={"what": label, "unit_s": unit_s})
    for name, budget, label, unit_s in (
        ("first_call", None, "first call, ResNet-26, 32 of 64^2", 1.0),
        (
            "second_start",
            60,
            "the same within 60 % of its bytes, both in jax's persistent cache",
            1.0,
        ),
        ("later_calls", None, "later calls, 200 arguments", 1e-6),
    )
)
