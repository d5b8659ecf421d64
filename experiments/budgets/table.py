"""Regenerates the tables of README.md from the committed JSON.

    python -m experiments.budgets.table

Everything between `<!-- tables -->` and `<!-- end -->` is replaced.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from experiments.budgets.cases import CASES
from experiments.budgets.run import RESULTS
from experiments.readme import inserted
from memplan.files import write_whole

README = RESULTS.parent / "README.md"
NUMBERS = RESULTS.parent / "numbers.json"

Row = dict[str, Any]


def load(folder: Path = RESULTS) -> list[Row]:
    """The measured cases, in the order of `cases.py`."""
    paths = [folder / f"{name}.json" for name in CASES]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def own(case: Row) -> list[Row]:
    """The plans of memplan that were compiled, in order; the first was made without any feedback of the compiler."""
    return [one for one in case["attempts"] if "model_bytes" in one]


def best(case: Row) -> Row | None:
    """The plan that memplan itself would run: the fastest that fits, or its last."""
    plans = own(case)
    return min((plan for plan in plans if plan["fits"]), key=lambda plan: plan["step_s"], default=(plans or [None])[-1])


def tables(cases: Sequence[Row], numbers: Row | None) -> str:
    """Everything that the README shows of the results."""
    parts = [
        "### Budgets: the required cases", budgets([case for case in cases if case["required"]]),
        "### Budgets: the others", budgets([case for case in cases if not case["required"]]),
        f"Not measured yet: {missing(cases)}.",
        "### Honesty of memplan's own plans", honesty(cases),
        "### Where the model misses the compiler by more than 5 %", misses(cases),
    ]  # fmt: skip
    if numbers:
        parts += ["### Same numbers", same_numbers(numbers)]
    parts.append("Measured with " + "; ".join(environments(cases, numbers)) + ".")
    return "\n\n".join(parts) + "\n"


def budgets(cases: Iterable[Row]) -> str:
    """What was asked for and what came out, MiB and ms."""
    head = (
        "case", "plain", "budget", "status", "chosen", "compiled", "plain ms", "ms", "memplan's own plan", "its host",
        "its ms", "attempts", "planning s",
    )  # fmt: skip
    return grid(head, map(_budget, cases))


def _budget(case: Row) -> list[str]:
    plan, plans = best(case), len(own(case))
    there = mib(plan["compiled_bytes"]) + ("" if plan["fits"] else " (over)") if plan else "none"
    return [
        case["case"], mib(case["baseline_peak_bytes"]), mib(case["budget_bytes"]), case["status"],
        case["planner"] or "none", mib(case.get("compiled_peak_bytes")), ms(case["baseline_step_s"]),
        ms(case.get("step_s")), there, mib(plan["host_bytes"]) if plan else "", ms(plan["step_s"]) if plan else "",
        f"{plans} + {len(case['attempts']) - plans}", f"{case['planning_s']:.1f}",
    ]  # fmt: skip


def missing(cases: Iterable[Row]) -> str:
    """Cases without a result."""
    found = {case["case"] for case in cases}
    return ", ".join(name for name in CASES if name not in found) or "none"


def honesty(cases: Iterable[Row]) -> str:
    """Errors of the prediction against the compiler, over memplan's own compiled plans."""
    cases = list(cases)
    first = [plans[0] for case in cases if (plans := own(case))]
    last = [plan for case in cases if (plan := best(case))]
    chosen = [one for case in cases for one in own(case) if one["chosen"]]
    rows = []
    for label, plans in (
        ("first attempt, no feedback", first),
        ("best attempt, with feedback", last),
        ("chosen over XLA's own", chosen),
        ("every attempt", [one for case in cases for one in own(case)]),
    ):
        device = [relative(one["predicted_bytes"], one["compiled_bytes"]) for one in plans]
        moving = [one for one in plans if one["host_predicted_bytes"] or one["host_bytes"]]  # 0 for 0 proves nothing
        host = [relative(one["host_predicted_bytes"], one["host_bytes"]) for one in moving]
        rows.append([label, str(len(plans)), *statistics(device), str(len(moving)), *statistics(host)])
    head = ("memplan's plans", "count", "device median", "device worst", "that move", "host median", "host worst")
    return grid(head, rows)


def misses(cases: Iterable[Row]) -> str:
    """Plans whose device bytes were predicted wrongly, and the segment where the compiler peaks."""
    rows = []
    for case in cases:
        for number, one in enumerate(own(case)):
            error = relative(one["predicted_bytes"], one["compiled_bytes"])
            if abs(error) > 0.05:
                peak = one.get("compiled_peak", {})
                rows.append(
                    [
                        case["case"], str(number + 1), f"{error:+.1%}", mib(one["model_bytes"]),
                        mib(one["compiled_bytes"]), peak.get("op", ""), mib(peak.get("model_bytes")),
                    ]
                )  # fmt: skip
    if not rows:
        return "None."
    return grid(("case", "attempt", "error", "model", "compiled", "peaks at", "model there"), rows)


def same_numbers(numbers: Row) -> str:
    """Per case the output nearest to (or furthest beyond) its tolerance after the last step."""
    rows = []
    for name in CASES:
        case = numbers["cases"].get(name)
        if case is None:
            continue
        last = case["steps"][-1]
        rows.append(
            [
                name, f"{case['percent']} %", str(case["recomputed_ops"]), str(case["offloaded_bytes"] // 1024),
                *(f"{last[key]:.1e}" for key in ("recompilation", "planned", "tolerance")),
                " ".join("yes" if step["passes"] else f"no ({step['beyond']})" for step in case["steps"]),
            ]
        )  # fmt: skip
    head = (
        "case", "share", "ops again", "KiB moved", "recompilation", "planned", "tolerance", "passes at step 1, 2, 3",
    )  # fmt: skip
    return grid(head, rows)


def environments(cases: Iterable[Row], numbers: Row | None) -> list[str]:
    """Every set of versions and hardware that results were measured with."""
    found = [case["environment"] for case in cases] + ([numbers["environment"]] if numbers else [])
    return list(dict.fromkeys(", ".join(f"{name} {value}" for name, value in one.items()) for one in found))


def relative(predicted: int, compiled: int) -> float:
    """Error as a share of the compiler's bytes; below 1 MiB nothing is told apart."""
    return 0.0 if abs(predicted - compiled) < 2**20 else (predicted - compiled) / max(compiled, 2**20)


def statistics(errors: Sequence[float]) -> list[str]:
    """Median and worst absolute error."""
    if not errors:
        return ["", ""]
    return [f"{median(map(abs, errors)):.1%}", f"{max(errors, key=abs):+.1%}"]


def mib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**20:.0f}"


def ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f}"


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def regenerate() -> str:
    """The README with the tables of the committed results."""
    numbers = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else None
    return inserted(README.read_text(), tables(load(), numbers))


def main() -> None:
    write_whole(README, regenerate())


if __name__ == "__main__":
    main()
