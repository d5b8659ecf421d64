"""Is a plan legal? A stupid judge: replays every action against sets, knows nothing of how plans are made."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from memplan.errors import MemplanError
from memplan.planning.graph import Graph
from memplan.planning.plan import Kind, Plan


class IllegalPlanError(MemplanError):
    """A plan that reads what is not there, repeats what may run once, or loses an output."""


@dataclass(frozen=True)
class Account:
    """What a legal plan does, counted.

    Attributes:
      peak_nbytes: largest sum of live device bytes if every value had a buffer of its own and nothing were fused.
      host_peak_nbytes: largest sum of host bytes.
      offloaded_nbytes: bytes copied to the host, each value once.
      recomputed: op id -> extra runs.
    """

    peak_nbytes: int
    host_peak_nbytes: int
    offloaded_nbytes: int
    recomputed: dict[int, int]


def judge(plan: Plan, graph: Graph) -> Account:
    """Replay a plan.

    Raises:
      PlanMismatchError: the plan is for another graph.
      IllegalPlanError: naming the first action that cannot be carried out.
    """
    plan.check(graph)
    device, host = set(graph.inputs), set[int]()
    runs: Counter[int] = Counter()
    once: list[int] = []
    live = sum(graph.nbytes(value) for value in device)
    peak, hosted, host_peak, offloaded = live, 0, 0, 0
    for number, action in enumerate(plan.actions):
        target = action.target
        known = {Kind.COMPUTE: len(graph.ops), Kind.FENCE: 0}.get(action.kind, len(graph.values))
        _require(0 <= target < known or action.kind is Kind.FENCE, f"{action.kind} of unknown {target}", number)
        match action.kind:
            case Kind.COMPUTE:
                op = graph.ops[target]
                missing = [value for value in op.inputs if value not in device]
                _require(not missing, f"{op.where} reads {_names(graph, missing)}, which is not on the device", number)
                _require(op.recomputable or not runs[target], f"{op.where} would run twice: {op.why_not}", number)
                if not op.recomputable:
                    once.append(target)
                runs[target] += 1
                live += sum(graph.nbytes(value) for value in op.outputs if value not in device)
                device.update(op.outputs)
                peak = max(peak, live + op.workspace_nbytes)
            case Kind.OFFLOAD:
                _require(target in device, f"{graph.values[target].name} is copied out but not on the device", number)
                _require(target not in host, f"{graph.values[target].name} is copied out twice", number)
                host.add(target)
                hosted += graph.nbytes(target)
                offloaded += graph.nbytes(target)
                host_peak = max(host_peak, hosted)
            case Kind.PREFETCH:
                _require(target in host, f"{graph.values[target].name} is fetched but not on the host", number)
                live += 0 if target in device else graph.nbytes(target)
                device.add(target)
                peak = max(peak, live)
            case Kind.FREE:
                _require(target in device, f"{graph.values[target].name} is freed but not on the device", number)
                device.discard(target)
                live -= graph.nbytes(target)
            case Kind.RELEASE:
                _require(target in host, f"{graph.values[target].name} is released but not on the host", number)
                host.discard(target)
                hosted -= graph.nbytes(target)
            case Kind.FENCE:
                pass
    lost = [value for value in graph.outputs if value not in device]
    _require(not lost, f"the outputs {_names(graph, lost)} are not there at the end", len(plan.actions))
    skipped = [op.where for index, op in enumerate(graph.ops) if not op.recomputable and not runs[index]]
    _require(not skipped, f"{', '.join(skipped[:3])} never runs", len(plan.actions))
    _require(once == sorted(once), "operations with effects are out of order", len(plan.actions))
    extra = {op: count - 1 for op, count in runs.items() if count > 1}
    return Account(peak, host_peak, offloaded, extra)


def _require(holds: bool, what: str, number: int) -> None:
    if not holds:
        raise IllegalPlanError(f"the plan is not legal at action {number}: {what}. This is a fault of the planner.")


def _names(graph: Graph, values: list[int]) -> str:
    return ", ".join(graph.values[value].name for value in values[:5])
