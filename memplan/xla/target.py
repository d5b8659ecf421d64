"""The target of a compilation: the local backend, or a described GPU that is absent."""

import contextlib
import functools
import itertools
import math
import os
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.experimental import topologies

from memplan import io
from memplan.errors import MemplanError, UnknownDeviceError, UnsupportedProgramError
from memplan.hardware.backend import Backend
from memplan.hardware.device import Device
from memplan.hardware.machine import Machine
from memplan.program import compat
from memplan.program.lowerable import Lowerable
from memplan.program.trace import lower
from memplan.xla.described_gpu import kernel_cache_file, target_config
from memplan.xla.hook import ENDS, Interception, Rewrite, Stopped, intercept
from memplan.xla.module import Module
from memplan.xla.schema import UnreadableModuleError

HIDES_LATENCY = {
    # XLA:GPU's own default from Hopper on.
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # Copies in flight; the link serves them one by one.
    "xla_gpu_experimental_parallel_async_compute_limit": 64,
    # Near its memory limit XLA no longer starts copies early, and it counts host memory, too.
    "xla_gpu_memory_limit_slop_factor": 10_000,
}
# XLA rematerializes by itself what takes more than this fraction of a GPU's memory.
XLA_LIMIT = 0.8
# XLA leaves this fraction of its limit, without arguments and outputs, to temporaries
# (xla_gpu_memory_limit_slop_factor).
_SLOP = 0.95
# Disable XLA's own rematerialization: it runs after the hook, and counts host memory as memory of
# the device. A plan of 8 GiB on a V100 and 8 GiB on the host got clones, and a warning on stderr.
_REMATERIALIZATION = "rematerialization"
_DISABLED = "xla_disable_hlo_passes"
_DESCRIBED_OPTIONS = {"xla_gpu_autotune_level": 0}  # No GPU is there to time kernels on.
_WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}
# jaxlib 0.10 and 0.11 say this of a product's tiles. If XLA times kernels, it skips such tiles.
_BAD_TILES = ("Couldn't find output tile sizes", "No supported config found")
# Disable the pass that annotates slices where it fails: on a slice in a loop whose offset another
# loop looks up, as `jnp.searchsorted` of one number does (openxla/xla#49299). Without the pass,
# kernels move slices of host memory.
_ANNOTATOR = "dynamic-slice-annotator"
_CANNOT_EVALUATE = "Failed to evaluate instruction"
_BAD_OPTION = re.compile(
    r"INVALID_ARGUMENT: ((?:No such compile option|While setting option)[^\n]*?)\.?$",
    re.M,
)
# Mosaic kernels are assembled in this pipeline; jaxlib 0.12 adds its name and ptxas' message.
# jaxlib keeps the architecture of the first kernel of a process, and ptxas refuses newer ones.
_MOSAIC_FAILS = re.compile(r"(?:Mosaic GPU p|P)ass pipeline failed[^\n]*")
_NEEDS_AMPERE = "Triton support is only enabled for Ampere"
_OFFLOAD_FAULTS = ("change layout memory space", "host_offload")  # openxla/xla#47362, #47380
_numbers = itertools.count()


@dataclass(frozen=True)
class Memory:
    """The compiler's allocation, in bytes.

    `device_bytes` is temporaries + arguments + outputs - aliased + large constants, which
    `memory_analysis()` omits. jax's `peak_memory_in_bytes` is not used, since it omits temporaries
    on CPU and counts host bytes on GPU.
    """

    device_bytes: int
    host_bytes: int
    temp_bytes: int
    argument_bytes: int = 0
    constant_bytes: int = 0

    @property
    def resident_bytes(self) -> int:
        """On the device throughout: arguments, outputs and large constants."""
        return self.device_bytes - self.temp_bytes


@dataclass(frozen=True)
class Executable:
    """A compiled program with the compiler's own account of its memory."""

    compiled: Any  # `jax.stages.Compiled`
    memory: Memory

    @functools.cached_property
    def text(self) -> str:
        """Scheduled HLO."""
        return self.compiled.as_text()

    @functools.cached_property
    def module(self) -> Module:
        """The scheduled module that runs.

        Raises:
          UnreadableModuleError: it is not scheduled.
        """
        return Module.read(compat.module_of(self.compiled))


