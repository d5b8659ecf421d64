"""Timelines that add up, some of them hostile."""

import random
from itertools import accumulate

from hypothesis import strategies as st

from memplan.report.timeline import Copy, Instant, Line, Stay, Timeline, TimelineValue

DECISIONS = ("argument", "output", "keep", "offload", "recompute", "")
HOSTILE = "<script>alert(1)</script>"
NAMES = (HOSTILE, "</script>", "\"&'", "line\u2028separator", "conv:7", "état", "")


def random_timeline(draw: random.Random, instants: int = 0, values: int = 0) -> Timeline:
    """A random timeline: values add up to the curves, also at instants without duration."""
    count = instants or draw.randint(1, 12)
    rows = [_value(draw, number) for number in range(values or draw.randint(0, 9))]
    stays = [_stay(draw, rows, index, count) for index in range(len(rows))]
    times = [0.0]
    for _ in range(count):
        times.append(times[-1] + draw.choice([0.0, draw.random() * 1e-3, 1e-6]))
    device, host = (_sums(rows, stays, place, count) for place in ("device", "host"))
    other_bytes = [draw.choice([0, draw.randint(0, 2**20)]) for _ in range(count)]
    return Timeline(
        origin="compiled",
        instants=tuple(
            Instant(
                times[index],
                times[index + 1],
                device[index] + other_bytes[index],
                other_bytes[index],
                host[index],
                draw.choice(["compute", "recompute", "wait"]),
                draw.choice(NAMES),
                draw.choice(["Net/<b>", "Net/conv_0/Conv_0", ""]),
                draw.choice(["net.py:7", "</script>:1", ""]),
            )
            for index in range(count)
        ),
        values=tuple(rows),
        stays=tuple(stays),
        copies=tuple(_copy(draw, row, times[-1]) for row in rows[:4]),
        notes=("a <note>",),
    )


def _value(draw: random.Random, number: int) -> TimelineValue:
    name = f"{draw.choice(NAMES)}{number}"
    layer = draw.choice(["Net/<b>", f"Net/conv_{number % 20}/Conv_0", ""])
    return TimelineValue(
        name, draw.randint(0, 2**30), "float32[7]", layer, "net.py:7", draw.choice(DECISIONS)
    )


def _stay(draw: random.Random, rows: list[TimelineValue], index: int, count: int) -> Stay:
    if rows[index].decision in ("argument", "output"):
        return Stay(index, "device", 0, count)
    first = draw.randrange(count)
    return Stay(
        index, draw.choice(["device", "device", "host"]), first, draw.randint(first + 1, count)
    )


def _sums(rows: list[TimelineValue], stays: list[Stay], place: str, count: int) -> list[int]:
    """Bytes of the values in a memory, at every instant."""
    changes = [0] * (count + 1)
    for stay in stays:
        if stay.place == place:
            changes[stay.first] += rows[stay.value].nbytes
            changes[stay.last] -= rows[stay.value].nbytes
    return list(accumulate(changes))


def _copy(draw: random.Random, row: TimelineValue, end_s: float) -> Copy:
    start = draw.random() * end_s
    direction = draw.choice(["to host", "to device"])
    return Copy(row.name, row.nbytes, direction, start, start + draw.random() * 1e-4)


def lines_of(timeline: Timeline) -> tuple[Line, ...]:
    end = timeline.end_s
    return (Line("unmodified step", "compiled", (0.0, end / 2), (2**28, 2**29), end),)


TIMELINES = st.randoms(use_true_random=False).map(random_timeline)
