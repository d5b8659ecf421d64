"""What bytes above a limit weigh, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from memplan.planning.search.excess import Excess

LOAD = np.array([5, 20, 10, 15])


@pytest.mark.parametrize(("power", "weight"), [(1.0, 1.0 + 0.5), (2.0, 1.0 + 0.25)])
def test_bytes_above_the_limit_as_shares_of_it(power: float, weight: float) -> None:
    excess = Excess(10, power)
    assert excess.of(LOAD) == weight == sum(excess.of_one(nbytes) for nbytes in LOAD.tolist())


@pytest.mark.parametrize("power", [1.0, 1.5, 2.0])
def test_a_byte_weighs_what_it_takes_off(power: float) -> None:
    excess, load = Excess(10**6, power), LOAD * 10**5
    below = excess.of_a_byte(load)
    for slot in range(len(load)):
        less = load - (np.arange(len(load)) == slot)
        taken = (excess.of(load) - excess.of(less)) * 10**6
        assert below[slot + 1] - below[slot] == pytest.approx(taken, rel=1e-5)
