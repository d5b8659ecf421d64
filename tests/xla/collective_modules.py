"""Modules with collectives over eight devices, by hand."""

from __future__ import annotations

from memplan.compilation.scheduled import ScheduledModule
from memplan.hardware import catalog
from memplan.hardware.backend import GPU
from memplan.hardware.topology import topology_named
from memplan.planning.packing import live_nbytes
from memplan.planning.plan import Feeding
from memplan.xla.buffers import problem_of
from memplan.xla.module import Module
from tests.hardware.machines import on
from tests.hlo import read_module
from tests.xla.small_modules import ADD, BIG

A100 = catalog.named("a100")
EIGHT = on(topology_named("today@2x4"), 8)
ALL = "channel_id=1, replica_groups=[1,8]<=[8], use_global_device_ids=true"
SUM = """
%plus (s: f32[], t: f32[]) -> f32[] {
  %s = f32[] parameter(0)
  %t = f32[] parameter(1)
  ROOT %u = f32[] add(%s, %t)
}
"""


def fusion(name: str, *operands: str, kind: str = "kLoop") -> str:
    arguments = ", ".join(f"%{operand}" for operand in operands)
    return f"%{name} = {BIG} fusion({arguments}), kind={kind}, calls=%fused_add"


def summed(name: str, operand: str, more: str = "") -> tuple[str, str]:
    """A sum in place: its start and its end."""
    start = f"%{name} = (({BIG}), {BIG}) all-reduce-start(%{operand}), {ALL}, to_apply=%plus"
    return (
        f"{start}, output_to_operand_aliasing={{{{1}}: (0, {{}})}}{more}",
        f"%{name}.done = {BIG} all-reduce-done(%{name})",
    )


def gathered(name: str, operand: str, shard: str) -> tuple[str, str]:
    start = f"%{name} = (({shard}), {BIG}) all-gather-start(%{operand}), {ALL}, dimensions={{0}}"
    return start, f"%{name}.done = {BIG} all-gather-done(%{name})"


def module(*lines: str, parameters: str = "a b", alias: str = "") -> Module:
    """A module whose entry has these lines."""
    parameter_lines = "\n".join(
        f"  %{name} = {BIG} parameter({number})" for number, name in enumerate(parameters.split())
    )
    entry = "\n".join(f"  {line}" for line in lines)
    return read_module(f"""HloModule jit_step, is_scheduled=true{alias}
{ADD}{SUM}
ENTRY %main () -> f32[512,1024] {{
{parameter_lines}
{entry}
}}
""")


def overlapped(plain: Module, limit_nbytes: int, feeding: Feeding = "") -> Module:
    """With the collectives beside more kernels."""
    return ScheduledModule(plain, A100, EIGHT).overlap(limit_nbytes, feeding).module


def live(hlo: Module) -> int:
    """Most bytes of live temporaries."""
    return int(live_nbytes(problem_of(hlo, GPU, joins_pairs=False)).max())
