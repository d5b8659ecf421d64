"""How a step scales: simulated from what XLA compiles for a whole machine that is not here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

from experiments.bench.cases import Case
from experiments.bench.results import Found, Row
from memplan.hardware.overheads import NONE, Overheads
from memplan.report.scaling import Scaling
from memplan.studies.scaling import compile_step


def measure(case: Case) -> Found:
    """A row for each assumption and number of devices; the step is compiled once."""
    step, args, donated = case.built()
    made = compile_step(
        step, args, case.facts["topology"], case.device,
        donate_argnums=donated, budget=case.budget, statistics=case.facts["statistics"],
    )  # fmt: skip
    return Found([row for name, one in assumed(case).items() for row in rows(name, made.scaling(one))])


def assumed(case: Case) -> dict[str, Overheads]:
    """The defaults, none at all, and kernels as slow as on the machine whose figures are published."""
    usual, speed = Overheads(), case.facts.get("speed")
    return {"usual": usual, "ideal": NONE, **({"slow": replace(usual, roofline_share=speed)} if speed else {})}


def rows(name: str, found: Scaling) -> Iterator[Row]:
    of_all = {"assumed": name, "compiled_shape": found.compiled_shape, "compiled_bytes": found.device_bytes}
    for point in found.points:
        yield {**of_all, "single_s": found.single_s, **asdict(point)}
