"""The questions: cases, a measure, and a view of the results. A new question is a new entry."""

from collections.abc import Callable
from dataclasses import dataclass

from experiments.bench import cases, views
from experiments.bench.cases import Case, Cases
from experiments.bench.measures import (
    aborts,
    bits,
    by_hand,
    clocks,
    curve,
    depth,
    growth,
    inside,
    judged,
    meshed,
    nested,
    overhead,
    planned,
    releases,
    resident,
    sharded,
    slab_numbers,
    split,
    tpu,
)
from experiments.bench.public.checkouts import checkouts_folder
from experiments.bench.results import SOURCES, Measurement, Result, stored_result
from experiments.bench.tables import Rows

_PUBLIC = (
    "memplan/**/*.py",
    "experiments/bench/public/checkouts.py",
    "experiments/bench/public/*steps.py",
)
_DRAWN = ("memplan/**/*.py", "experiments/bench/boundaries.py")
_FITS = ("fits", "untouched")
_NAMED = 8  # Names at most this many cases without a result; counts more.


@dataclass(frozen=True)
class Question:
    """A question to measure."""

    name: str
    cases: Cases
    measure: Callable[[Case], Measurement]  # measures a case, in this process
    # Rows -> markdown. A row has its figures, the facts of its case, and `case`, `device`,
    # `budget`, `status` and `reason`.
    view: Callable[[Rows], str]
    sources: tuple[str, ...] = SOURCES  # patterns of files that a result depends on
    needs: Callable[[], object] = bool  # raises if a measurement lacks something
    jax: str = ""  # required beginning of jax's version; "" for any

    def asks(self, case: Case) -> bool:
        """Whether to measure a case: the case in `after` fits, or does not, as required."""
        if case.after is None:
            return True
        name, fits = case.after
        result = stored_result(self.name, name)
        fitted = None if result is None or result.status == "failed" else result.status in _FITS
        return fitted is fits and self.asks(self.cases[name])

    def results(self) -> list[Result]:
        """The stored results, in the order of the cases."""
        stored = (
            stored_result(self.name, name) for name, case in self.cases.items() if self.asks(case)
        )
        return [result for result in stored if result is not None]

    def rows(self) -> Rows:
        rows = []
        for result in self.results():
            case = self.cases[result.case]
            of_all = {
                **case.facts, "case": case.name, "device": case.device, "budget": case.budget,
                "status": result.status,
                "reason": result.reason,
            }  # fmt: skip
            rows += [{**of_all, **row} for row in result.rows or [{}]]
        return rows

    def tables(self) -> str:
        """Its part of README.md: the view, the cases without a result, and the versions."""
        results = self.results()
        names = [name for name, case in self.cases.items() if self.asks(case)]
        unmeasured = [name for name in names if name not in {result.case for result in results}]
        parts = [self.view(self.rows()) if results else ""]
        if unmeasured:
            listing = (
                ", ".join(unmeasured)
                if len(unmeasured) <= _NAMED
                else f"{len(unmeasured)} of {len(names)} cases"
            )
            parts.append(f"Not measured: {listing}.")
        measured = (
            (result.source, tuple(result.versions.items()), result.hardware) for result in results
        )
        for source, versions, machine in dict.fromkeys(measured):
            by = ", ".join(
                [*(f"{name} {version}" for name, version in versions), *filter(None, [machine])]
            )
            parts.append(f"Measured by memplan {source}{f' with {by}' if by else ''}.")
        return "\n\n".join(filter(None, parts))


QUESTIONS = {
    question.name: question
    for question in (
        Question("budgets", cases.BUDGETS, planned.measure, views.budgets),
        Question("clocks", cases.CLOCKS, clocks.measure, views.clocks),
        Question("bits", cases.BITS, bits.measure, views.same_bits),
        Question("drawn", cases.DRAWN, bits.measure_drawn, views.drawn),
        Question("aborts", cases.ABORTS, aborts.measure, views.aborts),
        Question("judged", cases.JUDGED, judged.measure, views.judged),
        Question("judged_jax011", cases.JUDGED, judged.measure, views.judged, jax="0.11"),
        Question("public", cases.PUBLIC, planned.measure, views.public, _PUBLIC, checkouts_folder),
        Question(
            "public_bits",
            cases.PUBLIC_BITS,
            bits.measure,
            views.same_bits,
            _PUBLIC,
            checkouts_folder,
        ),
        Question("rivals", cases.RIVALS, curve.measure, views.rivals),
        Question("tpu", cases.TPU, tpu.measure, views.tpu),
        Question("size", cases.SIZE, planned.measure, views.size),
        Question("depth", cases.DEPTH, depth.measure, views.depth),
        Question("slabs", cases.SLABS, planned.measure, views.slabs),
        Question("slabs_jax011", cases.SLABS_JAX011, planned.measure, views.slabs, jax="0.11"),
        Question("resident", cases.RESIDENT, resident.measure, views.resident),
        Question("slab_numbers", cases.SLAB_NUMBERS, slab_numbers.measure, views.numbers),
        Question("slab_time", cases.SLAB_TIME, split.measure, views.slab_time),
        Question("large_images", cases.LARGE_IMAGES, growth.largest_by_method, views.large_images),
        Question("speed", cases.SPEED, planned.beside_checkpoint, views.speed),
        Question("largest", cases.LARGEST, growth.against_every_size, views.largest),
        Question("link_speed", cases.LINKS, planned.measure, views.links),
        Question("loops", cases.LOOPS, planned.measure, views.loops),
        Question("inside", cases.INSIDE, inside.measure, views.inside),
        Question("by_hand", cases.BY_HAND, by_hand.measure, views.by_hand, _DRAWN),
        Question("situations", cases.SITUATIONS, by_hand.measure, views.by_hand_alone),
        Question("long_scans", cases.LONG, nested.measure, views.long_scans),
        Question("state", cases.STATE, planned.measure, views.state),
        Question("meshes", cases.MESHES, meshed.measure, views.meshes),
        Question("sharded", cases.SHARDED, sharded.measure, views.sharded),
        Question(
            "public_meshes",
            cases.PUBLIC_MESHES,
            sharded.measure,
            views.public_meshes,
            _PUBLIC,
            checkouts_folder,
        ),
        Question("space", cases.SPACE, sharded.measure, views.space),
        Question(
            "releases",
            cases.RELEASES,
            releases.measure,
            views.releases,
            needs=releases.older_python,
        ),
        Question("overhead", cases.OVERHEAD, overhead.measure, views.overhead),
    )
}


def all_tables() -> dict[str, str]:
    """The tables of README.md by question."""
    return {name: question.tables() for name, question in QUESTIONS.items()}
