"""The work of libraries' routines that are no matrix products: factorizations, eigenvalues, sorts,
Fourier transforms.

A routine reads its operands and writes its results, as every kernel does. What it computes besides
is a `LibraryCall`, by the counts of the literature: LAPACK Working Note 41 (LAWN 41) for
factorizations, Golub and Van Loan, Matrix Computations (GVL), for eigenvalues and singular values.
Only the leading terms count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from memplan.hardware.device import Device

Routine = Literal[
    "cholesky", "lu", "triangular solve", "qr", "apply q", "eigenvalues", "singular values",
    "fourier", "sort", "top k",
]  # fmt: skip

# Elements of a sorted array that one block of XLA:GPU's bitonic sort keeps in shared memory: the
# largest power of two of which it fits, up to 1,024 threads of four elements (XLA's sort emitter).
_BLOCK_ELEMENTS = 4096
_SHARED_NBYTES = 48 * 1024
# Points of a transform that one pass over memory computes, as bits: 4,096 complex64 fit into the
# shared memory of a block.
_PASS_BITS = 12


@dataclass(frozen=True, slots=True)
class LibraryCall:
    """What a routine does beyond reading its operands and writing its results once."""

    routine: Routine
    dtype: str  # numpy name of the elements' type
    flops: float  # of all matrices; of a sort, comparisons
    steps: int = 0  # that wait for one another, such as columns
    nbytes: float = 0.0  # of device memory that a GPU moves besides

    def times(self, runs: int) -> LibraryCall:
        """The same call, `runs` times."""
        return replace(
            self, flops=runs * self.flops, steps=runs * self.steps, nbytes=runs * self.nbytes
        )


@dataclass(frozen=True, slots=True)
class _Rate:
    """What a routine achieves."""

    share: float  # of the peak FLOP/s outside matrix units
    step_s: float = 0.0  # of one step


# Each pair is chosen so that both predict published seconds of cuSOLVER in float32 unless it says
# otherwise; none was compared with a card here. Per line: published -> predicted.
_ON_GPU: Mapping[Routine, _Rate] = {
    # H100: 512 in 0.38 ms -> 0.39, 2,048 in 1.95 -> 1.9, 64 of 2,048 in 22 -> 24, 16 of them in
    # 10.6 -> 7.2 (pytorch/pytorch#173515, whose card is that of #173788).
    "cholesky": _Rate(0.12, 0.75e-6),
    # 4,096 on a V100 in 41 ms -> 41, on an A100 in 44 -> 39 (jax-ml/jax#9694).
    "lu": _Rate(0.5, 8.5e-6),
    "triangular solve": _Rate(0.12, 0.75e-6),  # as Cholesky, most of which it is; not compared
    # 2,000 on an A100 in 6.3 ms -> 7.4 (ml-explore/mlx#975); without a named card, as if an A100:
    # 512 in 1.5 -> 1.6, 1,024 in 3.8 -> 3.3, 4,096 in 24 -> 24 (flagos-ai/FlagGems#5586).
    "qr": _Rate(0.4, 3e-6),
    # What Q takes beyond R in the same table: 256 in 0.15 ms -> 0.13, 1,024 in 0.67 -> 0.70.
    "apply q": _Rate(0.4, 0.5e-6),
    # 1,024 on a V100 in 56 ms -> 56 (jax-ml/jax#10180); without a named card: 33 in 0.55 -> 0.83
    # (jax-ml/jax#31368), 100 in 1.8 -> 2.5 (pytorch/pytorch#174674). An EVD reaches less than 3 %
    # of an H100 (Wang et al., "Extracting the Potential of Emerging Hardware Accelerators for
    # Symmetric Eigenvalue Decomposition").
    "eigenvalues": _Rate(0.02, 25e-6),
    # By Jacobi, 900 x 100 on a V100 in 5.4 ms -> 8.5 (pytorch/pytorch#41306), 400 in float64 on an
    # A100 in 207 -> 144 (tensor4all/tenferro-rs#1849); by QR, 48 in the latter.
    "singular values": _Rate(0.001),
    "fourier": _Rate(0.4),  # mostly waits for memory; not compared
    # By passes over memory: 2**30 pairs of int64 on an A100 with 1.64 TB/s in 5.3 s -> 5.5 (XLA's
    # bitonic sort), of int32 in 62 ms -> 56 (CUB's radix sort): jax-ml/jax#34912.
    "sort": _Rate(1.0),
    "top k": _Rate(1.0),
}
# Shares of the assumed peak of `catalog.local_cpu`. Two busy cores of a Xeon took, in float32 and
# jax 0.12: Cholesky of 256 0.16 of it, LU 0.28, Q 0.18, a triangular solve of 768 0.6; sorts of
# 65,536 and 1,048,576 elements 0.06 to 0.08e9 comparisons/s, the 32 largest of them 0.26 to 0.55e9,
# transforms of them 4 to 12 GFLOP/s.
_FACTORS_ON_CPU = _Rate(0.3)
_ON_CPU: Mapping[Routine, _Rate] = {
    "fourier": _Rate(0.1),
    "sort": _Rate(0.001),
    "top k": _Rate(0.01),
}


def library_seconds(call: LibraryCall, device: Device) -> float:
    """Seconds of a call beyond those in which its kernel moves operands and results."""
    if not device.backend.has_own_memory:
        share = _ON_CPU.get(call.routine, _FACTORS_ON_CPU).share
        return call.flops / (share * _vector_rate(device, call.dtype))
    rate = _ON_GPU[call.routine]
    arithmetic_s = call.flops / (rate.share * _vector_rate(device, call.dtype))
    return call.steps * rate.step_s + arithmetic_s + call.nbytes / device.achieved_bandwidth


def _vector_rate(device: Device, dtype: str) -> float:
    """Peak FLOP/s outside matrix units; libraries do not round to TF32."""
    if dtype in ("float64", "complex128"):
        return min(device.vector_flops / 2, device.rate("float64"))
    return device.vector_flops


def _real(dtype: str, flops: float) -> float:
    """Real FLOPs: four times as many if the type is complex (LAWN 41: 8 for a multiply-add)."""
    return 4.0 * flops if dtype.startswith("complex") else flops


def _matrices(shape: Sequence[int]) -> tuple[int, int, int]:
    """Matrices, and the longer and the shorter of their sides."""
    *batch, rows, columns = shape
    return math.prod(batch), max(rows, columns), min(rows, columns)


def cholesky(shape: Sequence[int], dtype: str) -> LibraryCall:
    """Of matrices of this shape; n**3 / 3 (LAWN 41). They run side by side."""
    count, _, side = _matrices(shape)
    return LibraryCall("cholesky", dtype, _real(dtype, count * side**3 / 3), side)


def lu(shape: Sequence[int], dtype: str) -> LibraryCall:
    """m n**2 - n**3 / 3 (LAWN 41), for m >= n. They run side by side."""
    count, long, short = _matrices(shape)
    flops = count * (long * short**2 - short**3 / 3)
    return LibraryCall("lu", dtype, _real(dtype, flops), short)


def triangular_solve(side: int, solved: Sequence[int], dtype: str) -> LibraryCall:
    """n FLOPs for every element that is solved for (LAWN 41)."""
    flops = float(side * math.prod(solved))
    return LibraryCall("triangular solve", dtype, _real(dtype, flops), side)


def qr(shape: Sequence[int], dtype: str) -> LibraryCall:
    """R and reflectors; 2 m n**2 - 2 n**3 / 3 (LAWN 41), for m >= n, one matrix after another."""
    count, long, short = _matrices(shape)
    flops = count * (2 * long * short**2 - 2 * short**3 / 3)
    return LibraryCall("qr", dtype, _real(dtype, flops), count * short)


def apply_q(shape: Sequence[int], reflectors: int, dtype: str) -> LibraryCall:
    """Products of m x n matrices with k reflectors of length m; 4 m n k - 2 n k**2 (LAWN 41)."""
    *batch, rows, columns = shape
    count = math.prod(batch)
    flops = count * (4 * rows * columns * reflectors - 2 * columns * reflectors**2)
    return LibraryCall("apply q", dtype, _real(dtype, flops), count * reflectors)


def form_q(shape: Sequence[int], reflectors: int, dtype: str) -> LibraryCall:
    """Q itself, m x n; 4 m n k - 2 (m + n) k**2 + 4 k**3 / 3 (LAWN 41)."""
    *batch, rows, columns = shape
    count, k = math.prod(batch), reflectors
    flops = count * (4 * rows * columns * k - 2 * (rows + columns) * k**2 + 4 * k**3 / 3)
    return LibraryCall("apply q", dtype, _real(dtype, flops), count * k)


def eigenvalues(shape: Sequence[int], dtype: str, factor: float) -> LibraryCall:
    """Eigenvalues, Schur and Hessenberg forms: `factor` n**3 (`EIGH` and others)."""
    count, _, side = _matrices(shape)
    return LibraryCall("eigenvalues", dtype, _real(dtype, count * factor * side**3), count * side)


# Factors of n**3 (GVL 7.4, 7.5, 8.3).
EIGH = 9.0  # eigenvalues and vectors of a symmetric matrix
TRIDIAGONAL = 4 / 3
EIG_VALUES = 10.0
SCHUR = 25.0  # also eigenvalues with vectors
HESSENBERG = 10 / 3


def singular_values(shape: Sequence[int], dtype: str, vectors: bool, full: bool) -> LibraryCall:
    """By Golub and Reinsch, for m >= n (GVL 8.6): 4 m n**2 - 4 n**3 / 3 for the values alone, with
    vectors 14 m n**2 + 8 n**3, with all m of the longer side 4 m**2 n + 8 m n**2 + 9 n**3.
    """
    count, long, short = _matrices(shape)
    flops = 4 * long * short**2 - 4 * short**3 / 3
    if vectors:
        flops = 14 * long * short**2 + 8 * short**3
    if vectors and full:
        flops = 4 * long**2 * short + 8 * long * short**2 + 9 * short**3
    return LibraryCall("singular values", dtype, _real(dtype, count * flops), count * short)


def fourier(lengths: Sequence[int], transforms: int, nbytes: int, dtype: str) -> LibraryCall:
    """5 n log2(n) for n points, half of it if one side is real (FFTW's convention).

    Args:
      nbytes: of operand and result, which every pass after the first moves again.
      dtype: of the operand, or of the result if that is real.
    """
    points = math.prod(lengths)
    flops = 5.0 * transforms * points * math.log2(max(points, 1))
    passes = sum(max(1, -(-_log2(length) // _PASS_BITS)) for length in lengths)
    is_real = not dtype.startswith("complex")
    return LibraryCall(
        "fourier", dtype, flops / 2 if is_real else flops, 0, float((passes - 1) * nbytes)
    )


def _log2(length: int) -> int:
    """Rounded up."""
    return max(length - 1, 0).bit_length()


def bitonic_passes(length: int, element_nbytes: int) -> int:
    """How often XLA:GPU's sort reads and writes arrays whose sorted dimension has this length.

    Stage s compares elements 2**s apart and less. Distances inside of a block are one pass, each
    wider one is a pass of its own.

    Args:
      element_nbytes: of an element of all arrays that are sorted together.
    """
    stages = _log2(length)
    fitting = min(_BLOCK_ELEMENTS, _SHARED_NBYTES // max(element_nbytes, 1), 2**stages)
    wider = stages - (fitting.bit_length() - 1)
    return 1 + wider * (wider + 3) // 2


def sort(length: int, element_nbytes: int, elements: int, dtype: str) -> LibraryCall:
    """A sort of rows of this length: n log2(n) comparisons.

    Args:
      element_nbytes: of an element of all arrays that are sorted together.
      elements: of one array.
      dtype: of the keys.
    """
    passes = bitonic_passes(length, element_nbytes)
    again_nbytes = 2.0 * (passes - 1) * elements * element_nbytes
    return LibraryCall("sort", dtype, float(elements * _log2(length)), 0, again_nbytes)


def radix_sort(key_nbytes: int, element_nbytes: int, elements: int, dtype: str) -> LibraryCall:
    """CUB's sort: it counts the digits of all keys, then moves everything once a byte of a key."""
    again_nbytes = elements * (key_nbytes + 2.0 * (key_nbytes - 1) * element_nbytes)
    return LibraryCall("sort", dtype, 0.0, 0, again_nbytes)


def top_k(length: int, elements: int, item_nbytes: int, dtype: str) -> LibraryCall:
    """The largest of rows of this length: a comparison an element on a CPU.

    XLA:GPU sorts the rows, with their indices.
    """
    again_nbytes = sort(length, item_nbytes + 4, elements, dtype).nbytes
    return LibraryCall("top k", dtype, float(elements), 0, again_nbytes)
