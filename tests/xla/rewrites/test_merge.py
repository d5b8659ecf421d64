"""Fusions as one: the same expressions, nothing read twice, and apart what could change or has to wait."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.hardware.backend import GPU
from memplan.planning.problem import Problem
from memplan.program import compat
from memplan.verify.dataflow import NotThePlainModuleError
from memplan.verify.same_module import judge
from memplan.xla.buffers import problem_of
from memplan.xla.module import Module
from memplan.xla.rewrites.merge import MERGED_SHARE, merge_fusions
from tests.goldens.steps import STEPS
from tests.hlo import lines_of, read_module, replaced, text_of
from tests.xla.costs import kernel_costs, moved_nbytes
from tests.xla.rewrites.compiled import OPTIMIZED, compile_rewritten

ARRAY, SUM, MASK = "f32[1024,512]{1,0}", "f32[512]{0}", "pred[1024,512]{1,0}"
NBYTES, ROOMY = 1024 * 512 * 4, 1 << 40
HEAD = """HloModule jit_small, is_scheduled=true

%add.0 (l: f32[], r: f32[]) -> f32[] {
  %l = f32[] parameter(0)
  %r = f32[] parameter(1)
  ROOT %t = f32[] add(%l, %r)
}
"""
FUSED = f"""{HEAD}
%masked.0 (y: f32[1024,512], g: f32[1024,512]) -> f32[1024,512] {{
  %y = {ARRAY} parameter(0)
  %g = {ARRAY} parameter(1)
  %c = f32[] constant(0)
  %i = {ARRAY} broadcast(%c), dimensions={{}}
  %j = {MASK} compare(%y, %i), direction=GT
  ROOT %k = {ARRAY} select(%j, %g, %i)
}}

%sums.0 (g: f32[1024,512], z: f32[1024,512]) -> (f32[512], f32[512]) {{
  %g = {ARRAY} parameter(0)
  %z = {ARRAY} parameter(1)
  %m = {ARRAY} multiply(%g, %z)
  %c = f32[] constant(0)
  %a = {SUM} reduce(%g, %c), dimensions={{0}}, to_apply=%add.0
  %b = {SUM} reduce(%m, %c), dimensions={{0}}, to_apply=%add.0
  ROOT %t = ({SUM}, {SUM}) tuple(%a, %b)
}}

