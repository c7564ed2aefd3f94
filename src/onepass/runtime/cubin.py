"""What a CUDA binary says of its kernel: registers per thread and bytes of stack, read from its `.nv.info` section.

The section is a list of attributes: format, name, then two bytes of value or of size. Those with a size carry pairs of
(symbol, value). The binary of one kernel has one of each.
"""

from __future__ import annotations

import struct

_SIZED = 0x04  # the format of an attribute that carries bytes
_FRAME_SIZE, _REGISTERS = 0x11, 0x2F


def cubin_resources(binary: bytes) -> tuple[int, int]:
    """(registers per thread, bytes of stack); ValueError where the binary is not understood."""
    info = _section(binary, b".nv.info")
    found: dict[int, int] = {}
    at = 0
    while at + 4 <= len(info):
        kind, name, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if kind == _SIZED:
            if name in (_FRAME_SIZE, _REGISTERS) and size == 8:
                found[name] = max(found.get(name, 0), struct.unpack_from("<I", info, at + 4)[0])
            at += size
    if _REGISTERS not in found:
        raise ValueError("no register count in the binary")
    return found[_REGISTERS], found.get(_FRAME_SIZE, 0)


def _section(binary: bytes, wanted: bytes) -> bytes:
    if binary[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    try:
        (table,) = struct.unpack_from("<Q", binary, 0x28)
        entry, count, names = struct.unpack_from("<HHH", binary, 0x3A)
        headers = [struct.unpack_from("<IIQQQQ", binary, table + k * entry) for k in range(count)]
        strings = headers[names][4]
        for name, _, _, _, offset, size in headers:
            start = strings + name
            if binary[start : binary.index(b"\0", start)] == wanted:
                return binary[offset : offset + size]
    except (struct.error, IndexError) as error:
        raise ValueError(f"a broken ELF file: {error}") from error
    raise ValueError(f"no section {wanted.decode()}")
