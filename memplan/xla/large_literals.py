"""Large constants of a serialized module, removed while the module is read and written as text.

XLA prints every number of a constant, and reads it again: 16 MiB took nine seconds. In the text, `constant({...})` with
an attribute for its number replaces the constant. This file reads protobuf's wire format: a message is a sequence of
fields, each a key (number and type) and a content. Field numbers are those of XLA's hlo.proto.
"""

from collections.abc import Callable, Iterator

LARGE_NBYTES = 1 << 16  # as text: 40 ms
_COMPUTATIONS, _INSTRUCTIONS, _LITERAL, _FRONTEND_ATTRIBUTES = 3, 2, 8, 68
_MAP, _KEY, _VALUE = 1, 1, 2
_MARK = b"large_literal"

Change = Callable[[bytes], bytes | None]


def set_aside(proto: bytes) -> tuple[bytes, list[bytes]]:
    """A serialized HloModuleProto without its large literals, and the literals."""
    numbers: dict[bytes, int] = {}

    def without(instruction: bytes) -> bytes:
        literal = _field(instruction, _LITERAL)
        if len(literal) < LARGE_NBYTES:
            return instruction
        number = numbers.setdefault(literal, len(numbers))
        entry = _bytes_field(_KEY, _MARK) + _bytes_field(_VALUE, str(number).encode())
        mark = _bytes_field(_FRONTEND_ATTRIBUTES, _bytes_field(_MAP, entry))  # a second one is added to the first
        return _changed(instruction, _LITERAL, lambda _: None) + mark

    return _with_instructions(proto, without), list(numbers)


def put_back(proto: bytes, literals: list[bytes]) -> bytes:
    """A serialized HloModuleProto with its literals restored."""

    def restored(instruction: bytes) -> bytes:
        found = list[int]()

        def unmarked(entry: bytes) -> bytes | None:
            if _field(entry, _KEY) != _MARK:
                return entry
            found.append(int(_field(entry, _VALUE)))
            return None

        rest = _changed(instruction, _FRONTEND_ATTRIBUTES, lambda one: _changed(one, _MAP, unmarked))
        if not found:
            return instruction
        return _changed(rest, _LITERAL, lambda _: None) + _bytes_field(_LITERAL, literals[found[0]])

    return _with_instructions(proto, restored) if literals else proto


def _with_instructions(proto: bytes, change: Change) -> bytes:
    """The module with its large literals replaced."""

    def of_large(one: bytes, change: Change) -> bytes | None:
        return change(one) if len(one) >= LARGE_NBYTES else one

    def computation(one: bytes) -> bytes | None:
        return of_large(one, lambda large: _changed(large, _INSTRUCTIONS, lambda op: of_large(op, change)))

    return _changed(proto, _COMPUTATIONS, computation)


def _changed(message: bytes, number: int, change: Change) -> bytes:
    """A message with the contents of one field changed, at every occurrence; removed for None."""
    parts = list[bytes]()
    for one, begin, content, end in _fields(message):
        if one != number:
            parts.append(message[begin:end])
        elif (made := change(message[content:end])) is not None:
            parts.append(_bytes_field(number, made))
    return b"".join(parts)


def _field(message: bytes, number: int) -> bytes:
    """The content of a field; b"" if it is absent."""
    return next((message[content:end] for one, _, content, end in _fields(message) if one == number), b"")


def _fields(message: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Field number, start of the field, start and end of its content."""
    at = 0
    while at < len(message):
        begin = at
        key, at = _varint(message, at)
        content = at
        match key & 7:
            case 0:
                _, at = _varint(message, at)
            case 1:
                at += 8
            case 2:
                length, content = _varint(message, at)
                at = content + length
            case 5:
                at += 4
            case wire_type:
                raise ValueError(f"no type of a protobuf field: {wire_type}")
        yield key >> 3, begin, content, at


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """The number, and its end."""
    found = shift = 0
    while True:
        byte = message[at]
        found |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return found, at


def _bytes_field(number: int, content: bytes) -> bytes:
    return _as_varint(number << 3 | 2) + _as_varint(len(content)) + content


def _as_varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])
