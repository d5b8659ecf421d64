"""The shardings of a data-parallel step, written for a step that knows one device."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from memplan.errors import MeshError
from memplan.parallel import agreement, meshes
from memplan.program import compat

Leaf = Any
SplitState = str | Callable[[str, Leaf], bool] | None
Space = Mapping[str, str | int]

_BATCH = "batch"
_DEPTH = "depth"
_NO_DEVICES = (
    "an AbstractMesh has no devices to put a {} on. Make the step with memplan.parallel.mesh()."
)


@dataclass(eq=False, repr=False)
class DataParallel:
    """What `data_parallel` returns: the step with shardings; for `memplan.jit`, or `jax.jit`."""

    step: Callable[..., Any]
    mesh: Mesh | AbstractMesh
    batch_argnums: tuple[int, ...]
    batch_axis: int
    space: Mapping[str, int]  # axis of the mesh -> dimension of the batch's arrays that it divides
    split_state: SplitState

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        shardings = self.shardings(*args)
        inputs = jax.tree.map(_constrained, args, shardings)
        replicated = jax.tree.map(lambda leaf: _constrained(leaf, self.whole), kwargs)
        return self._like_arguments(args, shardings, self.step(*inputs, **replicated))

    def _like_arguments(self, args: Sequence[Any], shardings: Sequence[Any], out: Any) -> Any:
        """Give a result with the tree and types of an argument (the new state) its shardings."""
        shardings_of_types = {}
        for position, (arg, sharding) in enumerate(zip(args, shardings, strict=True)):
            if position not in self.batch_argnums:
                shardings_of_types.setdefault(_types(arg), sharding)

        def constrained(result: Any) -> Any:
            sharding = shardings_of_types.get(_types(result))
            return result if sharding is None else jax.tree.map(_constrained, result, sharding)

        return tuple(map(constrained, out)) if type(out) is tuple else constrained(out)

    @property
    def whole(self) -> NamedSharding:
        """The sharding of replicated arrays."""
        return NamedSharding(_auto(self.mesh), PartitionSpec())

    def shardings(self, *args: Any) -> Any:
        """The sharding of every leaf of the arguments (arrays or shapes).

        Raises:
          MeshError: the batch cannot be divided.
        """

        def sharding(position: int, path: Any, leaf: Any) -> NamedSharding:
            name = jax.tree_util.keystr(path)
            if position in self.batch_argnums:
                return self._batch_sharding(position, name, leaf)
            return NamedSharding(_auto(self.mesh), self._state_spec(name, leaf))

        return tuple(
            jax.tree_util.tree_map_with_path(functools.partial(sharding, position), arg)
            for position, arg in enumerate(args)
        )

    def _batch_sharding(self, position: int, name: str, leaf: Leaf) -> NamedSharding:
        """The sharding of one leaf of the batch, called `name` in the argument at `position`."""
        shape = jax.numpy.shape(leaf)
        axes: list[list[str]] = [[] for _ in shape]
        for axis, dim in self.space.items():
            if dim < len(shape):  # a scalar is the same for all examples, so it is replicated
                axes[dim].append(axis)
        for dim, names in enumerate(axes):
            parts = math.prod(self.mesh.shape[axis] for axis in names)
            size = shape[dim]
            if size % parts:
                below = size // parts * parts
                sizes = f"{below} or {below + parts}" if below else str(parts)
                subject = (
                    "global batch" if dim == self.batch_axis else f"size {size} of dimension {dim}"
                )
                raise MeshError(
                    f"the {subject} of {size} (argument {position}{name}, dimension {dim}) cannot "
                    f"be divided equally among {parts} devices. Take {sizes}, or a mesh whose "
                    f"number of devices divides {size}."
                )
        return NamedSharding(
            _auto(self.mesh), PartitionSpec(*(tuple(names) or None for names in axes))
        )

    def _state_spec(self, name: str, leaf: Leaf) -> PartitionSpec:
        """Divide selected state along its largest divisible dimension; replicate the other."""
        if isinstance(self.split_state, str):
            selected = self.split_state in name
        else:
            selected = self.split_state is not None and self.split_state(name, leaf)
        shape = jax.numpy.shape(leaf)
        dims = [dim for dim, size in enumerate(shape) if size and size % self.mesh.size == 0]
        if not selected or not dims:
            return PartitionSpec()
        return PartitionSpec(
            *(None,) * max(dims, key=lambda dim: shape[dim]), tuple(self.mesh.axis_names)
        )

    def place(self, *args: Any) -> Any:
        """Put the arguments on the mesh; every process passes the full values.

        Raises:
          MemplanError: the values differ between processes; names the ranks and the leaf.
          MeshError: the mesh has no devices.
        """
        if not isinstance(self.mesh, Mesh):
            raise MeshError(_NO_DEVICES.format("state"))
        agreement.same_state(meshes.processes_with(self.mesh.devices.flat), self.step, args)
        arrays = jax.tree.map(_placed, args, self.shardings(*args))
        return arrays if len(args) > 1 else arrays[0]

    def assemble(self, batch: Any, position: int | None = None) -> Any:
        """The global batch, from equally many rows of each process, in the order of the processes.

        All processes call it, once for each step.

        Args:
          position: of the batch among the arguments. Default: the first that is divided.
        """
        position = self.batch_argnums[0] if position is None else position
        if not isinstance(self.mesh, Mesh):
            raise MeshError(_NO_DEVICES.format("batch"))
        processes = len({device.process_index for device in self.mesh.devices.flat})

        def global_shape(leaf: Any) -> jax.ShapeDtypeStruct:
            shape = list(np.shape(leaf))
            if len(shape) > self.batch_axis:
                shape[self.batch_axis] *= processes
            return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

        def assembled(path: Any, leaf: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
            if compat.is_key(leaf):
                words = jax.eval_shape(jax.random.key_data, shape)
                data = assembled(path, jax.random.key_data(leaf), words)
                return jax.random.wrap_key_data(data, impl=compat.key_impl_of(leaf.dtype))
            sharding = self._batch_sharding(position, jax.tree_util.keystr(path), shape)
            return jax.make_array_from_process_local_data(sharding, np.asarray(leaf), shape.shape)

        return jax.tree_util.tree_map_with_path(assembled, batch, jax.tree.map(global_shape, batch))


def data_parallel(
    step: Callable[..., Any],
    mesh: Mesh | AbstractMesh | None = None,
    *,
    batch_argnums: int | Sequence[int] = 1,
    batch_axis: int = 0,
    space: Space | None = None,
    split_state: SplitState = None,
) -> DataParallel:
    """A step whose arguments and results have the shardings of data parallelism.

    XLA partitions the step. This replaces `NamedSharding`s written by hand: the batch is divided
    among the devices, the state is replicated or divided, and the new state has the shardings of
    the old one.

    Args:
      step: `step(state, batch)`, pure, written for one device.
      mesh: one axis per level of the machine, outermost first. Default: all devices
        (`memplan.parallel.mesh`). With an `AbstractMesh`, the step can be planned for absent
        devices (`memplan.jit(..., device=)`).
      batch_argnums: positional arguments that are divided; the others are replicated.
      batch_axis: dimension of their leaves that is divided.
      space: axis of the mesh -> the dimension that it divides, for arrays that are large in space:
        `"batch"`, `"depth"` (the dimension behind the batch) or a number. By default every axis
        divides the batch. XLA exchanges the halos that convolutions read.
      split_state: leaves of which each device keeps and updates a part: a name in their path
        (`"opt_state"`), or a function of (path, leaf).

    Raises:
      MeshError: `space` names no axis of the mesh, or no dimension; when the step is called, the
        batch cannot be divided equally.

    Example:
      >>> import jax.numpy as jnp, memplan
      >>> from memplan import parallel
      >>> divided = parallel.data_parallel(lambda w, x: w - (x @ w).mean(), parallel.mesh())
      >>> w, x = divided.place(jnp.ones((8, 8)), jnp.ones((16, 8)))
      >>> memplan.jit(divided, budget="1MiB", donate_argnums=0)(w, x).shape
      (8, 8)
    """
    mesh = meshes.mesh() if mesh is None else mesh
    positions = (batch_argnums,) if isinstance(batch_argnums, int) else tuple(batch_argnums)
    dims = dict(_dims(space or dict.fromkeys(mesh.axis_names, _BATCH), mesh, batch_axis))
    return DataParallel(step, mesh, positions, batch_axis, dims, split_state)


def options_with_shardings(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Mapping[str, Any]:
    """The options of `jax.jit`, with the input shardings of a data-parallel step.

    Its arguments need not be placed then. Options for another step, one with keyword arguments, or
    one with shardings of its own are returned unchanged.
    """
    divided = _data_parallel_of(step)
    if divided is None or kwargs or "in_shardings" in options:
        return options
    return {**options, "in_shardings": divided.shardings(*args)}


def _data_parallel_of(step: Callable[..., Any] | None) -> DataParallel | None:
    """The data-parallel step that a function is, or wraps."""
    while step is not None and not isinstance(step, DataParallel):
        step = getattr(step, "__wrapped__", None)
    return step


def _dims(space: Space, mesh: Mesh | AbstractMesh, batch_axis: int) -> Iterator[tuple[str, int]]:
    named = {_BATCH: batch_axis, _DEPTH: batch_axis + 1}
    for axis, dim in space.items():
        if axis not in mesh.axis_names:
            names = ", ".join(mesh.axis_names)
            raise MeshError(f"space divides along {axis!r}; the mesh has the axes {names}.")
        if not isinstance(dim, int) and dim not in named:
            raise MeshError(
                f"space divides {dim!r} along {axis!r}; it is 'batch', 'depth' or a dimension's "
                "number."
            )
        yield axis, dim if isinstance(dim, int) else named[dim]


def _constrained(leaf: Any, sharding: NamedSharding) -> Any:
    """The leaf with a sharding, unless its type has one already (explicit axes)."""
    if AxisType.Explicit in jax.typeof(leaf).sharding.mesh.axis_types:
        return leaf
    return jax.lax.with_sharding_constraint(leaf, sharding)


def _auto(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The mesh with axes of type Auto: Explicit ones (`jax.make_mesh`) put shardings into types."""
    auto = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=auto)
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=auto)


def _types(tree: Any) -> Any:
    """A key that is equal for trees of the same structure and types."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    return structure, tuple((jax.numpy.shape(leaf), jax.typeof(leaf).dtype) for leaf in leaves)


def _placed(leaf: Leaf, sharding: NamedSharding) -> jax.Array:
    """The leaf on the mesh; jax puts no typed key on other processes' devices, only its words."""
    array = jax.numpy.asarray(leaf)
    if compat.is_key(array):
        data = _placed(jax.random.key_data(array), sharding)
        return jax.random.wrap_key_data(data, impl=compat.key_impl_of(array.dtype))
    values = np.asarray(array)
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])
