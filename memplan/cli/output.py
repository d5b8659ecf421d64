"""Output of the commands: results, progress, errors, files."""

import contextlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import typer
from rich.console import Console
from rich.text import Text

from memplan import api
from memplan.compilation.deadline import CTRL_C
from memplan.errors import InfeasibleBudgetError, MemplanError, TimeLimitError
from memplan.report.progress import Stages
from memplan.report.result import Interrupted, Result
from memplan.report.views.table import printable

# Exit codes.
FAILED = 1
USAGE = 2
INFEASIBLE = 3
INTERRUPTED = 130  # by Ctrl-C, as shells count it
FINDINGS = 1  # of the doctor

STDOUT = Path("-")


@contextlib.contextmanager
def exit_on_error(debug: bool) -> Iterator[None]:
    """Turn an error into one message on standard error and an exit code."""
    try:
        yield
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:
        if debug:
            traceback.print_exc()
        message, code = _explanation(error)
        print_error(message)
        raise typer.Exit(code) from None


def print_error(message: str) -> None:
    text = Text.assemble(("error: ", "bold red"), printable(message))
    Console(stderr=True, highlight=False).print(text, soft_wrap=True)


def _explanation(error: Exception) -> tuple[str, int]:
    if isinstance(error, InfeasibleBudgetError):
        return str(error), INFEASIBLE
    if isinstance(error, TimeLimitError):
        return str(error), FAILED
    if isinstance(error, MemplanError):
        return str(error), USAGE
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    return (
        f"{type(error).__name__}: {error}{notes}\nRun again with --debug for the traceback.",
        FAILED,
    )


@contextlib.contextmanager
def progress(*, results: bool = False) -> Iterator[Stages]:
    """Show progress on standard error. The user's prints go there too, unless they are results."""
    with contextlib.ExitStack() as stack:
        stage = stack.enter_context(Stages(Console(stderr=True), lines=results))
        stack.enter_context(api.progress(stage))
        if not results:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield stage


def rows_done[Study: Result](study: Callable[[], Study]) -> Study:
    """A study's result, with the rows that are done if Ctrl-C ends it."""
    try:
        return study()
    except Interrupted as end:
        return cast(Study, end.result)


def exit_if_interrupted(ended_by: str) -> None:
    """Exit by the code of Ctrl-C, if that ended a study."""
    if ended_by == CTRL_C:
        raise typer.Exit(INTERRUPTED)


def check_writable(json: Path | None, html: Path | None = None) -> None:
    """Refuse a file that cannot be written, before minutes of work."""
    if html == STDOUT:
        raise typer.BadParameter(
            "only JSON can be written to standard output; give a file name for the page.",
            param_hint="--html",
        )
    if json is not None and json == html:
        raise typer.BadParameter(f"{json} cannot hold both --json and --html.")
    for path in (json, html):
        if path is None or path == STDOUT:
            continue
        folder = path.parent
        if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            reason = "it is a folder" if path.is_dir() else f"{folder} is not a writable folder"
            raise typer.BadParameter(f"{path} cannot be written: {reason}.")


def check_extra(
    path: Path | None,
    option: str,
    package: str,
    extra: str,
    *used: Path | None,
) -> None:
    """Refuse a file if another option writes it, or if the package that writes it is missing.

    Args:
      package, extra: the package, and the extra of memplan that installs it.
      used: files of other options.
    """
    if path is None:
        return
    if path in (STDOUT, *used):
        raise typer.BadParameter("give it a file name of its own.", param_hint=option)
    if importlib.util.find_spec(package) is None:
        raise typer.BadParameter(
            f"it needs {package}: pip install 'memplan[{extra}]'.", param_hint=option
        )
    check_writable(path)


def print_result(result: Result, json: Path | None, html: Path | None) -> None:
    """Write the files, and print the tables unless standard output is for JSON alone."""
    if json == STDOUT:
        print_line(result.to_json())
    elif json is not None:
        save(json, result.save_json)
    if html is not None:
        save(html, result.save_html)
    if json != STDOUT:
        console = Console()
        if console.is_terminal:
            console.print(result)
        else:  # a file or a pipe has no width of its own
            print_line(str(result))


def save(path: Path, write: Callable[[Path], None]) -> None:
    try:
        write(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise typer.BadParameter(f"{path} cannot be written: {reason.rstrip('.')}.") from error
    Console(stderr=True).print(Text(f"memplan: wrote {path}"), soft_wrap=True)


def print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
