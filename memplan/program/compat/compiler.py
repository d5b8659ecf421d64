"""Lowered modules, XLA's texts and hook, jax's cache of compilations and the store of its processes."""

import contextlib
import copy
import math
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
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from memplan.program.compat.jaxprs import sub_jaxprs

_PLACING = ("sharding_constraint", "shard_map", "reshard", "mesh_cast", "xla_pmap")
PINNED = "pinned_host"
"""The kind of memory, as jax calls it, that is the host's and that a GPU reads and writes."""


_lowering = threading.RLock()  # a method of jax's is another one meanwhile


def lower_for(stage: jax.stages.Traced, platform: str) -> jax.stages.Lowered:
    """Lower for a platform that need not be here.

    A host callback asks for the platform's client, which jax refuses, and does nothing with it.
    """
    contexts: Any = _mlir.ModuleContext
    with _lowering:
        refusing = contexts.get_backend
        contexts.get_backend = lambda context, *optional: context.backend or refusing(context, *optional)
        try:
            return stage.lower(lowering_platforms=(platform,))
        finally:
            contexts.get_backend = refusing


def mark_on_host(lowered: Any, inputs: Collection[int], outputs: Collection[int] = ()) -> Any:
    """The same with these inputs (positions among all) in host memory, for XLA and for who calls what comes of it.

    It is what jax writes for arguments with a memory kind; the devices of a described GPU know no kinds.

    Args:
      outputs: that the module puts into host memory, whatever the user's `out_shardings` say of it.
    """
    if not inputs:
        return lowered
    outer, clone = _clone(lowered)
    constants, kept = len(clone.const_args), sorted(clone.compile_args["kept_var_idx"])
    marked = [number for number, position in enumerate(kept) if position - constants in inputs]
    (main,) = (one for one in clone._hlo.body.operations if str(one.name).strip('"') == "main")
    shardings = list(clone.compile_args["in_shardings"])
    with clone._hlo.context:
        attributes = list(main.attributes["arg_attrs"])
        tokens = len(attributes) - len(shardings)  # of ordered effects; they come first
        for number in marked:
            found = {one.name: one.attr for one in attributes[tokens + number]}
            found["mhlo.memory_kind"] = _ir.StringAttr.get(PINNED)
            attributes[tokens + number] = _ir.DictAttr.get(found)
        main.attributes["arg_attrs"] = _ir.ArrayAttr.get(attributes)
    results = list(clone.compile_args["out_shardings"])
    first = clone._device_list[0]
    if PINNED in {memory.kind for memory in first.addressable_memories()}:
        for number in marked:
            known = shardings[number]
            if isinstance(known, _UnspecifiedValue):  # jax would ask XLA, and then for device memory
                known = jax.sharding.SingleDeviceSharding(first)
            shardings[number] = known.with_memory_kind(PINNED)
        for number in outputs:
            if not isinstance(results[number], _UnspecifiedValue):
                results[number] = results[number].with_memory_kind(PINNED)
    clone.compile_args = {
        **clone.compile_args, "in_shardings": tuple(shardings), "out_shardings": tuple(results)
    }  # fmt: skip
    return outer


def names_devices(traced: Any, leaves: Sequence[Any]) -> bool:
    """Whether what `jax.jit(...).trace(...)` returned, or a leaf of its arguments, has a mesh or a sharding of several
    devices: only then it can be divided over them.
    """
    named = [getattr(leaf, "sharding", None) for leaf in leaves if getattr(leaf, "committed", True)]
    named += [*traced._params["in_shardings"], *traced._params["out_shardings"]]
    several = any(isinstance(one, jax.sharding.Sharding) and one.num_devices > 1 for one in named)
    in_context = not (_mesh.get_concrete_mesh().empty and _mesh.get_abstract_mesh().empty)
    return several or in_context or _has_mesh(traced.jaxpr.jaxpr)


def _has_mesh(jaxpr: Any) -> bool:
    return any(eqn.primitive.name in _PLACING or any(map(_has_mesh, sub_jaxprs(eqn))) for eqn in jaxpr.eqns)


