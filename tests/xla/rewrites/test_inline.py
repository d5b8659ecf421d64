"""Values that readers make for themselves: the same expressions, fewer bytes, and what must stay stays."""

from __future__ import annotations

import pytest

from memplan.hardware.backend import GPU
from memplan.planning.packing import pack
from memplan.planning.problem import Problem
from memplan.verify.dataflow import NotThePlainModuleError
from memplan.verify.same_module import judge
from memplan.xla.buffers import problem_of
from memplan.xla.module import Module
from memplan.xla.rewrites.inline import inline_producers
from models.train import decoder_step
from tests.hlo import read_module, replaced, text_of
from tests.xla.rewrites.compiled import compile_rewritten

ARRAY, INTEGER = "f32[1024,512]{1,0}", "s32[1024,512]{1,0}"
TEXT = f"""HloModule jit_small, is_scheduled=true

%both.0 (p: f32[1024,512], s: f32[]) -> (f32[1024,512], f32[1024,512]) {{
  %p = {ARRAY} parameter(0)
  %s = f32[] parameter(1)
  %t = {ARRAY} tanh(%p)
  %u = {ARRAY} broadcast(%s), dimensions={{}}
  %q = {ARRAY} multiply(%t, %u)
  ROOT %r = ({ARRAY}, {ARRAY}) tuple(%q, %t)
}}

%last.0 (a: f32[1024,512], b: f32[524288], c: f32[1024,512]) -> f32[1024,512] {{
  %a = {ARRAY} parameter(0)
  %b = f32[524288]{{0}} parameter(1)
  %c = {ARRAY} parameter(2)
  %d = {ARRAY} bitcast(%b)
  %e = {ARRAY} subtract(%a, %d)
  ROOT %f = {ARRAY} maximum(%e, %c)
}}

%sine.0 (p: f32[1024,512]) -> f32[1024,512] {{
  %p = {ARRAY} parameter(0)
  ROOT %q = {ARRAY} sine(%p)
}}

ENTRY %main (x: f32[1024,512], y: f32[]) -> f32[1024,512] {{
  %x = {ARRAY} parameter(0)
  %y = f32[] parameter(1)
  %w = {ARRAY} fusion(%x), kind=kLoop, calls=%sine.0
  %both = ({ARRAY}, {ARRAY}) fusion(%w, %y), kind=kLoop, calls=%both.0
  %both.0.0 = {ARRAY} get-tuple-element(%both), index=0
  %both.1 = {ARRAY} get-tuple-element(%both), index=1
  %far = {ARRAY} custom-call(%both.0.0), custom_call_target="far"
  %flat = f32[524288]{{0}} bitcast(%both.1)
  ROOT %last = {ARRAY} fusion(%far, %flat, %w), kind=kLoop, calls=%last.0
}}
"""


def made(text: str) -> Module | None:
    module = read_module(text)
    result = inline_producers(module, problem_of(module, backend=GPU))
    if result is module:
        return None
    judge(module, result)
    return result


def test_a_reader_makes_a_value_for_itself_and_its_maker_sheds_it() -> None:
    module = made(TEXT)
    assert module is not None
    entry = module.entry
    (both, last) = entry.ops["both"], entry.ops["last"]
    assert str(both.shape) == ARRAY
    assert last.operands == ("far", "w")
    opcodes = [op.opcode for op in module[both.called[0]].ops.values()]
    assert opcodes == ["parameter", "parameter", "tanh", "broadcast", "multiply"]
    inside = module[last.called[0]]
    assert [op.opcode for op in inside.ops.values()].count("tanh") == 1
    assert [str(op.shape) for op in inside.parameters.values()] == [ARRAY, ARRAY]
    assert "both.1" not in entry.ops
    assert entry.ops["far"].operands == ("both",)


def test_a_product_is_rounded_in_its_readers_too() -> None:
    module = made(
        TEXT.replace("%t = f32[1024,512]{1,0} tanh(%p)", "%t = f32[1024,512]{1,0} multiply(%p, %p)")
    )
    assert module is not None
    assert "both.1" not in module.entry.ops


def test_fewer_bytes_are_there_at_once() -> None:
    module, plain = made(TEXT), read_module(TEXT)
    assert module is not None
    before, after = (pack(problem_of(hlo, backend=GPU)).live_nbytes for hlo in (plain, module))
    assert after < before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # could be rounded once
        (f"%t = {ARRAY} tanh(%p)", f"%n = {INTEGER} convert(%p)\n  %t = {ARRAY} convert(%n)"),
        ("fusion(%far, %flat, %w)", "fusion(%far, %flat, %far)"),  # it would keep w for longer
        ("fusion(%far, %flat, %w), kind=kLoop", "fusion(%far, %flat, %w), kind=kCustom"),
        ("%flat = f32[524288]{0} bitcast(%both.1)", "%flat = f32[524288]{0} reshape(%both.1)"),
        ("fusion(%w, %y), kind=kLoop", "fusion(%w, %y), kind=kCustom"),
        (
            "%e = f32[1024,512]{1,0} subtract(%a, %d)",
            "%m = f32[1024,512]{1,0} reverse(%d), dimensions={0}\n  %e = f32[1024,512]{1,0} subtract(%a, %m)",
        ),
    ],
)
def test_what_may_change_bits_or_cost_more_stays(old: str, new: str) -> None:
    assert old in TEXT
    assert made(TEXT.replace(old, new)) is None


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("last.0.in1", "tanh(%c.2)", "sine(%c.2)"),
        ("last.0.in1", "subtract(%a.2, ", "subtract(%c.2, "),
        ("main", "fusion(%far, %w)", "fusion(%w, %far)"),
    ],
)
def test_a_module_that_computes_something_else_is_refused(name: str, old: str, new: str) -> None:
    module = made(TEXT)
    assert module is not None
    judge(read_module(TEXT), read_module(text_of(module)))
    with pytest.raises(NotThePlainModuleError):
        judge(read_module(TEXT), replaced(module, old, new, name))


@pytest.mark.gpu_aot
def test_the_compiler_takes_inlined_producers_as_they_are() -> None:
    def rewrite(module: Module, problem: Problem) -> Module:
        result = inline_producers(module, problem)
        assert result is not module
        assert pack(problem_of(result, backend=GPU)).nbytes < pack(problem).nbytes
        return result

    step, args = decoder_step(1, 256, tokens=256, vocab=1024)
    compile_rewritten(step, args, "memplan_test_inline", "v100", rewrite)
