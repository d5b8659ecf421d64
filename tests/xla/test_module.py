"""Modules are read from XLA's messages and written back as they were; instructions state facts."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from memplan.program import compat
from memplan.xla.edit import Edit, copy_done, copy_start
from memplan.xla.module import Instruction, Module
from memplan.xla.schema import ModuleMessage, UnreadableModuleError
from memplan.xla.serialize import serialize
from memplan.xla.shapes import Array
from tests.hlo import read_instruction, read_module, text_of

# Compiled by jax 0.11.2 on an H200, with cuDNN's kernels as XLA timed them there.
FOLDER = Path(__file__).parents[2] / "experiments" / "gpu" / "results" / "kernels" / "nvidia-h200"
REAL = (
    "kernels-of-2d-u-net",
    "kernels-of-3d-u-net-128-3-half",  # loops over slabs, asynchronous copies of slices
    "kernels-of-decoder-scanned-loops",
    "kernels-of-resnet-50-half",  # copies to the host and back
    "products-and-memory-products-bfloat16",
)
LARGE = {"kernels-of-3d-u-net-128-3-half", "kernels-of-resnet-50-half"}


def of_this_process() -> Iterator[tuple[str, bytes]]:
    """Modules with a loop, a branch, a convolution, random numbers and a large constant."""
    table = jnp.arange(1 << 15, dtype="float32")

    def step(weights: jax.Array, image: jax.Array, key: jax.Array) -> Any:
        def trip(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(carry @ weights), None

        looped, _ = jax.lax.scan(trip, image[0, :, :, 0], length=3)
        branched = jax.lax.cond(looped.sum() > 0, jnp.sin, jnp.cos, looped)
        filtered = jax.lax.conv_general_dilated(image, weights[None, None, :8, :8], (2, 2), "SAME",
                                                dimension_numbers=("NHWC", "HWIO", "NHWC"))  # fmt: skip
        drawn = jax.random.uniform(key, (64,)) + table[:64] * table[-64:]
        return (
            branched,
            jnp.pad(filtered, ((0, 0), (1, 2), (0, 0), (0, 0))).max(),
            drawn,
            jnp.sort(table),
        )

    args = jnp.ones((16, 16)), jnp.ones((2, 16, 16, 8)), jax.random.key(0)
    compiled: Any = jax.jit(step).lower(*args).compile()
    (read,) = compiled.runtime_executable().hlo_modules()
    yield "compiled here", read.as_serialized_hlo_module_proto()


def modules() -> dict[str, bytes]:
    real = {name: gzip.decompress((FOLDER / f"{name}.hlo.gz").read_bytes()) for name in REAL}
    return {**real, **dict(of_this_process())}


PROTOS = modules()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LARGE)) for name in PROTOS]
)
def test_what_is_written_is_what_was_read(name: str) -> None:
    graph = Module.read(PROTOS[name])
    text = compat.module_text(PROTOS[name])
    anew = graph.with_computations(
        {
            body.name: body.with_ops(op.changed() for op in body.ops.values())
            for body in graph.values()
        }
    )
    assert compat.module_text(serialize(graph)) == text
    assert compat.module_text(serialize(anew)) == text
    assert anew.fingerprint == graph.fingerprint == Module.read(serialize(anew)).fingerprint


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LARGE)) for name in REAL[:4]]
)
def test_a_fusion_runs_twice(name: str) -> None:
    """A clone with a computation of its own, right before its original's last reader, which reads it instead."""
    graph = Module.read(PROTOS[name])
    entry, edit = graph.entry, Edit(graph)
    fusion = next(
        op for op in entry.ops.values()
        if op.opcode == "fusion" and not isinstance(op.shape, tuple) and len(entry.uses[op.name]) > 1
    )  # fmt: skip
    reader = entry.uses[fusion.name][-1][0]
    clones = edit.clone(fusion.called[0], "run", 2)
    again = fusion.changed(
        name=edit.fresh(fusion.name, "run", 2),
        root=False,
        called={fusion.called[0]: clones[-1].name},
    )
    ops = list[Instruction]()
    for op in entry.ops.values():
        ops += [again, op.with_operands({fusion.name: again.name})] if op is reader else [op]
    edit.replace(entry.with_ops(ops), clones)
    written = Module.read(serialize(edit.module))
    assert written.entry.ops[again.name].called == (clones[-1].name,)
    assert again.name in written.entry.ops[reader.name].operands
    assert list(written.entry.ops).index(again.name) + 1 == list(written.entry.ops).index(
        reader.name
    )
    inside = [op.opcode for op in written[clones[-1].name].ops.values()]
    assert inside == [op.opcode for op in graph[fusion.called[0]].ops.values()]
    assert "is_scheduled=true" in compat.module_text(serialize(edit.module)), "XLA reads it"