%bent.0 (p: f32[1024,512], q: f32[1024,512]) -> f32[1024,512] {{
  %p = {ARRAY} parameter(0)
  %q = {ARRAY} parameter(1)
  %t = {ARRAY} subtract(%p, %q)
  ROOT %u = {ARRAY} tanh(%t)
}}
"""
ENTRY = f"""
ENTRY %main (x: f32[1024,512], y: f32[1024,512], z: f32[1024,512]) -> (f32[1024,512], f32[512], f32[512]) {{
  %x = {ARRAY} parameter(0)
  %y = {ARRAY} parameter(1)
  %z = {ARRAY} parameter(2)
"""
MASKED = f"  %masked = {ARRAY} fusion(%y, %x), kind=kLoop, calls=%masked.0\n"
SUMS = f"""  %sums = ({SUM}, {SUM}) fusion(%masked, %z), kind=kInput, calls=%sums.0
  %first = {SUM} get-tuple-element(%sums), index=0
  %second = {SUM} get-tuple-element(%sums), index=1
"""
BENT = f"  %bent = {ARRAY} fusion(%x, %y), kind=kLoop, calls=%bent.0\n"


def library(name: str, operand: str) -> str:
    return f'  %{name} = {ARRAY} custom-call(%{operand}), custom_call_target="{name}"\n'


def returned(*names: str) -> str:
    shape = ", ".join(
        SUM if re.fullmatch(r"first|second|v\d+\.[12]", name) else ARRAY for name in names
    )
    return f"  ROOT %out = ({shape}) tuple({', '.join(f'%{name}' for name in names)})\n}}\n"


FAR = library("far", "masked")
PAIR = FUSED + ENTRY + MASKED + FAR + SUMS + returned("far", "first", "second")
THREE = FUSED + ENTRY + MASKED + FAR + SUMS + BENT + returned("far", "first", "second", "bent")


def made(text: str, room_nbytes: int = ROOMY) -> Module | None:
    """Merged and judged; every name in it is of something."""
    module = read_module(text)
    result = merge_fusions(module, problem_of(module, backend=GPU), room_nbytes).module
    if result is module:
        return None
    judge(module, result)
    for body in result.values():
        for op in body.ops.values():
            assert body.ops.keys() >= {*op.operands, *op.predecessors}
            assert result.keys() >= set(op.called)
    return result


def changed(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


def lines(module: Module) -> list[str]:
    """Of the entry, arguments apart."""
    return [line for line in lines_of(module) if " parameter(" not in line]


def fusions(module: Module) -> dict[str, tuple[str, ...]]:
    return {op.name: op.operands for op in module.entry.ops.values() if op.opcode == "fusion"}


def test_a_maker_and_the_sums_over_its_result_are_one() -> None:
    module = made(PAIR)
    assert module is not None
    assert lines(module) == [
        f"%sums.all1 = ({ARRAY}, {SUM}, {SUM}) fusion(%y, %x, %z), kind=kInput, calls=%sums.0.all1",
        f"%masked.all1 = {ARRAY} get-tuple-element(%sums.all1), index=0",
        f'%far = {ARRAY} custom-call(%masked.all1), custom_call_target="far"',
        f"%first = {SUM} get-tuple-element(%sums.all1), index=1",
        f"%second = {SUM} get-tuple-element(%sums.all1), index=2",
        f"ROOT %out = ({ARRAY}, {SUM}, {SUM}) tuple(%far, %first, %second)",
    ]
    inside = [
        "constant",
        "broadcast",
        "compare",
        "select",
        "multiply",
        "constant",
        "reduce",
        "reduce",
        "tuple",
    ]
    assert [op.opcode for op in module["sums.0.all1"].ops.values()] == ["parameter"] * 3 + inside


def test_what_only_they_read_is_not_written() -> None:
    text = changed(PAIR, ("custom-call(%masked)", "custom-call(%z)"))
    module = made(text)
    assert module is not None
    assert str(module.entry.ops["sums.all1"].result) == str(
        read_module(text).entry.ops["sums"].result
    )
    assert moved_nbytes(read_module(text)) - moved_nbytes(module) == 2 * NBYTES


def test_one_result_is_no_tuple() -> None:
    views = f"  %flat = f32[524288]{{0}} bitcast(%masked)\n  %back = {ARRAY} bitcast(%flat)\n"
    module = made(
        FUSED + ENTRY + MASKED + views + BENT.replace("%x, %y", "%x, %back") + returned("bent")
    )
    assert module is not None
    assert lines(module) == [
        f"%bent.all1 = {ARRAY} fusion(%y, %x), kind=kLoop, calls=%bent.0.all1",
        f"ROOT %out = ({ARRAY}) tuple(%bent.all1)",
    ]


def test_siblings_are_one_and_so_are_three() -> None:
    pair, three = made(FUSED + ENTRY + MASKED + BENT + returned("masked", "bent")), made(THREE)
    assert pair is not None and three is not None
    assert (
        lines(pair)[0]
        == f"%bent.all1 = ({ARRAY}, {ARRAY}) fusion(%y, %x), kind=kLoop, calls=%bent.0.all1"
    )
    assert lines(three)[0].startswith(
        f"%sums.all1 = ({ARRAY}, {ARRAY}, {SUM}, {SUM}) fusion(%y, %x, %z), kind=kInput"
    )
    assert [
        three.entry.ops[name].index for name in ("masked.all1", "bent.all1", "first", "second")
    ] == [0, 1, 2, 3]
    assert made(text_of(three)) is None


def bent(*ops: str, shape: str = ARRAY) -> list[tuple[str, str]]:
    """What the third fusion ends in."""
    ending = "\n  ".join([*ops[:-1], f"ROOT %u = {shape} {ops[-1]}"])
    return [(f"ROOT %u = {ARRAY} tanh(%t)", ending), (f"%bent = {ARRAY}", f"%bent = {shape}")]


KIND, KEPT = "kind=kLoop, calls=%bent.0", f"ROOT %k = {ARRAY} select(%j, %g, %i)"
INTEGER = ARRAY.replace("f32", "s32")
PREDICATES = [
    (f"%z = {ARRAY} parameter(1)", f"%w = {MASK} parameter(1)\n  %z = {ARRAY} convert(%w)"),
    (f"%z = {ARRAY} parameter(2)", f"%z = {MASK} parameter(2)"),
]
OF_A_SUM = bent(
    f"%o = {SUM} parameter(2)", f"%w = {ARRAY} broadcast(%o), dimensions={{1}}", "add(%t, %w)"
)
OTHER_SUM = bent(
    "%o = f32[] constant(0)",
    "reduce(%t, %o), dimensions={1}, to_apply=%add.0",
    shape="f32[1024]{0}",
)


@pytest.mark.parametrize(
    ("stays", "changes"),
    [
        ("bent", bent("tanh(%t)", shape="f32[1024,512]{0,1}")),
        ("bent", bent("%f = f32[524288]{0} bitcast(%t)", "tanh(%f)", shape="f32[524288]{0}")),
        ("bent", bent("transpose(%t), dimensions={0,1}")),
        ("bent", bent("reverse(%t), dimensions={0}")),
        ("bent", [(KIND, "kind=kCustom, calls=%bent.0")]),
        ("bent", [(KIND, "kind=kInput, calls=%bent.0")]),  # and sums nothing
        ("bent", [*OF_A_SUM, ("fusion(%x, %y)", "fusion(%x, %z, %first)")]),
        ("sums", [*OTHER_SUM, (KIND, "kind=kInput, calls=%bent.0")]),
        ("sums", [("reduce(%m, %c), dimensions={0}", "reduce(%m, %c), dimensions={1}")]),
        # could be rounded once
        ("sums", [(KEPT, f"%n = {INTEGER} convert(%g)\n  ROOT %k = {ARRAY} convert(%n)")]),
        ("sums", bent("sine(%t)")),
        ("sums", bent("cosine(%t)")),
        ("sums", bent("power(%t, %p)")),
        ("sums", bent("convert(%t)", shape="bf16[1024,512]{1,0}")),
        ("sums", PREDICATES),
    ],
)
def test_what_may_change_bits_or_has_other_elements_stays(
    stays: str, changes: list[tuple[str, str]]
) -> None:
    module = made(changed(THREE, *changes))
    assert module is None or stays in module.entry.ops


def test_what_shares_little_stays() -> None:
    assert made(THREE.replace("1024,512", "512,512")) is not None
    assert made(THREE.replace("1024,512", "511,512")) is None


DONATED = ("=true", "=true, input_output_alias={ {0}: (0, {}, may-alias) }")


STATE = f"(s32[], {ARRAY}, {ARRAY}, {SUM}, {SUM})"
LOOP = f"""{FUSED}
%body (state: {STATE}) -> {STATE} {{
  %state = {STATE} parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %left = {ARRAY} get-tuple-element(%state), index=1
  %right = {ARRAY} get-tuple-element(%state), index=2
{MASKED.replace("%y, %x", "%left, %right")}{SUMS.replace("%z", "%left")}  %next = s32[] add(%i, %i)
  ROOT %out = {STATE} tuple(%next, %left, %masked, %first, %second)
}}

%test (given: {STATE}) -> pred[] {{
  %given = {STATE} parameter(0)
  %j = s32[] get-tuple-element(%given), index=0
  ROOT %less = pred[] compare(%j, %j), direction=LT
}}

ENTRY %main (start: {STATE}) -> f32[512] {{
  %start = {STATE} parameter(0)
  %loop = {STATE} while(%start), condition=%test, body=%body
  ROOT %end = {SUM} get-tuple-element(%loop), index=4
}}
"""


def test_fusions_of_a_loop_are_merged() -> None:
    module = made(LOOP)
    assert module is not None
    ops = module["body"].ops
    assert ops["sums.all1"].operands == ("left", "right")
    assert ops["out"].operands == ("next", "left", "masked.all1", "first", "second")


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("sums.0.all1", "direction=GT", "direction=GE"),
        ("sums.0.all1", "select(%j.all1, %g.all1, %i.all1)", "select(%j.all1, %i.all1, %g.all1)"),
        ("sums.0.all1", "multiply(%k.all1, %z.all1)", "multiply(%g.all1, %z.all1)"),
        ("main", "fusion(%y, %x, %z)", "fusion(%x, %y, %z)"),
        ("main", "kind=kInput", "kind=kLoop"),  # sums in another order
        (
            "main",
            "get-tuple-element(%sums.all1), index=1",
            "get-tuple-element(%sums.all1), index=2",
        ),
        (
            "sums.0.all1",
            "reduce(%k.all1, %c.all2), dimensions={0}",
            "reduce(%k.all1, %c.all2), dimensions={1}",
        ),
    ],
)
def test_a_module_that_computes_something_else_is_refused(name: str, old: str, new: str) -> None:
    module = made(PAIR)
    assert module is not None
    judge(read_module(PAIR), read_module(text_of(module)))
    with pytest.raises(NotThePlainModuleError):
        judge(read_module(PAIR), replaced(module, old, new, name))


UNARY, BINARY = (
    ("tanh", "negate", "exponential", "sine"),
    ("add", "multiply", "subtract", "maximum"),
)


@st.composite
def fused(draw: st.DrawFn, name: str, many: int) -> tuple[str, list[str]]:
    """What a fusion of so many arrays computes, and the shapes of its results: an array, sums, or both."""
    lines = [f"  %a{n} = {ARRAY} parameter({n})" for n in range(many)] + [
        "  %o = f32[] constant(0)"
    ]
    last = draw(st.integers(max(0, many - 2), many + 1))
    for n in range(last + 1):
        opcode = draw(st.sampled_from(BINARY if n < many - 1 else UNARY + BINARY))
        reads = f"%b{n - 1}" if n else "%a0", f"%a{(n + 1) % many}"
        lines.append(f"  %b{n} = {ARRAY} {opcode}({', '.join(reads[: 1 + (opcode in BINARY)])})")
    shapes = [ARRAY] * draw(st.integers(0, 1)) + [SUM] * draw(st.integers(0, 2)) or [ARRAY]
    results, along = (
        [last, *(draw(st.integers(0, last)) for _ in shapes[1:])],
        draw(st.sampled_from([0, 0, 0, 1])),
    )
    for n, result in enumerate(results):
        summed = f"reduce(%b{result}, %o), dimensions={{{along}}}, to_apply=%add.0"
        lines += [f"  %sum{n} = {SUM} {summed}"] if shapes[n] == SUM else []
    names = [f"%sum{n}" if shapes[n] == SUM else f"%b{result}" for n, result in enumerate(results)]
    root = f"  ROOT %t = ({', '.join(shapes)}) tuple({', '.join(names)})"
    return "\n".join([f"%{name} () -> () {{", *lines, root, "}\n"]), shapes


@st.composite
def modules(draw: st.DrawFn) -> str:
    """Fusions of the same elements, some of which sum, between what is no fusion; an argument may be donated."""
    arrays, sums, ops, computations = ["x", "y", "z"], list[str](), list[str](), list[str]()
    for n in range(draw(st.integers(2, 8))):
        reads = draw(st.lists(st.sampled_from(arrays[-6:]), min_size=1, max_size=3, unique=True))
        if draw(st.integers(0, 4)) == 0:
            ops.append(library(f"c{n}", reads[0]))
            arrays.append(f"c{n}")
            continue
        text, shapes = draw(fused(f"f{n}", len(reads)))
        computations.append(text)
        kind, operands = (
            "kInput" if SUM in shapes else "kLoop",
            ", ".join(f"%{read}" for read in reads),
        )
        ops.append(
            f"  %v{n} = ({', '.join(shapes)}) fusion({operands}), kind={kind}, calls=%f{n}\n"
        )
        for leaf, shape in enumerate(shapes):
            (arrays if shape == ARRAY else sums).append(f"v{n}.{leaf}")
            ops.append(f"  %v{n}.{leaf} = {shape} get-tuple-element(%v{n}), index={leaf}\n")
    unread = [array for array in arrays[3:] if not re.search(rf"%{array}[,)]", "".join(ops))]
    results = list(
        dict.fromkeys(
            [*unread, *draw(st.lists(st.sampled_from(arrays[3:] or sums), max_size=2)), *sums]
        )
    )
    # nobody reads that argument any more
    since = max((n for n, op in enumerate(ops) if "%x" in op), default=0)
    donated = any(f"%{results[0]} = {ARRAY}" in op for op in ops[since:]) and draw(st.booleans())
    head = HEAD.replace(*DONATED, 1) if donated else HEAD
    return "\n".join([head, *computations]) + ENTRY + "".join(ops) + returned(*results)


@settings(max_examples=50)
@given(modules(), st.sampled_from([6, 10, 20, ROOMY]))
def test_a_merged_module_is_the_same_and_moves_less(text: str, arrays: int) -> None:
    plain, room = read_module(text), arrays * NBYTES
    module = made(text, room)
    if module is None:
        return
    before, after = kernel_costs(plain), kernel_costs(module)
    assert sum(kernel.device_nbytes for kernel in after) < sum(
        kernel.device_nbytes for kernel in before
    )
    assert len(after) < len(before)
    for name, operands in fusions(module).items():
        op, opcodes = (
            module.entry.ops[name],
            [
                instruction.opcode
                for instruction in module[module.entry.ops[name].called[0]].ops.values()
            ],
        )
        assert op.kind == ("kInput" if "reduce" in opcodes else "kLoop")
        if ".all" in name:
            assert (
                op.nbytes + sum(module.entry.ops[operand].nbytes for operand in operands)
                <= MERGED_SHARE * room
            )
    made(text_of(module), room)


def test_a_tuple_that_is_read_as_a_whole_stays_readable() -> None:
    kept = f"  %kept = ({SUM}, {SUM}) opt-barrier(%sums)\n"
    at = SUMS.index("  %first")
    sums = SUMS[:at] + kept + SUMS[at:].replace("%sums", "%kept")
    made(FUSED + ENTRY + MASKED + FAR + sums + returned("far", "first", "second"))


def reading(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two fusions read one product."""
    z = a @ a
    return jnp.tanh(z) + 1, jnp.where(z > 0, jnp.exp(z), 0)


def merge_all(module: Module, problem: Problem) -> Module:
    return merge_fusions(module, problem, ROOMY).module


def test_bits_are_those_of_two_kernels_on_a_cpu() -> None:
    args = [jnp.sin(jnp.arange(1024.0 * 1024)).reshape(1024, 1024)]
    done, _, module = compile_rewritten(reading, args, "memplan_test_merge_cpu", None, merge_all)
    (name,) = (name for name in fusions(module) if ".all" in name)
    assert len(Module.read(compat.module_of(done)).instructions[name].result) == 2
    plain = jax.jit(reading, compiler_options=OPTIMIZED)
    for actual, expected in zip(done(*args), plain(*args), strict=True):
        assert np.asarray(actual).tobytes() == np.asarray(expected).tobytes()


@pytest.mark.gpu_aot
def test_the_compiler_takes_the_merged_module_as_it_is() -> None:
    step = STEPS["fft"]
    _, plain, module = compile_rewritten(
        step.function, step.arguments, "memplan_test_merge_gpu", "v100", merge_all
    )
    assert sum(".all" in name for name in fusions(module)) > 1
    assert moved_nbytes(module) < moved_nbytes(plain)
