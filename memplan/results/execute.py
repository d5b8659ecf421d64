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

_LENGTHS = (5, 12)  # equations compiled together by the gate

_PATIENCE_S = 10.0  # wait for memory that others free; kMaxMillisToWait of XLA's bfc_allocator.cc

# XLA may keep more bits than a type has inside a kernel; which values then lose them depends on where kernels end. So
# the gate of a rewritten program rounds every value to its type.
AS_TYPED = {"xla_allow_excess_precision": False}


class _Calls:
    """One lock for all planned steps on GPUs: the memory of concurrent steps cannot be told apart."""

    lock = threading.Lock()
    begun = running = 0


class Runner:
    """Calls the step with its dynamic arguments, from any number of threads.

    Attributes:
      program, executable: what is called.
      observed_bytes: highest device bytes of a call, by the allocator; None if unknown.
    """

    def __init__(self, found: Outcome | Restored):
        self.program, self.executable = found.program, found.executable
        self._call, self._memory = found.executable.compiled, found.executable.memory
        self._is_gpu = found.target.is_gpu
        self._moves = bool(found.program.on_host) and not self._is_gpu
        self.observed_bytes: int | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_gpu:
            return self._with_state(args, kwargs) if self._moves else self._run(args, kwargs)
        with _Calls.lock:
            _Calls.begun += 1
            _Calls.running += 1
            number, is_alone = _Calls.begun, _Calls.running == 1
        try:
            before = local.room()
            results = self._on_gpu(args, kwargs)
            after = local.room()
        finally:
            with _Calls.lock:
                _Calls.running -= 1
        if before and after and is_alone and number == _Calls.begun:
            self._observe(before, after, args, kwargs)
        return results

    def _observe(self, before: local.Room, after: local.Room, args: Any, kwargs: Any) -> None:
        """Record the peak of a call.

        XLA's allocator knows only the highest peak so far. If a call raised it, the call used the rise above the bytes
        in use before, and its arguments, without those that jax copied from the host. Otherwise an earlier peak was
        higher, such as that of the timing of kernels, and the peak of this call is unknown.
        """
        copied = self._copied_nbytes(args, kwargs)
        if after.peak_bytes > before.peak_bytes and copied is not None:
            taken = after.peak_bytes - before.in_use_bytes + self._memory.argument_bytes - copied
            self.observed_bytes = max(taken, self.observed_bytes or 0)

    @functools.cached_property
    def _is_read(self) -> list[bool]:
        """For each leaf of the arguments: does the program read it? jax copies only those from the host."""
        program = self.program
        return program.kept(program.traced.jaxpr if program.rewritten is None else program.rewritten)

    def _copied_nbytes(self, args: Any, kwargs: Any) -> int | None:
        """Bytes of arguments that are not jax arrays; None over a mesh, where each device gets a part of them."""
        inputs = zip(jax.tree_util.tree_leaves((args, kwargs)), self._is_read, strict=True)
        copied = [np.asarray(leaf).nbytes for leaf, read in inputs if read and not isinstance(leaf, jax.Array)]
        return None if copied and self.program.machine else sum(copied)

    def _on_gpu(self, args: Any, kwargs: Any) -> Any:
        """Call the step, with memplan's errors, raised before donated arguments are consumed if possible."""
        self._await_block()
        try:
            results = self._run(args, kwargs)
            for leaf in jax.tree_util.tree_leaves(results)[:1]:
                if leaf.is_ready():  # already done, possibly failed: jax reports that only when the result is read
                    leaf.block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            leaves = jax.tree_util.tree_leaves((args, kwargs))
            donated = [leaf for leaf, given in zip(leaves, self.program.donated, strict=True) if given]
            found = out_of_memory(error, [leaf for leaf in donated if isinstance(leaf, jax.Array)])
            if found is None:
                raise
            raise found from None
        except ValueError as error:
            if not self.program.on_host or "input shardings" not in str(error):
                raise
            raise MemplanError(
                "arguments are not in the memory that the step was planned for (host_state); pass those that "
                f"Planned.place() returns. {error}"
            ) from None
        return results

    def _await_block(self) -> None:
        """Wait, as long as XLA would, for a block that holds the temporaries; OutOfMemoryError without one."""
        needed, until = self._memory.temp_bytes, time.monotonic() + _PATIENCE_S
        while (room := local.room()) is not None and room.block_bytes < needed:
            if time.monotonic() > until:
                raise no_block(needed, room)
            time.sleep(0.01)

    def _run(self, args: Any, kwargs: Any) -> Any:
        try:
            if self.program.traced.lowers_by_leaves:
                results = self._call(*jax.tree_util.tree_leaves((args, kwargs)))
                return jax.tree_util.tree_unflatten(self.program.traced.out_tree, results)
            return self._call(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            if found := _given_away(error, args, kwargs):
                raise found from None
            raise

    def _with_state(self, args: Any, kwargs: Any) -> Any:
        """Call a step on a CPU, where both memories are one: its state is where everything else is."""
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
        found = to_device(array)
        if self.program.donated[position] and isinstance(array, jax.Array) and found is not array:
            found.block_until_ready()
            array.delete()
        return found


def _given_away(error: Exception, args: Any, kwargs: Any) -> DeletedArgumentError | None:
    """jax's errors about arguments that were donated as memplan's; None for another error."""
    if "previously donated in the same call" in str(error):
        return DeletedArgumentError(
            "the same array is in two arguments of the step, one of which is donated: its buffer would be overwritten "
            "while the other reads it. Pass a copy (array.copy()), or do not donate the argument."
        )
    leaves = jax.tree_util.tree_leaves((args, kwargs))
    gone = [leaf for leaf in leaves if isinstance(leaf, jax.Array) and leaf.is_deleted()]
    if "has been deleted" not in str(error) or not gone:
        return None
    return DeletedArgumentError(
        f"{len(gone)} of the {len(leaves)} arrays in the step's arguments are deleted, the first of them "
        f"{gone[0].dtype}{list(gone[0].shape)}: they were donated to an earlier call, whose results took their "
        "buffers. Pass those results in their place, or do not donate the argument."
    )


def numbers_gate(found: Outcome, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Gate:
    """Run the unmodified and the planned step on the same inputs, and compare.

    The same kernels and collectives give the same bits, unless the device itself does not: the unmodified step runs
    twice. A rewritten program is compiled into other kernels; its differences are compared with those of recompiling
    the unmodified step; where loops have other residuals, also with those of other inputs, one rounding off.

    Raises:
      MemplanError: the arguments are shapes, not arrays.
    """
    program = found.program
    dynamic = dynamic_arguments(program.step, args, kwargs, program.options)
    if program.on_host:
        dynamic = jax.tree.map(to_device, dynamic)  # as the unmodified step has them
    leaves = jax.tree_util.tree_leaves(dynamic)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise MemplanError('verify="numbers" runs the step: pass arrays to plan(), not jax.ShapeDtypeStructs.')
    if program.rewritten is None:
        unmodified = Runner(replace(found, program=program.original, executable=compile_unplanned(found)))
        once, twice, planned = (_results(call, dynamic) for call in (unmodified, unmodified, Runner(found)))
        return compare(once, twice, planned, same_kernels=True)
    original = program.original
    plain = jax.jit(compat.jaxpr_as_fun(original.jaxpr), compiler_options=AS_TYPED)
    planned = jax.jit(compat.jaxpr_as_fun(program.jaxpr), compiler_options=AS_TYPED)
    pieces = [in_pieces(original.jaxpr, length, AS_TYPED)(leaves) for length in _LENGTHS]
    if any(program.residuals):  # hundreds of trips may make any rounding large: one of the inputs shows how large
        draw = np.random.default_rng(0)
        pieces.append(plain(*(nudged(leaf, draw) for leaf in leaves)))
    return compare(plain(*leaves), pieces[0], planned(*leaves), *pieces[1:], coarsest=roundings(original.jaxpr))


def _results(call: Callable[..., Any], dynamic: Any) -> list[Any]:
    """Results of a call with copies of the arguments, which it may donate."""
    args, kwargs = jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, dynamic)
    return jax.tree_util.tree_leaves(call(*args, **kwargs))
