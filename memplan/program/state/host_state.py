"""State in host memory: arguments that stay there, and are streamed to the device and back.

In the jaxpr such an argument is read through a `device_put` to the device, and its update is
returned through a `device_put` to the host. XLA makes an asynchronous pair of each, which a plan
runs once: between two reads, the fetched array stays on the device, or is offloaded and fetched
like any other value. Stacks of layers stay on the host and are read and written by slices
(`layerwise_state`).
"""

import functools
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax

from memplan.errors import MemplanError, PlanMismatchError
from memplan.planning.transforms import StateOnHost
from memplan.program import compat
from memplan.program.flat import flatten
from memplan.program.host_memory import DEVICE, HOST
from memplan.program.interpret import bindings, interpret_eqns
from memplan.program.jit_arguments import infer_static
from memplan.program.state.layerwise import (
    LayerwiseState,
    StreamedScan,
    Update,
    UpdatingScan,
    layerwise_state,
)
from memplan.program.trace import Program, WithStateOnHost

# Leaves of fewer bytes stay on the device.
_LEAST_NBYTES = 1 << 20


def offload_state(program: Program, inputs: Collection[int], streams: bool = True) -> Program:
    """The program with inputs in host memory, and with the outputs that take their donated buffers.

    Args:
      inputs: positions of the inputs.
      streams: the step itself copies them to the device; False if its caller does.

    Raises:
      PlanMismatchError: the program has no such inputs.
    """
    on_host = frozenset(inputs)
    if not on_host:
        return program
    if not on_host.issubset(range(len(program.flat.invars))):
        raise PlanMismatchError(
            "the plan keeps arguments in host memory that this step does not have. Plan again.",
        )
    stream = _Stream(program, on_host)
    transform = StateOnHost(tuple(sorted(on_host)), streams)
    applied = WithStateOnHost(transform, frozenset(stream.returned))
    return program.transformed(applied, stream.rewritten() if streams else program.rewritten)


def large_leaves(program: Program, argnums: Collection[int]) -> frozenset[int]:
    """Positions of inputs that belong to these arguments and are large enough to offload."""
    inputs = program.flat.invars
    positions = (position for number in argnums for position in positions_of(program, number))
    nbytes = {position: compat.nbytes_of(inputs[position].aval) for position in positions}
    return frozenset(position for position in nbytes if nbytes[position] >= _LEAST_NBYTES)


def positions_of(program: Program, argnum: int) -> range:
    """Positions of the inputs that an argument consists of.

    Args:
      argnum: position of the argument; static ones count, as in `jax.jit`.

    Raises:
      MemplanError: the step has no such argument with arrays.
    """
    counts = [argument.num_leaves for argument in program.traced.arguments]
    static, _ = infer_static(program.step, len(counts), program.options)
    # negative positions count from the end of all arguments, static ones included
    static, _ = infer_static(program.step, len(counts) + len(static), program.options)
    dynamic = argnum - sum(position < argnum for position in static)
    if argnum in static or not 0 <= dynamic < len(counts):
        count = f"{len(counts)} arguments with arrays"
        raise MemplanError(
            f"argument {argnum} cannot be kept in host memory: the step has {count}.",
        )
    first = sum(counts[:dynamic])
    return range(first, first + counts[dynamic])


def place_argument(program: Program, argument: Any, argnum: int) -> Any:
    """Move an argument's leaves to the memory in which the program has them."""
    leaves, tree = jax.tree_util.tree_flatten(argument)
    positions = positions_of(program, argnum)
    if len(leaves) != len(positions):
        raise MemplanError(
            f"the step was planned for an argument of {len(positions)} leaves, not {len(leaves)}.",
        )
    division = program.traced.division
    placed = list[jax.Array]()
    for leaf, position in zip(leaves, positions, strict=True):
        sharding = division.inputs[position] if division else None
        placed.append(place_leaf(leaf, position in program.on_host, sharding))
    return jax.tree_util.tree_unflatten(tree, placed)


def to_device(leaf: Any) -> Any:
    """Move a leaf in host memory to the device; return others unchanged."""
    if isinstance(leaf, jax.Array) and _is_pinned(leaf):
        return place_leaf(leaf, on_host=False)
    return leaf


