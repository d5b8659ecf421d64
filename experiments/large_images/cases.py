"""What is measured: networks, sizes, devices, and ways to make a step fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from models.train import Built, deeplab_step, googlenet_step, resnet_step, unet3d_step

HOST_BUDGET = "256GiB"
BUDGETS: Mapping[str, str] = {"p100": "15GiB", "v100": "15GiB", "a100": "75GiB", "h200": "130GiB"}
"""What a step may take: of 16, 16, 80 and 141 GB, the rest left to the workspace of libraries and to fragmentation."""

ROOM: Mapping[str, int] = {"p100": 1, "v100": 1, "a100": 8, "h200": 8}
"""How many times faster batches grow there: a step is then about as much of what fits on each card."""

WAYS = ("plain", "jax.checkpoint", "xla", "memplan")


@dataclass(frozen=True)
class Case:
    """One size of one network that grows.

    Attributes:
      make: (size, remat) -> (step, args); with remat, `jax.checkpoint` around each block.
      pixels: size -> pixels or voxels of a batch.
    """

    name: str
    axis: str
    low: int
    high: int
    step: int
    make: Callable[[int, bool], Built]
    pixels: Callable[[int], int]

    @property
    def sizes(self) -> range:
        return range(self.low, self.high + 1, self.step)


def limits(case: Case, device: str) -> dict[str, Any]:
    """What a result is of, as its file says it."""
    return {"case": case.name, "device": device, "budget": BUDGETS[device], "host_budget": HOST_BUDGET}


def _image(builder: Callable[..., Built], batch: int, size: int, remat: bool) -> Built:
    return builder(image=size, batch=batch, remat=remat)


def _batch(builder: Callable[..., Built], size: int, remat: bool) -> Built:
    return builder(image=224, batch=size, remat=remat)


NETWORKS: Mapping[str, tuple[Callable[..., Any], int, int]] = {
    "googlenet": (partial(googlenet_step, aux=True), 5, 16),
    "resnet50": (partial(resnet_step, depth=50), 5, 16),
    "deeplab": (deeplab_step, 2, 8),
}
"""Builder, the batch of enlarged images (IBM's 5 for the classifiers), and from one batch to the next at 224^2."""


def _volume(size: int, remat: bool) -> Built:
    return unet3d_step(size, remat=remat)


def cases(device: str) -> Iterator[Case]:
    """For one of `BUDGETS`."""
    for name, (builder, batch, apart) in NETWORKS.items():
        step = apart * ROOM[device]
        image = partial(_image, builder, batch)
        yield Case(f"{name}-image", "image", 256, 24576, 64, image, lambda size, batch=batch: batch * size**2)
        yield Case(f"{name}-batch", "batch", step, 16384, step, partial(_batch, builder), lambda size: 224**2 * size)
    yield Case("unet3d-volume", "size", 64, 768, 8, _volume, lambda size: size**3)


def on_devices() -> Iterator[tuple[Case, str]]:
    """Every case on every device, a case at a time."""
    for same in zip(*map(cases, BUDGETS), strict=True):
        yield from zip(same, BUDGETS, strict=True)
