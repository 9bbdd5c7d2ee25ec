"""A static library: object files in the common `ar` format, with the table of their symbols.

The table comes first in the file: how many symbols, where the member of each one begins, and their
names. Only ELF files of 64 bits, little-endian, are read for it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

MAGIC = b"!<arch>\n"
HEADER_BYTES = 60
SYMBOL_TABLE = 2  # type of a section
GLOBAL = 1  # binding of a symbol
SECTION, SYMBOL = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IBBHQQ")


def archive(members: Mapping[str, bytes]) -> bytes:
    """The archive of named object files (names of at most 15 characters)."""
    symbols = [(name, symbol) for name, data in members.items() for symbol in exported(data)]
    names = b"".join(symbol + b"\0" for _, symbol in symbols)
    table_bytes = 4 + 4 * len(symbols) + len(names)
    at = len(MAGIC) + HEADER_BYTES + table_bytes + table_bytes % 2
    starts = {}
    for name, data in members.items():
        starts[name] = at
        at += HEADER_BYTES + len(data) + len(data) % 2
    table = struct.pack(f">{1 + len(symbols)}I", len(symbols), *(starts[n] for n, _ in symbols))
    parts = [MAGIC, _member("", table + names)]
    parts += [_member(name, data) for name, data in members.items()]
    return b"".join(parts)


def _member(name: str, data: bytes) -> bytes:
    head = f"{name + '/':<16}{0:<12}{0:<6}{0:<6}{'644':<8}{len(data):<10}`\n"
    return head.encode() + data + b"\n" * (len(data) % 2)


def exported(code: bytes) -> list[bytes]:
    """Names of the global symbols that an ELF object file defines."""
    (start,) = struct.unpack_from("<Q", code, 40)
    size, count = struct.unpack_from("<HH", code, 58)
    sections = [SECTION.unpack_from(code, start + i * size) for i in range(count)]
    found = []
    for _, kind, _, _, offset, length, strings, *_ in sections:
        if kind != SYMBOL_TABLE:
            continue
        names = sections[strings][4]
        for at in range(offset, offset + length, SYMBOL.size):
            name, info, _, section, _, _ = SYMBOL.unpack_from(code, at)
            if info >> 4 == GLOBAL and section != 0:
                end = code.index(b"\0", names + name)
                found.append(code[names + name : end])
    return found
