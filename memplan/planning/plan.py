"""A plan: the actions of a scheduled module, in order. Saved as JSON, atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from memplan import io
from memplan.errors import PlanMismatchError
from memplan.io import write_atomic
from memplan.planning.problem import Pin, Problem
from memplan.planning.schedule import Action, Kind, Schedule
from memplan.planning.transforms import Transform

FORMAT = 8  # 7 said whether kernels feed the links, not how

NamedAction = tuple[Kind, str]
"""An action, and the name of its kernel or of its buffer."""
Feeding = Literal["", "critical first", "in turn"]
"""How kernels moved to feed the links between devices; "" if they kept their order."""


@dataclass(frozen=True)
class Plan:
    """Actions in order, for the module with this fingerprint.

    Attributes:
      actions: kernels are named by their instructions, buffers as in `fusion.3{1}`.
      fingerprint: of the module.
      planner: name of the planner that made it.
      device: name of the device that the module was compiled for.
      transforms: of the step's program, in the order in which they are applied.
      extra_outputs: names of buffers that are recomputed as additional outputs of later fusions
        that read their inputs.
      program: digest of the step. If another module has the same digest, the plan is followed or
        replaced; if the digest is "", it is refused.
      structure: digest of the module's dataflow, by name.
      kernels: instructions that XLA's autotuner decided, and its choices
        (`xla.module.Module.chosen_kernels`).
      hides_latency: the module was scheduled to hide the latency of copies; None if a saved plan
        does not say.
      rewritten_for_nbytes: bytes of temporaries for which fusions were merged and split; None: none
        were.
      overlapped: how collectives were overlapped with more kernels before planning (`xla.overlap`):
        the limit in bytes, and how kernels moved to feed the links; None: they are as XLA
        scheduled them.
      pins: that it keeps, in the order of their marks.
      budget_bytes: device bytes that it was made for. They are the limit when collectives are
        overlapped with more kernels after planning.
    """

    actions: tuple[NamedAction, ...]
    fingerprint: str
    planner: str
    device: str = ""
    transforms: tuple[Transform, ...] = ()
    rewritten_for_nbytes: int | None = None
    extra_outputs: tuple[str, ...] = ()
    program: str = ""
    structure: str = ""
    kernels: tuple[tuple[str, str], ...] = ()
    hides_latency: bool | None = None
    overlapped: tuple[int, Feeding] | None = None
    budget_bytes: int | None = None
    pins: tuple[Pin, ...] = ()

    def schedule(self, problem: Problem) -> Schedule:
        """The actions, by the numbers of a problem.

        Raises:
          PlanMismatchError: the problem has no such kernel or buffer.
        """
        kernels = {kernel.name: number for number, kernel in enumerate(problem.kernels)}
        buffers = {buffer.name: number for number, buffer in enumerate(problem.buffers)}
        try:
            return tuple(
                Action(kind, kernels[name]) if kind is Kind.RUN else Action(kind, buffers[name])
                for kind, name in self.actions
            )
        except KeyError as error:
            text = f"the plan names {error}, which this program does not have. Plan again."
            raise PlanMismatchError(text) from None

    def check(self, fingerprint: str) -> None:
        """Raise PlanMismatchError if the plan was made for another module."""
        if self.fingerprint != fingerprint:
            raise PlanMismatchError(
                f"the plan was made for program {self.fingerprint[:12]}, but this step is "
                f"{fingerprint[:12]}: the function, the shapes or dtypes, the device or the jax "
                "version differ. Plan again, or call with the original shapes."
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, atomically."""
        write_atomic(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a saved plan.

        Raises:
          PlanMismatchError: the file is not a plan.
          FileNotFoundError: there is no file.
        """
        try:
            return cls.from_json(io.read_text(path))
        except ValueError as error:
            raise _damaged(str(path), error) from error
        except PlanMismatchError as error:
            raise PlanMismatchError(f"{path}: {error}") from error

    def to_json(self) -> str:
        document = {"format": FORMAT, "length": len(self.actions), **io.encode(self)}
        return json.dumps(document, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """A plan that `to_json` wrote (PlanMismatchError: the text is none)."""
        try:
            document = io.parse_json(text, FORMAT)
            length = document.pop("length", None)
            plan = io.decode(cls, document, complete=True)
            if len(plan.actions) != length:
                raise ValueError("actions are missing")
        except ValueError as error:
            raise _damaged("this", error) from error
        return plan


def name_actions(problem: Problem, schedule: Iterable[Action]) -> tuple[NamedAction, ...]:
    """Actions by the names of their kernels and buffers."""
    names = []
    for action in schedule:
        numbered = problem.kernels if action.kind is Kind.RUN else problem.buffers
        names.append((action.kind, numbered[action.number].name))
    return tuple(names)


def _damaged(document: str, error: Exception) -> PlanMismatchError:
    return PlanMismatchError(
        f"{document} is not a complete memplan plan ({error!s:.300}). It may be truncated, or from "
        "another program or release; save the plan again."
    )
