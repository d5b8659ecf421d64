"""step + arguments -> Program: the traced step, its mesh, and the transforms applied to it."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from memplan.errors import MeshError
from memplan.hardware.machine import Machine
from memplan.planning.loops import Loop, Residuals
from memplan.planning.problem import Pin
from memplan.planning.slabs.slabs import LoopOverSlabs, SlabGraph, Slabs
from memplan.planning.transforms import (
    LessWorkspace,
    LoopResiduals,
    StateOnHost,
    Transform,
    inputs_on_host,
)
from memplan.program import compat
from memplan.program.flat import Flat, flatten
from memplan.program.pins import marked

# Addresses, ids and paths, which differ between processes.
_PRIVATE = re.compile(r"0x[0-9a-f]+|id=\d+|/[^\s:]+(?=:\d+)")
# A set of names, whose order differs between processes.
_UNORDERED = re.compile(r"\{('[^{}]*')\}")


def comparable(text: str) -> str:
    """jax's print of a program, without the parts that differ between processes."""

    def sort_names(match: re.Match[str]) -> str:
        return "{" + ", ".join(sorted(match[1].split(", "))) + "}"

    ordered = _UNORDERED.sub(sort_names, text)
    return _PRIVATE.sub("_", ordered)


@dataclass(frozen=True)
class TracedStep:
    """A step as jax traced it.

    Attributes:
      step: the user's function.
      args, kwargs: the arguments of the trace.
      options: keyword arguments of `jax.jit`.
      stage: the result of `jax.jit(step, **options).trace(...)`.
      division: how jax divides the step over devices; None if it runs on one device.
    """

    step: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    options: Mapping[str, Any]
    stage: jax.stages.Traced
    division: compat.Division | None = None

    @property
    def jaxpr(self) -> compat.ClosedJaxpr:
        return self.stage.jaxpr

    @property
    def out_tree(self) -> Any:
        """Structure of the outputs."""
        return self.stage.out_tree

    @property
    def arguments(self) -> Sequence[Any]:
        """Structures of the positional arguments, without the static ones."""
        return compat.argument_structures(self.stage)

    @functools.cached_property
    def donated(self) -> tuple[bool, ...]:
        """Is each input donated?"""
        return compat.donated_inputs(self.stage)

    @functools.cached_property
    def lowers_by_leaves(self) -> bool:
        """True if jax can lower only the leaves of the user's containers (jmp's loss scales)."""
        return not compat.has_args_info(self.stage)


@dataclass(frozen=True)
class Applied:
    """A transform that a program went through, and what reports say about it."""

    transform: Transform


@dataclass(frozen=True)
class WithResiduals(Applied):
    """Pairs of loops with other residuals (`loops.residuals`)."""

    transform: LoopResiduals
    loops: tuple[Loop, ...]  # the pairs, before this transform


@dataclass(frozen=True)
class WithStateOnHost(Applied):
    """State in host memory (`state.host_state`)."""

    transform: StateOnHost
    outputs: frozenset[int]  # positions of outputs in host memory


@dataclass(frozen=True)
class InSlabs(Applied):
    """Equations of one computation in loops over slabs (`slabs.write`)."""

    transform: Slabs
    graph: SlabGraph  # the computation before this transform, rewritten for the axis
    begins: int  # value of `graph` at which the axis begins
    loops: tuple[LoopOverSlabs, ...]  # the resulting loops, with values and ops of `graph`
    # ops of `graph` that read arrays of the axis but cannot be split along it
    blocked: frozenset[int] = frozenset()
    # number of its first loop among the program's loops over slabs; a loop's name stack ends in
    # `scope(number)`
    first: int = 1
    # the equation whose computation is in slabs, with its `file:line`; "" for the program itself
    where: str = ""

    @staticmethod
    def scope(number: int) -> str:
        """The name scope of a loop."""
        return f"slabs_{number}"


