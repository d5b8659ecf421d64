"""How an array of the whole step lies on the devices of a mesh."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """`whole`: every device has all of it. `partial`: every device has a term of its sum. `own`: every device has an
    estimate of it from its own part of the batch, their mean stands for it. Otherwise split along `dim`.

    The blocks of a split array follow the devices in the order of the mesh, outermost axis first.
    """

    kind: str
    dim: int = -1

    @property
    def is_whole(self) -> bool:
        return self.kind == "whole"

    @property
    def is_split(self) -> bool:
        return self.kind == "split"

    @property
    def is_partial(self) -> bool:
        return self.kind == "partial"

    @property
    def is_own(self) -> bool:
        return self.kind == "own"

    def __str__(self) -> str:
        return f"split({self.dim})" if self.is_split else self.kind


WHOLE = Layout("whole")
PARTIAL = Layout("partial")
OWN = Layout("own")


def split(dim: int) -> Layout:
    return Layout("split", dim)
