"""The roofline, added up by hand on a device where everything takes a second."""

from dataclasses import replace

import pytest

from memplan.hardware.catalog import DEVICES, named
from memplan.hardware.device import Device
from memplan.hardware.efficiency import PEAK, PRODUCT, MatrixShape
from memplan.hardware.roofline import copy_seconds, kernel_seconds
from tests.planning.unit import UNIT

TWICE = replace(UNIT, flops={"float32": 2.0}, vector_flops=0.5, memory_bandwidth=4.0)


def test_the_slower_of_compute_and_memory_counts() -> None:
    assert kernel_seconds(8, "float32", 4, TWICE) == 4
    assert kernel_seconds(8, "float32", 40, TWICE) == 10
    assert kernel_seconds(8, "", 4, TWICE) == 16
    assert kernel_seconds(0, "", 0, TWICE) == 0


def test_copies_pay_latency_once() -> None:
    v100 = named("v100")
    assert copy_seconds(0, v100) == v100.link.latency_s
    assert copy_seconds(10**9, v100) == pytest.approx(
        v100.link.latency_s + 1e9 / v100.link.bandwidth
    )


def test_a_class_achieves_its_share() -> None:
    matrix_units = replace(
        PEAK.matrix_units,
        products=0.8,
        convolutions=0.4,
        filter_gradients=0.2,
        wide=64,
        convolution_exponent=0.5,
        filter_exponent=1.0,
        narrowest=4,
        unaligned=4.0,
    )
    efficiency = replace(
        PEAK, kernel_s=0.25, memory=0.5, matrix_units=matrix_units, volume_copies=2.0
    )
    device = replace(TWICE, efficiency=efficiency, target=named("a100").target)

    def seconds(flops: float, nbytes: float, shape: MatrixShape = PRODUCT) -> float:
        return kernel_seconds(flops, "float32", nbytes, device, shape)

    assert kernel_seconds(0, "", 4, device) == 0.25 + 4 / (0.5 * 4)
    assert seconds(8, 4) == 0.25 + 8 / (0.8 * 2)
    assert seconds(8, 0, MatrixShape("convolution")) == 0.25 + 8 / (0.4 * 2)
    assert seconds(8, 0, MatrixShape("convolution", 16)) == 0.25 + 8 / (0.4 * 0.5 * 2)
    assert seconds(8, 0, MatrixShape("convolution", 1)) == 0.25 + 8 / (0.4 * 0.25 * 2)
    assert seconds(8, 0, MatrixShape("convolution", aligned=False)) == 0.25 + 8 / (0.1 * 2)
    assert seconds(8, 0, MatrixShape("filter gradient", 16)) == 0.25 + 8 / (0.2 * 0.25 * 2)
    volume = MatrixShape("convolution", volume=True)
    assert seconds(8, 2, volume) == 0.25 + 2 * 2 / (0.5 * 4) + 8 / (0.4 * 2)


def test_types_without_matrix_units_run_on_the_cores() -> None:
    """float32 on a V100 and float16 on a P100 do; float16 on a V100 does not."""
    shape = MatrixShape("convolution")
    for name, dtype in (("v100", "float32"), ("p100", "float16"), ("p100", "float32")):
        device = named(name)
        share = device.efficiency.cores.convolutions
        assert device.achieved_flops(dtype, shape) == share * device.rate(dtype)
    for name, dtype in (
        ("v100", "float16"),
        ("a100", "float32"),
        ("rtx4090", "float32"),
        ("h100", "bfloat16"),
    ):
        device = named(name)
        share = device.efficiency.matrix_units.convolutions
        assert device.achieved_flops(dtype, shape) == share * device.rate(dtype)


@pytest.mark.parametrize("device", DEVICES.values(), ids=str)
def test_no_kernel_is_above_the_peak(device: Device) -> None:
    efficiency = device.efficiency
    shapes = (PRODUCT, MatrixShape("convolution"), MatrixShape("filter gradient"))
    for shape in shapes:
        narrow = replace(shape, narrowest=8)
        for shares in (efficiency.matrix_units, efficiency.cores):
            assert 0 < shares.of(narrow) <= shares.of(shape) <= 1
    assert 0 < efficiency.memory <= 1


def test_an_error_is_a_part_of_the_seconds() -> None:
    for device in DEVICES.values():
        assert device.efficiency.error is None or 0 < device.efficiency.error < 1
