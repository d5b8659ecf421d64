"""A single-device step -> the same step over a mesh, each device with its part of the batch."""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from memplan.errors import MemplanError, MeshError
from memplan.hardware import catalog
from memplan.hardware.device import Device
from memplan.hardware.topology import Topology
from memplan.parallel import agreement, meshes
from memplan.parallel.emit.buckets import Buckets, buckets, sunk
from memplan.parallel.emit.collectives import Links, Sum, trusts_reduce_scatter
from memplan.parallel.emit.compression import WIRES, Remembered, Wire
from memplan.parallel.emit.lower import Local
from memplan.parallel.partition.assigned import Assigned, Gathered, Wanted, gathers
from memplan.parallel.partition.placement import WHOLE, Layout, split
from memplan.parallel.partition.propagate import assign
from memplan.parallel.partition.refusals import refuse
from memplan.program import compat
from memplan.program.sharding import XLA_DECOMPOSES
from memplan.program.trace import flatten
from memplan.xla.local import local_device

Leaf = Any
GLOBAL, DEVICE = "global", "device"
SplitState = str | Callable[[str, Leaf], bool] | None


@dataclass(frozen=True)
class Divided:
    """A step for one set of shapes.

    Attributes:
      assigned: its flat jaxpr at the global shapes, with layouts.
      buckets: which of its sums travel together.
      out_tree: structure of its outputs.
    """

    assigned: Assigned
    buckets: Buckets
    out_tree: Any


@dataclass(frozen=True)
class Options:
    """How a step is divided; see `data_parallel`."""

    batch_argnums: tuple[int, ...] = (1,)
    batch_axis: int = 0
    split_state: SplitState = None
    decompose: bool = True
    wire: str | None = None
    statistics: str = GLOBAL


