"""Lines of the user's code and scopes behind instructions."""

from __future__ import annotations

import itertools
from pathlib import Path

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import memplan
from memplan.program import compat
from memplan.xla import hook
from memplan.xla.module import Module
from memplan.xla.sources import Sources, layer_of
from tests.hlo import read_module

USER, LIBRARY, OWN = (
    "/home/someone/train.py",
    "/usr/lib/python3.12/site-packages/flax/linen.py",
    "program/targets.py",
)
FILES = (USER, LIBRARY, f"{Path(memplan.__file__).parent}/{OWN}")
Frame = tuple[int, int]  # number of the file, of the frame around it or -1


def head_with(frames: list[Frame]) -> str:
    """The head of a module with these frames; the line is the frame's number."""
    names = [f'{i + 1} "{name}"' for i, name in enumerate(FILES)]
    places = [
        f"{i + 1} {{file_name_id={file + 1} function_name_id=1 line={i} end_line={i} column=1 end_column=1}}"
        for i, (file, _) in enumerate(frames)
    ]
    # XLA writes the number after that of the frame around
    stacks = [
        f"{i + 1} {{file_location_id={i + 1} parent_frame_id={up + 2}}}"
        for i, (_, up) in enumerate(frames)
    ]
    tables = {
        "FileNames": names,
        "FunctionNames": ['1 "step"'],
        "FileLocations": places,
        "StackFrames": stacks,
    }
    head = "\n\n".join("\n".join([name, *lines]) for name, lines in tables.items())
    return f"HloModule jit_step, is_scheduled=true\n\n{head}\n\n\n"


def module(frames: list[Frame]) -> Module:
    """An instruction of every frame, `%i0` and so on; the line is the frame's number."""
    constant = "f32[2]{0} constant({0, 0}), metadata={stack_frame_id="
    ops = [f"  %i{i} = {constant}{i + 1}}}" for i in range(len(frames))]
    body = "\n".join(["ENTRY %main () -> f32[] {", *ops, "  ROOT %end = f32[] constant(0)", "}"])
    return read_module(f"{head_with(frames)}{body}\n")


def sources(module: Module) -> dict[str, str]:
    origins = Sources(module)
    return {name: line for name in module.instructions if (line := origins.line(name))}


def scopes(module: Module) -> dict[str, str]:
    origins = Sources(module)
    return {name: scope for name in module.instructions if (scope := origins.scope(name))}


def test_a_library_is_passed_over() -> None:
    assert sources(module([(0, -1), (1, 0)])) == {"i0": f"{USER}:0", "i1": f"{USER}:0"}


def test_a_library_alone_is_named() -> None:
    assert sources(module([(1, -1), (1, 0)])) == {"i0": f"{LIBRARY}:0", "i1": f"{LIBRARY}:1"}


def test_files_of_memplan_are_never_named() -> None:
    assert sources(module([(2, -1)])) == {}
    assert sources(module([(0, -1), (2, 0)]))["i1"] == f"{USER}:0"
    assert sources(module([(1, -1), (2, 0)]))["i1"] == f"{LIBRARY}:0"


def test_who_calls_memplan_is_named_only_where_nothing_within_is() -> None:
    """A line of the user's plans a step that is a library's."""
    assert sources(module([(0, -1), (2, 0), (1, 1)]))["i2"] == f"{LIBRARY}:2"


FRAMES = st.lists(st.integers(0, 2), min_size=1, max_size=8).flatmap(
    lambda files: st.tuples(
        *(st.tuples(st.just(file), st.integers(-1, i - 1)) for i, file in enumerate(files))
    )
)


@given(FRAMES)
def test_it_is_the_innermost_line_of_the_best_kind(frames: tuple[Frame, ...]) -> None:
    expected = {}
    for number in range(len(frames)):
        index, outward = number, []
        while index >= 0:
            outward.append(index)
            index = frames[index][1]
        own = next((at for at, frame in enumerate(outward) if frames[frame][0] == 2), len(outward))
        for path, kind in itertools.product((outward[:own], outward[own:]), (0, 1)):
            lines = [f"{FILES[kind]}:{frame}" for frame in path if frames[frame][0] == kind]
            if lines and f"i{number}" not in expected:
                expected[f"i{number}"] = lines[0]
    assert sources(module(list(frames))) == expected


def test_what_xla_adds_has_the_line_of_what_it_reads() -> None:
    """The last that tells within a fusion, else the operand, else the reader."""
    body = """\
%fused (x: bf16[2]) -> bf16[2] {
  %x = bf16[2]{0} parameter(0)
  %first = f32[2]{0} convert(%x), metadata={stack_frame_id=1}
  %second = f32[2]{0} tanh(%first), metadata={op_name="jit(f)/inner/tanh" stack_frame_id=2}
  ROOT %end = bf16[2]{0} convert(%second)
}

%alone (x: bf16[2]) -> f32[2] {
  %x = bf16[2]{0} parameter(0)
  ROOT %end = f32[2]{0} convert(%x)
}

ENTRY %main (given: bf16[2]) -> f32[2] {
  %given = bf16[2]{0} parameter(0), metadata={op_name="given"}
  %early = f32[2]{0} fusion(%given), kind=kLoop, calls=%alone
  %ended = bf16[2]{0} fusion(%early), kind=kLoop, calls=%fused
  %after = f32[2]{0} fusion(%ended), kind=kLoop, calls=%alone
  %last = f32[2]{0} copy(%after)
  ROOT %other = f32[2]{0} negate(%last), metadata={op_name="jit(f)/other" stack_frame_id=3}
}
"""
    text = head_with([(0, -1), (0, -1), (0, -1)]) + body
    names = "early", "ended", "after", "last"
    assert sources(read_module(text)) == dict.fromkeys(names, f"{USER}:1") | {"other": f"{USER}:2"}
    assert scopes(read_module(text)) == dict.fromkeys(names, "inner")