@dataclass(frozen=True)
class Target:
    """A device to compile for."""

    device: Device  # its specification
    described: bool  # True for a GPU that is not here

    @property
    def backend(self) -> Backend:
        return self.device.backend

    @property
    def absent(self) -> compat.AbsentGpu | None:
        """What jax must know of a GPU that is not here; None for the local backend."""
        if not self.described:
            return None
        assert self.device.target is not None
        return compat.AbsentGpu(
            self.backend.platform,
            self.device.description,
            self.device.target.core_count,
            self.device.compute_capability,
        )

    def lower(self, lowerable: Lowerable) -> jax.stages.Lowered:
        """The step as the compiler receives it."""
        options = dict(lowerable.options)
        options.pop("compiler_options", None)
        stage = jax.jit(lowerable.step, **options).trace(*lowerable.args, **lowerable.kwargs)
        return lower(stage, self.absent, bool(lowerable.on_host))

    def compile(
        self,
        lowerable: Lowerable,
        flags: Mapping[str, Any] | None = None,
        rewrite: Rewrite | None = None,
        shape: Rewrite | None = None,
        name: str = "",
    ) -> Executable:
        """Compile for this device, or for as many as there are partitions.

        Args:
          flags: compiler options in addition to those in the options of `jax.jit`.
          rewrite: receives the scheduled module, and may return another.
          shape: receives the module before it is scheduled, and may return another.
          name: of the module in jax's persistent cache, if that is on. A cached module is already
            rewritten: `rewrite` is not called.

        Raises:
          Stopped, KeyboardInterrupt: `rewrite` or Ctrl-C ended the compilation.
          MemplanError: XLA did not hand the module over, or whatever `rewrite` raises.
        """
        users = lowerable.options.get("compiler_options") or {}
        own = flags or {}
        passes = _without(users, own[_DISABLED]) if _DISABLED in own else {}
        flags = {**users, **own, **passes}
        lowered = self.lower(lowerable)
        if self.described:
            assert self.device.target is not None
            kernels = {"xla_gpu_kernel_cache_file": str(kernel_cache_file(self.device.target))}
            flags = {**_DESCRIBED_OPTIONS, **kernels, **flags}
            lowered = compat.on_devices(lowered, self._described_devices(lowerable.machine))
        lowered = compat.mark_on_host(lowered, lowerable.on_host, lowerable.returned_to_host)
        return _account(self._compile_rewritten(lowered, flags, rewrite, shape, name))

    def _compile_rewritten(
        self,
        lowered: Any,
        flags: Mapping[str, Any],
        rewrite: Rewrite | None,
        shape: Rewrite | None,
        cached: str,
    ) -> Any:
        """Compile under a unique name, by which the hook and jax's cache know the module.

        Args:
          cached: the name in the persistent cache; "" if the module is not cached.
        """
        if rewrite is None:
            return self._compile_lowered(lowered, flags)
        users_name = re.sub(r"[^a-zA-Z0-9_]", "_", compat.module_name_of(lowered))
        name = f"memplan_{cached or next(_numbers)}_{users_name}"
        with contextlib.ExitStack() as context:
            interception = context.enter_context(
                intercept(name, rewrite, self.backend.platform, shape)
            )
            if not cached:
                context.enter_context(compat.without_compilation_cache())
            renamed = compat.rename_module(lowered, name)
            try:
                compiled = self._compile_lowered(renamed, {**flags, **self._as_planned(flags)})
            except jax.errors.JaxRuntimeError:
                if isinstance(interception.error, ENDS):
                    raise interception.error from None
                raise
        self._check(interception, bool(cached))
        return compiled

    def _check(self, interception: Interception, is_cached: bool) -> None:
        """Check that XLA called the hook, and that the hook succeeded.

        Raises:
          MemplanError: see `compile`.
        """
        version = io.version_of("jaxlib")
        try:
            interception.check()
        except UnreadableModuleError as error:
            raise MemplanError(
                "memplan does not understand the schedule of the step from XLA of jaxlib "
                f"{version}: {error} It supports jax 0.11.2 to 0.12."
            ) from error
        except (MemplanError, Stopped):
            raise
        except Exception as error:  # memplan's fault, or that of the user's own planner.
            at = traceback.extract_tb(error.__traceback__)[-1]
            raise MemplanError(
                f"memplan could not plan the step that XLA of jaxlib {version} scheduled: "
                f"{type(error).__name__} in {at.name} ({at.filename}:{at.lineno}): {error} "
                "Unless you passed your own planner, this is a bug in memplan; nothing was run. "
                "Please report it with the step. `jax.jit` compiles the step without a plan."
            ) from error
        if not interception.called and not is_cached:
            raise MemplanError(
                f"XLA of jaxlib {version} compiled the step for {self.device.name} without calling "
                "memplan. memplan supports jax 0.11.2 to 0.12; on a GPU, jax's plugin must have "
                "the same version."
            )

    def _as_planned(self, flags: Mapping[str, Any]) -> Mapping[str, Any]:
        """XLA:GPU's rematerialization disabled."""
        return _without(flags, _REMATERIALIZATION) if self.backend.rematerializes else {}

    def _compile_lowered(self, lowered: Any, flags: Mapping[str, Any]) -> Any:
        """Compile; if XLA fails on something that other options avoid, compile again with those.

        Raises:
          MemplanError: XLA does not take the options.
          UnsupportedProgramError: XLA still fails.
        """
        try:
            return lowered.compile(compiler_options=dict(flags) or None)
        except jax.errors.JaxRuntimeError as error:
            failure = error
        message = str(failure)
        if self.described and any(words in message for words in _BAD_TILES):
            return lowered.compile(compiler_options={**flags, **_WITHOUT_TRITON})
        if self.backend.has_own_memory and _CANNOT_EVALUATE in message:
            return lowered.compile(compiler_options={**flags, **_without(flags, _ANNOTATOR)})
        version = io.version_of("jaxlib")
        if option := _BAD_OPTION.search(message):
            raise MemplanError(
                f"XLA of jaxlib {version} does not take the compiler options: {option[1]}. "
                "Correct or omit it in compiler_options, or in XLA_FLAGS."
            ) from None
        if failure_line := _MOSAIC_FAILS.search(message):
            raise UnsupportedProgramError(
                f"jaxlib {version} cannot assemble the step's Mosaic kernel for "
                f"{self.device.name} ({failure_line[0]}). It cannot if this process has assembled "
                "one for an older GPU before: plan for the newest GPU first, or for each GPU in a "
                "process of its own."
            ) from failure
        if _NEEDS_AMPERE in message:
            raise UnsupportedProgramError(
                f"the step has a Triton kernel (of Pallas, or a library's), which XLA compiles "
                f"for Ampere and later GPUs, not for {self.device.name}. Plan for another device, "
                "or use the operation's form without a kernel of its own."
            ) from None
        if any(words in message for words in _OFFLOAD_FAULTS):
            line = message.strip().partition("\n")[0]
            raise UnsupportedProgramError(
                f"XLA of jaxlib {version} cannot compile this step's values in host memory "
                f"({line}); its host offloading has known bugs (openxla/xla#47362, #47380). "
                "Try host_budget=0, so that memplan keeps nothing on the host, or the step "
                "without host_state= or without its own `jax.device_put` to host memory."
            ) from failure
        raise failure

    def _described_devices(self, machine: Machine | None) -> list[Any]:
        """A described device for each partition."""
        if machine is None:
            return list(described_devices(self.device))
        *outer, inner = machine.topology.sizes.values()
        devices = described_devices(self.device, math.prod(outer), inner)
        return [devices[number] for number in machine.devices]


