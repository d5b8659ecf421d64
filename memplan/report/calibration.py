"""What was measured of the local device.

Its JSON is an object with the fields below, led by `"schema": "memplan.calibration/1"`; see `memplan.report.model`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from memplan.report.document import Pairs
from memplan.report.result import Told
from memplan.report.views.table import UNKNOWN, Sheet, flops, seconds


@dataclass(frozen=True, slots=True)
class Rate:
    """One rate, or one latency.

    Attributes:
      name: of what.
      unit: `FLOP/s`, `bytes/s` or `s`; of the next two.
      measured: the best of several runs.
      assumed: where nothing is measured; None if plans take no such figure.
      spread: how much longer the median run took than the best, as a share.
      size: of what was run.
      note: how it was measured.
    """

    name: str
    unit: str
    measured: float
    assumed: float | None
    spread: float
    size: str
    note: str


@dataclass(frozen=True)
class Calibration(Told):
    """A device as measured.

    Attributes:
      device: the name of the specification.
      hardware: for people.
      date: ISO 8601, UTC.
      load: processes that competed for the processor, before and after.
      rates: what was measured.
      versions: ((package, version), ...).
    """

    SCHEMA: ClassVar[str] = "memplan.calibration/1"

    device: str
    hardware: str
    date: str
    load: tuple[float, ...]
    rates: tuple[Rate, ...]
    versions: Pairs

    @property
    def title(self) -> str:
        return "memplan calibrate"

    def sheets(self, rows: int) -> tuple[Sheet, ...]:
        """All rates, whatever `rows` says, and the conditions."""
        listed = tuple(
            (
                rate.name,
                _figure(rate.measured, rate.unit),
                _figure(rate.assumed, rate.unit) if rate.assumed is not None else "-",
                f"{100 * rate.spread:.0f} %",
                rate.size,
                rate.note,
            )
            for rate in self.rates
        )
        columns = ("", ">best", ">assumed", ">median over best", ">size", "how")
        conditions = (
            ("measured on", f"{self.hardware}, {self.date}"),
            ("load before and after", ", ".join(f"{share:.1f}" for share in self.load) or UNKNOWN),
            ("versions", ", ".join(f"{name} {version}" for name, version in self.versions)),
        )
        return Sheet(self.device, columns, listed), Sheet("", ("", ""), conditions)


def _figure(value: float, unit: str) -> str:
    if unit == "s":
        return seconds(value)
    return f"{flops(value)}/s" if unit == "FLOP/s" else f"{value / 1e9:,.1f} GB/s"
