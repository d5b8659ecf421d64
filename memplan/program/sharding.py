"""A step that is one `shard_map` over a mesh: the program of one device is planned, and then mapped over a mesh again.

`memplan.parallel` makes such steps. Arrays of the device program have the shape of its part; its collectives are
operations like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from memplan.hardware.topology import Topology
from memplan.program import compat
from memplan.program.interpret import interpret

XLA_DECOMPOSES = "xla_gpu_all_reduce_blueconnect_num_devices_per_host"


@dataclass(frozen=True)
class Spmd:
    """The partition of a step's inputs and outputs over a mesh."""

    mesh: Any  # a `Mesh`, or an `AbstractMesh` for absent devices
    # inputs, outputs: one partition spec each
    inputs: tuple[PartitionSpec, ...]
    outputs: tuple[PartitionSpec, ...]
    topology: Topology | None = None  # the links between its devices, if the step has them

    @property
    def axes(self) -> dict[str, int]:
        """Size by name, outermost first."""
        return dict(self.mesh.shape)

    def on(self, mesh: Any) -> Spmd:
        return replace(self, mesh=mesh)

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def over_mesh(self, local: Callable[..., Sequence[Any]]) -> Callable[..., list[Any]]:
        """The function of whole arrays that all devices compute, from the function of one (flat inputs and outputs)."""
        return jax.shard_map(
            lambda *operands: list(local(*operands)),
            mesh=self.mesh,
            in_specs=self.inputs,
            out_specs=list(self.outputs),
            check_vma=False,
        )


def unwrap_shard_map(
    closed: compat.ClosedJaxpr, topology: Topology | None = None
) -> tuple[Spmd, compat.ClosedJaxpr] | None:
    """The mesh and the device program of a step that is one `shard_map` over all axes; None for any other step."""
    eqns = closed.jaxpr.eqns
    if len(eqns) != 1 or eqns[0].primitive.name != "shard_map":
        return None
    (eqn,) = eqns
    mesh, params = eqn.params["mesh"], eqn.params
    if set(params["newly_manual_axes"]) != set(mesh.axis_names) or params["check_vma"]:
        return None
    specs = dict(zip(eqn.invars, params["in_specs"], strict=True))
    made = dict(zip(eqn.outvars, params["out_specs"], strict=True))
    body = compat.body_of(eqn)
    types = dict(zip(eqn.invars, (var.aval for var in body.jaxpr.invars), strict=True))
    if not all(isinstance(atom, compat.Literal) or atom in made or atom in specs for atom in closed.jaxpr.outvars):
        return None

    def local(*inputs: Any) -> list[Any]:
        return interpret(closed, inputs, lambda _, operands: compat.jaxpr_as_fun(body)(*operands), nullcontext)

    avals = [compat.as_struct(types.get(var, var.aval)) for var in closed.jaxpr.invars]
    traced = jax.make_jaxpr(local, axis_env=list(mesh.shape.items()))(*avals)
    whole = PartitionSpec()
    inputs = tuple(specs.get(var, whole) for var in closed.jaxpr.invars)
    split = {**specs, **made}
    outputs = tuple(split.get(atom, whole) if compat.is_var(atom) else whole for atom in closed.jaxpr.outvars)
    return Spmd(mesh, inputs, outputs, topology), traced