@functools.lru_cache(maxsize=16)
def described_devices(device: Device, hosts: int = 1, per_host: int = 1) -> tuple[Any, ...]:
    """Described GPUs, host by host.

    Raises:
      UnknownDeviceError: the compiler for GPUs is not installed.
    """
    try:
        topology = topologies.get_topology_desc(
            topology_name=device.name,
            platform="cuda",
            topology=f"1x{hosts}x{per_host}",
            target_config=target_config(device),
        )
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise UnknownDeviceError(
            f"XLA cannot compile for {device.name} here ({error}). "
            "Planning for an absent GPU needs its compiler: pip install 'memplan[gpu-aot]'."
        ) from error
    return tuple(topology.devices)


def _account(compiled: Any) -> Executable:
    """The executable with its memory."""
    stats = compiled.memory_analysis()
    module = Module.read(compat.module_of(compiled), scheduled=False)
    constant_bytes = sum(op.nbytes for op in module.large_constants)
    memory = Memory(
        device_bytes=stats.temp_size_in_bytes
        + stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + constant_bytes,
        host_bytes=stats.host_temp_size_in_bytes
        + stats.host_argument_size_in_bytes
        + stats.host_output_size_in_bytes
        - stats.host_alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
        argument_bytes=stats.argument_size_in_bytes,
        constant_bytes=constant_bytes,
    )
    return Executable(compiled, memory)


def rematerializes_above(device: Device, resident_bytes: int) -> int:
    """Device bytes above which XLA:GPU rematerializes a step by itself.

    Args:
      resident_bytes: of the step's arguments and outputs.
    """
    return resident_bytes + int(_SLOP * max(0.0, XLA_LIMIT * device.memory_bytes - resident_bytes))


def _without(flags: Mapping[str, Any], name: str) -> dict[str, str]:
    """An option that disables a pass of XLA and those that the user disables.

    It repeats the user's passes, as an option of a compilation replaces the one in XLA_FLAGS.
    """
    if _DISABLED in flags:
        users = [flags[_DISABLED]]
    else:
        users = re.findall(rf"--{_DISABLED}=(\S+)", os.environ.get("XLA_FLAGS", ""))
    return {_DISABLED: ",".join([*users, name])}


def xla_rematerialization(
    target: Target,
    limit_bytes: int,
    resident_bytes: int,
) -> tuple[Target, dict[str, Any]]:
    """A target and compiler options that set the limit of XLA's own rematerialization.

    XLA:GPU's limit is (80 % of device memory - arguments and outputs) x
    `xla_gpu_memory_limit_slop_factor` / 100. A described device gets exactly the memory that makes
    this the limit, a real one only a whole percentage of its own.
    """
    if target.described:
        device = replace(target.device, memory_bytes=int(limit_bytes / XLA_LIMIT) + 1)
        return replace(target, device=device), {"xla_gpu_memory_limit_slop_factor": 100}
    whole = XLA_LIMIT * target.device.memory_bytes - resident_bytes
    percent = int(100 * (limit_bytes - resident_bytes) / whole) if whole > 0 else 100
    return target, {"xla_gpu_memory_limit_slop_factor": max(1, percent)}
