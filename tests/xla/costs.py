"""What the kernels of a module cost, each counted once."""

from __future__ import annotations

from memplan.hardware.backend import GPU
from memplan.xla.buffers import problem_of
from memplan.xla.kernel_cost import KernelCost, kernel_cost
from memplan.xla.module import Module, with_blocks


def kernel_costs(module: Module) -> list[KernelCost]:
    names = {kernel.name for kernel in problem_of(module, backend=GPU).kernels}
    return [
        kernel_cost(module, body, op)
        for body in with_blocks(module, module.entry)
        for op in body.ops.values()
        if op.name in names and op.opcode != "while"
    ]


def moved_nbytes(module: Module) -> int:
    """Of device memory, read and written."""
    return sum(cost.device_nbytes for cost in kernel_costs(module))
