"""The difference of two reports: their figures, and the buffers at the peak that changed.

The JSON is an object with the fields below, first `"schema": "memplan.difference/1"`; see
`memplan.report.model`.
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

# The number of an instruction, and the leaf of a tuple.
_NUMBER = re.compile(r"\.[a-z]*\d+\b|\{[\d,]*\}")


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two reports.

    Attributes:
      step, device, planner, budget_bytes, peak_kernel, versions: as in the report.
      compiled_bytes, host_bytes: device and host bytes at their peaks.
      other_bytes: compiled bytes that belong to no buffer: holes between temporaries, and tables.
      step_s: predicted seconds of one step; None if unknown.
      timeline: memory over the step, for the page; None if the report has none. The JSON omits it.
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
        """The side of a report; raises ReportError if its step was not compiled."""
        compiled_bytes = report.compiled_peak_bytes
        if compiled_bytes is None:
            step = report.step or "a step"
            raise ReportError(f"the report of {step} on {report.device} has no compiled bytes.")
        return cls(
            step=report.step,
            device=report.device,
            planner=report.planner,
            budget_bytes=report.budget_bytes,
            compiled_bytes=compiled_bytes,
            other_bytes=compiled_bytes - sum(value.nbytes for value in report.live_at_peak),
            host_bytes=report.host_peak_bytes,
            step_s=report.predicted_step_s,
            peak_kernel=report.peak_kernel,
            versions=report.versions,
            timeline=report.timeline,
        )


@dataclass(frozen=True, slots=True)
class Change:
    """A buffer that is at the peak of only one report, or has other bytes there.

    Attributes:
      kind: `new` or `larger`, `gone` or `smaller`. A buffer that is gone may still be alive at
        other times.
      name, source: as in the newer report that has it.
      old_shape, new_shape: '' in a report without it.
      old_bytes, new_bytes: 0 in a report without it.
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
        """The growth; negative if it shrank."""
        return self.new_bytes - self.old_bytes


@dataclass(frozen=True)
class Difference(Result):
    """What changed from one report to another.

    Buffers are matched by source line, layer and shape. If lines moved or shapes changed, they are
    matched by fewer of these, or by bytes. Numbers in names of instructions are ignored.

    Attributes:
      old, new: the figures of both.
      buffers: the changed ones, from the largest growth to the largest shrinkage.
    """

    SCHEMA: ClassVar[str] = "memplan.difference/1"

    old: Side
    new: Side
    buffers: tuple[Change, ...]

    @classmethod
    def of(cls, old: Report, new: Report) -> Self:
        """The difference of any two reports; raises ReportError if one has no compiled bytes."""
        pairs = _pairs(old.live_at_peak, new.live_at_peak)
        changes = [change for change in (_change(*pair) for pair in pairs) if change.more_bytes]
        changes.sort(key=lambda change: (-change.more_bytes, change.name))
        return cls(Side.of(old), Side.of(new), tuple(changes))

    @property
    def bytes_percent(self) -> float:
        """Rise of the compiled bytes, in percent."""
        return _percent(self.old.compiled_bytes, self.new.compiled_bytes)

    @property
    def step_percent(self) -> float:
        """Rise of the predicted seconds, in percent; NaN if a report has none."""
        return _percent(self.old.step_s, self.new.step_s)

    @property
    def grown(self) -> tuple[Change, ...]:
        """Buffers that are new or larger, the largest growth first."""
        return tuple(change for change in self.buffers if change.more_bytes > 0)

    @property
    def shrunk(self) -> tuple[Change, ...]:
        """Buffers that are gone or smaller, the largest first."""
        return tuple(change for change in reversed(self.buffers) if change.more_bytes < 0)

    def check_same(self) -> None:
        """Raise ReportError if steps or devices differ. A step without a name equals any."""
        for name in ("step", "device"):
            old = getattr(self.old, name)
            new = getattr(self.new, name)
            if old != new and old and new:
                raise ReportError(
                    f"the saved report is of another {name}: {old}, not {new}. Compare with a "
                    f"report of this {name}, or save it anew."
                )

    def entries(self) -> dict[str, Any]:
        without_timelines = replace(
            self,
            old=replace(self.old, timeline=None),
            new=replace(self.new, timeline=None),
        )
        entries = io.encode(without_timelines)
        del entries["old"]["timeline"]
        del entries["new"]["timeline"]
        return entries

    def tables(self, rows: int) -> tuple[Table, ...]:
        """Figures, and buffers that grew and shrank, at most `rows` rows of each."""
        return tuple(table for table in (*_figures(self), *self._changes(rows)) if table.rows)

    def _changes(self, rows: int) -> tuple[Table, Table]:
        grown = _buffers("Grew at the peak", "bad", self.grown, rows)
        return grown, _buffers("Shrank at the peak", "good", self.shrunk, rows)

    @property
    def title(self) -> str:
        return self.new.step or "step"

    def to_html(self) -> str:
        """A self-contained page: memory over both steps, changed buffers, figures."""
        growth = self.new.compiled_bytes - self.old.compiled_bytes
        share = _share(self.old.compiled_bytes, self.new.compiled_bytes)
        status = f"{_signed(growth)} {share}".rstrip() if growth else "as before"
        subtitle = f"before and now, on {self.new.device}"
        header = page.Header(self.title, subtitle, status, growth <= 0)
        fallbacks = self._changes(page.FALLBACK_ROWS)
        return page.of_difference(header, io.encode(self), tuple(_figures(self)), fallbacks)

    def _repr_html_(self) -> str:
        return page.frame(self.to_html(), self.title)


