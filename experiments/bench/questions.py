"""The questions: cases, a measure, and a view of the results. Adding one is adding an entry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from experiments.bench import cases, slab_views, views
from experiments.bench.cases import Case, Cases
from experiments.bench.measures import (
    aborts,
    bits,
    curve,
    growth,
    judged,
    overhead,
    planned,
    resident,
    scaled,
    slab_numbers,
    split,
)
from experiments.bench.public.checkouts import checkouts_folder
from experiments.bench.results import SOURCES, Found, Result, Row, known

_PUBLIC = ("memplan/**/*.py", "experiments/bench/public/checkouts.py", "experiments/bench/public/*steps.py")
_FITS = ("fits", "untouched")
_NAMED = 8  # cases without a result, else they are counted


@dataclass(frozen=True)
class Question:
    """Something to find out.

    Attributes:
      measure: measures a case, in this process.
      view: rows -> markdown. A row has the figures, the facts of its case, and `case`, `device`, `budget`, `status`,
        `reason`.
      sources: patterns of files that decide what a result says.
      needs: raises where something is missing that has to be there before anything is measured.
      jax: how the version begins of the jax that it is asked of; "" for whichever is installed.
    """

    name: str
    cases: Cases
    measure: Callable[[Case], Found]
    view: Callable[[list[Row]], str]
    sources: tuple[str, ...] = SOURCES
    needs: Callable[[], object] = bool
    jax: str = ""

    def asks(self, case: Case) -> bool:
        """The case that it comes after is known to fit, or not to, as it wants."""
        if case.after is None:
            return True
        name, fits = case.after
        found = known(self.name, name)
        told = None if found is None or found.status == "failed" else found.status in _FITS
        return told is fits and self.asks(self.cases[name])

    def results(self) -> list[Result]:
        """What is known, in the order of the cases."""
        found = (known(self.name, name) for name, case in self.cases.items() if self.asks(case))
        return [one for one in found if one is not None]

    def rows(self) -> list[Row]:
        return [row for result in self.results() for row in _rows(self.cases[result.case], result)]

    def tables(self) -> str:
        """What README.md shows of it."""
        results = self.results()
        asked = [name for name, case in self.cases.items() if self.asks(case)]
        left = [name for name in asked if name not in {one.case for one in results}]
        parts = [self.view(self.rows()) if results else "", _left(left, len(asked)), *_told(results)]
        return "\n\n".join(filter(None, parts))


def _rows(case: Case, result: Result) -> Iterable[Row]:
    of_all = {
        **case.facts, "case": case.name, "device": case.device, "budget": case.budget, "status": result.status,
        "reason": result.reason,
    }  # fmt: skip
    return [{**of_all, **row} for row in result.rows or [{}]]


def _left(names: list[str], count: int) -> str:
    """What has no result."""
    told = ", ".join(names) if len(names) <= _NAMED else f"{len(names)} of {count} cases"
    return f"Not measured: {told}." if names else ""


def _told(results: Iterable[Result]) -> list[str]:
    """A paragraph for each version and machine."""
    found = {(one.source, tuple(one.versions.items()), one.hardware): None for one in results}
    return [f"Measured by memplan {source}{_with(dict(versions), machine)}." for source, versions, machine in found]


def _with(versions: Mapping[str, str], machine: str) -> str:
    told = [*(f"{name} {version}" for name, version in versions.items()), *([machine] if machine else [])]
    return f" with {', '.join(told)}" if told else ""


QUESTIONS = {
    one.name: one
    for one in (
        Question("budgets", cases.BUDGETS, planned.measure, views.budgets),
        Question("bits", cases.BITS, bits.measure, views.same_bits),
        Question("drawn", cases.DRAWN, bits.measure_drawn, views.drawn),
        Question("aborts", cases.ABORTS, aborts.measure, slab_views.aborts),
        Question("judged", cases.JUDGED, judged.measure, slab_views.judged),
        Question("judged_jax011", cases.JUDGED, judged.measure, slab_views.judged, jax="0.11"),
        Question("public", cases.PUBLIC, planned.measure, views.public, _PUBLIC, checkouts_folder),
        Question("public_bits", cases.PUBLIC_BITS, bits.measure, views.same_bits, _PUBLIC, checkouts_folder),
        Question("rivals", cases.RIVALS, curve.measure, views.rivals),
        Question("size", cases.SIZE, planned.measure, views.size),
        Question("slabs", cases.SLABS, planned.measure, slab_views.slabs),
        Question("slabs_jax011", cases.SLABS_JAX011, planned.measure, slab_views.slabs, jax="0.11"),
        Question("resident", cases.RESIDENT, resident.measure, slab_views.resident),
        Question("slab_numbers", cases.SLAB_NUMBERS, slab_numbers.measure, slab_views.numbers),
        Question("slab_time", cases.SLAB_TIME, split.measure, slab_views.slab_time),
        Question("large_images", cases.LARGE_IMAGES, growth.largest_of_a_way, views.large_images),
        Question("speed", cases.SPEED, planned.beside_checkpoint, views.speed),
        Question("largest", cases.LARGEST, growth.against_every_size, views.largest),
        Question("link_speed", cases.LINKS, planned.measure, views.links),
        Question("loops", cases.LOOPS, planned.measure, views.loops),
        Question("state", cases.STATE, planned.measure, views.state),
        Question("scaling", cases.SCALING, scaled.measure, views.scaling),
        Question("overhead", cases.OVERHEAD, overhead.measure, views.overhead),
    )
}


def all_tables() -> dict[str, str]:
    """What README.md shows, by question."""
    return {name: question.tables() for name, question in QUESTIONS.items()}
