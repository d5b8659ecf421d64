"""Modules that carry a schedule out: what the compiler is handed is what it keeps, kernel by kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

import memplan
from memplan.hardware.backend import GPU
from memplan.planning.problem import Role
from memplan.planning.schedule import Action, Kind, runs
from memplan.program import compat
from memplan.verify.same_module import judge
from memplan.xla.buffers import problem_of
from memplan.xla.module import Module
from memplan.xla.write import write
from tests.dense import step as train
from tests.hlo import lines_of, read_module, text_of
from tests.xla.schedules import compile_step, random_copies, random_recompute
from tests.xla.steps import STEPS, array
from tests.xla.thunks import dump_options, dumped_thunks

NAMES = ("bitcast", "get-tuple-element", "tuple", "parameter", "constant", "opt-barrier")
OUT, IN = (f'frontend_attributes={{_xla_stream_annotation="{number}"}}' for number in (0, 1))
SMALL = """HloModule jit_small, is_scheduled=true

%tanh.0 (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %q = f32[8]{0} tanh(%p)
}

%both.0 (p: f32[8]) -> (f32[8], f32[4]) {
  %p = f32[8]{0} parameter(0)
  %q = f32[8]{0} sine(%p)
  %r = f32[4]{0} slice(%q), slice={[0:4]}
  ROOT %s = (f32[8]{0}, f32[4]{0}) tuple(%q, %r)
}

%sub.0 (p: f32[8], r: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %r = f32[8]{0} parameter(1)
  ROOT %q = f32[8]{0} subtract(%p, %r)
}

ENTRY %main (x: f32[8]) -> (f32[8], f32[4]) {
  %x = f32[8]{0} parameter(0)
  %a = f32[8]{0} fusion(%x), kind=kLoop, calls=%tanh.0, metadata={op_name="a"}
  %b = (f32[8]{0}, f32[4]{0}) fusion(%a), kind=kLoop, calls=%both.0
  %b.0 = f32[8]{0} get-tuple-element(%b), index=0
  %b.1 = f32[4]{0} get-tuple-element(%b), index=1
  %kept = (f32[8]{0}, f32[4]{0}) opt-barrier(%b)
  %kept.0 = f32[8]{0} get-tuple-element(%kept), index=0
  %c = f32[8]{0} fusion(%a, %b.0), kind=kLoop, calls=%sub.0, control-predecessors={%b}
  %d = f32[8]{0} fusion(%c, %kept.0), kind=kLoop, calls=%sub.0
  ROOT %e = (f32[8]{0}, f32[4]{0}) tuple(%d, %b.1)
}
"""


def written(*actions: str) -> list[str]:
    """The entry's lines of the small module, planned as `run c`, `offload b{0}`; judged."""
    module = read_module(SMALL)
    problem = problem_of(module, backend=GPU)
    kernels = {kernel.name: number for number, kernel in enumerate(problem.kernels)}
    buffers = {buffer.name: number for number, buffer in enumerate(problem.buffers)}
    schedule = []
    for kind, name in (action.split() for action in actions):
        schedule.append(Action(Kind(kind), (kernels if kind == "run" else buffers)[name]))
    planned = write(module, problem, tuple(schedule))
    judge(module, planned)
    return lines_of(planned)


def test_the_plain_order_is_the_plain_module() -> None:
    module = read_module(SMALL)
    problem = problem_of(module, backend=GPU)
    assert text_of(write(module, problem, runs(range(4)))) == text_of(module)
    assert lines_of(module) == [
        line.strip() for line in SMALL.partition("ENTRY")[2].split("\n")[1:-2]
    ]


def test_an_element_goes_to_the_host_and_comes_back_twice() -> None:
    away, back = ("offload b{0}", "offloaded b{0}"), ("prefetch b{0}", "prefetched b{0}")
    lines = written("run a", "run b", *away, *back, "run c", *back, "run d")
    assert lines == [
        "%x = f32[8]{0} parameter(0)",
        '%a = f32[8]{0} fusion(%x), kind=kLoop, calls=%tanh.0, metadata={op_name="a"}',
        "%b = (f32[8]{0}, f32[4]{0}) fusion(%a), kind=kLoop, calls=%both.0",
        "%b.0.1 = f32[8]{0} get-tuple-element(%b), index=0",
        "%b.offload1 = (f32[8]{0:S(5)}, f32[8]{0}, u32[]) copy-start(%b.0.1), " + OUT,
        "%b.offloaded1 = f32[8]{0:S(5)} copy-done(%b.offload1)",
        "%b.prefetch1 = (f32[8]{0}, f32[8]{0:S(5)}, u32[]) copy-start(%b.offloaded1), " + IN,
        "%b.prefetched1 = f32[8]{0} copy-done(%b.prefetch1)",
        "%c = f32[8]{0} fusion(%a, %b.prefetched1), kind=kLoop, calls=%sub.0",
        "%b.prefetch2 = (f32[8]{0}, f32[8]{0:S(5)}, u32[]) copy-start(%b.offloaded1), " + IN,
        "%b.prefetched2 = f32[8]{0} copy-done(%b.prefetch2)",
        "%d = f32[8]{0} fusion(%c, %b.prefetched2), kind=kLoop, calls=%sub.0",
        "%b.1 = f32[4]{0} get-tuple-element(%b), index=1",
        "ROOT %e = (f32[8]{0}, f32[4]{0}) tuple(%d, %b.1)",
    ]


