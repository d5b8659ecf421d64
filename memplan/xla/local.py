"""The specification of the device that jax uses, and the memory pools of this process."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import jax

from memplan.errors import BudgetError
from memplan.hardware import catalog
from memplan.hardware.device import Device

HOST_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
FRACTION = "XLA_CLIENT_MEM_FRACTION"
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
_OLD_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # used if FRACTION is not set
_HOST_PREALLOCATE = "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE"
_UPDATE_MODE = re.compile(r"(--xla_gpu_command_buffer_update_mode=(\S*))")
_NO = ("false", "False", "0")  # These values turn PREALLOCATE off (jaxlib/xla_client.py).
# A device's limit is a multiple of these bytes (RoundUpGpuMemoryLimit of gpu_helpers.cc).
_LIMIT_GRANULARITY = 2 << 20


@dataclass(frozen=True)
class Pools:
    """The sizes of the pools of XLA's GPU client.

    The client reads the environment when it starts, with jax's first array. Its defaults and their
    rules are in jaxlib/xla_client.py and xla/pjrt/gpu/gpu_helpers.cc.
    """

    fraction: float = 0.75  # of a device's memory that its pool may take
    preallocates: bool = True  # the pool takes its fraction at the first request
    host_limit_bytes: int = 64 << 30  # of pinned memory, for each local device
    host_preallocates: bool = False  # the pinned pool takes its limit at the first request
    of_bfc: bool = True  # a device's memory is in XLA's own pool, not CUDA's

    @property
    def share(self) -> float:
        """The share of a device's memory that a process of jax has there."""
        return min(self.fraction, 1.0) if self.of_bfc else 1.0

    @property
    def host(self) -> Pool:
        """The pinned pool of one device."""
        return Pool(self.host_limit_bytes, grows=not self.host_preallocates)

    def of_device(self, memory_bytes: int, fraction: float) -> Pool:
        """The pool of a device that may take a fraction of its memory."""
        units = -(-int(memory_bytes * fraction) // _LIMIT_GRANULARITY)
        return Pool(units * _LIMIT_GRANULARITY, grows=not self.preallocates)


def pools(environ: Mapping[str, str] = os.environ) -> Pools:
    """The pools of a client that starts in this environment.

    Raises BudgetError if a variable is not the number that it should be.
    """
    host_preallocates = environ.get(_HOST_PREALLOCATE, "").lower() in ("true", "1")
    default = 16 if host_preallocates else 64
    fraction = FRACTION if environ.get(FRACTION) else _OLD_FRACTION
    return Pools(
        fraction=_number(environ, fraction, float, Pools.fraction),
        preallocates=environ.get(PREALLOCATE, "") not in _NO,
        host_limit_bytes=_number(environ, HOST_LIMIT, int, default) << 30,
        host_preallocates=host_preallocates,
        of_bfc=environ.get(_ALLOCATOR, "default").lower() in ("default", "bfc"),
    )


def _number[T: (int, float)](
    environ: Mapping[str, str],
    name: str,
    read: Callable[[str], T],
    default: T,
) -> T:
    value = environ.get(name)
    try:
        return read(value) if value else default
    except ValueError:
        example = export(name, str(default))
        raise BudgetError(
            f"{name}={value} is not a number. Set it before Python starts, for example: {example}"
        ) from None


def without_spaces(environ: Mapping[str, str] = os.environ) -> str:
    """The setting that makes XLA's client allocate host memory on the device; "" if none does.

    Its allocator by virtual addresses has one memory (device_address_vmm_allocator.cc of XLA). XLA
    uses it for every mode of updates but the default (se_gpu_pjrt_client.cc).
    """
    if environ.get(_ALLOCATOR, "").lower() == "vmm":
        return f"{_ALLOCATOR}=vmm"
    modes = _UPDATE_MODE.findall(environ.get("XLA_FLAGS", ""))  # The last mode counts.
    return f"XLA_FLAGS={modes[-1][0]}" if modes and modes[-1][1] != "ALWAYS_UPDATE" else ""


def export(name: str, value: str) -> str:
    """A shell line that sets a variable."""
    return f"export {name}={value}"


def local_device() -> Device:
    """This CPU, or the first local GPU with the memory that jax may use, whichever jax uses.

    Raises:
      UnknownDeviceError: it is another device.
    """
    first = jax.local_devices()[0]
    if first.platform == "tpu":
        raise catalog.UnknownDeviceError(
            f"jax runs on {first.device_kind!r} here, and no plan of memplan's has run on a TPU. "
            'Pass device=, such as "v5e", to inspect a plan, or set JAX_PLATFORMS=cpu.'
        )
    if first.platform == "cpu":
        return catalog.local_cpu(os.cpu_count() or 1, host_memory_bytes())
    stats = first.memory_stats() or {}
    spec = catalog.named(closest_name(first.device_kind))
    return replace(spec, memory_bytes=int(stats.get("bytes_limit", spec.memory_bytes)))


def closest_name(kind: str) -> str:
    """The specification with the longest name that occurs in the driver's name of the card.

    For example, `h200` occurs in `NVIDIA H200`.
    """
    plain = kind.lower().replace(" ", "").replace("-", "")
    names = [name for name in catalog.names() if name.replace("-", "") in plain]
    if not names:
        raise catalog.UnknownDeviceError(
            f"memplan has no specification of this machine's {kind!r}. "
            f"Pass device= with the most similar of: {', '.join(catalog.names())}."
        )
    return max(names, key=len)


def is_here(device: Device, platform: str, kind: str) -> bool:
    """Does jax use this measured device? If not, it is an absent GPU.

    A CPU matches any CPU: its rates are used as they are.

    Raises:
      UnknownDeviceError: a CPU, but jax uses another backend.
    """
    first = jax.local_devices()[0]
    if platform == "cpu" and first.platform != "cpu":
        raise catalog.UnknownDeviceError(
            f"{device.name} is a measured CPU, but jax runs on {first.device_kind!r} here. "
            "Set JAX_PLATFORMS=cpu, or calibrate this device."
        )
    return first.platform == platform and (platform == "cpu" or first.device_kind == kind)


def host_memory_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True)
class Room:
    """The pool of the first local device at one moment, in bytes."""

    in_use_bytes: int
    peak_bytes: int  # the highest use since the process began, which cannot be reset
    limit_bytes: int
    # The largest block that the pool can allocate: free, or still to come from the driver.
    block_bytes: int


