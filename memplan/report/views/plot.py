"""Pictures, by matplotlib (the extra `plots`)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_WIDE, _HIGH, _DOTS = 8.0, 5.0, 150  # inches, and dots per inch


@dataclass(frozen=True)
class Series:
    """Points (x, y) under one name; joined by a line or not."""

    name: str
    points: Sequence[tuple[float, float]]
    is_joined: bool


def png(title: str, axes: tuple[str, str], series: Sequence[Series], limit: tuple[str, float]) -> bytes:
    """The picture of some series, with a named vertical line.

    Raises:
      ImportError: matplotlib is not installed.
    """
    picture = figure(_WIDE, _HIGH)
    axis = picture.add_subplot(xlabel=axes[0], ylabel=axes[1], title=title)
    axis.axvline(limit[1], color="0.6", linestyle=":", label=limit[0])
    for one in series:
        axis.plot(*zip(*one.points, strict=True), marker="o", linestyle="-" if one.is_joined else "", label=one.name)
    axis.legend(fontsize="small")
    return encode(picture)


def figure(wide: float, high: float) -> Any:
    """An empty figure of so many inches; raises ImportError where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'memplan[plots]'.") from error
    empty = Figure((wide, high), layout="constrained")
    FigureCanvasAgg(empty)
    return empty


def encode(figure: Any) -> bytes:
    """The figure as PNG."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=_DOTS)
    return picture.getvalue()
