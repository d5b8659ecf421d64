"""Program + Plan -> flat jaxpr: the same function in the planned order. Obeys; never chooses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from memplan.planning.graph import Graph
from memplan.planning.plan import Action, Kind, Plan, copy_of
from memplan.program import compat
from memplan.program.fence import Channels, fence, fragile_zeros
from memplan.program.trace import Program


def rewrite(program: Program, graph: Graph, plan: Plan) -> compat.ClosedJaxpr:
    """The planned program as a closed jaxpr with the inputs and outputs of `program.jaxpr`.

    Raises:
      PlanMismatchError: the plan belongs to another program.
    """
    plan.check(graph)
    avals = [var.aval for var in program.jaxpr.jaxpr.invars]
    return jax.make_jaxpr(lambda *inputs: _Rewriter(program, graph, plan).run(inputs))(*map(compat.as_struct, avals))


class _Rewriter:
    """One walk over the actions: environments of device and host values, read and written."""

    def __init__(self, program: Program, graph: Graph, plan: Plan):
        self.eqns = program.jaxpr.jaxpr.eqns
        self.outvars = program.jaxpr.jaxpr.outvars
        self.consts = [value for _, value in compat.consts_of(program.jaxpr)]
        self.graph = graph
        self.segments = list(plan.segments())
        self.device: dict[int, Any] = {}
        self.host: dict[int, Any] = {}
        self.channels = Channels.of_program(self.eqns)
        self.inputs = frozenset(graph.inputs)
        self.fragile = fragile_zeros(self.eqns)
        self.zeros: dict[Any, Any] = {}  # dtype -> a scalar zero that went through the last fence
        self.put: dict[int, int] = {}  # value -> its copy on the host, where the program itself makes that

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        self.device.update(zip(self.graph.inputs, [*inputs, *self.consts], strict=True))
        dtypes = sorted({dtype for _, dtype in self.fragile}, key=str)
        self.zeros.update(zip(dtypes, fence([jax.numpy.zeros((), dtype) for dtype in dtypes]), strict=True))
        for number, segment in enumerate(self.segments):
            made: set[int] = set()
            for action in segment:
                made.update(self.act(action, f"memplan.{number}"))
            if number + 1 < len(self.segments):
                self.end_segment(made, segment, self.segments[number + 1])
        returned = iter(self.graph.outputs)
        return [atom.val if isinstance(atom, compat.Literal) else self.device[next(returned)] for atom in self.outvars]

    def act(self, action: Action, scope: str) -> list[int]:
        """Carry out one action; returns what the segment ends with: values it made, copies that are done.

        A copy to the device, and what comes from other devices, has until its value is read, a copy to the host until
        the value is freed.
        """
        value = action.target
        match action.kind:
            case Kind.COMPUTE:
                made = self.compute(value, scope)
                copy = copy_of(action, self.graph)
                if copy and copy[1] is Kind.OFFLOAD:
                    self.put[copy[0]] = self.graph.ops[value].outputs[0]
                return [] if copy or self.graph.ops[value].communicates else made
            case Kind.OFFLOAD:
                self.host[value] = self.channels.to_host(self.device[value])
            case Kind.PREFETCH:
                self.device[value] = self.channels.to_device(self.host[value], self.graph.values[value].shape)
            case Kind.FREE:
                self.device.pop(value, None)
                return [self.put.pop(value)] if value in self.put else []
            case Kind.RELEASE:
                self.host.pop(value, None)
        return []

    def compute(self, op: int, scope: str) -> list[int]:
        eqn = self.eqns[op]
        known = iter(self.graph.ops[op].inputs)
        operands = [
            self.literal(atom, eqn) if isinstance(atom, compat.Literal) else self.device[next(known)]
            for atom in eqn.invars
        ]
        with compat.as_written(eqn, f"{scope}.{op}"):
            results = compat.bind(eqn, operands)
        outputs = self.graph.ops[op].outputs
        fresh = [value for value in outputs if value not in self.device]  # a copy that is still alive stays
        for value, result in zip(outputs, results, strict=True):
            self.device.setdefault(value, result)
        return fresh

    def literal(self, atom: compat.Literal, eqn: compat.JaxprEqn) -> Any:
        """The literal, or a zero of this segment's own where the compiler would share its broadcast across segments."""
        aval = compat.aval_of(atom)
        made = [getattr(var.aval, "shape", None) for var in eqn.outvars[:1]]
        fragile = aval.shape == () and any((shape, aval.dtype) in self.fragile for shape in made) and atom.val == 0
        return self.zeros[aval.dtype] if fragile else atom.val

    def end_segment(self, made: set[int], segment: Sequence[Action], following: Sequence[Action]) -> None:
        """Fence the values made here or read next, the copies that must be done, and those about to come back."""
        on_device = [value for value in sorted(made | reads(following, self.graph)) if value in self.device]
        ended = {action.target for action in segment if action.kind is Kind.FREE}
        coming = {action.target for action in following if action.kind is Kind.PREFETCH}
        on_host = [value for value in sorted(ended | coming) if value in self.host]
        values = [self.outward(value) for value in on_device]
        held = iter(fence([*values, *(self.host[value] for value in on_host), *self.zeros.values()]))
        self.device.update({value: self.inward(next(held), value) for value in on_device})
        self.host.update({value: next(held) for value in on_host})
        self.zeros.update({dtype: next(held) for dtype in self.zeros})

    def outward(self, value: int) -> Any:
        """A value as it passes a fence. Inputs pass as they are: turned, all readers would share one turned copy."""
        return self.device[value] if value in self.inputs else self.channels.second(self.device[value])

    def inward(self, fenced: Any, value: int) -> Any:
        """Undoes `outward` behind the fence."""
        return fenced if value in self.inputs else self.channels.last(fenced, self.graph.values[value].shape)


def reads(segment: Sequence[Action], graph: Graph) -> set[int]:
    """Values that a segment takes from before it; what it sends to other devices goes whenever that is ready."""
    made: set[int] = set()
    read: set[int] = set()
    for action in segment:
        if action.kind is Kind.COMPUTE:
            op = graph.ops[action.target]
            read.update(value for value in op.inputs if value not in made and not op.communicates)
            made.update(graph.ops[action.target].outputs)
        elif action.kind is Kind.OFFLOAD and action.target not in made:
            read.add(action.target)
        elif action.kind is Kind.PREFETCH:
            made.add(action.target)
    return read