def as_traced(leaf: Any) -> Any:
    """The leaf with which to trace the step: for one in host memory, its shape on the device."""
    if not _is_pinned(leaf):
        return leaf
    sharding = compat.placement_of(leaf, any_memory=True)
    weak_type = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak_type)


def place_leaf(leaf: Any, on_host: bool, sharding: Any = None) -> jax.Array:
    """Move a leaf to device memory, or to host memory that its device can read.

    Args:
      sharding: its devices; None means those of a committed array, or the first local device.
    """
    first = jax.local_devices()[0]
    if sharding is None:
        is_committed = isinstance(leaf, jax.Array) and leaf.committed
        sharding = leaf.sharding if is_committed else jax.sharding.SingleDeviceSharding(first)
    kind = compat.PINNED if on_host else first.default_memory().kind
    return jax.device_put(leaf, sharding.with_memory_kind(kind))


def _is_pinned(leaf: Any) -> bool:
    return getattr(getattr(leaf, "sharding", None), "memory_kind", None) == compat.PINNED


class _Stream:
    """Rewrites a step so that it fetches inputs from the host, before the first read or by layers.

    Attributes:
      on_host: variables of the inputs on the host.
      returned: position of an output -> position of the donated input on the host whose buffer it
        takes.
    """

    def __init__(self, program: Program, on_host: frozenset[int]):
        self.flat = flat = program.flat
        self.on_host = frozenset(flat.invars[position] for position in on_host)
        flags = enumerate(zip(program.donated, program.kept(flat.closed), strict=True))
        donated = [position for position, (is_donated, is_kept) in flags if is_donated and is_kept]
        pairs = donation_pairs(flat.invars, flat.outvars, donated)
        self.returned = {number: position for number, position in pairs if position in on_host}

    def rewritten(self) -> compat.ClosedJaxpr:
        flat = self.flat
        returned = self.returned.items()
        aliases = {flat.outvars[output]: flat.invars[position] for output, position in returned}
        state = layerwise_state(flat, self.on_host, aliases)
        return flatten(flat.retraced(functools.partial(self._run, state)))

    def _run(self, state: LayerwiseState, *operands: Any) -> list[Any]:
        outvars = self.flat.outvars
        env = bindings(self.flat.closed, operands)
        for var in filter(self.on_host.__contains__, self.flat.invars):
            if var in state.stacks:
                env[var] = jax.device_put(env[var], HOST)
            else:
                env[var] = _Streamed(env[var])
        values = interpret_eqns(state.equations, env, outvars, _results, nullcontext)
        results = list[Any]()
        for output, result in enumerate(map(_on_device, values)):
            is_copied = output in self.returned and outvars[output] not in state.in_place
            results.append(jax.device_put(result, HOST) if is_copied else result)
        return results


@dataclass(frozen=True)
class _Streamed:
    """An input on the host, fetched when it is first read."""

    leaf: Any

    @functools.cached_property
    def on_device(self) -> Any:
        return jax.device_put(self.leaf, DEVICE)


def _on_device(value: Any) -> Any:
    """A value, fetched if it is an input on the host."""
    return value.on_device if isinstance(value, _Streamed) else value


def _results(
    eqn: compat.JaxprEqn | Update | StreamedScan | UpdatingScan,
    operands: Sequence[Any],
) -> list[Any]:
    """The results of an equation."""
    # in no context, since copies belong to no line of the user's
    operands = list(map(_on_device, operands))
    if isinstance(eqn, Update):
        return eqn.run(operands)
    if isinstance(eqn, StreamedScan | UpdatingScan):
        with compat.user_context(eqn.eqn):
            return eqn.run(operands)
    with compat.user_context(eqn):
        return compat.bind(eqn, operands)


def donation_pairs(
    inputs: Sequence[Any], outputs: Sequence[Any], donated: Collection[int]
) -> Iterator[tuple[int, int]]:
    """Yield (output, donated input whose buffer it takes), by position.

    As in jax, an output takes the first free input of its type.
    """
    free: dict[Any, list[int]] = {}
    for position in sorted(donated):
        aval = inputs[position].aval
        free.setdefault((aval.shape, aval.dtype), []).append(position)
    for output, atom in enumerate(outputs):
        positions = free.get((atom.aval.shape, atom.aval.dtype))
        if positions and compat.is_var(atom):
            yield output, positions.pop(0)
