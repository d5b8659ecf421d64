"""A plan: the actions of a scheduled module, in order. Saved as JSON, atomically."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memplan.errors import PlanMismatchError
from memplan.io import write_atomic
from memplan.planning.loops import Residuals
from memplan.planning.problem import Problem
from memplan.planning.schedule import Action, Kind, Schedule
from memplan.planning.slabs.slabs import Slabs

FORMAT = 5

NamedAction = tuple[Kind, str]
"""An action, and the name of its kernel or of its buffer."""


@dataclass(frozen=True)
class Plan:
    """Actions in order, for the module with this fingerprint.

    Attributes:
      actions: kernels are named by their instructions, buffers as in `fusion.3{1}`.
      fingerprint: of the module.
      planner: name of the planner that made it.
      device: name of the device that the module was compiled for.
      loops: residuals of the step's pairs of loops, in the order of `program.loops`; None leaves a pair as it is, an
        empty tuple all of them.
      slabs: parts of the step that run in loops over slabs, in order.
      on_host: positions of inputs in host memory.
      extra_outputs: names of buffers that are recomputed as additional outputs of later fusions that read their inputs.
      program: digest of the step. For another module with it, the plan is followed or replaced; "": refused.
      structure: digest of the module's dataflow, by name.
      kernels: instructions that XLA's autotuner decided, and its choices (`xla.module.Module.chosen_kernels`).
      hides_latency: the module was scheduled to hide the latency of copies; None if a saved plan does not say.
      rewritten_for_nbytes: bytes of temporaries for which fusions were merged and split; None: none were.
    """

    actions: tuple[NamedAction, ...]
    fingerprint: str
    planner: str
    device: str = ""
    loops: tuple[Residuals | None, ...] = ()
    on_host: tuple[int, ...] = ()
    rewritten_for_nbytes: int | None = None
    extra_outputs: tuple[str, ...] = ()
    slabs: tuple[Slabs, ...] = ()
    program: str = ""
    structure: str = ""
    kernels: tuple[tuple[str, str], ...] = ()
    hides_latency: bool | None = None

    def schedule(self, problem: Problem) -> Schedule:
        """The same actions by the numbers of a problem.

        Raises:
          PlanMismatchError: the problem has no such kernel or buffer.
        """
        kernels = {kernel.name: number for number, kernel in enumerate(problem.kernels)}
        buffers = {buffer.name: number for number, buffer in enumerate(problem.buffers)}
        try:
            return tuple(Action(kind, (kernels if kind is Kind.RUN else buffers)[name]) for kind, name in self.actions)
        except KeyError as error:
            raise PlanMismatchError(f"the plan names {error}, which this program does not have. Plan again.") from None

    def check(self, fingerprint: str) -> None:
        """Raise PlanMismatchError if the plan was made for another module."""
        if self.fingerprint != fingerprint:
            raise PlanMismatchError(
                f"the plan was made for program {self.fingerprint[:12]}, but this step is {fingerprint[:12]}: the "
                "function, the shapes or dtypes, the device or the jax version differ. Plan again, or call with the "
                "original shapes."
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, atomically."""
        write_atomic(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a saved plan; raises PlanMismatchError for a file that is not one, FileNotFoundError for no file."""
        try:
            return cls.from_json(Path(path).read_text())
        except UnicodeDecodeError as error:
            raise _damaged(str(path), error) from error
        except PlanMismatchError as error:
            raise PlanMismatchError(f"{path}: {error}") from error

    def to_json(self) -> str:
        slabs = [
            {name: sorted(entry) if isinstance(entry, frozenset) else entry for name, entry in vars(one).items()}
            for one in self.slabs
        ]
        known = ("on_host", "rewritten_for_nbytes", "extra_outputs", "program", "structure", "kernels", "hides_latency")
        document = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "planner": self.planner,
            "device": self.device,
            "loops": [one and {"kept": one.kept, "on_host": one.on_host} for one in self.loops],
            "slabs": slabs,
            **{name: getattr(self, name) for name in known},
            "length": len(self.actions),
            "actions": [[kind.value, name] for kind, name in self.actions],
        }
        return json.dumps(document, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """A plan that `to_json` wrote; raises PlanMismatchError for anything else."""
        try:
            document = json.loads(text)
            if document["format"] != FORMAT:
                raise ValueError(f"format {document['format']}, but this version of memplan reads {FORMAT}")
            actions = tuple((Kind(kind), str(name)) for kind, name in document["actions"])
            if len(actions) != document["length"]:
                raise ValueError("actions are missing")
            loops = tuple(_residuals(known) for known in document["loops"])
            on_host = tuple(map(operator.index, document["on_host"]))
            rewritten_for_nbytes = document["rewritten_for_nbytes"] and operator.index(document["rewritten_for_nbytes"])
            fingerprint, planner, device = (str(document[name]) for name in ("fingerprint", "planner", "device"))
            extra_outputs = tuple(map(str, document["extra_outputs"]))
            slabs = tuple(_slabs(one) for one in document["slabs"])
            program, structure = (str(document.get(name, "")) for name in ("program", "structure"))
            chosen = tuple((str(name), str(which)) for name, which in document.get("kernels", ()))
            hides_latency = document.get("hides_latency")
            known = program, structure, chosen, hides_latency if hides_latency is None else bool(hides_latency)
            return cls(
                actions,
                fingerprint,
                planner,
                device,
                loops,
                on_host,
                rewritten_for_nbytes,
                extra_outputs,
                slabs,
                *known,
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:  # ValueError: not JSON
            raise _damaged("this", error) from error


def name_actions(problem: Problem, schedule: Iterable[Action]) -> tuple[NamedAction, ...]:
    """Actions by the names of their kernels and buffers."""
    return tuple(
        (one.kind, (problem.kernels if one.kind is Kind.RUN else problem.buffers)[one.number].name) for one in schedule
    )


def _damaged(what: str, error: Exception) -> PlanMismatchError:
    return PlanMismatchError(
        f"{what} is not a complete memplan plan ({type(error).__name__}: {error}). It may be truncated, or from "
        "another program or release; save the plan again."
    )


def _residuals(document: Any) -> Residuals | None:
    if document is None:
        return None
    return Residuals(*(tuple(map(operator.index, document[name])) for name in ("kept", "on_host")))


def _slabs(document: Any) -> Slabs:
    value, dim, rows = (operator.index(document[name]) for name in ("value", "dim", "rows"))
    ops, stored, on_host = (frozenset(map(operator.index, document[name])) for name in ("ops", "stored", "on_host"))
    again = frozenset((operator.index(value), operator.index(level)) for value, level in document["recomputed_in"])
    return Slabs(value, dim, rows, ops, stored, on_host, again)