def compiled(step: Any, *args: Any, **options: Any) -> Module:
    return Module.read(compat.module_of(jax.jit(step, **options).lower(*args).compile()))


def test_a_compiled_module_is_read_whole() -> None:
    def step(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, _ = jax.lax.scan(lambda y, _: (jnp.tanh(y @ x), None), state, length=3)
        return y, y.sum()

    module = compiled(step, jnp.ones((8, 8)), jnp.ones((8, 8)), donate_argnums=0)
    assert module.name == "jit_step"
    assert module.aliases == {0: 0}
    assert sorted(module.entry.parameters) == [0, 1]
    for body in module.values():
        written: set[str] = set()
        for op in body.ops.values():
            assert set(op.operands) <= written
            assert set(op.called) <= set(module)
            written.add(op.name)


def test_an_asynchronous_pair_says_what_it_wraps() -> None:
    op = read_instruction(
        "  %s = ((f32[8]{0}), f32[8]{0}) all-reduce-start(%a), channel_id=3, replica_groups={{0,1},{2,3}}, "
        "use_global_device_ids=true, to_apply=%add, output_to_operand_aliasing={{1}: (0, {})}, "
        'frontend_attributes={stream="1"}, metadata={op_name="jit(step)/psum" stack_frame_id=3}'
    )
    assert (op.opcode, op.channel, op.counts_devices, op.to_apply) == (
        "all-reduce-start",
        3,
        True,
        "add",
    )
    assert op.groups(4) == ((0, 1), (2, 3))
    assert (op.aliased_outputs, op.frontend_attributes) == ((((1,), 0),), {"stream": "1"})
    assert (op.op_name, op.frame, op.has_metadata) == ("jit(step)/psum", 3, True)
    assert [array.nbytes for array in op.result] == [32, 32]


def test_a_loop_calls_its_condition_first() -> None:
    module = compiled(lambda x: jax.lax.fori_loop(0, 5, lambda i, x: jnp.sin(x), x), jnp.ones(8))
    (loop,) = (op for op in module.instructions.values() if op.opcode == "while")
    assert loop.called == (loop.condition, loop.body) and loop.trip_count == 5
    assert module[loop.condition].root.result[0].dtype == "pred"


def test_what_is_not_scheduled_is_refused() -> None:
    text = "HloModule m\n\nENTRY %e (a: f32[]) -> f32[] {\n  ROOT %a = f32[] parameter(0)\n}\n"
    with pytest.raises(UnreadableModuleError, match="has not scheduled the module m"):
        read_module(text)
    assert not read_module(text, scheduled=False).is_scheduled


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda op: setattr(op, "id", 7), "has the id 7"),
        (lambda op: setattr(op, "opcode", "teleport"), "teleport"),
        (lambda op: op.MergeFromString(b"\xa2\x3e\x00"), "field 996"),
    ],
)
def test_what_memplan_does_not_know_is_refused(damage: Any, message: str) -> None:
    module = ModuleMessage.FromString(PROTOS["compiled here"])
    damage(module.computations[0].instructions[0])
    with pytest.raises(UnreadableModuleError, match=message):
        Module.read(module.SerializeToString())


def test_a_part_of_a_tuple_cannot_be_donated() -> None:
    text = """HloModule m, is_scheduled=true, input_output_alias={ {0}: (0, {1}, may-alias) }

ENTRY %e (a: (f32[], f32[])) -> (f32[]) {
  %a = (f32[], f32[]) parameter(0)
  %b = f32[] get-tuple-element(%a), index=1
  ROOT %r = (f32[]) tuple(%b)
}
"""
    with pytest.raises(UnreadableModuleError, match="donates a part of a tuple"):
        _ = read_module(text).aliases


def test_arrays_that_were_put_on_the_device_make_no_other_module() -> None:
    device = jax.devices()[0]

    def fingerprint(*arrays: jax.Array) -> str:
        return compiled(lambda x, y: x @ y, *arrays).fingerprint

    x = jnp.ones((8, 8))
    assert fingerprint(x, x) == fingerprint(jax.device_put(x, device), x)
    assert fingerprint(x, x) != fingerprint(x, jnp.ones((8, 9)))


