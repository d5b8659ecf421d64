"""Primitives that XLA and jax hand to libraries: factorizations, eigenvalues, Fourier transforms.

Sorts have axes, too: `reductions` registers them, with the work from here.
"""

import math

from memplan.hardware import library_calls
from memplan.hardware.library_calls import LibraryCall
from memplan.program import compat
from memplan.program.ops.axes import shape_of
from memplan.program.ops.record import Eqn, Primitive, register

Calls = tuple[LibraryCall, ...]


def _dtype(eqn: Eqn) -> str:
    return str(compat.aval_of(eqn.invars[0]).dtype)


def _matrix(eqn: Eqn) -> tuple[tuple[int, ...], str]:
    """Shape and type of the first operand."""
    return shape_of(eqn.invars[0]), _dtype(eqn)


def _triangular_solve(eqn: Eqn) -> Calls:
    side = shape_of(eqn.invars[0])[-1]
    return (library_calls.triangular_solve(side, shape_of(eqn.invars[1]), _dtype(eqn)),)


def _qr(eqn: Eqn) -> Calls:
    """R, and Q from its reflectors."""
    shape, dtype = _matrix(eqn)
    q = library_calls.form_q(shape_of(eqn.outvars[0]), min(shape[-2:]), dtype)
    return library_calls.qr(shape, dtype), q


def _householder_product(eqn: Eqn) -> Calls:
    reflectors = shape_of(eqn.invars[1])[-1]
    return (library_calls.form_q(shape_of(eqn.outvars[0]), reflectors, _dtype(eqn)),)


def _apply_q(eqn: Eqn) -> Calls:
    """Q from its reflectors, applied to the third operand from the left or from the right."""
    *batch, rows, columns = shape_of(eqn.invars[2])
    sides = (rows, columns) if eqn.params["left"] else (columns, rows)
    reflectors = shape_of(eqn.invars[1])[-1]
    return (library_calls.apply_q((*batch, *sides), reflectors, _dtype(eqn)),)


def _svd(eqn: Eqn) -> Calls:
    vectors, full = eqn.params["compute_uv"], eqn.params["full_matrices"]
    return (library_calls.singular_values(*_matrix(eqn), vectors, full),)


def _eig(eqn: Eqn) -> Calls:
    sides = ("compute_left_eigenvectors", "compute_right_eigenvectors")
    vectors = any(eqn.params[side] for side in sides)
    factor = library_calls.SCHUR if vectors else library_calls.EIG_VALUES
    return (library_calls.eigenvalues(*_matrix(eqn), factor),)


def _eigenvalues(factor: float) -> Primitive:
    return Primitive(library_calls=lambda eqn: (library_calls.eigenvalues(*_matrix(eqn), factor),))


def _fourier(eqn: Eqn) -> Calls:
    lengths = tuple(eqn.params["fft_lengths"])
    sides = [compat.aval_of(var) for var in (eqn.invars[0], eqn.outvars[0])]
    real = [side for side in sides if not str(side.dtype).startswith("complex")]
    points = (real or sides)[0]
    transforms = math.prod(points.shape) // max(math.prod(lengths), 1)
    nbytes = sum(map(compat.nbytes_of, sides))
    return (library_calls.fourier(lengths, transforms, nbytes, str(points.dtype)),)


def sort(eqn: Eqn) -> Calls:
    """A sort of all operands by the first; an element has the bytes of one of each.

    XLA:GPU sorts the indices, too, if the order of equal keys counts; they may be an operand.
    """
    shape, dtype = _matrix(eqn)
    dtypes = [compat.aval_of(var).dtype for var in eqn.invars]
    adds_indices = eqn.params["is_stable"] and "int32" not in map(str, dtypes[1:])
    element_nbytes = sum(item.itemsize for item in dtypes) + 4 * adds_indices
    length = shape[eqn.params["dimension"]]
    return (library_calls.sort(length, element_nbytes, math.prod(shape), dtype),)


def top_k(eqn: Eqn) -> Calls:
    shape, dtype = _matrix(eqn)
    length = shape[eqn.params.get("axis", eqn.params.get("reduction_dimension", -1))]
    item_nbytes = compat.aval_of(eqn.invars[0]).dtype.itemsize
    return (library_calls.top_k(length, math.prod(shape), item_nbytes, dtype),)


register("cholesky", Primitive(library_calls=lambda eqn: (library_calls.cholesky(*_matrix(eqn)),)))
register("lu", Primitive(library_calls=lambda eqn: (library_calls.lu(*_matrix(eqn)),)))
register("triangular_solve", Primitive(library_calls=_triangular_solve))
register("geqrf", Primitive(library_calls=lambda eqn: (library_calls.qr(*_matrix(eqn)),)))
register("qr", Primitive(library_calls=_qr))
register("householder_product", Primitive(library_calls=_householder_product))
register("ormqr", Primitive(library_calls=_apply_q))
register("eigh", _eigenvalues(library_calls.EIGH))
register("eig", Primitive(library_calls=_eig))
register("schur", _eigenvalues(library_calls.SCHUR))
register("hessenberg", _eigenvalues(library_calls.HESSENBERG))
register("tridiagonal", _eigenvalues(library_calls.TRIDIAGONAL))
register("svd", Primitive(library_calls=_svd))
register("fft", Primitive(library_calls=_fourier))
register("approx_top_k", Primitive(library_calls=top_k))