class DataParallel:
    """What `data_parallel` returns: called with global arrays inside `jax.jit` or `memplan.jit`."""

    def __init__(
        self, step: Callable[..., Any], mesh: Mesh | AbstractMesh, topology: Topology, device: Device, options: Options
    ):
        functools.update_wrapper(self, step)
        self.step = step
        self.mesh = mesh
        self.topology = topology
        self.device = device
        self.options = options
        self.decomposes = options.decompose
        self.sums: tuple[Sum, ...] = ()
        self._known: dict[Any, Divided] = {}

    @property
    def devices(self) -> int:
        return self.topology.devices

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, errors = self._opened(args)
        args, kwargs = self._by_position(args, kwargs)
        divided = self.divided(args, kwargs)
        leaves = jax.tree_util.tree_leaves((args, kwargs))
        results, after = self._run(divided, self.layouts(*args, **kwargs), leaves, errors)
        out = jax.tree_util.tree_unflatten(divided.out_tree, results)
        return out if self.options.wire is None else self._closed(out, after)

    def _by_position(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments as `batch_argnums` counts them, whether the caller names them or not."""
        if not kwargs:
            return args, kwargs
        try:
            bound = inspect.signature(self.step).bind(*args, **kwargs)
        except TypeError as error:
            raise MemplanError(f"the step does not take these arguments: {error}.") from error
        return bound.args, bound.kwargs

    def _run(
        self, divided: Divided, layouts: Sequence[Layout], leaves: Sequence[Any], errors: Sequence[Any] | None
    ) -> tuple[list[Any], list[Any]]:
        """Results of the step, and what compressed messages left out."""

        outputs = [self._spec(layout) for layout in divided.assigned.outputs]
        own = self._spec(split(0))
        run = jax.shard_map(
            functools.partial(self.local, divided),
            mesh=self.mesh if any(map(meshes.is_typed, leaves)) else meshes.untyped(self.mesh),
            in_specs=([self._spec(layout) for layout in layouts], own),
            out_specs=(outputs, own),
            check_vma=False,
        )
        return run(list(leaves), errors)

    def local(
        self, divided: Divided, parts: Sequence[Any], before: Sequence[Any] | None
    ) -> tuple[list[Any], list[Any]]:
        """What one device runs: results in their layouts, and what its compressed messages left out.

        Args:
          parts: the device's own of every leaf of the arguments.
          before: what the last step's messages left out; None where only shapes are asked for.
        """
        wire = Wire(self.options.wire, before) if self.options.wire else None
        links = Links(self.topology, self.options.decompose, wire, trusts_reduce_scatter(self.mesh))
        results = Local(divided.assigned, links, divided.buckets).run(parts)
        self.sums = tuple(links.sums)
        return results, wire.after if wire else []

    def _opened(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Sequence[Any]]:
        """The step's own arguments, and what the last step's messages left out."""
        if self.options.wire is None:
            return args, ()
        if not args or not isinstance(args[0], Remembered):
            raise MemplanError(
                "a step whose messages are compressed also carries what they left out: its first argument is what "
                "place(state, batch) makes of the state, and what the step itself returns."
            )
        return (args[0].state, *args[1:]), args[0].errors

    def _closed(self, out: Any, errors: Sequence[Any]) -> Any:
        if type(out) is tuple:
            return (Remembered(out[0], tuple(errors)), *out[1:])
        return Remembered(out, tuple(errors))

    def _spec(self, layout: Layout) -> PartitionSpec:
        return PartitionSpec(*(None,) * layout.dim, tuple(self.topology.sizes)) if layout.is_split else PartitionSpec()

    @property
    def whole(self) -> NamedSharding:
        """Of what every device has all of."""
        return NamedSharding(self.mesh, PartitionSpec())

    def shardings(self, *args: Any) -> Any:
        """Of every leaf of the arguments (arrays or shapes)."""
        found = [NamedSharding(self.mesh, self._spec(layout)) for layout in self.layouts(*args)]
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(args), found)

    def place(self, *args: Any) -> Any:
        """The arguments on the mesh, from values that every process has whole; a run whose processes differ ends.

        With compressed messages the first comes back as `Remembered`, nothing left out yet.
        """
        agreement.same_values(self.mesh, self.step, args)
        placed = jax.tree.map(_placed, args, self.shardings(*args))
        if self.options.wire is not None:
            placed = (Remembered(placed[0], self._nothing_left_out(args)), *placed[1:])
        return placed if len(args) > 1 else placed[0]

    def _nothing_left_out(self, args: tuple[Any, ...]) -> tuple[jax.Array, ...]:
        divided, layouts = self.divided(args), self.layouts(*args)
        shapes = [_struct(leaf) for leaf in jax.tree_util.tree_leaves(args)]
        _, errors = jax.eval_shape(functools.partial(self._run, divided, layouts, errors=None), shapes)
        own = NamedSharding(self.mesh, self._spec(split(0)))
        make = jax.jit(lambda: [jax.numpy.zeros(one.shape, one.dtype) for one in errors], out_shardings=own)
        return tuple(make())

    def assemble(self, batch: Any, position: int | None = None) -> Any:
        """The global batch from each process's own rows: equally many, in the order of the processes.

        All processes call it, once for each step. Where one brings another number of rows, the run ends and names it.

        Args:
          position: of the argument; by default the first that is divided.
        """
        position = self.options.batch_argnums[0] if position is None else position
        if not isinstance(self.mesh, Mesh):
            raise MeshError(
                "an AbstractMesh has no devices to put a batch on. Make the step with memplan.parallel.mesh()."
            )
        agreement.same_rows(self.mesh, self.step, position, batch)
        processes = len({device.process_index for device in self.mesh.devices.flat})

        def whole(leaf: Any) -> jax.ShapeDtypeStruct:
            shape = list(np.shape(leaf))
            if len(shape) > self.options.batch_axis:
                shape[self.options.batch_axis] *= processes
            return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

        shapes = jax.tree.map(whole, batch)

        def assembled(path: Any, leaf: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
            layout = self._batch_layout(position, jax.tree_util.keystr(path), shape)
            sharding = NamedSharding(self.mesh, self._spec(layout))
            if compat.is_key(leaf):
                data = assembled(path, jax.random.key_data(leaf), jax.eval_shape(jax.random.key_data, shape))
                return jax.random.wrap_key_data(data, impl=compat.key_impl_of(leaf.dtype))
            return jax.make_array_from_process_local_data(sharding, np.asarray(leaf), shape.shape)

        return jax.tree_util.tree_map_with_path(assembled, batch, shapes)

    def layouts(self, *args: Any, **kwargs: Any) -> list[Layout]:
        """The layout of every leaf of the arguments; those that only a name says are never the batch.

        Raises:
          MeshError: a batch that cannot be divided.
        """
        found = []
        for position, arg in [*enumerate(args), *((None, kwargs[name]) for name in sorted(kwargs))]:
            for path, leaf in jax.tree_util.tree_flatten_with_path(arg)[0]:
                name = jax.tree_util.keystr(path)
                if position in self.options.batch_argnums:
                    found.append(self._batch_layout(position, name, leaf))
                else:
                    found.append(self._state_layout(name, leaf))
        return found

    def _batch_layout(self, position: int, name: str, leaf: Leaf) -> Layout:
        shape, axis = jax.numpy.shape(leaf), self.options.batch_axis
        if len(shape) <= axis:
            return WHOLE  # a scalar of the batch: the same for all
        if shape[axis] % self.devices:
            near = _nearest(shape[axis], self.devices)
            raise MeshError(
                f"the global batch of {shape[axis]} (argument {position}{name}, dimension {axis}) cannot be divided "
                f"equally among {self.devices} devices. Take {near}, or a mesh whose number of "
                f"devices divides {shape[axis]}."
            )
        return split(axis)

    def _state_layout(self, name: str, leaf: Leaf) -> Layout:
        """Parts of state that is to be divided, along the largest dimension that can be."""
        if self.options.split_state is None:
            return WHOLE
        wanted = (
            self.options.split_state in name
            if isinstance(self.options.split_state, str)
            else self.options.split_state(name, leaf)
        )
        shape = jax.numpy.shape(leaf)
        dims = [dim for dim, size in enumerate(shape) if size and size % self.devices == 0]
        return split(max(dims, key=lambda dim: shape[dim])) if wanted and dims and self.devices > 1 else WHOLE

    def divided(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Divided:
        """The step's equations with layouts, for the shapes of these (global) arguments."""
        leaves, tree = jax.tree_util.tree_flatten((tuple(args), dict(kwargs or {})))
        shapes = [_struct(leaf) for leaf in leaves]
        key = tree, tuple((one.shape, one.dtype, one.weak_type) for one in shapes)
        if key not in self._known:
            self._known[key] = self._divide(*jax.tree_util.tree_unflatten(tree, shapes))
        return self._known[key]

    def _divide(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Divided:
        traced = jax.jit(self.step).trace(*args, **kwargs)
        layouts = self.layouts(*args, **kwargs)
        wanted = self._wanted(args, layouts, traced.out_info)
        flat = flatten(traced.jaxpr)
        refuse(flat)

        assigned = sunk(assign(flat, layouts, wanted, self.devices, self.options.statistics == DEVICE))
        agreement.same_step(self.mesh, self.step, assigned.jaxpr, (self.options, self.topology, self.device.name))
        for told in dict.fromkeys(map(_told, gathers(assigned))):
            warnings.warn(told, stacklevel=2)
        return Divided(
            assigned, buckets(assigned, self.topology, self.device, self.options.wire is not None), traced.out_tree
        )

    def _wanted(self, args: tuple[Any, ...], layouts: Sequence[Layout], out: Any) -> list[Wanted]:
        """Outputs that take the place of an argument have its layouts; of others, what is split stays so."""
        by_tree: dict[Any, list[Layout]] = {}
        start = 0
        for position, arg in enumerate(args):
            leaves, tree = jax.tree_util.tree_flatten(arg)
            if position not in self.options.batch_argnums and leaves:
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
    mesh: Mesh | AbstractMesh | None = None,
    *,
    batch_argnums: int | Sequence[int] = 1,
    batch_axis: int = 0,
    topology: Topology | str | None = None,
    split_state: SplitState = None,
    statistics: str = GLOBAL,
    decompose: bool = True,
    compress: str | None = None,
    device: str | None = None,
) -> DataParallel:
    """The step of one device at the global batch, computed by all devices of a mesh.

    Args:
      step: `step(state, batch)`, pure, written for one device; nothing in it knows of devices.
      mesh: one axis per level of the machine, outermost first; by default all devices (`memplan.parallel.mesh`). An
        `AbstractMesh` for devices that are not here, to plan only.
      batch_argnums: arguments of which every device gets a part; the rest it has whole.
      batch_axis: dimension of their leaves that is divided.
      topology: links between the devices; axes as in the mesh.
      split_state: what each device keeps and updates a part of: a name in the path of leaves (`"opt_state"`), or a
        function of (path, leaf).
      statistics: of the batch, where they go back into the network: `"global"`, as on one device, or `"device"`, each
        device's own, over its part of the batch (no communication in the middle of the network, and other numbers).
      decompose: send every sum in the phases that cost least; False: in one, for XLA or the engine to decompose.
      compress: `"bfloat16"` or `"float16"` for gradients on the slowest links, with error feedback; the step then takes
        and returns the state as `place` makes it.
      device: what each of them is, by name; None: what jax runs on. It says when gradients are ready to be sent.

    Its numbers are those of one device but for the order of sums: random draws too, also from a key of each example.
    What cannot be divided along the batch as it lies (a sort of it, a concatenation) is gathered, with a warning that
    names the line. `jax.debug.print` prints once, what one device would.

    Raises:
      MemplanError: an option that cannot be; when the step is first traced, a batch that cannot be divided (MeshError),
        or a step that places its arrays itself, is written for several devices, or has effects that would come once
        for each device (UnsupportedProgramError), with its line.
    """
    if statistics not in (GLOBAL, DEVICE):
        raise MemplanError(f"statistics is {statistics!r}; it is {GLOBAL!r} or {DEVICE!r}.")
    if decompose and XLA_DECOMPOSES in os.environ.get("XLA_FLAGS", ""):
        raise MemplanError(
            f"XLA_FLAGS lets XLA decompose all-reduces ({XLA_DECOMPOSES}), and so would this step. Leave out the flag, "
            "or pass decompose=False."
        )
    if compress is not None and compress not in WIRES:
        raise MemplanError(f"gradients cannot travel as {compress!r}; compress is one of {', '.join(WIRES)}, or None.")
    if compress is not None and split_state is not None:
        raise MemplanError("parts of sums are not compressed: give data_parallel either split_state or compress.")
    mesh = meshes.mesh() if mesh is None else mesh
    kind = catalog.named(device) if device is not None else local_device()
    positions = (batch_argnums,) if isinstance(batch_argnums, int) else tuple(batch_argnums)
    options = Options(positions, batch_axis, split_state, decompose, compress, statistics)
    return DataParallel(step, mesh, meshes.fitted(topology, mesh), kind, options)


def _told(gathered: Gathered) -> str:
    eqn, atom, divides = gathered
    line = compat.relative(compat.source_of(eqn)) or "an unknown line"
    work = "its part" if divides else "all of it"
    return (
        f"{eqn.primitive.name} at {line} cannot be divided along the batch as it lies: every device gathers its "
        f"operand {atom.aval.str_short()} and computes {work}; what follows is divided where it can be."
    )


def _placed(leaf: Leaf, sharding: NamedSharding) -> jax.Array:
    """A key is placed by its words: jax puts no typed key on devices of other processes."""
    array = jax.numpy.asarray(leaf)
    if compat.is_key(array):
        data = _placed(jax.random.key_data(array), sharding)
        return jax.random.wrap_key_data(data, impl=compat.key_impl_of(array.dtype))
    known = np.asarray(array)
    return jax.make_array_from_callback(known.shape, sharding, lambda index: known[index])


def _nearest(size: int, devices: int) -> str:
    """Batches that can be divided, as `8 or 16`."""
    below = size // devices * devices
    return f"{below} or {below + devices}" if below else str(devices)


def _struct(leaf: Leaf) -> jax.ShapeDtypeStruct:
    typed = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return compat.as_struct(leaf if typed else jax.typeof(leaf))


def _types(leaves: Sequence[Leaf]) -> tuple[Any, ...]:
    return tuple((leaf.shape, leaf.dtype) for leaf in map(_struct, leaves))
