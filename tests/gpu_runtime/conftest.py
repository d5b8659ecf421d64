"""Programs on the stand-in, watched: none may race; what ran is counted, and the end of the session tells it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu_runtime import stand_in
from tests.gpu_runtime.operations import operations
from tests.gpu_runtime.races import races

_RUN = "run on the stand-in"


@pytest.fixture
def watched(record_property: Callable[[str, Any], None]) -> Callable[..., stand_in.Ran]:
    """`stand_in.run`, of a program that returns an object with the counts `programs`, `arrays` and `equal`."""
    if reason := stand_in.missing():
        pytest.skip(reason)

    def run(program: Callable[..., Any], *args: Any, **options: Any) -> stand_in.Ran:
        ran = stand_in.run(program, *args, **options)
        ops = operations(ran.log)
        conflicts = list(races(ops))
        words = Counter(line[2] for line in ran.lines())
        schedules = Counter(line[3] for line in ran.lines() if line[2] == "SCHEDULE")
        schedules = schedules or Counter({options.get("schedule", "eager"): ran.value["programs"]})
        counts = {
            "processes": 1, **{name: ran.value[name] for name in ("programs", "arrays", "equal")},
            **{f"{name} runs": schedules[name] for name in ("eager", "late", "random")},
            "kernels": words["KERNEL"], "library calls": words["LIBCALL"], "graphs": words["GRAPH"],
            "copies": words["COPY"], "operations": len(ops), "races": len(conflicts),
        }  # fmt: skip
        record_property(_RUN, [options.get("card", "v100"), counts])
        assert not conflicts, "\n".join(map(str, conflicts[:5]))
        return ran

    return run


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A row for each card."""
    sums: dict[str, Counter[str]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == _RUN and report.when == "call":
                    card, counts = value
                    sums.setdefault(card, Counter()).update(counts)
    if not sums:
        return
    terminalreporter.section("XLA's GPU runtime on a stand-in driver")
    for card, counts in [*sorted(sums.items()), ("all", sum(sums.values(), Counter()))]:
        summary = ", ".join(f"{counts[name]} {name}" for name in next(iter(sums.values())))
        terminalreporter.write_line(f"{card}: {summary}")
