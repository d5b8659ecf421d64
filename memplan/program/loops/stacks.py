"""Loops that read their stacks by index.

XLA lays a stack out as its slices are read, so it transposes the whole stack before the loop. A
slice that the body takes by index, with a constraint on its layout, is transposed alone, in its
trip: a ResNet of 14 layers that trains on three batches in a scan takes 968 MiB on an A100, not
1004. Slabs take their rows directly from an indexed stack and need no slice: at 40 % of its bytes,
an MLP in a scan takes 1.04 times as long as its unrolled loop in slabs. Without indexing it takes
10.5 times as long, since nothing hides its copies.

A slice is taken where it is read: inner scans and branches get the stack and the slice's index.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from memplan.errors import PlanMismatchError
from memplan.planning.transforms import IndexedStacks
from memplan.program import compat
from memplan.program.flat import Flat
from memplan.program.interpret import interpret
from memplan.program.loops.pairs import loop_pairs
from memplan.program.trace import Applied, Program

# Index only stacks of at least 1 MiB: a smaller one is no reason to compile a step again.
_LEAST_NBYTES = 1 << 20


def with_indexed_stacks(program: Program) -> Program | None:
    """The program whose loops index their stacks; None if no loop has a stack of 1 MiB or more.

    Pairs of loops are unchanged: the backward loop reads stacks that the forward loop makes.
    """
    flat = program.flat
    if not _has_stacks(flat, in_loop=False):
        return None
    rewritten = flat.retraced(lambda *inputs: _run(flat, inputs, in_loop=False))
    return program.transformed(Applied(IndexedStacks()), rewritten)


def follow_indexed_stacks(program: Program) -> Program:
    """The program whose loops index their stacks; PlanMismatchError if it has no such stacks."""
    rewritten = with_indexed_stacks(program)
    if rewritten is None:
        raise PlanMismatchError(
            "the plan has loops that read their stacks by index, which this step does not have. "
            "Plan again."
        )
    return rewritten


def _has_stacks(flat: Flat, in_loop: bool) -> bool:
    """Does a loop read a large stack, at any depth?"""
    return any(_reads_stacks(flat, number, in_loop) for number in _unpaired(flat))


def _reads_stacks(flat: Flat, number: int, in_loop: bool) -> bool:
    """Does an equation, or one of its computations, read a large stack in a loop?"""
    eqn = flat.eqns[number]
    if in_loop and _is_slice(eqn):
        return True
    scan = compat.scan_of(eqn)
    if scan and any(map(_is_large, scan.split(eqn.invars)[2])):
        return True
    in_body = in_loop or eqn.primitive.name != "cond"
    return any(_has_stacks(inner, in_body) for inner in _inner(flat, number))


def _unpaired(flat: Flat) -> list[int]:
    """Numbers of the equations that belong to no pair of loops."""
    paired = {number for pair in loop_pairs(flat) for number in pair.numbers}
    return [number for number, _ in enumerate(flat.eqns) if number not in paired]


def _inner(flat: Flat, number: int) -> list[Flat]:
    count = len(compat.computations_of(flat.eqns[number]))
    return [flat.inner(number, index) for index in range(count)]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class _Slice:
    """`stack[indices]`, which is not computed yet."""

    stack: Any
    indices: tuple[Any, ...]

    def array(self) -> Any:
        """Compute the slice."""
        dims = len(self.indices)
        shape = self.stack.shape
        starts = [*self.indices, *(0 for _ in shape[dims:])]
        sizes = [*(1 for _ in self.indices), *shape[dims:]]
        piece = jax.lax.dynamic_slice(self.stack, starts, sizes, allow_negative_indices=False)
        return compat.in_order(jax.lax.squeeze(piece, range(dims)))


def _run(flat: Flat, operands: Sequence[Any], in_loop: bool) -> list[Any]:
    """The results of a computation, whose operands are arrays and slices."""
    unpaired = {id(flat.eqns[number]): number for number in _unpaired(flat)}
    arrays = dict[_Slice, Any]()

    def array_of(operand: Any) -> Any:
        if not isinstance(operand, _Slice):
            return operand
        if operand not in arrays:
            arrays[operand] = operand.array()
        return arrays[operand]

    def rule(eqn: compat.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        number = unpaired.get(id(eqn))
        scan = compat.scan_of(eqn)
        inner = list[Flat]()
        has_slices = any(isinstance(operand, _Slice) for operand in operands)
        if number is not None and (has_slices or _reads_stacks(flat, number, in_loop)):
            inner = _inner(flat, number)

        if inner and scan is not None:
            consts, carries, stacks = scan.split(operands)
            consts = [*map(array_of, consts)]
            carries = [*map(array_of, carries)]
            return _scan(scan, inner[0], consts, carries, stacks)
        if inner and eqn.primitive.name == "cond":
            return _cond(eqn, inner, [array_of(operands[0]), *operands[1:]], in_loop)
        for index, flat_body in enumerate(inner):
            body = flat_body.retraced(
                lambda *inputs, flat_body=flat_body: _run(flat_body, inputs, in_loop=True),
            )
            eqn = compat.with_computation(eqn, index, body)
        results = compat.bind(eqn, [*map(array_of, operands)])
        return [*map(compat.in_order, results)] if in_loop and _is_slice(eqn) else results

    return [*map(array_of, interpret(flat.closed, operands, rule))]


def _scan(
    scan: compat.Scan,
    inner: Flat,
    consts: list[Any],
    carries: list[Any],
    stacks: list[Any],
) -> list[Any]:
    """The scan with a body that indexes its large stacks; it still slices the small ones."""
    is_indexed = [isinstance(stack, _Slice) or _is_large(stack) for stack in stacks]

    def body(*inputs: Any) -> list[Any]:
        _, carry, (trip, *small_slices) = scan.split(inputs)
        slices = list[Any]()
        next_small = iter(small_slices)
        for stack, indexed in zip(stacks, is_indexed, strict=True):
            if isinstance(stack, _Slice):
                slices.append(_Slice(stack.stack, (*stack.indices, trip)))
            else:
                slices.append(_Slice(stack, (trip,)) if indexed else next(next_small))
        return _run(inner, [*consts, *carry, *slices], in_loop=True)

    small = [stack for stack, indexed in zip(stacks, is_indexed, strict=True) if not indexed]
    return scan.run(body, [*consts, *carries, jax.numpy.arange(scan.trips), *small])


def _cond(
    eqn: compat.JaxprEqn,
    branches: list[Flat],
    operands: list[Any],
    in_loop: bool,
) -> list[Any]:
    """The conditional with branches that take slices by index."""
    leaves, tree = jax.tree.flatten(operands[1:])
    types = [compat.as_struct(jax.typeof(leaf)) for leaf in leaves]
    for index, branch in enumerate(branches):

        def run_branch(*leaves: Any, branch: Flat = branch) -> list[Any]:
            return _run(branch, jax.tree.unflatten(tree, leaves), in_loop)

        eqn = compat.with_computation(eqn, index, jax.make_jaxpr(run_branch)(*types))
    return compat.bind(eqn, [operands[0], *leaves])


def _is_slice(eqn: compat.JaxprEqn) -> bool:
    return eqn.primitive.name == "dynamic_slice" and _is_large(eqn.invars[0])


def _is_large(stack: Any) -> bool:
    """Has a stack slices of at least two dimensions, and at least 1 MiB?"""
    aval = jax.typeof(stack) if isinstance(stack, jax.Array) else stack.aval
    return len(getattr(aval, "shape", ())) > 2 and compat.nbytes_of(aval) >= _LEAST_NBYTES
