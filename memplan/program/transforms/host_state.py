"""State in host memory: arguments that stay there, streamed to the device where they are read, and their updates back.

In the jaxpr such an argument is read through a `device_put` to the device and its update returned through one to the
host. For planners the first is an operation like any other, cheap to repeat: what is dropped is fetched again. Stacks
of layers stay on the host and are read and written by slices (`slices.py`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import jax

from memplan.errors import MemplanError, PlanMismatchError
from memplan.program import compat
from memplan.program.trace import Program, flatten
from memplan.program.transforms.layerwise_state import Env, Slices, pairs, run_fused, run_scan, run_update

_LEAST_NBYTES = 1 << 20  # smaller leaves stay on the device


def with_state_on_host(program: Program, inputs: Collection[int]) -> Program:
    """The program with these inputs (positions) in host memory, and the outputs that take their donated buffers.

    Raises:
      PlanMismatchError: it has no such inputs.
    """
    on_host = frozenset(inputs)
    if not on_host:
        return program
    if not on_host.issubset(range(len(program.jaxpr.jaxpr.invars))):
        raise PlanMismatchError("the plan holds arguments in host memory that this step does not have. Plan again.")
    avals = [compat.as_struct(var.aval) for var in program.jaxpr.jaxpr.invars]
    stream = _Stream(program, on_host)
    streamed = flatten(jax.make_jaxpr(stream.run)(*avals))
    return replace(program, rewritten=streamed, on_host=on_host, returned_to_host=frozenset(stream.updates))


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
    if program.by_leaves:
        raise MemplanError("state in host memory needs arguments in containers that take anything for their leaves.")
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
    placed = [put(leaf, position in program.on_host) for leaf, position in zip(leaves, positions, strict=True)]
    return jax.tree_util.tree_unflatten(tree, placed)


def brought(leaf: Any) -> Any:
    """A leaf as the step is traced with it: on the device, where its state is when the step reads it."""
    kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    return put(leaf, on_host=False) if isinstance(leaf, jax.Array) and kind == "pinned_host" else leaf


def put(leaf: Any, on_host: bool) -> jax.Array:
    """An array in the local device's own memory, or in host memory that it can read."""
    device = jax.local_devices()[0]
    kind = "pinned_host" if on_host else device.default_memory().kind
    return jax.device_put(leaf, jax.sharding.SingleDeviceSharding(device, memory_kind=kind))


class _Stream:
    """The step with every input on the host fetched right before it is first read, or slice by slice.

    Attributes:
      updates: position of an output that takes the buffer of a donated input on the host -> position of the input.
    """

    def __init__(self, program: Program, on_host: frozenset[int]):
        self.closed = program.jaxpr
        jaxpr = self.closed.jaxpr
        self.on_host = {jaxpr.invars[position]: position for position in on_host}
        donated = [position for position in on_host if program.donated[position]]
        self.updates = dict(pairs(jaxpr.invars, jaxpr.outvars, donated))
        taken = {jaxpr.outvars[number]: jaxpr.invars[position] for number, position in self.updates.items()}
        self.slices = Slices(self.closed, frozenset(self.on_host), taken)

    def run(self, *operands: Any) -> list[Any]:
        jaxpr, slices = self.closed.jaxpr, self.slices
        self.env: dict[Any, Any] = dict(compat.consts_of(self.closed))
        self.waiting: dict[Any, Any] = {}
        for var, operand in zip(jaxpr.invars, operands, strict=True):
            if var in slices.stacks:
                self.env[var] = jax.device_put(operand, jax.memory.Space.Host)
            else:
                (self.waiting if var in self.on_host else self.env)[var] = operand
        within = slices.within
        for number in slices.order:
            if number in slices.updates:
                self.env.update(run_update(self.closed, slices.updates[number], self.env, slices.place))
            elif number in slices.fused:
                self.env.update(self.fused(number, jaxpr.eqns[number]))
            elif number not in within:
                self.env.update(zip(jaxpr.eqns[number].outvars, self.results(number, jaxpr.eqns[number]), strict=True))
        results = [self.read(atom) for atom in jaxpr.outvars]
        return [
            jax.device_put(result, jax.memory.Space.Host)
            if number in self.updates and jaxpr.outvars[number] not in slices.place
            else result
            for number, result in enumerate(results)
        ]

    def fused(self, number: int, eqn: compat.JaxprEqn) -> Env:
        for atom in eqn.invars:
            self.read(atom)
        update, stacks = self.slices.fused[number], self.slices.reads(number)
        with compat.as_written(eqn):
            return run_fused(self.closed, number, update, self.env, stacks, self.slices.place)

    def results(self, number: int, eqn: compat.JaxprEqn) -> list[Any]:
        operands = [self.read(atom) for atom in eqn.invars]
        stacks, scan = self.slices.reads(number), compat.scan_of(eqn)
        with compat.as_written(eqn):
            return run_scan(scan, operands, stacks) if scan and stacks else compat.bind(eqn, operands)

    def read(self, atom: Any) -> Any:
        if not isinstance(atom, compat.Literal) and atom in self.waiting:
            self.env[atom] = jax.device_put(self.waiting.pop(atom), jax.memory.Space.Device)
        return compat.read(self.env, atom)
