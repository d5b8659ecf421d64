"""Memory over one step, and the device's work, as rows."""

from dataclasses import dataclass
from typing import Literal

Doing = Literal["compute", "recompute", "wait"]
MemoryKind = Literal["device", "host"]
Direction = Literal["to host", "to device", "to devices"]
BlockKind = Literal["loop", "slabs", "branches"]


@dataclass(frozen=True, slots=True)
class Instant:
    """A span of time on the compute stream. The next one starts where it ends."""

    start_s: float  # since the start of the step
    end_s: float
    device_bytes: int  # in use on the device, at the peak of this span
    other_bytes: int  # the part of these that belongs to no value, such as scratch memory
    host_bytes: int  # in use on the host
    doing: Doing  # runs a kernel, recomputes one, or waits for a copy
    name: str  # of the operation; '' while waiting
    layer: str  # its layer by jax's name stack, for example `UNet3D/down_0/Conv_0`, or ''
    source: str  # `file:line`, or ''


@dataclass(frozen=True, slots=True)
class TimelineValue:
    """An array in memory."""

    name: str  # in the graph, or the compiler's
    nbytes: int
    shape: str  # for example `float32[64,112,112]`, or ''
    layer: str  # of the operation that computes it, as in an instant
    source: str  # likewise
    # `keep`, `offload` or `recompute`; `argument` or `output` if it is always alive; else ''.
    decision: str
    buffer: str = ""  # the compiler's name, as in decisions; '' for a sum of several buffers


@dataclass(frozen=True, slots=True)
class Stay:
    """A value is in memory during the instants `[first, last)`."""

    value: int  # index
    place: MemoryKind
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Copy:
    """A transfer on the stream of its direction."""

    name: str
    nbytes: int
    direction: Direction
    start_s: float
    end_s: float
    kind: str = ""  # HLO's opcode of a collective; '' for copies to and from the host
    over: tuple[str, ...] = ()  # names of the links that a collective crosses, outermost first
    source: str = ""  # `file:line`, or ''


@dataclass(frozen=True, slots=True)
class Block:
    """A loop or a conditional, as one span of the compute stream."""

    kind: BlockKind
    name: str  # its layer, or the compiler's name
    count: int | None  # trips of a loop, branches of a conditional; None if unknown
    start_s: float
    end_s: float
    source: str  # `file:line`, or ''


@dataclass(frozen=True)
class Timeline:
    """One step of the chosen program.

    At every instant, `device_bytes` is the sum of the values that are on the device and of
    `other_bytes`, and `host_bytes` is the sum of the values on the host.

    Raises:
      ValueError: a stay refers to a value or to instants that do not exist.
    """

    origin: Literal["compiled"]  # the compiler's schedule and buffers, timed by the replay
    instants: tuple[Instant, ...]  # in order, without gaps
    values: tuple[TimelineValue, ...]
    stays: tuple[Stay, ...]  # when the values are in memory
    copies: tuple[Copy, ...]  # ordered by start
    notes: tuple[str, ...] = ()  # what the timeline does not show, as text
    blocks: tuple[Block, ...] = ()  # the outermost loops and conditionals, in order

    def __post_init__(self) -> None:
        for stay in self.stays:
            has_value = 0 <= stay.value < len(self.values)
            has_instants = 0 <= stay.first <= stay.last <= len(self.instants)
            if not has_value or not has_instants:
                raise ValueError(f"{stay} is of no value or of no instants")

    @property
    def peak(self) -> int:
        """The instant at the device peak."""
        indices = range(len(self.instants))
        return max(indices, key=lambda index: self.instants[index].device_bytes, default=0)

    @property
    def end_s(self) -> float:
        """The end of the last instant and the last copy."""
        return max([span.end_s for span in (*self.instants[-1:], *self.copies)], default=0.0)


@dataclass(frozen=True)
class Line:
    """Device memory of another program over its own step."""

    name: str  # of that program
    origin: Literal["compiled"]  # as in a timeline
    starts_s: tuple[float, ...]  # of each span
    device_bytes: tuple[int, ...]  # in each span
    end_s: float  # of the step
