"""What a kernel may write over, by backend, and what it updates in place."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from memplan.hardware.backend import CPU, GPU, Backend
from memplan.xla.aliasing import ELEMENTWISE, overwritable, updated
from memplan.xla.module import Module
from tests.hlo import read_module

ARRAY = "f32[8,4]{1,0}"
PARAMETERS = f"""  %p = {ARRAY} parameter(0)
  %q = {ARRAY} parameter(1)
"""


def module(op: str, *fused: str) -> Module:
    """One instruction, `%made` of `%x` and `%y`; a fusion calls `%inside` of `%p` and `%q`."""
    inside = "\n".join(f"  {line}" for line in fused)
    body = (
        f"%inside (p: f32[8,4], q: f32[8,4]) -> f32[8,4] {{\n{PARAMETERS}{inside}\n}}\n"
        if fused
        else ""
    )
    entry = PARAMETERS.replace("%p", "%x").replace("%q", "%y")
    return read_module(f"""HloModule small, is_scheduled=true

{body}
ENTRY %main (x: f32[8,4], y: f32[8,4]) -> f32[8,4] {{
{entry}  %i = s32[] constant(1)
  %row = f32[1,4]{{1,0}} constant({{{{1, 2, 3, 4}}}})
  ROOT %made = {op}
}}
""")


def over(hlo: Module, operand: str, backend: Backend, leaf: int = 0) -> bool:
    ops = hlo.entry.ops
    return (leaf, operand) in overwritable(hlo, ops["made"], ops, backend)


@pytest.mark.parametrize("backend", [GPU, CPU])
@pytest.mark.parametrize(
    ("op", "may"),
    [
        (f"{ARRAY} add(%x, %y)", True),
        (f"{ARRAY} add(%x, %x)", False),  # XLA asks for one use
        (f"{ARRAY} copy(%x)", False),
        (f"{ARRAY} reverse(%x), dimensions={{0}}", False),
        ("pred[8,4]{1,0} compare(%x, %y), direction=LT", False),  # of another size
        (f'{ARRAY} custom-call(%x), custom_call_target="library"', False),
    ],
)
def test_an_operation_alone_writes_over_what_it_goes_through_once(
    op: str, may: bool, backend: Backend
) -> None:
    assert over(module(op), "x", backend) == may


LOOP = f"{ARRAY} fusion(%x, %y), kind=kLoop, calls=%inside"
SAME = (f"%s = {ARRAY} subtract(%p, %q)", f"ROOT %t = {ARRAY} tanh(%s)")
TURNED = (f"%s = {ARRAY} reverse(%p), dimensions={{0}}", f"ROOT %t = {ARRAY} add(%s, %q)")


@pytest.mark.parametrize("backend", [GPU, CPU])
def test_a_fusion_writes_over_what_it_reads_element_by_element(backend: Backend) -> None:
    assert over(module(LOOP, *SAME), "x", backend) and over(module(LOOP, *SAME), "y", backend)
    assert not over(module(LOOP, *TURNED), "x", backend)
    assert over(module(LOOP, *TURNED), "y", backend)


def test_only_a_gpu_writes_over_another_type_of_as_many_bits() -> None:
    bits = ARRAY.replace("f32", "s32")
    hlo = module(
        LOOP.replace(ARRAY, bits), f"%s = {bits} convert(%p)", f"ROOT %t = {bits} negate(%s)"
    )
    assert over(hlo, "x", backend=GPU) and not over(hlo, "x", backend=CPU)


def test_only_loops_of_a_cpu_write_over_what_they_read() -> None:
    hlo = module(LOOP.replace("kLoop", "kOutput"), *SAME)
    assert over(hlo, "x", backend=GPU) and not over(hlo, "x", backend=CPU)


def test_one_of_several_results_is_over_what_leads_to_it_alone() -> None:
    both = f"({ARRAY}, {ARRAY})"
    results = (
        f"%s = {ARRAY} negate(%p)",
        f"%t = {ARRAY} tanh(%q)",
        f"ROOT %u = {both} tuple(%s, %t)",
    )
    hlo = module(LOOP.replace(f"{ARRAY} ", f"{both} ", 1), *results)
    assert [over(hlo, "x", GPU, leaf) for leaf in (0, 1)] == [True, False]
    assert [over(hlo, "y", GPU, leaf) for leaf in (0, 1)] == [False, True]


UPDATE = (
    "%c = s32[] constant(0)",
    "%r = f32[1,4]{1,0} constant({{1, 2, 3, 4}})",
    f"%flat = {ARRAY} bitcast(%p)",
    f"ROOT %t = {ARRAY} dynamic-update-slice(%flat, %r, %c, %c)",
)


@pytest.mark.parametrize(
    ("op", "fused", "pairs"),
    [
        (f"{ARRAY} dynamic-update-slice(%x, %row, %i, %i)", (), [(0, "x")]),
        (f"{ARRAY} add(%x, %y)", (), []),
        (LOOP, UPDATE, [(0, "x")]),
        (LOOP, SAME, []),
        (
            f'({ARRAY}, {ARRAY}) custom-call(%x, %y), custom_call_target="library", '
            "output_to_operand_aliasing={{0}: (1, {}), {1}: (0, {})}",
            (),
            [(0, "y"), (1, "x")],
        ),
        (
            f'{ARRAY} custom-call(%x, %y), custom_call_target="library", '
            "output_to_operand_aliasing={{}: (1, {})}",
            (),
            [(0, "y")],
        ),
    ],
    ids=["slice", "sum", "fused slice", "fused sum", "library with two", "library with one"],
)
def test_what_is_updated_in_place(
    op: str, fused: tuple[str, ...], pairs: list[tuple[int, str]]
) -> None:
    hlo = module(op, *fused)
    assert list(updated(hlo, hlo.entry.ops["made"])) == pairs


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (jax.lax.clz, jnp.int32),
        (jax.lax.population_count, jnp.int32),
        (jax.lax.bitwise_not, jnp.int32),
        (jax.lax.cbrt, jnp.float32),
        (jax.lax.erf, jnp.float32),
        (jax.lax.expm1, jnp.float32),
        (jax.lax.log1p, jnp.float32),
        (jax.lax.logistic, jnp.float32),
        (jax.lax.round, jnp.float32),
        (jax.lax.is_finite, jnp.float32),
        (jax.lax.rsqrt, jnp.float32),
        (jax.lax.tan, jnp.float32),
    ],
)
def test_elementwise_opcodes_are_those_that_hlo_prints(
    function: Callable[..., Any], dtype: Any
) -> None:
    text = jax.jit(function).lower(jnp.ones(3, dtype)).as_text("hlo")
    (opcode,) = re.findall(r"ROOT \S+ = \S+ ([\w-]+)\(", text)
    assert opcode in ELEMENTWISE