def test_text_without_tables_tells_nothing() -> None:
    text = "HloModule m, is_scheduled=true\n\nENTRY %e () -> f32[] {\n  ROOT %a = f32[] constant(0), metadata={}\n}\n"
    assert sources(read_module(text)) == scopes(read_module(text)) == {}


def step(x: jax.Array) -> jax.Array:
    with jax.named_scope("outer"):
        y, _ = jax.lax.scan(lambda y, _: (y @ x, None), x, length=3)
    return y @ x


LINE = step.__code__.co_firstlineno
SHAPE = jax.ShapeDtypeStruct((64, 64), "float32")


@pytest.mark.parametrize("hooked", [False, True])
def test_what_this_jax_writes_is_read(hooked: bool) -> None:
    modules: list[Module] = []

    def framed(x: jax.Array) -> jax.Array:
        return step(x)

    framed.__name__ = f"framed_{hooked}"
    with hook.intercept(f"jit_{framed.__name__}", modules.append, "cpu"):
        compiled = jax.jit(framed).lower(SHAPE).compile()
    modules.append(Module.read(compat.module_of(compiled)))
    read = modules[0 if hooked else 1]
    within = scopes(read)
    places = {(line, within.get(name, "")) for name, line in sources(read).items()}
    inside, after = (f"tests/xla/test_sources.py:{LINE + line}" for line in (2, 3))
    assert {line for line, _ in places} == {inside, after}
    assert {scope.split("/")[0] for line, scope in places if line == inside} == {"outer"}
    assert any(scope.startswith("outer/while/body/") for _, scope in places)
    assert {scope for line, scope in places if line == after} == {""}


def test_a_scope_is_the_way_between_step_and_primitive() -> None:
    paths = {
        "conv": "jit(step)/transpose(jvp(UNet))/down_0/conv/conv_general_dilated",
        "relu": "jit(step)/jvp(UNet)/down_0/jit(relu)/max",
        "plain": "jit(step)/add",
        "argument": "state.params[\\'a/b\\'][\\'kernel\\']",
        "wrapped": "reduce_sum",
    }
    lines = [
        f'  %{name} = f32[] constant(0), metadata={{op_name="{path}" stack_frame_id=3}}'
        for name, path in paths.items()
    ]
    body = "\n".join(["ENTRY %main () -> f32[] {", *lines, "  ROOT %end = f32[] constant(0)", "}"])
    assert scopes(read_module(f"HloModule m, is_scheduled=true\n\n{body}\n")) == {
        "conv": "transpose(jvp(UNet))/down_0/conv",
        "relu": "jvp(UNet)/down_0/jit(relu)",
    }


@pytest.mark.parametrize(
    ("scope", "layer"),
    [
        ("transpose(jvp(UNet))/down_0/down_0.norm/Conv_0", "UNet/down_0/Conv_0"),
        ("jvp(Net)/while/body/conv_0", "Net/conv_0"),
        ("jit(step)/checkpoint/rematted_computation/Net", "Net"),
        ("jvp(Net)/conv_0/(norm/reduce_sum:norm_1/reduce_sum:norm_2", "Net/conv_0"),
        ("(jvp(Net)/conv_0/reduce_sum:jvp(Net)/conv_1", ""),
        ("", ""),
    ],
)
def test_layers_of_name_stacks(scope: str, layer: str) -> None:
    assert layer_of(scope) == layer


FUSED = """HloModule m, is_scheduled=true

%two (p: f32[4]) -> (f32[4], f32[4]) {
  %p = f32[4]{0} parameter(0)
  %sine = f32[4]{0} sine(%p), metadata={op_name="jit(step)/net/first/sin" stack_frame_id=1}
  %negate = f32[4]{0} negate(%sine)
  %cosine = f32[4]{0} cosine(%p), metadata={op_name="jit(step)/net/second/cos" stack_frame_id=2}
  ROOT %both = (f32[4]{0}, f32[4]{0}) tuple(%negate, %cosine)
}

%none (q: f32[4]) -> f32[4] {
  %q = f32[4]{0} parameter(0)
  ROOT %again = f32[4]{0} negate(%q)
}

ENTRY %e (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %given = f32[4]{0} parameter(1)
  %silent = f32[4]{0} fusion(%x), kind=kLoop, calls=%none
  %fusion = (f32[4]{0}, f32[4]{0}) fusion(%silent), kind=kLoop, calls=%two
  %told = f32[4]{0} fusion(%x), kind=kLoop, calls=%none, metadata={op_name="jit(step)/top/add" stack_frame_id=3}
  %element = f32[4]{0} get-tuple-element(%fusion), index=1
  %copied = f32[4]{0} copy(%element)
  %both = (f32[4]{0}, (f32[4]{0}, f32[4]{0})) tuple(%told, %fusion)
  ROOT %of_given = f32[4]{0} copy(%given)
}
"""


@pytest.mark.parametrize(
    ("name", "leaf", "told"),
    [
        ("fusion", 0, "net/first"),
        ("fusion", 1, "net/second"),
        ("fusion", 2, ""),  # a result of the planned module's fusion alone
        ("told", 0, "top"),
        ("copied", 0, "net/second"),
        ("both", 0, "top"),
        ("both", 1, "net/first"),
        ("both", 2, "net/second"),
        ("silent", 0, "net/first"),
        ("x", 0, ""),
        ("of_given", 0, ""),
    ],
)
def test_what_is_around_tells_where_an_instruction_does_not(
    name: str, leaf: int, told: str
) -> None:
    assert Sources(read_module(FUSED)).scope(name, leaf) == told
