"""A device on which every figure can be added up by hand."""

from memplan.hardware.device import Device, HostLink

UNIT = Device(
    name="unit",
    description="a second per byte, a second per FLOP",
    memory_bytes=10**6,
    memory_bandwidth=1.0,
    flops={"float32": 1.0},
    vector_flops=1.0,
    link=HostLink("unit-link", bandwidth=1.0, latency_s=0.0, source="made up"),
    sources=("made up",),
    target=None,
)
