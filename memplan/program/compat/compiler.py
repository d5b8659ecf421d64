"""Lowered modules, XLA's texts and hook, jax's compilation cache and key-value store."""

import contextlib
import copy
import math
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax._src import compilation_cache as _compilation_cache
from jax._src import config as _config
from jax._src import distributed as _distributed
from jax._src import mesh as _mesh
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import pxla as _pxla
from jax._src.lib import _jax as _jax_lib  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib import _xla as _xla_lib  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib import hlo as _hlo  # pyright: ignore[reportAttributeAccessIssue]
from jax._src.lib.mlir import ir as _ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.named_sharding import UnspecifiedValue as _UnspecifiedValue
from jax._src.sharding_impls import GSPMDSharding as _GSPMDSharding
from jax.extend import xla as _xla_hooks
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from memplan.program.compat.jaxprs import PINNED, sub_jaxprs
from memplan.program.compat.tracing import patched

# Primitives that name the devices of a mesh.
_PLACING = ("sharding_constraint", "shard_map", "reshard", "mesh_cast", "xla_pmap")


_patching = threading.RLock()  # held while a jax method is patched


@dataclass(frozen=True)
class AbsentDevice:
    """A device that this machine need not have, as jax's lowerings ask for it."""

    platform: str  # "cuda" or "tpu"
    kind: str  # as in `jax.Device.device_kind`
    cores: int  # streaming multiprocessors, or TensorCores
    compute_capability: tuple[int, int] | None = None  # CUDA's (major, minor), of a GPU


def lower_for(
    stage: jax.stages.Traced, absent: AbsentDevice, on_host: bool = False
) -> jax.stages.Lowered:
    """Lower for a device that this machine need not have.

    Args:
      on_host: `mark_on_host` will mark inputs.

    A host callback asks jax for the platform's client but does not use it; without the platform jax
    would raise an error.
    """
    contexts: Any = _mlir.ModuleContext
    kind, platform, pallas = absent.kind, absent.platform, contextlib.nullcontext()
    if absent.compute_capability is not None:
        kind, platform = f"{kind} ({'.'.join(map(str, absent.compute_capability))})", "gpu"
        pallas = _pallas_for(absent.kind, absent.compute_capability)
    # jax's caches of lowered functions have the mesh of the context in their keys, and so the
    # device.
    device = AbstractDevice(device_kind=kind, num_cores=absent.cores, platform=platform)
    mesh = _mesh.get_abstract_mesh().update(abstract_device=device)
    with _patching, jax.sharding.use_abstract_mesh(mesh), pallas:
        get_backend = contexts.get_backend

        def backend_of(context: Any, *args: Any) -> Any:
            return context.backend or get_backend(context, *args)

        with patched(contexts, "get_backend", backend_of), _host_memory(on_host):
            return stage.lower(lowering_platforms=(absent.platform,))


def lower_here(stage: jax.stages.Traced, on_host: bool = False) -> jax.stages.Lowered:
    """Lower for the step's own devices; see `lower_for`."""
    with _patching, _host_memory(on_host):
        return stage.lower()


@contextlib.contextmanager
def _host_memory(on_host: bool) -> Iterator[None]:
    """Inside the block, jax lowers steps with arrays in host memory.

    jax 0.11 and 0.12 compare the memory kinds of a function's results, which include the tokens of
    its ordered effects, with those that the jaxpr has, which do not. And they lower no copy to the
    device if they see no array on the host, so they are told of inputs that are marked later.
    """
    lower_function = _mlir.lower_jaxpr_to_fun

    def counted(context: Any, name: str, jaxpr: Any, effects: Sequence[Any], **options: Any) -> Any:
        kinds = options.get("propagated_out_mem_kinds")
        if kinds is not None:
            options["propagated_out_mem_kinds"] = (*(None for _ in effects), *kinds)
        return lower_function(context, name, jaxpr, effects, **options)

    with contextlib.ExitStack() as patches:
        patches.enter_context(patched(_mlir, "lower_jaxpr_to_fun", counted))
        if on_host:
            name = "are_all_shardings_default_mem_kind"
            patches.enter_context(patched(_pxla, name, lambda shardings: False))
        yield


