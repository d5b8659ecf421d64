"""A single-device step -> the same step over a mesh, each device with its part of the batch."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memplan.errors import MeshError
from memplan.parallel import mesh as meshes
from memplan.parallel.assign import Assigned, Wanted, assign, gathers
from memplan.parallel.bucketing import buckets
from memplan.parallel.layout import WHOLE, Layout, split
from memplan.parallel.links import Links, Sum
from memplan.parallel.local import Local
from memplan.planning import devices
from memplan.planning.devices import Device
from memplan.planning.topology import Topology
from memplan.program import compat
from memplan.program.local import local_device
from memplan.program.trace import flatten

Leaf = Any
SplitState = str | Callable[[str, Leaf], bool] | None


@dataclass(frozen=True)
class Divided:
    """A step for one set of shapes.

    Attributes:
      assigned: its flat jaxpr at the global shapes, with layouts.
      buckets: variable -> bucket that its sum travels in.
      out_tree: structure of its outputs.
    """

    assigned: Assigned
    buckets: dict[Any, int]
    out_tree: Any


class DataParallel:
    """What `data_parallel` returns: called with global arrays inside `jax.jit` or `memplan.jit`."""

    def __init__(
        self,
        step: Callable[..., Any],
        mesh: Mesh,
        topology: Topology,
        batch_argnums: tuple[int, ...],
        batch_axis: int,
        split_state: SplitState,
        device: Device,
    ):
        functools.update_wrapper(self, step)
        self.step = step
        self.mesh = mesh
        self.topology = topology
        self.batch_argnums = batch_argnums
        self.batch_axis = batch_axis
        self.split_state = split_state
        self.device = device
        self.sums: tuple[Sum, ...] = ()
        self._known: dict[Any, Divided] = {}

    @property
    def devices(self) -> int:
        return self.topology.devices

    def __call__(self, *args: Any) -> Any:
        leaves, tree = jax.tree_util.tree_flatten(args)
        layouts = self.layouts(*args)
        divided = self.divided(args)
        outputs = divided.assigned.outputs

        def local(*parts: Any) -> list[Any]:
            links = Links(self.topology)
            results = Local(divided.assigned, links, divided.buckets).run(parts)
            self.sums = tuple(links.sums)
            return results

        names = tuple(axis.name for axis in self.topology.axes)
        specs = [_spec(layout, names) for layout in layouts]
        run = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=tuple(specs),
            out_specs=[_spec(layout, names) for layout in outputs],
            check_vma=False,
        )
        return jax.tree_util.tree_unflatten(divided.out_tree, run(*leaves))

    def layouts(self, *args: Any) -> list[Layout]:
        """The layout of every leaf of the arguments.

        Raises:
          MeshError: a batch that cannot be divided.
        """
        found = []
        for position, arg in enumerate(args):
            for path, leaf in jax.tree_util.tree_flatten_with_path(arg)[0]:
                name = jax.tree_util.keystr(path)
                if position in self.batch_argnums:
                    found.append(self._batch_layout(position, name, leaf))
                else:
                    found.append(self._state_layout(name, leaf))
        return found

    def _batch_layout(self, position: int, name: str, leaf: Leaf) -> Layout:
        shape, axis = jax.numpy.shape(leaf), self.batch_axis
        if len(shape) <= axis:
            return WHOLE  # a scalar of the batch: the same for all
        if shape[axis] % self.devices:
            below, above = _neighbours(shape[axis], self.devices)
            raise MeshError(
                f"the global batch of {shape[axis]} (argument {position}{name}, dimension {axis}) cannot be divided "
                f"equally among {self.devices} devices. Take {below or above} or {above}, or a mesh whose number of "
                f"devices divides {shape[axis]}."
            )
        return split(axis)

    def _state_layout(self, name: str, leaf: Leaf) -> Layout:
        """Parts of state that is to be divided, along the largest dimension that can be."""
        if self.split_state is None:
            return WHOLE
        wanted = self.split_state in name if isinstance(self.split_state, str) else self.split_state(name, leaf)
        shape = jax.numpy.shape(leaf)
        dims = [dim for dim, size in enumerate(shape) if size and size % self.devices == 0]
        return split(max(dims, key=lambda dim: shape[dim])) if wanted and dims and self.devices > 1 else WHOLE

    def divided(self, args: Sequence[Any]) -> Divided:
        """The step's equations with layouts, for the shapes of these (global) arguments."""
        leaves, tree = jax.tree_util.tree_flatten(tuple(args))
        shapes = [_struct(leaf) for leaf in leaves]
        key = tree, tuple((one.shape, one.dtype, one.weak_type) for one in shapes)
        if key not in self._known:
            self._known[key] = self._divide(jax.tree_util.tree_unflatten(tree, shapes))
        return self._known[key]

    def _divide(self, args: tuple[Any, ...]) -> Divided:
        traced = jax.jit(self.step).trace(*args)
        jaxpr = flatten(traced.jaxpr)
        layouts = self.layouts(*args)
        wanted = self._wanted(args, layouts, traced.out_info)
        assigned = assign(jaxpr, layouts, wanted, self.devices)
        for eqn, atom in gathers(assigned):
            warnings.warn(
                f"{eqn.primitive.name} at {compat.source_of(eqn) or 'an unknown line'} cannot be divided along the "
                f"batch: every device gathers its operand {atom.aval.str_short()} and computes all of it.",
                stacklevel=2,
            )
        return Divided(assigned, buckets(assigned, self.topology, self.device), traced.out_tree)

    def _wanted(self, args: tuple[Any, ...], layouts: Sequence[Layout], out: Any) -> list[Wanted]:
        """Outputs that take the place of an argument have its layouts; of others, what is split stays so."""
        by_tree: dict[Any, list[Layout]] = {}
        start = 0
        for position, arg in enumerate(args):
            leaves, tree = jax.tree_util.tree_flatten(arg)
            if position not in self.batch_argnums and leaves:
                by_tree.setdefault((tree, _types(leaves)), list(layouts[start : start + len(leaves)]))
            start += len(leaves)

        found: list[Wanted] = []
        for part in out if isinstance(out, tuple) and type(out) is tuple else (out,):
            leaves, tree = jax.tree_util.tree_flatten(part)
            known = by_tree.get((tree, _types(leaves)))
            found += [Wanted(layout) for layout in known] if known else [Wanted() for _ in leaves]
        return found


