"""step + arguments -> Program: one flat jaxpr, calls inlined, dead equations gone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.core import Tracer

from memplan.errors import MemplanError, UnsupportedProgramError
from memplan.hardware.topology import Topology
from memplan.planning.loop import Loop, Residuals
from memplan.program import compat
from memplan.program.jit_arguments import dynamic_part
from memplan.program.sharding import XLA_DECOMPOSES, Spmd, inside


@dataclass(frozen=True)
class Program:
    """A step, flattened.

    Attributes:
      step: the user's function.
      options: the `jax.jit` options it was given.
      donated: one flag per input.
      traced: jax's own trace of the step, for the unmodified program.
      by_leaves: jax cannot lower it with its own containers (jmp's loss scales, for one); its leaves it can.
      out_tree: structure of the outputs.
      spmd: its mesh, where the step is one `shard_map`; `jaxpr` is then what one device runs.
      written: the step as it was traced; of one with a mesh, what one device runs.
      loops: its pairs of loops and what they stack (`program.loops`), None where as the user wrote them; empty where
        all are.
      rewritten: the flat jaxpr with these loops, and with state on the host.
      on_host, returned_to_host: positions of inputs and outputs in host memory (`program.host_state`).
    """

    step: Callable[..., Any]
    options: Mapping[str, Any]
    donated: tuple[bool, ...]
    traced: Any
    by_leaves: bool
    out_tree: Any
    spmd: Spmd | None
    written: compat.ClosedJaxpr
    loops: tuple[tuple[Loop, Residuals | None], ...] = ()
    rewritten: compat.ClosedJaxpr | None = None
    on_host: frozenset[int] = frozenset()
    returned_to_host: frozenset[int] = frozenset()

    @functools.cached_property
    def jaxpr(self) -> compat.ClosedJaxpr:
        """The flat closed jaxpr; its inputs are the leaves of the dynamic arguments, in order. Made when first needed.

        Raises:
          UnsupportedProgramError: see `flatten`.
        """
        return flatten(self.written) if self.rewritten is None else self.rewritten

    @property
    def topology(self) -> Topology | None:
        """The links between its devices, where the step tells them."""
        return self.spmd.topology if self.spmd else None

    @property
    def residuals(self) -> tuple[Residuals | None, ...]:
        """What the loops stack, as a plan says it."""
        return tuple(chosen for _, chosen in self.loops)

    @property
    def as_written(self) -> Program:
        """The same step with the loops that the user wrote, and all of its state on the device."""
        if self.rewritten is None:
            return self
        return replace(self, loops=(), rewritten=None, on_host=frozenset(), returned_to_host=frozenset())

    @property
    def name(self) -> str:
        return getattr(self.step, "__name__", "step")


def trace(
    step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> Program:
    """Trace `step` as `jax.jit(step, **options)` would and flatten what comes out.

    Args:
      args, kwargs: arrays or `jax.ShapeDtypeStruct`s; static ones as they are.
      options: keyword arguments of `jax.jit`.
    """
    traced = jax.jit(step, **options).trace(*args, **kwargs)
    if getattr(step, "decomposes", False) and (options.get("compiler_options") or {}).get(XLA_DECOMPOSES):
        raise MemplanError(
            f"the step's all-reduces are decomposed already, and XLA would do it again ({XLA_DECOMPOSES}). Leave out "
            "that option, or make the step with data_parallel(..., decompose=False)."
        )
    spmd, written = inside(traced.jaxpr, getattr(step, "topology", None)) or (None, traced.jaxpr)
    return Program(
        step=step,
        options=dict(options),
        donated=compat.donated_inputs(traced),
        by_leaves=not compat.describes(traced),
        traced=traced,
        out_tree=traced.out_tree,
        spmd=spmd,
        written=written,
    )


def flatten(closed: compat.ClosedJaxpr) -> compat.ClosedJaxpr:
    """Inline every call and drop what nothing depends on.

    A differentiated `jax.checkpoint` becomes a barrier over its inputs and its equations: what jax lowers it to.

    Raises:
      UnsupportedProgramError: a mutable array comes in from outside; what is done to it could not be done again.
    """
    for var, name in zip(closed.jaxpr.invars, compat.input_names(closed), strict=True):
        if compat.is_reference(var):
            raise _outside_reference(f"the argument {name}")
    if any(compat.is_reference(var) for var, _ in compat.consts_of(closed)):
        raise _outside_reference("a constant of the step")
    types = [var.aval if compat.is_on_host(var) else compat.as_struct(var.aval) for var in closed.jaxpr.invars]
    flat = jax.make_jaxpr(functools.partial(_inline, closed))(*types)
    return compat.drop_dead(compat.without_references(flat))


def _outside_reference(what: str) -> UnsupportedProgramError:
    return UnsupportedProgramError(
        f"{what} is a mutable array (jax.Ref): operations on it can be neither moved nor repeated. Pass its value and "
        "return the new one, or make the reference inside the step with jax.new_ref."
    )


def flat_step(program: Program, jaxpr: compat.ClosedJaxpr, mesh: Any = None) -> Callable[..., Any]:
    """A function of the step's flat inputs that evaluates `jaxpr`, over the step's mesh or a like one if it has one."""
    if program.spmd is None:
        return compat.jaxpr_as_fun(jaxpr)
    spmd = program.spmd if mesh is None else program.spmd.on(mesh)
    return spmd.over_mesh(functools.partial(compat.evaluate, jaxpr))


def as_step(program: Program, jaxpr: compat.ClosedJaxpr, mesh: Any = None) -> Callable[..., Any]:
    """A function with the step's own signature that evaluates `jaxpr`; to be jitted with the step's own options."""
    evaluate = flat_step(program, jaxpr, mesh)

    @functools.wraps(program.step)
    def planned(*args: Any, **kwargs: Any) -> Any:
        leaves = jax.tree_util.tree_leaves((args, kwargs))
        dynamic = [leaf for leaf in leaves if isinstance(leaf, Tracer)]  # static arguments are not traced
        return jax.tree_util.tree_unflatten(program.out_tree, evaluate(*dynamic))

    return planned


def leaves_of(program: Program, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Of the dynamic arguments."""
    return jax.tree_util.tree_leaves(dynamic_part(program.step, args, kwargs, program.options))


def by_leaves(program: Program) -> dict[str, Any]:
    """The options of `jax.jit` for a function of the leaves.

    Raises:
      UnsupportedProgramError: shardings are among them.
    """
    kept = {name: program.options[name] for name in ("keep_unused", "compiler_options") if name in program.options}
    if {"in_shardings", "out_shardings"} & set(program.options):
        raise UnsupportedProgramError(
            f"the arguments of {program.name} are in containers that jax cannot lower, and shardings are given for "
            "them. Leave out in_shardings and out_shardings, or pass what is in the containers."
        )
    return {**kept, "donate_argnums": tuple(number for number, given in enumerate(program.donated) if given)}


def _inline(closed: compat.ClosedJaxpr, *operands: Any, caller: compat.JaxprEqn | None = None) -> list[Any]:
    env: dict[compat.Var, Any] = dict(compat.consts_of(closed))
    env.update(zip(closed.jaxpr.invars, operands, strict=True))

    for eqn in closed.jaxpr.eqns:
        values = [compat.read(env, atom) for atom in eqn.invars]
        body = compat.call_body(eqn)
        with compat.as_written(eqn, caller=caller):
            if body is None:
                results = compat.bind(eqn, values)
            else:
                if compat.needs_barrier(eqn) and values:
                    values = jax.lax.optimization_barrier(values)
                results = _inline(body, *values, caller=eqn if compat.source_of(eqn) else caller)
        env.update(zip(eqn.outvars, results, strict=True))
    return [compat.read(env, atom) for atom in closed.jaxpr.outvars]
