"""The step as one device runs it: the equations on its own parts, and collectives where parts do not do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from memplan.parallel.emit.buckets import Buckets
from memplan.parallel.emit.collectives import Collectives
from memplan.parallel.partition.placement import Partial, PerDevice, Placement, Replicate, Shard
from memplan.parallel.partition.sharded import Sharded, ShardedEqn
from memplan.program import compat
from memplan.program.ops import local_params


def lower(
    sharded: Sharded, collectives: Collectives, inputs: Sequence[Any], buckets: Buckets | None = None
) -> list[Any]:
    """The outputs on one device, in their placements, from its part of the inputs.

    Args:
      buckets: a bucket goes when its last term is made; sums in none go, all that wait together, when the first of
        them is read.
    """
    return _Lowering(sharded, collectives, buckets or Buckets()).run(inputs)


class _Lowering:
    """One walk over the equations of a sharded jaxpr.

    Attributes:
      env: variable -> its value in every placement that it is known in.
      waiting: terms that are made and not yet sent, by bucket; None for those in no bucket.
      missing: terms that are still to be made, by bucket.
      unsummed: variables among `waiting`.
      in_bucket: sums that are still among those they travelled with.
    """

    def __init__(self, sharded: Sharded, collectives: Collectives, buckets: Buckets):
        self.sharded, self.collectives, self.buckets = sharded, collectives, buckets
        self.env: dict[Any, dict[Placement, Any]] = {}
        self.waiting: dict[int | None, list[Any]] = {}
        self.missing = Counter(buckets.bucket_of.values())
        self.unsummed: set[Any] = set()
        self.in_bucket: dict[Any, Placement] = {}
        self.zeros = {eqn.outvars[0] for eqn in sharded.jaxpr.jaxpr.eqns if _is_zero(eqn)}

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        jaxpr = self.sharded.jaxpr
        for var, value in compat.consts_of(jaxpr):
            self.write(var, Replicate(), value)
        for var, placement, value in zip(jaxpr.jaxpr.invars, self.sharded.inputs, inputs, strict=True):
            self.write(var, placement, value)
        for eqn, one in zip(jaxpr.jaxpr.eqns, self.sharded.eqns, strict=True):
            operands = [self.read(atom, need) for atom, need in zip(eqn.invars, one.operands, strict=True)]
            with compat.user_context(eqn):
                results = self.apply(eqn, one, operands)
            made = [Replicate()] * len(results) if one.replicated else one.results
            for var, placement, result in zip(eqn.outvars, made, results, strict=True):
                self.write(var, placement, result)
        self.gather_outputs()
        outputs = zip(jaxpr.jaxpr.outvars, self.sharded.outputs, strict=True)
        return [self.read(atom, placement) for atom, placement in outputs]

    def write(self, var: Any, placement: Placement, value: Any) -> None:
        self.env[var] = {placement: value}
        if var not in self.sharded.reductions:
            return
        if isinstance(placement, PerDevice):
            self.env[var][Partial()] = value / self.collectives.devices
        self.unsummed.add(var)
        bucket = self.buckets.bucket_of.get(var)
        self.waiting.setdefault(bucket, []).append(var)
        if bucket is not None:
            self.missing[bucket] -= 1
            if not self.missing[bucket]:
                self.reduce(bucket)

    def reduce(self, bucket: int | None) -> None:
        """Sum what waits in a bucket; what comes of it is taken apart where it is read."""
        terms = self.waiting.pop(bucket)
        lossy = bucket is not None and bucket not in self.buckets.uncompressed
        placements = [self.sharded.reductions[var] for var in terms]
        parts = [self.env[var][Partial()] for var in terms]
        sums = self.collectives.reduce(parts, placements, lossy, bucket is not None)
        for var, placement, part in zip(terms, placements, sums, strict=True):
            self.unsummed.remove(var)
            self.env[var][placement] = part
            self.in_bucket[var] = placement

    def read(self, atom: Any, need: Placement) -> Any:
        if not compat.is_var(atom):
            is_term = isinstance(need, Partial)
            return self.collectives.on_first(jnp.asarray(atom.val, atom.aval.dtype)) if is_term else atom.val
        known = self.env[atom]
        if need not in known and need != PerDevice() and atom in self.unsummed:
            self.reduce(next(bucket for bucket, terms in self.waiting.items() if atom in terms))
        if atom in self.in_bucket and need != PerDevice():
            placement = self.in_bucket.pop(atom)
            known[placement] = known[placement]()
        if need not in known:
            known[need] = self.convert(atom, need)
        return known[need]

    def convert(self, var: Any, need: Placement) -> Any:
        """To another placement than those that it is known in."""
        known = self.env[var]
        if isinstance(need, PerDevice):
            return known[Partial()] * self.collectives.devices if Partial() in known else self.read(var, Replicate())
        shard = next((one for one in known if isinstance(one, Shard)), None)
        if Replicate() not in known and shard is None and isinstance(need, Shard):
            return self.collectives.shard(known[PerDevice()], need.dim)
        if Replicate() not in known and shard is not None:
            (known[Replicate()],) = self.collectives.all_gather([known[shard]], [shard.dim])
        whole = known[Replicate()]
        if isinstance(need, Replicate):
            return whole
        if isinstance(need, Shard):
            return self.collectives.shard(whole, need.dim)
        return whole if var in self.zeros else self.collectives.on_first(whole)

    def gather_outputs(self) -> None:
        """What is returned whole but is split is gathered together."""
        found: dict[Any, Shard] = {}
        for atom, placement in zip(self.sharded.jaxpr.jaxpr.outvars, self.sharded.outputs, strict=True):
            known = self.env[atom] if compat.is_var(atom) else {}
            shard = next((one for one in known if isinstance(one, Shard)), None)
            if placement == Replicate() and Replicate() not in known and shard is not None:
                found[atom] = shard
        if found:
            parts = [self.read(var, shard) for var, shard in found.items()]
            wholes = self.collectives.all_gather(parts, [shard.dim for shard in found.values()])
            for var, whole in zip(found, wholes, strict=True):
                self.env[var][Replicate()] = whole

    def apply(self, eqn: compat.JaxprEqn, one: ShardedEqn, operands: list[Any]) -> list[Any]:
        if one.bodies:
            return self.control(eqn, one, operands)
        if eqn.effects:
            return self.print_once(eqn, operands)
        if one.axes is None or one.axis is None:
            return compat.bind(eqn, operands)
        match eqn.primitive.name:
            case "iota":
                return [self.iota(eqn, one)]
            case "random_bits" if not operands[0].shape:
                return [self.random_bits(eqn, operands[0])]
        devices = self.collectives.devices
        params = local_params(eqn, one.axes, one.axis, lambda size: size // devices)
        results = compat.bind(eqn.replace(params=params), operands)
        how = one.axes.reduced.get(one.axis)
        if how in ("max", "min"):
            results = [self.collectives.extremum(result, how) for result in results]
        return results

    def print_once(self, eqn: compat.JaxprEqn, operands: list[Any]) -> list[Any]:
        """What is printed is printed by the first device alone."""

        def emit(*values: Any) -> None:
            compat.bind(eqn, values)

        jax.lax.cond(self.collectives.rank == 0, emit, lambda *values: None, *operands)
        return []

    def iota(self, eqn: compat.JaxprEqn, one: ShardedEqn) -> Any:
        """Counts from where this device's part begins."""
        split_dim = next(made.dim for made in one.results if isinstance(made, Shard))
        shape, dim, dtype = list(eqn.params["shape"]), eqn.params["dimension"], eqn.params["dtype"]
        shape[split_dim] //= self.collectives.devices
        counted = jax.lax.broadcasted_iota(dtype, shape, dim)
        if dim != split_dim:
            return counted
        return counted + (self.collectives.rank * shape[dim]).astype(dtype)

    def random_bits(self, eqn: compat.JaxprEqn, key: Any) -> Any:
        """The very bits that the undivided draw has in this device's part."""
        shape, width = eqn.params["shape"], eqn.params["bit_width"]
        bits = compat.random_bits_between(key, width, shape, self.collectives.rank, self.collectives.devices)
        if bits is not None:
            return bits
        (whole,) = compat.bind(eqn, [key])
        return self.collectives.shard(whole, 0)

    def inner(self, body: Sharded, inputs: Sequence[Any]) -> list[Any]:
        return lower(body, self.collectives, inputs)

    def control(self, eqn: compat.JaxprEqn, one: ShardedEqn, operands: list[Any]) -> list[Any]:
        scan = compat.scan_of(eqn)
        if scan is not None:
            mine = scan.among(self.collectives.devices) if one.divides_trips else scan
            return mine.run(lambda *inputs: self.inner(one.bodies[0], inputs), operands)
        if eqn.primitive.name == "cond":
            branches = [lambda *inputs, body=body: self.inner(body, inputs) for body in one.bodies]
            return list(jax.lax.switch(operands[0].astype(jnp.int32), branches, *operands[1:]))
        tests, bodies = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        test, body = one.bodies
        known, consts, init = operands[:tests], operands[tests : tests + bodies], operands[tests + bodies :]
        return jax.lax.while_loop(
            lambda carry: self.inner(test, [*known, *carry])[0],
            lambda carry: self.inner(body, [*consts, *carry]),
            init,
        )


def _is_zero(eqn: compat.JaxprEqn) -> bool:
    operand = eqn.invars[0] if eqn.invars else None
    return eqn.primitive.name == "broadcast_in_dim" and isinstance(operand, compat.Literal) and operand.val == 0