def test_a_fingerprint_does_not_depend_on_the_numbers_of_constants() -> None:
    text = """HloModule m, is_scheduled=true, entry_computation_layout={()->s32[]}

ENTRY %main () -> s32[] {
  %constant_7_0 = s32[] constant(3)
  %constant_9 = s32[] constant(4)
  ROOT %sum = s32[] subtract(%constant_7_0, %constant_9)
}
"""
    module, renumbered = (
        read_module(text),
        read_module(text.replace("constant_7_0", "constant_2111_0")),
    )
    swapped = read_module(
        text.replace("(%constant_7_0, %constant_9)", "(%constant_9, %constant_7_0)")
    )
    assert (module.fingerprint, module.structure) == (renumbered.fingerprint, renumbered.structure)
    assert module.fingerprint != swapped.fingerprint and module.structure != swapped.structure


@pytest.mark.parametrize(
    ("shape", "nbytes"),
    [
        ("f32[16384]{0}", 1 << 16),
        ("f32[16383]{0}", 0),
        ("bf16[2,128,128]{2,1,0:T(8,128)}", 1 << 16),
        ("pred[65536]{0}", 1 << 16),
        ("s32[]", 0),
    ],
)
def test_constants_are_large_by_what_they_take(shape: str, nbytes: int) -> None:
    value = 7 if shape == "s32[]" else "{...}"
    text = f"""\
HloModule m, is_scheduled=true

%fused () -> f32[] {{
  ROOT %one.2 = {shape} constant({value})
}}

ENTRY %main () -> f32[] {{
  ROOT %two = {shape} fusion(), kind=kLoop, calls=%fused
}}
"""
    constants = read_module(text).large_constants
    assert [(op.name, op.nbytes) for op in constants] == ([("one.2", nbytes)] if nbytes else [])


FUSION = "  %f = f32[] fusion(%x, %y), kind=kLoop, calls=%g, control-predecessors={%y}"


def test_an_instruction_changes_by_its_facts() -> None:
    op = read_instruction(FUSION)
    config = '{"fusion_backend_config":{"kind":"__custom_fusion"}}'
    changed = op.changed(
        kind="kCustom", frontend_attributes={"stream": "1"}, backend_config=config, ordered=False
    )
    assert (changed.kind, changed.frontend_attributes, changed.backend_config) == (
        "kCustom",
        {"stream": "1"},
        config,
    )
    assert op.predecessors == ("y",) and changed.predecessors == () and changed.called == ("g",)
    again = changed.changed(
        frontend_attributes={"stream": "0"}, backend_config="{}", called={"g": "g.run2"}
    )
    assert (again.frontend_attributes, again.backend_config, again.called) == (
        {"stream": "0"},
        "{}",
        ("g.run2",),
    )
    assert (op.kind, op.frontend_attributes, op.backend_config) == ("kLoop", {}, "")


def test_an_instruction_that_changes_in_nothing_is_itself() -> None:
    op = read_instruction(FUSION)
    assert op.changed(name="f", operands=["x", "y"], root=False, called={"other": "x"}) is op


def test_a_copy_says_from_where_to_where() -> None:
    array = Array.row_major("f32", (8,))
    start = copy_start("s", array.in_host_memory, array, "x", {"stream": "0"})
    assert [str(part) for part in start.result] == ["f32[8]{0:S(5)}", "f32[8]{0}", "u32[]"]
    assert (start.operands, start.frontend_attributes) == (("x",), {"stream": "0"})
    assert copy_done("d", array.in_host_memory, "s").result[0].on_host


def test_a_clone_has_clones_of_what_it_calls_before_it() -> None:
    module = read_module("""HloModule m, is_scheduled=true

%inner (p: f32[8]) -> f32[8] {
  ROOT %p = f32[8]{0} parameter(0)
}

%outer (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %q = f32[8]{0} fusion(%p), kind=kLoop, calls=%inner
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %y = f32[8]{0} call(%x), to_apply=%outer
}
""")
    edit = Edit(module)
    inner, outer = edit.clone("outer", "run", 2)
    assert (inner.name, outer.name, outer.root.called) == (
        "inner.run2",
        "outer.run2",
        ("inner.run2",),
    )
    assert edit.module is module
    called = module.entry.root.changed(called={"outer": outer.name})
    edit.replace(module.entry.with_ops([module.entry.ops["x"], called]), [inner, outer])
    assert "%outer.run2 (" in text_of(edit.module), "XLA reads it, though names repeat in it"
