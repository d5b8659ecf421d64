"""3D U-Net for volumes, by default brain scans of four MR sequences with four tissue classes."""

from dataclasses import dataclass

from models.unet import UNet, UNetConfig


@dataclass(frozen=True)
class UNet3DConfig(UNetConfig):
    """A U-Net for volumes; defaults follow the Decathlon's BrainTumour task."""


class UNet3D(UNet):
    """(batch, depth, height, width, in_channels) -> logits (batch, *spatial, classes)."""

    config: UNetConfig = UNet3DConfig()
    rank: int = 3