def data_parallel(
    step: Callable[..., Any],
    mesh: Mesh | None = None,
    *,
    batch_argnums: int | Sequence[int] = 1,
    batch_axis: int = 0,
    topology: Topology | str | None = None,
    split_state: SplitState = None,
    device: str | None = None,
) -> DataParallel:
    """The step of one device at the global batch, computed by all devices of a mesh.

    Args:
      step: `step(state, batch)`, pure, written for one device; nothing in it knows of devices.
      mesh: one axis per level of the machine, outermost first.
      batch_argnums: arguments of which every device gets a part; the rest it has whole.
      batch_axis: dimension of their leaves that is divided.
      topology: links between the devices; axes as in the mesh.
      split_state: what each device keeps and updates a part of: a name in the path of leaves (`"opt_state"`), or a
        function of (path, leaf).
      device: what each of them is, by name; None: what jax runs on. It says when gradients are ready to be sent.
    """
    mesh = meshes.mesh() if mesh is None else mesh
    kind = devices.named(device) if device is not None else local_device()
    positions = (batch_argnums,) if isinstance(batch_argnums, int) else tuple(batch_argnums)
    return DataParallel(step, mesh, meshes.fitted(topology, mesh), positions, batch_axis, split_state, kind)


def _neighbours(size: int, devices: int) -> tuple[int, int]:
    below = size // devices * devices
    return below, below + devices


def _struct(leaf: Leaf) -> jax.ShapeDtypeStruct:
    aval = jax.core.get_aval(leaf) if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype") else leaf
    return compat.as_struct(aval)


def _types(leaves: Sequence[Leaf]) -> tuple[Any, ...]:
    return tuple((leaf.shape, leaf.dtype) for leaf in map(_struct, leaves))


def _spec(layout: Layout, names: tuple[str, ...]) -> PartitionSpec:
    return PartitionSpec(*(None,) * layout.dim, names) if layout.is_split else PartitionSpec()
