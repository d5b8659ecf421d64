"""Overheads: the expected maximum against drawn samples and known values, and what no machine has is refused."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.errors import OverheadError
from memplan.hardware.overheads import NONE, SOURCES, Overheads, expected_maximum


@pytest.mark.parametrize(
    ("count", "known"), [(2, 1 / math.sqrt(math.pi)), (3, 1.5 / math.sqrt(math.pi)), (10, 1.53875), (1000, 3.24144)]
)
def test_the_expected_maximum_is_that_of_the_tables(count: int, known: float) -> None:
    assert expected_maximum(count) == pytest.approx(known, abs=1e-5)


@pytest.mark.parametrize("count", [4, 32, 256])
def test_the_expected_maximum_is_that_of_drawn_samples(count: int) -> None:
    draw = random.Random(count)
    largest = [max(draw.gauss() for _ in range(count)) for _ in range(2000)]
    error = statistics.stdev(largest) / math.sqrt(len(largest))
    assert abs(statistics.mean(largest) - expected_maximum(count)) < 4 * error


def test_one_device_waits_for_nobody() -> None:
    assert Overheads(spread=0.3).slowest(1) == 1


@given(st.integers(1, 5000), st.floats(0, 0.33), st.floats(0, 0.33))
def test_more_devices_and_more_spread_are_never_faster(count: int, low: float, high: float) -> None:
    low, high = sorted((low, high))
    assert Overheads(spread=low).slowest(count) <= Overheads(spread=high).slowest(count)
    assert Overheads(spread=high).slowest(count) <= Overheads(spread=high).slowest(count + 1)
    assert NONE.slowest(count) == 1


@given(st.floats(0, 1e12), st.floats(0, 10), st.floats(1e9, 1e13))
def test_messages_leave_kernels_half_of_the_memory_bandwidth(nbytes: float, seconds: float, bandwidth: float) -> None:
    share = Overheads().memory_share(nbytes, seconds, bandwidth)
    assert 0 <= share <= 0.5
    assert NONE.memory_share(nbytes, seconds, bandwidth) == 0


NUMBERS = ["spread", "roofline_share", "kernel_launch_s", "collective_launch_s", "accesses_per_byte", "input_bytes"]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "1", None, True])
def test_what_is_no_amount_is_refused(name: str, value: Any) -> None:
    with pytest.raises(OverheadError, match=f"{name} is .* 0 or more"):
        dataclasses.replace(NONE, **{name: value})


def test_a_spread_that_a_normal_distribution_cannot_have_is_refused() -> None:
    with pytest.raises(OverheadError, match=r"below zero.*0\.02 for 2 %"):
        Overheads(spread=2.0)


@pytest.mark.parametrize("share", [0, 1.1])
def test_no_kernel_beats_its_roofline(share: float) -> None:
    with pytest.raises(OverheadError, match=r"roofline\. It is a share"):
        Overheads(roofline_share=share)


def test_slow_kernels_take_longer_and_launches_come_on_top() -> None:
    assert Overheads(roofline_share=0.5, kernel_launch_s=1.0).kernel_s(3.0) == 7.0
    assert NONE.kernel_s(3.0) == 3.0


def test_every_default_says_why() -> None:
    assert set(SOURCES) == {field.name for field in dataclasses.fields(Overheads)}
