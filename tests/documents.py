"""Documents that a stranger may send: valid ones of every kind, and what may have happened to them."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from memplan.hardware import catalog, measured, topology
from memplan.hardware.measured import MeasuredDevice
from memplan.planning.loops import Residuals
from memplan.planning.plan import Plan
from memplan.planning.problem import Pin, Where
from memplan.planning.schedule import Kind
from memplan.planning.slabs.slabs import Slabs
from memplan.planning.transforms import IndexedStacks, LessWorkspace, LoopResiduals, StateOnHost
from memplan.report.comparison import Comparison, Row
from memplan.report.curve import MEMPLAN, Curve, Point
from memplan.report.diagnosis import Diagnosis, Finding
from memplan.report.difference import Difference
from memplan.report.frontier import Frontier, Trial
from memplan.report.mesh import CollectiveRow, Link, Mesh
from memplan.report.model import CandidateRow, Decision, LiveValue, Pinned, Report
from memplan.report.result import Record
from memplan.report.slabs import SlabArray, SlabLoopRow, Unsplit
from tests.report.timelines import lines_of, random_timeline

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # which a terminal obeys
VERSIONS = (("jax", "0.12.0"), ("python", "3.12.1"))


@dataclass(frozen=True)
class Form:
    """A kind of document: a valid one, how it is read, and what is then done with it."""

    text: str = field(repr=False)
    load: Callable[[Path], Any]
    use: Callable[[Any], Any]


def _report() -> Report:
    timeline = random_timeline(random.Random(3), 4, 3)
    array = SlabArray("x", (512, 4), "float32", 8192, "host")
    return Report(
        *(
            "v100",
            "cpu",
            "fits",
            "kernels",
            2**31,
            2**36,
            2**32,
            2**30,
            2**30,
            None,
            2**29,
            2**29,
            1e12,
            0.2,
            0.25,
        ),
        *(2**20, 0.1, 2),
        decisions=(Decision("conv:1", (64, 8), "float32", 2048, "net.py:3", "offload", 1e-3),),
        live_at_peak=(LiveValue("state['w']", 36, "f32[3,3]", "train.py:7", ""),),
        candidates=(CandidateRow("kernels", 2**30, None, 0.25, "chosen"),),
        versions=VERSIONS,
        copy_s=0.1,
        timeline=timeline,
        lines=lines_of(timeline),
        slab_loops=(
            SlabLoopRow(1, "dimension 0", 16, 32, 1, 2, (array,), (), 1, 1e-3, "net.py:7"),
        ),
        unsplit=(Unsplit("sort", 3, ""),),
        mesh=Mesh(
            (("data", 8),),
            "2x4",
            (Link("host", 2, 1e10, True),),
            (CollectiveRow("all-reduce", ("data",), 3, 12, 30, 1e-3),),
            1e-3,
            5e-4,
        ),
        pins=(Pinned("name", "host", 1, 64),),
        checkpoints=("net.py:9",),
        findings=(Finding("donate", "donate argument 0", 7, None, 53, "compiled", position=0),),
    )


TRANSFORMS = (
    IndexedStacks(),
    LoopResiduals((Residuals((1,), (2,)), None)),
    Slabs(3, 0, 16, frozenset({1, 2}), frozenset({4}), frozenset(), frozenset({(4, 1)})),
    StateOnHost((0,)),
    LessWorkspace(),
)
PLAN = Plan(
    ((Kind.RUN, "fusion.3"), (Kind.OFFLOAD, "fusion.3{1}")),
    *("f00d", "kernels", "v100", TRANSFORMS, 2**20, ("dot.4",)),
    kernels=(("dot.4", "gemm"),),
    overlapped=(2**20, "in turn"),
    pins=(Pin("name", Where.HOST),),
)


def _show(record: Any) -> None:
    """What people do with a result; it comes back as it is."""
    assert type(record).from_json(record.to_json()) == record
    assert not CONTROLS.search(str(record))
    record.to_html()
    record._repr_html_()
    if isinstance(record, Report) and record.compiled_peak_bytes is not None:
        _show_difference(Difference.of(record, replace(record, live_at_peak=())))


def _show_difference(difference: Difference) -> None:
    assert not CONTROLS.search(str(difference))
    difference.to_json()
    difference.to_html()


def _records() -> Iterator[Record]:
    yield _report()
    yield Comparison((Row("memplan", 2, 3, 0.1, True, "note"),), "v100", 3, versions=VERSIONS)
    yield Curve(
        (Point(MEMPLAN, 8, 7, 1, 0.1), Point("plain", None, None, None, None)),
        "v100",
        9,
        0.1,
        3,
        VERSIONS,
    )
    yield Frontier("rows", 8, 16, (Trial(8, True, 6, 0, "k", 1, "dot", 2), Trial(16, False, 9, 0, "k", 9, "dot", 2)),
                   "v100", 8, 4, VERSIONS)  # fmt: skip
    yield Diagnosis(
        "v100", 9, 10, 0.1, (Finding("donate", "donate 0", 7, None, 5, "compiled"),), 2, VERSIONS
    )


def forms(folder: Path) -> Mapping[str, Form]:
    """By name; `folder` is for files."""
    by_name = {
        type(record).__name__: Form(record.to_json(), type(record).load_json, _show)
        for record in _records()
    }
    device = MeasuredDevice(catalog.named("h200"), "gpu", "NVIDIA H200")
    device.save(folder / "device.json")
    written = (folder / "device.json").read_text()
    by_name["MeasuredDevice"] = Form(
        written, measured.load, lambda record: record.save(folder / "again.json")
    )
    by_name["Topology"] = Form(
        topology.TOPOLOGIES["ddl"].to_json(), topology.load, lambda record: record.to_json()
    )
    by_name["Plan"] = Form(
        PLAN.to_json(), Plan.load, lambda record: Plan.from_json(record.to_json())
    )
    return by_name


def _deep(levels: int) -> Any:
    nested: Any = []
    for _ in range(levels):
        nested = [nested]
    return nested


OTHERS = st.one_of(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=4),
    st.sampled_from([2**31, 2**63 - 1, 2**63, -(2**70), 10**400, 1e308, 5e-324, -0.0, math.nan, math.inf, -math.inf]),
    st.sampled_from(["\x1b[31mred", "\x00", "\ud800", "<script>", "\u2028", "x" * 10_000, "../../etc/passwd"]),
    st.sampled_from([[], {}, [[]], {"": {}}, [None] * 2000, _deep(300)]),
    st.recursive(st.none() | st.integers() | st.floats() | st.text(max_size=3),
                 lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)),
)  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, text: str) -> bytes:
    """A valid document in which entries were dropped, doubled, renamed or replaced, and whose bytes may be spoiled."""
    document = json.loads(text)
    for _ in range(draw(st.integers(1, 3))):
        parent, key = draw(st.sampled_from(list(_places(document))))
        change = draw(st.sampled_from(["drop", "replace", "replace", "double", "rename"]))
        if change == "replace":
            parent[key] = deepcopy(draw(OTHERS))  # which later changes may change
        elif change == "double" and isinstance(parent, list):
            parent.insert(key, parent[key])
        elif change == "rename" and isinstance(parent, dict):
            parent[draw(st.text(max_size=4))] = parent.pop(key)
        else:
            del parent[key]
        if not document:
            break
    written = json.dumps(document)
    if draw(st.booleans()):
        return written.encode()
    place = draw(st.integers(0, len(written)))
    match draw(st.sampled_from(["cut", "put", "again", "binary", "utf-16", "mark"])):
        case "cut":
            written = written[:place]
        case "put":
            written = written[:place] + draw(st.text(max_size=3)) + written[place:]
        case "again":  # two entries of one name
            written = written.replace("{", '{"format": 1, "schema": 2, "name": 3,', 1)
        case "binary":
            return written[:place].encode() + draw(st.binary(max_size=9)) + written[place:].encode()
        case "utf-16":
            return written.encode("utf-16")
        case "mark":
            return b"\xef\xbb\xbf" + written.encode()
    return written.encode("utf-8", "surrogatepass")


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each entry as (what has it, its name or number)."""
    for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(entry, (dict, list)):
            yield from _places(entry)


ANYTHING = st.one_of(st.binary(max_size=60), OTHERS.map(lambda value: json.dumps(value).encode()), st.sampled_from(
    [b"", b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5000, b'{"format": ' + b"9" * 4000 + b"}", b"null", b"\xff\xfe",
     b'{"format": 1}', b'{"format": true}', b'{"schema": "memplan.report/1"}', b'{"schema": ["memplan.report/1"]}']
))  # fmt: skip
