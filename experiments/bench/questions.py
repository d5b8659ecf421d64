"""The questions: cases, a measure, and a view of the results. Adding one is adding an entry."""

from collections.abc import Callable
from dataclasses import dataclass

from experiments.bench import cases, views
from experiments.bench.cases import Case, Cases
from experiments.bench.measures import (
    aborts,
    bits,
    curve,
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
)
from experiments.bench.public.checkouts import checkouts_folder
from experiments.bench.results import SOURCES, Found, Result, known
from experiments.bench.tables import Rows

_PUBLIC = ("memplan/**/*.py", "experiments/bench/public/checkouts.py", "experiments/bench/public/*steps.py")
_FITS = ("fits", "untouched")
_NAMED = 8  # cases without a result, else they are counted


@dataclass(frozen=True)
class Question:
    """Something to find out."""

    name: str
    cases: Cases
    measure: Callable[[Case], Found]  # measures a case, in this process
    # To markdown. A row has the figures, the facts of its case, and `case`, `device`, `budget`, `status`, `reason`.
    view: Callable[[Rows], str]
    sources: tuple[str, ...] = SOURCES  # patterns of files that decide what a result says
    needs: Callable[[], object] = bool  # raises where something is missing that has to be there before a measurement
    jax: str = ""  # the beginning of the version of jax that it is asked of; "" for whichever is installed

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

    def rows(self) -> Rows:
        found = []
        for result in self.results():
            case = self.cases[result.case]
            of_all = {
                **case.facts, "case": case.name, "device": case.device, "budget": case.budget, "status": result.status,
                "reason": result.reason,
            }  # fmt: skip
            found += [{**of_all, **row} for row in result.rows or [{}]]
        return found

    def tables(self) -> str:
        """The part of README.md about it: its view, the cases without a result, and by what it was measured."""
        results = self.results()
        asked = [name for name, case in self.cases.items() if self.asks(case)]
        left = [name for name in asked if name not in {one.case for one in results}]
        parts = [self.view(self.rows()) if results else ""]
        if left:
            told = ", ".join(left) if len(left) <= _NAMED else f"{len(left)} of {len(asked)} cases"
            parts.append(f"Not measured: {told}.")
        measured = ((one.source, tuple(one.versions.items()), one.hardware) for one in results)
        for source, versions, machine in dict.fromkeys(measured):
            by = ", ".join([*(f"{name} {version}" for name, version in versions), *filter(None, [machine])])
            parts.append(f"Measured by memplan {source}{f' with {by}' if by else ''}.")
        return "\n\n".join(filter(None, parts))


QUESTIONS = {
    one.name: one
    for one in (
        Question("budgets", cases.BUDGETS, planned.measure, views.budgets),
        Question("bits", cases.BITS, bits.measure, views.same_bits),
        Question("drawn", cases.DRAWN, bits.measure_drawn, views.drawn),
        Question("aborts", cases.ABORTS, aborts.measure, views.aborts),
        Question("judged", cases.JUDGED, judged.measure, views.judged),
        Question("judged_jax011", cases.JUDGED, judged.measure, views.judged, jax="0.11"),
        Question("public", cases.PUBLIC, planned.measure, views.public, _PUBLIC, checkouts_folder),
        Question("public_bits", cases.PUBLIC_BITS, bits.measure, views.same_bits, _PUBLIC, checkouts_folder),
        Question("rivals", cases.RIVALS, curve.measure, views.rivals),
        Question("size", cases.SIZE, planned.measure, views.size),
        Question("slabs", cases.SLABS, planned.measure, views.slabs),
        Question("slabs_jax011", cases.SLABS_JAX011, planned.measure, views.slabs, jax="0.11"),
        Question("resident", cases.RESIDENT, resident.measure, views.resident),
        Question("slab_numbers", cases.SLAB_NUMBERS, slab_numbers.measure, views.numbers),
        Question("slab_time", cases.SLAB_TIME, split.measure, views.slab_time),
        Question("large_images", cases.LARGE_IMAGES, growth.largest_of_a_way, views.large_images),
        Question("speed", cases.SPEED, planned.beside_checkpoint, views.speed),
        Question("largest", cases.LARGEST, growth.against_every_size, views.largest),
        Question("link_speed", cases.LINKS, planned.measure, views.links),
        Question("loops", cases.LOOPS, planned.measure, views.loops),
        Question("inside", cases.INSIDE, inside.measure, views.inside),
        Question("long_scans", cases.LONG, nested.measure, views.long_scans),
        Question("state", cases.STATE, planned.measure, views.state),
        Question("meshes", cases.MESHES, meshed.measure, views.meshes),
        Question("sharded", cases.SHARDED, sharded.measure, views.sharded),
        Question("public_meshes", cases.PUBLIC_MESHES, sharded.measure, views.public_meshes, _PUBLIC, checkouts_folder),
        Question("space", cases.SPACE, sharded.measure, views.space),
        Question("releases", cases.RELEASES, releases.measure, views.releases, needs=releases.older_python),
        Question("overhead", cases.OVERHEAD, overhead.measure, views.overhead),
    )
}


def all_tables() -> dict[str, str]:
    """What README.md shows, by question."""
    return {name: question.tables() for name, question in QUESTIONS.items()}
