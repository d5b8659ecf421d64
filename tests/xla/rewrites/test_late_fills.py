"""Zeros that loops begin with are made right before them, each alone; the judge sees the same step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from memplan.hardware.backend import GPU
from memplan.planning.packing import pack
from memplan.planning.problem import Problem
from memplan.verify.same_module import judge
from memplan.xla.buffers import problem_of
from memplan.xla.module import Module
from memplan.xla.rewrites.late_fills import fill_late
from tests.hlo import read_module, replaced
from tests.xla.rewrites.compiled import compile_rewritten

LARGE, SMALL = "f32[1024,512]{1,0}", "f32[8]{0}"
NBYTES = 1024 * 512 * 4


def module_of(kinds: list[bool], order: list[int], edge: str = "") -> Module:
    """One fusion that makes an array of each size, each read by a kernel of its own, in this order, and passed on."""
    shapes = [LARGE if large else SMALL for large in kinds]
    types, root = ", ".join(shapes), ", ".join(f"%b{number}" for number in range(len(kinds)))
    inside = [
        f"  %b{n} = {shape} broadcast(%zero), dimensions={{}}" for n, shape in enumerate(shapes)
    ]
    read = [
        f"  %e{n} = {shape} get-tuple-element(%fill), index={n}" for n, shape in enumerate(shapes)
    ]
    bodies, kernels, last = list[str](), list[str](), "%x"
    for number in order:
        shape = shapes[number]
        along = "0,1" if shape == LARGE else "0"
        bodies.append(
            f"%add.{number} (p: f32[1], q: {shape.partition('{')[0]}) -> f32[1] {{\n  %p = f32[1]{{0}} parameter(0)\n"
            f"  %q = {shape} parameter(1)\n  %o = f32[] constant(0)\n"
            f"  %r = f32[] reduce(%q, %o), dimensions={{{along}}}, to_apply=%sum.0\n"
            "  %s = f32[1]{0} bitcast(%r)\n  ROOT %t = f32[1]{0} add(%p, %s)\n}"
        )
        kernels.append(
            f"  %k{number} = f32[1]{{0}} fusion({last}, %v{number}), kind=kInput, calls=%add.{number}{edge}"
        )
        last = f"%k{number}"
    views = [f"  %v{n} = {shape} bitcast(%e{n})" for n, shape in enumerate(shapes)]
    fill = "broadcast.0"
    text = "\n\n".join([
        "HloModule jit_step, is_scheduled=true",
        "%sum.0 (s: f32[], t: f32[]) -> f32[] {\n  %s = f32[] parameter(0)\n  %t = f32[] parameter(1)\n"
        "  ROOT %u = f32[] add(%s, %t)\n}",
        *bodies,
        f"%{fill} () -> ({types}) {{\n  %zero = f32[] constant(0)\n" + "\n".join(inside)
        + f"\n  ROOT %all = ({types}) tuple({root})\n}}",
        "ENTRY %main (x: f32[1]) -> f32[1] {\n  %x = f32[1]{0} parameter(0)\n"
        f"  %fill = ({types}) fusion(), kind=kLoop, calls=%{fill}\n" + "\n".join([*read, *views, *kernels])
        + f"\n  ROOT %done = f32[1]{{0}} copy({last})\n}}\n",
    ])  # fmt: skip
    return read_module(text)


@given(st.data())
@settings(max_examples=40)
def test_no_two_large_ones_are_there_at_once_and_the_judge_sees_the_same(
    data: st.DataObject,
) -> None:
    kinds = data.draw(st.lists(st.booleans(), min_size=2, max_size=6))
    order = data.draw(st.permutations(range(len(kinds))))
    module = module_of(kinds, order)
    result = fill_late(module, 100 * NBYTES)
    judge(module, result)
    if not any(kinds):
        assert result is module
        return
    before, after = (pack(problem_of(hlo, backend=GPU)).nbytes for hlo in (module, result))
    assert before >= sum(kinds) * NBYTES and after < NBYTES + 4096 * (len(kinds) + 1)
    fills = [op for op in result.entry.ops.values() if op.opcode == "fusion" and not op.operands]
    assert len(fills) == sum(kinds) + (not all(kinds))  # small ones stay one kernel


def test_what_control_edges_order_stays() -> None:
    module = module_of([True, True], [0, 1], ", control-predecessors={%fill}")
    assert fill_late(module, 0) is module


def test_a_control_edge_may_be_all_that_an_instruction_says() -> None:
    module = module_of([True, True], [0, 1])
    last = "copy(%k1)"
    ordered = replaced(module, last, f"{last}, control-predecessors={{%e0}}")
    assert ordered.entry.ops["done"].predecessors == ("e0",)
    assert fill_late(ordered, 0) is ordered


def test_what_is_large_goes_by_what_there_is() -> None:
    module = module_of([False, False], [0, 1])
    assert fill_late(module, 200 * 8 * 4) is module
    assert fill_late(module, 100 * 8 * 4) is not module


def two_loops(x: jax.Array) -> jax.Array:
    """Each stacks eight arrays of 4 MiB; the second's are not needed while the first's are."""

    def stacked(x: jax.Array) -> jax.Array:
        _, stack = lax.scan(lambda carry, _: (jnp.sin(carry), jnp.cos(carry)), x, length=8)
        return jnp.cumsum(stack, axis=0)[-1]

    return stacked(stacked(x))


@pytest.mark.gpu_aot
def test_the_compiler_takes_them() -> None:
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)

    def rewrite(module: Module, _: Problem) -> Module:
        return fill_late(module, 1 << 30)

    name = "memplan_test_late_fills"
    _, plain, module = compile_rewritten(two_loops, (x,), name, "h100", rewrite)
    fills = [op for op in plain.entry.ops.values() if op.opcode == "fusion" and not op.operands]
    assert fills and module is not plain
    large = [
        op
        for op in module.entry.ops.values()
        if op.opcode == "fusion" and not op.operands and op.nbytes > 1 << 20
    ]
    assert all(len(op.result) == 1 for op in large)


@pytest.mark.gpu_aot
def test_in_a_body_a_copy_of_a_fill_is_a_fill() -> None:
    """XLA fills once there what two inner loops begin with, and copies it for one of them."""
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)

    def step(x: jax.Array) -> jax.Array:
        return lax.scan(lambda x, _: (two_loops(x), None), x, length=3)[0]

    def rewrite(module: Module, _: Problem) -> Module:
        return fill_late(module, 1 << 30)

    def copies(module: Module) -> int:
        large = [
            op
            for op in module.instructions.values()
            if op.opcode == "copy" and op.nbytes >= 8 << 22
        ]
        makers = {op.name: op for op in module.instructions.values()}
        return sum(
            makers[op.operands[0]].opcode == "fusion" and not makers[op.operands[0]].operands
            for op in large
        )

    _, plain, module = compile_rewritten(
        step, (x,), "memplan_test_late_fills_in_bodies", "v100", rewrite
    )
    assert copies(plain) and not copies(module)
    assert pack(problem_of(module, GPU)).nbytes < pack(problem_of(plain, GPU)).nbytes
