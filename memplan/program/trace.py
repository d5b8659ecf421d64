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
from memplan.program import compat
from memplan.program.flat import Flat, flatten
from memplan.program.pins import marked

_PRIVATE = re.compile(r"0x[0-9a-f]+|id=\d+|/[^\s:]+(?=:\d+)")  # addresses and paths differ between processes
_UNORDERED = re.compile(r"\{('[^{}]*')\}")  # and so does the order of names in a set


def comparable(text: str) -> str:
    """jax's print of a program, without the parts that differ between processes."""
    ordered = _UNORDERED.sub(lambda found: "{" + ", ".join(sorted(found[1].split(", "))) + "}", text)
    return _PRIVATE.sub("_", ordered)


@dataclass(frozen=True)
class Traced:
    """A step as jax traced it.

    Attributes:
      step: the user's function.
      args, kwargs: what it was traced with.
      options: the `jax.jit` options it was given.
      stage: what `jax.jit(step, **options).trace(...)` returned.
      division: over its devices; None if it runs on one.
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
        """One flag per input."""
        return compat.donated_inputs(self.stage)

    @functools.cached_property
    def lowers_by_leaves(self) -> bool:
        """False if jax can lower the step with its own containers; jmp's loss scales, for one, only by their leaves."""
        return not compat.has_args_info(self.stage)


@dataclass(frozen=True)
class LoopResiduals:
    """A transform: pairs of loops with other residuals."""

    # the step's pairs of loops (`loops.residuals`) and their residuals; None as the user wrote them
    loops: tuple[tuple[Loop, Residuals | None], ...]


@dataclass(frozen=True)
class StateOnHost:
    """A transform: state in host memory (`state.host_state`)."""

    # inputs, outputs: their positions
    inputs: frozenset[int]
    outputs: frozenset[int]


@dataclass(frozen=True)
class InSlabs:
    """A transform: equations of one computation in loops over slabs (`slabs.write`)."""

    slabs: Slabs  # the decision
    graph: SlabGraph  # of the computation before it, rewritten for the axis
    begins: int  # value of that graph at which the axis begins
    loops: tuple[LoopOverSlabs, ...]  # the resulting loops, by that graph
    # ops of that graph that read arrays of the axis and cannot be split along it
    blocked: frozenset[int] = frozenset()
    first: int = 1  # number of its first loop, of all loops of the program; a loop's name stack ends in `scope(number)`
    where: str = ""  # the equation that the computation belongs to, with its `file:line`; "" for the program's own

    @staticmethod
    def scope(number: int) -> str:
        """The name scope of a loop."""
        return f"slabs_{number}"


@dataclass(frozen=True)
class IndexedStacks:
    """A transform: loops read their stacks by index, in order (`loops.stacks`)."""


Transform = LoopResiduals | StateOnHost | InSlabs | IndexedStacks


@dataclass(frozen=True)
class Program:
    """A step and its transforms."""

    traced: Traced  # the unmodified step
    machine: Machine | None = None  # that its partitions run on, if it is divided over several devices
    transforms: tuple[Transform, ...] = ()  # in order of application
    rewritten: compat.ClosedJaxpr | None = None  # the flat jaxpr after them; None while it is the step's own
    pins: tuple[Pin, ...] = ()  # in the order of their marks (`pins`)

    @functools.cached_property
    def flat(self) -> Flat:
        """The flat jaxpr, made when first needed; its inputs are the leaves of the dynamic arguments, in order.

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

    def transform(self, record: Transform, rewritten: compat.ClosedJaxpr | None) -> Program:
        """The program after one more transform."""
        return replace(self, transforms=(*self.transforms, record), rewritten=rewritten)

    @property
    def original(self) -> Program:
        """The same step before all transforms."""
        return replace(self, transforms=(), rewritten=None) if self.transforms else self

    @functools.cached_property
    def digest(self) -> str:
        """Digest of the step's equations and donations: the same in every process, for all of XLA's choices."""
        division = self.traced.division
        inputs = [getattr(one, "spec", one) for one in division.inputs] if division else ()
        text = f"{self.traced.jaxpr} {self.donated} {inputs}" if inputs else f"{self.traced.jaxpr} {self.donated}"
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
        """For each input of a jaxpr of the step: does jax keep it? Unread inputs go, unless `keep_unused` is set."""
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
        return tuple(loop for one in self.transforms if isinstance(one, LoopResiduals) for loop in one.loops)

    @property
    def residuals(self) -> tuple[Residuals | None, ...]:
        """The residuals of its loops, as a plan stores them."""
        return tuple(chosen for _, chosen in self.loops)

    @property
    def in_slabs(self) -> tuple[InSlabs, ...]:
        """Its loops over slabs; empty where it has none."""
        return tuple(one for one in self.transforms if isinstance(one, InSlabs))

    @property
    def has_indexed_stacks(self) -> bool:
        return any(isinstance(one, IndexedStacks) for one in self.transforms)

    @property
    def on_host(self) -> frozenset[int]:
        """Positions of inputs in host memory."""
        return frozenset[int]().union(*(one.inputs for one in self.transforms if isinstance(one, StateOnHost)))

    @property
    def returned_to_host(self) -> frozenset[int]:
        """Positions of outputs in host memory."""
        return frozenset[int]().union(*(one.outputs for one in self.transforms if isinstance(one, StateOnHost)))


def trace(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    platform: str | None = None,
) -> Program:
    """Trace `step` as `jax.jit(step, **options)` would.

    Args:
      args, kwargs: arrays or `jax.ShapeDtypeStruct`s; static ones as they are.
      options: keyword arguments of `jax.jit`.
      platform: "cuda" for a GPU that is absent; None is that of the step's devices.

    Raises:
      MeshError: shardings name an abstract mesh alone, which has no devices to run on; or constraints alone do.
    """
    stage = jax.jit(step, **options).trace(*args, **kwargs)
    leaves = jax.tree_util.tree_leaves((args, kwargs))
    division = None
    if compat.names_devices(stage, leaves):
        count = len(compat.donated_inputs(stage))
        division = compat.division_of(lower(stage, platform), count)
        if division.count < (wanted := compat.constrained_partitions(stage.jaxpr)):
            raise MeshError(
                f"a sharding constraint or shard_map divides over an AbstractMesh of {wanted} devices, but no argument "
                f"lies on it: jax would run the step on {division.count}. Give in_shardings, or arguments on the mesh."
            )
    division = division if division and division.count > 1 else None
    return Program(Traced(step, args, kwargs, dict(options), stage, division))


def lower(stage: jax.stages.Traced, platform: str | None) -> jax.stages.Lowered:
    """What jax lowers for a platform; None is that of the step's devices.

    Raises:
      MeshError: there are no devices.
    """
    if platform is not None:
        return compat.lower_for(stage, platform)
    try:
        return stage.lower()
    except ValueError as error:
        if "only AbstractMesh exists" not in str(error):
            raise
        raise MeshError(
            "the step's shardings name an AbstractMesh, which has no devices. Pass device= to plan for described GPUs "
            "in its place, or use a Mesh of this machine's devices (memplan.parallel.mesh)."
        ) from None
