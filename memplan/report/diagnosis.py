"""What to do first about the memory of a step: findings with their savings, the cheapest first.

The JSON is an object with the fields below, first `"schema": "memplan.diagnosis/1"`; see
`memplan.report.model`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from memplan.report.result import Record, Versions
from memplan.report.views.table import Table, short_source
from memplan.units import UNKNOWN, format_bytes, format_seconds

Kind = Literal[
    "donate", "closed over", "folded", "table", "output", "x64", "host state", "batch", "slabs",
    "plan",
]  # fmt: skip
_MIN_S = 1e-9  # less is rounding
KINDS: tuple[Kind, ...] = get_args(Kind)
"""From the cheapest remedy to the dearest."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A change of a step that saves device memory.

    Attributes:
      kind: an argument to `donate`; an array that the step has `closed over`; one that XLA has
        `folded` into the program; a `table` that depends on no argument; a large `output`; types of
        `x64`; state that the host could hold; a smaller `batch`; a kernel that needs `slabs`; the
        `plan`.
      advice: what to do, in one sentence.
      gained_bytes: device bytes that this saves; for an array in the program, its bytes.
      added_s: predicted seconds by which a step takes longer, negative if it is faster; None if
        unknown.
      device_bytes, host_bytes: bytes of the changed step.
      measured: `compiled`: the changed step was compiled for the same device. `counted`: only the
        bytes of arrays in the compiled step were counted; the change saves at most these.
      source: `file:line` of the user's code, or ''.
      position: number of the argument or of the output; None if it is about neither.
    """

    kind: Kind
    advice: str
    gained_bytes: int
    added_s: float | None
    device_bytes: int
    measured: Literal["compiled", "counted"]
    host_bytes: int = 0
    source: str = ""
    position: int | None = None


@dataclass(frozen=True)
class Diagnosis(Record):
    """A step's memory, and what to do about it first.

    Attributes:
      device: target of the compilation.
      budget_bytes: device bytes that the step may use.
      device_bytes, step_s: compiled bytes and predicted seconds of the unchanged step.
      findings: the cheapest remedies first. Each is a change of the unchanged step; two together
        may save less than their sum.
      compilations: programs that were compiled.
      versions: (name, version) of all software that affects the figures.
    """

    SCHEMA: ClassVar[str] = "memplan.diagnosis/1"
    TITLE: ClassVar[str] = "memplan doctor"

    device: str
    budget_bytes: int
    device_bytes: int
    step_s: float
    findings: tuple[Finding, ...]
    compilations: int
    versions: Versions = ()

    @property
    def fits(self) -> bool:
        """Does the unchanged step fit?"""
        return self.device_bytes <= self.budget_bytes

    @property
    def is_healthy(self) -> bool:
        """True if the step fits and there are no findings."""
        return self.fits and not self.findings

    def tables(self, rows: int) -> tuple[Table, ...]:
        """The verdict and every finding, regardless of `rows`."""
        verdict = (
            ("the step as it is", "fits" if self.fits else "does not fit"),
            ("device", self.device),
            (
                "device peak",
                f"{format_bytes(self.device_bytes)} of {format_bytes(self.budget_bytes)}",
            ),
            ("step, predicted", format_seconds(self.step_s)),
            (
                "found",
                f"{len(self.findings) or 'nothing to gain'}, in {self.compilations} programs",
            ),
        )
        tone = "good" if self.fits else "bad"
        tables = findings_table(self.findings, self.budget_bytes)
        return (Table(self.TITLE, ("", ""), verdict, (tone, *[""] * (len(verdict) - 1))), *tables)


def findings_table(findings: Sequence[Finding], budget_bytes: int) -> tuple[Table, ...]:
    """Every finding, green if the step then fits; no table without findings."""
    if not findings:
        return ()
    rows = tuple(
        (
            str(number),
            f"{finding.advice} ({short_source(finding.source)})"
            if finding.source
            else finding.advice,
            format_bytes(finding.gained_bytes),
            _signed(finding.added_s),
            format_bytes(finding.device_bytes),
            finding.measured,
        )
        for number, finding in enumerate(findings, 1)
    )
    tones = tuple("good" if finding.device_bytes <= budget_bytes else "" for finding in findings)
    return (
        Table("What to do first", (">", "", ">gains", ">step", ">then takes", ""), rows, tones),
    )


def _signed(seconds: float | None) -> str:
    if seconds is None or abs(seconds) < _MIN_S:
        return UNKNOWN if seconds is None else "same"
    return f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"
