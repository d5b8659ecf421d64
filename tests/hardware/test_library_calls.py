"""Counts of libraries' routines by hand, and the seconds that others published."""

from collections.abc import Callable

import pytest

from memplan.hardware import library_calls
from memplan.hardware.catalog import local_cpu, named
from memplan.hardware.library_calls import LibraryCall, library_seconds
from memplan.hardware.roofline import kernel_seconds


def test_counts_of_factorizations() -> None:
    assert library_calls.cholesky((6, 6), "float32").flops == 6**3 / 3
    assert library_calls.lu((9, 6), "float32").flops == 9 * 36 - 72
    assert library_calls.lu((6, 9), "float32").flops == 9 * 36 - 72
    assert library_calls.triangular_solve(6, (6, 4), "float32").flops == 6 * 6 * 4
    assert library_calls.qr((9, 6), "float32").flops == 2 * 9 * 36 - 144
    assert library_calls.form_q((6, 6), 6, "float32").flops == pytest.approx(4 * 6**3 / 3)
    assert library_calls.apply_q((9, 4), 6, "float32").flops == 4 * 9 * 4 * 6 - 2 * 4 * 36


def test_counts_of_eigenvalues_and_singular_values() -> None:
    eigh = library_calls.eigenvalues((6, 6), "float32", library_calls.EIGH)
    assert (eigh.flops, eigh.steps) == (9 * 6**3, 6)
    values = library_calls.singular_values((9, 6), "float32", False, False)
    assert values.flops == 4 * 9 * 36 - 4 * 72
    thin = library_calls.singular_values((6, 9), "float32", True, False)
    assert thin.flops == 14 * 9 * 36 + 8 * 216
    full = library_calls.singular_values((9, 6), "float32", True, True)
    assert full.flops == 4 * 81 * 6 + 8 * 9 * 36 + 9 * 216


@pytest.mark.parametrize("call", [library_calls.cholesky, library_calls.lu, library_calls.qr])
def test_batches_and_complex_numbers_multiply(call: Callable[..., LibraryCall]) -> None:
    real, batch = call((6, 6), "float32"), call((2, 5, 6, 6), "complex64")
    assert batch.flops == pytest.approx(4 * 10 * real.flops)


def test_only_what_runs_side_by_side_shares_its_steps() -> None:
    assert library_calls.cholesky((5, 6, 6), "float32").steps == 6
    assert library_calls.qr((5, 9, 6), "float32").steps == 30
    assert library_calls.qr((9, 6), "float32").times(3).steps == 18


def test_a_transform_costs_five_flops_a_point_and_level() -> None:
    line = library_calls.fourier((1024,), 3, 100, "complex64")
    assert (line.flops, line.nbytes) == (5 * 3 * 1024 * 10, 0)
    assert library_calls.fourier((1024,), 3, 100, "float32").flops == line.flops / 2
    plane = library_calls.fourier((64, 64), 1, 100, "complex64")
    assert (plane.flops, plane.nbytes) == (5 * 4096 * 12, 100)
    assert library_calls.fourier((2**20,), 1, 100, "complex64").nbytes == 100


@pytest.mark.parametrize(
    ("length", "element_nbytes", "passes"),
    [
        (1, 4, 1),
        (4096, 4, 1),
        (4097, 4, 3),  # one wider stage: its own pass, then a pass inside of the blocks
        (2**14, 4, 6),
        (4096, 16, 3),  # blocks of 2,048
        (2**30, 16, 210),
    ],
)
def test_passes_of_a_bitonic_sort(length: int, element_nbytes: int, passes: int) -> None:
    assert library_calls.bitonic_passes(length, element_nbytes) == passes


def test_a_sort_moves_everything_in_each_pass() -> None:
    call = library_calls.sort(2**14, 8, 3 * 2**14, "float32")
    assert call.flops == 3 * 2**14 * 14
    assert call.nbytes == (6 - 1) * 2 * 8 * 3 * 2**14
    assert library_calls.radix_sort(4, 8, 10, "int32").nbytes == 10 * (4 + 3 * 2 * 8)


@pytest.mark.parametrize(
    ("device", "call", "published_s"),
    [
        ("v100", library_calls.lu((4096, 4096), "float32"), 41e-3),
        ("a100", library_calls.lu((4096, 4096), "float32"), 44e-3),
        ("h100", library_calls.cholesky((2048, 2048), "float32"), 1.95e-3),
        ("h100", library_calls.cholesky((64, 2048, 2048), "float32"), 22.2e-3),
        ("a100", library_calls.qr((2000, 2000), "float32"), 6.3e-3),
        ("v100", library_calls.eigenvalues((1024, 1024), "float32", library_calls.EIGH), 56e-3),
    ],
)
def test_published_seconds(device: str, call: LibraryCall, published_s: float) -> None:
    assert library_seconds(call, named(device)) == pytest.approx(published_s, rel=0.2)


def test_a_call_adds_to_its_kernel_without_tf32() -> None:
    a100 = named("a100")
    call = LibraryCall("qr", "float32", 1e12)
    added = kernel_seconds(0, "", 0, a100, library_calls=[call]) - kernel_seconds(0, "", 0, a100)
    assert added == pytest.approx(library_seconds(call, a100)) == 1e12 / (0.4 * 19.5e12)
    double = LibraryCall("qr", "complex128", 1e12)
    assert library_seconds(double, a100) == pytest.approx(1e12 / (0.4 * 9.75e12))
    assert library_seconds(double, named("rtx4090")) == pytest.approx(1e12 / (0.4 * 1.29e12))


def test_a_cpu_compares_and_rereads_nothing() -> None:
    cpu = local_cpu(2, 2**30)
    call = library_calls.sort(2**20, 8, 2**20, "float32")
    assert library_seconds(call, cpu) == pytest.approx(call.flops / (0.001 * cpu.vector_flops))
