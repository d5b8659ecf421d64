"""3D U-Net for volumes such as brain scans (four MR sequences in, four tissue classes out by
default).
"""

from dataclasses import dataclass

from models.unet import UNet, UNetConfig


@dataclass(frozen=True)
class UNet3DConfig(UNetConfig):
    """A U-Net for volumes; defaults follow the BrainTumour task of the Medical Segmentation
    Decathlon.
    """


class UNet3D(UNet):
    """(batch, depth, height, width, in_channels) -> logits (batch, depth, height, width,
    classes).
    """

    config: UNetConfig = UNet3DConfig()
    rank: int = 3