@dataclass(frozen=True)
class Program:
    """A step and its transforms."""

    traced: TracedStep  # the unmodified step
    machine: Machine | None = None  # runs the partitions, if the step is divided over devices
    applied: tuple[Applied, ...] = ()  # transforms, in order
    rewritten: compat.ClosedJaxpr | None = None  # the flat jaxpr after them; None before the first
    pins: tuple[Pin, ...] = ()  # in the order of their marks (`pins`)

    @functools.cached_property
    def flat(self) -> Flat:
        """The flat jaxpr, whose inputs are the leaves of the dynamic arguments, in order.

        Raises:
          UnsupportedProgramError: see `flatten`.
        """
        return Flat(flatten(self.marked) if self.rewritten is None else self.rewritten)

    @functools.cached_property
    def marked(self) -> compat.ClosedJaxpr:
        """The step's own jaxpr, with marks where pins name values."""
        return marked(self.traced.jaxpr, self.pins) if self.pins else self.traced.jaxpr

    @property
    def jaxpr(self) -> compat.ClosedJaxpr:
        """The flat closed jaxpr; raises like `flat`."""
        return self.flat.closed

    def transformed(self, applied: Applied, rewritten: compat.ClosedJaxpr | None) -> Program:
        """The program after one more transform."""
        return replace(self, applied=(*self.applied, applied), rewritten=rewritten)

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """The transforms that it went through, in order, as a plan stores them."""
        return tuple(applied.transform for applied in self.applied)

    @property
    def original(self) -> Program:
        """The same step before all transforms."""
        return replace(self, applied=(), rewritten=None) if self.applied else self

    @functools.cached_property
    def digest(self) -> str:
        """Digest of the step's equations and donations, equal in all processes."""
        division = self.traced.division
        shardings = division.inputs if division else ()
        inputs = [getattr(sharding, "spec", sharding) for sharding in shardings]
        text = f"{self.traced.jaxpr} {self.donated}"
        if inputs:
            text += f" {inputs}"
        return hashlib.sha256(comparable(text).encode()).hexdigest()

    @property
    def step(self) -> Callable[..., Any]:
        return self.traced.step

    @property
    def options(self) -> Mapping[str, Any]:
        return self.traced.options

    @property
    def donated(self) -> tuple[bool, ...]:
        return self.traced.donated

    @functools.cached_property
    def input_nbytes(self) -> tuple[int, ...]:
        """Bytes of every input on one device."""
        avals = [var.aval for var in self.traced.jaxpr.jaxpr.invars]
        division = self.traced.division
        inputs = division.inputs if division else (None,) * len(avals)
        return tuple(map(compat.part_nbytes, avals, inputs))

    def kept(self, closed: compat.ClosedJaxpr) -> list[bool]:
        """Does jax keep each input of a jaxpr? It drops unread inputs, unless `keep_unused`."""
        jaxpr = closed.jaxpr
        read = {*filter(compat.is_var, (atom for eqn in jaxpr.eqns for atom in eqn.invars))}
        read.update(filter(compat.is_var, jaxpr.outvars))
        return [bool(self.options.get("keep_unused")) or var in read for var in jaxpr.invars]

    @property
    def name(self) -> str:
        return getattr(self.step, "__name__", "step")

    @property
    def loops(self) -> tuple[tuple[Loop, Residuals | None], ...]:
        """Its pairs of loops and their residuals; empty if all are as the user wrote them."""
        with_residuals = self._applied(WithResiduals)
        return tuple(
            pair
            for applied in with_residuals
            for pair in zip(applied.loops, applied.transform.residuals, strict=True)
        )

    @property
    def decides_across(self) -> bool:
        """Do pairs inside its pairs of loops decide for themselves (`loops.residuals.rewrite`)?"""
        return any(applied.transform.across for applied in self._applied(WithResiduals))

    @property
    def in_slabs(self) -> tuple[InSlabs, ...]:
        """Its computations in slabs; empty if it has none."""
        return self._applied(InSlabs)

    @property
    def asks_less_workspace(self) -> bool:
        """Do its convolutions run by algorithms with less workspace?"""
        return LessWorkspace() in self.transforms

    @property
    def on_host(self) -> frozenset[int]:
        """Positions of inputs in host memory."""
        return frozenset(inputs_on_host(self.transforms))

    @property
    def returned_to_host(self) -> frozenset[int]:
        """Positions of outputs in host memory."""
        with_state = self._applied(WithStateOnHost)
        return frozenset(output for applied in with_state for output in applied.outputs)

    def _applied[Kind: Applied](self, kind: type[Kind]) -> tuple[Kind, ...]:
        return tuple(applied for applied in self.applied if isinstance(applied, kind))


def trace(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    absent: compat.AbsentDevice | None = None,
) -> Program:
    """Trace `step` as `jax.jit(step, **options)` would.

    Args:
      args, kwargs: arrays or `jax.ShapeDtypeStruct`s, and static arguments.
      options: keyword arguments of `jax.jit`.
      absent: the device to trace for; None means the step's devices.

    Raises:
      MeshError: only an abstract mesh is named, which has no devices; or only constraints name a
        mesh.
    """
    stage = jax.jit(step, **options).trace(*args, **kwargs)
    leaves = jax.tree_util.tree_leaves((args, kwargs))
    division = None
    if compat.names_devices(stage, leaves):
        count = len(compat.donated_inputs(stage))
        division = compat.division_of(lower(stage, absent), count)
        wanted = compat.constrained_partitions(stage.jaxpr)
        if division.count < wanted:
            raise MeshError(
                f"a sharding constraint or shard_map divides over an AbstractMesh of {wanted} "
                f"devices, but no argument lies on it: jax would run the step on {division.count}. "
                "Give in_shardings, or arguments on the mesh."
            )
    division = division if division and division.count > 1 else None
    return Program(TracedStep(step, args, kwargs, dict(options), stage, division))


def lower(
    stage: jax.stages.Traced, absent: compat.AbsentDevice | None, on_host: bool = False
) -> jax.stages.Lowered:
    """Lower a traced step for an absent device; None means for the step's devices.

    Args:
      on_host: inputs will be marked as in host memory.

    Raises:
      MeshError: the step's mesh is abstract and has no devices.
    """
    if absent is not None:
        return compat.lower_for(stage, absent, on_host)
    try:
        return compat.lower_here(stage, on_host)
    except ValueError as error:
        if "only AbstractMesh exists" not in str(error):
            raise
        raise MeshError(
            "the step's shardings name an AbstractMesh, which has no devices. Pass device= to plan "
            "for described devices in its place, or use a Mesh of this machine's devices "
            "(memplan.parallel.mesh)."
        ) from None
