"""The one place that knows the order: trace, transform, compile with a plan in the middle, account."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from memplan.errors import InfeasibleBudgetError
from memplan.hardware import catalog, measured
from memplan.inside.callback import Agree, Inside, Limits, Made
from memplan.inside.reading import Reading
from memplan.parallel.agreement import one_plan, processes_of
from memplan.planning.floor import floor
from memplan.planning.plan import Plan, named
from memplan.planning.registry import Planner, planner_named
from memplan.planning.schedule import runs
from memplan.program.trace import Program, as_step, by_leaves, flat_step, leaves_of, trace
from memplan.program.transforms.fewer_residuals import fewer_residuals
from memplan.program.transforms.host_state import large_leaves, with_state_on_host
from memplan.program.transforms.residuals import with_loops
from memplan.units import Size, parse_bytes, show_bytes
from memplan.verify.collectives import differing
from memplan.verify.numbers import check_types
from memplan.xla.hook import Rewrite
from memplan.xla.local import host_memory_bytes, is_here, local_device
from memplan.xla.replay import Traffic, traffic
from memplan.xla.sources import sources
from memplan.xla.target import HIDES_LATENCY, Executable, Target

Notify = Callable[[str, float | None], None]

_MOST_TRIES = 3  # a prediction that misses is corrected by what it missed by


@dataclass(frozen=True)
class Request:
    """What the user asked for; see `memplan.jit`."""

    budget: Size = None
    host_budget: Size = None
    device: str | None = None
    planner: str | Planner | None = None
    plan: Plan | None = None
    verify: str | None = "compile"
    host_state: tuple[int, ...] = ()

    def local(self, device_bytes: int) -> Request:
        """The same of the local backend, within so many bytes; a plan belongs to the device that it was made for."""
        return replace(self, device=None, budget=device_bytes, plan=None)


@dataclass(frozen=True)
class Outcome:
    """A program compiled under limits.

    Attributes:
      program: that was compiled, transformed or not.
      made: what happened inside the compilation.
      args, kwargs: shapes.
      unmodified: the step as it came; None where only its transformed program was compiled.
      compilations: how many it took.
      seconds: from the step as it came until this was there.
    """

    program: Program
    target: Target
    limits: Limits
    executable: Executable
    made: Made
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    unmodified: Reading | None
    compilations: int
    seconds: float = 0.0

    @property
    def device_bytes(self) -> int:
        return self.executable.memory.device_bytes

    @property
    def host_bytes(self) -> int:
        return self.executable.memory.host_bytes

    @property
    def step_s(self) -> float:
        """Seconds of a step, by the replay."""
        return self.made.result.traffic.step_s

    @functools.cached_property
    def plan(self) -> Plan | None:
        """What reproduces it; None for the step as it is."""
        made, program = self.made.plan, self.program
        if made is None and not program.on_host and not any(program.residuals):
            return None
        if made is None:
            plain = self.made.plain
            actions = named(plain.problem, runs(range(len(plain.problem.kernels))))
            name = "residuals" if any(program.residuals) else "none"
            made = Plan(actions, plain.module.fingerprint, name, self.target.device.name)
        return replace(made, loops=program.residuals, on_host=tuple(sorted(program.on_host)))

    @property
    def fits(self) -> bool:
        return self.limits.allow(self.device_bytes, self.host_bytes)


def run(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    request: Request,
    notify: Notify,
) -> Outcome:
    """Plan a step, and compile it so.

    Raises:
      BudgetError, UnknownDeviceError: the request makes no sense.
      InfeasibleBudgetError: nothing that the compiler measured fits.
      PlanMismatchError: `request.plan` is for another program.
    """
    found = best(step, args, kwargs, options, request, notify)
    if not found.fits:
        raise infeasible(found)
    return found


def best(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    request: Request,
    notify: Notify = lambda stage, share: None,
) -> Outcome:
    """What fits, or else what takes the least; raises like `run`, but for what does not fit."""
    started = time.perf_counter()
    target = target_of(request.device)
    limits = limits_of(request, target)
    notify("tracing", None)
    program = trace(step, args, kwargs, options)
    if request.plan is not None:
        written = with_loops(program, request.plan.loops) if request.plan.loops else program
        program = _with_state(written, request.plan.on_host, target)
    elif request.host_state:
        program = _with_state(program, large_leaves(program, request.host_state), target)
    agree = _agreeing(program, args, kwargs, target)
    chosen, tries = planner_named(request.planner), _MOST_TRIES if request.verify else 1
    compiling = Compiling(target, limits, args, kwargs, chosen, request.plan, agree, notify, tries)
    found = compiling.stacking_less(compiling.compiled(program))
    return replace(found, seconds=time.perf_counter() - started)


def _with_state(program: Program, inputs: Collection[int], target: Target) -> Program:
    """With these inputs in host memory: on a CPU, where both memories are one, the step stays as it is."""
    moved = with_state_on_host(program, inputs)
    if target.is_gpu:
        return moved
    return replace(program, on_host=moved.on_host, returned_to_host=moved.returned_to_host)


def _agreeing(program: Program, args: Sequence[Any], kwargs: Mapping[str, Any], target: Target) -> Agree:
    """One plan for all processes that run a step together; for devices that are not here each makes its own."""
    options = (program.options.get("in_shardings"), program.options.get("out_shardings"))
    mesh = [program.spmd.sharding(spec) for spec in program.spmd.inputs[:1]] if program.spmd else []
    processes = processes_of((args, kwargs, options, mesh)) if not target.described else ()
    return functools.partial(one_plan, processes, program.step)


def _better(earlier: Outcome, later: Outcome) -> Outcome:
    """The one that fits, or takes less, after the compilations of both."""
    found = min(earlier, later, key=lambda one: (not one.fits, one.device_bytes))
    compilations = earlier.compilations + later.compilations
    return replace(found, unmodified=earlier.unmodified, compilations=compilations)


@dataclass(frozen=True)
class Compiling:
    """Programs for a target, under limits.

    Attributes:
      tries: compilations with a plan in the middle, at most.
    """

    target: Target
    limits: Limits
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    planner: Planner
    follow: Plan | None
    agree: Agree
    notify: Notify
    tries: int

    def stacking_less(self, found: Outcome) -> Outcome:
        """Where a program does not fit, it with loops that stack less, unless a plan says what they stack."""
        program, excess_bytes = found.program, found.device_bytes - self.limits.device_bytes
        if found.fits or self.follow is not None:
            return found
        for other in fewer_residuals(program, self.target.device, self.limits.host_bytes, excess_bytes):
            self.notify("compiling with fewer residuals in its loops", None)
            found = _better(found, self.compiled(_with_state(other, program.on_host, self.target)))
            if found.fits:
                break
        return found

    def compiled(self, program: Program) -> Outcome:
        """The program as it copies fastest; where it does not fit so, as it holds least.

        Raises:
          WrongProgramError: it is transformed, and has not the step's types.
        """
        if program.rewritten is not None:
            check_types(program.written, program.rewritten)
        profile = self._profile(program)
        found = self._scheduled(program, profile, _moves(program))
        if not found.fits and _moves(program) and self.target.is_gpu:
            self.notify("compiling again, its copies one after another", None)
            found = _better(found, self._scheduled(program, profile, hides_latency=False))
        return found if profile is None else replace(found, compilations=found.compilations + 1)

    def _scheduled(self, program: Program, profile: Mapping[str, float] | None, hides_latency: bool) -> Outcome:
        """With a plan in the middle where it does not fit as it is; again where the prediction missed.

        Args:
          profile: see `_profile`.
          hides_latency: XLA's scheduler begins what is copied long before it is read, and so holds more.
        """
        inside = Inside(self.target.device, self.limits, program.topology, self.planner, self.follow, self.agree)
        compilations = 1
        self.notify("compiling", None)
        executable = self._compile(program, inside, hides_latency, profile)
        while self._missed(executable, inside) and compilations < self.tries:
            self.notify("compiling again, within what the first plan missed by", None)
            memory, limits = executable.memory, self.limits
            inside.reserve_bytes += max(0, memory.device_bytes - limits.device_bytes)
            inside.reserve_host_bytes += max(0, memory.host_bytes - limits.host_bytes)
            executable = self._compile(program, inside, hides_latency, profile)
            compilations += 1
        assert inside.made is not None
        return Outcome(
            program,
            self.target,
            self.limits,
            executable,
            inside.made,
            *shapes_of(self.args, self.kwargs),
            unmodified=inside.made.plain if program.rewritten is None else None,
            compilations=compilations,
        )

    def _missed(self, executable: Executable, inside: Inside) -> bool:
        """It should fit, and does not."""
        fits = self.limits.allow(executable.memory.device_bytes, executable.memory.host_bytes)
        return not fits and inside.made is not None and inside.made.fits and self.follow is None

    def _compile(
        self, program: Program, rewrite: Rewrite, hides_latency: bool, profile: Mapping[str, float] | None
    ) -> Executable:
        mesh = self.target.mesh_for(program.spmd)
        as_it_is = program.rewritten is None and mesh is None
        step = program.step if as_it_is else as_step(program, program.jaxpr, mesh)
        args, kwargs, options = self.args, self.kwargs, program.options
        if program.by_leaves:
            step = flat_step(program, program.traced.jaxpr if as_it_is else program.jaxpr, mesh)
            args, kwargs, options = leaves_of(program, args, kwargs), {}, by_leaves(program)
        return self.target.compile(
            step,
            args,
            kwargs,
            options,
            HIDES_LATENCY if hides_latency and self.target.is_gpu else None,
            on_host=program.on_host if self.target.is_gpu else (),
            spmd=program.spmd,
            profile=profile,
            rewrite=rewrite,
        )

    def _profile(self, program: Program) -> Mapping[str, float] | None:
        """What every instruction of a step with collectives takes, by a compilation for it alone; None without one.

        XLA's scheduler guesses from the size of a message what a collective takes, and lets it wait. A profile goes by
        the names that instructions have from fusion on, and XLA calls nobody back between fusion and scheduling.
        """
        if program.topology is None or not self.target.is_gpu:
            return None
        self.notify("compiling for the seconds of its collectives", None)
        found: list[Traffic] = []

        def read(text: str) -> None:
            found.append(traffic(text, self.target.device, program.topology))

        self._compile(program, read, hides_latency=False, profile=None)
        return found[0].seconds if found[0].collectives else {}


def _moves(program: Program) -> bool:
    """Does it copy between host and device by itself?"""
    return bool(program.on_host) or any(known and known.moved for known in program.residuals)


def infeasible(found: Outcome) -> InfeasibleBudgetError:
    """What to say where not even the least that was found fits."""
    plain, budget = found.made.plain, found.limits.device_bytes
    floor_bytes, operation = floor_of(found)
    smallest = min(found.device_bytes, plain.device_bytes)
    host = "" if found.host_bytes <= found.limits.host_bytes else f", with {show_bytes(found.host_bytes)} on the host"
    advice = "\n  ".join(_advice(found))
    return InfeasibleBudgetError(
        f"no plan fits {show_bytes(budget)} on {found.target.device.name}. The smallest that was found, and compiled, "
        f"takes {show_bytes(smallest)}{host}; arguments, outputs and the largest kernel alone, {operation}, take "
        f"{show_bytes(floor_bytes)}. Try:\n  {advice}",
        floor_bytes=floor_bytes,
        smallest_bytes=smallest,
        operation=operation,
    )


def floor_of(found: Outcome) -> tuple[int, str]:
    """Device bytes that no order goes below, and the kernel that sets them, with its `file:line`."""
    least = found.made.plain.remade(0)
    nbytes, kernel = floor(least.problem)
    name = least.problem.kernels[kernel].name
    where = sources(least.module).get(name, "")
    floor_bytes = min(least.resident_bytes + nbytes, found.device_bytes)  # small tables are counted as XLA:GPU has them
    return floor_bytes, f"{name} ({where})" if where else name


def _advice(found: Outcome) -> Iterator[str]:
    yield f"a budget of {found.device_bytes} bytes"
    resident = found.made.plain.resident_bytes
    if 2 * resident > found.limits.device_bytes:
        if not all(found.program.donated):
            yield "donate_argnums for the state that the step replaces: its new value then takes the old one's place"
        if not found.program.on_host and found.target.is_gpu:
            yield f"host_state: arguments and outputs take {show_bytes(resident)} of it"
    yield "a smaller batch or image: memplan.largest finds the largest that fits"


def unexpected_collectives(found: Outcome) -> tuple[str, ...]:
    """Collectives of what was compiled that are not those of the step, in words."""
    program = found.program
    if program.spmd is None:
        return ()
    return differing(program.jaxpr, program.spmd.axes, found.made.result.traffic.collectives)


def shapes_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """The arguments without their arrays, so that a plan does not keep a whole training state alive."""

    def shape(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            weak_type=getattr(leaf, "weak_type", False),
            sharding=leaf.sharding if leaf.committed else None,
        )

    return jax.tree.map(shape, (tuple(args), dict(kwargs)))


def target_of(device: str | None) -> Target:
    """The local backend for None, else the described GPU with this name, or the device in this specification file."""
    if device is None:
        return Target(local_device(), described=False)
    if not measured.is_path(device):
        return Target(catalog.named(device), described=True)
    found = measured.load(device)
    here = is_here(found.device, found.conditions.platform, found.conditions.device_kind)
    return Target(found.device, described=not here)


def limits_of(request: Request, target: Target) -> Limits:
    """What is asked for, in bytes; of the host by default what this machine has, or twice a described GPU's own memory.

    Raises BudgetError where it makes no sense.
    """
    device_bytes = parse_bytes(request.budget, target.device.memory_bytes)
    if not target.is_gpu:
        return Limits(device_bytes, 0)  # host memory and device memory are the same
    whole = 2 * target.device.memory_bytes if target.described else host_memory_bytes() * 8 // 10
    return Limits(device_bytes, parse_bytes(request.host_budget, whole, "host budget"))
