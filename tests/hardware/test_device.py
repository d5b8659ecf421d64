"""What a device computes at: its own copy of the rates, and those of types that it has no entry for."""

import dataclasses

import pytest

from memplan.hardware import catalog
from memplan.hardware.device import Device
from tests.hardware.test_catalog import CPU, DTYPES, GPU_IDS, GPUS


def test_a_device_keeps_its_own_copy_of_the_rates() -> None:
    rates = {"float32": 1.0}
    device = dataclasses.replace(catalog.named("v100"), flops=rates)
    rates["float32"] = 2.0
    assert device.rate("float32") == 1.0


@pytest.mark.parametrize("device", [*GPUS, CPU], ids=[*GPU_IDS, "cpu"])
def test_rate_falls_back_to_the_type_computed_in(device: Device) -> None:
    assert all(device.rate(dtype) == device.flops[dtype] for dtype in DTYPES)
    assert device.rate("float8_e4m3fn") == device.flops["float16"]
    assert device.rate("complex64") == device.flops["float32"]
    assert device.rate("complex128") == device.flops["float64"]
    assert all(
        device.rate(dtype) == device.vector_flops
        for dtype in ("", "bool", "int32", "uint8", "key<fry>")
    )