@contextlib.contextmanager
def _pallas_for(kind: str, compute_capability: tuple[int, int]) -> Iterator[None]:
    """Inside the block, Pallas lowers kernels for a GPU of this kind.

    Pallas asks the mesh around a kernel for its device. Inside a `shard_map` that is the step's
    own mesh, which may consist of CPUs, and jax knows the names of some GPUs alone. So the
    functions that ask are replaced: in jax 0.11 and 0.12 one for each of Pallas' two back ends. A
    back end that is not imported lowers nothing.
    """
    major, minor = compute_capability
    triton = sys.modules.get("jax._src.pallas.triton.gpu_info")
    mosaic = sys.modules.get("jax.experimental.mosaic.gpu.utils")
    with contextlib.ExitStack() as patches:
        if triton is not None:
            info = triton.GpuInfo(
                gpu_version=triton.gpu_version_from_device_kind(kind),
                arch_name=f"{major}.{minor}",
                compute_capability=10 * major + minor,
            )
            patches.enter_context(patched(triton, "get_gpu_info", lambda: info))
        if mosaic is not None:
            patches.enter_context(patched(mosaic, "_infer_arch", lambda: (major, minor)))
        yield


def mark_on_host(lowered: Any, inputs: Collection[int], outputs: Collection[int] = ()) -> Any:
    """A copy of a lowered step that takes some of its inputs in host memory.

    Both the module and the shardings of the call say so, as if jax had lowered arguments with a
    memory kind. The devices of a described GPU have no memory kinds, so jax cannot do it.

    Args:
      inputs: positions among all inputs.
      outputs: positions of outputs that the module puts into host memory, whatever `out_shardings`
        say.
    """
    if not inputs:
        return lowered
    outer, clone = _clone(lowered)
    constants = len(clone.const_args)
    kept = sorted(clone.compile_args["kept_var_idx"])
    marked = [number for number, position in enumerate(kept) if position - constants in inputs]
    operations = clone._hlo.body.operations
    (main,) = (operation for operation in operations if str(operation.name).strip('"') == "main")
    shardings = list(clone.compile_args["in_shardings"])
    with clone._hlo.context:
        _mark_arguments(main, marked, len(shardings))
    results = list(clone.compile_args["out_shardings"])
    first = clone._device_list[0]
    if PINNED in {memory.kind for memory in first.addressable_memories()}:
        for number in marked:
            sharding = shardings[number]
            if isinstance(sharding, _UnspecifiedValue):  # XLA would choose device memory
                sharding = jax.sharding.SingleDeviceSharding(first)
            shardings[number] = sharding.with_memory_kind(PINNED)
        for number in outputs:
            if not isinstance(results[number], _UnspecifiedValue):
                results[number] = results[number].with_memory_kind(PINNED)
    clone.compile_args = {
        **clone.compile_args, "in_shardings": tuple(shardings), "out_shardings": tuple(results)
    }  # fmt: skip
    return outer


def _mark_arguments(main: Any, marked: Sequence[int], count: int) -> None:
    """Give these arguments of a module's function the memory kind of the host.

    Args:
      count: arguments without the tokens of ordered effects, which come first.
    """
    attributes = list(main.attributes["arg_attrs"])
    tokens = len(attributes) - count
    for number in marked:
        argument = attributes[tokens + number]
        arg_attributes = {attribute.name: attribute.attr for attribute in argument}
        arg_attributes["mhlo.memory_kind"] = _ir.StringAttr.get(PINNED)
        attributes[tokens + number] = _ir.DictAttr.get(arg_attributes)
    main.attributes["arg_attrs"] = _ir.ArrayAttr.get(attributes)


def names_devices(traced: Any, leaves: Sequence[Any]) -> bool:
    """Does a traced step, or a leaf of its arguments, have a mesh or a sharding of several devices?

    Only such a step can be divided over devices.

    Args:
      traced: the result of `jax.jit(...).trace(...)`.
    """
    shardings = [
        getattr(
            leaf,
            "sharding",
            None,
        )
        for leaf in leaves
        if getattr(leaf, "committed", True)
    ]
    shardings += [*traced._params["in_shardings"], *traced._params["out_shardings"]]
    several = any(
        isinstance(
            sharding,
            jax.sharding.Sharding,
        )
        and sharding.num_devices > 1
        for sharding in shardings
    )
    in_context = not (_mesh.get_concrete_mesh().empty and _mesh.get_abstract_mesh().empty)
    return several or in_context or _has_mesh(traced.jaxpr.jaxpr)


def _has_mesh(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name in _PLACING
        or any(
            map(_has_mesh, sub_jaxprs(eqn)),
        )
        for eqn in jaxpr.eqns
    )


def constrained_partitions(closed: Any) -> int:
    """The most devices over which a sharding constraint or a `shard_map` of the program divides."""
    counts = [1]
    for eqn in getattr(closed, "jaxpr", closed).eqns:
        mesh = getattr(eqn.params.get("sharding"), "mesh", eqn.params.get("mesh"))
        if isinstance(mesh, Mesh | AbstractMesh) and not mesh.empty:
            counts.append(mesh.size)
        counts += map(constrained_partitions, sub_jaxprs(eqn))
    return max(counts)


