"""Runs every case at reduced size on the CPU, in the planned order, against the unmodified step, for three steps.

    python -m experiments.budgets.numbers [--only NAME ...] [--out FILE]

The plan is made for the case's own GPU. Its budget is the case's share of what the reduced step needs in segments with
nothing recomputed or moved: of the unmodified step's compiled peak, most of which is floor at such sizes, these shares
cannot be reached. A small step leaves less time for every byte that is copied, so the link gets twice the bandwidth and
no latency; with that, every plan here both recomputes and moves values (asserted). Where the share has no plan that
fits, the nearest that has one is taken, else the plan that misses it: its numbers count all the same. Each of the three
programs (unmodified, cut into segments, planned) is fed its own state.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from experiments.budgets.cases import Case
from experiments.budgets.run import OPTIONS, RESULTS, environment, selected, write
from memplan.planning import devices
from memplan.planning.graph import Graph
from memplan.planning.plan import Plan
from memplan.planning.planners.protocol import Problem, Proposal
from memplan.planning.planners.registry import planner_named
from memplan.planning.simulate import Simulator
from memplan.program import compat, extract, trace
from memplan.program.executor import compile_stages
from memplan.running import segmented_plan
from memplan.verify.plan import Account, judge
from memplan.verify.program import Gate, compare

STEPS = 3

Flat = Callable[[Sequence[Any]], list[Any]]


def measure(case: Case) -> dict[str, Any]:
    """Plan, run and compare one case; the figures as a JSON object."""
    start = time.perf_counter()
    step, args = case.program.reduced(concrete=True)
    program = trace.trace(step, args, {}, OPTIONS)
    graph = extract.extract(program)
    kept, percent, proposal, account = plan(graph, case)
    leaves = jax.tree.leaves(args)
    gates = compare_steps(
        (
            jax.jit(compat.jaxpr_as_fun(program.jaxpr)),
            staged(program, graph, segmented_plan(graph, kept * percent // 100, case.device)),
            staged(program, graph, proposal.plan),
        ),
        leaves,
        len(jax.tree.leaves(args[0])),
    )
    return {
        "case": case.name, "device": case.device, "percent": percent, "kept_bytes": kept,
        "fits": proposal.fits, "predicted_bytes": proposal.timeline.peak_nbytes,
        "segments": len(proposal.timeline.moments),
        "recomputed_ops": sum(account.recomputed.values()), "offloaded_bytes": account.offloaded_nbytes,
        "recomputed_kernels": sum(n for op, n in account.recomputed.items() if graph.ops[op].fusion == "kernel"),
        "passes": all(gate.passes for gate in gates), "steps": list(map(row, gates)),
        "outputs": len(gates[0].leaves), "wall_s": time.perf_counter() - start,
    }  # fmt: skip


def plan(graph: Graph, case: Case) -> tuple[int, int, Proposal, Account]:
    """Bytes in segments with nothing changed, the share of them that was planned for, the plan and what it does."""
    device, planner = devices.named(case.device), planner_named(None)
    device = replace(device, link=replace(device.link, latency_s=0.0, bandwidth=2 * device.link.bandwidth))
    whole = segmented_plan(graph, 2 * graph.resident_nbytes, case.device)
    kept = Simulator(graph, device).run(whole).peak_nbytes
    found: tuple[int, int, Proposal, Account] | None = None
    for percent in range(case.percent, 100, 5):
        proposal = planner.propose(Problem(graph, device, kept * percent // 100, 2 * device.memory_bytes))
        account = judge(proposal.plan, graph)
        if account.recomputed and account.offloaded_nbytes:
            if proposal.fits:
                return kept, percent, proposal, account
            found = found or (kept, percent, proposal, account)
    assert found, f"{case.name}: no plan that both recomputes and moves"
    return found


def staged(program: trace.Program, graph: Graph, plan: Plan) -> Flat:
    """A plan on the CPU, segment by segment; compiled once, fed copies since it consumes what is donated."""
    stages = compile_stages(program, graph, plan)
    return lambda leaves: stages([leaf.copy() for leaf in leaves])


def compare_steps(programs: tuple[Any, Flat, Flat], leaves: Sequence[Any], states: int) -> list[Gate]:
    """The gate after every step; the first `states` outputs of each program are its next first inputs."""
    unmodified, *others = programs
    runs: list[Flat] = [lambda inputs: unmodified(*inputs), *others]
    inputs = [list(leaves) for _ in runs]
    gates = []
    for _ in range(STEPS):
        outputs = [run(given) for run, given in zip(runs, inputs, strict=True)]
        gates.append(compare(*outputs))
        inputs = [[*made[:states], *given[states:]] for made, given in zip(outputs, inputs, strict=True)]
    return gates


def row(gate: Gate) -> dict[str, Any]:
    """The output that is nearest to, or furthest beyond, its tolerance, and the largest errors of all."""
    worst = gate.leaves[gate.worst]
    return {
        "passes": gate.passes,
        "beyond": sum(leaf.planned > leaf.tolerance for leaf in gate.leaves),
        "worst_output": gate.worst,
        "recompilation": worst.recompilation,
        "planned": worst.planned,
        "tolerance": worst.tolerance,
        "largest_recompilation": max(leaf.recompilation for leaf in gate.leaves),
        "largest_planned": max(leaf.planned for leaf in gate.leaves),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--out", type=Path, default=RESULTS.parent / "numbers.json")
    args = parser.parse_args()
    found = json.loads(args.out.read_text()) if args.out.exists() else {"cases": {}}
    for case in selected(args.only):
        found["cases"][case.name] = one = measure(case)
        write(args.out, {"environment": environment(), "cases": found["cases"]})
        last, verdict = one["steps"][-1], "passes" if one["passes"] else "FAILS"
        print(
            f"{case.name}: {verdict} at {one['percent']} %, {one['recomputed_ops']} again, {one['offloaded_bytes']} B "
            f"moved; after {STEPS} steps {last['planned']:.1e} of {last['tolerance']:.1e}; {one['wall_s']:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
