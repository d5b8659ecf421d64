"""Loops over slabs copy what they read and write on the host, as XLA's thunks say; no kernel does it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import memplan
from memplan.hardware import catalog
from memplan.verify.dataflow import NotThePlainModuleError
from memplan.verify.same_module import judge
from memplan.xla.edit import Edit, instruction
from memplan.xla.host_copies import copy_slices, is_copy
from memplan.xla.module import Instruction, Module
from memplan.xla.replay import replay
from memplan.xla.schema import InstructionMessage
from memplan.xla.serialize import serialize
from tests.hlo import lines_of, read_module
from tests.results.test_slabs import MIB, choose_only, image_shapes, images, on_host
from tests.xla.thunks import Thunk, dump_options, dumped_thunks, loops

_HOST, _SLAB = "f32[8,4]{1,0:S(5)}", "f32[1,4]{1,0}"
_CONFIG = 'backend_config={"dynamic_slice_config":{"byte_offset":"16","byte_stride":"16","loop_index":"0"}}'
TEXT = f"""\
HloModule step, is_scheduled=true

%read (p0: f32[8,4], p1: s32[]) -> f32[1,4] {{
  %p0 = {_HOST} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = f32[1,4]{{1,0}} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={{1,4}}, {_CONFIG}
}}

%written (q0: f32[8,4], q1: f32[1,4], q2: s32[]) -> f32[8,4] {{
  %q0 = {_HOST} parameter(0)
  %q1 = f32[1,4]{{1,0}} parameter(1)
  %q2 = s32[] parameter(2)
  %none = s32[] constant(0)
  ROOT %update = {_HOST} dynamic-update-slice(%q0, %q1, %q2, %none), {_CONFIG}
}}

