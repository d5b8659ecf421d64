"""Loops copy rows of a host array to and from the right places, also where memplan writes the copies itself."""

import pytest

from tests.gpu_runtime import host_rows, stand_in

pytestmark = [
    pytest.mark.gpu_aot,
    pytest.mark.skipif(
        stand_in.missing() is not None, reason=f"no stand-in driver here: {stand_in.missing()}"
    ),
]


@pytest.mark.parametrize("schedule", ["eager", pytest.param("late", marks=pytest.mark.slow)])
def test_rows_come_back_as_they_were_written(schedule: str) -> None:
    """On a V100 XLA of jax 0.12 would have kernels move them."""
    assert stand_in.run(host_rows.there_and_back, "v100", schedule=schedule).value == {
        "equal": True,
        "copies": [2],
    }
