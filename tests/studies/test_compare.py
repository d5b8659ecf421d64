"""The table of all methods: its rows, and the notes of methods that do not compile or fit."""

from types import SimpleNamespace
from typing import Any

import jax
import pytest

from memplan import pipeline
from memplan.report.comparison import Comparison, Row
from memplan.report.result import Interrupted
from memplan.request import Request
from memplan.studies.baselines import Baseline, Baselines, policies
from memplan.studies.compare import compare

MIB = 2**20


def outcome_of(
    nbytes: int, fits: bool = True, plan: Any = None, in_slabs: tuple[Any, ...] = ()
) -> Any:
    program = SimpleNamespace(in_slabs=in_slabs)
    unmodified = SimpleNamespace(device_bytes=12 * MIB, replay=SimpleNamespace(step_s=0.9))
    figures = {"device_bytes": nbytes, "host_bytes": 5, "step_s": 0.5, "fits": fits, "plan": plan}
    return SimpleNamespace(
        **figures, compilations=3, program=program, unmodified=unmodified, ended_by=""
    )


@pytest.fixture
def xla_limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Every method has figures without a compilation; returns the limits passed to XLA."""
    limits: list[tuple[int, int]] = []

    def xla(self: Any, resident_bytes: int, budget: int, extra: Any = None) -> Baseline:
        limits.append((resident_bytes, budget))
        return Baseline(9 * MIB, MIB if extra else 0, 2.0, 3)

    def checkpoint(self: Any, policy: Any) -> Baseline:
        if policy is jax.checkpoint_policies.nothing_saveable:
            raise NotImplementedError("not with effects\nlong story")
        return Baseline(20 * MIB, 0, 1.5, 3, is_compiled=False)

    monkeypatch.setattr(Baselines, "plain", lambda self: Baseline(10 * MIB, 0, 1.0, 3))
    monkeypatch.setattr(Baselines, "checkpoint", checkpoint)
    monkeypatch.setattr(Baselines, "xla", xla)
    monkeypatch.setattr(pipeline, "best", lambda *_: outcome_of(8 * MIB, plan=object()))
    return limits


def compared(device: str | None = "v100") -> Comparison:
    request = Request(budget=10 * MIB, host_budget=MIB, device=device)
    return compare(lambda x: x, (), {}, request, lambda *_: None)


def rows(comparison: Comparison) -> dict[str, Row]:
    return {row.name: row for row in comparison.rows}


def test_every_method_has_a_row_and_memplan_the_last(xla_limits: list[tuple[int, int]]) -> None:
    comparison = compared()
    budgets = comparison.budget_bytes, comparison.host_budget_bytes
    assert comparison.device == "v100" and budgets == (10 * MIB, MIB)
    offload = "XLA's rematerialization and host offload"
    off = "plain jax, XLA's rematerialization off"
    of_xla = "XLA's rematerialization", offload, off
    assert list(rows(comparison)) == ["plain jax", *policies(), *of_xla, "memplan"]
    assert rows(comparison)[off] == Row(off, 12 * MIB, 0, 0.9, False)
    assert rows(comparison)["plain jax"] == Row("plain jax", 10 * MIB, 0, 1.0, True)
    assert rows(comparison)[offload] == Row(offload, 9 * MIB, MIB, 2.0, True)
    assert rows(comparison)["memplan"] == Row("memplan", 8 * MIB, 5, 0.5, True, "compilations: 3")
    assert xla_limits == [(3, 10 * MIB)] * 2


@pytest.mark.usefixtures("xla_limits")
def test_a_method_that_does_not_compile_says_why() -> None:
    table = rows(compared())
    nothing, dots, *_ = policies()
    assert table[nothing] == Row(
        nothing, None, None, None, None, "does not compile: not with effects"
    )
    assert table[dots] == Row(dots, 20 * MIB, 0, 1.5, False, "predicted")


@pytest.mark.usefixtures("xla_limits")
def test_a_cpu_has_no_methods_of_xla() -> None:
    comparison = compared(device=None)
    assert [row.name for row in comparison.rows] == ["plain jax", *policies(), "memplan"]


@pytest.mark.usefixtures("xla_limits")
@pytest.mark.parametrize(
    ("outcome", "row"),
    [
        (outcome_of(8 * MIB), Row("memplan", 8 * MIB, 5, 0.5, True, "the plain step fits")),
        (
            outcome_of(8, plan="", in_slabs=(1,)),
            Row("memplan", 8, 5, 0.5, True, "compilations: 3, in slabs"),
        ),
        (
            outcome_of(99, fits=False),
            Row("memplan", None, None, None, False, "the smallest that works: 99 bytes"),
        ),
    ],
)
def test_the_row_of_memplan(monkeypatch: pytest.MonkeyPatch, outcome: Any, row: Row) -> None:
    monkeypatch.setattr(pipeline, "best", lambda *_: outcome)
    assert rows(compared())["memplan"] == row


@pytest.mark.usefixtures("xla_limits")
def test_ctrl_c_hands_over_the_rows_that_are_done() -> None:
    def press(stage: str, share: float | None) -> None:
        if stage == "XLA's rematerialization":
            raise KeyboardInterrupt

    request = Request(10 * MIB, device="v100")
    with pytest.raises(KeyboardInterrupt) as caught:
        compare(lambda x: x, (), {}, request, press)
    assert isinstance(caught.value, Interrupted)
    partial = caught.value.result
    assert isinstance(partial, Comparison)
    assert partial.ended_by == "Ctrl-C" and "incomplete: Ctrl-C ended it" in str(partial)
    assert [row.name for row in partial.rows] == ["plain jax", *policies()]


@pytest.mark.usefixtures("xla_limits")
def test_a_time_limit_ends_with_the_rows_that_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(100))
    monkeypatch.setattr(
        "memplan.compilation.deadline.time", SimpleNamespace(monotonic=lambda: next(ticks))
    )
    request = Request(10 * MIB, device="v100", time_limit=2.5)
    partial = compare(lambda x: x, (), {}, request, lambda *_: None)
    assert partial.ended_by == "time limit" and len(partial.rows) == 2
