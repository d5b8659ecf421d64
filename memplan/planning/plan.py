"""A plan: what runs, moves and dies, in order. Saved as JSON, written whole or not at all."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from memplan.errors import PlanMismatchError
from memplan.files import write_whole
from memplan.planning.graph import Graph
from memplan.planning.loop import Residuals

FORMAT = 1


class Kind(StrEnum):
    """What an action does.

    COMPUTE runs operation `target` (a second time: it is recomputed).
    OFFLOAD starts the copy of value `target` to host memory; its FREE waits for the copy.
    PREFETCH starts the copy of value `target` back to the device.
    FREE ends the device copy of value `target`; RELEASE ends its host copy.
    FENCE ends a segment; what comes later does not start before what came earlier is done. It has no target.
    """

    COMPUTE = "compute"
    OFFLOAD = "offload"
    PREFETCH = "prefetch"
    FREE = "free"
    RELEASE = "release"
    FENCE = "fence"


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a plan; `target` is an op id (COMPUTE) or a value id."""

    kind: Kind
    target: int = -1


FENCE = Action(Kind.FENCE)


def copy_of(action: Action, graph: Graph) -> tuple[int, Kind] | None:
    """The value on the device and the direction (OFFLOAD, PREFETCH) of an action that copies, as the program's may."""
    if action.kind in (Kind.OFFLOAD, Kind.PREFETCH):
        return action.target, action.kind
    if action.kind is not Kind.COMPUTE or not graph.ops[action.target].crosses_memories:
        return None
    op = graph.ops[action.target]
    return (op.outputs[0], Kind.PREFETCH) if graph.nbytes(op.outputs[0]) else (op.inputs[0], Kind.OFFLOAD)


@dataclass(frozen=True)
class Plan:
    """What loops stack, and an ordered list of actions for the graph with this fingerprint.

    Attributes:
      actions: in order.
      fingerprint: of the graph.
      planner: who made it.
      device: name of the device it was made for.
      loops: residuals of the pairs of loops, in the order of `program.loops`; the graph is that of the step with these.
        None leaves a pair as it is; empty: all are.
      held: positions of inputs in host memory.
    """

    actions: tuple[Action, ...]
    fingerprint: str
    planner: str
    device: str = ""
    loops: tuple[Residuals | None, ...] = ()
    held: tuple[int, ...] = ()

    def segments(self) -> Iterator[tuple[Action, ...]]:
        """Runs of actions between two fences."""
        return segments(self.actions)

    def check(self, graph: Graph) -> None:
        """Raise PlanMismatchError if the plan was made for another program."""
        if self.fingerprint != graph.fingerprint:
            raise PlanMismatchError(
                f"the plan was made for program {self.fingerprint[:12]}, this step is {graph.fingerprint[:12]}: "
                "another function, other shapes or dtypes, or another jax version. Plan again, or call with the "
                "original shapes."
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON to `path`; the file appears whole or not at all."""
        write_whole(path, json.dumps(self._document(), separators=(",", ":")))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a saved plan; raises PlanMismatchError for a file that is not one, FileNotFoundError for no file."""
        try:
            document = json.loads(Path(path).read_text())
            if document["format"] != FORMAT:
                raise ValueError(f"format {document['format']}, this memplan reads {FORMAT}")
            actions = tuple(Action(Kind(kind), operator.index(target)) for kind, target in document["actions"])
            if len(actions) != document["length"]:
                raise ValueError("actions are missing")
            loops = tuple(_residuals(known) for known in document.get("loops", ()))
            held = tuple(map(operator.index, document.get("held", ())))
            fingerprint, planner, device = (str(document[name]) for name in ("fingerprint", "planner", "device"))
            return cls(actions, fingerprint, planner, device, loops, held)
        except (ValueError, KeyError, TypeError, RecursionError) as error:  # ValueError: not JSON, not even text
            raise PlanMismatchError(
                f"{path} is not a whole memplan plan ({type(error).__name__}: {error}). It may be truncated or written "
                "by another program; save the plan again."
            ) from error

    def _document(self) -> dict[str, object]:
        return {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "planner": self.planner,
            "device": self.device,
            "loops": [known and {"kept": known.kept, "moved": known.moved} for known in self.loops],
            "held": self.held,
            "length": len(self.actions),
            "actions": [[action.kind.value, action.target] for action in self.actions],
        }


def _residuals(document: Any) -> Residuals | None:
    if document is None:
        return None
    return Residuals(*(tuple(map(operator.index, document[name])) for name in ("kept", "moved")))


def segments(actions: Iterable[Action]) -> Iterator[tuple[Action, ...]]:
    """Runs of actions between two fences; a trailing run without a fence counts, an empty one does not."""
    run: list[Action] = []
    for action in actions:
        if action.kind is Kind.FENCE:
            yield tuple(run)
            run = []
        else:
            run.append(action)
    if run:
        yield tuple(run)
