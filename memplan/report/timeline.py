"""Memory over one step, and the work of the device, as rows."""

from dataclasses import dataclass
from typing import Literal

Doing = Literal["compute", "recompute", "wait"]
Place = Literal["device", "host"]
Direction = Literal["to host", "to device", "to devices"]
BlockKind = Literal["loop", "slabs", "branches"]


@dataclass(frozen=True, slots=True)
class Instant:
    """A span of time on the compute stream. The next one starts where it ends."""

    # start_s, end_s: seconds since the step began
    start_s: float
    end_s: float
    device_bytes: int  # peak bytes in use on the device in this span
    other_bytes: int  # part of these without a value, such as scratch memory
    host_bytes: int  # in use on the host
    doing: Doing  # runs a kernel, recomputes one, or waits for a copy
    name: str  # of the operation; '' while waiting
    layer: str  # its layer by jax's name stack, for example `UNet3D/down_0/Conv_0`, or ''
    source: str  # `file:line`, or ''


@dataclass(frozen=True, slots=True)
class Value:
    """An array in memory."""

    name: str  # in the graph, or the compiler's
    nbytes: int  # bytes
    shape: str  # for example `float32[64,112,112]`, or ''
    # layer, source: of the operation that makes it, as in an instant
    layer: str
    source: str
    # `keep`, `offload` or `recompute`; `argument` and `output` for arrays that are always there; '' for those that
    # are not
    decision: str
    buffer: str = ""  # the compiler's name, as of a decision about it; '' where several are summed up


@dataclass(frozen=True, slots=True)
class Stay:
    """The value (an index) is in memory during the instants `[first, last)`."""

    value: int
    place: Place
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


@dataclass(frozen=True, slots=True)
class Block:
    """A loop or a conditional, as one span of the compute stream."""

    kind: BlockKind
    name: str  # its layer, or the compiler's name
    count: int | None  # trips of a loop, branches of a conditional; None if the compiler does not tell
    start_s: float
    end_s: float
    source: str  # `file:line`, or ''


@dataclass(frozen=True)
class Timeline:
    """One step of the chosen program.

    At every instant, `device_bytes` is the sum of the values that stay on the device and of `other_bytes`, and
    `host_bytes` is the sum of those that stay on the host.

    Raises:
      ValueError: a stay is of a value or of instants that do not exist.
    """

    origin: Literal["compiled"]  # the compiler's schedule and buffers, at the times of a roofline replay
    instants: tuple[Instant, ...]  # in order, without gaps
    # values, stays: which values are in memory, and when
    values: tuple[Value, ...]
    stays: tuple[Stay, ...]
    copies: tuple[Copy, ...]  # ordered by start
    notes: tuple[str, ...] = ()  # information that is not shown, as text
    blocks: tuple[Block, ...] = ()  # the outermost loops and conditionals, in order

    def __post_init__(self) -> None:
        for stay in self.stays:
            if not (0 <= stay.value < len(self.values) and 0 <= stay.first <= stay.last <= len(self.instants)):
                raise ValueError(f"{stay} is of no value or of no instants")

    @property
    def peak(self) -> int:
        """The instant at the device peak."""
        return max(range(len(self.instants)), key=lambda index: self.instants[index].device_bytes, default=0)

    @property
    def end_s(self) -> float:
        """The end of the last instant and the last copy."""
        return max([one.end_s for one in (*self.instants[-1:], *self.copies)], default=0.0)


@dataclass(frozen=True)
class Line:
    """Device memory of another program over its own step."""

    name: str  # of that program
    origin: Literal["compiled"]  # as of a timeline
    # starts_s, device_bytes: start of each span, and its bytes
    starts_s: tuple[float, ...]
    device_bytes: tuple[int, ...]
    end_s: float  # of the step
