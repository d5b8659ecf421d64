"""Source lines of a module that goes through text: XLA prints an instruction's stack frame, and does not read it back.

Here the number of the frame goes into the instruction's `op_name`, where XLA's passes keep it, and comes out again.
"""

import re
from collections.abc import Iterable

from memplan.xla.module import Module

_FRAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)" stack_frame_id=(\d+)')
_KEPT = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_MARK = re.compile(r"@frame(\d+)")
_TABLES = re.compile(r"\n+(?:FileNames|FunctionNames|FileLocations|StackFrames)\n.*", re.DOTALL)
_NUMBER = re.compile(r" ?stack_frame_id=\d+")


def readable(head: str, texts: Iterable[str]) -> str:
    """The text of a module that XLA reads back: without tables and frames."""
    return _NUMBER.sub("", "\n\n".join([_TABLES.sub("", head), *texts])) + "\n"


def put_into_names(module: Module) -> str:
    """Such a text with the frames in the names."""
    return readable(module.head, (_FRAME.sub(r'op_name="\1@frame\2"', text) for text in module.texts.values()))


def tables_of(module: Module) -> str:
    """The tables of files and frames in front of the computations."""
    found = _TABLES.search(module.head)
    return found[0] if found else ""


def take_out_of_names(text: str, tables: str) -> str:
    """The text of a module made of such a one, with the tables of the first and frames as XLA prints them."""

    def restored(found: re.Match[str]) -> str:
        frames = _MARK.findall(found[1])
        frame = f" stack_frame_id={frames[0]}" if frames else ""
        return f'op_name="{_MARK.sub("", found[1])}"{frame}'

    head, _, rest = _KEPT.sub(restored, text).partition("\n")
    return f"{head}{tables}\n{rest}"
