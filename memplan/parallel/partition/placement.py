"""How an array of the whole step is placed on the devices of a mesh, in the words of PyTorch's DTensor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every device has all of it."""

    def __str__(self) -> str:
        return "whole"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every device has a term of its sum."""

    def __str__(self) -> str:
        return "partial"


@dataclass(frozen=True, slots=True)
class PerDevice:
    """Every device has an estimate of it from its own part of the batch; their mean stands for it."""

    def __str__(self) -> str:
        return "own"


@dataclass(frozen=True, slots=True)
class Shard:
    """Split along `dim`; the blocks follow the devices in the order of the mesh, outermost axis first."""

    dim: int

    def __str__(self) -> str:
        return f"split({self.dim})"


Placement = Replicate | Partial | PerDevice | Shard
