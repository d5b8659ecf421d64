"""Small graphs for the tests of the planning half. Sizes are in bytes; nothing here knows jax."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from hypothesis import strategies as st

from memplan.planning.devices import Device, HostLink, named
from memplan.planning.floor import floor
from memplan.planning.graph import Graph, Op, Value
from memplan.planning.layout import Layout, cut
from memplan.planning.order import early_loose_ends
from memplan.planning.planners.protocol import Proposal
from memplan.planning.simulate import Simulator
from memplan.planning.unfold import Decisions, Mode
from memplan.verify.plan import judge

# One FLOP, one byte of memory and one byte of link take one second each: every figure can be added up by hand.
UNIT = Device(
    name="unit",
    description="a second per byte, a second per FLOP",
    memory_bytes=10**6,
    memory_bandwidth=1.0,
    flops={"float32": 1.0},
    vector_flops=1.0,
    link=HostLink("unit-link", bandwidth=1.0, latency_s=0.0, source="made up"),
    sources=("made up",),
    target=None,
)
UNIT_GPU = replace(UNIT, name="unit GPU", target=named("v100").target)


@dataclass
class Builder:
    """Puts a graph together: `argument` and `op` answer value ids, `build` the graph."""

    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)

    def argument(self, nbytes: int, donated: bool = False) -> int:
        self.inputs.append(len(self.values))
        self.values.append(Value(f"argument:{len(self.values)}", nbytes, (nbytes,), "uint8", "argument", donated))
        return self.inputs[-1]

    def op(self, inputs: Sequence[int], nbytes: int, fusion: Any = "kernel", **facts: Any) -> int:
        return self.ops_of(inputs, (nbytes,), fusion, **facts)[0]

    def ops_of(self, inputs: Sequence[int], sizes: Sequence[int], fusion: Any = "kernel", **facts: Any) -> list[int]:
        """One operation with several outputs."""
        made = list(range(len(self.values), len(self.values) + len(sizes)))
        self.values.extend(Value(f"{fusion}:{v}", n, (n,), "uint8") for v, n in zip(made, sizes, strict=True))
        name = facts.pop("name", f"{fusion}{len(self.ops)}")
        self.ops.append(Op(name, tuple(inputs), tuple(made), fusion=fusion, **facts))
        return made

    def build(self, *outputs: int, fingerprint: str = "a program") -> Graph:
        return Graph(tuple(self.values), tuple(self.ops), tuple(self.inputs), outputs, fingerprint)


def chain(length: int, nbytes: int = 10, fusion: Any = "kernel") -> Graph:
    """Each operation reads the one before."""
    b = Builder()
    last = b.argument(nbytes)
    for _ in range(length):
        last = b.op([last], nbytes, fusion)
    return b.build(last)


def diamond(nbytes: int = 10, fusion: Any = "kernel") -> Graph:
    """One value, two readers, and an operation that joins them."""
    b = Builder()
    top = b.op([b.argument(nbytes)], nbytes, fusion)
    left, right = b.op([top], nbytes, fusion), b.op([top], nbytes, fusion)
    return b.build(b.op([left, right], nbytes, fusion))


def fan_out(width: int, nbytes: int = 10) -> Graph:
    """One value with many readers, each an output."""
    b = Builder()
    top = b.op([b.argument(nbytes)], nbytes)
    return b.build(*[b.op([top], nbytes) for _ in range(width)])


def training_chain(sizes: Sequence[int], flops: float = 0.0) -> Graph:
    """A forward chain of values with these sizes, and a mirrored backward chain that reads the forward values."""
    b = Builder()
    forward = [b.argument(sizes[0])]
    for nbytes in sizes:
        forward.append(b.op([forward[-1]], nbytes, name="forward", flops=flops, flops_dtype="float32"))
    gradient = b.op([forward[-1]], sizes[-1], name="loss")
    for value in reversed(forward[:-1]):
        nbytes = b.values[value].nbytes
        gradient = b.op([gradient, value], nbytes, name="backward", flops=flops, flops_dtype="float32")
    return b.build(gradient)


def training_stack(depth: int, nbytes: int = 100, weight: int = 10) -> Graph:
    """Layers as they come: a kernel, its activation, weight gradients, and updates of donated weights."""
    b = Builder()
    weights = [b.argument(weight, donated=True) for _ in range(depth)]
    activation = b.argument(nbytes)
    saved = []
    for w in weights:
        made = b.op([activation, w], nbytes, name="matmul", flops=nbytes, flops_dtype="float32")
        saved.append((activation, made))
        activation = b.op([made], nbytes, "elementwise", name="relu")
    gradient = b.op([activation], nbytes, "elementwise", name="loss")
    updated = []
    for w, (source, made) in zip(reversed(weights), reversed(saved), strict=True):
        gradient = b.op([gradient, made], nbytes, "elementwise", name="relu_gradient")
        slope = b.op([source, gradient], weight, name="weight_gradient", flops=nbytes, flops_dtype="float32")
        turned = b.op([w], weight, "view", name="turned")
        gradient = b.op([gradient, turned], nbytes, name="input_gradient", flops=nbytes, flops_dtype="float32")
        updated.append(b.op([w, slope], weight, "elementwise", name="update"))
    return b.build(*reversed(updated))  # in the order of the weights, so that each takes its own buffer


def random_graph(draw: random.Random, most: int = 14, kernels_only: bool = False, effects: bool = True) -> Graph:
    """A straight-line program of everything that occurs: donated and unread inputs, views of views, broadcasts,
    reductions, operations with two outputs or none that is read, effects, outputs that are inputs, views or repeated.
    """
    b = Builder()
    for _ in range(draw.randint(1, 3)):
        b.argument(draw.randint(1, 20), donated=draw.random() < 0.4)
    for _ in range(draw.randint(1, most)):
        kind = "kernel" if kernels_only else draw.choice(["kernel", "kernel", "elementwise", "reduction", "view"])
        inputs = [b.values.index(draw.choice(b.values[-6:] + b.values[:2])) for _ in range(draw.randint(1, 3))]
        if kind == "view":
            grown = b.values[inputs[0]].nbytes * draw.choice([1, 1, 3])
            b.op(inputs[:1] if draw.random() < 0.9 else [], grown, "view")
            continue
        sizes = [1 if kind == "reduction" else draw.randint(1, 20) for _ in range(draw.choice([1, 1, 1, 2]))]
        once = {"recomputable": False, "why_not": "it prints"} if effects and draw.random() < 0.1 else {}
        facts = {"workspace_nbytes": draw.choice([0, 0, 7])} if kind == "kernel" else {}
        facts |= {"along_rows": draw.random() < 0.5} if kind == "reduction" else {}
        b.ops_of(inputs, sizes, kind, flops=float(draw.randint(0, 40)), **facts, **once)
    outputs = [draw.randrange(len(b.values)) for _ in range(draw.randint(1, 3))]
    return b.build(*outputs, len(b.values) - 1)


def random_decisions(draw: random.Random, layout: Layout, modes: Sequence[Mode] = tuple(Mode)) -> Decisions:
    """Any mode for any value before any later segment; only what may run again is dropped."""
    share = draw.random()
    found = {}
    for value, home in sorted(layout.home.items()):
        made = layout.graph.producer[value]
        assert made is not None
        for number in range(home + 1, len(layout.segments)):
            mode = draw.choice(list(modes))
            if draw.random() < share and (mode is not Mode.DROP or layout.graph.ops[made].recomputable):
                found[value, number] = mode
    return found


def layout_of(graph: Graph, fence_nbytes: int = 1, fuses_rows: bool = False, finely: bool = False) -> Layout:
    return cut(graph, early_loose_ends(graph), fence_nbytes, fuses_rows, finely)


def every_drop(layout: Layout) -> Iterator[Decisions]:
    """All ways to keep or drop, before each later segment, what that segment can be handed from before."""
    keys = [(value, number) for value, home in layout.home.items() for number in range(home + 1, len(layout.segments))]
    for chosen in product([False, True], repeat=len(keys)):
        yield {key: Mode.DROP for key, drop in zip(keys, chosen, strict=True) if drop}


def every_recomputation(layout: Layout) -> Iterator[Decisions]:
    """All ways to run a `training_chain` where each backward segment starts again from some earlier forward value."""
    saved = [op.outputs[0] for op in layout.graph.ops if op.name == "forward"][:-1]
    chains = []
    for last, value in enumerate(saved):
        user = layout.home[layout.graph.ops[layout.graph.readers[value][-1]].outputs[0]]
        chains.append([[(v, user) for v in saved[first : last + 1]] for first in range(last + 2)])
    for chosen in product(*chains):
        yield dict.fromkeys((key for keys in chosen for key in keys), Mode.DROP)


DRAWS = st.randoms(use_true_random=False)
GRAPHS = DRAWS.map(random_graph)


def check(graph: Graph, proposal: Proposal, budget: int, host: int, device: Device = UNIT) -> None:
    """What holds of every proposal of a planner."""
    account = judge(proposal.plan, graph)
    assert proposal.timeline == Simulator(graph, device).run(proposal.plan)
    assert proposal.timeline.host_peak_nbytes <= account.host_peak_nbytes <= host
    assert proposal.fits == (proposal.timeline.peak_nbytes <= budget)
    assert proposal.timeline.peak_nbytes >= floor(graph).nbytes
