"""Workspace of libraries' kernels, and algorithms of cuDNN that need less of it.

A kernel of a library may need memory of its own while it runs: its workspace, the last result of
its instruction. On a GPU that is here, XLA's autotuner runs each convolution by all algorithms of
cuDNN before memplan sees the module, and takes the fastest; within 2 us, the one with the least
workspace (`PickBestConfig` in xla/backends/autotuner/config_selector.cc). No option makes bytes
count for more. Without autotuning XLA asks for cuDNN's engine 0, however slow, for every
convolution, and gives it no workspace. But the autotuner's log has the seconds and bytes of all
algorithms that it ran, and XLA runs the algorithm that the scheduled module states.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memplan.xla.edit import Edit
from memplan.xla.kernel_cost import results_of
from memplan.xla.kernel_fingerprint import kernel_fingerprint
from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.shapes import Array

# Take the fastest algorithm whose workspace is at most a sixteenth of the arrays that its
# convolution reads and writes; if none is, the one with the least. Those arrays are live whenever
# it runs, so that no order of kernels takes 6 % less for an even smaller one. No card was asked.
_WORKSPACE_PARTS = 16
# A frontend attribute, in which a convolution states by how many seconds its algorithm is slower
# than the one that XLA chose. XLA keeps it, and so do clones.
_SLOWER = "memplan_slower_s"
# A word of protobuf's text form.
_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|[{}]|[^\s{}"]+')


@dataclass(frozen=True)
class Algorithm:
    """An algorithm of cuDNN for a convolution, as XLA's autotuner ran it."""

    engine: int
    knobs: tuple[tuple[int, int], ...]  # type and choice of each, ascending
    workspace_nbytes: int
    seconds: float
    math_type: str = "DEFAULT_MATH"
    is_frontend: bool = False

    def states(self, record: Mapping[str, Any]) -> bool:
        """Is it the algorithm of a record in a convolution's configuration?"""
        knobs = {str(kind): str(choice) for kind, choice in self.knobs}
        return (
            int(record.get("algo_id", 0)) == self.engine
            and record.get("tuning_knobs", {}) == knobs
            and int(record.get("workspace_size", 0)) == self.workspace_nbytes
        )

    def record(self, current: Mapping[str, Any]) -> dict[str, Any]:
        """Its record, in place of a convolution's current one."""
        facts = {
            "algo_id": str(self.engine),
            "tuning_knobs": {str(kind): str(choice) for kind, choice in self.knobs},
            "workspace_size": str(self.workspace_nbytes),
            "math_type": self.math_type,
            "is_cudnn_frontend": self.is_frontend,
        }
        return {**current, **{name: fact for name, fact in facts.items() if name in current}}


# What XLA's autotuner ran in this process, by the fingerprints of convolutions. XLA keeps its
# choices as long, and times no convolution twice.
_timed: dict[str, tuple[Algorithm, ...]] = {}


def timing_options(log: Path) -> dict[str, Any]:
    """Compiler options by which XLA writes what its autotuner runs to a log.

    Choices of the other format of its cache, of earlier compilations of the process, do not count:
    their convolutions are timed once more.
    """
    return {
        "xla_gpu_dump_autotune_logs_to": str(log),
        "xla_gpu_use_new_autotune_cache_format": False,
        "xla_gpu_per_fusion_autotune_cache_dir": "",
    }


def workspace_nbytes(op: Instruction) -> int:
    """Bytes of a kernel's workspace; 0 if it has none."""
    return sum(array.nbytes for array in op.result[len(results_of(op)) :])


def largest_algorithm_workspace(module: Module) -> int:
    """Bytes of the largest workspace that a convolution's algorithm needs; 0 if none needs any."""
    ops = (op for body in module.values() for op in body.ops.values())
    return max((workspace_nbytes(op) for op in ops if _record(op)), default=0)


def is_replaced(op: Instruction) -> bool:
    """Does a kernel run by another algorithm than the one that XLA chose?"""
    return _is_convolution(op) and _SLOWER in op.frontend_attributes


def slower_s(op: Instruction) -> float:
    """Seconds by which a kernel is slower than by the algorithm that XLA chose."""
    return float(op.frontend_attributes.get(_SLOWER, 0.0)) if _is_convolution(op) else 0.0


def with_less_workspace(module: Module, log: str) -> Module:
    """A scheduled module whose convolutions run by algorithms with less workspace.

    Args:
      log: of XLA's autotuner during the compilation (`timing_options`).

    Returns:
      The module itself if XLA timed no such algorithm.
    """
    logged = dict(_logged(log))
    edit = Edit(module)
    for body in module.values():
        ops = [_with_less(module, body, op, logged) for op in body.ops.values()]
        if any(new is not op for new, op in zip(ops, body.ops.values(), strict=True)):
            edit.replace(body.with_ops(ops))
    return edit.module


