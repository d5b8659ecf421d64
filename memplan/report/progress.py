"""Shows the current stage on standard error once it takes longer than two seconds."""

from __future__ import annotations

import time
from threading import Timer
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

PATIENCE_S = 2.0


class Stages:
    """Context manager and callback `(stage, fraction)`: a bar in a terminal, else lines.

    `fraction` is in [0, 1], or None if unknown. The bar appears after `patience_s` seconds, also if
    a stage takes longer, and disappears from the terminal at the end.
    With `lines`, a terminal shows lines, too, since other output is printed during the stages.
    """

    def __init__(self, console: Console, patience_s: float = PATIENCE_S, *, lines: bool = False):
        self._console = console
        self._patience_s = patience_s
        self._live = console.is_terminal and not lines
        self._started = time.monotonic()
        self._printed = ""
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            redirect_stdout=False,
        )
        self._task = self._bar.add_task("starting", total=None)
        self._timer = Timer(patience_s, self._bar.start)
        self._timer.daemon = True

    def __enter__(self) -> Stages:
        self._started = time.monotonic()
        if self._live:
            self._timer.start()
        return self

    def __call__(self, stage: str, fraction: float | None = None) -> None:
        if self._live:
            total = None if fraction is None else 1.0
            self._bar.update(self._task, description=stage, total=total, completed=fraction)
        elif stage != self._printed and time.monotonic() - self._started >= self._patience_s:
            self._console.print(Text(f"memplan: {stage}"), soft_wrap=True)
            self._printed = stage

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._timer.cancel()
            self._timer.join()  # it may be starting the bar
            self._bar.stop()
