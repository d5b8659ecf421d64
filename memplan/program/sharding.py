"""A step that is one `shard_map` over a mesh: what one device runs of it is planned, and put back over a mesh.

`memplan.parallel` makes such steps. All arrays of what one device runs have its own part's shape; collectives among the
equations are operations like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from memplan.hardware.topology import Topology
from memplan.program import compat

XLA_DECOMPOSES = "xla_gpu_all_reduce_blueconnect_num_devices_per_host"


@dataclass(frozen=True)
class Spmd:
    """How the inputs and outputs of a step lie over a mesh.

    Attributes:
      mesh: a `Mesh`, or an `AbstractMesh` where the devices are not here.
      inputs, outputs: one partition spec each.
      topology: the links between its devices, where the step tells them.
    """

    mesh: Any
    inputs: tuple[PartitionSpec, ...]
    outputs: tuple[PartitionSpec, ...]
    topology: Topology | None = None

    @property
    def axes(self) -> dict[str, int]:
        """Size by name, outermost first."""
        return dict(self.mesh.shape)

    @property
    def stacked(self) -> PartitionSpec:
        """Every device's own value, one after the other along the first dimension."""
        return PartitionSpec(tuple(self.axes))

    def on(self, mesh: Any) -> Spmd:
        return replace(self, mesh=mesh)

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def whole(self, aval: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        """The type of the array whose part on one device has this type."""
        shape = list(aval.shape) if aval.shape or not spec else [1]
        for dim, names in enumerate(spec):
            for name in (names,) if isinstance(names, str) else names or ():
                shape[dim] *= self.axes[name]
        return jax.ShapeDtypeStruct(tuple(shape), aval.dtype, weak_type=getattr(aval, "weak_type", False))

    def over_mesh(self, local: Callable[..., Any]) -> Callable[..., list[Any]]:
        """What all devices compute, of whole arrays, from what one computes (flat inputs, flat outputs)."""
        return over_mesh(local, self.mesh, self.inputs, self.outputs)


def over_mesh(
    local: Callable[..., Any], mesh: Any, inputs: Sequence[PartitionSpec], outputs: Sequence[PartitionSpec]
) -> Callable[..., list[Any]]:
    return jax.shard_map(
        lambda *operands: list(local(*operands)),
        mesh=mesh,
        in_specs=tuple(inputs),
        out_specs=list(outputs),
        check_vma=False,
    )


def inside(closed: compat.ClosedJaxpr, topology: Topology | None = None) -> tuple[Spmd, compat.ClosedJaxpr] | None:
    """The mesh of a step that is one `shard_map` over all axes, and what one device runs; None for any other step."""
    eqns = closed.jaxpr.eqns
    if len(eqns) != 1 or eqns[0].primitive.name != "shard_map":
        return None
    (eqn,) = eqns
    mesh, params = eqn.params["mesh"], eqn.params
    if set(params["newly_manual_axes"]) != set(mesh.axis_names) or params["check_vma"]:
        return None
    known = dict(compat.consts_of(closed))
    specs = dict(zip(eqn.invars, params["in_specs"], strict=True))
    made = dict(zip(eqn.outvars, params["out_specs"], strict=True))
    body = compat.body_of(eqn)
    types = dict(zip(eqn.invars, (var.aval for var in body.jaxpr.invars), strict=True))
    if not all(isinstance(atom, compat.Literal) or atom in made or atom in specs for atom in closed.jaxpr.outvars):
        return None

    def local(*inputs: Any) -> list[Any]:
        env = {**known, **dict(zip(closed.jaxpr.invars, inputs, strict=True))}
        env.update(zip(eqn.outvars, compat.jaxpr_as_fun(body)(*[compat.read(env, a) for a in eqn.invars]), strict=True))
        return [compat.read(env, atom) for atom in closed.jaxpr.outvars]

    avals = [compat.as_struct(types.get(var, var.aval)) for var in closed.jaxpr.invars]
    traced = jax.make_jaxpr(local, axis_env=list(mesh.shape.items()))(*avals)
    whole = PartitionSpec()
    inputs = tuple(specs.get(var, whole) for var in closed.jaxpr.invars)
    split = {**specs, **made}
    outputs = tuple(split.get(atom, whole) if compat.is_var(atom) else whole for atom in closed.jaxpr.outvars)
    return Spmd(mesh, inputs, outputs, topology), traced