def test_the_latest_run_serves_what_follows() -> None:
    lines = written("run a", "run b", "run c", "run a", "run b", "run d")
    assert lines[-6:] == [
        '%a.run2 = f32[8]{0} fusion(%x), kind=kLoop, calls=%tanh.0.run2, metadata={op_name="a"}',
        "%b.run2 = (f32[8]{0}, f32[4]{0}) fusion(%a.run2), kind=kLoop, calls=%both.0.run2",
        "%kept.0 = f32[8]{0} get-tuple-element(%b.run2), index=0",
        "%d = f32[8]{0} fusion(%c, %kept.0), kind=kLoop, calls=%sub.0",
        "%b.1 = f32[4]{0} get-tuple-element(%b.run2), index=1",
        "ROOT %e = (f32[8]{0}, f32[4]{0}) tuple(%d, %b.1)",
    ]


@pytest.mark.parametrize("layout", ["{0}", "{0:E(4)}", "{0:S(1)}"])
def test_a_copy_has_the_layout_of_what_it_is_a_copy_of(layout: str) -> None:
    text = SMALL.replace("f32[8]{0}", f"f32[8]{layout}")
    module = read_module(text)
    problem = problem_of(module, backend=GPU)
    kinds = (Kind.OFFLOAD, Kind.OFFLOADED, Kind.PREFETCH, Kind.PREFETCHED)
    (number,) = (n for n, buffer in enumerate(problem.buffers) if buffer.name == "a")
    schedule = (*runs([0, 1]), *(Action(kind, number) for kind in kinds), *runs([2, 3]))
    planned = read_module(text_of(write(module, problem, schedule))).entry
    away, home = planned.ops["a.offloaded1"].result[0], planned.ops["a.prefetched1"].result[0]
    assert away.on_host
    assert str(home) == f"f32[8]{layout}"
    assert away.layout._replace(space=0) == home.layout._replace(space=0)


def test_what_a_loop_carries_is_not_copied() -> None:
    text = SMALL.replace("ENTRY", LOOP + "ENTRY").replace(
        "%d = f32[8]{0} fusion(%c, %kept.0)", WHILE
    )
    module = read_module(text)
    problem = problem_of(module, backend=GPU)
    (number,) = (n for n, buffer in enumerate(problem.buffers) if buffer.name.startswith("body.0:"))
    with pytest.raises(ValueError, match="loop carry"):
        write(module, problem, (*runs(range(len(problem.kernels))), Action(Kind.OFFLOAD, number)))
    (number,) = (n for n, buffer in enumerate(problem.buffers) if buffer.name == "h")
    with pytest.raises(ValueError, match="outside of the loop"):
        write(module, problem, (*runs(range(len(problem.kernels))), Action(Kind.OFFLOAD, number)))


LOOP = """%body.0 (p: (f32[8])) -> (f32[8]) {
  %p = (f32[8]{0}) parameter(0)
  %v = f32[8]{0} get-tuple-element(%p), index=0
  %h = f32[8]{0} tanh(%v)
  %g = f32[8]{0} sine(%h)
  ROOT %q = (f32[8]{0}) tuple(%g)
}

%more.0 (p: (f32[8])) -> pred[] {
  %p = (f32[8]{0}) parameter(0)
  ROOT %q = pred[] constant(false)
}

"""
WHILE = """%given = (f32[8]{0}) tuple(%c)
  %loop = (f32[8]{0}) while(%given), condition=%more.0, body=%body.0
  %loop.0 = f32[8]{0} get-tuple-element(%loop), index=0
  %d = f32[8]{0} fusion(%loop.0, %kept.0)"""


def kept(module: Module) -> list[list[str]]:
    """What the entry and its loops run, in order."""
    loops = [name for op in module.entry.ops.values() if op.opcode == "while" for name in op.called]
    bodies = [module.entry, *(module[name] for name in loops)]
    return [[op.name for op in body.ops.values() if op.opcode not in NAMES] for body in bodies]


@pytest.mark.gpu_aot
@pytest.mark.parametrize("name", ["dense", "accumulating"])
def test_the_compiler_changes_nothing_afterwards(name: str) -> None:
    """Clones are not merged; pairs of copies stay where they were written, and asynchronous."""
    for plan in (random_copies(1), random_recompute(1)):
        step, args = STEPS[name](256, 6)
        outcome = compile_step(step, args, name, plan, "v100")
        assert kept(Module.read(compat.module_of(outcome.compiled))) == kept(outcome.module)
        assert bool(outcome.copies) != bool(outcome.recomputed)


@pytest.mark.gpu_aot
@pytest.mark.parametrize(
    "device", ["v100", *(pytest.param(name, marks=pytest.mark.slow) for name in ("a100", "h100"))]
)
def test_each_direction_copies_on_a_stream_of_its_own(device: str, tmp_path: Path) -> None:
    shapes = [array(4096, 4096)] * 8, array(8192, 4096)
    options = {"donate_argnums": 0, "compiler_options": dump_options(tmp_path)}
    outcome = memplan.jit(train, device=device, budget="1700MiB", **options).plan(*shapes)._outcome
    starts = [
        op for op in outcome.executable.module.instructions.values() if op.opcode == "copy-start"
    ]
    thunks = [thunk for thunk in dumped_thunks(tmp_path) if thunk.kind == "kAsyncStart"]
    directions = [
        (op.result[0].on_host, thunk.stream) for op, thunk in zip(starts, thunks, strict=True)
    ]
    assert len(set(directions)) == len({stream for _, stream in directions}) == 2


def test_offloaded_values_of_a_user_are_on_the_host_already() -> None:
    module = read_module(SMALL.replace("%a = f32[8]{0}", "%a = f32[8]{0:S(5)}"))
    roles = {buffer.name: buffer.role for buffer in problem_of(module, backend=GPU).buffers}
    assert roles["a"] is Role.ON_HOST
