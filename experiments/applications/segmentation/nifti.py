"""Whole NIfTI-1 files, or an error that names the file.

nibabel reads lazily and stops at the last voxel it needs. It never checks the checksum at the end
of a gzip file, so it may accept a damaged scan. Here a file is inflated completely before it is
parsed.
"""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
from nibabel.arrayproxy import ArrayProxy
from nibabel.filebasedimages import ImageFileError
from nibabel.nifti1 import Nifti1Image
from nibabel.spatialimages import HeaderDataError
from nibabel.wrapstruct import WrapStructError

from experiments.datasets import DatasetError

_AGAIN = "Fetch or unpack the file again; no voxel of it was used."
_UNREADABLE = (
    ImageFileError,
    HeaderDataError,
    WrapStructError,
    ValueError,
    OverflowError,
    OSError,
    EOFError,
)
"""The errors that nibabel raises for bytes that are not a NIfTI-1 file."""


def read_voxels(path: Path) -> np.ndarray:
    """All voxels of `path` (.nii or .nii.gz), scaled by the header, as integers or floats.

    DatasetError: the file is absent, damaged, incomplete or does not hold plain numbers.
    """
    content = _inflate(path)
    try:
        stored = Nifti1Image.from_bytes(content).dataobj
        assert isinstance(stored, ArrayProxy)
        _check_header(path, stored, len(content))
        return np.asarray(stored)
    except DatasetError:
        raise
    except _UNREADABLE as error:
        problem = f"not a readable NIfTI-1 file ({_reason(error)})"
        raise DatasetError(path, problem, "Fetch it again, or convert it to NIfTI-1.") from error


def _inflate(path: Path) -> bytes:
    """The file's bytes; a .gz file is decompressed, and its checksum and length verified."""
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except FileNotFoundError as error:
        raise DatasetError(path, "the file is missing", "Unpack the data set again.") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DatasetError(path, f"truncated or corrupt ({_reason(error)})", _AGAIN) from error


def _check_header(path: Path, stored: ArrayProxy, nbytes: int) -> None:
    """Raise if the header declares more than the file's `nbytes` bytes, or no plain numbers."""
    shape, dtype = tuple(int(extent) for extent in stored.shape), stored.dtype
    if not shape or min(shape) < 1:
        raise DatasetError(
            path,
            f"the header declares the dimensions {shape}",
            "Write the file again from its source.",
        )
    if dtype.kind not in "iuf":
        advice = "Images and labels are integers or floats; convert the file."
        raise DatasetError(path, f"voxels have type {dtype}", advice)
    needed = stored.offset + math.prod(shape) * dtype.itemsize
    if nbytes < needed:
        problem = (
            f"truncated: the header promises {needed} bytes for dimensions {shape}, "
            f"the file holds {nbytes}"
        )
        raise DatasetError(path, problem, _AGAIN)


def _reason(error: BaseException) -> str:
    """The library's message on one line, without a full stop."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
