"""The host's side of the exact model: what is there, and when the link carries it.

An item that ever comes back is copied out once, when it is made, and stays on the host until it comes back last. One
copy at a time each way. With copies beside the computation, a stage waits for what comes back for it, and an
item's device copy ends only when it has left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from ortools.sat.python import cp_model

from memplan.planning.stages import Pair, Stages


@dataclass
class HostSide:
    """Built after the device's side, whose variables it reads.

    Attributes:
      moved: (item, stage) -> does it come back from the host there?
      again: (item, stage) -> is it computed again there?
      events: per item, where something can happen to it, its home first.
      leaves: item -> is it copied to the host?
    """

    solver_model: cp_model.CpModel
    stages: Stages
    moved: Mapping[Pair, cp_model.IntVar]
    again: Mapping[Pair, cp_model.IntVar | bool]
    events: Mapping[int, list[int]]
    leaves: dict[int, cp_model.IntVar] = field(init=False)

    def __post_init__(self) -> None:
        model, stages = self.solver_model, self.stages
        returns: dict[int, list[int]] = {}
        for item, stage in self.moved:
            returns.setdefault(item, []).append(stage)
        self.leaves = {item: model.new_bool_var("") for item in returns}
        spans: list[tuple[int, int, int, cp_model.IntVar]] = []
        for item, found in returns.items():
            still: cp_model.IntVar | None = None  # does it come back at this stage or later?
            ordered = sorted(found, reverse=True)
            for stage, earlier in pairwise([*ordered, stages.home[item]]):
                here = model.new_bool_var("") if earlier != stages.home[item] else self.leaves[item]
                model.add_implication(self.moved[item, stage], here)
                if still is not None:
                    model.add_implication(still, here)
                still = here
                spans.append((earlier, stage, stages.nbytes[item], here))
        for stage in range(stages.count):
            there = [(nbytes, var) for first, last, nbytes, var in spans if first <= stage <= last]
            if sum(nbytes for nbytes, _ in there) > stages.host_budget_bytes:
                total = cp_model.LinearExpr.weighted_sum([var for _, var in there], [nbytes for nbytes, _ in there])
                model.add(total <= stages.host_budget_bytes)

    def copy_ticks(self) -> cp_model.LinearExpr:
        """Time of all copies, each way counted in full."""
        ticks = self.stages.copy_ticks
        copies = [*self.leaves.items(), *((item, var) for (item, _), var in self.moved.items())]
        return cp_model.LinearExpr.weighted_sum([var for _, var in copies], [ticks[item] for item, _ in copies])

    def end(self) -> cp_model.IntVar:
        """When the step ends, copies running beside the computation."""
        model, stages = self.solver_model, self.stages
        longest = (
            sum(stages.own_ticks)
            + sum(stages.ticks[item] or 0 for (item, _) in self.again)
            + 2 * sum(stages.copy_ticks[item] for item, _ in self.moved)
        )
        begin = [model.new_int_var(0, longest, "") for _ in range(stages.count + 1)]
        compute = [model.new_int_var(0, longest, "") for _ in range(stages.count)]
        repeated: list[list[tuple[int, cp_model.IntVar | bool]]] = [[] for _ in compute]
        for (item, stage), var in self.again.items():
            repeated[stage].append((stages.ticks[item] or 0, var))
        for stage, own in enumerate(stages.own_ticks):
            model.add(compute[stage] >= begin[stage])
            model.add(begin[stage + 1] >= compute[stage] + own + sum(ticks * var for ticks, var in repeated[stage]))
        out, back = [], []
        left: dict[int, cp_model.IntVar] = {}
        for item, var in self.leaves.items():
            start, end = model.new_int_var(0, longest, ""), model.new_int_var(0, longest, "")
            out.append(model.new_optional_interval_var(start, stages.copy_ticks[item], end, var, ""))
            model.add(start >= begin[stages.home[item] + 1]).only_enforce_if(var)
            left[item] = end
        for (item, stage), var in self.moved.items():
            start, end = model.new_int_var(0, longest, ""), model.new_int_var(0, longest, "")
            back.append(model.new_optional_interval_var(start, stages.copy_ticks[item], end, var, ""))
            model.add(start >= begin[stage - 1]).only_enforce_if(var)
            model.add(start >= left[item]).only_enforce_if(var)
            model.add(compute[stage] >= end).only_enforce_if(var)
            before = max(event for event in self.events[item] if event < stage)
            gone = before + (2 if before == stages.home[item] else 1)
            if gone <= stages.count:
                model.add(begin[gone] >= left[item]).only_enforce_if(var)
        model.add_no_overlap(out)
        model.add_no_overlap(back)
        return begin[stages.count]
