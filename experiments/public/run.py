"""Training steps of public repositories: a list, and what the compiler says of each as it is.

    python -m experiments.public.run --list
    python -m experiments.public.run --checkouts DIR [--name NAME ...] [--small]

Compiles for described GPUs (extra gpu-aot), one step after the other; `--small` runs a small version of each once on
the CPU instead. README.md says how DIR is made; `MEMPLAN_CHECKOUTS` names it as well.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from experiments.public.checkouts import MissingCheckoutError, checkouts_folder
from experiments.public.steps import STEPS, PublicStep
from memplan.planning import devices
from memplan.xla.target import Target

MIB = 2**20


def compile_full(public: PublicStep, checkouts: Path) -> str:
    """Device bytes and seconds of the step as it is, for its described GPU.

    The one place for what is planned beside it: the same step, arguments and target under budgets.
    """
    began = time.perf_counter()
    step, args, donated = public.factory(checkouts)()
    traced = time.perf_counter()
    target = Target(devices.named(public.device), described=True)
    memory = target.compile(step, args, {}, {"donate_argnums": donated}).memory
    compiled = time.perf_counter()
    return (
        f"{memory.device_bytes / MIB:.0f} MiB, of them {memory.argument_bytes / MIB:.0f} arguments, "
        f"built in {traced - began:.1f} s, compiled in {compiled - traced:.1f} s"
    )


def run_small(public: PublicStep, checkouts: Path) -> str:
    """Whether all that a small version gives on the CPU is finite."""
    step, args, _ = public.small_factory(checkouts)()
    results = [leaf for leaf in jax.tree.leaves(jax.jit(step)(*args)) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    finite = sum(bool(jnp.isfinite(leaf).all()) for leaf in results)
    return f"{finite} of {len(results)} results finite"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 where a clone is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", metavar="DIR")
    parser.add_argument("--name", nargs="+", metavar="NAME", choices=STEPS, default=list(STEPS))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args(argv)
    if args.list:
        for public in STEPS.values():
            print(f"{public.name:20}{public.device:6}{public.repository.name}  {public.path}")
        return 0
    try:
        checkouts = checkouts_folder(args.checkouts)
        for name in args.name:
            tell = run_small if args.small else compile_full
            print(f"{name}: {tell(STEPS[name], checkouts)}", flush=True)
    except MissingCheckoutError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
