"""A scheduled module as it is read: its bytes, and what it is rewritten into for a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memplan.planning.problem import POINTER_BYTES
from tests.compilation.modules import NBYTES, TEMPORARIES, TEXT, V100, scheduled
from tests.xla.rewrites.test_merge import ARRAY, DONATED, THREE, changed, fusions


def test_device_bytes_are_temporaries_arguments_outputs_and_their_table() -> None:
    module = scheduled()
    assert module.packing.nbytes == TEMPORARIES
    assert module.resident_bytes == 3 * NBYTES + NBYTES + POINTER_BYTES
    assert module.device_bytes == module.resident_bytes + TEMPORARIES


def test_an_output_over_a_donated_argument_takes_no_bytes_of_its_own() -> None:
    assert scheduled(changed(TEXT, DONATED)).resident_bytes == scheduled().resident_bytes - NBYTES


def test_an_output_on_the_host_takes_none_of_the_device() -> None:
    away = ARRAY.replace("0}", "0:S(5)}")
    late = f"  ROOT %out = ({ARRAY}) tuple(%late)"
    text = changed(
        TEXT,
        (
            late,
            f"  %go = ({away}, {ARRAY}, u32[]) copy-start(%late)\n"
            f"  %gone = {away} copy-done(%go)\n  ROOT %out = ({away}) tuple(%gone)",
        ),
    )
    assert scheduled(text).resident_bytes == scheduled().resident_bytes - NBYTES


def test_large_constants_are_there_throughout_in_fusions_too() -> None:
    entry = TEXT.index("ENTRY")
    large, small = (
        "  %large = f32[512,64]{1,0} constant({...})\n",
        "  %small = f32[512]{0} constant({...})\n",
    )
    inside = TEXT[:entry].replace(" {\n", f" {{\n{large}", 1)
    outside = TEXT[entry:].replace(" {\n", f" {{\n{large.replace('%large', '%other')}{small}", 1)
    module = scheduled(inside + outside)
    assert module.constant_bytes == 2 * (1 << 17) and scheduled().constant_bytes == 0
    assert module.resident_bytes == scheduled().resident_bytes + module.constant_bytes
    assert module.packing.nbytes == TEMPORARIES


def test_a_gpus_module_is_rewritten_once_for_each_room() -> None:
    module = replace(scheduled(THREE), device=V100)
    roomy = module.rewrite(1 << 40)
    assert list(fusions(roomy.module)) == ["sums.all1"]
    assert module.rewrite(1 << 40) is roomy and module.rewrite(1 << 39) is not roomy
    assert module.rewrite(None) is module
    assert (
        roomy.resident_bytes == module.resident_bytes and roomy.replay.step_s < module.replay.step_s
    )


def test_a_cpu_runs_kernels_whole_and_as_they_are() -> None:
    module = scheduled(THREE)
    assert module.rewrite(1) is module.rewrite(1 << 40) is module


def test_only_the_timed_problem_takes_seconds() -> None:
    module = scheduled()
    assert not any(kernel.seconds for kernel in module.problem.kernels)
    assert sum(kernel.seconds for kernel in module.timed_problem.kernels) == pytest.approx(
        module.replay.step_s
    )
