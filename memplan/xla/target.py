"""The target of a compilation: the local backend, or a described device that is absent."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from memplan import io
from memplan.errors import MemplanError
from memplan.hardware.backend import Backend
from memplan.hardware.device import Device
from memplan.hardware.machine import Machine
from memplan.program import compat
from memplan.program.lowerable import Lowerable
from memplan.program.trace import lower
from memplan.xla.gpu.platform import GpuPlatform
from memplan.xla.hook import ENDS, Interception, Rewrite, Stopped, intercept
from memplan.xla.module import Module
from memplan.xla.platform import DISABLED_PASSES, Options, Platform, without_pass
from memplan.xla.schema import UnreadableModuleError
from memplan.xla.tpu.platform import TpuPlatform

HIDES_LATENCY = {
    # XLA:GPU's own default from Hopper on.
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # Copies in flight; the link serves them one by one.
    "xla_gpu_experimental_parallel_async_compute_limit": 64,
    # Near its memory limit XLA no longer starts copies early, and it counts host memory, too.
    "xla_gpu_memory_limit_slop_factor": 10_000,
}
_BAD_OPTION = re.compile(
    r"INVALID_ARGUMENT: ((?:No such compile option|While setting option)[^\n]*?)\.?$",
    re.M,
)
_PLATFORMS = {"cpu": Platform(), "cuda": GpuPlatform(), "tpu": TpuPlatform()}
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
    described: bool  # True for a device that is not here

    @property
    def backend(self) -> Backend:
        return self.device.backend

    @property
    def platform(self) -> Platform:
        """What XLA's back end for it takes besides."""
        return _PLATFORMS[self.backend.platform]

    @property
    def absent(self) -> compat.AbsentDevice | None:
        """What jax must know of a device that is not here; None for the local backend."""
        return self.platform.absent(self.device) if self.described else None

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
        limit_bytes: int | None = None,
    ) -> Executable:
        """Compile for this device, or for as many as there are partitions.

        Args:
          flags: compiler options in addition to those in the options of `jax.jit`.
          rewrite: receives the scheduled module, and may return another.
          shape: receives the module before it is scheduled, and may return another.
          name: of the module in jax's persistent cache, if that is on. A cached module is already
            rewritten: `rewrite` is not called.
          limit_bytes: what a module that is rewritten may take, where XLA packs its buffers again;
            None is all of the device's memory.

        Raises:
          OverLimitError: XLA packs the module into more than that.
          Stopped, KeyboardInterrupt: `rewrite` or Ctrl-C ended the compilation.
          MemplanError: XLA did not hand the module over, or whatever `rewrite` raises.
        """
        users = lowerable.options.get("compiler_options") or {}
        own = flags or {}
        passes = without_pass(users, own[DISABLED_PASSES]) if DISABLED_PASSES in own else {}
        flags = {**users, **own, **passes}
        lowered = self.lower(lowerable)
        if self.described:
            flags = {**self.platform.options_for_absent(self.device), **flags}
            lowered = compat.on_devices(lowered, self._described_devices(lowerable.machine))
        lowered = compat.mark_on_host(lowered, lowerable.on_host, lowerable.returned_to_host)
        compiled = self._compile_rewritten(lowered, flags, rewrite, shape, name, limit_bytes)
        return _account(compiled, self.platform)

    def _compile_rewritten(
        self,
        lowered: Any,
        flags: Mapping[str, Any],
        rewrite: Rewrite | None,
        shape: Rewrite | None,
        cached: str,
        limit_bytes: int | None,
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
                memory_bytes = self.device.memory_bytes
                limit = memory_bytes if limit_bytes is None else limit_bytes
                planned = self.platform.options_for_plan(flags, limit, memory_bytes)
                compiled = self._compile_lowered(renamed, {**flags, **planned})
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
        other = self.platform.other_options(flags, message, self.described)
        if other is not None:
            return lowered.compile(compiler_options={**flags, **other})
        if option := _BAD_OPTION.search(message):
            raise MemplanError(
                f"XLA of jaxlib {io.version_of('jaxlib')} does not take the compiler options: "
                f"{option[1]}. Correct or omit it in compiler_options, or in XLA_FLAGS."
            ) from None
        explanation = self.platform.explanation(message, self.device)
        if explanation is None:
            raise failure
        raise explanation from None

    def rematerializes_above(self, resident_bytes: int) -> int:
        """See `Platform.rematerializes_above`."""
        return self.platform.rematerializes_above(self.device, resident_bytes)

    def rematerialized_within(
        self, limit_bytes: int, resident_bytes: int
    ) -> tuple[Target, Options]:
        """A target and options that set the limit of XLA's own rematerialization."""
        device, options = self.platform.rematerialization(
            self.device, self.described, limit_bytes, resident_bytes
        )
        return replace(self, device=device), options

    def _described_devices(self, machine: Machine | None) -> list[Any]:
        """A described device for each partition."""
        if machine is None:
            return list(self.platform.described_devices(self.device))
        *outer, inner = machine.topology.sizes.values()
        devices = self.platform.described_devices(self.device, math.prod(outer), inner)
        return [devices[number] for number in machine.devices]


def _account(compiled: Any, platform: Platform) -> Executable:
    """The executable with its memory."""
    stats = compiled.memory_analysis()
    module = Module.read(compat.module_of(compiled), scheduled=False)
    constant_bytes = sum(op.nbytes for op in module.large_constants)
    temp_bytes = platform.temporary_bytes(stats, constant_bytes)
    memory = Memory(
        device_bytes=temp_bytes
        + stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + constant_bytes,
        host_bytes=stats.host_temp_size_in_bytes
        + stats.host_argument_size_in_bytes
        + stats.host_output_size_in_bytes
        - stats.host_alias_size_in_bytes,
        temp_bytes=temp_bytes,
        argument_bytes=stats.argument_size_in_bytes,
        constant_bytes=constant_bytes,
    )
    return Executable(compiled, memory)
