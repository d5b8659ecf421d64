"""Tests of the memory of training steps: functions, and a pytest plugin.

Wherever memplan is installed, every run of pytest loads this file. It imports jax only when a test
uses it.
"""

from __future__ import annotations  # memplan's types are not loaded with this file

import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import memplan

__all__ = ["assert_peak_below", "memplan_bytes", "memplan_snapshot"]

_DEVICE = "a100"
_FOLDER = "__memplan__"
_MAX_CHARACTERS = 120  # of a file's name, without digest and suffix; file systems take 255 bytes


def memplan_bytes(
    step: Callable[..., Any],
    args: Sequence[Any],
    device: str | None = _DEVICE,
    **options: Any,
) -> int:
    """The peak of a compiled step's device bytes. Runs nothing.

    Args:
      step: a plain function, or one of `memplan.jit`, which keeps its own device and options.
      args: arrays or `jax.ShapeDtypeStruct`s.
      device: the device to compile for: a name (`memplan devices`), or None for the local backend.
        A described GPU needs no GPU, but the extra `gpu-aot`.
      options: those of `memplan.jit`. Without a `budget`, the step is compiled unplanned. By
        default, the first of several arguments is donated: the state that the step replaces.

    Raises:
      UnknownDeviceError: there is no such device, or the extra is not installed.
    """
    __tracebackhide__ = True
    return _compiled_bytes(_report(step, args, device, options))


def assert_peak_below(
    step: Callable[..., Any],
    args: Sequence[Any],
    limit: int | str,
    *,
    device: str | None = _DEVICE,
    **options: Any,
) -> None:
    """Raise AssertionError if a step's peak is above a limit; it shows what is on the device then.

    Args:
      limit: bytes, `"3GiB"`, or `"80%"` of the budget, by default the memory that jax has there.
      step, args, device, options: as for `memplan_bytes`.
    """
    __tracebackhide__ = True
    report = _report(step, args, device, options)
    limit_bytes = memplan.api.parse_bytes(limit, report.budget_bytes, "limit")
    peak_bytes = _compiled_bytes(report)
    excess = peak_bytes - limit_bytes
    if excess > 0:
        raise AssertionError(
            f"the step takes {peak_bytes} bytes on {report.device}, {excess} more than "
            f"{limit}.\n{report}"
        )


@pytest.fixture
def memplan_snapshot(request: pytest.FixtureRequest) -> Callable[..., None]:
    """A function that compares a step with its snapshot.

    A snapshot is a report in `__memplan__/` beside the test file; `pytest --memplan-update` writes
    it. `memplan_snapshot(step, args, device="a100", bytes=2, ms=5, **options)` fails if the
    compiled bytes or the predicted time rose by more than these percentages, and names the buffers
    that grew. The other arguments are those of `memplan_bytes`.
    """
    numbers = count(1)
    updates = request.config.getoption("memplan_update")

    def check(
        step: Callable[..., Any],
        args: Sequence[Any],
        device: str | None = _DEVICE,
        *,
        bytes: float = 2.0,
        ms: float = 5.0,
        **options: Any,
    ) -> None:
        __tracebackhide__ = True
        tolerance = memplan.Tolerance(bytes, ms)
        path = _snapshot_path(request.node, next(numbers))
        if not updates and not path.exists():
            raise AssertionError(
                f"there is no snapshot {path}. Write it with `pytest --memplan-update`, and commit "
                "it."
            )
        saved = None if updates else memplan.Report.load_json(path)
        report = _report(step, args, device, options)
        # Leave out what is large, or differs each time.
        snapshot = replace(report, timeline=None, lines=(), planning_s=0.0, preparation_s=None)
        if saved is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            snapshot.save_json(path)
        else:
            _check_growth(saved, snapshot, tolerance, path)

    return check


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("memplan")
    help_text = "Write the snapshots of memplan_snapshot anew."
    group.addoption("--memplan-update", action="store_true", help=help_text)


def _check_growth(
    saved: memplan.Report,
    snapshot: memplan.Report,
    tolerance: memplan.Tolerance,
    path: Path,
) -> None:
    """Raise AssertionError if a step grew by more than the tolerance."""
    __tracebackhide__ = True
    difference = memplan.Difference.of(saved, snapshot)
    difference.check_same()
    growth = tolerance.exceeded_by(difference)
    if growth:
        raise AssertionError(
            f"the step grew: {' and '.join(growth)}.\n{difference}\nTo accept it, run "
            f"`pytest --memplan-update`, which writes {path}."
        )


def _report(
    step: Callable[..., Any],
    args: Sequence[Any],
    device: str | None,
    options: dict[str, Any],
) -> memplan.Report:
    """The report of a step; memplan's errors are raised without memplan's frames."""
    __tracebackhide__ = True
    try:
        if not isinstance(step, memplan.api.PlannedJit):
            return memplan.api.report(step, args, device=device, **options)
        if device == _DEVICE and not options:
            return step.plan(*args).report
        raise memplan.MemplanError(
            "the step is planned by memplan.jit with its own device and options. Leave them out "
            "here, or pass the plain step."
        )
    except memplan.MemplanError as error:
        raise error.with_traceback(None) from None


def _compiled_bytes(report: memplan.Report) -> int:
    assert report.compiled_peak_bytes is not None  # it was compiled now
    return report.compiled_peak_bytes


def _snapshot_path(test: pytest.Item, number: int) -> Path:
    """Path of a test's snapshot: `__memplan__/test_steps/TestUNet.test_forward[v100].json`.

    Args:
      number: of the call of `memplan_snapshot` in the test, from 1.
    """
    classes = [node.name for node in test.listchain() if isinstance(node, pytest.Class)]
    name = ".".join([*classes, test.name]) + f"-{number}" * (number > 1)
    file_name = re.sub(r"[^\w.,=+\[\]-]+", "_", name)[:_MAX_CHARACTERS]
    if file_name != name:
        file_name += f"-{zlib.crc32(name.encode()):08x}"
    return test.path.parent / _FOLDER / test.path.stem / f"{file_name}.json"
