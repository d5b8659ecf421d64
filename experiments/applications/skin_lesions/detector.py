"""The deployed detector: one file, photographs in, shares of classes out. Knows neither network nor training.

    python -m experiments.applications.skin_lesions.detector DETECTOR PHOTOGRAPH_OR_FOLDER ...

Prints a line of JSON per photograph: its file and the share of each class, most likely first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax import export

from experiments.applications.skin_lesions.photographs import pixels
from experiments.datasets import DatasetError

EXAMINED_AT_ONCE = 64


@dataclass(frozen=True)
class Detector:
    """An exported program: uint8 [batch, side, side, 3] -> {class: float32 [batch]}, for any batch."""

    program: export.Exported

    @property
    def side(self) -> int:
        """Pixels along each side of what it looks at."""
        return self.program.in_avals[0].shape[1]

    def __call__(self, images: np.ndarray) -> dict[str, np.ndarray]:
        return jax.device_get(self.program.call(images))


def load(path: Path) -> Detector:
    """Read a detector.

    Raises:
      DatasetError: the file is absent or holds no exported detector.
    """
    try:
        program = export.deserialize(bytearray(path.read_bytes()))
    except OSError as error:
        raise DatasetError(path, f"cannot be read ({error.strerror})", "Export a detector first.") from error
    except Exception as error:  # flatbuffers raises whatever the bytes lead it to
        raise DatasetError(path, f"no exported detector ({error})", "Copy or export it again.") from error
    return Detector(program)


def examine(detector: Detector, photographs: Sequence[Path]) -> Iterator[tuple[Path, dict[str, float]]]:
    """Each photograph with the share of every class."""
    for start in range(0, len(photographs), EXAMINED_AT_ONCE):
        some = photographs[start : start + EXAMINED_AT_ONCE]
        shares = detector(np.stack([pixels(path, detector.side) for path in some]))
        for number, path in enumerate(some):
            yield path, {name: float(share[number]) for name, share in shares.items()}


def found_in(places: Sequence[Path]) -> list[Path]:
    """The photographs named, and those in the folders named, in the order of their names."""
    return [path for place in places for path in (sorted(place.glob("*.jpg")) if place.is_dir() else [place])]


def main() -> None:
    parser = argparse.ArgumentParser(description="Classify photographs of skin lesions.")
    parser.add_argument("detector", type=Path)
    parser.add_argument("photographs", type=Path, nargs="+")
    options = parser.parse_args()
    try:
        for path, shares in examine(load(options.detector), found_in(options.photographs)):
            ranked = dict(sorted(shares.items(), key=lambda pair: -pair[1]))
            print(json.dumps({"photograph": str(path), "shares": ranked}), flush=True)
    except DatasetError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
