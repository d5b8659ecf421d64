"""The module as a graph says what XLA's text says, and is written back as it was, on real modules of both kinds."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from memplan.program import compat
from memplan.xla import hlo, module
from memplan.xla.large_literals import set_aside
from memplan.xla.schema import ModuleMessage

# Compiled by jax 0.11.2 on an H200, with cuDNN's kernels as XLA timed them there.
FOLDER = Path(__file__).parents[2] / "experiments" / "gpu" / "results" / "kernels" / "nvidia-h200"
REAL = (
    "kernels-of-2d-u-net",
    "kernels-of-3d-u-net-128-3-half",  # loops over slabs, asynchronous copies of slices
    "kernels-of-decoder-scanned-loops",
    "kernels-of-resnet-50-half",  # copies to the host and back
    "products-and-memory-products-bfloat16",
)
FACTS = (
    "opcode", "shape", "operands", "predecessors", "root", "kind", "target", "is_allocation", "trip_count",
    "aliased_outputs", "slices", "slice_sizes", "padding", "contracted", "filter_labels", "base_dilation", "channel",
    "counts_devices", "is_zero", "is_positive_zero", "source_target_pairs", "has_side_effect", "nbytes",
)  # fmt: skip
NUMBERS = {"get-tuple-element": "index", "parameter": "parameter_number", "reduce": "dimensions"}


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
        return branched, jnp.pad(filtered, ((0, 0), (1, 2), (0, 0), (0, 0))).max(), drawn, jnp.sort(table)

    args = jnp.ones((16, 16)), jnp.ones((2, 16, 16, 8)), jax.random.key(0)
    compiled: Any = jax.jit(step).lower(*args).compile()
    (read,) = compiled.runtime_executable().hlo_modules()
    yield "compiled here", read.as_serialized_hlo_module_proto()


def modules() -> dict[str, bytes]:
    real = {name: gzip.decompress((FOLDER / f"{name}.hlo.gz").read_bytes()) for name in REAL}
    return {**real, **dict(of_this_process())}


PROTOS = modules()


@pytest.mark.parametrize("name", PROTOS)
def test_the_graph_says_what_the_text_says(name: str) -> None:
    graph = hlo.Module.read(PROTOS[name])
    text = module.read_module(compat.module_text(set_aside(PROTOS[name])[0]))
    assert list(graph.instructions) == list(text.instructions)
    assert (graph.name, graph.entry_name, graph.aliases) == (text.name, text.entry_name, text.aliases)
    assert set(graph) == set(text)
    for body in text.values():
        assert list(graph[body.name].ops) == list(body.ops)
        for op in body.ops.values():
            ours = graph[body.name].ops[op.name]
            facts = (*FACTS, NUMBERS[op.opcode]) if op.opcode in NUMBERS else FACTS
            assert {fact: getattr(ours, fact) for fact in facts} == {fact: getattr(op, fact) for fact in facts}
            assert sorted(ours.called) == sorted(op.called)
            if op.opcode == "while":
                assert (ours.body, ours.condition) == (op.body, op.condition)
            if op.integers is not None:
                assert ours.integers in (None, op.integers)


@pytest.mark.parametrize("name", PROTOS)
def test_what_is_written_is_what_was_read(name: str) -> None:
    graph = hlo.Module.read(PROTOS[name])
    text = compat.module_text(PROTOS[name])
    anew = graph.with_computations(
        {body.name: body.with_ops(op.changed() for op in body.ops.values()) for body in graph.values()}
    )
    assert compat.module_text(graph.write()) == text
    assert compat.module_text(anew.write()) == text
    assert anew.fingerprint == graph.fingerprint == hlo.Module.read(anew.write()).fingerprint


@pytest.mark.parametrize("name", REAL[:4])
def test_a_fusion_runs_twice(name: str) -> None:
    """A clone with a computation of its own, right before its original's last reader, which reads it instead."""
    graph = hlo.Module.read(PROTOS[name])
    entry, edit = graph.entry, hlo.Edit(graph)
    fusion = next(
        op for op in entry.ops.values()
        if op.opcode == "fusion" and not isinstance(op.shape, tuple) and len(entry.uses[op.name]) > 1
    )  # fmt: skip
    reader = entry.uses[fusion.name][-1][0]
    clones = edit.clone(fusion.called[0], "run", 2)
    again = fusion.changed(
        name=edit.fresh(fusion.name, "run", 2), root=False, called={fusion.called[0]: clones[-1].name}
    )
    ops = list[hlo.Instruction]()
    for op in entry.ops.values():
        ops += [again, op.with_operands({fusion.name: again.name})] if op is reader else [op]
    edit.replace(entry.with_ops(ops), clones)
    written = hlo.Module.read(edit.module.write())
    assert written.entry.ops[again.name].called == (clones[-1].name,)
    assert again.name in written.entry.ops[reader.name].operands
    assert list(written.entry.ops).index(again.name) + 1 == list(written.entry.ops).index(reader.name)
    inside = [op.opcode for op in written[clones[-1].name].ops.values()]
    assert inside == [op.opcode for op in graph[fusion.called[0]].ops.values()]
    assert "is_scheduled=true" in compat.module_text(edit.module.write()), "XLA reads it"


def test_numbers_of_another_kind_are_refused() -> None:
    message = ModuleMessage.FromString(PROTOS["compiled here"])
    message.computations[0].instructions[0].id = 7
    with pytest.raises(hlo.UnreadableModuleError, match="has the id 7"):
        hlo.Module.read(message.SerializeToString())
