"""A device: its memory, its rates, and the link to its host. Types; `catalog` has the figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar

from memplan.hardware.backend import CPU, GPU, TPU, Backend
from memplan.hardware.efficiency import PEAK, Efficiency, MatrixShape, Shares

# Narrow floats are widened before the product. A complex product consists of float products, which
# the caller counts.
_COMPUTED_IN: Mapping[str, str] = MappingProxyType(
    {"float8": "float16", "float4": "float16", "complex64": "float32", "complex128": "float64"}
)


# The compute capability from which on matrix units multiply a type: all types but these since
# Ampere, float32 as TF32 (NVIDIA's white papers of the V100 and the A100).
_MATRIX_UNITS_SINCE: Mapping[str, tuple[int, int]] = MappingProxyType({"float16": (7, 0)})
_ALL_MATRIX_UNITS_SINCE = (8, 0)


@dataclass(frozen=True)
class HostLink:
    """The path between a device and its host's memory."""

    name: str  # for example `pcie4x16`
    bandwidth: float  # bytes/s that a large copy from pinned memory achieves, in each direction
    latency_s: float  # fixed seconds of one copy, from its issue to its first byte
    source: str  # the nominal figure, how `bandwidth` follows from it, and where each comes from


@dataclass(frozen=True)
class GpuTarget:
    """Facts besides memory that XLA needs to compile for an absent GPU."""

    compute_capability: tuple[int, int]  # CUDA's (major, minor)
    core_count: int  # streaming multiprocessors
    fpus_per_core: int  # float32 units of one of them
    shared_memory_per_core: int  # bytes
    shared_memory_per_block_optin: int  # bytes that one thread block may ask for
    l2_cache_bytes: int  # bytes
    clock_ghz: float  # highest clock of the cores

    @property
    def backend(self) -> Backend:
        return GPU

    def has_matrix_units(self, dtype: str) -> bool:
        """Do matrix units multiply operands of `dtype`?"""
        return self.compute_capability >= _MATRIX_UNITS_SINCE.get(dtype, _ALL_MATRIX_UNITS_SINCE)


@dataclass(frozen=True)
class TpuTarget:
    """Facts besides memory that XLA needs to compile for an absent TPU."""

    tag: ClassVar = "tpu"  # in files; a GPU's has none, as those from before there were TPUs
    topology: str  # libtpu's name of a small slice, for example `v5e:2x2`
    kind: str  # as in `jax.Device.device_kind`
    cores: int  # of one of jax's devices
    # Of VMEM, or of a v4's CMEM, what XLA:TPU takes for values instead of HBM: the most of two
    # steps with many small values. On a v5p, where each core has VMEM of its own, it took at most
    # 12 MiB, and for no large value.
    vector_memory_bytes: int
    topology_options: tuple[tuple[str, str], ...] = ()  # how libtpu describes its cores, by name

    @property
    def backend(self) -> Backend:
        return TPU

    def has_matrix_units(self, dtype: str) -> bool:
        """Do matrix units multiply operands of `dtype`? They multiply all, by parts of bfloat16."""
        return True


@dataclass(frozen=True)
class Device:
    """A device and the link to its host.

    Attributes:
      name: for `named`, for example `v100` or `v100@power9-nvlink2`. A measured device has the name
        of its base with `-measured` behind it, and is known by its file alone
        (`memplan.hardware.measured`).
      description: the exact product.
      memory_bytes: of the card.
      memory_bandwidth: peak bytes/s of the device's own memory.
      flops: peak FLOP/s of matrix products and convolutions by operand dtype, as XLA runs them by
        default: float32 as TF32 if the chip has it, float16 with float32 accumulation, and a type
        without units of its own at the rate of the type that it is widened to.
      vector_flops: peak float32 FLOP/s outside the matrix units; a fused multiply-add is two.
      link: the path to host memory.
      sources: of the figures, one document each.
      target: for XLA, to compile for an absent device; None for a CPU.
      efficiency: what kernels achieve of these rates.
      kernels: seconds of kernels that ran on it, by `memplan.xla.kernel_fingerprint`.
    """

    name: str
    description: str
    memory_bytes: int
    memory_bandwidth: float
    flops: Mapping[str, float] = field(hash=False)
    vector_flops: float
    link: HostLink
    sources: tuple[str, ...]
    target: GpuTarget | TpuTarget | None
    efficiency: Efficiency = PEAK
    kernels: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "flops", MappingProxyType(dict(self.flops)))
        object.__setattr__(self, "kernels", MappingProxyType(dict(self.kernels)))

    @property
    def backend(self) -> Backend:
        """What XLA does for it."""
        return CPU if self.target is None else self.target.backend

    @property
    def compute_capability(self) -> tuple[int, int]:
        """CUDA's (major, minor); (0, 0) of what is no GPU."""
        return self.target.compute_capability if isinstance(self.target, GpuTarget) else (0, 0)

    @property
    def vector_memory_bytes(self) -> int | None:
        """Bytes in its cores that XLA takes for some values; None of what is no TPU."""
        chip = self.target
        return chip.vector_memory_bytes if isinstance(chip, TpuTarget) else None

    @property
    def achieved_bandwidth(self) -> float:
        """Bytes/s of device memory that kernels achieve."""
        return self.efficiency.memory * self.memory_bandwidth

    def has_matrix_units(self, dtype: str) -> bool:
        """Do matrix units multiply operands of `dtype`?"""
        return self.target is not None and self.target.has_matrix_units(dtype)

    def shares(self, dtype: str) -> Shares:
        """The shares of what multiplies operands of `dtype`."""
        has_units = self.has_matrix_units(dtype)
        return self.efficiency.matrix_units if has_units else self.efficiency.cores

    def achieved_flops(self, dtype: str, shape: MatrixShape) -> float:
        """FLOP/s that kernels achieve in matrix work of a shape, with operands of `dtype`."""
        return self.rate(dtype) * self.shares(dtype).of(shape)

    def times(self, parts: int) -> Device:
        """This many devices that work as one. No kernel ran on all of them."""
        return replace(
            self,
            kernels={},
            memory_bytes=parts * self.memory_bytes,
            memory_bandwidth=parts * self.memory_bandwidth,
            flops={dtype: parts * rate for dtype, rate in self.flops.items()},
            vector_flops=parts * self.vector_flops,
            link=replace(self.link, bandwidth=parts * self.link.bandwidth),
        )

    def rate(self, dtype: str) -> float:
        """Peak FLOP/s for operands of `dtype`.

        Types without an entry run at the rate of the type that they are computed in, or at
        `vector_flops` if there is none: '' for work outside the matrix units, bool, wide integers.
        """
        if dtype in self.flops:
            return self.flops[dtype]
        wide = [wide for prefix, wide in _COMPUTED_IN.items() if dtype.startswith(prefix)]
        return self.flops.get(wide[0] if wide else "", self.vector_flops)
