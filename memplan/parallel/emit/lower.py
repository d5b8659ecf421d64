"""The step as one device runs it: equations on its own parts, and collectives between them."""

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from memplan.parallel.emit.buckets import Buckets
from memplan.parallel.emit.collectives import Collectives
from memplan.parallel.partition.sharded import Partial, PerDevice, Placement, Replicate, Shard, Sharded, ShardedEqn
from memplan.program import compat
from memplan.program.ops import local_params


def lower(
    sharded: Sharded, collectives: Collectives, inputs: Sequence[Any], buckets: Buckets | None = None
) -> list[Any]:
    """The outputs on one device, in their placements, from its part of the inputs.

    Args:
      buckets: a bucket is reduced when its last term is made; sums in no bucket are reduced together, all that wait,
        when the first of them is read.
    """
    return _Lowering(sharded, collectives, buckets or Buckets()).run(inputs)


class _Lowering:
    """One walk over the equations of a sharded jaxpr."""

    def __init__(self, sharded: Sharded, collectives: Collectives, buckets: Buckets):
        self.sharded, self.collectives, self.buckets = sharded, collectives, buckets
        self.env: dict[Any, dict[Placement, Any]] = {}  # variable -> its value in each placement that is known
        self.waiting: dict[int | None, list[Any]] = {}  # terms not yet sent, by bucket; None: in no bucket
        self.missing = Counter(buckets.bucket_of.values())  # how many terms are still to be made, by bucket
        self.unsummed: set[Any] = set()  # variables among `waiting`
        self.in_bucket: dict[Any, Placement] = {}  # sums not yet sliced out of their bucket
        self.zeros = {  # broadcasts of zero
            eqn.outvars[0]
            for eqn in sharded.jaxpr.jaxpr.eqns
            if eqn.primitive.name == "broadcast_in_dim"
            and isinstance(operand := eqn.invars[0], compat.Literal)
            and operand.val == 0
        }

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
        """Sum the terms of a bucket; each sum is sliced out of it when it is read."""
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
        """The value in a placement that is not known yet."""
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
        """Gather split outputs that are returned whole, all together."""
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
        """Only the first device prints."""

        def emit(*values: Any) -> None:
            compat.bind(eqn, values)

        jax.lax.cond(self.collectives.rank == 0, emit, lambda *values: None, *operands)
        return []

    def iota(self, eqn: compat.JaxprEqn, one: ShardedEqn) -> Any:
        """This device's part of the counts."""
        split_dim = next(made.dim for made in one.results if isinstance(made, Shard))
        shape, dim, dtype = list(eqn.params["shape"]), eqn.params["dimension"], eqn.params["dtype"]
        shape[split_dim] //= self.collectives.devices
        counted = jax.lax.broadcasted_iota(dtype, shape, dim)
        if dim != split_dim:
            return counted
        return counted + (self.collectives.rank * shape[dim]).astype(dtype)

    def random_bits(self, eqn: compat.JaxprEqn, key: Any) -> Any:
        """The bits of the undivided draw in this device's part."""
        shape, width = eqn.params["shape"], eqn.params["bit_width"]
        bits = compat.random_bits_between(key, width, shape, self.collectives.rank, self.collectives.devices)
        if bits is not None:
            return bits
        (whole,) = compat.bind(eqn, [key])
        return self.collectives.shard(whole, 0)

    def control(self, eqn: compat.JaxprEqn, one: ShardedEqn, operands: list[Any]) -> list[Any]:
        inner = functools.partial(lower, collectives=self.collectives)
        scan = compat.scan_of(eqn)
        if scan is not None:
            mine = scan.among(self.collectives.devices) if one.divides_trips else scan
            return mine.run(lambda *inputs: inner(one.bodies[0], inputs=inputs), operands)
        if eqn.primitive.name == "cond":
            branches = [lambda *inputs, body=body: inner(body, inputs=inputs) for body in one.bodies]
            return list(jax.lax.switch(operands[0].astype(jnp.int32), branches, *operands[1:]))
        tests, bodies = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        test, body = one.bodies
        known, consts, init = operands[:tests], operands[tests : tests + bodies], operands[tests + bodies :]
        return jax.lax.while_loop(
            lambda carry: inner(test, inputs=[*known, *carry])[0],
            lambda carry: inner(body, inputs=[*consts, *carry]),
            init,
        )