@dataclass(frozen=True)
class Tolerance:
    """The percentages by which a step may grow.

    Attributes:
      bytes: of compiled bytes.
      ms: of the predicted time of a step.

    Raises:
      ReportError: one is negative or NaN.

    Example:
      >>> import jax.numpy as jnp, memplan
      >>> old, new = (memplan.api.report(jnp.sum, (jnp.ones(size),)) for size in (256, 512))
      >>> len(memplan.Tolerance(bytes=5).exceeded_by(memplan.Difference.of(old, new))) > 0
      True
    """

    bytes: float = 2.0
    ms: float = 5.0

    def __post_init__(self) -> None:
        for name in ("bytes", "ms"):
            percent = getattr(self, name)
            if not percent >= 0:
                raise ReportError(
                    f"{name} is {percent}; it is a percentage by which a step may grow, 0 or more."
                )

    def exceeded_by(self, difference: Difference) -> tuple[str, ...]:
        """The larger rises, as text. Seconds are compared only if both reports have them."""
        old = difference.old
        new = difference.new
        rises = []
        if difference.bytes_percent > self.bytes:
            rises.append(
                f"its compiled bytes rose by {difference.bytes_percent:.4g} %, from "
                f"{format_bytes(old.compiled_bytes)} to {format_bytes(new.compiled_bytes)} "
                f"({self.bytes:g} % are allowed)"
            )
        if difference.step_percent > self.ms:
            rises.append(
                f"its predicted time rose by {difference.step_percent:.4g} %, from "
                f"{format_seconds(old.step_s)} to {format_seconds(new.step_s)} ({self.ms:g} % are "
                "allowed)"
            )
        return tuple(rises)


def _percent(old: float | None, new: float | None) -> float:
    if old is None or new is None:
        return math.nan
    if old <= 0:
        return math.inf if new > old else 0.0
    return 100 * (new - old) / old


def _scope(value: LiveValue) -> str:
    """The layer of a buffer, or its instruction without numbers, which change with every edit."""
    return value.name if "/" in value.name else _NUMBER.sub("", value.name)


def _line(value: LiveValue) -> str:
    """The line, without the folder of the project."""
    return "/".join(value.source.split("/")[-2:])


def _file(value: LiveValue) -> str:
    return _line(value).rpartition(":")[0]


def _rank(value: LiveValue) -> str:
    return str(value.shape.count(","))


# Keys by which buffers are matched, in this order; () matches nothing. Among buffers of equal
# bytes, the pairing matters little: they are no change. If bytes differ, an instruction without a
# line is no match.
_KEYS: tuple[Callable[[LiveValue], tuple[str, ...]], ...] = (
    lambda value: (_line(value), _scope(value), value.shape),
    lambda value: (_file(value), _scope(value), value.shape),
    lambda value: (_scope(value), value.shape),
    lambda value: (_line(value), str(value.nbytes)),
    lambda value: (_line(value), _scope(value), _rank(value)) if value.source else (),
    lambda value: (_file(value), _scope(value), _rank(value)) if _file(value) else (),
)


def _pairs(
    old: Iterable[LiveValue], new: Iterable[LiveValue]
) -> Iterator[tuple[LiveValue | None, LiveValue | None]]:
    """The buffers of both reports in pairs; None beside those of only one report."""
    unpaired_old = _largest_first(old)
    unpaired_new = _largest_first(new)
    for key in _KEYS:
        by_key: dict[tuple[str, ...], deque[LiveValue]] = defaultdict(deque)
        for value in unpaired_old:
            by_key[key(value)].append(value)
        unmatched = []
        for value in unpaired_new:
            matches = by_key[key(value)] if key(value) else None
            if matches:
                yield matches.popleft(), value
            else:
                unmatched.append(value)
        unpaired_old = _largest_first(value for values in by_key.values() for value in values)
        unpaired_new = unmatched
    yield from ((value, None) for value in unpaired_old)
    yield from ((None, value) for value in unpaired_new)


