"""Published throughputs of training on one GPU, each with its source. None was used to fit memplan.

Left out: models that are not built alike here (AlexNet has one tower and grouped convolutions
there), PyTorch in float16 without channels last, and rates that include an input pipeline's stalls.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from models import train
from models.steps import Built

_EXAMPLES = "NVIDIA/DeepLearningExamples@729963dd"
_LAMBDA = "lambdal/deeplearning-benchmark@aa5addb6"
_RESNET_TF = f"TensorFlow 20.06, XLA ({_EXAMPLES}, TensorFlow/Classification/ConvNets)"
_RESNET_LAMBDA = f"PyTorch, NCHW, synthetic images ({_LAMBDA})"
_NNUNET_TF = f"TensorFlow 22.11, XLA ({_EXAMPLES}, TensorFlow2/Segmentation/nnUNet)"

_resnet = partial(train.resnet_step, depth=50)
_nnunet_3d = partial(train.nnunet3d_step, size=128, batch=2)
_nnunet_2d = partial(train.nnunet2d_step, size=(192, 160), batch=64, in_channels=4)
_gpt2 = partial(train.decoder_step, layers=12, width=768, heads=12, vocab=50304)


@dataclass(frozen=True)
class Published:
    """A training step that somebody timed.

    Attributes:
      step: its name.
      build: builds the step.
      device: memplan's name of the card.
      samples: images, volumes or tokens per step.
      per_second: of these.
      source: framework and place.
      by_xla: did XLA compile it?
    """

    step: str
    build: Callable[[], Built]
    device: str
    samples: int
    per_second: float
    source: str
    by_xla: bool

    @property
    def seconds(self) -> float:
        """Of one step."""
        return self.samples / self.per_second


def _classifier(
    batch: int, dtype: str, device: str, per_second: float, source: str, by_xla: bool
) -> Published:
    build = partial(_resnet, batch=batch, dtype=dtype)
    name = f"ResNet-50, batch {batch}, {dtype}"
    return Published(name, build, device, batch, per_second, source, by_xla)


def _segmenter(rank: int, dtype: str, device: str, per_second: float) -> Published:
    name = f"nnU-Net {rank}D, {'128^3, batch 2' if rank == 3 else '192 x 160, batch 64'}, {dtype}"
    build = partial(_nnunet_3d if rank == 3 else _nnunet_2d, dtype=dtype)
    samples = 2 if rank == 3 else 64
    return Published(name, build, device, samples, per_second, _NNUNET_TF, by_xla=True)


def _language(batch: int, dtype: str, device: str, seconds: float, source: str) -> Published:
    tokens = 1024 * batch
    build = partial(_gpt2, batch=batch, dtype=dtype)
    name = f"GPT-2 124M, batch {batch}, {dtype}"
    return Published(name, build, device, tokens, tokens / seconds, source, by_xla=False)


ROWS = (
    _classifier(256, "float32", "a100", 909, _RESNET_TF, by_xla=True),
    _classifier(256, "float16", "a100", 2375, _RESNET_TF, by_xla=True),
    _classifier(128, "float32", "v100", 412, _RESNET_TF, by_xla=True),
    _classifier(256, "float16", "v100", 1270, _RESNET_TF, by_xla=True),
    _segmenter(2, "float32", "a100", 804.23),
    _segmenter(2, "float16", "a100", 1662.8),
    _segmenter(2, "float32", "v100", 337.42),
    _segmenter(2, "float16", "v100", 819.15),
    _segmenter(3, "float32", "a100", 11.81),
    _segmenter(3, "float16", "a100", 29.3),
    _segmenter(3, "float32", "v100", 2.5),
    _segmenter(3, "float16", "v100", 13.13),
    _classifier(640, "float32", "a100", 1073.17, _RESNET_LAMBDA, by_xla=False),
    _classifier(640, "float32", "h100", 1907.32, _RESNET_LAMBDA, by_xla=False),
    _classifier(1280, "float32", "h200", 2270.41, _RESNET_LAMBDA, by_xla=False),
    _classifier(224, "float32", "rtx4090", 724.41, _RESNET_LAMBDA, by_xla=False),
    _language(4, "float32", "a100", 0.07736, "llm.c's kernels, A100 PCIe (karpathy/llm.c README)"),
    _language(
        32,
        "bfloat16",
        "a100",
        32 * 1024 / 115_000,
        "PyTorch compiled, A100 PCIe (karpathy/llm.c pull request 323)",
    ),
    _language(
        12,
        "bfloat16",
        "rtx4090",
        4.622 / 40,
        "PyTorch compiled, 40 steps summed (karpathy/nanoGPT pull request 225)",
    ),
)
