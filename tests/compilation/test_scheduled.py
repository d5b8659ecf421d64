"""What is read off a scheduled module, and what it is rewritten into; a CPU's stays as it is."""

from __future__ import annotations

import pytest

from memplan.compilation.scheduled import ScheduledModule
from memplan.hardware.catalog import local_cpu, named
from memplan.xla.module import read_module
from tests.xla.small_modules import ADD, MIB, chain, module

TEXT = module(chain(3, "x") + "\nROOT %last = f32[512,1024]{1,0} add(%x2, %x0)", ADD)
CPU, GPU = (ScheduledModule(read_module(TEXT), device) for device in (local_cpu(2, 2**33), named("v100")))


def test_its_bytes_are_those_of_arguments_output_and_what_is_alive_between() -> None:
    assert CPU.resident_bytes == 6 * MIB
    assert CPU.device_bytes == CPU.resident_bytes + CPU.packing.nbytes
    assert CPU.packing.nbytes == pytest.approx(2 * MIB, abs=1024)  # of `x0`; the others lie where the output will


def test_its_problem_takes_the_replays_seconds() -> None:
    timed = GPU.timed_problem
    assert sum(kernel.seconds for kernel in GPU.problem.kernels) == 0
    assert sum(kernel.seconds for kernel in timed.kernels) == pytest.approx(GPU.replay.step_s)


def test_a_rewrite_is_a_gpus_and_made_once() -> None:
    assert CPU.rewrite(0) is CPU and GPU.rewrite(None) is GPU
    found = GPU.rewrite(4 * MIB)
    assert found is GPU.rewrite(4 * MIB) and found.resident_bytes == GPU.resident_bytes
    assert found.replay.step_s <= GPU.replay.step_s
