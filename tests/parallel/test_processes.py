"""Every step of real processes with gloo between them, against the same step on one device: also where 3, 5, 6 or 7
take part, whose reduce-scatter gloo gets wrong."""

from __future__ import annotations

import pytest

from experiments.every_step.run import MESHES, launched
from experiments.every_step.worker import CASES

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mesh", MESHES)
def test_every_step_is_that_of_one_device(mesh: str) -> None:
    found = launched(mesh, steps=10, timeout_s=300)
    assert len(found) == MESHES[mesh][0] * len(CASES)
    assert [one for one in found if one["wrong"]] == []
