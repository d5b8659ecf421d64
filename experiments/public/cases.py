"""Every public step within half of its plain bytes; where that does not fit, within more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from experiments.public.steps import STEPS, PublicStep

PERCENTS = (50, 60, 75)


@dataclass(frozen=True)
class Case:
    """A step within percents of what the compiler says that it takes as it is."""

    step: PublicStep
    percent: int

    @property
    def name(self) -> str:
        return f"{self.step.name}-{self.step.device}-{self.percent}"


_LADDERS = [[Case(step, percent) for percent in PERCENTS] for step in STEPS.values()]

CASES: Mapping[str, Case] = {case.name: case for ladder in _LADDERS for case in ladder}
AFTER: Mapping[str, str] = {more.name: less.name for ladder in _LADDERS for less, more in pairwise(ladder)}
"""The case that has to be found not to fit before another one is worth a try."""
