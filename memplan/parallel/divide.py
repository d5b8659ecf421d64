"""Divides a step among devices: the placement of every array, and the buckets of its sums."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from memplan.errors import MeshError, UnsupportedProgramError
from memplan.hardware.device import Device
from memplan.hardware.topology import Topology
from memplan.parallel import agreement
from memplan.parallel.emit.buckets import Buckets, assign_buckets, sink_reads
from memplan.parallel.partition.propagate import propagate
from memplan.parallel.partition.sharded import Gather, OutputDemand, Placement, Replicate, Shard, Sharded, gathers
from memplan.program import compat
from memplan.program.flat import flatten

Leaf = Any
GLOBAL, DEVICE = "global", "device"
SplitState = str | Callable[[str, Leaf], bool] | None


_PLACING = "sets the sharding of arrays, which data_parallel decides for the whole step"
_PER_DEVICE = "is written for several devices already; data_parallel divides a step that is written for one"
_WITHOUT = "Leave it out of the step that data_parallel is given"

_REFUSED = {
    "sharding_constraint": (_PLACING, f"{_WITHOUT}; batch_argnums and split_state say what is divided."),
    "reshard": (_PLACING, f"{_WITHOUT}; batch_argnums and split_state say what is divided."),
    "mesh_cast": (_PLACING, f"{_WITHOUT}."),
    "layout_constraint": (_PLACING, f"{_WITHOUT}."),
    "jit": (_PLACING, "Leave in_shardings and out_shardings out of the jit inside the step."),
    "pjit": (_PLACING, "Leave in_shardings and out_shardings out of the jit inside the step."),
    "shard_map": (_PER_DEVICE, "Give data_parallel the function for one device, or jit this step without it."),
    "xla_pmap": (_PER_DEVICE, "Give data_parallel the function for one device, or jit this step without it."),
}
_PRINTS = ("debug_callback", "debug_print")


@dataclass(frozen=True)
class Options:
    """How a step is divided; see `data_parallel`."""

    batch_argnums: tuple[int, ...] = (1,)
    batch_axis: int = 0
    split_state: SplitState = None
    decompose: bool = True
    compress: str | None = None
    statistics: str = GLOBAL


@dataclass(frozen=True)
class Divided:
    """A step for one set of shapes."""

    sharded: Sharded  # its flat jaxpr at the global shapes, with placements
    buckets: Buckets  # which of its sums travel together
    out_tree: Any  # structure of its outputs


def divide(
    step: Callable[..., Any],
    mesh: Mesh | AbstractMesh,
    topology: Topology,
    device: Device,
    options: Options,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Divided:
    """The step's equations with placements, for these (global) shapes; the same in all processes.

    Raises:
      MeshError: the batch cannot be divided.
      UnsupportedProgramError: the step cannot be divided.
    """
    traced = jax.jit(step).trace(*args, **kwargs)
    inputs = placements(args, kwargs, options, topology.devices)
    outputs = _output_demands(args, inputs, traced.out_info, options)
    flat = flatten(traced.jaxpr)
    _refuse(flat)

    sharded = sink_reads(propagate(flat, inputs, outputs, topology.devices, options.statistics == DEVICE))
    agreement.same_step(mesh, step, sharded.jaxpr, (options, topology, device.name))
    for warning in dict.fromkeys(map(_warning, gathers(sharded))):
        warnings.warn(warning, stacklevel=2)
    buckets = assign_buckets(sharded, topology, device, options.compress is not None)
    return Divided(sharded, buckets, traced.out_tree)


def _refuse(jaxpr: compat.ClosedJaxpr) -> None:
    """Refuse a flat jaxpr that cannot be divided; printing is allowed, the first device prints."""
    for eqn in _equations(jaxpr):
        name = eqn.primitive.name
        where = compat.relative(compat.source_of(eqn)) or "an unknown line"
        if name in _REFUSED:
            why, instead = _REFUSED[name]
            raise UnsupportedProgramError(f"{name} at {where} {why}. {instead}")
        if eqn.effects and (name not in _PRINTS or eqn.params.get("ordered")):
            raise UnsupportedProgramError(
                f"{name} at {where} has an effect outside of the step, ordered or with a result; every device of a "
                "divided step would repeat it. Do it outside of the step with what the step returns; jax.debug.print "
                "and jax.debug.callback with ordered=False may stay."
            )


def _equations(jaxpr: compat.ClosedJaxpr) -> Iterator[compat.JaxprEqn]:
    for eqn in jaxpr.jaxpr.eqns:
        called = compat.call_body(eqn)
        bodies = compat.control_bodies(eqn) if called is None else [called]
        for body in bodies:
            yield from _equations(body)
        if not bodies:
            yield eqn


def placements(args: Sequence[Any], kwargs: Mapping[str, Any], options: Options, devices: int) -> list[Placement]:
    """The placement of every leaf of the arguments; keyword arguments are never the batch.

    Raises:
      MeshError: the batch cannot be divided.
    """
    found = []
    for position, arg in [*enumerate(args), *((None, kwargs[name]) for name in sorted(kwargs))]:
        for path, leaf in jax.tree_util.tree_flatten_with_path(arg)[0]:
            name = jax.tree_util.keystr(path)
            if position in options.batch_argnums:
                found.append(batch_placement(position, name, leaf, options, devices))
            else:
                found.append(_state_placement(name, leaf, options, devices))
    return found


def batch_placement(position: int, name: str, leaf: Leaf, options: Options, devices: int) -> Placement:
    """The placement of one leaf of the batch, called `name` in the argument at `position`."""
    shape, axis = jax.numpy.shape(leaf), options.batch_axis
    if len(shape) <= axis:
        return Replicate()  # a scalar is the same for all examples
    if shape[axis] % devices:
        below = shape[axis] // devices * devices
        raise MeshError(
            f"the global batch of {shape[axis]} (argument {position}{name}, dimension {axis}) cannot be divided "
            f"equally among {devices} devices. Take {f'{below} or ' if below else ''}{below + devices}, or a mesh "
            f"whose number of devices divides {shape[axis]}."
        )
    return Shard(axis)


def _state_placement(name: str, leaf: Leaf, options: Options, devices: int) -> Placement:
    """State that `split_state` names is split along its largest dimension that can be; the rest is replicated."""
    if options.split_state is None:
        return Replicate()
    wanted = options.split_state in name if isinstance(options.split_state, str) else options.split_state(name, leaf)
    shape = jax.numpy.shape(leaf)
    dims = [dim for dim, size in enumerate(shape) if size and size % devices == 0]
    return Shard(max(dims, key=lambda dim: shape[dim])) if wanted and dims and devices > 1 else Replicate()


def _output_demands(
    args: tuple[Any, ...], inputs: Sequence[Placement], out: Any, options: Options
) -> list[OutputDemand]:
    """An output with the tree and types of an argument gets its placements; others stay as they are."""
    by_tree: dict[Any, list[Placement]] = {}
    start = 0
    for position, arg in enumerate(args):
        leaves, tree = jax.tree_util.tree_flatten(arg)
        if position not in options.batch_argnums and leaves:
            by_tree.setdefault((tree, _types(leaves)), list(inputs[start : start + len(leaves)]))
        start += len(leaves)

    found: list[OutputDemand] = []
    for part in out if isinstance(out, tuple) and type(out) is tuple else (out,):
        leaves, tree = jax.tree_util.tree_flatten(part)
        known = by_tree.get((tree, _types(leaves)))
        found += [OutputDemand(placement) for placement in known] if known else [OutputDemand() for _ in leaves]
    return found


def struct_of(leaf: Leaf) -> jax.ShapeDtypeStruct:
    typed = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return compat.as_struct(leaf if typed else jax.typeof(leaf))


def _types(leaves: Sequence[Leaf]) -> tuple[Any, ...]:
    return tuple((leaf.shape, leaf.dtype) for leaf in map(struct_of, leaves))


def _warning(gather: Gather) -> str:
    line = compat.relative(compat.source_of(gather.eqn)) or "an unknown line"
    work = "its part" if gather.divides else "all of it"
    return (
        f"{gather.eqn.primitive.name} at {line} cannot be divided along the batch as it lies: every device gathers its "
        f"operand {gather.operand.aval.str_short()} and computes {work}; what follows is divided where it can be."
    )
