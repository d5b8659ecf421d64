"""Files of measured devices and of topologies come back, or are refused with what is wrong."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memplan.errors import MemplanError, TopologyError, UnknownDeviceError
from memplan.hardware import catalog, measured, topology
from memplan.hardware.measured import MeasuredDevice
from memplan.hardware.topology import TOPOLOGIES, topology_named
from tests.hardware.documents import edited
from tests.hardware.test_topology import THREE

CPU = MeasuredDevice(catalog.local_cpu(4, 8 * 2**30), "cpu", "cpu")
GPU = MeasuredDevice(replace(catalog.named("h200"), kernels={"0f": 1e-6}), "gpu", "NVIDIA H200")
DEVICE = measured.load, UnknownDeviceError, "is not a complete device file.*memplan calibrate --out"
TOPOLOGY = topology.load, TopologyError, "not a complete.*save the topology again"
KINDS = pytest.mark.parametrize(
    ("load", "error", "said"), [DEVICE, TOPOLOGY], ids=["device", "topology"]
)


@pytest.mark.parametrize("saved", [CPU, GPU, *TOPOLOGIES.values(), THREE])
def test_saved_and_loaded_it_is_the_same(saved: Any, tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    saved.save(path)
    loaded = measured.load(path) if isinstance(saved, MeasuredDevice) else topology_named(str(path))
    assert loaded == saved
    if isinstance(loaded, MeasuredDevice):
        assert (
            hash(loaded.device) == hash(saved.device) and loaded.device.flops == saved.device.flops
        )
    else:
        assert hash(loaded) == hash(saved)
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved.json"]


@KINDS
def test_a_file_that_is_none_is_refused(load: Any, error: Any, said: str, tmp_path: Path) -> None:
    """Truncated anywhere, of another kind, or with bytes that are no text."""
    path = tmp_path / "saved.json"
    (CPU if load is measured.load else THREE).save(path)
    whole = path.read_bytes()
    cuts = [whole[:length] for length in range(0, len(whole) - 1, 41)]
    for written in (*cuts, b"[]", b"3", b"null", b"[" * 100_000, b"\xff\xfe\x00"):
        path.write_bytes(written)
        with pytest.raises(error, match=rf"saved\.json.*{said}"):
            load(path)


@KINDS
def test_what_cannot_be_read_is_said(load: Any, error: Any, said: str, tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(error, match="cannot be read"):
            load(path)


DAMAGED_DEVICES = [
    ("format", 1, "its format is 1"),
    ("memory_bandwidth", None, "no entry 'memory_bandwidth'"),
    ("link.latency_s", None, "no entry 'link.latency_s'"),
    ("target", [1], "its 'target'"),
    ("platform", None, "its 'platform' is None, not text"),
    ("device_kind", 3, "its 'device_kind' is 3, not text"),
    ("name", 5, "its 'name' is 5, not text"),
    ("memory_bytes", 1.5, "its 'memory_bytes' is 1.5, not a whole number"),
    ("memory_bytes", True, "its 'memory_bytes'"),
    ("memory_bandwidth", "fast", "its 'memory_bandwidth' is 'fast', not a number"),
    ("memory_bandwidth", 0, "which is not possible"),
    ("vector_flops", float("nan"), "its 'vector_flops' is nan"),
    ("vector_flops", float("inf"), "its 'vector_flops' is inf"),
    ("vector_flops", 10**400, "calibrate"),
    ("flops", {}, "no entry 'float32'"),
    ("flops.float32", -1.0, "its 'flops.float32' is -1.0"),
    ("kernels", None, "no entry 'kernels'"),
    ("kernels", {"0f": 0}, "its 'kernels.0f' is 0"),
    ("kernels", {"0f": "1"}, "its 'kernels.0f' is '1', not a number"),
]
DAMAGED_TOPOLOGIES = [
    ("format", 7, "its format is 7"),
    ("format", [1], r"its format is \[1\]"),
    ("axes", None, "no entry 'axes'"),
    ("axes", {}, "its 'axes' is"),
    ("axes", [], "no axes"),
    ("axes", [3], r"its 'axes\[0\]' is 3"),
    ("axes.1.size", None, r"no entry 'axes\[1\]\.size'"),
    ("axes.1.speed", 3, r"unknown entry 'axes\[1\]\.speed'"),
    ("axes.1.size", 1.5, r"its 'axes\[1\]\.size' is 1\.5, not a whole number"),
    ("axes.1.name", "rack", "several axes 'rack'"),
    ("axes.1.bandwidth", float("nan"), r"its 'axes\[1\]\.bandwidth' is nan"),
    ("axes.1.bandwidth", 10**400, r"its 'axes\[1\]\.bandwidth' is 1000"),
    ("axes.1.latency_s", "1", r"its 'axes\[1\]\.latency_s' is '1', not a number"),
    ("axes.1.shared", "yes", r"its 'axes\[1\]\.shared' is 'yes', not true or false"),
    ("colour", "red", "unknown entry 'colour'"),
    ("name", 5, "its 'name' is 5, not text"),
    ("sources", "x", "its 'sources' is 'x', not a list"),
    ("sources", [1], r"its 'sources\[0\]' is 1, not text"),
]


@pytest.mark.parametrize(
    ("load", "where", "value", "message"),
    [
        *((measured.load, *damage) for damage in DAMAGED_DEVICES),
        *((topology.load, *damage) for damage in DAMAGED_TOPOLOGIES),
    ],
)
def test_a_damaged_file_is_refused_and_says_where(
    load: Any, where: str, value: Any, message: str, tmp_path: Path
) -> None:
    path, of_device = tmp_path / "saved.json", load is measured.load
    (CPU if of_device else THREE).save(path)
    path.write_text(edited(path.read_text(), where, value))
    with pytest.raises(UnknownDeviceError if of_device else TopologyError, match=message) as caught:
        load(path)
    advice = "memplan calibrate --out" if of_device else "save the topology again"
    assert advice in str(caught.value) and "saved.json" in str(caught.value)


NAMES = {"device": (catalog.named, UnknownDeviceError), "topology": (topology_named, TopologyError)}


@pytest.mark.parametrize(
    ("kind", "wrong", "close"),
    [
        ("device", "h20", "h200"),
        ("device", "4090", "rtx4090"),
        ("device", "gh100", "h100"),
        ("device", "v100@pcie3", "pcie3x16"),
        ("device", "V100@nvlink", "nvlink-c2c"),
        ("topology", "dll", "ddl"),
        ("topology", "tody@2x2", "today"),
        ("topology", "locale", "local"),
    ],
)
def test_an_unknown_name_says_what_comes_close(kind: str, wrong: str, close: str) -> None:
    named, error = NAMES[kind]
    with pytest.raises(error) as caught:
        named(wrong)
    message = str(caught.value)
    assert close in message[message.index("Did you mean") : message.index("Known")]
    devices = catalog.LINKS if "@" in wrong else catalog.names()
    names = devices if kind == "device" else TOPOLOGIES
    assert all(name in message[message.index("Known") :] for name in names)
    assert isinstance(caught.value, MemplanError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        *(
            ("device", wrong)
            for wrong in ("", "@", "@pcie3x16", "v100@", "v100@pcie3x16@pcie4x16", "zzzzzz")
        ),
        *(("topology", wrong) for wrong in ("", "@", "@4x4", "zzzzzz")),
    ],
)
def test_malformed_names_are_unknown(kind: str, wrong: str) -> None:
    named, error = NAMES[kind]
    with pytest.raises(error, match="Known: "):
        named(wrong)
