"""XLA's GPU runtime on a stand-in for CUDA's driver: builds it, and runs Python programs on it, each in a process.

README.md says what it is, what it refuses, and the format of its log.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

# Rounding must be PTX's: no product and sum fused by the C compiler. Registers are read as an instruction's type.
FLAGS = [
    "-Wall",
    "-Wextra",
    "-Werror",
    "-D_GNU_SOURCE",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fPIC",
    "-fvisibility=hidden",
]

# The names under which XLA looks for NVIDIA's libraries (CUDA 12). All are the one stand-in.
LIBRARIES = [
    "libcuda.so.1", "libcudart.so.12", "libcublas.so.12", "libcublasLt.so.12", "libcudnn.so.9", "libcufft.so.11",
    "libcusolver.so.11", "libcusparse.so.12", "libcupti.so.12", "libnccl.so.2", "libnvrtc.so.12", "libnvidia-ml.so.1",
]  # fmt: skip

# "Not supported", in the status codes of each library.
NOT_SUPPORTED = {"cublas": 15, "cudnn": 3000, "cuda": 801, "cupti": 27, "nvml": 3}


@dataclass(frozen=True)
class Ran:
    """A finished run: what its function returned (None for a script), what it printed, and the driver's log."""

    value: Any
    stdout: str
    stderr: str
    log: Path

    def lines(self) -> list[list[str]]:
        """The log, a list of words per line."""
        return lines_of(self.log)

    def refusals(self) -> list[str]:
        return [" ".join(words[3:]) for words in self.lines() if words[2] == "REFUSED"]


def lines_of(log: Path) -> list[list[str]]:
    """A driver's log, a list of words per line."""
    return [line.split(" ") for line in log.read_text().splitlines()]


def follow(schedule: str, seed: int = 0) -> None:
    """Another schedule than `run` was asked for, in a program on the stand-in whose results have all arrived."""
    library = ctypes.CDLL(str(Path(os.environ["STAND_IN"]) / "lib" / LIBRARIES[0]))
    library.stand_in_follow(schedule.encode(), ctypes.c_uint64(seed))


class RunFailed(AssertionError):
    """A run that ended with an error: its output is the message."""


def missing() -> str | None:
    """Why the stand-in cannot be built here; None where it can."""
    if shutil.which("gcc") is None:
        return "gcc is not installed"
    if importlib.util.find_spec("jax_plugins.xla_cuda12") is None:
        return "jax-cuda12-plugin (extra gpu-aot) is not installed"
    return None if _assembler() else "nvidia-cuda-nvcc-cu12 (extra gpu-aot) is not installed"


