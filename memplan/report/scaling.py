"""Step time against the number of devices, simulated.

Its JSON is an object with the fields below, led by `"schema": "memplan.scaling/2"`; see `memplan.report.model`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from memplan.report.result import Record, Versions
from memplan.report.views.table import Table
from memplan.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class Point:
    """One number of devices.

    Attributes:
      shape: sizes of the axes, outermost first, as in `64x4`.
      devices: all of them.
      step_s: simulated seconds of a step: of the slowest device, for which the others wait.
      compute_s: of these, seconds of computation; collective_s: seconds that the links are busy, hidden_collective_s:
        of these, while something is computed.
      slowest: expected time of the slowest device for its own work, over the mean of all.
      efficiency: seconds alone over `step_s`, with the same batch: of the single-device step or of the divided program
        on one device, whichever is faster.
    """

    shape: str
    devices: int
    step_s: float
    compute_s: float
    collective_s: float
    hidden_collective_s: float
    slowest: float
    efficiency: float


@dataclass(frozen=True, slots=True)
class Count:
    """A collective over some axes, and how often it runs in a step."""

    name: str
    times: int


@dataclass(frozen=True, slots=True)
class Assumed:
    """A figure that the simulation takes for granted, by name (seconds, bytes or shares; see `Overheads`), and why."""

    name: str
    value: float
    why: str


@dataclass(frozen=True)
class Scaling(Record):
    """A step on more and more devices. Simulated: a roofline of the compiled program, a model of the links.

    Attributes:
      device: what each is; topology: the links, with their sources.
      compiled_shape: the number of devices for which XLA compiled the program whose schedule is replayed.
      device_bytes: of one device there, by the compiler.
      budget_bytes: that it was planned for; planner: who made the plan, `none` where it fits as it is.
      unexpected: collectives that the program has and the executable has not, or the other way, in words.
      single_s: seconds of the step on one device, with the same batch.
      collectives: of the compiled program.
      assumed: figures that can be replaced; assumptions: of the simulation, in words.
      points: by number of devices.
    """

    SCHEMA: ClassVar[str] = "memplan.scaling/2"

    device: str
    topology: str
    compiled_shape: str
    device_bytes: int
    budget_bytes: int
    planner: str
    unexpected: tuple[str, ...]
    single_s: float
    collectives: tuple[Count, ...]
    assumed: tuple[Assumed, ...]
    assumptions: tuple[str, ...]
    points: tuple[Point, ...]
    versions: Versions = ()

    @property
    def title(self) -> str:
        return f"memplan: simulated scaling, {self.topology}"

    def tables(self, rows: int) -> tuple[Table, ...]:
        """What was compiled, the points, what is assumed."""
        first = (
            ("device", self.device),
            ("links", self.topology),
            ("compiled for", f"{self.compiled_shape} devices, {format_bytes(self.device_bytes)} on each"),
            ("planner", f"{self.planner}, for {format_bytes(self.budget_bytes)}"),
            ("collectives in a step", ", ".join(f"{one.times} {one.name}" for one in self.collectives) or "none"),
            ("  not as written", "; ".join(self.unexpected) or "none"),
            ("one device", format_seconds(self.single_s)),
            ("versions", ", ".join(f"{name} {version}" for name, version in self.versions)),
        )
        columns = (">devices", ">shape", ">step", ">computation", ">collectives", ">hidden", ">slowest", ">efficiency")
        listed = tuple(
            (
                f"{one.devices:,}",
                one.shape,
                format_seconds(one.step_s),
                format_seconds(one.compute_s),
                format_seconds(one.collective_s),
                f"{one.hidden_collective_s / one.collective_s:.0%}" if one.collective_s else "",
                f"{one.slowest - 1:+.1%}",
                f"{one.efficiency:.1%}",
            )
            for one in self.points
        )
        figures = tuple((one.name, f"{one.value:.6g}", one.why) for one in self.assumed)
        assumed = (*figures, *(("", "", text) for text in self.assumptions))
        return (
            Table("memplan", ("", ""), first),
            Table("Simulated", columns, listed),
            Table("Assumed", ("", "", ""), assumed),
        )
