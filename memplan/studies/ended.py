"""Studies that the time limit or Ctrl-C ends keep the rows that are done."""

from collections.abc import Iterator

from memplan.compilation.deadline import CTRL_C, TIME_LIMIT, DeadlinePassed
from memplan.report.result import Interrupted, Result


def rows_until_ended[Row](rows: Iterator[Row]) -> tuple[tuple[Row, ...], str]:
    """The rows that are done, and what ended the study before the others; "" if nothing did."""
    done: list[Row] = []
    try:
        for row in rows:
            done.append(row)
    except DeadlinePassed:
        return tuple(done), TIME_LIMIT
    except KeyboardInterrupt:
        return tuple(done), CTRL_C
    return tuple(done), ""


def returned[Study: Result](result: Study, ended_by: str) -> Study:
    """The result of a study; if Ctrl-C ended it, it is raised inside of `Interrupted`."""
    if ended_by == CTRL_C:
        raise Interrupted(result)
    return result
