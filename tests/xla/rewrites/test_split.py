"""Fusions in pieces: the same expressions, each piece smaller, and whole what could change or is there anyway."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.hardware.backend import GPU
from memplan.planning.floor import floor
from memplan.planning.problem import Problem, Role
from memplan.verify.dataflow import NotThePlainModuleError
from memplan.verify.same_module import judge
from memplan.xla.buffers import problem_of
from memplan.xla.module import Module
from memplan.xla.rewrites.split import WHOLE_SHARE, split_fusions
from tests.hlo import read_module, replaced, text_of
from tests.xla.rewrites.compiled import OPTIMIZED, compile_rewritten

ARRAY = "f32[1024,512]{1,0}"
MASK, LONG = "pred[1024,512]{1,0}", "s64[1024,512]{1,0}"
NBYTES = 1024 * 512 * 4
TEXT = f"""HloModule jit_small, is_scheduled=true

%sine.0 (p: f32[1024,512]) -> f32[1024,512] {{
  %p = {ARRAY} parameter(0)
  ROOT %q = {ARRAY} sine(%p)
}}

%both.0 (a: f32[1024,512], b: f32[1024,512], c: f32[1024,512], s: f32[]) -> (f32[1024,512], f32[1024,512]) {{
  %a = {ARRAY} parameter(0)
  %b = {ARRAY} parameter(1)
  %c = {ARRAY} parameter(2)
  %s = f32[] parameter(3)
  %t = {ARRAY} broadcast(%s), dimensions={{}}
  %u = {ARRAY} multiply(%a, %t)
  %v = {ARRAY} add(%u, %b)
  %w = {ARRAY} multiply(%a, %c)
  ROOT %x = ({ARRAY}, {ARRAY}) tuple(%v, %w)
}}

%masked.0 (d: f32[1024,512], e: f32[1024,512], f: f32[1024,512]) -> f32[1024,512] {{
  %d = {ARRAY} parameter(0)
  %e = {ARRAY} parameter(1)
  %f = {ARRAY} parameter(2)
  %g = {ARRAY} subtract(%d, %e)
  %h = f32[] constant(0)
  %i = {ARRAY} broadcast(%h), dimensions={{}}
  %j = {MASK} compare(%g, %i), direction=GT
  ROOT %k = {ARRAY} select(%j, %f, %i)
}}

