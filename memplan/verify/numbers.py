"""Same types, same numbers: the gate between the unmodified and the planned step."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from memplan.errors import WrongProgramError
from memplan.program import compat
from memplan.program.flat import flatten
from memplan.program.interpret import bindings, interpret_eqns

_EPSILONS = {
    name: float(jax.numpy.finfo(name).eps) for name in ("bfloat16", "float16", "float32", "float64")
}


@dataclass(frozen=True)
class Leaf:
    """One output: errors of the recompiled and the planned step relative to the unmodified one, and
    the tolerance.
    """

    recompilation: float
    planned: float
    tolerance: float


@dataclass(frozen=True)
class Gate:
    """Measurements of the numbers gate, per output.

    Errors are differences over the largest magnitude of the output; for integers and booleans, the
    share of elements that differ. The tolerance is what compiling the step in pieces causes by
    itself, nothing recomputed or moved: four times the larger of this output's own error and the
    median output's, and one rounding of the coarsest type that it is computed in. An output that is
    rounding noise (the gradient of a bias that a softmax cancels) so gets its own, wide tolerance
    and widens no other.
    """

    leaves: tuple[Leaf, ...]

    @property
    def passes(self) -> bool:
        return all(leaf.planned <= leaf.tolerance for leaf in self.leaves)

    @property
    def worst(self) -> int:
        """Index of the output that is furthest beyond, or nearest to, its tolerance."""
        return max(
            range(len(self.leaves)),
            key=lambda i: self.leaves[i].planned / (self.leaves[i].tolerance or 1e-300),
        )

    def __str__(self) -> str:
        if not self.leaves:
            return "no outputs"
        leaf = self.leaves[self.worst]
        verdict = "results within tolerance" if self.passes else "results beyond tolerance"
        errors = f"is off by {leaf.planned:.1e}, recompilation alone by {leaf.recompilation:.1e}"
        return f"{verdict}: output {self.worst} {errors}"


def check_types(original: compat.ClosedJaxpr, planned: compat.ClosedJaxpr) -> None:
    """Raise WrongProgramError unless inputs and outputs have the same shapes and dtypes."""
    for what, before, after in (
        ("input", original.jaxpr.invars, planned.jaxpr.invars),
        ("output", original.jaxpr.outvars, planned.jaxpr.outvars),
    ):
        shapes = [
            [(aval.shape, str(aval.dtype)) for aval in map(compat.aval_of, side)]
            for side in (before, after)
        ]
        if shapes[0] != shapes[1]:
            raise WrongProgramError(
                f"the {what} types of the planned step differ from those of the step: {shapes[0]} "
                f"became {shapes[1]}."
            )


def roundings(closed: compat.ClosedJaxpr) -> list[float]:
    """For each output of a flat jaxpr: the largest relative rounding error of the types that it is
    computed in.
    """
    found: dict[Any, float] = {}

    def of(atom: Any) -> float:
        own = _EPSILONS.get(str(getattr(atom.aval, "dtype", "")), 0.0)
        return max(own, found.get(atom, 0.0)) if compat.is_var(atom) else 0.0

    for eqn in closed.jaxpr.eqns:
        behind = max(map(of, eqn.invars), default=0.0)
        found.update((var, max(behind, of(var))) for var in eqn.outvars)
    return [of(atom) for atom in closed.jaxpr.outvars]


def compare(
    plain: Sequence[Any],
    recompiled: Sequence[Any],
    planned: Sequence[Any],
    *others: Sequence[Any],
    coarsest: Sequence[float] = (),
    same_kernels: bool = False,
) -> Gate:
    """Gate on the outputs of the programs, run on the same inputs.

    Args:
      plain: of the unmodified step; planned: of the planned one.
      recompiled, others: of the unmodified step, compiled in other ways. One alone may by chance
        round like the whole; a plan, which has other kernels, need not.
      coarsest: `roundings` of the outputs; by default those of their own types.
      same_kernels: the planned step has the same kernels; `recompiled` is the unmodified one run
        again, and no rounding beyond its difference is allowed.
    """
    rows = []
    for number, (leaf, planned_leaf) in enumerate(zip(plain, planned, strict=True)):
        reference, new = _as_numbers(leaf), _as_numbers(planned_leaf)
        unchanged = max(
            relative_error(reference, _as_numbers(one[number])) for one in (recompiled, *others)
        )
        inexact = jax.numpy.issubdtype(reference.dtype, np.inexact)
        own = float(jax.numpy.finfo(reference.dtype).eps) if inexact else 0.0
        once = 0.0 if same_kernels else max(own, coarsest[number]) if inexact and coarsest else own
        rows.append((unchanged, relative_error(reference, new), once))
    finite = [error for error, _, once in rows if once and np.isfinite(error)]
    usual = float(np.median(finite)) if finite else 0.0
    return Gate(
        tuple(
            Leaf(error, new, 4 * max(error, usual if once else 0.0) + once)
            for error, new, once in rows
        )
    )


def nudged(leaf: Any, draw: np.random.Generator) -> Any:
    """An array with every floating-point number one rounding up or down."""
    if not jax.numpy.issubdtype(leaf.dtype, np.floating):
        return leaf
    given = np.asarray(leaf)
    return np.nextafter(given, draw.choice([-np.inf, np.inf], given.shape).astype(given.dtype))


def relative_error(reference: np.ndarray, other: np.ndarray) -> float:
    """Largest difference over the largest magnitude; for integers, the share of elements that
    differ.

    Infinite if NaN and infinity are not in the same places.
    """
    if reference.shape != other.shape or reference.dtype != other.dtype:
        return float("inf")
    if not jax.numpy.issubdtype(reference.dtype, np.inexact):
        return float(np.mean(reference != other)) if reference.size else 0.0
    a, b = (
        leaf.astype(np.complex128 if np.iscomplexobj(leaf) else np.float64)
        for leaf in (reference, other)
    )
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)) or not np.array_equal(
        a[~finite], b[~finite], equal_nan=True
    ):
        return float("inf")
    if not finite.any():
        return 0.0
    scale = float(np.abs(a[finite]).max())
    difference = float(np.abs(a[finite] - b[finite]).max())
    return difference / scale if scale else difference


def _as_numbers(leaf: Any) -> np.ndarray:
    if jax.numpy.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        # its parts lie in other processes
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)


def in_pieces(
    closed: compat.ClosedJaxpr, length: int, flags: Mapping[str, Any]
) -> Callable[[Sequence[Any]], list[Any]]:
    """A flat jaxpr in pieces of at most `length` equations, each compiled once, with loops run trip
    by trip.

    The numbers of its outputs show what recompilation alone does to them.

    Args:
      flags: `compiler_options` of every piece.
    """
    pieces, outputs = _pieces(closed, length, flags), closed.jaxpr.outvars

    def run(inputs: Sequence[Any]) -> list[Any]:
        known = bindings(closed, inputs)
        return interpret_eqns(
            pieces, known, outputs, lambda piece, operands: piece.run(operands), nullcontext
        )

    return run


@dataclass(frozen=True)
class _Piece:
    """A few equations, compiled once; or a loop with its body in pieces."""

    # invars, outvars: variables that it reads; variables that it defines and others read
    invars: Sequence[Any]
    outvars: Sequence[Any]
    run: Callable[[Sequence[Any]], Sequence[Any]]  # operands -> results


def _pieces(closed: compat.ClosedJaxpr, length: int, flags: Mapping[str, Any]) -> list[_Piece]:
    """The equations in groups; every loop is its own group."""
    wanted = _variables(closed.jaxpr.outvars)
    found: list[_Piece] = []
    for group in reversed(list(_groups(closed.jaxpr.eqns, length))):
        scan = compat.scan_of(group[0])
        if scan is not None:
            body = in_pieces(flatten(scan.body), length, flags)
            found.append(
                _Piece(group[0].invars, group[0].outvars, functools.partial(_trips, scan, body))
            )
        else:
            made = {var for eqn in group for var in eqn.outvars}
            reads = {var for eqn in group for var in _variables(eqn.invars)} - made
            found.append(_compiled(group, list(reads), list(made & wanted), flags))
        wanted |= _variables(found[-1].invars)
    return found[::-1]


def _groups(eqns: Sequence[compat.JaxprEqn], length: int) -> Iterator[list[compat.JaxprEqn]]:
    group: list[compat.JaxprEqn] = []
    for eqn in eqns:
        alone = compat.scan_of(eqn) is not None
        if group and (alone or len(group) == length):
            yield group
            group = []
        if alone:
            yield [eqn]
        else:
            group.append(eqn)
    if group:
        yield group


def _compiled(
    eqns: Sequence[compat.JaxprEqn],
    invars: Sequence[Any],
    outvars: Sequence[Any],
    flags: Mapping[str, Any],
) -> _Piece:
    def run(operands: Sequence[Any]) -> list[Any]:
        return interpret_eqns(eqns, dict(zip(invars, operands, strict=True)), outvars)

    return _Piece(invars, outvars, jax.jit(run, compiler_options=dict(flags)))


def _trips(
    scan: compat.Scan, body: Callable[[Sequence[Any]], list[Any]], operands: Sequence[Any]
) -> list[Any]:
    consts, carries, stacks = scan.split(operands)
    made: dict[int, list[Any]] = {}
    for trip in reversed(range(scan.trips)) if scan.reverse else range(scan.trips):
        results = body([*consts, *carries, *(stack[trip] for stack in stacks)])
        carries, made[trip] = results[: scan.carries], results[scan.carries :]
    if not made:
        avals = map(compat.aval_of, scan.body.jaxpr.outvars[scan.carries :])
        return [*carries, *(jax.numpy.zeros((0, *aval.shape), aval.dtype) for aval in avals)]
    return [
        *carries,
        *(
            jax.numpy.stack(column)
            for column in zip(*(made[trip] for trip in range(scan.trips)), strict=True)
        ),
    ]


def _variables(atoms: Sequence[Any]) -> set[Any]:
    return set(filter(compat.is_var, atoms))
