"""The step as one device runs it: the equations on its own parts, and collectives where parts do not do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from memplan.parallel.emit.buckets import Buckets
from memplan.parallel.emit.collectives import Links
from memplan.parallel.partition.assigned import Assigned, Step
from memplan.parallel.partition.placement import OWN, PARTIAL, WHOLE, Layout
from memplan.program import compat
from memplan.program.axes import local_params


@dataclass
class Local:
    """One walk over the equations of an assigned jaxpr.

    Attributes:
      buckets: a bucket goes when its last term is made; sums in none go, all that wait together, when the first of
        them is read.
    """

    assigned: Assigned
    links: Links
    buckets: Buckets = field(default_factory=Buckets)

    def __post_init__(self) -> None:
        self.env: dict[Any, dict[Layout, Any]] = {}
        self.waiting: dict[int | None, list[Any]] = {}
        self.missing: dict[int, int] = {}
        self.unsummed: set[Any] = set()
        self.apart: dict[Any, Layout] = {}  # sums that are still among those they travelled with
        for bucket in self.buckets.number.values():
            self.missing[bucket] = self.missing.get(bucket, 0) + 1
        eqns = self.assigned.jaxpr.jaxpr.eqns
        self.zeros = {eqn.outvars[0] for eqn in eqns if _is_zero(eqn)}

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Its outputs, in their assigned layouts, from its inputs."""
        jaxpr = self.assigned.jaxpr
        for var, value in compat.consts_of(jaxpr):
            self.write(var, WHOLE, value)
        for var, layout, value in zip(jaxpr.jaxpr.invars, self.assigned.inputs, inputs, strict=True):
            self.write(var, layout, value)
        for eqn, step in zip(jaxpr.jaxpr.eqns, self.assigned.steps, strict=True):
            operands = [self.read(atom, need) for atom, need in zip(eqn.invars, step.needs, strict=True)]
            with compat.as_written(eqn):
                results = self.apply(eqn, step, operands)
            made = [WHOLE] * len(results) if step.made_whole else step.gives
            for var, layout, result in zip(eqn.outvars, made, results, strict=True):
                self.write(var, layout, result)
        self.gather_outputs()
        return [
            self.read(atom, layout) for atom, layout in zip(jaxpr.jaxpr.outvars, self.assigned.outputs, strict=True)
        ]

    def write(self, var: Any, layout: Layout, value: Any) -> None:
        self.env[var] = {layout: value}
        if var not in self.assigned.rests:
            return
        if layout.is_own:
            self.env[var][PARTIAL] = value / self.links.devices
        self.unsummed.add(var)
        bucket = self.buckets.number.get(var)
        self.waiting.setdefault(bucket, []).append(var)
        if bucket is not None:
            self.missing[bucket] -= 1
            if not self.missing[bucket]:
                self.sum(bucket)

    def sum(self, bucket: int | None) -> None:
        """Sum what waits in a bucket; what comes of it is taken apart where it is read."""
        terms = self.waiting.pop(bucket)
        lossy = bucket is not None and bucket not in self.buckets.exact
        layouts = [self.assigned.rests[var] for var in terms]
        sums = self.links.sum([self.env[var][PARTIAL] for var in terms], layouts, lossy, bucket is not None)
        for var, layout, part in zip(terms, layouts, sums, strict=True):
            self.unsummed.remove(var)
            self.env[var][layout] = part
            self.apart[var] = layout

    def read(self, atom: Any, need: Layout) -> Any:
        if not compat.is_var(atom):
            return self.links.once(jnp.asarray(atom.val, atom.aval.dtype)) if need.is_partial else atom.val
        known = self.env[atom]
        if need not in known and not need.is_own and atom in self.unsummed:
            self.sum(next(bucket for bucket, terms in self.waiting.items() if atom in terms))
        if atom in self.apart and not need.is_own:
            layout = self.apart.pop(atom)
            known[layout] = known[layout]()
        if need not in known:
            known[need] = self.converted(atom, need)
        return known[need]

    def converted(self, var: Any, need: Layout) -> Any:
        known = self.env[var]
        if need.is_own:
            return known[PARTIAL] * self.links.devices if PARTIAL in known else self.read(var, WHOLE)
        if WHOLE not in known:
            have = next((layout for layout in known if layout.is_split), OWN)
            if have.is_own:
                return self.links.part(known[OWN], need.dim)
            (known[WHOLE],) = self.links.gather([known[have]], [have.dim])
        whole = known[WHOLE]
        if need == WHOLE:
            return whole
        if need.is_split:
            return self.links.part(whole, need.dim)
        return whole if var in self.zeros else self.links.once(whole)

    def gather_outputs(self) -> None:
        """What is returned whole but is split is gathered together."""
        outvars = zip(self.assigned.jaxpr.jaxpr.outvars, self.assigned.outputs, strict=True)
        found: dict[Any, Layout] = {}
        for atom, layout in outvars:
            known = self.env[atom] if compat.is_var(atom) else {}
            have = next((one for one in known if one.is_split), None)
            if layout == WHOLE and WHOLE not in known and have is not None:
                found[atom] = have
        if found:
            parts = [self.read(var, have) for var, have in found.items()]
            wholes = self.links.gather(parts, [have.dim for have in found.values()])
            for var, whole in zip(found, wholes, strict=True):
                self.env[var][WHOLE] = whole

    def apply(self, eqn: compat.JaxprEqn, step: Step, operands: list[Any]) -> list[Any]:
        if step.bodies:
            return self.control(eqn, step, operands)
        if eqn.effects:
            return self.once(eqn, operands)
        if step.factors is None or step.factor is None:
            return compat.bind(eqn, operands)
        match eqn.primitive.name:
            case "iota":
                return [self.iota(eqn, step)]
            case "random_bits" if not operands[0].shape:
                return [self.random_bits(eqn, operands[0])]
        params = local_params(eqn, step.factors, step.factor, self.links.devices)
        results = compat.bind(eqn.replace(params=params), operands)
        how = step.factors.reduced.get(step.factor)
        if how in ("max", "min"):
            results = [self.links.largest(result, how) for result in results]
        return results

    def once(self, eqn: compat.JaxprEqn, operands: list[Any]) -> list[Any]:
        """What is printed is printed by the first device alone."""

        def told(*values: Any) -> None:
            compat.bind(eqn, values)

        jax.lax.cond(self.links.rank == 0, told, lambda *values: None, *operands)
        return []

    def iota(self, eqn: compat.JaxprEqn, step: Step) -> Any:
        """Counts from where this device's part begins."""
        split_dim = step.gives[0].dim
        shape, dim, dtype = list(eqn.params["shape"]), eqn.params["dimension"], eqn.params["dtype"]
        shape[split_dim] //= self.links.devices
        counted = jax.lax.broadcasted_iota(dtype, shape, dim)
        if dim != split_dim:
            return counted
        return counted + (self.links.rank * shape[dim]).astype(dtype)

    def random_bits(self, eqn: compat.JaxprEqn, key: Any) -> Any:
        """The very bits that the undivided draw has in this device's part."""
        shape, width = eqn.params["shape"], eqn.params["bit_width"]
        bits = compat.random_bits_between(key, width, shape, self.links.rank, self.links.devices)
        if bits is not None:
            return bits
        (whole,) = compat.bind(eqn, [key])
        return self.links.part(whole, 0)

    def inner(self, body: Assigned, inputs: Sequence[Any]) -> list[Any]:
        return Local(body, self.links).run(inputs)

    def control(self, eqn: compat.JaxprEqn, step: Step, operands: list[Any]) -> list[Any]:
        scan = compat.scan_of(eqn)
        if scan is not None:
            mine = scan.among(self.links.devices) if step.spread else scan
            return mine.run(lambda *inputs: self.inner(step.bodies[0], inputs), operands)
        if eqn.primitive.name == "cond":
            branches = [lambda *inputs, body=body: self.inner(body, inputs) for body in step.bodies]
            return list(jax.lax.switch(operands[0].astype(jnp.int32), branches, *operands[1:]))
        tests, bodies = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        test, body = step.bodies
        known, consts, init = operands[:tests], operands[tests : tests + bodies], operands[tests + bodies :]
        return jax.lax.while_loop(
            lambda carry: self.inner(test, [*known, *carry])[0],
            lambda carry: self.inner(body, [*consts, *carry]),
            init,
        )


def _is_zero(eqn: compat.JaxprEqn) -> bool:
    operand = eqn.invars[0] if eqn.invars else None
    return eqn.primitive.name == "broadcast_in_dim" and isinstance(operand, compat.Literal) and operand.val == 0
