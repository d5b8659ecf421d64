"""Runs a planned step on the local backend, and compares it with the unmodified step."""

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from memplan.compilation.compiler import compile_unplanned
from memplan.compilation.outcome import Outcome, Restored
from memplan.errors import DeletedArgumentError, MemplanError
from memplan.program import compat
from memplan.program.jit_arguments import dynamic_arguments
from memplan.program.state.host_state import place_leaf, to_device
from memplan.results.infeasible import no_block, out_of_memory
from memplan.verify.numbers import Gate, compare, in_pieces, nudged, roundings
from memplan.xla import local

_LENGTHS = (5, 12)  # equations that the gate compiles together
_PATIENCE_S = 10.0  # how long to wait for memory: kMaxMillisToWait of XLA's bfc_allocator.cc

# Inside a kernel, XLA may keep more bits than a type has; which values lose them depends on where
# kernels end. So the gate of a rewritten program rounds every value to its type.
AS_TYPED = {"xla_allow_excess_precision": False}


class _Calls:
    """Counts of the planned steps on GPUs: the allocator does not distinguish concurrent steps."""

    lock = threading.Lock()
    started = 0
    running = 0


class Runner:
    """Calls the step with its dynamic arguments, from any number of threads.

    Attributes:
      program, executable: the step.
      moves_state: does a call copy state between the memories itself, as on a CPU?
      observed_bytes: highest device bytes of a call, by the allocator; None if unknown.
    """

    def __init__(self, outcome: Outcome | Restored):
        self.program = outcome.program
        self.executable = outcome.executable
        self._call = outcome.executable.compiled
        self._memory = outcome.executable.memory
        self._has_own_memory = outcome.target.backend.has_own_memory
        self.moves_state = bool(outcome.program.on_host) and not self._has_own_memory
        self.observed_bytes: int | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._has_own_memory:
            return self._with_state(args, kwargs) if self.moves_state else self._run(args, kwargs)
        with _Calls.lock:
            _Calls.started += 1
            _Calls.running += 1
            number = _Calls.started
            is_alone = _Calls.running == 1
        try:
            before = local.room()
            results = self._run_beside_others(args, kwargs)
            after = local.room()
        finally:
            with _Calls.lock:
                _Calls.running -= 1
        if before and after and is_alone and number == _Calls.started:
            self._observe(before, after, args, kwargs)
        return results

    def _observe(self, before: local.Room, after: local.Room, args: Any, kwargs: Any) -> None:
        """Record the peak of a call.

        XLA's allocator knows only the highest peak so far. If a call raised it, the call used the
        rise above the bytes in use before, and its arguments, without those that jax copied from
        the host. Otherwise an earlier peak was higher, such as that of XLA's autotuning, and the
        peak of this call is unknown.
        """
        copied = self._copied_nbytes(args, kwargs)
        if after.peak_bytes > before.peak_bytes and copied is not None:
            peak_bytes = (
                after.peak_bytes - before.in_use_bytes + self._memory.argument_bytes - copied
            )
            self.observed_bytes = max(peak_bytes, self.observed_bytes or 0)

    @functools.cached_property
    def _is_read(self) -> list[bool]:
        """Which leaves of the arguments the program reads; jax copies no others."""
        program = self.program
        return program.kept(
            program.traced.jaxpr if program.rewritten is None else program.rewritten
        )

    def _copied_nbytes(self, args: Any, kwargs: Any) -> int | None:
        """Bytes of arguments that are no jax arrays; None over a mesh, which divides them."""
        leaves = zip(jax.tree_util.tree_leaves((args, kwargs)), self._is_read, strict=True)
        copied = [leaf for leaf, is_read in leaves if is_read and not isinstance(leaf, jax.Array)]
        if copied and self.program.machine:
            return None
        return sum(np.asarray(leaf).nbytes for leaf in copied)

    def _run_beside_others(self, args: Any, kwargs: Any) -> Any:
        """Call the step; raise memplan's errors, if possible before it consumes arguments."""
        self._await_block()
        try:
            results = self._run(args, kwargs)
            for leaf in jax.tree_util.tree_leaves(results)[:1]:
                if leaf.is_ready():  # A step that failed raises only when its result is read.
                    leaf.block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            leaves = jax.tree_util.tree_leaves((args, kwargs))
            pairs = zip(leaves, self.program.donated, strict=True)
            donated = [
                leaf for leaf, is_donated in pairs if is_donated and isinstance(leaf, jax.Array)
            ]
            memory_error = out_of_memory(error, donated)
            if memory_error is None:
                raise
            raise memory_error from None
        except ValueError as error:
            if not self.program.on_host or "input shardings" not in str(error):
                raise
            raise MemplanError(
                "arguments are not in the memory that the step was planned for (host_state); pass "
                f"those that Planned.place() returns. {error}"
            ) from None
        return results

    def _await_block(self) -> None:
        """Wait for a block that holds the temporaries; raise OutOfMemoryError when XLA would."""
        needed = self._memory.temp_bytes
        end_s = time.monotonic() + _PATIENCE_S
        while (pool := local.room()) is not None and pool.block_bytes < needed:
            if time.monotonic() > end_s:
                raise no_block(needed, pool)
            time.sleep(0.01)

    def _run(self, args: Any, kwargs: Any) -> Any:
        try:
            if self.program.traced.lowers_by_leaves:
                results = self._call(*jax.tree_util.tree_leaves((args, kwargs)))
                return jax.tree_util.tree_unflatten(self.program.traced.out_tree, results)
            return self._call(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            deletion_error = _deletion_error(error, args, kwargs)
            if deletion_error is not None:
                raise deletion_error from None
            raise

    def _with_state(self, args: Any, kwargs: Any) -> Any:
        """Call a step on a CPU, which has one memory for the state and everything else."""
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        for position in self.program.on_host:
            leaves[position] = self._on_device(leaves[position], position)
        args, kwargs = jax.tree_util.tree_unflatten(tree, leaves)
        results, tree = jax.tree_util.tree_flatten(self._run(args, kwargs))
        for position in self.program.returned_to_host:
            results[position] = place_leaf(results[position], on_host=True)
        return jax.tree_util.tree_unflatten(tree, results)

    def _on_device(self, array: Any, position: int) -> Any:
        """A copy on the device; it replaces a donated argument."""
        copy = to_device(array)
        if self.program.donated[position] and isinstance(array, jax.Array) and copy is not array:
            copy.block_until_ready()
            array.delete()
        return copy


def _deletion_error(error: Exception, args: Any, kwargs: Any) -> DeletedArgumentError | None:
    """memplan's error for jax's errors about donated arguments; None for another error."""
    if "previously donated in the same call" in str(error):
        return DeletedArgumentError(
            "the same array is in two arguments of the step, one of which is donated: its buffer "
            "would be overwritten while the other reads it. Pass a copy (array.copy()), or do not "
            "donate the argument."
        )
    leaves = jax.tree_util.tree_leaves((args, kwargs))
    deleted = [leaf for leaf in leaves if isinstance(leaf, jax.Array) and leaf.is_deleted()]
    if "has been deleted" not in str(error) or not deleted:
        return None
    return DeletedArgumentError(
        f"{len(deleted)} of the {len(leaves)} arrays in the step's arguments are deleted, the "
        f"first of them {deleted[0].dtype}{list(deleted[0].shape)}: they were donated to an "
        "earlier call, whose results took their buffers. Pass those results in their place, or do "
        "not donate the argument."
    )


def numbers_gate(outcome: Outcome, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Gate:
    """Run the unmodified and the planned step on the same inputs, and compare.

    The same kernels and collectives give the same bits, if the device is deterministic; to know
    that, the unmodified step runs twice. A rewritten program is compiled into other kernels: its
    differences are compared with the error that recompiling the unmodified step introduces. If
    loops have other residuals, they are also compared with the error of inputs that differ by one
    rounding.

    Raises:
      MemplanError: the arguments are shapes, not arrays.
    """
    program = outcome.program
    dynamic = dynamic_arguments(program.step, args, kwargs, program.options)
    if program.on_host:
        dynamic = jax.tree.map(to_device, dynamic)  # for the unmodified step
    leaves = jax.tree_util.tree_leaves(dynamic)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise MemplanError(
            'verify="numbers" runs the step: pass arrays to plan(), not jax.ShapeDtypeStructs.'
        )
    if program.rewritten is None:
        executable = compile_unplanned(outcome)
        unmodified = Runner(replace(outcome, program=program.original, executable=executable))
        first = _results(unmodified, dynamic)
        second = _results(unmodified, dynamic)
        planned = _results(Runner(outcome), dynamic)
        if program.asks_less_workspace:
            return compare(first, second, planned, coarsest=roundings(program.original.jaxpr))
        return compare(first, second, planned, same_kernels=True)
    original = program.original
    plain = jax.jit(compat.jaxpr_as_fun(original.jaxpr), compiler_options=AS_TYPED)
    rewritten_step = jax.jit(compat.jaxpr_as_fun(program.jaxpr), compiler_options=AS_TYPED)
    pieces = [in_pieces(original.jaxpr, length, AS_TYPED)(leaves) for length in _LENGTHS]
    if program.loops:  # Hundreds of trips may amplify a rounding: measure by how much.
        draw = np.random.default_rng(0)
        pieces.append(plain(*(nudged(leaf, draw) for leaf in leaves)))
    coarsest = roundings(original.jaxpr)
    return compare(
        plain(*leaves), pieces[0], rewritten_step(*leaves), *pieces[1:], coarsest=coarsest
    )


def _results(call: Callable[..., Any], dynamic: Any) -> list[Any]:
    """Results of a call with copies of the arguments, since it may donate them."""

    def copied(leaf: Any) -> Any:
        return leaf.copy() if isinstance(leaf, jax.Array) else leaf

    args, kwargs = jax.tree.map(copied, dynamic)
    return jax.tree_util.tree_leaves(call(*args, **kwargs))
