"""Makes a data-parallel step over a mesh from a step for one device."""

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from memplan.errors import MemplanError, MeshError
from memplan.hardware import catalog
from memplan.hardware.device import Device
from memplan.hardware.topology import Topology
from memplan.parallel import agreement, meshes
from memplan.parallel.divide import (
    DEVICE,
    GLOBAL,
    Divided,
    Leaf,
    Options,
    SplitState,
    batch_placement,
    divide,
    placements,
    struct_of,
)
from memplan.parallel.emit.collectives import Collectives, Sum, trusts_reduce_scatter
from memplan.parallel.emit.compression import WIRE_DTYPES, Compressor, Remembered
from memplan.parallel.emit.lower import lower
from memplan.parallel.partition.sharded import Placement, Shard
from memplan.program import compat
from memplan.program.sharding import XLA_DECOMPOSES
from memplan.xla.local import local_device


@dataclass(eq=False, repr=False)
class DataParallel:
    """What `data_parallel` returns: called with global arrays inside `jax.jit` or `memplan.jit`.

    Attributes:
      sums: the buckets that were reduced when it was last traced.
    """

    step: Callable[..., Any]
    mesh: Mesh | AbstractMesh
    topology: Topology
    device: Device
    options: Options
    sums: tuple[Sum, ...] = ()
    _known: dict[Any, Divided] = field(default_factory=dict)  # by the tree and types of the arguments

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.step)
        self.decomposes, self.devices = self.options.decompose, self.topology.devices

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compresses, errors = self.options.compress is not None, ()
        if compresses:
            if not args or not isinstance(args[0], Remembered):
                raise MemplanError(
                    "a step with compressed messages also carries their rounding errors: its first argument is what "
                    "place(state, batch) returns for the state, and then what the step itself returns."
                )
            args, errors = (args[0].state, *args[1:]), args[0].errors
        if kwargs:  # `batch_argnums` counts positions
            try:
                bound = inspect.signature(self.step).bind(*args, **kwargs)
            except TypeError as error:
                raise MemplanError(f"the step does not take these arguments: {error}.") from error
            args, kwargs = bound.args, bound.kwargs
        divided = self.divided(args, kwargs)
        leaves = jax.tree_util.tree_leaves((args, kwargs))
        results, after = self._run(divided, self.layouts(*args, **kwargs), leaves, errors)
        out = jax.tree_util.tree_unflatten(divided.out_tree, results)
        if not compresses:
            return out
        if type(out) is tuple:
            return (Remembered(out[0], tuple(after)), *out[1:])
        return Remembered(out, tuple(after))

    def divided(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Divided:
        """How the step is divided for the shapes of these (global) arguments."""
        leaves, tree = jax.tree_util.tree_flatten((tuple(args), dict(kwargs or {})))
        shapes = [struct_of(leaf) for leaf in leaves]
        key = tree, tuple((one.shape, one.dtype, one.weak_type) for one in shapes)
        if key not in self._known:
            given = jax.tree_util.tree_unflatten(tree, shapes)
            self._known[key] = divide(self.step, self.mesh, self.topology, self.device, self.options, *given)
        return self._known[key]

    def _run(
        self, divided: Divided, inputs: Sequence[Placement], leaves: Sequence[Any], errors: Sequence[Any] | None
    ) -> tuple[list[Any], list[Any]]:
        """Results of the step, and the rounding errors of compressed messages."""
        own = self._spec(Shard(0))
        run = jax.shard_map(
            functools.partial(self.local, divided),
            mesh=self.mesh if any(map(meshes.is_typed, leaves)) else meshes.untyped(self.mesh),
            in_specs=(list(map(self._spec, inputs)), own),
            out_specs=(list(map(self._spec, divided.sharded.outputs)), own),
            check_vma=False,
        )
        return run(list(leaves), errors)

    def local(
        self, divided: Divided, parts: Sequence[Any], before: Sequence[Any] | None
    ) -> tuple[list[Any], list[Any]]:
        """What one device runs: results in their placements, and the rounding errors of its compressed messages.

        Args:
          parts: the device's part of every leaf of the arguments.
          before: errors of the last step; None if only shapes are computed.
        """
        compressor = Compressor(self.options.compress, before) if self.options.compress else None
        collectives = Collectives(self.topology, self.options.decompose, compressor, trusts_reduce_scatter(self.mesh))
        results = lower(divided.sharded, collectives, parts, divided.buckets)
        self.sums = tuple(collectives.sums)
        return results, compressor.after if compressor else []

    def _spec(self, placement: Placement) -> PartitionSpec:
        if not isinstance(placement, Shard):
            return PartitionSpec()
        return PartitionSpec(*(None,) * placement.dim, tuple(self.topology.sizes))

    @property
    def whole(self) -> NamedSharding:
        """The sharding of replicated arrays."""
        return NamedSharding(self.mesh, PartitionSpec())

    def layouts(self, *args: Any, **kwargs: Any) -> list[Placement]:
        """The placement of every leaf of the arguments; keyword arguments are never the batch.

        Raises:
          MeshError: the batch cannot be divided.
        """
        return placements(args, kwargs, self.options, self.devices)

    def shardings(self, *args: Any) -> Any:
        """The sharding of every leaf of the arguments (arrays or shapes)."""
        found = [NamedSharding(self.mesh, self._spec(placement)) for placement in self.layouts(*args)]
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(args), found)

    def place(self, *args: Any) -> Any:
        """The arguments on the mesh, from values that every process has whole.

        With compressed messages the first comes back as `Remembered`, with errors of zero.
        """
        agreement.same_state(self.mesh, self.step, args)
        placed = jax.tree.map(_placed, args, self.shardings(*args))
        if self.options.compress is not None:
            divided, inputs = self.divided(args), self.layouts(*args)
            shapes = [struct_of(leaf) for leaf in jax.tree_util.tree_leaves(args)]
            _, errors = jax.eval_shape(functools.partial(self._run, divided, inputs, errors=None), shapes)
            own = NamedSharding(self.mesh, self._spec(Shard(0)))
            zeros = jax.jit(lambda: tuple(jax.numpy.zeros(one.shape, one.dtype) for one in errors), out_shardings=own)
            placed = (Remembered(placed[0], zeros()), *placed[1:])
        return placed if len(args) > 1 else placed[0]

    def assemble(self, batch: Any, position: int | None = None) -> Any:
        """The global batch from the rows of each process: equally many, in the order of the processes.

        All processes call it, once for each step.

        Args:
          position: of the argument; by default the first that is divided.
        """
        position = self.options.batch_argnums[0] if position is None else position
        if not isinstance(self.mesh, Mesh):
            raise MeshError(
                "an AbstractMesh has no devices to put a batch on. Make the step with memplan.parallel.mesh()."
            )
        processes = len({device.process_index for device in self.mesh.devices.flat})

        def whole(leaf: Any) -> jax.ShapeDtypeStruct:
            shape = list(np.shape(leaf))
            if len(shape) > self.options.batch_axis:
                shape[self.options.batch_axis] *= processes
            return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

        shapes = jax.tree.map(whole, batch)

        def assembled(path: Any, leaf: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
            name = jax.tree_util.keystr(path)
            placement = batch_placement(position, name, shape, self.options, self.devices)
            sharding = NamedSharding(self.mesh, self._spec(placement))
            if compat.is_key(leaf):
                data = assembled(path, jax.random.key_data(leaf), jax.eval_shape(jax.random.key_data, shape))
                return jax.random.wrap_key_data(data, impl=compat.key_impl_of(leaf.dtype))
            return jax.make_array_from_process_local_data(sharding, np.asarray(leaf), shape.shape)

        return jax.tree_util.tree_map_with_path(assembled, batch, shapes)


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
    """A step that computes on all devices of a mesh what the given step computes on one device at the global batch.

    Args:
      step: `step(state, batch)`, pure, written for one device.
      mesh: one axis per level of the machine, outermost first; by default all devices (`memplan.parallel.mesh`). With
        an `AbstractMesh` the step can be planned for absent devices.
      batch_argnums: arguments that are divided among the devices; the others are replicated.
      batch_axis: dimension of their leaves that is divided.
      topology: links between the devices; axes as in the mesh.
      split_state: leaves of which each device keeps and updates a part: a name in their path (`"opt_state"`), or a
        function of (path, leaf).
      statistics: batch statistics (batch norm) are `"global"`, as on one device, or `"device"`: each device takes its
        own part of the batch, which needs no communication within the network and gives other numbers.
      decompose: all-reduce in the phases that cost least; False: in one phase, which XLA or the engine may decompose.
      compress: `"bfloat16"` or `"float16"` for gradients on the slowest links, with error feedback; the step then takes
        and returns the state as `place` makes it.
      device: name of the devices; None: those that jax runs on. It predicts when gradients are ready to be sent.

    Results differ from those of one device only by the order of sums; random draws are the same, also from a key per
    example. An operation that cannot be divided along the batch (a sort of it, a concatenation) gathers its operand,
    with a warning that names the line. `jax.debug.print` prints once, what one device would print.

    Raises:
      MemplanError: an option is wrong; when the step is first traced: the batch cannot be divided (MeshError), or the
        step places its arrays itself, is written for several devices, or has effects that would happen once for each
        device (UnsupportedProgramError, with the line).
    """
    if statistics not in (GLOBAL, DEVICE):
        raise MemplanError(f"statistics is {statistics!r}; it is {GLOBAL!r} or {DEVICE!r}.")
    if decompose and XLA_DECOMPOSES in os.environ.get("XLA_FLAGS", ""):
        raise MemplanError(
            f"XLA_FLAGS lets XLA decompose all-reduces ({XLA_DECOMPOSES}), and so would this step. Leave out the flag, "
            "or pass decompose=False."
        )
    if compress is not None and compress not in WIRE_DTYPES:
        raise MemplanError(
            f"gradients cannot travel as {compress!r}; compress is one of {', '.join(WIRE_DTYPES)}, or None."
        )
    if compress is not None and split_state is not None:
        raise MemplanError("parts of sums are not compressed: give data_parallel either split_state or compress.")
    mesh = meshes.mesh() if mesh is None else mesh
    kind = catalog.named(device) if device is not None else local_device()
    positions = (batch_argnums,) if isinstance(batch_argnums, int) else tuple(batch_argnums)
    options = Options(positions, batch_axis, split_state, decompose, compress, statistics)
    return DataParallel(step, mesh, meshes.topology_for(topology, mesh), kind, options)


def _placed(leaf: Leaf, sharding: NamedSharding) -> jax.Array:
    """A key is placed by its words: jax puts no typed key on devices of other processes."""
    array = jax.numpy.asarray(leaf)
    if compat.is_key(array):
        data = _placed(jax.random.key_data(array), sharding)
        return jax.random.wrap_key_data(data, impl=compat.key_impl_of(array.dtype))
    known = np.asarray(array)
    return jax.make_array_from_callback(known.shape, sharding, lambda index: known[index])
