"""The roofline, added up by hand on a device where everything takes a second."""

from dataclasses import replace

import pytest

from memplan.hardware.catalog import named
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