def constrained_sizes(closed: Any) -> frozenset[int]:
    """Elements on one device of every array that the user constrains.

    Constraints are sharding constraints, `reshard`s and the arguments of `shard_map`s.
    """
    sizes = set[int]()
    for eqn in getattr(closed, "jaxpr", closed).eqns:
        if eqn.primitive.name == "shard_map":
            sizes |= {math.prod(var.aval.shape) for var in eqn.params["jaxpr"].invars}
        sharding = eqn.params.get("sharding", eqn.params.get("dst_sharding"))
        # jax also adds `reshard`s of its own, where XLA decides over all axes of the mesh
        is_constraint = eqn.primitive.name == "sharding_constraint" or (
            eqn.primitive.name == "reshard" and AxisType.Explicit in sharding.mesh.axis_types
        )
        if is_constraint and isinstance(sharding, NamedSharding):
            unconstrained = PartitionSpec.UNCONSTRAINED
            axes = jax.tree.leaves([axis for axis in sharding.spec if axis is not unconstrained])
            parts = math.prod(sharding.mesh.shape[axis] for axis in axes)
            sizes |= {math.prod(var.aval.shape) // parts for var in eqn.outvars}
        sizes |= frozenset[int]().union(*map(constrained_sizes, sub_jaxprs(eqn)))
    return frozenset(sizes)


@dataclass(frozen=True)
class Division:
    """How jax divides a lowered step over devices.

    Attributes:
      count: number of partitions.
      devices: jax's devices in the order of partitions; None if the step names only abstract
        meshes.
      inputs: the sharding of every input; None if XLA chooses it, or if jax drops the input.
      meshes: the different meshes of inputs and outputs.
    """

    count: int
    devices: tuple[Any, ...] | None
    inputs: tuple[Any, ...]
    meshes: tuple[Any, ...]


def division_of(lowered: Any, inputs: int) -> Division:
    """How jax divides a lowered step.

    Args:
      inputs: number of leaves of the dynamic arguments.
    """
    lowering = lowered._lowering
    in_shardings = lowering.compile_args["in_shardings"]
    out_shardings = lowering.compile_args["out_shardings"]
    constants = len(lowering.const_args)
    kept = sorted(lowering.compile_args["kept_var_idx"])
    by_input: list[Any] = [None] * inputs
    for sharding, position in zip(in_shardings, kept, strict=True):
        if position >= constants and not isinstance(sharding, _UnspecifiedValue):
            by_input[position - constants] = sharding
    shardings = (*in_shardings, *out_shardings)
    named = (sharding for sharding in shardings if isinstance(sharding, NamedSharding))
    meshes = dict.fromkeys(sharding.mesh for sharding in named)
    devices = None if lowering._device_list is None else tuple(lowering._device_list)
    count = lowering.compile_args["num_devices"]
    return Division(count, devices, tuple(by_input), tuple(meshes))


def on_devices(lowered: Any, devices: Sequence[Any]) -> Any:
    """A copy of a lowered step for other devices, one for each partition."""
    flat = tuple(devices)

    def moved(sharding: Any) -> Any:
        if isinstance(sharding, NamedSharding):
            return NamedSharding(
                moved_mesh(sharding.mesh),
                sharding.spec,
                memory_kind=sharding.memory_kind,
            )
        if isinstance(sharding, _GSPMDSharding):
            return _GSPMDSharding(flat, sharding._hlo_sharding, memory_kind=sharding.memory_kind)
        if isinstance(sharding, SingleDeviceSharding):
            return SingleDeviceSharding(flat[0])
        return sharding

    def moved_mesh(mesh: Any) -> Mesh:
        shape = tuple(mesh.shape.values())
        return Mesh(np.array(flat).reshape(shape), mesh.axis_names, axis_types=mesh.axis_types)

    lowering = lowered._lowering
    args = dict(lowering.compile_args)
    for name in ("in_shardings", "out_shardings"):
        args[name] = tuple(map(moved, args[name]))
    args["intermediate_shardings"] = list(map(moved, args["intermediate_shardings"]))
    args["backend"] = _xla_bridge.get_device_backend(flat[0])
    args["host_callbacks"] = ()  # the copy is compiled, never run
    if isinstance(args["context_mesh"], Mesh) and not args["context_mesh"].empty:
        args["context_mesh"] = moved_mesh(args["context_mesh"])
    clone = copy.copy(lowering)
    clone.compile_args = args
    clone._device_list = _pxla._create_device_list(flat)
    clone._executable = None
    outer = copy.copy(lowered)
    outer._lowering = clone
    return outer


def module_name_of(lowered: Any) -> str:
    """The name of a lowered step's module, for example `jit_train_step`."""
    return _ir.StringAttr(lowered._lowering._hlo.operation.attributes["sym_name"]).value


def rename_module(lowered: Any, name: str) -> Any:
    """A copy of a lowered step with another name."""
    outer, clone = _clone(lowered)
    with clone._hlo.context:
        clone._hlo.operation.attributes["sym_name"] = _ir.StringAttr.get(name)
    clone._name = name
    return outer


def _clone(lowered: Any) -> tuple[Any, Any]:
    """A copy of a `jax.stages.Lowered`, and the copy's lowering, which may be changed.

    jax caches the original, so changes must not reach it.
    """
    lowering = lowered._lowering
    with lowering._hlo.context, _ir.Location.unknown():
        module = _ir.Module.create()
        for operation in lowering._hlo.body.operations:
            module.body.append(operation.operation.clone())
        attributes = lowering._hlo.operation.attributes
        for key in attributes:
            module.operation.attributes[key] = attributes[key]
    clone = copy.copy(lowering)
    clone._hlo = module
    clone._executable = None  # the original's, if it is compiled
    outer = copy.copy(lowered)
    outer._lowering = clone
    return outer, clone


def module_text(proto: bytes) -> str:
    """A serialized module as XLA prints it, with all elements of its constants."""
    options = _hlo.HloPrintOptions()
    options.print_large_constants = True
    return _hlo.HloModule.from_serialized_hlo_module_proto(proto).to_string(options)


def module_of(compiled: Any) -> bytes:
    """The serialized module of what was compiled."""
    (module,) = compiled.runtime_executable().hlo_modules()
    return module.as_serialized_hlo_module_proto()


def executable_of(compiled: Any) -> Any:
    """jax's executable inside of a `jax.stages.Compiled`."""
    return compiled._executable


def call_parameters_of(compiled: Any) -> Any:
    """jax's record of how a `jax.stages.Compiled` is called."""
    return compiled._params


def takes_no_keywords(compiled: Any) -> bool:
    """Was a `jax.stages.Compiled` lowered in a way that loses names of arguments?"""
    return compiled._no_kwargs


def module_proto(text: str) -> bytes:
    """Parse a module's text and serialize the module."""
    return _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()


def register_hook(
    callback: Callable[[bytes], bytes | None],
    platform: str,
    scheduled: bool,
) -> None:
    """Have XLA pass every serialized module to a callback.

    The callback's result, if any, replaces the module. "cuda" also works without a GPU if the
    plugin is loaded, as it is once a topology is described.

    Args:
      scheduled: call back after XLA schedules the module, not before.
    """
    stages = _xla_hooks.PipelineStage
    stage = stages.POST_SCHEDULER if scheduled else stages.PRE_SCHEDULER
    name = f"memplan_{stage.name}"
    if platform == "cpu":
        _xla_hooks.register_hlo_module_transformation(
            callback,
            name=name,
            stage=stage,
            platforms="cpu",
        )
    else:
        _xla_lib.register_xla_transform_c_api(
            _jax_lib.get_pjrt_plugin(platform),
            name,
            stage.value,
            callback,
        )


class _Uncached:
    """Counts the threads that compile without jax's cache on disk, and saves the cache's state."""

    lock = threading.Lock()
    threads = 0
    before: tuple[bool, bool]  # the cache's state before the first thread


@contextlib.contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Compile without jax's persistent cache, since its key does not include the hook."""
    cache = _compilation_cache
    with _Uncached.lock:
        if not _Uncached.threads:
            _Uncached.before = cache._cache_checked, cache._cache_used
        _Uncached.threads += 1
        cache._cache_checked, cache._cache_used = True, False
    try:
        yield
    finally:
        with _Uncached.lock:
            _Uncached.threads -= 1
            if not _Uncached.threads:
                cache._cache_checked, cache._cache_used = _Uncached.before


def disk_cache() -> Any:
    """jax's persistent compilation cache (`get(key)`, `put(key, bytes)`); None if it is off."""
    backend = _xla_bridge.get_backend()
    is_enabled = _compilation_cache.is_persistent_cache_enabled()
    is_used = is_enabled and _compilation_cache.is_cache_used(backend)
    return _compilation_cache._get_cache(backend) if is_used else None


def least_seconds_to_cache() -> float:
    """The shortest compilation, in seconds, that jax stores in its persistent cache."""
    return _config.persistent_cache_min_compile_time_secs.value


def coordination_client() -> Any:
    """The key-value store of jax.distributed; None before it is initialized."""
    return _distributed.global_state.client