ENTRY %main (stack: f32[8,4], trip: s32[]) -> f32[8,4] {{
  %stack = {_HOST} parameter(0)
  %trip = s32[] parameter(1)
  %in = (({_HOST}, s32[]), {_SLAB}, u32[]) fusion-start(%stack, %trip), kind=kLoop, calls=%read
  %slab = f32[1,4]{{1,0}} fusion-done(%in)
  %out = (({_HOST}, {_SLAB}, s32[]), {_HOST}, u32[]) fusion-start(%stack, %slab, %trip), kind=kLoop, calls=%written
  ROOT %done = {_HOST} fusion-done(%out)
}}
"""


def test_a_slice_is_written_as_xla_writes_one_that_it_copies() -> None:
    module = copy_slices(read_module(TEXT), catalog.named("v100"))
    assert len([line for line in lines_of(module) if "kind=kCustom" in line]) == 2
    result = Module.read(serialize(module))
    assert [op.opcode for op in result["read"].ops.values()] == ["parameter"] * 2 + [
        "constant",
        "dynamic-slice",
        "copy",
    ]
    assert result["read"].root.operands == ("slice",)
    assert result["written"].root.operands == ("q0", "q1.copied", "q2", "none")
    for name in ("in", "out"):
        op = result.entry.ops[name]
        assert op.kind == "kCustom" and '"name":"dynamic_slice_fusion"' in op.backend_config
        assert is_copy(result, op, catalog.named("v100"))


def test_newer_gpus_get_streams_alone_and_other_fusions_nothing() -> None:
    module = read_module(TEXT)
    result = copy_slices(module, catalog.named("a100"))
    for name, number in (("in", 1), ("out", 0)):
        plain, copied = module.entry.ops[name], result.entry.ops[name]
        assert copied.frontend_attributes == {"_xla_stream_annotation": str(number)}
        assert copied == plain and (copied.kind, copied.backend_config) == ("kLoop", "")
        assert copied.statement == plain.statement
    stream = re.compile(r', frontend_attributes={_xla_stream_annotation="\d"}')
    assert [stream.sub("", line) for line in lines_of(result)] == lines_of(module)
    assert all(result[name] is module[name] for name in ("read", "written"))
    for text in (TEXT.replace(_CONFIG, "metadata={}"), TEXT.replace(":S(5)", "")):
        plain = read_module(text)
        assert copy_slices(plain, catalog.named("v100")) is plain


SYNCHRONOUS = f"""{TEXT.partition("ENTRY")[0]}
ENTRY %main (stack: f32[8,4], trip: s32[]) -> f32[8,4] {{
  %stack = {_HOST} parameter(0)
  %trip = s32[] parameter(1)
  %slab = {_SLAB} fusion(%stack, %trip), kind=kLoop, calls=%read
  ROOT %done = {_HOST} fusion(%stack, %slab, %trip), kind=kLoop, calls=%written
}}
"""


def with_other_sizes(op: Instruction) -> Instruction:
    message = InstructionMessage()
    message.CopyFrom(op.message)
    message.dynamic_slice_sizes[:] = [1, 3]
    return replace(op, message=message)


def with_another_emitter(op: Instruction) -> Instruction:
    name, replacement = '"name":"dynamic_slice_fusion"', '"name":"address_computation"'
    assert name in op.backend_config
    return op.changed(backend_config=op.backend_config.replace(name, replacement))


# computation, instruction, and what becomes of it
Mutation = tuple[str, str, Callable[[Instruction], Instruction]]
MUTATIONS: list[Mutation] = [
    ("read", "slice", lambda op: op.changed(operands=["p0", "zero", "p1"])),
    ("read", "zero", lambda op: instruction("zero", "constant", op.shape, literal=1)),
    ("read", "slice", with_other_sizes),
]


@pytest.mark.parametrize("text", [TEXT, SYNCHRONOUS])
@pytest.mark.parametrize("device", ["v100", "a100"])
def test_copies_compute_what_kernels_do_and_the_judge_kills_those_that_do_not(
    text: str, device: str
) -> None:
    plain = read_module(text)
    result = copy_slices(plain, catalog.named(device))
    judge(plain, result)
    judge(plain, Module.read(serialize(result)))
    mutations = list(MUTATIONS)
    if device == "v100":
        fusion = "in" if text == TEXT else "slab"
        mutations.append(("main", fusion, with_another_emitter))
        mutations.append(("written", "q1.copied", lambda op: op.changed(opcode="negate")))
    for name, mutated, mutation in mutations:
        edit, body = Edit(result), result[name]
        assert mutated in body.ops
        ops = [mutation(op) if op.name == mutated else op for op in body.ops.values()]
        edit.replace(body.with_ops(ops))
        with pytest.raises(NotThePlainModuleError):
            judge(plain, edit.module)
        with pytest.raises(NotThePlainModuleError):
            judge(plain, Module.read(serialize(edit.module)))


def test_what_is_annotated_is_a_copy_where_xla_makes_it_one() -> None:
    module, plain = read_module(TEXT), read_module(TEXT.replace(_CONFIG, "metadata={}"))
    for name in ("in", "out"):
        assert is_copy(module, module.entry.ops[name], catalog.named("h100"))
        assert not is_copy(module, module.entry.ops[name], catalog.named("v100"))
        assert not is_copy(plain, plain.entry.ops[name], catalog.named("h100"))


@pytest.mark.parametrize(
    ("config", "device"), [(_CONFIG, "a100"), ("metadata={}", "a100"), (_CONFIG, "v100")]
)
def test_a_kernel_that_moves_a_slice_takes_the_place_of_computation(
    config: str, device: str
) -> None:
    product = (
        "  %a = f32[4096,4096]{1,0} constant({...})\n"
        "  %dot = f32[4096,4096]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
    )
    text = TEXT.replace(_CONFIG, config).replace("  %slab = ", product + "  %slab = ")
    text = (
        text.replace("f32[8,4]", "f32[1024,65536]")
        .replace("f32[1,4]", "f32[16,65536]")
        .replace("{1,4}", "{16,65536}")
    )
    timeline = replay(read_module(text), catalog.named(device))
    inward, outward = sorted(timeline.transfers, key=lambda transfer: transfer.stream)
    copied = config == _CONFIG and device == "a100"
    read_s = max(inward.end_s, timeline.compute_s) if copied else inward.end_s + timeline.compute_s
    assert timeline.step_s == pytest.approx(read_s + outward.end_s - outward.start_s)


@pytest.mark.gpu_aot
@pytest.mark.parametrize("device", ["v100", "a100", pytest.param("h100", marks=pytest.mark.slow)])
def test_slabs_are_copied(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first convolution is written to the host by one loop, and read by two."""

    choose_only(monkeypatch, on_host)
    options = dump_options(tmp_path)
    planned = memplan.jit(images, device=device, budget=16 * MIB, compiler_options=options).plan(
        *image_shapes()
    )
    assert [(loop.copies, loop.kernels) for loop in planned.report.slab_loops] == [(1, 0)] * 3
    assert (planned.report.loop_copies, planned.report.loop_kernels) == (3, 0)
    moved = [thunk for loop in loops(dumped_thunks(tmp_path, "memplan")) for thunk in begun(loop)]
    assert len(moved) == 3
    for thunk in moved:
        assert thunk.has("kCopy") and not thunk.has("kCustomKernel")
    out, first, second = (thunk.stream for thunk in moved)
    assert out and first == second != out


def begun(loop: Thunk) -> list[Thunk]:
    return [thunk for thunk in loop.inside if thunk.kind == "kAsyncStart"]
