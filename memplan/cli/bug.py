"""The command that writes what a bug report needs into one file."""

import json
import os
import platform
import re
import sys
import sysconfig
import tempfile
import traceback
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import jax
import typer

from memplan import io
from memplan.cli import factory
from memplan.cli.options import Budget, FactoryArgument, PlanCommandOptions, step_command
from memplan.cli.output import check_writable, print_line, progress, save
from memplan.cli.steps import jitted, load_step
from memplan.errors import MemplanError
from memplan.stages import Planned
from memplan.xla.local import local_device

# A form of the step with more characters is left out. GitHub takes files of at most 25 MB. Forms
# compress to a seventh, and the two modules are the largest: of this size, 10 MB together.
_MOST_CHARACTERS = 2**25

_PACKAGES = "memplan", "jax", "jaxlib", "numpy", "scipy", "protobuf", "flax", "optax"
_COMPILERS = "jax-cuda", "nvidia-"  # beginnings of the names of packages with XLA's libraries
_VARIABLES = "JAX_", "XLA_", "MEMPLAN_", "CUDA_VISIBLE_", "NVIDIA_TF32_"
# Variables that name machines, folders or secrets: the file only says that they are set.
_PRIVATE = re.compile("ADDRESS|COORDINATOR|DIR|CACHE|DUMP|KEY|TOKEN|SECRET|PASSWORD")

# The folder of an absolute path: in quotes, where it may have spaces, or without. In names of
# operations (`jit(step)/jvp()/dot`) and addresses of the web, other characters stand before it.
_FOLDER = re.compile(
    r"""(?<=")/[^"\n]*/ | (?<=')/[^'\n]*/
    | (?: (?<![\w.)\]}/-]) | (?<=file://) ) / (?: [^\s/"'`(),;=]+ / )+""",
    re.VERBOSE,
)
_HIDDEN = ".../"
_ELEMENTS = re.compile(r"(?<=constant\()\{.*?\}(?=\))", re.DOTALL)  # of an array in XLA's text


@step_command
def report_bug(
    step: FactoryArgument,
    *,
    budget: Budget = None,
    options: PlanCommandOptions,
    out: Annotated[Path, typer.Option(help="Write this zip file.")] = Path("memplan-bug.zip"),
) -> None:
    """Plan one step as inspect does, and write what a bug report needs into one file: versions, the
    device, options, the report or the error, and each form of the step. Runs and sends nothing.

    The file has no elements of arrays, and paths without their folders. Exit code 0 if it was
    written, whether or not the step could be planned.
    """
    check_writable(out)
    asked = {"step": str(factory.parse(step)), "budget": budget, "options": asdict(options)}
    with progress() as stage, _whole_tracebacks():
        try:
            plain = load_step(step, stage)
            function = jitted(plain, budget, options)
            # XLA can end this process; then the file is there, and says so.
            unfinished = "The process ended while the step was planned."
            _write(out, {"about.json": _about(asked), "error.txt": unfinished})
            planned = function.plan(*plain.args)
            texts = {"report.json": planned.report.to_json(), **_forms(planned)}
        except typer.BadParameter:
            raise
        except Exception:  # of the step, too
            texts = {"error.txt": traceback.format_exc()}
    texts = {"about.json": _about(asked), **texts}
    save(out, lambda path: _write(path, texts))
    print_line("\n".join(texts))
    print_line(
        "Look at these files before you send them: they describe your step, with names and lines "
        "of your source. Attach the file to your report, and say what you expected."
    )


@contextmanager
def _whole_tracebacks() -> Iterator[None]:
    """Keep jax's own frames in tracebacks."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        yield
    finally:
        jax.config.update("jax_traceback_filtering", before)


def _about(asked: Mapping[str, Any]) -> str:
    """What was asked for, and on which machine, as JSON.

    It starts jax's backend, so it comes after the factory's module, which may configure jax.
    """
    installed = sorted({package.name or "" for package in metadata.distributions()})
    compilers = [name for name in installed if name.startswith(_COMPILERS)]
    about = {
        **asked,
        "versions": dict(io.versions(*_PACKAGES, *compilers)),
        "os": platform.platform(),
        "device": _device(),
        "variables": {
            name: "(set)" if _PRIVATE.search(name) else value
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLES)
        },
    }
    return json.dumps(about, indent=2)


def _device() -> dict[str, Any]:
    """The local device, or why it is unknown."""
    try:
        devices = jax.devices()
        return {
            "kind": devices[0].device_kind,
            "count": len(devices),
            "backend": devices[0].client.platform_version,
            "memory_bytes": local_device().memory_bytes,
        }
    except (RuntimeError, MemplanError) as error:
        return {"error": str(error)}


def _forms(planned: Planned) -> dict[str, str]:
    """The forms of the step, without elements of arrays, by file name."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            paths = planned.dump(folder)
        except MemplanError as error:  # the plan came from a cache
            return {"forms.txt": str(error)}
        texts = {path.name: _ELEMENTS.sub("{...}", path.read_text()) for path in paths}
    return {
        f"forms/{name}": text if len(text) <= _MOST_CHARACTERS else f"{len(text)} characters"
        for name, text in texts.items()
    }


def _write(path: Path, texts: Mapping[str, str]) -> None:
    """Write a zip file of these texts, without the folders in their paths."""
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            archive.writestr(name, _without_folders(text))
    io.write_atomic(path, buffer.getvalue())


def _without_folders(text: str) -> str:
    """The text; a path is relative to where Python finds it, or is a name without its folder."""
    folders = {*sys.path, *sysconfig.get_paths().values(), os.getcwd(), str(Path.home())}
    folders |= {os.path.realpath(folder) for folder in folders}
    folders |= {json.dumps(folder)[1:-1] for folder in folders}  # as JSON escapes them
    for folder in sorted(folders, key=len, reverse=True):
        if folder.count(os.sep) > 1 or folder == str(Path.home()):
            text = re.sub(rf"{re.escape(folder)}(?![\w.-])/?", _HIDDEN, text)
    return _FOLDER.sub(_HIDDEN, text)