def _largest_first(values: Iterable[LiveValue]) -> list[LiveValue]:
    return sorted(values, key=lambda value: -value.nbytes)


def _change(old: LiveValue | None, new: LiveValue | None) -> Change:
    value = new or old
    assert value is not None
    old_bytes = old.nbytes if old else 0
    new_bytes = new.nbytes if new else 0
    kind = "larger" if old_bytes < new_bytes else "smaller"
    if old is None:
        kind = "new"
    elif new is None:
        kind = "gone"
    return Change(
        kind=kind,
        name=value.name,
        source=value.source,
        old_shape=old.shape if old else "",
        new_shape=new.shape if new else "",
        old_bytes=old_bytes,
        new_bytes=new_bytes,
    )


def _figures(difference: Difference) -> Iterator[Table]:
    """The compared figures, and other entries of the reports that differ."""
    old = difference.old
    new = difference.new
    nbytes = (
        ("device peak", old.compiled_bytes, new.compiled_bytes),
        ("  between buffers", old.other_bytes, new.other_bytes),
        ("host peak", old.host_bytes, new.host_bytes),
    )
    rows = [
        (
            name,
            format_bytes(before),
            format_bytes(after),
            _signed(after - before) if after != before else "",
            _share(before, after),
        )
        for name, before, after in nbytes
        if before or after
    ]
    seconds = format_seconds(old.step_s), format_seconds(new.step_s)
    rows.append(("step, predicted", *seconds, "", _share(old.step_s, new.step_s)))
    yield Table(f"memplan: {new.device}", ("", ">before", ">now", ">more", ""), tuple(rows))
    old_entries = _entries(old)
    new_entries = _entries(new)
    entries = [
        (name, old_entries.get(name, ""), new_entries.get(name, ""))
        for name in old_entries | new_entries
    ]
    differences = tuple((name, before, after) for name, before, after in entries if before != after)
    yield Table("Other than before", ("", "before", "now"), differences)


def _entries(side: Side) -> dict[str, str]:
    return {
        "step": side.step,
        "device": side.device,
        "planner": side.planner,
        "device budget": format_bytes(side.budget_bytes),
        "runs at the peak": side.peak_kernel,
        **dict(side.versions),
    }


def _share(old: float | None, new: float | None) -> str:
    percent = _percent(old, new)
    return f"{percent:+.2f} %" if percent and math.isfinite(percent) else ""


def _signed(nbytes: int) -> str:
    return f"{'-' if nbytes < 0 else '+'}{format_bytes(abs(nbytes))}"


def _buffers(title: str, tone: str, changes: Sequence[Change], limit: int) -> Table:
    """One row for equal changes of one line, such as those of a network's layers."""
    by_line: dict[Any, list[Change]] = defaultdict(list)
    for change in changes:
        shapes = change.old_shape, change.new_shape
        by_line[change.kind, change.source, shapes, change.more_bytes].append(change)
    groups = sorted(by_line.values(), key=lambda group: -abs(_more_bytes(group)))
    rows = []
    for group in groups[:limit]:
        change = group[0]
        count = f"{len(group)} x " if len(group) > 1 else ""
        more_names = ", ..." if len({change.name for change in group}) > 1 else ""
        rows.append(
            (
                _signed(_more_bytes(group)),
                change.kind,
                count + _shapes(change),
                short_source(change.source),
                change.name + more_names,
            )
        )
    title = largest(f"{title}: {_signed(_more_bytes(changes))}", len(rows), len(groups))
    columns = (">more", "", "shape", "source", "buffer")
    return Table(title, columns, tuple(rows), (tone,) * len(rows))


def _more_bytes(changes: Sequence[Change]) -> int:
    return sum(change.more_bytes for change in changes)


def _shapes(change: Change) -> str:
    """`float32[2 -> 4,64]`."""
    shapes = list(dict.fromkeys(filter(None, (change.old_shape, change.new_shape))))
    dtypes = {shape.partition("[")[0] for shape in shapes}
    sides = [shape.rstrip("]").split(",") for shape in shapes]
    if len(dtypes) > 1 or len({len(side) for side in sides}) > 1:
        return " -> ".join(shapes)
    dims = [[side.rpartition("[")[2] for side in lengths] for lengths in zip(*sides, strict=True)]
    return f"{''.join(dtypes)}[{','.join(' -> '.join(dict.fromkeys(lengths)) for lengths in dims)}]"
