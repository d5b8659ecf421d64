"""Tests that hold the memory of training steps: functions, and a pytest plugin with the fixture `memplan_snapshot`.

Every run of pytest loads this file where memplan is installed. It imports jax only when a test uses it.
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
_MOST_CHARACTERS = 120  # of the name of a file; file systems take 255 bytes


def memplan_bytes(step: Callable[..., Any], args: Sequence[Any], device: str | None = _DEVICE, **options: Any) -> int:
    """Device bytes that the compiler gives a step at its peak. Nothing is run.

    Args:
      step: a plain function, or one of `memplan.jit`, which keeps its own device and options.
      args: arrays or `jax.ShapeDtypeStruct`s.
      device: what to compile for: a name (`memplan devices`), or None for the local backend. Described GPUs need no
        GPU, but the extra `gpu-aot`.
      options: those of `memplan.jit`. Without a `budget`, the step is compiled as it is, whatever it takes. By default,
        the first of several arguments is donated: the state that a step replaces.

    Raises:
      UnknownDeviceError: there is no such device, or the extra is not installed.
    """
    __tracebackhide__ = True
    return _compiled_bytes(_report(step, args, device, options))


def assert_peak_below(
    step: Callable[..., Any], args: Sequence[Any], limit: int | str, *, device: str | None = _DEVICE, **options: Any
) -> None:
    """Raise AssertionError, with what the device holds then, if a step takes more than this at its peak.

    Args:
      limit: bytes, `"3GiB"`, or `"80%"` of the budget or else of the device's memory.
      step, args, device, options: as for `memplan_bytes`.
    """
    __tracebackhide__ = True
    report = _report(step, args, device, options)
    most = memplan.api.parse_bytes(limit, report.budget_bytes, "limit")
    if (taken := _compiled_bytes(report)) > most:
        raise AssertionError(
            f"the step takes {taken} bytes on {report.device}, {taken - most} more than {limit}.\n{report}"
        )


@pytest.fixture
def memplan_snapshot(request: pytest.FixtureRequest) -> Callable[..., None]:
    """A function that compares a step with its snapshot, a report in `__memplan__/` beside the test file.

    `memplan_snapshot(step, args, device="a100", bytes=2, ms=5, **options)` fails if the compiled bytes or the predicted
    time rose by more than these percents, and says which buffers grew. `pytest --memplan-update` writes the snapshots.
    The other arguments are those of `memplan_bytes`.
    """
    numbers = count(1)

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
        tolerance, path = memplan.Tolerance(bytes, ms), _path(request.node, next(numbers))
        writes = request.config.getoption("memplan_update")
        if not writes and not path.exists():
            raise AssertionError(
                f"there is no snapshot {path}. Write it with `pytest --memplan-update`, and commit it."
            )
        saved = None if writes else memplan.Report.load_json(path)
        # without what is large, or differs each time
        found = _report(step, args, device, options)
        new = replace(found, timeline=None, lines=(), planning_s=0.0, preparation_s=None)
        if saved is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            new.save_json(path)
            return
        difference = memplan.Difference.of(saved, new)
        difference.check_same()
        if risen := tolerance.exceeded_by(difference):
            raise AssertionError(
                f"the step grew: {' and '.join(risen)}.\n{difference}\nTo accept it, run `pytest --memplan-update`, "
                f"which writes {path}."
            )

    return check


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("memplan")
    group.addoption("--memplan-update", action="store_true", help="Write the snapshots of memplan_snapshot anew.")


def _report(
    step: Callable[..., Any], args: Sequence[Any], device: str | None, options: dict[str, Any]
) -> memplan.Report:
    """The report of a step; an error of memplan's is raised without its way through memplan."""
    __tracebackhide__ = True
    try:
        if not isinstance(step, memplan.api.PlannedJit):
            return memplan.api.report(step, args, device=device, **options)
        if device == _DEVICE and not options:
            return step.plan(*args).report
        raise memplan.MemplanError(
            "the step is planned by memplan.jit with its own device and options. Leave them out here, or pass the "
            "plain step."
        )
    except memplan.MemplanError as error:
        raise error.with_traceback(None) from None


def _compiled_bytes(report: memplan.Report) -> int:
    assert report.compiled_peak_bytes is not None  # as of everything that was compiled now
    return report.compiled_peak_bytes


def _path(test: pytest.Item, number: int) -> Path:
    """Of the snapshot of a test's call with this number: `__memplan__/test_steps/TestUNet.test_forward[v100].json`."""
    classes = [node.name for node in test.listchain() if isinstance(node, pytest.Class)]
    name = ".".join([*classes, test.name]) + f"-{number}" * (number > 1)
    plain = re.sub(r"[^\w.,=+\[\]-]+", "_", name)[:_MOST_CHARACTERS]
    if plain != name:
        plain += "-" + f"{zlib.crc32(name.encode()):08x}"
    return test.path.parent / _FOLDER / test.path.stem / f"{plain}.json"