def _with_less(
    module: Module,
    body: Computation,
    op: Instruction,
    logged: Mapping[str, tuple[Algorithm, ...]],
) -> Instruction:
    record = _record(op)
    if not record or not _is_read_without_workspace(body, op):
        return op
    fingerprint = kernel_fingerprint(module, body, op)
    # The log has one of several equal convolutions.
    if any(algorithm.states(record) for algorithm in logged.get(op.name, ())):
        _timed[fingerprint] = logged[op.name]
    timed = _timed.get(fingerprint, ())
    chosen = next((algorithm for algorithm in timed if algorithm.states(record)), None)
    if chosen is None:
        return op
    arrays_nbytes = sum(body.ops[name].nbytes for name in op.operands)
    arrays_nbytes += sum(array.nbytes for array in results_of(op))
    most_nbytes = arrays_nbytes // _WORKSPACE_PARTS
    least = min(
        timed,
        key=lambda algorithm: (
            max(0, algorithm.workspace_nbytes - most_nbytes),
            algorithm.seconds,
        ),
    )
    if least.workspace_nbytes >= chosen.workspace_nbytes:
        return op
    return _by(op, least, least.seconds - chosen.seconds)


def _is_read_without_workspace(body: Computation, op: Instruction) -> bool:
    """Are only elements of its result read, and not the workspace?"""
    workspace = len(op.result) - 1
    return not op.root and all(
        use.opcode == "get-tuple-element" and use.index != workspace
        for use, _ in body.uses[op.name]
    )


def _by(op: Instruction, algorithm: Algorithm, more_s: float) -> Instruction:
    """A convolution by another algorithm, which takes `more_s` longer."""
    config = json.loads(op.backend_config)
    convolution = config["cudnn_conv_backend_config"]
    convolution["algorithm"] = algorithm.record(convolution["algorithm"])
    assert isinstance(op.shape, tuple)
    *results, _ = op.shape
    return op.changed(
        shape=(*results, Array.row_major("u8", (algorithm.workspace_nbytes,))),
        backend_config=json.dumps(config, separators=(",", ":")),
        frontend_attributes={**op.frontend_attributes, _SLOWER: repr(more_s)},
    )


def _is_convolution(op: Instruction) -> bool:
    return op.opcode == "custom-call" and op.target.startswith("__cudnn$conv")


def _record(op: Instruction) -> Mapping[str, Any]:
    """The record of a convolution's algorithm, if that has a workspace; else empty."""
    if not _is_convolution(op) or not workspace_nbytes(op):
        return {}
    config = json.loads(op.backend_config or "{}")
    return config.get("cudnn_conv_backend_config", {}).get("algorithm", {})


class Fields(defaultdict[str, list[Any]]):
    """The fields of a message in protobuf's text form: words, and messages."""

    def __init__(self) -> None:
        super().__init__(list)

    def message(self, name: str) -> "Fields":
        return self[name][0] if self[name] else Fields()

    def number(self, name: str) -> int:
        return int(self[name][0]) if self[name] else 0


def _fields(words: Iterator[str]) -> Fields:
    """The fields of a message, up to the brace that ends it."""
    fields = Fields()
    for word in words:
        if word == "}":
            break
        value = next(words, "")
        fields[word.rstrip(":")].append(_fields(words) if value == "{" else value.strip('"'))
    return fields


def _logged(log: str) -> Iterator[tuple[str, tuple[Algorithm, ...]]]:
    """The names of convolutions in a log of XLA's autotuner (`AutotuningLogs`), and what it ran."""
    words = (match[0] for match in _WORD.finditer(log))
    for entry in _fields(words)["logs"]:
        results = (result for result in entry["results"] if "failure" not in result)
        algorithms = tuple(_algorithm(result) for result in results if "algorithm" in result)
        for [instruction] in entry.message("instr").values():  # one, by the name of its type
            if algorithms:
                yield instruction["name"][0], algorithms


def _algorithm(result: Fields) -> Algorithm:
    algorithm, run_time = result.message("algorithm"), result.message("run_time")
    knobs = ((knob.number("key"), knob.number("value")) for knob in algorithm["tuning_knobs"])
    return Algorithm(
        algorithm.number("algo_id"),
        tuple(sorted(knobs)),
        algorithm.message("workspace_size").number("value"),
        run_time.number("seconds") + 1e-9 * run_time.number("nanos"),
        *algorithm["math_type"][:1] or ["DEFAULT_MATH"],
        is_frontend=algorithm["is_cudnn_frontend"] == ["true"],
    )
