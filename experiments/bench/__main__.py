"""python -m experiments.bench [QUESTION ...] [--only NAME ...] [--force] [--table] [--list]

Measures the cases of the given questions, or of all, each in a process of its own, and rewrites the
tables of README.md. Skips cases that were measured with today's memplan, models, jax and compilers.
NAME is a case or the beginning of one.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence

import jax

from experiments.bench import tables
from experiments.bench.public.checkouts import VARIABLE, MissingCheckoutError
from experiments.bench.questions import QUESTIONS, Question, all_tables
from experiments.bench.results import Result
from experiments.bench.runner import alone, apart, missing, selected


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 1 if a clone of a public repository is missing, else 0."""
    options = _parser().parse_args(argv)
    chosen = options.questions or list(QUESTIONS.values())
    if options.checkouts:
        os.environ[VARIABLE] = os.path.abspath(options.checkouts)
    if options.alone:
        print(alone(chosen[0], chosen[0].cases[options.alone]).to_json())
    elif options.list:
        print(
            *(f"{question.name:14}{case}" for question in chosen for case in question.cases),
            sep="\n",
        )
    elif options.table:
        tables.rewrite(all_tables())
    else:
        return _measure(chosen, options)
    return 0


def _measure(chosen: Iterable[Question], options: argparse.Namespace) -> int:
    if options.only and not any(selected(question, options.only) for question in chosen):
        raise SystemExit(
            f"nothing begins with {' or '.join(options.only)}; --list tells what there is"
        )
    for question in chosen:
        if not jax.__version__.startswith(question.jax):
            print(
                f"{question.name}: is asked of jax {question.jax}; installed is {jax.__version__}",
                flush=True,
            )
            continue
        try:
            question.needs()
        except MissingCheckoutError as error:
            print(error, file=sys.stderr)
            return 1
        for case in missing(
            question, selected(question, options.only), options.force, options.keep
        ):
            result = apart(question, case, options.minutes)
            result.keep()
            print(_line(result), flush=True)
        tables.rewrite(all_tables())
    return 0


def _line(result: Result) -> str:
    """A result as a line of progress."""
    figures = result.rows[0].items() if result.rows else ()
    shown = (f"{name} {value:.6g}" for name, value in figures if type(value) in (int, float))
    words = (result.status, *filter(None, [result.reason]), *shown)
    return f"{result.question} {result.case}: {', '.join(words)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "questions", nargs="*", metavar="QUESTION", type=_question, help=", ".join(QUESTIONS)
    )
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--minutes", type=float, help="that a case may take, instead of its own")
    parser.add_argument(
        "--checkouts", metavar="DIR", help=f"clones of public repositories; also {VARIABLE}"
    )
    parser.add_argument(
        "--table", action="store_true", help="measure nothing, rewrite the tables of README.md"
    )
    parser.add_argument("--list", action="store_true", help="tell the cases")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--force", action="store_true", help="measure what is known, too")
    again.add_argument(
        "--keep", action="store_true", help="measure only what no version has measured"
    )
    parser.add_argument(
        "--alone", metavar="CASE", help="measure one case in this process, print the result as JSON"
    )
    return parser


def _question(name: str) -> Question:
    if name not in QUESTIONS:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(QUESTIONS)}")
    return QUESTIONS[name]


if __name__ == "__main__":
    sys.exit(main())
