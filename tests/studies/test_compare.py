"""The table of all ways: which there are, and what is said of those that refuse and of those that do not fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import pytest

from memplan import pipeline
from memplan.pipeline import Request
from memplan.report.comparison import Comparison, Row
from memplan.studies.baselines import Baseline, Baselines, policies
from memplan.studies.compare import compare

MIB = 2**20


def found(nbytes: int, fits: bool = True, plan: Any = None, in_slabs: tuple[Any, ...] = ()) -> Any:
    program = SimpleNamespace(in_slabs=in_slabs)
    unmodified = SimpleNamespace(device_bytes=12 * MIB, replay=SimpleNamespace(step_s=0.9))
    return SimpleNamespace(
        device_bytes=nbytes,
        host_bytes=5,
        step_s=0.5,
        fits=fits,
        plan=plan,
        compilations=3,
        program=program,
        unmodified=unmodified,
    )


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Every way takes something without being compiled; what XLA was asked for."""
    asked: list[tuple[int, int]] = []

    def xla(self: Any, resident_bytes: int, budget: int, extra: Any = None) -> Baseline:
        asked.append((resident_bytes, budget))
        return Baseline(9 * MIB, MIB if extra else 0, 2.0, 3)

    def checkpoint(self: Any, policy: Any) -> Baseline:
        if policy is jax.checkpoint_policies.nothing_saveable:
            raise NotImplementedError("not with effects\nlong story")
        return Baseline(20 * MIB, 0, 1.5, 3)

    monkeypatch.setattr(Baselines, "plain", lambda self: Baseline(10 * MIB, 0, 1.0, 3))
    monkeypatch.setattr(Baselines, "checkpoint", checkpoint)
    monkeypatch.setattr(Baselines, "xla", xla)
    monkeypatch.setattr(pipeline, "best", lambda *_: found(8 * MIB, plan=object()))
    return asked


def compared(device: str | None = "v100") -> Comparison:
    request = Request(budget=10 * MIB, host_budget=MIB, device=device)
    return compare(lambda x: x, (), {}, request, lambda *_: None)


def rows(told: Comparison) -> dict[str, Row]:
    return {row.name: row for row in told.rows}


def test_every_way_has_a_row_and_memplan_the_last(ways: list[tuple[int, int]]) -> None:
    told = compared()
    assert (told.device, told.budget_bytes, told.host_budget_bytes) == ("v100", 10 * MIB, MIB)
    offload = "XLA's rematerialization and host offload"
    off = "plain jax, XLA's rematerialization off"
    assert list(rows(told)) == ["plain jax", *policies(), "XLA's rematerialization", offload, off, "memplan"]
    assert rows(told)[off] == Row(off, 12 * MIB, 0, 0.9, False)
    assert rows(told)["plain jax"] == Row("plain jax", 10 * MIB, 0, 1.0, True)
    assert rows(told)[offload] == Row(offload, 9 * MIB, MIB, 2.0, True)
    assert rows(told)["memplan"] == Row("memplan", 8 * MIB, 5, 0.5, True, "compilations: 3")
    assert ways == [(3, 10 * MIB)] * 2


@pytest.mark.usefixtures("ways")
def test_what_refuses_says_why_and_the_others_go_on() -> None:
    told = rows(compared())
    nothing, dots, *_ = policies()
    assert told[nothing] == Row(nothing, None, None, None, None, "does not compile: not with effects")
    assert told[dots].fits is False and told[dots].device_bytes == 20 * MIB


@pytest.mark.usefixtures("ways")
def test_a_cpu_has_no_ways_of_xla() -> None:
    told = compared(device=None)
    assert [row.name for row in told.rows] == ["plain jax", *policies(), "memplan"]


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize(
    ("outcome", "row"),
    [
        (found(8 * MIB), Row("memplan", 8 * MIB, 5, 0.5, True, "the plain step fits")),
        (found(8, plan="", in_slabs=(1,)), Row("memplan", 8, 5, 0.5, True, "compilations: 3, in slabs")),
        (found(99, fits=False), Row("memplan", None, None, None, False, "the smallest that works: 99 bytes")),
    ],
)
def test_memplan_says_what_it_took(monkeypatch: pytest.MonkeyPatch, outcome: Any, row: Row) -> None:
    monkeypatch.setattr(pipeline, "best", lambda *_: outcome)
    assert rows(compared())["memplan"] == row
