"""Calls of libraries in modules: by hand, then of what XLA compiles, against the equations'."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.scipy import linalg

from memplan.hardware import catalog, library_calls
from memplan.hardware.library_calls import LibraryCall
from memplan.program.flat import Flat
from memplan.program.lowerable import Lowerable
from memplan.xla.target import Target
from tests.hlo import read_module
from tests.xla.costs import kernel_costs
from tests.xla.small_modules import module
from tests.xla.steps import array


def calls_of(entry: str, bodies: str = "") -> list[LibraryCall]:
    costs = kernel_costs(read_module(module(entry, bodies)))
    return [call for cost in costs for call in cost.library_calls]


def of(target: str, *operands: str, config: str = "") -> LibraryCall:
    """A custom call with operands of these shapes."""
    arrays = [f"%in.{number} = {shape} constant({{...}})" for number, shape in enumerate(operands)]
    names = ", ".join(f"%in.{number}" for number, _ in enumerate(operands))
    config = f', backend_config="{config}"' if config else ""
    root = f'ROOT %r = f32[4] custom-call({names}), custom_call_target="{target}"{config}'
    [call] = calls_of("\n".join([*arrays, root]))
    return call


def test_jax_s_targets_have_the_counts_of_their_routines() -> None:
    batch = "c64[2,9,6]{1,2,0}"
    matrices = (2, 9, 6)
    assert of("cusolver_geqrf_ffi", batch) == library_calls.qr(matrices, "complex64")
    assert of("lapack_cgeqrf_ffi", batch) == library_calls.qr(matrices, "complex64")
    form = library_calls.form_q(matrices, 5, "complex64")
    assert of("cusolver_orgqr_ffi", batch, "c64[2,5]{1,0}") == form
    assert of("lapack_cungqr_ffi", batch, "c64[2,5]{1,0}") == form
    assert of("cublas_getrf_batched_ffi", batch) == library_calls.lu(matrices, "complex64")
    square = "f64[6,6]{0,1}"
    assert of("cusolver_potrf_ffi", square) == library_calls.cholesky((6, 6), "float64")
    solved = library_calls.triangular_solve(6, (6, 4), "float64")
    assert of("__cublas$triangularSolve", square, "f64[6,4]{0,1}") == solved
    assert of("lapack_dtrsm_ffi", square, "f64[6,4]{0,1}") == solved
    apply = library_calls.apply_q((6, 4), 6, "float64")
    assert of("cusolver_ormqr_ffi", square, "f64[6]{0}", "f64[6,4]{0,1}") == apply


def test_eigenvalues_and_singular_values_count_the_vectors_that_are_asked_for() -> None:
    square, tall = "f32[6,6]{0,1}", "f32[9,6]{0,1}"
    eigh = library_calls.eigenvalues((6, 6), "float32", 9.0)
    assert of("cusolver_syevd_ffi", square) == of("lapack_ssyevd_ffi", square) == eigh
    config = "{compute_left = 78 : ui8, compute_right = %s : ui8}"
    assert of("lapack_sgeev_ffi", square, config=config % 78).flops == 10 * 6**3
    assert of("lapack_sgeev_ffi", square, config=config % 86).flops == 25 * 6**3
    for target, jobs in {
        "lapack_sgesdd_ffi": ("{mode = 78 : ui8}", "{mode = 83 : ui8}", "{mode = 65 : ui8}"),
        "cusolver_gesvdj_ffi": (
            "{compute_uv = false, full_matrices = true}",
            "{compute_uv = true, full_matrices = false}",
            "{compute_uv = true, full_matrices = true}",
        ),
    }.items():
        vectors = ((False, False), (True, False), (True, True))
        for job, asked in zip(jobs, vectors, strict=True):
            expected = library_calls.singular_values((9, 6), "float32", *asked)
            assert of(target, tall, config=job) == expected


def test_a_radix_sort_and_an_unknown_call() -> None:
    call = of("__cub$DeviceRadixSortUnpairedKeys", "u32[100]{0}", "f32[100]{0}")
    assert call == library_calls.radix_sort(4, 8, 100, "uint32")
    assert not calls_of('ROOT %r = f32[4] custom-call(%a), custom_call_target="users_own"')


SORTED = """
%less (x: f32[], y: f32[], i: s32[], j: s32[]) -> pred[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  %i = s32[] parameter(2)
  %j = s32[] parameter(3)
  ROOT %lt = pred[] compare(%x, %y), direction=LT
}
%fused_sort (p0: f32[512,8192]) -> (f32[512,8192], s32[512,8192]) {
  %p0 = f32[512,8192]{1,0} parameter(0)
  %order = s32[512,8192]{1,0} iota(), iota_dimension=1
  ROOT %sorted = (f32[512,8192]{1,0}, s32[512,8192]{1,0}) sort(%p0, %order), dimensions={1}, to_apply=%less
}
"""


def test_a_sort_in_a_fusion() -> None:
    pair = "(f32[512,8192]{1,0}, s32[512,8192]{1,0})"
    rows = "%rows = f32[512,8192]{1,0} constant({...})"
    fusion = f"ROOT %f = {pair} fusion(%rows), kind=kInput, calls=%fused_sort"
    [call] = calls_of(f"{rows}\n{fusion}", SORTED)
    assert call == library_calls.sort(8192, 8, 512 * 8192, "float32")


def compiled(step: Callable[..., Any], args: Any, target: Target) -> list[LibraryCall]:
    costs = kernel_costs(target.compile(Lowerable(step, args)).module)
    return [call for cost in costs for call in cost.library_calls]


def equations(step: Callable[..., Any], args: Any) -> list[LibraryCall]:
    ops = Flat(jax.make_jaxpr(step)(*args)).graph.ops
    return [call for op in ops for call in op.library_calls]


def decomposed(square: jax.Array, tall: jax.Array) -> Any:
    """Every decomposition that both a GPU's and a CPU's libraries have."""
    symmetric = square + square.T
    return (
        jnp.linalg.eigh(symmetric),
        jnp.linalg.cholesky(symmetric),
        jnp.linalg.qr(tall),
        jnp.linalg.svd(tall, full_matrices=False),
        linalg.lu_factor(square)[0],
        linalg.solve_triangular(square, tall.T),
        jnp.fft.rfft2(square),
        jnp.fft.ifft(jax.lax.complex(tall, tall)),
    )


def test_equations_and_the_modules_of_a_cpu_agree() -> None:
    args = array(48, 48), array(80, 48)
    cpu = Target(catalog.local_cpu(2, 2**30), False)
    assert Counter(compiled(decomposed, args, cpu)) == Counter(equations(decomposed, args))


@pytest.mark.gpu_aot
def test_equations_and_the_modules_of_a_described_gpu_agree() -> None:
    pytest.importorskip("jax_cuda12_plugin")

    def step(square: jax.Array, tall: jax.Array) -> Any:
        return decomposed(square, tall), jnp.argsort(square), jnp.sort(tall, axis=0)

    args = array(48, 48), array(80, 48)
    a100 = Target(catalog.named("a100"), True)
    assert Counter(compiled(step, args, a100)) == Counter(equations(step, args))


def test_a_loop_calls_once_a_trip_and_a_branch_once() -> None:
    def step(x: jax.Array) -> jax.Array:
        def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.linalg.cholesky(x), None

        return jax.lax.scan(body, x, None, length=7)[0]

    [call] = equations(step, (array(6, 6),))
    assert call == library_calls.cholesky((6, 6), "float32").times(7)
