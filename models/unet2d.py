"""2D U-Net for photographs such as skin lesions (RGB in, lesion or background out by default)."""

from dataclasses import dataclass

from models.unet import UNet, UNetConfig


@dataclass(frozen=True)
class UNet2DConfig(UNetConfig):
    """A U-Net for images; defaults follow ISIC lesion segmentation."""

    classes: int = 2
    in_channels: int = 3


class UNet2D(UNet):
    """(batch, height, width, in_channels) -> logits (batch, height, width, classes)."""

    config: UNetConfig = UNet2DConfig()
    rank: int = 2
