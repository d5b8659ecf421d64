"""The shardings of a data-parallel step, written for a step that knows one device."""

import functools
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

_BATCH, _DEPTH = "batch", "depth"
_NO_DEVICES = "an AbstractMesh has no devices to put a {} on. Make the step with memplan.parallel.mesh()."


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
        given = jax.tree.map(_constrained, args, shardings)
        replicated = jax.tree.map(lambda leaf: _constrained(leaf, self.whole), kwargs)
        return self._like_arguments(args, shardings, self.step(*given, **replicated))

    def _like_arguments(self, args: Sequence[Any], shardings: Sequence[Any], out: Any) -> Any:
        """The results, of which one with the tree and types of an argument gets its shardings: the new state."""
        known = {}
        for position, (arg, sharding) in enumerate(zip(args, shardings, strict=True)):
            if position not in self.batch_argnums:
                known.setdefault(_types(arg), sharding)
        parts = out if type(out) is tuple else (out,)
        wanted = [known.get(_types(part)) for part in parts]
        pairs = zip(parts, wanted, strict=True)
        found = tuple(part if like is None else jax.tree.map(_constrained, part, like) for part, like in pairs)
        return found if type(out) is tuple else found[0]

    @property
    def whole(self) -> NamedSharding:
        """The sharding of replicated arrays."""
        return NamedSharding(_auto(self.mesh), PartitionSpec())

    def shardings(self, *args: Any) -> Any:
        """The sharding of every leaf of the arguments (arrays or shapes).

        Raises:
          MeshError: the batch cannot be divided.
        """

        def of(position: int, path: Any, leaf: Any) -> NamedSharding:
            name = jax.tree_util.keystr(path)
            if position in self.batch_argnums:
                return self._batch_sharding(position, name, leaf)
            return NamedSharding(_auto(self.mesh), self._state_spec(name, leaf))

        return tuple(
            jax.tree_util.tree_map_with_path(functools.partial(of, position), arg) for position, arg in enumerate(args)
        )

    def _batch_sharding(self, position: int, name: str, leaf: Leaf) -> NamedSharding:
        """The sharding of one leaf of the batch, called `name` in the argument at `position`."""
        shape = jax.numpy.shape(leaf)
        axes: list[list[str]] = [[] for _ in shape]
        for axis, dim in self.space.items():
            if dim < len(shape):  # a scalar is the same for all examples
                axes[dim].append(axis)
        for dim, names in enumerate(axes):
            parts = int(np.prod([self.mesh.shape[one] for one in names], dtype=int))
            if shape[dim] % parts:
                below = shape[dim] // parts * parts
                what = "global batch" if dim == self.batch_axis else f"size {shape[dim]} of dimension {dim}"
                raise MeshError(
                    f"the {what} of {shape[dim]} (argument {position}{name}, dimension {dim}) cannot be divided "
                    f"equally among {parts} devices. Take {f'{below} or ' if below else ''}{below + parts}, or a mesh "
                    f"whose number of devices divides {shape[dim]}."
                )
        return NamedSharding(_auto(self.mesh), PartitionSpec(*(tuple(names) or None for names in axes)))

    def _state_spec(self, name: str, leaf: Leaf) -> PartitionSpec:
        """State that `split_state` names is divided along its largest dimension that can be; the rest is replicated."""
        if self.split_state is None:
            return PartitionSpec()
        wanted = self.split_state in name if isinstance(self.split_state, str) else self.split_state(name, leaf)
        shape, devices = jax.numpy.shape(leaf), self.mesh.size
        dims = [dim for dim, size in enumerate(shape) if size and size % devices == 0]
        if not wanted or not dims:
            return PartitionSpec()
        return PartitionSpec(*(None,) * max(dims, key=lambda dim: shape[dim]), tuple(self.mesh.axis_names))

    def place(self, *args: Any) -> Any:
        """The arguments on the mesh, from values that every process has whole.

        Raises:
          MemplanError: processes have other values; names the ranks and the leaf.
          MeshError: the mesh has no devices.
        """
        if not isinstance(self.mesh, Mesh):
            raise MeshError(_NO_DEVICES.format("state"))
        agreement.same_state(meshes.processes_of(self.mesh.devices.flat), self.step, args)
        placed = jax.tree.map(_placed, args, self.shardings(*args))
        return placed if len(args) > 1 else placed[0]

    def assemble(self, batch: Any, position: int | None = None) -> Any:
        """The global batch from the rows of each process: equally many, in the order of the processes.

        All processes call it, once for each step.

        Args:
          position: of the argument; by default the first that is divided.
        """
        position = self.batch_argnums[0] if position is None else position
        if not isinstance(self.mesh, Mesh):
            raise MeshError(_NO_DEVICES.format("batch"))
        processes = len({device.process_index for device in self.mesh.devices.flat})

        def whole(leaf: Any) -> jax.ShapeDtypeStruct:
            shape = list(np.shape(leaf))
            if len(shape) > self.batch_axis:
                shape[self.batch_axis] *= processes
            return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

        def assembled(path: Any, leaf: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
            if compat.is_key(leaf):
                data = assembled(path, jax.random.key_data(leaf), jax.eval_shape(jax.random.key_data, shape))
                return jax.random.wrap_key_data(data, impl=compat.key_impl_of(leaf.dtype))
            sharding = self._batch_sharding(position, jax.tree_util.keystr(path), shape)
            return jax.make_array_from_process_local_data(sharding, np.asarray(leaf), shape.shape)

        return jax.tree_util.tree_map_with_path(assembled, batch, jax.tree.map(whole, batch))


def data_parallel(
    step: Callable[..., Any],
    mesh: Mesh | AbstractMesh | None = None,
    *,
    batch_argnums: int | Sequence[int] = 1,
    batch_axis: int = 0,
    space: Space | None = None,
    split_state: SplitState = None,
) -> DataParallel:
    """A step whose arguments and results have the shardings of data parallelism; XLA divides the rest.

    It is what a user would write with `NamedSharding`s by hand, in one line: the batch divided among the devices, the
    state the same on each or in parts, the new state as the old one.

    Args:
      step: `step(state, batch)`, pure, written for one device.
      mesh: one axis per level of the machine, outermost first; by default all devices (`memplan.parallel.mesh`). With
        an `AbstractMesh` the step can be planned for absent devices (`memplan.jit(..., device=)`).
      batch_argnums: positional arguments that are divided; the others are replicated.
      batch_axis: dimension of their leaves that is divided.
      space: axis of the mesh -> the dimension that it divides, for arrays that are large in space: `"batch"`,
        `"depth"` (the dimension behind the batch) or a number. By default every axis divides the batch. XLA exchanges
        the rims that convolutions read.
      split_state: leaves of which each device keeps and updates a part: a name in their path (`"opt_state"`), or a
        function of (path, leaf).

    Raises:
      MeshError: `space` names no axis of the mesh, or something else than a dimension; when the step is called, the
        batch cannot be divided equally.
    """
    mesh = meshes.mesh() if mesh is None else mesh
    positions = (batch_argnums,) if isinstance(batch_argnums, int) else tuple(batch_argnums)
    dims = dict(_dims(space or dict.fromkeys(mesh.axis_names, _BATCH), mesh, batch_axis))
    return DataParallel(step, mesh, positions, batch_axis, dims, split_state)


def data_parallel_of(step: Callable[..., Any] | None) -> DataParallel | None:
    """The data-parallel step that a function is, or wraps."""
    while step is not None and not isinstance(step, DataParallel):
        step = getattr(step, "__wrapped__", None)
    return step


def _dims(space: Space, mesh: Mesh | AbstractMesh, batch_axis: int) -> Iterator[tuple[str, int]]:
    named = {_BATCH: batch_axis, _DEPTH: batch_axis + 1}
    for axis, dim in space.items():
        if axis not in mesh.axis_names:
            raise MeshError(f"space divides along {axis!r}; the mesh has the axes {', '.join(mesh.axis_names)}.")
        if not isinstance(dim, int) and dim not in named:
            raise MeshError(f"space divides {dim!r} along {axis!r}; it is 'batch', 'depth' or a dimension's number.")
        yield axis, dim if isinstance(dim, int) else named[dim]


def _constrained(leaf: Any, sharding: NamedSharding) -> Any:
    """The leaf with a sharding; one whose type has a sharding already (explicit axes) stays as it is."""
    if AxisType.Explicit in jax.typeof(leaf).sharding.mesh.axis_types:
        return leaf
    return jax.lax.with_sharding_constraint(leaf, sharding)


def _auto(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The mesh with axes of type Auto; `jax.make_mesh` makes Explicit ones, which put shardings into types."""
    auto = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=auto)
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=auto)


def _types(tree: Any) -> Any:
    """Something equal for trees of the same structure and types."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    return structure, tuple((jax.numpy.shape(leaf), jax.typeof(leaf).dtype) for leaf in leaves)


def _placed(leaf: Leaf, sharding: NamedSharding) -> jax.Array:
    """A key is placed by its words: jax puts no typed key on devices of other processes."""
    array = jax.numpy.asarray(leaf)
    if compat.is_key(array):
        data = _placed(jax.random.key_data(array), sharding)
        return jax.random.wrap_key_data(data, impl=compat.key_impl_of(array.dtype))
    known = np.asarray(array)
    return jax.make_array_from_callback(known.shape, sharding, lambda index: known[index])
