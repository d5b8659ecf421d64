"""step + arguments -> Program: the traced step, its mesh, and the transforms applied to it."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from memplan.errors import MemplanError
from memplan.hardware.topology import Topology
from memplan.planning.loops import Loop, Residuals
from memplan.planning.slabs.slabs import SlabGraph, SlabLoop, Slabs
from memplan.program import compat
from memplan.program.flat import Flat, flatten
from memplan.program.sharding import XLA_DECOMPOSES, Spmd, unwrap_shard_map

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
      options: the `jax.jit` options it was given.
      stage: what `jax.jit(step, **options).trace(...)` returned.
    """

    step: Callable[..., Any]
    options: Mapping[str, Any]
    stage: jax.stages.Traced

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
    """A transform: equations in loops over slabs (`slabs.write`)."""

    slabs: Slabs  # the decision
    graph: SlabGraph  # of the program before it, rewritten for the axis
    begins: int  # value of that graph at which the axis begins
    loops: tuple[SlabLoop, ...]  # the resulting loops, by that graph; the name stack of the n-th begins with `scope(n)`
    # ops of that graph that read arrays of the axis and cannot be split along it
    blocked: frozenset[int] = frozenset()

    @staticmethod
    def scope(number: int) -> str:
        """The name scope of a loop, counted from 1."""
        return f"slabs_{number}"


Transform = LoopResiduals | StateOnHost | InSlabs


@dataclass(frozen=True)
class Program:
    """A step and its transforms."""

    traced: Traced  # the unmodified step
    spmd: Spmd | None  # its mesh, if the step is one `shard_map`
    # the jaxpr that jax traced, with calls; for a step with a mesh, the program of one device
    per_device: compat.ClosedJaxpr
    transforms: tuple[Transform, ...] = ()  # in order of application
    rewritten: compat.ClosedJaxpr | None = None  # the flat jaxpr after them; None while it is the step's own

    @functools.cached_property
    def flat(self) -> Flat:
        """The flat jaxpr, made when first needed; its inputs are the leaves of the dynamic arguments, in order.

        Raises:
          UnsupportedProgramError: see `flatten`.
        """
        return Flat(flatten(self.per_device) if self.rewritten is None else self.rewritten)

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
        return hashlib.sha256(comparable(f"{self.per_device} {self.donated}").encode()).hexdigest()

    @property
    def step(self) -> Callable[..., Any]:
        return self.traced.step

    @property
    def options(self) -> Mapping[str, Any]:
        return self.traced.options

    @property
    def donated(self) -> tuple[bool, ...]:
        return self.traced.donated

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
    def topology(self) -> Topology | None:
        """The links between its devices, if the step has them."""
        return self.spmd.topology if self.spmd else None

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
    def on_host(self) -> frozenset[int]:
        """Positions of inputs in host memory."""
        return frozenset[int]().union(*(one.inputs for one in self.transforms if isinstance(one, StateOnHost)))

    @property
    def returned_to_host(self) -> frozenset[int]:
        """Positions of outputs in host memory."""
        return frozenset[int]().union(*(one.outputs for one in self.transforms if isinstance(one, StateOnHost)))


def trace(
    step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> Program:
    """Trace `step` as `jax.jit(step, **options)` would.

    Args:
      args, kwargs: arrays or `jax.ShapeDtypeStruct`s; static ones as they are.
      options: keyword arguments of `jax.jit`.
    """
    stage = jax.jit(step, **options).trace(*args, **kwargs)
    if getattr(step, "decomposes", False) and (options.get("compiler_options") or {}).get(XLA_DECOMPOSES):
        raise MemplanError(
            f"the step already decomposes its all-reduces, and XLA would decompose them again ({XLA_DECOMPOSES}). Omit "
            "that option, or make the step with data_parallel(..., decompose=False)."
        )
    traced = Traced(step, dict(options), stage)
    spmd, per_device = unwrap_shard_map(stage.jaxpr, getattr(step, "topology", None)) or (None, stage.jaxpr)
    return Program(traced, spmd, per_device)
