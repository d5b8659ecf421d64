"""Modules of a few kernels, by hand."""

from __future__ import annotations

import itertools

MIB = 2**20
BIG = "f32[512,1024]{1,0}"  # 2 MiB
HOST = "f32[512,1024]{1,0:T(8,128)S(5)}"

ADD = f"""
%fused_add (p0: f32[512,1024], p1: f32[512,1024]) -> f32[512,1024] {{
  %p0 = {BIG} parameter(0)
  %p1 = {BIG} parameter(1)
  ROOT %sum = {BIG} add(%p0, %p1)
}}
"""


def module(entry: str, bodies: str = "", flags: str = "is_scheduled=true") -> str:
    """Lines of an entry computation, with `%a` and `%b` of 2 MiB as its parameters, as the text of a module."""
    lines = "\n".join(f"  {line.strip()}" for line in entry.strip().splitlines())
    return f"""HloModule jit_step, {flags}, entry_computation_layout={{(f32[512,1024]{{1,0}})->f32[512,1024]{{1,0}}}}
{bodies}
ENTRY %main.1 (a: f32[512,1024], b: f32[512,1024]) -> f32[512,1024] {{
  %a = {BIG} parameter(0), metadata={{op_name="a"}}
  %b = {BIG} parameter(1), metadata={{op_name="b"}}
{lines}
}}
"""


def chain(count: int, prefix: str) -> str:
    """A chain of fusions that move 6 MiB each."""
    names = ["a", *(f"{prefix}{i}" for i in range(count))]
    return "\n".join(
        f"%{after} = {BIG} fusion(%{before}, %b), kind=kLoop, calls=%fused_add"
        for before, after in itertools.pairwise(names)
    )


UPDATED = """
%fused_update (p0: f32[512,1024], p1: f32[1,1024], p2: s32[]) -> f32[512,1024] {
  %p0 = f32[512,1024]{1,0} parameter(0)
  %p1 = f32[1,1024]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %new = f32[512,1024]{1,0} dynamic-update-slice(%p0, %p1, %p2, %zero)
}
"""