def run(
    program: Callable[..., Any] | str | Path,
    *args: Any,
    card: str = "v100",
    device_mib: int | None = None,
    host_mib: int | None = None,
    schedule: str = "eager",
    seed: int = 0,
    execute: bool = True,
    graphs: bool = True,
    flags: str = "",
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
    timeout_s: float = 300,
    python: str = sys.executable,
) -> Ran:
    """Runs a function of an importable module, or a script, with jax on the stand-in.

    Args:
      program: a function (its arguments and result must be JSON), or a script's path (its arguments are text).
      card: "v100", "a100" or "h100".
      device_mib: the card's memory; the real card's by default.
      host_mib: how much may be pinned; 1 TiB by default.
      schedule: what the device runs first of what it may run: "eager", "late", "early" or "random" (csrc/operations.c).
      seed: of "random".
      execute: False records calls and copies, but kernels and library calls compute nothing.
      graphs: False turns XLA's CUDA graphs off.
      flags: more XLA_FLAGS.
      env: more of the environment.
      python: the interpreter, where it is another than this one: it must have the packages that `missing` names.

    Raises:
      RunFailed: the process ended with an error, or ran longer than `timeout_s`.
    """
    folder = Path(tempfile.mkdtemp(prefix="stand-in-"))
    log = log or folder / "log"
    environment = {**os.environ, **environment_of(python, graphs=graphs, flags=flags)}
    environment |= {
        "STAND_IN_CARD": card, "STAND_IN_SCHEDULE": schedule, "STAND_IN_SEED": str(seed),
        "STAND_IN_EXECUTE": str(int(execute)), "STAND_IN_LOG": str(log),
    }  # fmt: skip
    if device_mib is not None:
        environment["STAND_IN_DEVICE_MIB"] = str(device_mib)
    if host_mib is not None:
        environment["STAND_IN_HOST_MIB"] = str(host_mib)
    result = folder / "result.json"
    command = [python, *_command(program, args, result)]
    try:
        done = subprocess.run(
            command,
            env=environment | dict(env or {}),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RunFailed(
            f"longer than {timeout_s} s; log: {log}\n{error.stdout!r}\n{error.stderr!r}"
        ) from None
    if done.returncode:
        raise RunFailed(
            f"exit {done.returncode}; log: {log}\n{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
        )
    value = json.loads(result.read_text()) if result.exists() else None
    return Ran(value, done.stdout, done.stderr, log)


def _command(
    program: Callable[..., Any] | str | Path, args: tuple[Any, ...], result: Path
) -> list[str]:
    """The interpreter's arguments. A function's module is loaded from its file: tests have no importable names."""
    if not callable(program):
        return [str(program), *map(str, args)]
    start = (
        "import importlib.util, json, pathlib, sys\n"
        "path, name, args, result = sys.argv[1:]\n"
        "spec = importlib.util.spec_from_file_location('program_on_stand_in', path)\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules[spec.name] = module\n"
        "spec.loader.exec_module(module)\n"
        "value = getattr(module, name)(*json.loads(args))\n"
        "pathlib.Path(result).write_text(json.dumps(value))\n"
    )
    return [
        "-c",
        start,
        str(inspect.getfile(program)),
        program.__name__,
        json.dumps(args),
        str(result),
    ]


def environment_of(
    python: str = sys.executable, *, graphs: bool = True, flags: str = ""
) -> dict[str, str]:
    """What a process needs to find the stand-in; builds it if need be."""
    built = build(python)
    xla_flags = [
        "--xla_gpu_autotune_level=0",  # no kernel is timed: the stand-in knows no time
        "--xla_gpu_enable_libnvptxcompiler=false",  # the assembler is a program, ours
        "--xla_gpu_enable_triton_gemm=false",  # Triton's products are tensor-core instructions
        *([] if graphs else ["--xla_gpu_enable_command_buffer="]),
        flags,
    ]
    return {
        "STAND_IN": str(built),
        "LD_LIBRARY_PATH": os.pathsep.join(
            filter(None, [str(built / "lib"), os.environ.get("LD_LIBRARY_PATH")])
        ),
        "CUDA_ROOT": str(built / "cuda"),
        "JAX_PLATFORMS": "cuda,cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(HERE / "site"), str(ROOT), os.environ.get("PYTHONPATH")])
        ),
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
        "XLA_FLAGS": " ".join(filter(None, xla_flags)),
        "XLA_PYTHON_CLIENT_PREALLOCATE": os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "false"),
    }


# ---- building


