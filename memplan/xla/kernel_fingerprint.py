"""Digests by which a kernel is known again in another module.

A fingerprint says what a kernel computes: opcode, shapes with their layouts, configuration, and the
computations that it calls, with instructions numbered instead of named. It leaves out where it is,
and what XLA decides later: its place in the schedule and what the autotuner chose.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from memplan.xla.kernel_cost import results_of
from memplan.xla.module import Computation, Instruction, Module

# Entries of XLA's configuration (xla/service/gpu/backend_configs.proto): of the schedule, and what
# the autotuner chooses, which it does not for a card that is only described.
_LATER = frozenset(
    """
    operation_queue_id wait_on_operation_queues force_earliest_schedule reification_cost
    algorithm selected_algorithm autotune_workspace_size triton_gemm_config
    block_level_fusion_config
    """.split()  # noqa: SIM905
)


def kernel_fingerprint(module: Module, body: Computation, op: Instruction) -> str:
    """The digest of an instruction that is a kernel in `body`."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(op.operands))}
    operands = [(numbers[name], body.ops[name].shape) for name in op.operands]
    content = (results_of(op), operands, _stated(module, op))
    return hashlib.sha256(repr(content).encode()).hexdigest()[:32]


def _stated(module: Module, op: Instruction) -> tuple[Any, ...]:
    """All that an instruction says, without names."""
    called = [_body(module[name]) for name in op.called]
    bodies = [[(*facts, _stated(module, inner)) for facts, inner in body] for body in called]
    return op.opcode, op.kind, op.statement, _config(op), bodies


def _body(body: Computation) -> list[tuple[tuple[Any, ...], Instruction]]:
    """Each instruction of a computation, after its shape and the numbers of its operands."""
    numbers = {name: number for number, name in enumerate(body.ops)}
    return [
        ((str(op.shape), op.root, [numbers[name] for name in op.operands]), op)
        for op in body.ops.values()
    ]


def _config(op: Instruction) -> str:
    try:
        config = json.loads(op.backend_config or "{}")
    except ValueError:
        return op.backend_config
    return json.dumps(_without_later(config), sort_keys=True)


def _without_later(entry: Any) -> Any:
    if isinstance(entry, Mapping):
        return {name: _without_later(part) for name, part in entry.items() if name not in _LATER}
    return [_without_later(part) for part in entry] if isinstance(entry, list) else entry
