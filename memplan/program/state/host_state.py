"""State in host memory: arguments that stay there, streamed to the device where they are read, and their updates back.

In the jaxpr such an argument is read through a `device_put` to the device and its update returned through one to the
host. XLA makes an asynchronous pair of each, which a plan runs once: between two reads, what was fetched stays on the
device, or goes to the host and back as any value may. Stacks of layers stay on the host and are read and written by
slices (`layerwise_state`).
"""

import functools
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax

from memplan.errors import MemplanError, PlanMismatchError
from memplan.program import compat
from memplan.program.flat import flatten
from memplan.program.host_memory import DEVICE, HOST
from memplan.program.interpret import bindings, interpret_eqns
from memplan.program.jit_arguments import infer_static
from memplan.program.state.layerwise import LayerwiseState, StreamedScan, Update, UpdatingScan, layerwise_state
from memplan.program.trace import Program, StateOnHost

_LEAST_NBYTES = 1 << 20  # smaller leaves stay on the device


def offload_state(program: Program, inputs: Collection[int], streams: bool = True) -> Program:
    """The program with these inputs (positions) in host memory, and the outputs that take their donated buffers.

    Args:
      streams: the step itself copies them; False where whoever runs it does.

    Raises:
      PlanMismatchError: it has no such inputs.
    """
    on_host = frozenset(inputs)
    if not on_host:
        return program
    if not on_host.issubset(range(len(program.flat.invars))):
        raise PlanMismatchError("the plan keeps arguments in host memory that this step does not have. Plan again.")
    stream = _Stream(program, on_host)
    record = StateOnHost(on_host, frozenset(stream.returned))
    return program.transform(record, stream.rewritten() if streams else program.rewritten)


def large_leaves(program: Program, argnums: Collection[int]) -> frozenset[int]:
    """Positions of inputs that belong to these arguments and are worth moving."""
    inputs = program.flat.invars
    found = (position for number in argnums for position in positions_of(program, number))
    return frozenset(one for one in found if compat.nbytes_of(inputs[one].aval) >= _LEAST_NBYTES)


def positions_of(program: Program, argnum: int) -> range:
    """Positions of the inputs that an argument consists of; `argnum` counts the static ones, as in `jax.jit`.

    Raises:
      MemplanError: there is no such argument.
    """
    counts = [argument.num_leaves for argument in program.traced.arguments]
    static, _ = infer_static(program.step, len(counts), program.options)
    static, _ = infer_static(program.step, len(counts) + len(static), program.options)  # negative ones, from the end
    dynamic = argnum - sum(position < argnum for position in static)
    if argnum in static or not 0 <= dynamic < len(counts):
        raise MemplanError(
            f"argument {argnum} cannot be kept in host memory: the step has {len(counts)} arguments with arrays."
        )
    first = sum(counts[:dynamic])
    return range(first, first + counts[dynamic])


def place_argument(program: Program, argument: Any, argnum: int) -> Any:
    """An argument with its leaves in host memory or on the local device, as the program has them."""
    leaves, tree = jax.tree_util.tree_flatten(argument)
    positions = positions_of(program, argnum)
    if len(leaves) != len(positions):
        raise MemplanError(f"the step was planned for an argument of {len(positions)} leaves, not {len(leaves)}.")
    division = program.traced.division
    placed = [
        place_leaf(leaf, position in program.on_host, division.inputs[position] if division else None)
        for leaf, position in zip(leaves, positions, strict=True)
    ]
    return jax.tree_util.tree_unflatten(tree, placed)


def to_device(leaf: Any) -> Any:
    """A leaf on the device, where its state is when the step reads it."""
    return place_leaf(leaf, on_host=False) if isinstance(leaf, jax.Array) and _is_pinned(leaf) else leaf


def as_traced(leaf: Any) -> Any:
    """A leaf as the step is traced with it: what is in host memory is described on the device, and not copied."""
    if not _is_pinned(leaf):
        return leaf
    sharding, weak_type = compat.placement_of(leaf, any_memory=True), getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak_type)


def place_leaf(leaf: Any, on_host: bool, sharding: Any = None) -> jax.Array:
    """An array in device memory, or in host memory that its device can read.

    Args:
      sharding: over which devices; None is where a committed array is, or the first local device.
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
    """The step with every input on the host fetched right before it is first read, or layer by layer.

    Attributes:
      returned: position of an output that takes the buffer of a donated input on the host -> position of the input.
    """

    def __init__(self, program: Program, on_host: frozenset[int]):
        self.flat = flat = program.flat
        self.on_host = frozenset(flat.invars[position] for position in on_host)
        kept = enumerate(zip(program.donated, program.kept(flat.closed), strict=True))
        donated = [position for position, both in kept if all(both)]
        pairs = donation_pairs(flat.invars, flat.outvars, donated)
        self.returned = {number: position for number, position in pairs if position in on_host}

    def rewritten(self) -> compat.ClosedJaxpr:
        flat = self.flat
        aliases = {flat.outvars[number]: flat.invars[position] for number, position in self.returned.items()}
        state = layerwise_state(flat, self.on_host, aliases)
        return flatten(flat.retraced(functools.partial(self._run, state)))

    def _run(self, state: LayerwiseState, *operands: Any) -> list[Any]:
        outvars, known = self.flat.outvars, bindings(self.flat.closed, operands)
        for var in filter(self.on_host.__contains__, self.flat.invars):
            known[var] = jax.device_put(known[var], HOST) if var in state.stacks else _Streamed(known[var])
        results = map(_arrived, interpret_eqns(state.equations, known, outvars, _results, nullcontext))
        return [
            jax.device_put(result, HOST) if n in self.returned and outvars[n] not in state.in_place else result
            for n, result in enumerate(results)
        ]


@dataclass(frozen=True)
class _Streamed:
    """An input on the host, fetched when it is first read."""

    leaf: Any

    @functools.cached_property
    def on_device(self) -> Any:
        return jax.device_put(self.leaf, DEVICE)


def _arrived(value: Any) -> Any:
    return value.on_device if isinstance(value, _Streamed) else value


def _results(eqn: compat.JaxprEqn | Update | StreamedScan | UpdatingScan, operands: Sequence[Any]) -> list[Any]:
    """Copies that come before an equation belong to no line of the user's."""
    operands = list(map(_arrived, operands))
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
    """(output, donated input whose buffer it takes) by position: of equal type, first come, as jax pairs them."""
    free: dict[Any, list[int]] = {}
    for position in sorted(donated):
        aval = inputs[position].aval
        free.setdefault((aval.shape, aval.dtype), []).append(position)
    for number, atom in enumerate(outputs):
        waiting = free.get((atom.aval.shape, atom.aval.dtype))
        if waiting and compat.is_var(atom):
            yield number, waiting.pop(0)
