"""The one place that knows the order: trace, compile, and only where that does not fit plan (`search.py`), report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from memplan import summary
from memplan.candidates import Candidate
from memplan.compiling import Compiling, Unmodified
from memplan.planning import devices, spec
from memplan.planning.budget import Size, parse_bytes
from memplan.planning.graph import Graph
from memplan.planning.plan import Plan
from memplan.planning.planners.protocol import Planner
from memplan.planning.planners.registry import planner_named
from memplan.program import compat
from memplan.program.host_state import large_leaves, with_state_on_host
from memplan.program.local import host_memory_bytes, is_here, local_device
from memplan.program.rewrite import rewrite
from memplan.program.targets import Target
from memplan.program.trace import Program, flat_step, trace
from memplan.refining import Notify
from memplan.report.model import Report
from memplan.search import Search


@dataclass(frozen=True)
class Request:
    """What the user asked for; see `memplan.jit`.

    Attributes:
      in_segments: a step that fits but waits for other devices is compiled in segments as well, and the faster taken.
    """

    budget: Size = None
    host_budget: Size = None
    device: str | None = None
    planner: str | Planner | None = None
    plan: Plan | None = None
    verify: str | None = "compile"
    host_state: tuple[int, ...] = ()
    in_segments: bool = True


@dataclass(frozen=True)
class Result:
    """A step planned: the report, and what is needed to run it."""

    program: Program
    graph: Graph | None
    target: Target
    chosen: Candidate
    report: Report
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @property
    def untouched(self) -> bool:
        """The step runs as it is, without options of memplan's."""
        return self.chosen.name == "plain"


def run(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    request: Request,
    notify: Notify,
) -> Result:
    """Plan a step.

    Raises:
      BudgetError, UnknownDeviceError: the request makes no sense.
      InfeasibleBudgetError: nothing that the compiler measured fits.
      PlanMismatchError: `request.plan` is for another program.
    """
    notify("tracing", None)
    search = search_for(step, args, kwargs, options, request, notify)
    notify("compiling the unmodified step", None)
    plain, chosen = search.plain(), _chosen(search, request)
    limits, seen = (search.target, search.budget, search.host_budget), shapes_of(args, kwargs)
    if chosen is plain:
        return Result(search.program, None, search.target, plain, summary.untouched(*limits, plain), *seen)
    bounds = search.lowest.nbytes, search.least_s
    report = summary.planned(search.graph, *limits, chosen, plain, search.tried, *bounds)
    ran = chosen.program or search.program, chosen.graph or search.graph
    return Result(*ran, search.target, chosen, report, *seen)


def search_for(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    request: Request,
    notify: Notify = lambda stage, share: None,
) -> Search:
    """What there is to try for a step, traced; nothing is compiled yet.

    Raises BudgetError and UnknownDeviceError like `run`.
    """
    target = target_of(request.device)
    budget, host_budget = parse_bytes(request.budget, target.device.memory_bytes), host_budget_of(request, target)
    planner = planner_named(request.planner)
    program = trace(step, args, kwargs, options)
    plain = Unmodified(program, target, args, kwargs)
    if request.host_state:
        program = with_state_on_host(program, large_leaves(program, request.host_state))
    return Search(Compiling(program, plain), budget, host_budget, planner, notify)


def _chosen(search: Search, request: Request) -> Candidate:
    """The step as it is, where that fits and waits for no other device; else what is asked for, or the best."""
    plain = search.plain()
    if request.plan is not None:
        return search.follow(request.plan)
    if plain.device_bytes > search.budget or search.program.held:
        return search.best(request.verify)
    waits = request.in_segments and plain.traffic is not None and plain.traffic.waits_for_links
    return search.in_segments() if waits else plain


def planned_jaxpr(result: Result) -> compat.ClosedJaxpr:
    """The jaxpr in the planned order; the step's very own where nothing was planned."""
    traced = result.program.traced.jaxpr
    if result.chosen.plan is None or result.graph is None:
        return traced
    if result.program.spmd is None:
        return local_jaxpr(result)
    types = [compat.as_struct(var.aval) for var in traced.jaxpr.invars]
    return jax.make_jaxpr(flat_step(result.program, local_jaxpr(result)))(*types)


def local_jaxpr(result: Result) -> compat.ClosedJaxpr:
    """The jaxpr of a planned step, as one device runs it."""
    assert result.chosen.plan is not None and result.graph is not None
    return rewrite(result.program, result.graph, result.chosen.plan)


def shapes_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """The arguments without their arrays, so that a plan does not keep a whole training state alive."""

    def shape(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            weak_type=getattr(leaf, "weak_type", False),
            sharding=leaf.sharding if leaf.committed else None,
        )

    return jax.tree.map(shape, (tuple(args), dict(kwargs)))


def target_of(device: str | None) -> Target:
    """The local backend for None, else the described GPU with this name, or the device in this specification file."""
    if device is None:
        return Target(local_device(), described=False)
    if not spec.is_path(device):
        return Target(devices.named(device), described=True)
    found = spec.load(device)
    here = is_here(found.device, found.conditions.platform, found.conditions.device_kind)
    return Target(found.device, described=not here)


def host_budget_of(request: Request, target: Target) -> int:
    """Bytes for offloaded values: as asked, else what this machine has, or twice a described GPU's own memory."""
    if not target.is_gpu:
        return 0  # host memory and device memory are the same
    whole = 2 * target.device.memory_bytes if target.described else host_memory_bytes() * 8 // 10
    return parse_bytes(request.host_budget, whole, "host budget")