@functools.cache
def build(python: str = sys.executable) -> Path:
    """The folder with `lib/` (the libraries) and `cuda/` (the assembler), made once for what it is made from."""
    site = _site(python)
    key = hashlib.sha256()
    for path in sorted((HERE / "csrc").iterdir()):
        key.update(path.name.encode() + path.read_bytes())
    plugin = site / "jax_plugins" / "xla_cuda12" / "xla_cuda_plugin.so"
    compiler = subprocess.run(
        ["gcc", "--version"], capture_output=True, text=True, check=True
    ).stdout
    cpu = re.search(r"^flags.*", Path("/proc/cpuinfo").read_text(), re.M)  # -march=native
    recipe = [inspect.getsource(f) for f in (_make, _make_assembler, _stubs)]
    key.update(
        repr((recipe, FLAGS, LIBRARIES, NOT_SUPPORTED, _PTXAS, compiler, cpu and cpu[0])).encode()
    )
    key.update(f"{plugin} {plugin.stat().st_size}".encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memplan-tests"
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / f"stand-in-{key.hexdigest()[:16]}"
    with (cache / "lock").open("w") as lock:  # two workers of pytest build once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                _make(Path(folder), site, plugin)
                os.rename(folder, target)
                os.mkdir(folder)  # for the context to remove
    return target


def _make(folder: Path, site: Path, plugin: Path) -> None:
    (folder / "lib").mkdir()
    objects = folder / "objects"
    objects.mkdir()
    sources = sorted((HERE / "csrc").glob("*.c"))
    with ThreadPoolExecutor(2) as pool:
        list(
            pool.map(
                lambda s: _gcc([*FLAGS, "-c", str(s), "-o", str(objects / f"{s.stem}.o")]), sources
            )
        )
    object_files = [str(objects / f"{s.stem}.o") for s in sources]
    (objects / "stubs.c").write_text(_stubs(plugin, object_files))
    _gcc(["-O1", "-fPIC", "-c", str(objects / "stubs.c"), "-o", str(objects / "stubs.o")])
    main = folder / "lib" / "libstand_in.so"
    _gcc(
        [
            "-shared",
            "-Wl,-soname,libstand_in.so",
            "-o",
            str(main),
            *object_files,
            str(objects / "stubs.o"),
            "-lpthread",
            "-lm",
        ]
    )
    # each with its own SONAME, so that whoever loaded it first has loaded it for all
    for name in LIBRARIES:
        _gcc(["-shared", f"-Wl,-soname,{name}", "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed",
              "-o", str(folder / "lib" / name), str(main)])  # fmt: skip
    _make_assembler(folder / "cuda", site)
    shutil.rmtree(objects)


def _make_assembler(cuda: Path, site: Path) -> None:
    """`ptxas` that hands PTX on as it is, and the device's mathematical library, which XLA links in before."""
    (cuda / "bin").mkdir(parents=True)
    real = site / "nvidia" / "cuda_nvcc"
    (cuda / "nvvm").symlink_to(real / "nvvm")
    ptxas = cuda / "bin" / "ptxas"
    ptxas.write_text(_PTXAS.replace("REAL", str(real / "bin" / "ptxas")))
    ptxas.chmod(0o755)


_PTXAS = """#!/bin/sh
# The stand-in's machine code is PTX: what would be assembled is copied. Questions (--version) go to the real assembler.
in= out= previous=
for word in "$@"; do
  case $previous in -o) out=$word ;; esac
  case $word in
    --version) exec "REAL" "$@" ;;
    --output-file=*) out=${word#*=} ;;
    -*) ;;
    *) [ "$previous" = -o ] || in=$word ;;
  esac
  previous=$word
done
exec cp "$in" "$out"
"""


def _stubs(plugin: Path, objects: list[str]) -> str:
    """C for every name of NVIDIA's that the plugin has and nobody wrote: logged, and "not supported"."""
    strings = {
        s.decode()
        for s in re.findall(rb"\0((?:__cuda|cu|nccl|nv)[A-Za-z0-9_]+)(?=\0)", plugin.read_bytes())
    }
    ours = re.compile(
        "(?:__cuda|cuda|cublas|cudnn|cufft|cusolver|cusparse|cupti|nccl|nvml|nvrtc|cu)[A-Z_]"
    )
    wanted = set(filter(ours.match, strings))
    listed = subprocess.run(
        ["nm", "-g", "--defined-only", *objects], capture_output=True, text=True, check=True
    ).stdout
    written = {line.split()[-1] for line in listed.splitlines() if line.strip() and " " in line}
    lines = ["int unimplemented(const char*, int);"]
    for name in sorted(wanted - written):
        status = next(
            (code for prefix, code in NOT_SUPPORTED.items() if name.startswith(prefix)),
            801 if name.startswith("cu") else 3,
        )
        visible = '__attribute__((visibility("default")))'
        if name.endswith(("String", "ErrorName", "StatusName")):
            lines.append(
                f'{visible} const char* {name}(void) {{ unimplemented("{name}", 0); return "{name}"; }}'
            )
        else:
            lines.append(
                f'{visible} int {name}(void) {{ return unimplemented("{name}", {status}); }}'
            )
    return "\n".join(lines) + "\n"


def _gcc(arguments: list[str]) -> None:
    done = subprocess.run(["gcc", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"gcc {' '.join(arguments)}\n{done.stderr}")


def _site(python: str) -> Path:
    """The folder of an interpreter's packages."""
    ask = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return Path(
        subprocess.run(
            [python, "-c", ask], capture_output=True, text=True, check=True
        ).stdout.strip()
    )


def _assembler() -> bool:
    try:
        files = importlib.metadata.files("nvidia-cuda-nvcc-cu12") or []
    except importlib.metadata.PackageNotFoundError:
        return False
    return any(file.name == "ptxas" for file in files)
