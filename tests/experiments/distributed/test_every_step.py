"""Every step over processes with gloo matches the same step on one device.

Includes 3, 6 and 7 participants, for which gloo's reduce-scatter is wrong.
`experiments.distributed.every_step` runs 200 steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from experiments.distributed.every_step.run import FEW, MESHES, launched
from experiments.distributed.every_step.worker import LAYERS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("mesh", "cases"),
    [
        ("3x4", [*LAYERS]),
        ("2x2", ["unet", "decoder, split state"]),
        ("6x1", ["split state"]),
        ("7x1", ["split state"]),
    ],
)
def test_every_step_is_that_of_one_device(mesh: str, cases: Sequence[str]) -> None:
    reports = launched(mesh, 10, cases, timeout_s=300)
    assert len(reports) == {**MESHES, **FEW}[mesh][0] * len(cases)
    assert [report for report in reports if report["wrong"]] == []
