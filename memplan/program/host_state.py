"""State in host memory: arguments that stay there, streamed to the device where they are read, and their updates back.

In the jaxpr such an argument is read through a `device_put` to the device and its update returned through one to the
host. For planners the first is an operation like any other, cheap to repeat: what is dropped is fetched again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import jax

from memplan.errors import MemplanError, PlanMismatchError
from memplan.program import compat
from memplan.program.trace import Program, as_struct

_LEAST_NBYTES = 1 << 20  # smaller leaves stay on the device


def with_state_on_host(program: Program, inputs: Collection[int]) -> Program:
    """The program with these inputs (positions) in host memory, and the outputs that take their donated buffers.

    Raises:
      PlanMismatchError: it has no such inputs.
    """
    held = frozenset(inputs)
    if not held:
        return program
    if not held.issubset(range(len(program.jaxpr.jaxpr.invars))):
        raise PlanMismatchError("the plan holds arguments in host memory that this step does not have. Plan again.")
    closed, updates = program.jaxpr, updates_of(program, held)
    avals = [as_struct(var.aval) for var in closed.jaxpr.invars]
    streamed = jax.make_jaxpr(lambda *operands: _stream(closed, held, updates, operands))(*avals)
    return replace(program, rewritten=streamed, held=held, returned_to_host=updates)


def large_leaves(program: Program, argnums: Collection[int]) -> frozenset[int]:
    """Positions of inputs that belong to these arguments and are worth moving."""
    inputs = program.jaxpr.jaxpr.invars
    found = (position for number in argnums for position in positions_of(program, number))
    return frozenset(one for one in found if compat.nbytes_of(inputs[one].aval) >= _LEAST_NBYTES)


def positions_of(program: Program, argnum: int) -> range:
    """Positions of the inputs that an argument consists of.

    Raises:
      MemplanError: there is no such argument.
    """
    arguments, _ = program.traced.args_info
    if not 0 <= argnum < len(arguments):
        raise MemplanError(f"there is no argument {argnum} among {len(arguments)} that could be held in host memory.")
    counts = [len(jax.tree_util.tree_leaves(argument)) for argument in arguments]
    first = sum(counts[:argnum])
    return range(first, first + counts[argnum])


def place(program: Program, argument: Any, argnum: int) -> Any:
    """An argument with its leaves in host memory or on the local device, as the program has them."""
    leaves, tree = jax.tree_util.tree_flatten(argument)
    positions = positions_of(program, argnum)
    if len(leaves) != len(positions):
        raise MemplanError(f"the step was planned for an argument of {len(positions)} leaves, not {len(leaves)}.")
    placed = [put(leaf, position in program.held) for leaf, position in zip(leaves, positions, strict=True)]
    return jax.tree_util.tree_unflatten(tree, placed)


def brought(leaf: Any) -> Any:
    """A leaf as the step is traced with it: on the device, where its state is when the step reads it."""
    kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    return put(leaf, on_host=False) if isinstance(leaf, jax.Array) and kind == "pinned_host" else leaf


def put(leaf: Any, on_host: bool) -> jax.Array:
    """An array in the local device's own memory, or in host memory that it can read."""
    device = jax.devices()[0]
    kind = "pinned_host" if on_host else device.default_memory().kind
    return jax.device_put(leaf, jax.sharding.SingleDeviceSharding(device, memory_kind=kind))


def updates_of(program: Program, held: frozenset[int]) -> frozenset[int]:
    """Positions of outputs that take the buffers of donated inputs on the host: of equal type, first come."""
    jaxpr = program.jaxpr.jaxpr
    free: dict[Any, list[int]] = {}
    for position in sorted(held):
        aval = jaxpr.invars[position].aval
        if program.donated[position]:
            free.setdefault((aval.shape, aval.dtype), []).append(position)
    found = set()
    for number, atom in enumerate(jaxpr.outvars):
        waiting = free.get((atom.aval.shape, atom.aval.dtype))
        if waiting and not isinstance(atom, compat.Literal):
            waiting.pop()
            found.add(number)
    return frozenset(found)


def _stream(
    closed: compat.ClosedJaxpr, held: frozenset[int], updates: frozenset[int], operands: Sequence[Any]
) -> list[Any]:
    """Every input is fetched right before it is first read."""
    env: dict[Any, Any] = dict(compat.consts_of(closed))
    waiting: dict[Any, Any] = {}
    for position, (var, operand) in enumerate(zip(closed.jaxpr.invars, operands, strict=True)):
        (waiting if position in held else env)[var] = operand

    def read(atom: Any) -> Any:
        if not isinstance(atom, compat.Literal) and atom in waiting:
            env[atom] = jax.device_put(waiting.pop(atom), jax.memory.Space.Device)
        return compat.read(env, atom)

    for eqn in closed.jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        with compat.as_written(eqn):
            env.update(zip(eqn.outvars, compat.bind(eqn, operands), strict=True))
    results = [read(atom) for atom in closed.jaxpr.outvars]
    return [
        jax.device_put(result, jax.memory.Space.Host) if number in updates else result
        for number, result in enumerate(results)
    ]
