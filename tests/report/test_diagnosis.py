"""A diagnosis: its verdict, its findings with their figures, and JSON."""

import dataclasses
import re

import pytest

from memplan.report.diagnosis import KINDS, Diagnosis, Finding

MIB = 2**20
DONATE = Finding("donate", "donate argument 0", 7 * MIB, -2e-6, 53 * MIB, "compiled", position=0)
CLOSED = Finding(
    "closed over", "pass it", 4 * MIB, 0.0, 60 * MIB, "counted", source="/a/b/c/net.py:3"
)
OUTPUT = Finding("output", "return its mean", 2 * MIB, None, 58 * MIB, "counted", position=2)
SICK = Diagnosis("a100", 55 * MIB, 60 * MIB, 1e-3, (DONATE, CLOSED, OUTPUT), 3, (("jax", "0"),))
HEALTHY = dataclasses.replace(SICK, budget_bytes=60 * MIB, findings=())


def test_a_step_is_healthy_if_it_fits_and_there_is_nothing_to_gain() -> None:
    assert HEALTHY.fits and HEALTHY.is_healthy
    assert not SICK.fits and not SICK.is_healthy
    assert not dataclasses.replace(SICK, findings=()).is_healthy
    assert not dataclasses.replace(HEALTHY, findings=(DONATE,)).is_healthy


def test_a_healthy_step_has_only_the_verdict() -> None:
    (verdict,) = HEALTHY.tables(0)
    assert verdict.rows[0] == ("the step as it is", "fits") and verdict.tones[0] == "good"
    assert "nothing to gain" in str(HEALTHY) and "What to do first" not in str(HEALTHY)


def test_every_finding_has_a_row_green_if_the_step_then_fits() -> None:
    verdict, findings = SICK.tables(0)
    assert verdict.rows[0] == ("the step as it is", "does not fit") and verdict.tones[0] == "bad"
    assert findings.tones == ("good", "", "")
    assert findings.rows == (
        ("1", "donate argument 0", "7.0 MiB", "-2.00 us", "53.0 MiB", "compiled"),
        ("2", "pass it (../c/net.py:3)", "4.0 MiB", "same", "60.0 MiB", "counted"),
        ("3", "return its mean", "2.0 MiB", "not known", "58.0 MiB", "counted"),
    )
    assert re.search(r"device peak +60\.0 MiB of 55\.0 MiB", str(SICK))


def test_it_comes_back_from_json() -> None:
    with pytest.raises(ValueError, match=r"findings\[0\]\.kind"):
        Diagnosis.from_json(SICK.to_json().replace('"kind": "donate"', '"kind": "pray"'))


def test_kinds_are_ordered_by_price() -> None:
    assert KINDS[0] == "donate" and KINDS[-1] == "plan"