ENTRY %main (x: f32[1024,512], y: f32[]) -> f32[1024,512] {{
  %x = {ARRAY} parameter(0)
  %y = f32[] parameter(1)
  %one = {ARRAY} fusion(%x), kind=kLoop, calls=%sine.0
  %two = {ARRAY} fusion(%one), kind=kLoop, calls=%sine.0
  %three = {ARRAY} fusion(%two), kind=kLoop, calls=%sine.0
  %both = ({ARRAY}, {ARRAY}) fusion(%one, %two, %three, %y), kind=kLoop, calls=%both.0
  %both.1 = {ARRAY} get-tuple-element(%both), index=1
  %both.0.0 = {ARRAY} get-tuple-element(%both), index=0
  %masked = {ARRAY} fusion(%both.0.0, %both.1, %three), kind=kLoop, calls=%masked.0
  ROOT %last = {ARRAY} fusion(%masked), kind=kLoop, calls=%sine.0
}}
"""


def made(text: str, budget_nbytes: int = 0) -> Module | None:
    module = read_module(text)
    result = split_fusions(module, problem_of(module, backend=GPU), budget_nbytes)
    if result is module:
        return None
    judge(module, result)
    return result


def opcodes(module: Module, name: str) -> list[str]:
    return [op.opcode for op in module[module.entry.ops[name].called[0]].ops.values()]


def test_results_of_one_fusion_become_those_of_two() -> None:
    module = made(TEXT, 5 * NBYTES)
    assert module is not None
    ops = module.entry.ops
    assert list(ops) == ["x", "y", "one", "two", "three", "both.part1", "both", "masked", "last"]
    assert ops["both.part1"].operands == ("one", "two", "y")
    assert ops["both"].operands == ("one", "three")
    assert ops["masked"].operands == ("both.part1", "both", "three")
    assert [str(ops[name].shape) for name in ("both.part1", "both", "masked")] == [ARRAY] * 3
    assert opcodes(module, "both.part1") == [
        "parameter",
        "parameter",
        "parameter",
        "broadcast",
        "multiply",
        "add",
    ]
    assert opcodes(module, "both") == ["parameter", "parameter", "multiply"]


def test_a_mask_goes_from_one_piece_to_the_next() -> None:
    module = made(TEXT, 4 * NBYTES)
    assert module is not None
    ops = module.entry.ops
    assert str(ops["masked.part1"].shape) == MASK
    assert ops["masked.part1"].operands == ("both.part1", "both")
    assert ops["masked"].operands == ("three", "masked.part1")
    assert opcodes(module, "masked.part1")[2:] == ["subtract", "constant", "broadcast", "compare"]
    assert opcodes(module, "masked") == [
        "parameter",
        "parameter",
        "constant",
        "broadcast",
        "select",
    ]


def test_the_floor_falls() -> None:
    module, plain = made(TEXT), read_module(TEXT)
    assert module is not None
    before, after = (floor(problem_of(hlo, backend=GPU))[0] for hlo in (plain, module))
    # beside what lies in the output's place, and over what is read for the last time
    assert before == 2 * NBYTES + 256
    assert after == NBYTES + NBYTES // 4


@pytest.mark.parametrize(("arrays", "pieces"), [(5.6, 0), (5.5, 1), (4.5, 1), (4.4, 2), (0.0, 2)])
def test_only_what_crowds_the_budget_is_split(arrays: float, pieces: int) -> None:
    module = made(TEXT, int(arrays * NBYTES))
    assert sum("part" in name for name in module.entry.ops) == pieces if module else pieces == 0


@pytest.mark.parametrize(
    "changes",
    [
        [
            ("multiply(%a, %t)", "reverse(%a), dimensions={0}"),
            ("multiply(%a, %c)", "multiply(%u, %c)"),
        ],  # done twice
        [("%y), kind=kLoop", "%y), kind=kInput")],
        [("%y), kind=kLoop", "%y), kind=kCustom")],
        [
            ("ROOT %last", "%last"),
            ("calls=%sine.0\n}", f"calls=%sine.0\n  ROOT %all = ({ARRAY}) tuple(%both.1)\n}}"),
        ],
    ],
)
def test_what_may_change_bits_or_costs_much_or_is_an_output_stays(
    changes: list[tuple[str, str]],
) -> None:
    text = TEXT
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    module = made(text)
    assert module is None or "both.part1" not in module.entry.ops


WHOLE = f"%l = {LONG} convert(%d)\n  %m = {LONG} convert(%e)\n  %n = {LONG} add(%l, %m)\n"


@pytest.mark.parametrize(
    ("before", "made_of", "splits"), [("", "subtract(%d, %e)", True), (WHOLE, "convert(%n)", False)]
)
def test_no_integer_goes_to_the_next_piece_as_a_float(
    before: str, made_of: str, splits: bool
) -> None:
    """It could be rounded once in one fusion, to what is narrower still."""
    text = TEXT.replace(f"  %g = {ARRAY} subtract(%d, %e)", f"{before}  %g = {ARRAY} {made_of}")
    text = text.replace(f"  %j = {MASK} compare(%g, %i), direction=GT\n", "")
    module = made(text.replace("select(%j, %f, %i)", "add(%g, %f)"))
    assert module is not None
    assert ("masked.part1" in module.entry.ops) == splits


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("masked.0.part1", "direction=GT", "direction=GE"),
        ("main", "fusion(%three, %masked.part1)", "fusion(%one, %masked.part1)"),
    ],
)
def test_pieces_that_compute_something_else_are_refused(name: str, old: str, new: str) -> None:
    module = made(TEXT)
    assert module is not None
    judge(read_module(TEXT), read_module(text_of(module)))
    with pytest.raises(NotThePlainModuleError):
        judge(read_module(TEXT), replaced(module, old, new, name))


UNARY, BINARY = ("tanh", "negate", "exponential", "abs"), ("add", "multiply", "subtract", "maximum")


@st.composite
def fusions(draw: st.DrawFn) -> str:
    """A module whose one large kernel makes two or three values of two to five."""
    reads = {name: {name} for name in (f"p{n}" for n in range(draw(st.integers(2, 5))))}
    lines = []
    for n in range(draw(st.integers(3, 10))):
        opcode = draw(st.sampled_from(UNARY + BINARY))
        operands = [draw(st.sampled_from(list(reads))) for _ in range(1 + (opcode in BINARY))]
        lines.append(f"  %q{n} = {ARRAY} {opcode}({', '.join(f'%{name}' for name in operands)})")
        reads[f"q{n}"] = set().union(*map(reads.__getitem__, operands))
    names = [name for name in reads if name.startswith("q")]
    results = draw(st.lists(st.sampled_from(names), min_size=2, max_size=3, unique=True))
    inputs = sorted(set().union(*map(reads.__getitem__, results)))
    shape, bare = (f"({', '.join([array] * len(results))})" for array in (ARRAY, "f32[1024,512]"))
    many = range(len(results))
    return "\n".join(
        [
            TEXT.partition("%both.0")[0],
            f"%many.0 ({', '.join(f'{name}: f32[1024,512]' for name in inputs)}) -> {bare} {{",
            *(f"  %{name} = {ARRAY} parameter({n})" for n, name in enumerate(inputs)),
            *(line for line, name in zip(lines, names, strict=True) if reads[name] <= set(inputs)),
            f"  ROOT %r = {shape} tuple({', '.join(f'%{name}' for name in results)})\n}}\n",
            f"ENTRY %main (x: f32[1024,512]) -> {bare} {{\n  %x = {ARRAY} parameter(0)",
            *(
                f"  %a{n} = {ARRAY} fusion(%x), kind=kLoop, calls=%sine.0"
                for n in range(len(inputs))
            ),
            f"  %many = {shape} fusion({', '.join(f'%a{n}' for n in range(len(inputs)))}), kind=kLoop, calls=%many.0",
            *(f"  %b{n} = {ARRAY} get-tuple-element(%many), index={n}" for n in many),
            *(f"  %c{n} = {ARRAY} fusion(%b{n}), kind=kLoop, calls=%sine.0" for n in many),
            f"  ROOT %end = {shape} tuple({', '.join(f'%c{n}' for n in many)})\n}}\n",
        ]
    )


def largest(module: Module) -> int:
    """Bytes that a kernel reads and writes, at the most."""
    problem = problem_of(module, backend=GPU)
    used = ({*kernel.reads, *kernel.writes} for kernel in problem.kernels)
    return max(
        sum(problem.buffers[n].nbytes for n in numbers if problem.buffers[n].role is Role.TEMPORARY)
        for numbers in used
    )


@settings(max_examples=60, deadline=None)
@given(fusions(), st.integers(0, 8))
def test_pieces_are_the_same_and_smaller(text: str, arrays: int) -> None:
    plain = read_module(text)
    pieces, module = made(text), made(text, arrays * NBYTES)
    assert module is None or largest(module) < largest(plain)
    if pieces is None:
        assert module is None
    else:
        assert made(text_of(pieces)) is None
        limit = max(largest(pieces), int(WHOLE_SHARE * arrays * NBYTES))
        assert largest(module or plain) <= limit


def masking(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """A fusion reads three products."""
    x, y, z = a @ a, b @ b, c @ c
    kept = jnp.where(jnp.tanh(x) * 0.5 + y > 0, z, 0)
    return (kept @ kept).sum()


def split_all(module: Module, problem: Problem) -> Module:
    result = split_fusions(module, problem, 0)
    assert result is not module
    return result


def test_bits_are_those_of_the_whole_on_a_cpu() -> None:
    args = [jnp.sin(jnp.arange(512.0 * 512) + n).reshape(512, 512) for n in range(3)]
    done, _, module = compile_rewritten(masking, args, "memplan_test_split_cpu", None, split_all)
    assert any("part" in name for name in module.instructions)
    plain = jax.jit(masking, compiler_options=OPTIMIZED)
    assert np.asarray(done(*args)).tobytes() == np.asarray(plain(*args)).tobytes()


@pytest.mark.gpu_aot
def test_the_compiler_takes_the_pieces_as_they_are() -> None:
    args = [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 3
    _, plain, module = compile_rewritten(masking, args, "memplan_test_split_gpu", "v100", split_all)
    before, after = (floor(problem_of(hlo, backend=GPU))[0] for hlo in (plain, module))
    assert after < before
