"""The reader of XLA's dumped thunks, on a text and on a compilation."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from memplan.hardware import catalog
from memplan.program.lowerable import Lowerable
from memplan.xla.target import Target
from tests.xla.thunks import dump_options, dumped_thunks, loops, read_thunks

_TEXT = """\
001: kCustomKernel [source       | next=003 (1)] fusion_1 grid: [64, 1, 1] threads: [128, 1, 1]  shared_memory: 0 bytes
003: kAsyncStart   [prev=001 (1) | next=006 (3)] stream=memcpy_d2h_stream, async_id=3
    002: kCopy [source | sink] (no description)
004: kAsyncDone    [source       | sink        ] async_id=3
010: kWhile        [prev=009 (1) | next=023 (1)]   
condition:
    011: kCustomKernel [source | sink] less grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
  body:
    012: kWhile        [source       | next=014 (1)]   
condition:
        013: kCustomKernel [source | sink] less grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
  body:
        013: kCopy [source | sink] kCopy
    000: kCommandBuffer [prev=013 (2) | sink        ] 
        014: kCublasLtMatmul [source       | sink] kCublasLtMatmul
023: kCopy         [prev=010 (1) | sink        ] kCopy
"""  # noqa: W291


def test_a_text():
    kernel, start, done, loop, copy = read_thunks(_TEXT)
    assert (kernel.kind, kernel.name, kernel.stream) == ("kCustomKernel", "fusion_1", "")
    assert start.stream == "memcpy_d2h_stream"
    assert [thunk.kind for thunk in start.inside] == ["kCopy"]
    assert (done.kind, copy.kind) == ("kAsyncDone", "kCopy")
    assert [(thunk.kind, thunk.part) for thunk in loop.inside] == [
        ("kCustomKernel", "condition"),
        ("kWhile", "body"),
        ("kCommandBuffer", "body"),
    ]
    assert [thunk.part for thunk in loop.inside[1].inside] == ["condition", "body"]
    assert loop.inside[2].has("kCublasLtMatmul")


def test_an_unknown_line_is_an_error():
    with pytest.raises(ValueError, match="kElsewhere"):
        read_thunks("001 kElsewhere")


@pytest.mark.gpu_aot
def test_a_compilation(tmp_path: Path):
    def step(x):
        def inner(_, x):
            return jnp.sin(jnp.sin(jnp.sin(x @ x) @ x) @ x) @ x

        def outer(x, _):
            return jax.lax.fori_loop(0, 3, inner, x) + 1, None

        return jax.lax.scan(outer, x, length=4)[0]

    target = Target(catalog.named("a100"), described=True)
    target.compile(
        Lowerable(step, [jax.ShapeDtypeStruct((256, 256), jnp.float32)]), dump_options(tmp_path)
    )
    loop_thunks = loops(dumped_thunks(tmp_path))
    assert len(loop_thunks) == 2
    assert loop_thunks[1] in loop_thunks[0].inside
    assert any(thunk.has("kCommandBuffer") for thunk in dumped_thunks(tmp_path, after_passes=True))
    assert not any(thunk.has("kCommandBuffer") for thunk in dumped_thunks(tmp_path))
