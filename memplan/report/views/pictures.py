"""Pictures by matplotlib (the extra `plots`): memory by layer, with streams below; curves.

All functions raise ImportError if matplotlib is not installed.
"""

import io
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from memplan.report.timeline import Copy, Instant, Line, Timeline

_WIDTH = 8.0  # inches
_HEIGHT = 5.0  # inches
_DPI = 150
_DEPTH = 2  # parts of a layer's name
_MAX_LAYERS = 7  # with a colour of their own
_COLORS = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#f0e442",
)  # Okabe and Ito
_ALWAYS = "arguments and outputs"
_OTHERS = "other layers"
_SCRATCH = "scratch"
_GREYS = {_ALWAYS: "#8b95a1", _OTHERS: "#c3c9d1", _SCRATCH: "#5d6772"}
_ORIGIN = "compiler's schedule"
_MIB = 2**20
_MS = 1e3


@dataclass(frozen=True)
class Series:
    """Named points (x, y)."""

    name: str
    points: Sequence[tuple[float, float]]
    is_joined: bool  # joined by a line


def png_of_series(
    title: str, axes: tuple[str, str], series: Sequence[Series], limit: tuple[str, float]
) -> bytes:
    """Some series, with a named vertical line."""
    picture = figure()
    axis = picture.add_subplot(xlabel=axes[0], ylabel=axes[1], title=title)
    axis.axvline(limit[1], color="0.6", linestyle=":", label=limit[0])
    for curve in series:
        style = "-" if curve.is_joined else ""
        axis.plot(*zip(*curve.points, strict=True), marker="o", linestyle=style, label=curve.name)
    axis.legend(fontsize="small")
    return encode(picture)


def png_of_memory(
    title: str, timeline: Timeline, lines: Sequence[Line], limits: Sequence[tuple[str, int | None]]
) -> bytes:
    """Memory over a step, and its streams; layers differ in their first two parts."""
    picture = figure()
    memory, streams = picture.subplots(2, sharex=True, height_ratios=(5, 1))
    edges = [_MS * instant.start_s for instant in timeline.instants]
    edges.append(_MS * timeline.instants[-1].end_s)
    below = [0.0] * len(edges)
    for name, color, counts in bands(timeline):
        top = [low + count / _MIB for low, count in zip(below, [*counts, counts[-1]], strict=True)]
        memory.fill_between(edges, below, top, step="post", color=color, label=name, linewidth=0)
        below = top
    memory.step(edges, below, where="post", color="black", linewidth=0.8)
    for line, dash in zip(lines, ("--", ":"), strict=False):
        ends = [_MS * end for end in (*line.starts_s, line.end_s)]
        counts = [count / _MIB for count in (*line.device_bytes, line.device_bytes[-1])]
        memory.step(
            ends,
            counts,
            where="post",
            color="0.3",
            linestyle=dash,
            label=f"{line.name} ({_ORIGIN})",
        )
    for (name, nbytes), dash in zip(limits, ("-", ":"), strict=False):
        if nbytes is not None:
            memory.axhline(nbytes / _MIB, color="#c4372b", linestyle=dash, linewidth=1, label=name)
    memory.set(ylabel="device memory (MiB)", title=f"{title}, {_ORIGIN}", ylim=(0, None))
    memory.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)
    _draw_streams(streams, timeline)
    return encode(picture)


def figure() -> Any:
    """An empty figure."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'memplan[plots]'.") from error
    empty = Figure((_WIDTH, _HEIGHT), layout="constrained")
    FigureCanvasAgg(empty)
    return empty


def encode(figure: Any) -> bytes:
    """The figure as PNG."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=_DPI)
    return picture.getvalue()


def bands(timeline: Timeline) -> list[tuple[str, str, Sequence[int]]]:
    """Name, color and bytes per instant of each band, bottom first; their sum is device memory."""
    changes: dict[str, list[int]] = defaultdict(lambda: [0] * (len(timeline.instants) + 1))
    weights: dict[str, float] = defaultdict(float)
    for stay in sorted(timeline.stays, key=lambda stay: stay.first):
        value = timeline.values[stay.value]
        always = value.decision in ("argument", "output")
        layer = "/".join((value.layer or value.source).split("/")[:_DEPTH]) or "no layer"
        name = _ALWAYS if always else layer
        if stay.place == "device":
            changes[name][stay.first] += value.nbytes
            changes[name][stay.last] -= value.nbytes
            first = timeline.instants[stay.first]
            last = timeline.instants[stay.last - 1]
            weights[name] += value.nbytes * (last.end_s - first.start_s)
    by_weight = sorted(changes.keys() - {_ALWAYS}, key=lambda name: (-weights[name], name))
    layers = [name for name in changes if name in by_weight[:_MAX_LAYERS]]
    colors = {**dict(zip(layers, _COLORS, strict=False)), **_GREYS}
    totals = {name: [0] * len(timeline.instants) for name in (_ALWAYS, *layers, _OTHERS)}
    for name, change in changes.items():
        band = totals[name if name in colors else _OTHERS]
        for index, nbytes in enumerate(accumulate(change[:-1])):
            band[index] += nbytes
    totals[_SCRATCH] = [instant.other_bytes for instant in timeline.instants]
    return [(name, colors[name], counts) for name, counts in totals.items() if any(counts)]


def _draw_streams(axes: Any, timeline: Timeline) -> None:
    """Kernels, waits, and copies in each direction."""
    kinds = {"compute": "#8b95a1", "recompute": "#009e73", "wait": "#c4372b"}
    for doing, color in kinds.items():
        spans = _spans([instant for instant in timeline.instants if instant.doing == doing])
        axes.broken_barh(spans, (2.1, 0.8), color=color, linewidth=0)
    names = ("to device", "to host", "compute")
    for row, direction in enumerate(names[:2]):
        spans = _spans([copy for copy in timeline.copies if copy.direction == direction])
        axes.broken_barh(spans, (row + 0.1, 0.8), color=("#56b4e9", "#e69f00")[row], linewidth=0)
    axes.set(xlabel="time (ms)", yticks=[0.5, 1.5, 2.5], yticklabels=names)
    axes.set(xlim=(0, _MS * timeline.end_s), ylim=(0, 3))


def _spans(events: Sequence[Instant | Copy]) -> list[tuple[float, float]]:
    """Start and duration of each, in milliseconds."""
    return [(_MS * event.start_s, _MS * (event.end_s - event.start_s)) for event in events]
