"""Which instructions of a scheduled module are calls of libraries' routines, and their work.

jax calls LAPACK on a CPU and cuSOLVER on a GPU by the same names of routines. Sorts and Fourier
transforms are instructions of XLA's own.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable

from memplan.hardware import library_calls
from memplan.hardware.library_calls import LibraryCall
from memplan.xla.module import Computation, Instruction
from memplan.xla.shapes import Array

_ROUTINE = re.compile(r"(?:lapack_[sdcz]|cusolver_|cublas_|hipsolver_)([a-z]+)(?:_batched)?_ffi")
_RADIX_SORT = "__cub$DeviceRadixSort"
_VECTORS = 86  # LAPACK's job "V", as jax states it in numbers
_NO_VECTORS = 78  # "N"
_ALL_VECTORS = 65  # "A"

_Rule = Callable[[Instruction, list[Array]], LibraryCall]


def library_call(body: Computation, op: Instruction) -> LibraryCall | None:
    """The work of an instruction of `body`; None if it calls no routine with a formula."""
    rule = _rule(op.target if op.opcode == "custom-call" else op.opcode)
    return rule(op, [body.ops[name].result[0] for name in op.operands]) if rule else None


def _says(op: Instruction, name: str, job: int | bool) -> bool:
    """Does the call's configuration give a job to this name?"""
    value = str(job).lower() if isinstance(job, bool) else str(job)
    return re.search(rf"\b{name} = {value}\b", op.backend_config) is not None


def _solve(op: Instruction, operands: list[Array]) -> LibraryCall:
    matrix, solved = operands[:2]
    return library_calls.triangular_solve(matrix.dims[-1], solved.dims, matrix.numpy_name)


def _form_q(op: Instruction, operands: list[Array]) -> LibraryCall:
    matrix, reflectors = operands[:2]
    return library_calls.form_q(matrix.dims, reflectors.dims[-1], matrix.numpy_name)


def _apply_q(op: Instruction, operands: list[Array]) -> LibraryCall:
    matrix, reflectors, other = operands[:3]
    *batch, rows, columns = other.dims
    sides = (rows, columns) if rows == matrix.dims[-2] else (columns, rows)
    return library_calls.apply_q((*batch, *sides), reflectors.dims[-1], matrix.numpy_name)


def _eigenvalues(factor: float) -> _Rule:
    return lambda op, operands: library_calls.eigenvalues(
        operands[0].dims, operands[0].numpy_name, factor
    )


def _eig(op: Instruction, operands: list[Array]) -> LibraryCall:
    sides = ("compute_left", "compute_right", "left", "right")
    vectors = any(_says(op, side, _VECTORS) or _says(op, side, True) for side in sides)
    factor = library_calls.SCHUR if vectors else library_calls.EIG_VALUES
    return library_calls.eigenvalues(operands[0].dims, operands[0].numpy_name, factor)


def _singular_values(op: Instruction, operands: list[Array]) -> LibraryCall:
    vectors = not (_says(op, "compute_uv", False) or _says(op, "mode", _NO_VECTORS))
    full = _says(op, "full_matrices", True) or _says(op, "mode", _ALL_VECTORS)
    return library_calls.singular_values(operands[0].dims, operands[0].numpy_name, vectors, full)


def _fourier(op: Instruction, operands: list[Array]) -> LibraryCall:
    image, result = operands[0], op.result[0]
    is_complex = image.dtype.startswith("c") and result.dtype.startswith("c")
    real = result if image.dtype.startswith("c") else image
    points = image if is_complex else real
    transforms = points.size // max(math.prod(op.fft_lengths), 1)
    nbytes = image.nbytes + result.nbytes
    return library_calls.fourier(op.fft_lengths, transforms, nbytes, points.numpy_name)


def _sort(op: Instruction, operands: list[Array]) -> LibraryCall:
    keys = operands[0]
    element_nbytes = sum(array.nbytes for array in operands) // max(keys.size, 1)
    length = keys.dims[op.dimensions[0]]
    return library_calls.sort(length, element_nbytes, keys.size, keys.numpy_name)


def _radix_sort(op: Instruction, operands: list[Array]) -> LibraryCall:
    keys = operands[0]
    sorted_arrays = [array for array in operands if array.dims == keys.dims]
    element_nbytes = sum(array.bits // 8 for array in sorted_arrays)
    return library_calls.radix_sort(keys.bits // 8, element_nbytes, keys.size, keys.numpy_name)


def _top_k(op: Instruction, operands: list[Array]) -> LibraryCall:
    """XLA's own kernel reads its operand once."""
    return LibraryCall("top k", operands[0].numpy_name, float(operands[0].size))


def _of_matrix(call: Callable[..., LibraryCall]) -> _Rule:
    return lambda op, operands: call(operands[0].dims, operands[0].numpy_name)


_RULES: dict[str, _Rule] = {
    "potrf": _of_matrix(library_calls.cholesky),
    "getrf": _of_matrix(library_calls.lu),
    "trsm": _solve,
    "__cublas$triangularSolve": _solve,
    "triangular-solve": _solve,
    "cholesky": _of_matrix(library_calls.cholesky),
    "geqrf": _of_matrix(library_calls.qr),
    "orgqr": _form_q,
    "ungqr": _form_q,
    "ormqr": _apply_q,
    "unmqr": _apply_q,
    **dict.fromkeys(("syevd", "heevd", "syevj"), _eigenvalues(library_calls.EIGH)),
    "geev": _eig,
    "gees": _eigenvalues(library_calls.SCHUR),
    "gehrd": _eigenvalues(library_calls.HESSENBERG),
    **dict.fromkeys(("sytrd", "hetrd"), _eigenvalues(library_calls.TRIDIAGONAL)),
    **dict.fromkeys(("gesdd", "gesvd", "gesvdj", "gesvdp"), _singular_values),
    "fft": _fourier,
    "sort": _sort,
    **dict.fromkeys(("TopK", "__gpu$TopK", "topk"), _top_k),
}


@functools.lru_cache(maxsize=256)
def _rule(name: str) -> _Rule | None:
    """The rule of an opcode or of a custom call's target."""
    if name.startswith(_RADIX_SORT):
        return _radix_sort
    routine = _ROUTINE.fullmatch(name)
    return _RULES.get(routine[1] if routine else name)