def constrained_partitions(closed: Any) -> int:
    """The most devices of a mesh over which a sharding constraint or a `shard_map` of the program divides."""
    found = [1]
    for eqn in getattr(closed, "jaxpr", closed).eqns:
        named = getattr(eqn.params.get("sharding"), "mesh", eqn.params.get("mesh"))
        found += [named.size] if isinstance(named, Mesh | AbstractMesh) and not named.empty else []
        found += map(constrained_partitions, sub_jaxprs(eqn))
    return max(found)


def asked_sizes(closed: Any) -> frozenset[int]:
    """Elements on one device of arrays that a sharding constraint, a `reshard` or a `shard_map` says how to divide."""
    found = set[int]()
    for eqn in getattr(closed, "jaxpr", closed).eqns:
        if eqn.primitive.name == "shard_map":
            found |= {math.prod(var.aval.shape) for var in eqn.params["jaxpr"].invars}
        named = eqn.params.get("sharding", eqn.params.get("dst_sharding"))
        # jax writes a `reshard` by itself, too, where all axes of the mesh are XLA's to decide
        says = eqn.primitive.name == "sharding_constraint" or (
            eqn.primitive.name == "reshard" and AxisType.Explicit in named.mesh.axis_types
        )
        if says and isinstance(named, NamedSharding):
            axes = jax.tree.leaves([one for one in named.spec if one is not PartitionSpec.UNCONSTRAINED])
            parts = math.prod(named.mesh.shape[axis] for axis in axes)
            found |= {math.prod(var.aval.shape) // parts for var in eqn.outvars}
        found |= frozenset[int]().union(*map(asked_sizes, sub_jaxprs(eqn)))
    return frozenset(found)


@dataclass(frozen=True)
class Division:
    """What `jax.jit(...).lower(...)` returned, divided over devices.

    Attributes:
      count: partitions.
      devices: jax's devices in the order of partitions; None if there is an abstract mesh alone.
      inputs: the sharding of every input; None where XLA chooses it, or jax leaves the input out.
      meshes: the meshes of inputs and outputs, each once.
    """

    count: int
    devices: tuple[Any, ...] | None
    inputs: tuple[Any, ...]
    meshes: tuple[Any, ...]


def division_of(lowered: Any, inputs: int) -> Division:
    """How jax divides it; `inputs` counts the leaves of the dynamic arguments."""
    known = lowered._lowering
    given, results = known.compile_args["in_shardings"], known.compile_args["out_shardings"]
    constants, kept = len(known.const_args), sorted(known.compile_args["kept_var_idx"])
    found: list[Any] = [None] * inputs
    for sharding, position in zip(given, kept, strict=True):
        if position >= constants and not isinstance(sharding, _UnspecifiedValue):
            found[position - constants] = sharding
    meshes = dict.fromkeys(one.mesh for one in (*given, *results) if isinstance(one, NamedSharding))
    devices = None if known._device_list is None else tuple(known._device_list)
    return Division(known.compile_args["num_devices"], devices, tuple(found), tuple(meshes))


def on_devices(lowered: Any, devices: Sequence[Any]) -> Any:
    """The same for these devices, one for each partition, whatever devices or abstract mesh it was lowered for."""
    flat = tuple(devices)

    def moved(sharding: Any) -> Any:
        if isinstance(sharding, NamedSharding):
            return NamedSharding(moved_mesh(sharding.mesh), sharding.spec, memory_kind=sharding.memory_kind)
        if isinstance(sharding, _GSPMDSharding):
            return _GSPMDSharding(flat, sharding._hlo_sharding, memory_kind=sharding.memory_kind)
        return SingleDeviceSharding(flat[0]) if isinstance(sharding, SingleDeviceSharding) else sharding

    def moved_mesh(mesh: Any) -> Mesh:
        shape = tuple(mesh.shape.values())
        return Mesh(np.array(flat).reshape(shape), mesh.axis_names, axis_types=mesh.axis_types)

    known = lowered._lowering
    clone, outer = copy.copy(known), copy.copy(lowered)
    args = dict(known.compile_args)
    for name in ("in_shardings", "out_shardings"):
        args[name] = tuple(map(moved, args[name]))
    args["intermediate_shardings"] = list(map(moved, args["intermediate_shardings"]))
    args["backend"] = _xla_bridge.get_device_backend(flat[0])
    args["host_callbacks"] = ()  # who only compiles takes none
    if isinstance(args["context_mesh"], Mesh) and not args["context_mesh"].empty:
        args["context_mesh"] = moved_mesh(args["context_mesh"])
    clone.compile_args, clone._device_list, clone._executable = args, _pxla._create_device_list(flat), None
    outer._lowering = clone
    return outer


def module_name_of(lowered: Any) -> str:
    """The name of what `jax.jit(...).lower(...)` returned, for example `jit_train_step`."""
    return _ir.StringAttr(lowered._lowering._hlo.operation.attributes["sym_name"]).value


def rename_module(lowered: Any, name: str) -> Any:
    """The same under another name."""
    outer, clone = _clone(lowered)
    with clone._hlo.context:
        clone._hlo.operation.attributes["sym_name"] = _ir.StringAttr.get(name)
    clone._name = name
    return outer


def _clone(lowered: Any) -> tuple[Any, Any]:
    """A copy of what was lowered, and what is in it; jax, which keeps what it lowered, sees nothing of changes."""
    known = lowered._lowering
    with known._hlo.context, _ir.Location.unknown():
        module = _ir.Module.create()
        for one in known._hlo.body.operations:
            module.body.append(one.operation.clone())
        attributes = known._hlo.operation.attributes
        for key in attributes:
            module.operation.attributes[key] = attributes[key]
    clone = copy.copy(known)
    clone._hlo = module
    clone._executable = None  # jax compiled the same for somebody else
    outer = copy.copy(lowered)
    outer._lowering = clone
    return outer, clone


def module_text(proto: bytes) -> str:
    """A serialized module as XLA prints it, constants whole."""
    options = _hlo.HloPrintOptions()
    options.print_large_constants = True
    return _hlo.HloModule.from_serialized_hlo_module_proto(proto).to_string(options)


def module_proto(text: str) -> bytes:
    """The serialized module of a text."""
    return _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()


def register_hook(callback: Callable[[bytes], bytes | None], platform: str, scheduled: bool) -> None:
    """Have XLA call back with every module, serialized, before or after it schedules it; what is returned replaces it.

    Of "cuda" also where no GPU is: the plugin must be loaded, as it is once a topology has been described.
    """
    stage = _xla_hooks.PipelineStage.POST_SCHEDULER if scheduled else _xla_hooks.PipelineStage.PRE_SCHEDULER
    name = f"memplan_{stage.name}"
    if platform == "cpu":
        _xla_hooks.register_hlo_module_transformation(callback, name=name, stage=stage, platforms="cpu")
    else:
        _xla_lib.register_xla_transform_c_api(_jax_lib.get_pjrt_plugin(platform), name, stage.value, callback)


class _Uncached:
    """How many threads compile without jax's cache on disk, and how it was before the first of them."""

    lock = threading.Lock()
    threads = 0
    before: tuple[bool, bool]


@contextlib.contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Compile without jax's persistent cache, whose key does not include the hook."""
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
    """jax's persistent cache of compilations, with `get(key)` and `put(key, bytes)`; None where it is off."""
    backend = _xla_bridge.get_backend()
    used = _compilation_cache.is_persistent_cache_enabled() and _compilation_cache.is_cache_used(backend)
    return _compilation_cache._get_cache(backend) if used else None


def least_seconds_to_cache() -> float:
    """jax keeps in its persistent cache what takes so long to compile."""
    return _config.persistent_cache_min_compile_time_secs.value


def coordination_client() -> Any:
    """The key-value store of jax.distributed, None before it is initialized."""
    return _distributed.global_state.client
