"""The difference of two reports: their figures, and the buffers at the peak that are new, gone, larger or smaller.

The JSON is an object with the fields below, first `"schema": "memplan.difference/1"`; see `memplan.report.model`.
"""

import math
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

from memplan import io
from memplan.errors import ReportError
from memplan.report.model import LiveValue, Report
from memplan.report.result import Result, Versions
from memplan.report.timeline import Timeline
from memplan.report.views import page
from memplan.report.views.table import Table, largest, short_source
from memplan.units import format_bytes, format_seconds

_NUMBER = re.compile(r"\.[a-z]*\d+\b|\{[\d,]*\}")  # of an instruction, and the leaf of a tuple


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two reports.

    Attributes:
      step, device, planner, budget_bytes, peak_kernel, versions: as in the report.
      compiled_bytes, host_bytes: device and host bytes at their peaks.
      other_bytes: of the compiled bytes, those of no buffer: holes between temporaries, and tables.
      step_s: predicted seconds of one step; None if they are not known.
      timeline: memory over the step, for the page; None where the report has none. The JSON does not have it.
    """

    step: str
    device: str
    planner: str
    budget_bytes: int
    compiled_bytes: int
    other_bytes: int
    host_bytes: int
    step_s: float | None
    peak_kernel: str
    versions: Versions
    timeline: Timeline | None = field(default=None, repr=False)

    @classmethod
    def of(cls, report: Report) -> Self:
        """The side of a report; raises ReportError where its step was not compiled."""
        compiled = report.compiled_peak_bytes
        if compiled is None:
            raise ReportError(f"the report of {report.step or 'a step'} on {report.device} has no compiled bytes.")
        return cls(
            report.step,
            report.device,
            report.planner,
            report.budget_bytes,
            compiled,
            compiled - sum(one.nbytes for one in report.live_at_peak),
            report.host_peak_bytes,
            report.predicted_step_s,
            report.peak_kernel,
            report.versions,
            report.timeline,
        )


@dataclass(frozen=True, slots=True)
class Change:
    """A buffer that is at the peak of one report alone, or has other bytes there.

    Attributes:
      kind: `new` or `larger`, `gone` or `smaller`. A buffer is gone also where it still exists at other moments.
      name, source: as in the newer report that has it.
      old_shape, new_shape: '' where it is not.
      old_bytes, new_bytes: 0 where it is not.
    """

    kind: Literal["new", "larger", "smaller", "gone"]
    name: str
    source: str
    old_shape: str
    new_shape: str
    old_bytes: int
    new_bytes: int

    @property
    def more_bytes(self) -> int:
        """By how much it grew; negative if it shrank."""
        return self.new_bytes - self.old_bytes


@dataclass(frozen=True)
class Difference(Result):
    """What changed from one report to another.

    Buffers are matched by source line, layer and shape, and by fewer of these, or by bytes, where lines moved or shapes
    changed; the numbers in the names of instructions do not count.

    Attributes:
      old, new: the figures of both.
      buffers: those that differ, from the one that grew most to the one that shrank most.
    """

    SCHEMA: ClassVar[str] = "memplan.difference/1"
    TITLE: ClassVar[str] = "memplan difference"

    old: Side
    new: Side
    buffers: tuple[Change, ...]

    @classmethod
    def of(cls, old: Report, new: Report) -> Self:
        """The difference of two reports, of whatever steps; raises ReportError where one was not compiled."""
        changes = (_change(*pair) for pair in _pairs(old.live_at_peak, new.live_at_peak))
        found = sorted((one for one in changes if one.more_bytes), key=lambda one: (-one.more_bytes, one.name))
        return cls(Side.of(old), Side.of(new), tuple(found))

    @property
    def bytes_percent(self) -> float:
        """By how many percent the compiled bytes rose."""
        return _percent(self.old.compiled_bytes, self.new.compiled_bytes)

    @property
    def step_percent(self) -> float:
        """By how many percent the predicted seconds rose; NaN where a report has none."""
        return _percent(self.old.step_s, self.new.step_s)

    @property
    def grown(self) -> tuple[Change, ...]:
        """Buffers that are new or larger, the largest growth first."""
        return tuple(one for one in self.buffers if one.more_bytes > 0)

    @property
    def shrunk(self) -> tuple[Change, ...]:
        """Buffers that are gone or smaller, the largest first."""
        return tuple(one for one in reversed(self.buffers) if one.more_bytes < 0)

    def check_same(self) -> None:
        """Raise ReportError where the reports are of different steps or devices. A step without a name is any step."""
        for what, old, new in (("step", self.old.step, self.new.step), ("device", self.old.device, self.new.device)):
            if old != new and old and new:
                raise ReportError(
                    f"the saved report is of another {what}: {old}, not {new}. Compare with a report of this {what}, "
                    "or save it anew."
                )

    def entries(self) -> dict[str, Any]:
        sides = {name: replace(side, timeline=None) for name, side in (("old", self.old), ("new", self.new))}
        found = io.encode(replace(self, **sides))
        for name in sides:
            del found[name]["timeline"]
        return found

    def tables(self, rows: int) -> tuple[Table, ...]:
        """Figures, what grew, what shrank; at most `rows` rows of the latter."""
        return tuple(table for table in (*_figures(self), *self._changes(rows)) if table.rows)

    def _changes(self, rows: int) -> tuple[Table, Table]:
        grown = _buffers("Grew at the peak", "bad", self.grown, rows)
        return grown, _buffers("Shrank at the peak", "good", self.shrunk, rows)

    @property
    def title(self) -> str:
        return f"{self.TITLE}: {self.new.step or self.new.device}"

    def to_html(self) -> str:
        """A self-contained page: memory over both steps, the buffers that differ, figures. Loads nothing."""
        more = self.new.compiled_bytes - self.old.compiled_bytes
        share = _share(self.old.compiled_bytes, self.new.compiled_bytes)
        status = f"{_signed(more)} {share}".rstrip() if more else "as before"
        header = page.Header(self.title, status, more <= 0, self.new.versions)
        return page.of_difference(header, io.encode(self), tuple(_figures(self)), self._changes(page.FALLBACK_ROWS))

    def _repr_html_(self) -> str:
        return page.frame(self.to_html(), self.title)


@dataclass(frozen=True)
class Tolerance:
    """By how many percent a step may grow.

    Raises ReportError for what is not a percentage.

    Attributes:
      bytes: of compiled bytes.
      ms: of the predicted time of a step.
    """

    bytes: float = 2.0
    ms: float = 5.0

    def __post_init__(self) -> None:
        for name in ("bytes", "ms"):
            if not (percent := getattr(self, name)) >= 0:
                raise ReportError(f"{name} is {percent}; it is a percentage by which a step may grow, 0 or more.")

    def exceeded_by(self, difference: Difference) -> tuple[str, ...]:
        """What grew by more, for people. Seconds that a report does not have are not compared."""
        old, new = difference.old, difference.new
        nbytes = format_bytes(old.compiled_bytes), format_bytes(new.compiled_bytes)
        seconds = format_seconds(old.step_s), format_seconds(new.step_s)
        return tuple(
            f"its {what} rose by {percent:.4g} %, from {before} to {now} ({allowed:g} % are allowed)"
            for what, percent, allowed, (before, now) in (
                ("compiled bytes", difference.bytes_percent, self.bytes, nbytes),
                ("predicted time", difference.step_percent, self.ms, seconds),
            )
            if percent > allowed
        )


def _percent(old: float | None, new: float | None) -> float:
    if old is None or new is None:
        return math.nan
    if old <= 0:
        return math.inf if new > old else 0.0
    return 100 * (new - old) / old


def _scope(value: LiveValue) -> str:
    """The layer that makes a buffer, or its instruction without numbers: those change with every edit."""
    return value.name if "/" in value.name else _NUMBER.sub("", value.name)


def _line(value: LiveValue) -> str:
    """The line, wherever the folder of the project is."""
    return "/".join(value.source.split("/")[-2:])


def _file(value: LiveValue) -> str:
    return _line(value).rpartition(":")[0]


def _rank(value: LiveValue) -> str:
    return str(value.shape.count(","))


# By what buffers are matched, in this order; () is nothing. It matters little which are paired of those that take the
# same bytes: they are no change. Where bytes differ, too, an instruction without a line says too little.
_KEYS: tuple[Callable[[LiveValue], tuple[str, ...]], ...] = (
    lambda one: (_line(one), _scope(one), one.shape),
    lambda one: (_file(one), _scope(one), one.shape),
    lambda one: (_scope(one), one.shape),
    lambda one: (_line(one), str(one.nbytes)),
    lambda one: (_line(one), _scope(one), _rank(one)) if one.source else (),
    lambda one: (_file(one), _scope(one), _rank(one)) if _file(one) else (),
)


def _pairs(old: Iterable[LiveValue], new: Iterable[LiveValue]) -> Iterator[tuple[LiveValue | None, LiveValue | None]]:
    """The buffers of both reports in pairs; None beside those of one report alone."""
    left, right = _largest_first(old), _largest_first(new)
    for key in _KEYS:
        alike: dict[tuple[str, ...], deque[LiveValue]] = defaultdict(deque)
        for one in left:
            alike[key(one)].append(one)
        found = [(alike[key(one)].popleft() if key(one) and alike[key(one)] else None, one) for one in right]
        yield from (pair for pair in found if pair[0] is not None)
        left = _largest_first(one for some in alike.values() for one in some)
        right = [one for match, one in found if match is None]
    yield from ((one, None) for one in left)
    yield from ((None, one) for one in right)


def _largest_first(values: Iterable[LiveValue]) -> list[LiveValue]:
    return sorted(values, key=lambda one: -one.nbytes)


def _change(old: LiveValue | None, new: LiveValue | None) -> Change:
    shapes = old.shape if old else "", new.shape if new else ""
    nbytes = old.nbytes if old else 0, new.nbytes if new else 0
    among_both = "larger" if nbytes[0] < nbytes[1] else "smaller"
    known = new or old
    assert known is not None
    kind = "gone" if new is None else "new" if old is None else among_both
    return Change(kind, known.name, known.source, *shapes, *nbytes)


def _figures(difference: Difference) -> Iterator[Table]:
    """What is compared, and what else the reports say of themselves where that differs."""
    old, new = difference.old, difference.new
    nbytes = (
        ("device peak", old.compiled_bytes, new.compiled_bytes),
        ("  between buffers", old.other_bytes, new.other_bytes),
        ("host peak", old.host_bytes, new.host_bytes),
    )
    rows = [
        (
            name,
            format_bytes(before),
            format_bytes(now),
            _signed(now - before) if now != before else "",
            _share(before, now),
        )
        for name, before, now in nbytes
        if before or now
    ]
    seconds = format_seconds(old.step_s), format_seconds(new.step_s)
    rows.append(("step, predicted", *seconds, "", _share(old.step_s, new.step_s)))
    yield Table(f"memplan: {new.device}", ("", ">before", ">now", ">more", ""), tuple(rows))
    facts = {"step": (old.step, new.step), "device": (old.device, new.device), "planner": (old.planner, new.planner)}
    facts["device budget"] = format_bytes(old.budget_bytes), format_bytes(new.budget_bytes)
    facts["runs at the peak"] = old.peak_kernel, new.peak_kernel
    versions = dict(old.versions), dict(new.versions)
    facts |= {name: (versions[0].get(name, ""), versions[1].get(name, "")) for name in versions[0] | versions[1]}
    differ = tuple((name, before, now) for name, (before, now) in facts.items() if before != now)
    yield Table("Other than before", ("", "before", "now"), differ)


def _share(old: float | None, new: float | None) -> str:
    percent = _percent(old, new)
    return f"{percent:+.2f} %" if percent and math.isfinite(percent) else ""


def _signed(nbytes: int) -> str:
    return f"{'-' if nbytes < 0 else '+'}{format_bytes(abs(nbytes))}"


def _buffers(title: str, tone: str, changes: Sequence[Change], limit: int) -> Table:
    """A row for all buffers of one line that changed alike, as those of a network's layers do."""
    alike: dict[Any, list[Change]] = defaultdict(list)
    for one in changes:
        alike[one.kind, one.source, one.old_shape, one.new_shape, one.more_bytes].append(one)
    found = sorted(alike.values(), key=lambda some: -abs(sum(one.more_bytes for one in some)))
    rows = tuple(
        (
            _signed(sum(one.more_bytes for one in some)),
            some[0].kind,
            (f"{len(some)} x " if len(some) > 1 else "") + _shapes(some[0]),
            short_source(some[0].source),
            some[0].name + (", ..." if len({one.name for one in some}) > 1 else ""),
        )
        for some in found[:limit]
    )
    more = _signed(sum(one.more_bytes for one in changes))
    columns = (">more", "", "shape", "source", "buffer")
    return Table(largest(f"{title}: {more}", len(rows), len(found)), columns, rows, (tone,) * len(rows))


def _shapes(change: Change) -> str:
    """`float32[2 -> 4,64]`."""
    shapes = list(dict.fromkeys(filter(None, (change.old_shape, change.new_shape))))
    dtypes, sides = {shape.partition("[")[0] for shape in shapes}, [shape.rstrip("]").split(",") for shape in shapes]
    if len(dtypes) > 1 or len({len(side) for side in sides}) > 1:
        return " -> ".join(shapes)
    dims = [[side.rpartition("[")[2] for side in both] for both in zip(*sides, strict=True)]
    return f"{''.join(dtypes)}[{','.join(' -> '.join(dict.fromkeys(both)) for both in dims)}]"