def room() -> Room | None:
    """The state of the device's pool; None if it reports none, as on a CPU. Takes about 3 us."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if not {"pool_bytes", "largest_free_block_bytes", "peak_bytes_in_use"}.issubset(stats):
        return None
    limit = stats["bytes_limit"]
    block = max(stats["largest_free_block_bytes"], limit - stats["pool_bytes"])
    return Room(stats["bytes_in_use"], stats["peak_bytes_in_use"], limit, block)


# The rules of xla/tsl/framework/bfc_allocator.{h,cc}:
_ALIGNMENT = 256  # Every size is a multiple of these bytes (kMinAllocationSize).
_FIRST_REGION_NBYTES = 2 << 20  # A pool that grows starts with a region of this size.
# A chunk is split if at least this much of it stays (max_internal_fragmentation_bytes_).
_LARGE_REST_NBYTES = 128 << 20


@dataclass(frozen=True)
class Taken:
    """Bytes that a pool took."""

    in_use_bytes: int  # of allocated chunks, whole as `bytes_in_use` counts them
    pool_bytes: int  # of regions, from the driver
    refused_nbytes: int | None = None  # the first request that failed; None if none did
    regions: tuple[int, ...] = field(default=(), compare=False)  # bytes of each, in order


@dataclass(frozen=True)
class Pool:
    """An empty pool."""

    limit_bytes: int  # of all its regions
    # If it grows, each region is twice as large as the last, or the power of two that a request
    # needs. Else the first region takes the whole limit.
    grows: bool

    def take(self, requests: Iterable[int]) -> Taken:
        """Serve requests (bytes) in their order. Nothing is freed."""
        free = list[int]()
        regions = list[int]()
        in_use = 0
        pool = 0
        limit = self.limit_bytes
        region = _rounded(min(limit, _FIRST_REGION_NBYTES) if self.grows else limit)
        for nbytes in filter(None, map(_rounded, requests)):
            if not any(chunk >= nbytes for chunk in free):
                available = (limit - pool) // _ALIGNMENT * _ALIGNMENT
                if nbytes > available:
                    return Taken(in_use, pool, nbytes, tuple(regions))
                is_larger = region < nbytes
                while region < nbytes:
                    region *= 2
                free.append(min(region, available))
                regions.append(free[-1])
                pool += free[-1]
                region *= 1 if is_larger else 2
            chunk = min(chunk for chunk in free if chunk >= nbytes)
            free.remove(chunk)
            if chunk >= 2 * nbytes or chunk - nbytes >= _LARGE_REST_NBYTES:
                free.append(chunk - nbytes)
                chunk = nbytes
            in_use += chunk
        return Taken(in_use, pool, None, tuple(regions))


def least_limit(requests: Iterable[int], unit_bytes: int) -> int:
    """The least limit, in whole units, with which a pool that grows serves the requests.

    It can exceed their sum, as no request spans two regions.
    """
    sizes = list(requests)
    units = -(-sum(map(_rounded, sizes)) // unit_bytes)
    while Pool(units * unit_bytes, grows=True).take(sizes).refused_nbytes is not None:
        units += 1
    return units


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
