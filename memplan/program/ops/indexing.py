"""Gathers, scatters, and slices at computed offsets."""

from collections.abc import Sequence
from functools import partial as with_facts
from typing import Any

from memplan.program.ops.axes import Axes, Axis, Reduction, parallel, shape_of
from memplan.program.ops.record import Eqn, Primitive, of_operand, register


def _same_size(eqn: Eqn) -> Axes:
    """Every dimension in which all arrays with the result's rank have the same size."""
    rank = len(shape_of(eqn.outvars[0]))
    shapes = [shape for shape in map(shape_of, (*eqn.invars, *eqn.outvars)) if len(shape) == rank]
    return parallel(eqn, [dim for dim in range(rank) if len({shape[dim] for shape in shapes}) > 1])


def _indexed(
    atoms: Sequence[Any],
    window_dims: Any,
    dropped_dims: Any,
    batched: Any,
    batched_indices: Any,
    indexed_dims: Any,
) -> tuple[int, list[Axis], list[Axis]]:
    """The axes of a gather or scatter: those of the indices, and dimensions that slices have whole.

    Args:
      atoms: the array, the indices, the slices.
      window_dims: dimensions of the slices that are the array's.
      dropped_dims: dimensions of the array that the slices do not have.
      batched, batched_indices: batching dimensions of the array and of the indices.
      indexed_dims: dimensions of the array into which the indices point.

    Returns:
      The number of axes of the indices, the axes of the array, the axes of the slices.
    """
    shape, (*indices, _), slices = map(shape_of, atoms)
    axes = iter(range(len(indices)))
    pairs = dict(zip(batched, batched_indices, strict=True))
    sliced: list[Axis] = [None if dim in window_dims else next(axes) for dim in range(len(slices))]
    array: list[Axis] = [pairs.get(dim) for dim in range(len(shape))]
    window_axes = [dim for dim in range(len(shape)) if dim not in dropped_dims and dim not in pairs]
    for dim, window in zip(window_axes, window_dims, strict=True):
        if slices[window] == shape[dim] and dim not in indexed_dims:
            array[dim] = sliced[window] = len(indices) + dim
    return len(indices), array, sliced


def _gather(eqn: Eqn) -> Axes:
    numbers = eqn.params["dimension_numbers"]
    batched = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    dims = numbers.offset_dims, numbers.collapsed_slice_dims, *batched, numbers.start_index_map
    indices, operand, result = _indexed((*eqn.invars, *eqn.outvars), *dims)
    return Axes((tuple(operand), (*range(indices), None)), (tuple(result),))


def _slice_size(eqn: Eqn, axes: Axes, axis: int) -> int | None:
    """The index of an axis in `slice_sizes`.

    None for a batching dimension, along which every slice has one element, however many there are.
    """
    dim = of_operand(eqn, axes, axis)
    return None if dim in eqn.params["dimension_numbers"].operand_batching_dims else dim


def _scatter(eqn: Eqn, adds: bool = False) -> Axes:
    """Parallel along batching dimensions; if it adds, reduced along the indices' other dimensions.

    The parts of a sum are added, and the operand counts once.
    """
    numbers = eqn.params["dimension_numbers"]
    batched = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    dims = numbers.update_window_dims, numbers.inserted_window_dims
    indexed_dims = numbers.scatter_dims_to_operand_dims
    count, operand, update_axes = _indexed(eqn.invars, *dims, *batched, indexed_dims)
    not_batched = [axis for axis in range(count) if axis not in operand]
    blocked = () if adds else not_batched
    indices = tuple(None if axis in blocked else axis for axis in range(count))
    updates = tuple(None if axis in blocked else axis for axis in update_axes)
    masked = (0,) if adds else ()
    reduced: dict[int, Reduction] = dict.fromkeys(not_batched if adds else (), "sum")
    return Axes((tuple(operand), (*indices, None), updates), (tuple(operand),), reduced, masked)


_moved = with_facts(Primitive, "elementwise", moves_elements=True)
register("dynamic_slice", _moved(axes=_same_size, sizes=("slice_sizes", of_operand)))
register("dynamic_update_slice", _moved(axes=_same_size))
register("gather", _moved(axes=_gather, sizes=("slice_sizes", _slice_size)))
register("scatter scatter-max scatter-min scatter-mul scatter-sub", Primitive(axes=_scatter))
register("scatter-add", Primitive(axes=with_facts(_scatter, adds=True)))
