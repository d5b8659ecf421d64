"""Planned modules changed behind memplan's judge: what XLA compiles and what must not run.

The step's state is on the host: parameters are fetched, and written back in place of what was fetched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

Lines = list[str]

_FETCH = re.compile(r"  %(\S+) = (.*) copy-start\(%(params\S*)\)")
_BACK = re.compile(r"  %(\S+) = \(\S*S\(5\)\S*, .* copy-start\(%(\S+)\)")
_DONE = re.compile(r"  %(\S+) = (.*) copy-done\(%(\S+)\)")


def mutants(text: str) -> Iterator[tuple[str, str]]:
    """(what is wrong, the module): every way for each parameter that something reads after its new value left."""
    lines = text.splitlines()
    dones = {match[3]: (match[1], match[2]) for line in lines if (match := _DONE.match(line))}
    fetches = {
        dones[match[1]][0]: (match[2], match[3]) for line in lines if (match := _FETCH.match(line))
    }
    backs = {match[2]: at for at, line in enumerate(lines) if (match := _BACK.match(line))}
    for fetched, (pair, parameter) in fetches.items():
        readers = [at for at, line in enumerate(lines) if _reads(line, fetched)]
        update = next((at for at in readers if _name(lines[at]) in backs), None)
        if update is None:
            continue
        back = backs[_name(lines[update])]
        late = [at for at in readers if at > back and "copy-start" not in lines[at]]
        own = f"  %m.start = {pair} copy-start(%{parameter})"
        done = f"  %m.done = {dict(dones.values())[fetched]} copy-done(%m.start)"
        for reader in late[:1]:
            behind = [
                *lines[:reader],
                own,
                done,
                lines[reader].replace(f"%{fetched}", "%m.done"),
                *lines[reader + 1 :],
            ]
            yield f"{parameter} is fetched again where its new value lies", _text(behind)
            crossing = [
                *lines[:back], _on_stream(1, own), _on_stream(0, lines[back]), *lines[back + 1 : reader], done,
                lines[reader].replace(f"%{fetched}", "%m.done"), *lines[reader + 1 :],
            ]  # fmt: skip
            yield f"{parameter} is fetched while its new value is written there", _text(crossing)
        old = lines[back].replace(f"%{_name(lines[update])})", f"%{fetched})")
        yield (
            f"the write-back of {parameter} begins before the update",
            _text([*lines[:back], old, *lines[back + 1 :]]),
        )
        substitute = next(name for _, name in fetches.values() if name != parameter)
        wrong = [
            line.replace(f"copy-start(%{parameter})", f"copy-start(%{substitute})")
            for line in lines
        ]
        yield f"{substitute} is fetched in place of {parameter}", _text(wrong)


def _on_stream(number: int, copy: str) -> str:
    """XLA of jax 0.11 deals copies that name no stream to several in turn: two may be ordered by chance."""
    attribute = f'frontend_attributes={{_xla_stream_annotation="{number}"}}'
    return re.sub(r"copy-start\(\S+\)", lambda match: f"{match[0]}, {attribute}", copy)


def _reads(line: str, name: str) -> bool:
    return re.search(rf"\(.*%{re.escape(name)}[,)]", line) is not None


def _name(line: str) -> str:
    return line.split("%", 1)[1].split(" ", 1)[0]


def _text(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n"
