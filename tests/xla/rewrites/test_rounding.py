"""What keeps its last bits in another fusion: what is rounded, and sums in their order."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from memplan.hardware import catalog
from memplan.program.lowerable import Lowerable
from memplan.xla.edit import fused_computation, instruction
from memplan.xla.gpu.platform import described_devices
from memplan.xla.module import Computation, Instruction
from memplan.xla.rewrites.fusion import keeps_bits, narrowest_bits, prevents_vectorization
from memplan.xla.shapes import Array
from memplan.xla.target import Target

VECTOR = Array.row_major("f32", (4,))


def instructions(text: str) -> list[Instruction]:
    """From `m = multiply(a, b); n = s32 convert(m)`, floats unless they say otherwise; a root."""
    ops = list[Instruction]()
    for statement in text.split("; "):
        name, _, call = statement.partition(" = ")
        said, _, operands = call.rstrip(")").partition("(")
        dtype, _, opcode = said.rpartition(" ")
        ops.append(
            instruction(name, opcode, Array.row_major(dtype or "f32", (4,)), operands.split(", "))
        )
    return [*ops[:-1], ops[-1].changed(root=True)]


def computed(text: str) -> Computation:
    """A computation of two parameters that ends so."""
    return fused_computation("f", [("a", VECTOR), ("b", VECTOR)], instructions(text))


@pytest.mark.parametrize(
    ("text", "keeps"),
    [
        ("m = multiply(a, b)", True),
        ("m = add(a, b); r = convert(m)", True),
        ("m = s32 convert(a)", True),
        ("n = s32 convert(a); r = convert(n)", False),
        ("n = u8 convert(a); m = convert(n); r = bitcast(m)", False),
        ("n = pred convert(a); r = convert(n)", True),
        ("n = s32 convert(a); m = convert(n); r = negate(m)", True),
    ],
)
def test_all_but_an_integer_that_becomes_a_float_is_rounded_within_as_between(
    text: str, keeps: bool
) -> None:
    fused = computed(text)
    assert keeps_bits(fused, fused.root) == keeps


def test_the_narrowest_arrays_are_those_of_the_fewest_bits() -> None:
    read = [
        instruction(dtype, "parameter", Array.row_major(dtype, (4,)), parameter_number=number)
        for number, dtype in enumerate(("f32", "pred", "s4"))
    ]
    shape = VECTOR, (Array.row_major("bf16", (4,)), Array.row_major("f64", (4,)))
    several = instruction("several", "fusion", shape, ["f32", "pred"])
    assert narrowest_bits(several, read[:1]) == (32, 16)
    assert narrowest_bits(several, read[:2]) == (8, 16)
    assert narrowest_bits(read[0], read) == (4, 32)
    assert narrowest_bits(several, [several]) == (16, 16)
    assert narrowest_bits(read[1], []) == (0, 8)


def test_some_functions_are_read_for_prevents_vectorization() -> None:
    opcodes = [
        "sine",
        "tanh",
        "cosine",
        "exponential",
        "tan",
        "multiply",
        "power",
        "log",
        "atan2",
        "rsqrt",
    ]
    scalar_opcodes = [
        opcode
        for opcode in opcodes
        if prevents_vectorization(computed(f"m = {opcode}(a, b); r = add(m, b)"))
    ]
    assert scalar_opcodes == ["sine", "cosine", "tan", "power", "atan2"]


@pytest.mark.gpu_aot
@pytest.mark.parametrize("name", ["v100", "h200"])
def test_within_a_fusion_products_sums_and_conversions_are_rounded(
    name: str, tmp_path: Path
) -> None:
    """As XLA's PTX says it to the assembler, in whose place a script keeps what it is handed."""
    (real,) = pytest.importorskip("nvidia.cuda_nvcc").__path__
    kept = tmp_path / "kept"
    for folder in (kept, tmp_path / "bin"):
        folder.mkdir()
    (tmp_path / "nvvm").symlink_to(Path(real) / "nvvm")
    script = tmp_path / "bin" / "ptxas"
    keep = f'for one in "$@"; do test -f "$one" && cp "$one" {shlex.quote(str(kept))}; done'
    script.write_text(f'#!/bin/sh\n{keep}\nexec {shlex.quote(real)}/bin/ptxas "$@"\n')
    script.chmod(0o755)

    def step(x: jax.Array, y: jax.Array, z: jax.Array) -> Any:
        a, b, c = (operand.astype(jnp.float16) for operand in (x, y, z))
        return x * y + z, (a * b + c).astype(jnp.float32) * z, (x * y + 1).sum(0)

    target = Target(catalog.DEVICES[name], described=True)
    mine = {
        "xla_gpu_cuda_data_dir": str(tmp_path),
        "xla_gpu_kernel_cache_file": str(tmp_path / "kernels"),
    }
    described_devices(target.device)
    target.compile(Lowerable(step, [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 3), mine)
    text = "\n".join(
        path.read_text() for path in kept.iterdir() if path.read_bytes().lstrip()[:2] != b"\x7fE"
    )
    done = re.findall(
        r"^\s+((?:add|sub|mul|fma|mad)\.(?:[a-z.]+\.)?(?:f32|f16x2|f16|bf16))\s", text, re.MULTILINE
    )
    assert {"mul.rn.f32", "add.rn.f32", "mul.rn.f16", "add.rn.f16"} == set(done)
    assert re.search(r"cvt\.rn\.f16\.f32", text) and re.search(r"cvt\.f32\.f16", text)
