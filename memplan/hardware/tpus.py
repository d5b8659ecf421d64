"""Google's TPUs, for the catalog: one of jax's devices each, a chip or, of TPU7x, half of one."""

from memplan.hardware.device import Device, HostLink, TpuTarget
from memplan.hardware.efficiency import Efficiency, Shares

_DOCUMENTS = "https://docs.cloud.google.com/tpu/docs"
_XLA = "XLA:TPU's own limit of a described chip (libtpu 0.0.52, error E1000)"
_HEAPS = "XLA:TPU's buffer assignments of two steps (libtpu 0.0.50)"

# Assumed, as no TPU was measured: the shares of an H200's tensor cores for products, and less for
# convolutions; a systolic array of 128 or 256 columns is not full of fewer channels.
_MATRIX_UNITS = Shares(
    products=0.75,
    convolutions=0.55,
    filter_gradients=0.55,
    wide=128,
    convolution_exponent=0.5,
    filter_exponent=0.5,
    narrowest=4,
    unaligned=1.0,
)
_ASSUMED = Efficiency(
    kernel_s=1.5e-6,
    memory=0.80,
    matrix_units=_MATRIX_UNITS,
    cores=_MATRIX_UNITS,
    volume_copies=0.0,
    source="Assumed: no kernel ran on a TPU.",
)


def _link(name: str, bandwidth: float, source: str) -> HostLink:
    return HostLink(name, bandwidth, 1e-5, f"{source}; 0.8 of it and the latency are assumed.")


_PCIE3 = _link("tpu-pcie3x16", 0.8 * 15.75e9, "PCIe 3 x16 (second-hand; Google prints none)")
_PCIE5 = _link("tpu-pcie5x16", 0.8 * 63.0e9, f"PCIe 5 ({_DOCUMENTS}/v6e), 16 lanes assumed")


def _tpu(
    name: str,
    description: str,
    target: TpuTarget,
    link: HostLink,
    *,
    memory_gib: float,
    memory_bandwidth: float,
    bfloat16: float,
    int8: float,
) -> Device:
    """A TPU.

    Args:
      memory_gib: what XLA lets a program take of the memory.
      bfloat16: peak FLOP/s; by default, XLA multiplies float32 in one pass of bfloat16.
      int8: peak operations/s.
    """
    # Eight sublanes of 128 lanes with four units each, for a core of 1.5 GHz, as second-hand.
    vector_flops = target.cores * 8 * 128 * 4 * 1.5e9
    return Device(
        name=name,
        description=description,
        memory_bytes=int(memory_gib * 2**30),
        memory_bandwidth=memory_bandwidth,
        flops={
            "bfloat16": bfloat16,
            "float16": bfloat16,
            "float32": bfloat16,
            "int8": int8,
            "float64": vector_flops / 16,
        },
        vector_flops=vector_flops,
        link=link,
        sources=(f"{_DOCUMENTS}/{name}: FLOP/s, bandwidth", f"{_XLA}: memory", f"{_HEAPS}: VMEM"),
        target=target,
        efficiency=_ASSUMED,
    )


_MEGACORE = (("chip_config_name", "megacore"),)

TPUS = (
    _tpu(
        "v4",
        "Google TPU v4, 32 GB HBM2, both cores as one device",
        TpuTarget("v4:2x2x1", "TPU v4", 2, 126 * 2**20, _MEGACORE),
        _PCIE3,
        memory_gib=30.75,
        memory_bandwidth=1.2e12,
        bfloat16=275e12,
        int8=275e12,
    ),
    _tpu(
        "v5e",
        "Google TPU v5e, 16 GB HBM2",
        TpuTarget("v5e:2x2", "TPU v5 lite", 1, 112 * 2**20),
        _PCIE3,
        memory_gib=15.75,
        memory_bandwidth=819e9,
        bfloat16=197e12,
        int8=393e12,
    ),
    _tpu(
        "v5p",
        "Google TPU v5p, 95 GB HBM2e, both cores as one device",
        TpuTarget("v5p:2x2x1", "TPU v5", 2, 0),
        _PCIE3,
        memory_gib=95.73,
        memory_bandwidth=2.765e12,
        bfloat16=459e12,
        int8=918e12,
    ),
    _tpu(
        "v6e",
        "Google TPU v6e (Trillium), 32 GB HBM",
        TpuTarget("v6e:2x2", "TPU v6 lite", 1, 96 * 2**20),
        _PCIE5,
        memory_gib=31.24,
        memory_bandwidth=1.638e12,
        bfloat16=918e12,
        int8=1836e12,
    ),
    _tpu(
        "tpu7x",
        "Google TPU7x (Ironwood), one of the two devices of a chip, 96 of its 192 GiB HBM3e",
        TpuTarget("tpu7x:2x2x1", "TPU7x", 1, 63 * 2**20),
        _PCIE5,
        memory_gib=94.74,
        memory_bandwidth=3.69e12,
        bfloat16=1153.5e12,
        int8=1153.5e12,
    ),
)
"""The TPUs that the catalog has."""
