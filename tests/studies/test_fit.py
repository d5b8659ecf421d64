"""Shares are fitted exactly to operations that take what a device with these shares predicts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memplan.hardware import catalog, measured
from memplan.hardware.device import Device
from memplan.hardware.efficiency import PRODUCT, Kind, MatrixShape
from memplan.hardware.measured import MeasuredDevice
from memplan.studies.fit import Timing, fitted, predicted_seconds
from memplan.xla.kernel_cost import KernelCost

H200 = catalog.named("h200")
V100 = catalog.named("v100")
CPU = catalog.local_cpu(2, 2**33)
SLOWER = {"products": 0.5, "convolutions": 0.4, "filter_gradients": 0.2, "unaligned": 3.0}
KINDS: tuple[Kind, ...] = ("product", "convolution", "filter gradient")


def slower(device: Device, part: str, **changes: Any) -> Device:
    """The device, with other shares of its matrix units or cores."""
    shares = replace(getattr(device.efficiency, part), **SLOWER)
    return replace(
        device, efficiency=replace(device.efficiency, **{part: shares}, error=0.0, **changes)
    )


def kernel(dtype: str, shape: MatrixShape, nbytes: int = 10**6, flops: float = 1e12) -> KernelCost:
    return KernelCost(nbytes, 0, 0, flops, dtype, shape)


def timings(truth: Device, kernels: Sequence[KernelCost]) -> list[Timing]:
    """What the kernels take on a device, each twice, beside one that copies."""
    copy = KernelCost(10**6, 0, 0, 0.0, "", MatrixShape())
    operations = [
        Timing(f"{number}", (copy, cost, cost), 1.0) for number, cost in enumerate(kernels)
    ]
    return [
        replace(operation, seconds=predicted_seconds(truth, operation)) for operation in operations
    ]


def shapes(**changes: Any) -> list[MatrixShape]:
    """Of every kind, wide and narrow."""
    return [MatrixShape(kind, narrowest, **changes) for kind in KINDS for narrowest in (512, 32, 8)]


@pytest.mark.parametrize(
    ("base", "part", "dtype"),
    [(H200, "matrix_units", "bfloat16"), (V100, "cores", "float32")],
    ids=["matrix units", "cores"],
)
def test_the_shares_of_every_class_come_back(base: Device, part: str, dtype: str) -> None:
    truth = slower(base, part, volume_copies=3.0)
    unaligned = [shape for shape in shapes(aligned=False) if shape.kind != "product"]
    volumes = [shape for shape in shapes(volume=True) if shape.kind != "product"]
    kernels = [kernel(dtype, shape) for shape in shapes() + unaligned + volumes]
    outcome = fitted(base, timings(truth, kernels))
    expected, actual = truth.efficiency, outcome.efficiency
    for name, share in SLOWER.items():
        assert getattr(getattr(actual, part), name) == pytest.approx(share)
    assert actual.volume_copies == pytest.approx(expected.volume_copies, rel=1e-3)
    assert actual.error == pytest.approx(0.0, abs=1e-6)
    other = "cores" if part == "matrix_units" else "matrix_units"
    assert getattr(actual, other) == getattr(base.efficiency, other)
    assert outcome.flops == base.flops


def test_a_cpu_gets_the_rates_of_its_best_kernels() -> None:
    """They are assumed, as no data sheet is read."""
    truth = replace(CPU, flops={**CPU.flops, "float32": 3e11, "bfloat16": 9e11})
    kernels = [kernel(dtype, MatrixShape()) for dtype in ("float32", "bfloat16")]
    outcome = fitted(CPU, timings(truth, kernels))
    assert outcome.rate("float32") == pytest.approx(3e11)
    assert outcome.rate("bfloat16") == pytest.approx(9e11)
    assert outcome.rate("float64") == pytest.approx(3e11 / 2)
    assert outcome.efficiency.cores.products == pytest.approx(1.0)


def test_a_class_that_was_not_measured_keeps_its_share() -> None:
    outcome = fitted(H200, timings(slower(H200, "matrix_units"), [kernel("float32", PRODUCT)]))
    shares = H200.efficiency.matrix_units
    assert outcome.efficiency.matrix_units == replace(shares, products=pytest.approx(0.5))
    assert outcome.efficiency.error is None
    assert fitted(H200, []) == replace(H200, efficiency=replace(H200.efficiency, error=None))


def test_kernels_that_wait_for_memory_say_nothing_about_arithmetic() -> None:
    bound = kernel("float32", PRODUCT, nbytes=10**10, flops=1e6)
    outcome = fitted(H200, timings(H200, [bound]))
    assert outcome.efficiency.matrix_units == H200.efficiency.matrix_units


def test_the_error_is_of_the_operations_that_were_held_out() -> None:
    """The third of a class takes twice as long as the others say: its prediction is half."""
    operations = timings(H200, [kernel("float32", PRODUCT)] * 4)
    operations[2] = replace(operations[2], seconds=2 * operations[2].seconds)
    outcome = fitted(H200, operations)
    assert outcome.efficiency.error == pytest.approx(0.5)
    assert outcome.efficiency.matrix_units.products == pytest.approx(
        H200.efficiency.matrix_units.products
    )


def test_an_exact_fit_is_saved_and_loaded(tmp_path: Path) -> None:
    device = replace(H200, efficiency=replace(H200.efficiency, error=0.0))
    card = MeasuredDevice(device, "gpu", "NVIDIA H200")
    card.save(tmp_path / "card.json")
    assert measured.load(tmp_path / "card.json") == card
