"""Hardware specifications: the memory of devices, their rates, and their links to the host.

Peak figures are the vendor's, without sparsity; each device names its sources. The tests check
figures of the form `cores x units x clock` against the published peak. Memory is that of a real
card if that is known, since a planner that trusts the number on the box plans for bytes that do not
exist.

A link achieves less than its nominal bandwidth: see `LINKS`. Latencies are assumptions, named as
such; calibrate if they matter.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from memplan.errors import UnknownDeviceError
from memplan.hardware.device import Device, GpuTarget, HostLink
from memplan.hardware.efficiency import Efficiency, Shares
from memplan.hardware.tpus import TPUS

# The address of XLA's own descriptions of real cards: bytes reported, cores, caches, clocks.
_XLA_SPECS = "https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs"


# The share of a link's encoded rate that copies achieve, less packet headers, flow control and
# acknowledgements. Steps on an H100 copied at 53.2 and 54.5 GB/s over PCIe 5.0 x16, 0.84 and 0.86
# of it; one copy on an H200 at 55.4 (`experiments/gpu/results`). nvbandwidth prints 55.6; NVLink
# 2.0 between V100s gave 143.7 of 150 GB/s (Dell EMC Ready Solutions for AI, table 3).
_LINK_EFFICIENCY = 0.85

# Seconds of a copy beyond its bytes over the bandwidth. On an H200, copies of 4 KiB take 0.9 and
# 1.8 us, copies of 1 MiB 1.6 and 2.7 us more than their bytes (`experiments/gpu/results`).
_COPY_LATENCY_S = 2e-6


def _pcie(generation: int, gigatransfers: float) -> HostLink:
    """Sixteen lanes, one bit per transfer and lane, 128b/130b encoding."""
    encoded = gigatransfers * 1e9 * 16 * 128 / 130 / 8
    return HostLink(
        name=f"pcie{generation}x16",
        bandwidth=_LINK_EFFICIENCY * encoded,
        latency_s=_COPY_LATENCY_S,
        source=(
            f"PCI Express Base Specification {generation}.0: {gigatransfers:g} GT/s x 16 lanes, "
            "128b/130b, "
            f"{encoded / 1e9:.1f} GB/s per direction; taken at {_LINK_EFFICIENCY}. "
            "Latency of an H200."
        ),
    )


# DDR4-3200 moves 8 bytes 3.2e9 times a second (JEDEC JESD79-4).
_DDR4_CHANNEL = 25.6e9


_LINKS = (
    _pcie(3, 8),
    _pcie(4, 16),
    _pcie(5, 32),
    HostLink(
        name="nvlink-c2c",
        bandwidth=297e9,
        latency_s=_COPY_LATENCY_S,
        source=(
            "NVIDIA Grace Hopper Superchip Architecture In-Depth: 450 GB/s per direction "
            "(https://developer.nvidia.com/blog/nvidia-grace-hopper-superchip-architecture-"
            "in-depth/). "
            "Measured 375 GB/s to the device and 297 GB/s back "
            "(https://4nownews.com/2024/07/27/not-so-simple-and-"
            "not-so-fast-scientists-studied-the-features-of-memory-and-nvlink-c2c-in-nvidia-"
            "grace-hopper); the slower is taken, since what is offloaded goes both ways. "
            "Latency assumed."
        ),
    ),
    HostLink(
        name="power9-nvlink2",
        bandwidth=_LINK_EFFICIENCY * 75e9,
        latency_s=_COPY_LATENCY_S,
        source=(
            "IBM Power System AC922 with four GPUs: three NVLink 2.0 bricks of 25 GB/s to each, 75 "
            "GB/s per "
            "direction (with six GPUs, as in Summit, two bricks: 50 GB/s); taken at "
            f"{_LINK_EFFICIENCY}. "
            "Latency assumed. "
            "https://www.olcf.ornl.gov/for-users/system-user-guides/summit/nvidia-v100-gpus/"
        ),
    ),
    HostLink(
        name="local-memory",
        bandwidth=_DDR4_CHANNEL / 2,
        latency_s=1e-6,
        source=(
            "One DDR4-3200 channel, 25.6 GB/s (JEDEC JESD79-4), read and written by the same copy: "
            "half of it. "
            "Latency assumed: waking a thread."
        ),
    ),
)
LINKS: Mapping[str, HostLink] = MappingProxyType({link.name: link for link in _LINKS})


# The shares of tensor cores. Fitted to one H200's seconds of every kernel of a ResNet-50 and of
# eleven convolutions with their gradients (jax 0.11.2, `experiments.gpu.classes`); exponents and
# `volume_copies` were chosen with U-Nets in view: cuDNN turns NCDHW, which XLA gives it, into NDHWC
# and back. Held out otherwise: 2D and 3D U-Nets, whose classes are 0.94 to 1.09 of their measured
# seconds, decoders, 0.80 to 1.05, and seven steps on an H100, 0.96 to 1.05.
_MATRIX_UNITS = Shares(
    products=0.75,
    convolutions=0.55,
    filter_gradients=0.30,
    wide=128,
    convolution_exponent=0.5,
    filter_exponent=1.0,
    narrowest=4,
    unaligned=4.0,
)
# The shares of CUDA cores. Set so that a ResNet-50 of 64 images takes 171 ms in float32 on a V100;
# PyTorch takes 174 (NVIDIA's DeepLearningExamples: 367 images/s). Small products fill the cores.
_CORES = Shares(
    products=0.85,
    convolutions=0.80,
    filter_gradients=0.80,
    wide=32,
    convolution_exponent=1.0,
    filter_exponent=1.0,
    narrowest=4,
    unaligned=1.0,
)
_HOPPERS = Efficiency(
    kernel_s=1.5e-6,
    memory=0.80,
    matrix_units=_MATRIX_UNITS,
    cores=_CORES,
    volume_copies=2.0,
    source="One H200's kernels, jax 0.11.2 (experiments/gpu/results/kernels/nvidia-h200).",
    error=0.15,  # kernels of six steps on it, 0.86 to 1.06, and of seven on an H100, 0.96 to 1.05
)
_NOT_MEASURED = replace(
    _HOPPERS, source="An H200's, since kernels of this card were not measured.", error=None
)
# Steps of other frameworks that are not volumes (`experiments.published`): 0.71 to 1.12 of the
# published seconds on an A100, 1.09 to 1.36 on a V100, 1.11 and 1.42 on an RTX 4090.
_A100_STEPS = replace(_NOT_MEASURED, error=0.3)
_V100_STEPS = replace(_NOT_MEASURED, error=0.4)
_RTX4090_STEPS = replace(_NOT_MEASURED, error=0.45)


_P100 = Device(
    name="p100",
    description="NVIDIA Tesla P100 SXM2, 16 GB HBM2",
    memory_bytes=17_066_885_120,
    memory_bandwidth=732.16e9,
    # Twice as fast in float16, but only when it accumulates in float16, which XLA does not ask for.
    flops={
        "float64": 5.3e12,
        "float32": 10.6e12,
        "bfloat16": 10.6e12,
        "float16": 10.6e12,
        "int8": 10.6e12,
    },
    vector_flops=10.6e12,
    link=LINKS["pcie3x16"],
    sources=(
        "NVIDIA Tesla P100 whitepaper "
        "(https://images.nvidia.com/content/pdf/tesla/whitepaper/"
        "pascal-architecture-whitepaper.pdf)",
        f"XLA's target description p100 ({_XLA_SPECS})",
    ),
    target=GpuTarget(
        compute_capability=(6, 0),
        core_count=56,
        fpus_per_core=64,
        shared_memory_per_core=65_536,
        shared_memory_per_block_optin=49_152,
        l2_cache_bytes=4_194_304,
        clock_ghz=1.48,
    ),
    efficiency=_NOT_MEASURED,
)

_V100 = Device(
    name="v100",
    description="NVIDIA Tesla V100 SXM2, 16 GB HBM2",
    memory_bytes=16_935_682_048,
    memory_bandwidth=898.048e9,
    flops={
        "float64": 7.8e12,
        "float32": 15.7e12,
        "bfloat16": 15.7e12,
        "float16": 125e12,
        "int8": 15.7e12,
    },
    vector_flops=15.7e12,
    link=LINKS["pcie3x16"],
    sources=(
        "NVIDIA Tesla V100 GPU Architecture whitepaper "
        "(https://images.nvidia.com/content/volta-architecture/pdf/"
        "volta-architecture-whitepaper.pdf)",
        f"XLA's target description v100 ({_XLA_SPECS})",
    ),
    target=GpuTarget(
        compute_capability=(7, 0),
        core_count=80,
        fpus_per_core=64,
        shared_memory_per_core=98_304,
        shared_memory_per_block_optin=98_304,
        l2_cache_bytes=6_291_456,
        clock_ghz=1.53,
    ),
    efficiency=_V100_STEPS,
)

_A100 = Device(
    name="a100",
    description="NVIDIA A100 SXM4, 80 GB HBM2e",
    memory_bytes=84_987_740_160,
    memory_bandwidth=2.039e12,
    flops={
        "float64": 19.5e12,
        "float32": 156e12,
        "bfloat16": 312e12,
        "float16": 312e12,
        "int8": 624e12,
    },
    vector_flops=19.5e12,
    link=LINKS["pcie4x16"],
    sources=(
        "NVIDIA A100 Tensor Core GPU datasheet (https://www.nvidia.com/en-us/data-center/a100/)",
        f"XLA's target description a100_sxm_80 ({_XLA_SPECS})",
    ),
    target=GpuTarget(
        compute_capability=(8, 0),
        core_count=108,
        fpus_per_core=64,
        shared_memory_per_core=167_936,
        shared_memory_per_block_optin=166_912,
        l2_cache_bytes=41_943_040,
        clock_ghz=1.41,
    ),
    efficiency=_A100_STEPS,
)

_HOPPER = GpuTarget(
    compute_capability=(9, 0),
    core_count=132,
    fpus_per_core=128,
    shared_memory_per_core=233_472,
    shared_memory_per_block_optin=232_448,
    l2_cache_bytes=52_428_800,
    clock_ghz=1.98,
)

# The datasheets print these with sparsity, which doubles them.
_HOPPER_FLOPS = {
    "float64": 67e12,
    "float32": 494.5e12,
    "bfloat16": 989.5e12,
    "float16": 989.5e12,
    "int8": 1979e12,
}

_H100 = Device(
    name="h100",
    description="NVIDIA H100 SXM5, 80 GB HBM3",
    memory_bytes=84_978_434_048,
    memory_bandwidth=3.35232e12,
    flops=_HOPPER_FLOPS,
    vector_flops=67e12,
    link=LINKS["pcie5x16"],
    sources=(
        "NVIDIA H100 Tensor Core GPU datasheet (https://www.nvidia.com/en-us/data-center/h100/)",
        f"XLA's target description h100_sxm ({_XLA_SPECS})",
    ),
    target=_HOPPER,
    efficiency=_HOPPERS,
)

_H200 = Device(
    name="h200",
    description="NVIDIA H200 SXM5, 141 GB HBM3e",
    memory_bytes=151_397_597_184,
    memory_bandwidth=4.8e12,
    flops=_HOPPER_FLOPS,
    vector_flops=67e12,
    link=LINKS["pcie5x16"],
    sources=(
        "NVIDIA H200 Tensor Core GPU datasheet (https://www.nvidia.com/en-us/data-center/h200/)",
        f"XLA's target description h200 ({_XLA_SPECS})",
    ),
    target=_HOPPER,
    efficiency=_HOPPERS,
)

_GH200 = Device(
    name="gh200",
    description=(
        "NVIDIA GH200 Grace Hopper Superchip, the model with 96 GB HBM3 "
        "(not the one with 144 GB HBM3e)"
    ),
    memory_bytes=96_000_000_000,
    memory_bandwidth=4.0e12,
    flops=_HOPPER_FLOPS,
    vector_flops=67e12,
    link=LINKS["nvlink-c2c"],
    sources=(
        "NVIDIA GH200 Grace Hopper Superchip datasheet "
        "(https://www.nvidia.com/en-us/data-center/grace-hopper-superchip/); its 96 GB taken as "
        "96e9 bytes",
        "NVIDIA Grace Hopper Superchip Architecture In-Depth "
        "(https://developer.nvidia.com/blog/nvidia-grace-hopper-superchip-architecture-in-depth/)",
        f"XLA's target description h100_sxm, the same chip ({_XLA_SPECS})",
    ),
    target=_HOPPER,
    efficiency=_HOPPERS,
)

_B200 = Device(
    name="b200",
    description="NVIDIA B200 SXM6, 180 GB HBM3e (192 GB on the package)",
    memory_bytes=191_514_411_008,
    memory_bandwidth=7.67232e12,
    # float64 and the vector rate are XLA's units and clock; the launch papers print a rounder 40
    # and 80.
    flops={
        "float64": 37.2e12,
        "float32": 1100e12,
        "bfloat16": 2250e12,
        "float16": 2250e12,
        "int8": 4500e12,
    },
    vector_flops=74.5e12,
    link=LINKS["pcie5x16"],
    sources=(
        "NVIDIA HGX platform, HGX B200 column, divided by eight "
        "(https://www.nvidia.com/en-us/data-center/hgx/)",
        f"XLA's target description b200 ({_XLA_SPECS})",
    ),
    target=GpuTarget(
        compute_capability=(10, 0),
        core_count=148,
        fpus_per_core=128,
        shared_memory_per_core=233_472,
        shared_memory_per_block_optin=232_448,
        l2_cache_bytes=132_644_864,
        clock_ghz=1.965,
    ),
    efficiency=_NOT_MEASURED,
)

_GB200 = Device(
    name="gb200",
    description="One GPU of an NVIDIA GB200 Grace Blackwell Superchip, 186 GB HBM3e",
    memory_bytes=197_897_748_480,
    memory_bandwidth=7.928064e12,
    # float64 and the vector rate are XLA's units and clock; the data sheet prints 40 and 80.
    flops={
        "float64": 40.1e12,
        "float32": 1250e12,
        "bfloat16": 2500e12,
        "float16": 2500e12,
        "int8": 5000e12,
    },
    vector_flops=80.2e12,
    # 450 GB/s per direction as in a GH200, where it was measured. The superchip's two GPUs share
    # one Grace; the figures are those of a GPU whose neighbour copies nothing.
    link=LINKS["nvlink-c2c"],
    sources=(
        "NVIDIA GB200 NVL72, Grace Blackwell Superchip column, divided by two: 186 GB, 8 TB/s, "
        "NVLink-C2C of 900 GB/s in both directions together "
        "(https://www.nvidia.com/en-us/data-center/gb200-nvl72/)",
        f"XLA's target description gb200 ({_XLA_SPECS})",
    ),
    target=GpuTarget(
        compute_capability=(10, 0),
        core_count=152,
        fpus_per_core=128,
        shared_memory_per_core=233_472,
        shared_memory_per_block_optin=232_448,
        l2_cache_bytes=135_528_448,
        clock_ghz=2.062,
    ),
    efficiency=_NOT_MEASURED,
)

_RTX4090 = Device(
    name="rtx4090",
    description="NVIDIA GeForce RTX 4090, 24 GB GDDR6X",
    memory_bytes=24_563 * 2**20,
    memory_bandwidth=1.008e12,
    # float16 at the rate with float32 accumulation, half of that with float16 accumulation.
    flops={
        "float64": 1.29e12,
        "float32": 82.6e12,
        "bfloat16": 165.2e12,
        "float16": 165.2e12,
        "int8": 660.6e12,
    },
    vector_flops=82.6e12,
    link=LINKS["pcie4x16"],
    sources=(
        "NVIDIA Ada GPU Architecture whitepaper, appendix A "
        "(https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf)",
        "NVIDIA CUDA C++ Programming Guide, technical specifications of compute capability 8.9: "
        "shared memory "
        "(https://docs.nvidia.com/cuda/cuda-c-programming-guide/)",
        "PyTorch's device properties of a real card: 24563 MiB, 128 multiprocessors, 72 MiB L2",
    ),
    target=GpuTarget(
        compute_capability=(8, 9),
        core_count=128,
        fpus_per_core=128,
        shared_memory_per_core=102_400,
        shared_memory_per_block_optin=101_376,
        l2_cache_bytes=75_497_472,
        clock_ghz=2.52,
    ),
    efficiency=_RTX4090_STEPS,
)

DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            *(_P100, _V100, _A100, _H100, _H200, _B200, _RTX4090, _GH200, _GB200),
            *TPUS,
        )
    }
)


def names() -> tuple[str, ...]:
    """Names of devices for `named`; each combines with every link, as in `v100@nvlink-c2c`."""
    return tuple(DEVICES)


def named(name: str) -> Device:
    """The device called `name`, in any case; `device@link` puts it behind another host link.

    Raises:
      UnknownDeviceError: there is no such device or link. The error lists similar names and all
        names.
    """
    device_name, at, link_name = name.strip().lower().partition("@")
    if device_name not in DEVICES:
        raise _unknown("device", device_name, name, DEVICES)
    device = DEVICES[device_name]
    if not at:
        return device
    if link_name not in LINKS:
        raise _unknown("host link", link_name, name, LINKS)
    return replace(device, name=f"{device_name}@{link_name}", link=LINKS[link_name])


def _unknown(kind: str, part: str, whole: str, names: Iterable[str]) -> UnknownDeviceError:
    names = list(names)
    close = difflib.get_close_matches(part, names, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    inside = "" if part == whole.strip().lower() else f" (in {whole!r})"
    return UnknownDeviceError(
        f"Unknown {kind} {part!r}{inside}.{hint} Known: {', '.join(names)}. "
        "Write a device as 'v100', as 'v100@pcie4x16' for another host link, or as the path of a "
        ".json file from `memplan calibrate --out`."
    )


# The rates of one logical core, which may be half of a core, on a busy machine below its boost
# clock. Zen 2 and Haswell and later start two 256-bit multiply-adds a cycle (AMD 56305; Intel
# 248966): one is counted.
_CPU_CLOCK_HZ = 2.0e9
_CPU_FLOAT32_LANES = 8
_CPU_CORES_PER_CHANNEL = 8  # AMD EPYC 7763: 64 cores, 8 channels of DDR4-3200.


def local_cpu(cores: int, memory_bytes: int) -> Device:
    """A conservative description of a CPU of which only the size is known.

    Args:
      cores: logical processors.
      memory_bytes: bytes that the program may use.

    Raises:
      ValueError: one of them is not positive.
    """
    if cores < 1 or memory_bytes < 1:
        raise ValueError(
            f"a CPU has at least one core and one byte of memory, not {cores} and {memory_bytes}"
        )
    vector_flops = 2.0 * _CPU_FLOAT32_LANES * _CPU_CLOCK_HZ * cores
    # narrow types are widened to float32
    narrow = dict.fromkeys(("float32", "bfloat16", "float16", "int8"), vector_flops)
    return Device(
        name="cpu",
        description=f"local CPU, {cores} logical cores",
        memory_bytes=memory_bytes,
        memory_bandwidth=_DDR4_CHANNEL * max(1.0, cores / _CPU_CORES_PER_CHANNEL),
        flops={"float64": vector_flops / 2, **narrow},
        vector_flops=vector_flops,
        link=LINKS["local-memory"],
        sources=(
            "Assumed: 2.0 GHz sustained and one 256-bit multiply-add a cycle per logical core, "
            "half of what AMD's "
            "Software Optimization Guide for Family 17h Models 30h and Greater (56305) and Intel's "
            "64 and IA-32 "
            "Architectures Optimization Reference Manual (248966) give a whole core",
            "JEDEC JESD79-4: 25.6 GB/s per channel of DDR4-3200; one channel per eight cores as in "
            "AMD EPYC 7763 "
            "(https://www.amd.com/en/products/processors/server/epyc/7003-series.html), at least "
            "one",
        ),
        target=None,
    )
