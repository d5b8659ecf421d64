"""Logits and variables are float32, whatever type a network computes in."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from models.alexnet import AlexNet, AlexNetConfig
from models.deeplab import DeepLab, DeepLabConfig
from models.googlenet import GoogLeNet, GoogLeNetConfig
from models.resnet import ResNet, ResNetConfig
from models.transformer import Decoder, DecoderConfig
from models.unet import UNetConfig
from models.unet2d import UNet2D

DECODER = DecoderConfig(layers=3, width=8, heads=2, vocab=11, context=6)
DEEPLAB = DeepLabConfig(14, 4, 3, width=8, shallow=4)
UNET = UNetConfig(levels=2, filters=4, classes=3, in_channels=2)
# A network, its configuration, the shape of its images, and that of its logits.
CASES = [
    (AlexNet, AlexNetConfig(1 / 32, 5), (3, 63, 95, 3), (3, 5)),
    (DeepLab, DEEPLAB, (2, 64, 64, 3), (2, 64, 64, 3)),
    (DeepLab, DEEPLAB, (2, 33, 47, 3), (2, 33, 47, 3)),
    (GoogLeNet, GoogLeNetConfig(1 / 16, 5), (3, 64, 64, 3), (3, 5)),
    (ResNet, ResNetConfig(depth=14, filters=4, classes=5), (3, 32, 32, 3), (3, 5)),
    *(
        (UNet2D, replace(UNET, norm=norm, upsampling=upsampling), (2, 4, 6, 2), (2, 4, 6, 3))
        for norm in ("instance", "group", None)
        for upsampling in ("nearest", "transpose")
    ),
    *(
        (Decoder, replace(DECODER, scan=scan, tied=tied), (2, 5), (2, 5, 11))
        for scan in (False, True)
        for tied in (False, True)
    ),
]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("network", "config", "image", "logits"), CASES)
def test_logits_and_variables_are_float32(network, config, image, logits, dtype):
    model = network(replace(config, dtype=dtype))
    x = jax.ShapeDtypeStruct(image, jnp.int32 if network is Decoder else jnp.float32)
    init = model.init_with_output
    result, variables = jax.eval_shape(lambda x: init(jax.random.key(0), x), x)
    assert (result.shape, result.dtype) == (logits, jnp.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}
