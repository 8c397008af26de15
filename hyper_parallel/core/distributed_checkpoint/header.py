# SPDX-License-Identifier: Apache-2.0
"""The header of a data file: written, and read with the distrust that a file from outside deserves.

    head, entries = build_header([("model.w", "bfloat16", (4, 6))], tag="0123456789abcdef", rank=0)
    parse_header(head, file_size, "data.safetensors").entries["model.w"].start      where the bytes of w begin

A data file is a safetensors file: 8 bytes with the length of the header, the header in JSON, the data. In ours the
header has a checksum of itself, the data begins at a multiple of 4096, and the last tensor, ``@xxh3``, has the
checksum of every block of 4096 bytes of every chunk.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.core.distributed_checkpoint.checksum import BLOCK
from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.metadata import ITEM_SIZES, VERSION
from hyper_parallel.core.distributed_checkpoint.strict_json import (
    Field,
    is_text,
    parse,
    quoted,
)
from hyper_parallel.platform.error_codes import coded

SUMS = "@xxh3"  # the key of the checksums
METADATA = "__metadata__"
CODES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "uint16": "U16", "int16": "I16", "float16": "F16", "bfloat16": "BF16",
    "uint32": "U32", "int32": "I32", "float32": "F32",
    "uint64": "U64", "int64": "I64", "float64": "F64",
}  # fmt: skip
DTYPES = {code: dtype for dtype, code in CODES.items()}
FOREIGN_CODES = {**CODES, "complex64": "C64"}
FOREIGN_DTYPES = {code: dtype for dtype, code in FOREIGN_CODES.items()}
PARTS = {
    "complex64": "float32",
    "complex128": "float64",
}  # stored as two of these, along one more dim

MOST_HEADER_BYTES = 100_000_000  # the same limit as in the safetensors library
MOST_DIMS = 64
PREFIX = b'{"__metadata__":{"crc32":"'  # then eight digits
NO_CRC = b"00000000"
CRC_PLACE = slice(8 + len(PREFIX), 8 + len(PREFIX) + 8)  # in the file
OUR_FIELDS = ("crc32", "format", "version", "tag", "rank")


@dataclass(frozen=True)
class Entry:
    """A chunk in a data file: what its elements are there, where its bytes are, the number of its first sum."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # in the file
    nbytes: int
    first_block: int

    @property
    def item_size(self) -> int:
        """Bytes of an element."""
        return ITEM_SIZES[self.dtype]

    @property
    def blocks(self) -> int:
        """How many blocks it has; the last one may be shorter."""
        return -(-self.nbytes // BLOCK)


@dataclass(frozen=True)
class Header:
    """What is in a data file. A foreign one has neither sums nor tag nor rank."""

    entries: dict[str, Entry]  # in the order of their data
    sums: Entry | None
    tag: str | None
    rank: int | None
    data_start: int
    metadata: dict[str, str] = field(default_factory=dict)


# --- writing


def build_header(
    pieces: Sequence[tuple[str, str, Sequence[int]]], tag: str, rank: int
) -> tuple[bytes, list[Entry]]:
    """(the first bytes of the file, what follows them, with the sums at the end) for chunks: (key, dtype, shape)."""
    largest_first = sorted(
        pieces, key=lambda piece: -ITEM_SIZES[piece[1]]
    )  # so that all elements are aligned
    seen: set[str] = set()
    for key, _, _ in largest_first:
        _check_key(key, seen)
    chunks = _laid_out(
        (key, *_stored(dtype, shape)) for key, dtype, shape in largest_first
    )
    blocks = sum(chunk.blocks for chunk in chunks)
    entries = [
        *chunks,
        Entry(SUMS, "uint64", (blocks,), _end(chunks), 8 * blocks, blocks),
    ]
    head = _head(_text(entries, tag, rank))
    return head, [_moved(entry, len(head)) for entry in entries]


def build_plain_header(
    pieces: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[Entry]]:
    """The same for a file that any safetensors library wrote: other metadata, no checksums."""
    largest_first = sorted(pieces, key=lambda piece: -ITEM_SIZES[piece[1]])
    entries = _laid_out(
        (key, dtype, tuple(shape)) for key, dtype, shape in largest_first
    )
    text = _json({METADATA: dict(metadata)}, entries)
    size = -(-len(text) // 8) * 8
    if size > MOST_HEADER_BYTES:
        raise coded(
            CheckpointError,
            "HP510",
            f"a header of {size} bytes: at most {MOST_HEADER_BYTES} are allowed; save fewer tensors",
        )
    head = size.to_bytes(8, "little") + text.ljust(size)
    return head, [_moved(entry, len(head)) for entry in entries]


def _check_key(key: str, seen: set[str]) -> None:
    if key.startswith("@") or key == METADATA:
        raise coded(
            CheckpointError,
            "HP510",
            f"a tensor cannot be called so: '@...' and {METADATA!r} are taken; rename it",
            field=key,
        )
    if key in seen:
        raise coded(
            CheckpointError,
            "HP510",
            "two chunks of one file have this key; rename one of the tensors",
            field=key,
        )
    seen.add(key)


def _stored(dtype: str, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """(dtype, shape) in the file, which has no complex numbers."""
    return (PARTS[dtype], (*shape, 2)) if dtype in PARTS else (dtype, tuple(shape))


def _laid_out(chunks: Iterable[tuple[str, str, tuple[int, ...]]]) -> list[Entry]:
    """One after the other, from 0."""
    entries: list[Entry] = []
    start = block = 0
    for key, dtype, shape in chunks:
        entry = Entry(
            key, dtype, shape, start, math.prod(shape) * ITEM_SIZES[dtype], block
        )
        entries.append(entry)
        start, block = start + entry.nbytes, block + entry.blocks
    return entries


def _end(entries: Sequence[Entry]) -> int:
    return entries[-1].start + entries[-1].nbytes if entries else 0


def _moved(entry: Entry, by: int) -> Entry:
    return Entry(
        entry.key,
        entry.dtype,
        entry.shape,
        entry.start + by,
        entry.nbytes,
        entry.first_block,
    )


def _text(entries: Sequence[Entry], tag: str, rank: int) -> bytes:
    ours = {
        "crc32": NO_CRC.decode(),
        "format": "hyper_parallel",
        "version": str(VERSION),
        "tag": tag,
        "rank": str(rank),
    }
    return _json({METADATA: ours}, entries)


def _json(header: dict[str, Any], entries: Sequence[Entry]) -> bytes:
    for entry in entries:
        span = [entry.start, entry.start + entry.nbytes]
        header[entry.key] = {
            "dtype": FOREIGN_CODES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": span,
        }
    try:
        return json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        bad = next(entry.key for entry in entries if not is_text(entry.key))
        raise coded(
            CheckpointError,
            "HP510",
            "a tensor's name is not valid Unicode; rename it",
            field=ascii(bad),
        ) from error


def _head(text: bytes) -> bytes:
    """The length and the text, padded so that the data begins at a block, with the checksum in its place."""
    size = -(-(8 + len(text)) // BLOCK) * BLOCK - 8
    if size > MOST_HEADER_BYTES:
        raise coded(
            CheckpointError,
            "HP510",
            f"a header of {size} bytes: at most {MOST_HEADER_BYTES} are allowed; save fewer tensors",
        )
    head = bytearray(size.to_bytes(8, "little") + text.ljust(size))
    head[CRC_PLACE] = b"%08x" % zlib.crc32(head)
    return bytes(head)


# --- reading


def read_head(fd: int, file: object) -> bytes:
    """The first bytes of an open file, up to the data. OSError is the caller's."""
    size = os.fstat(fd).st_size
    start = _pread(fd, 8, 0)
    length = _header_length(start, size, file)
    head = start + _pread(fd, length, 8)
    if len(head) < 8 + length:
        raise coded(
            CheckpointError,
            "HP503",
            f"the file ends at byte {len(head)}, within the header",
            file=str(file),
            field="header",
        )
    return head


def _pread(fd: int, size: int, at: int) -> bytes:
    """So many bytes, or less where the file ends; a single call may give less anywhere."""
    parts, have = [], 0
    while have < size and (part := os.pread(fd, size - have, at + have)):
        parts.append(part)
        have += len(part)
    return b"".join(parts)


def parse_header(
    head: bytes, file_size: int, file: object, *, ours: bool = True
) -> Header:
    """What the first bytes of a file say, every word of it checked; ``ours=False`` for any safetensors file."""
    name = str(file)
    length = _header_length(head, file_size, name)
    if len(head) != 8 + length:
        raise coded(
            CheckpointError,
            "HP503",
            f"{8 + length} bytes expected, {len(head)} came",
            file=name,
            field="header",
        )
    if ours:
        _check_crc(head, name)
        if len(head) % BLOCK:
            raise coded(
                CheckpointError,
                "HP503",
                f"the data must begin at a multiple of {BLOCK}",
                file=name,
                field="length",
            )
    root = parse(head[8:], name)
    metadata = root.at(METADATA, root.object().get(METADATA, {}))
    texts = _metadata(metadata)
    tensors = [root[key] for key in root.object() if key != METADATA]
    chunks = _entries(
        tensors, len(head), file_size, DTYPES if ours else FOREIGN_DTYPES, name
    )
    if not ours:
        return Header(
            {chunk.key: chunk for chunk in chunks}, None, None, None, len(head), texts
        )
    tag, rank = _identity(metadata)
    sums = _sums(chunks, name)
    return Header(
        {chunk.key: chunk for chunk in chunks[:-1]}, sums, tag, rank, len(head), texts
    )


def _header_length(head: bytes, file_size: int, file: object) -> int:
    if len(head) < 8:
        raise coded(
            CheckpointError,
            "HP503",
            f"a data file has at least 8 bytes, this has {len(head)}",
            file=str(file),
            field="length",
        )
    length = int.from_bytes(head[:8], "little")
    if length > MOST_HEADER_BYTES or 8 + length > file_size:
        told = f"a header of {length} bytes in a file of {file_size}; the limit is {MOST_HEADER_BYTES}"
        raise coded(CheckpointError, "HP503", told, file=str(file), field="length")
    return length


def _check_crc(head: bytes, file: str) -> None:
    digits = head[CRC_PLACE]
    if not head.startswith(PREFIX, 8) or not re.fullmatch(rb"[0-9a-f]{8}", digits):
        message = (
            "a header that begins with its checksum was expected; "
            "this was not written by hyper_parallel, or is damaged"
        )
        raise coded(CheckpointError, "HP503", message, file=file, field="header")
    actual = zlib.crc32(
        head[CRC_PLACE.stop :], zlib.crc32(NO_CRC, zlib.crc32(head[: CRC_PLACE.start]))
    )
    if int(digits, 16) != actual:
        told = f"its checksum is {actual:08x}, and {digits.decode()} is stored; the file is damaged"
        raise coded(CheckpointError, "HP503", told, file=file, field="header")


def _metadata(found: Field) -> dict[str, str]:
    for key in found.object():
        found[key].text()
    return found.object()


def _identity(metadata: Field) -> tuple[str, int]:
    """The tag and the rank of one of our files."""
    metadata.record(*OUR_FIELDS)
    version, tag, rank = (metadata[name].text() for name in ("version", "tag", "rank"))
    if metadata["format"].text() != "hyper_parallel":
        metadata["format"].expected('"hyper_parallel"')
    if re.fullmatch("[1-9][0-9]{0,8}", version) and int(version) > VERSION:
        metadata["version"].fail(
            f"written by a newer version {version}, this library reads up to {VERSION}"
        )
    if version != str(VERSION):
        metadata["version"].expected(f'"{VERSION}"')
    if not re.fullmatch("[0-9a-f]{16}", tag):
        metadata["tag"].expected("16 hexadecimal digits")
    if not re.fullmatch("0|[1-9][0-9]{0,9}", rank) or int(rank) >= 2**31:
        metadata["rank"].expected("the digits of a number below 2**31")
    return tag, int(rank)


def _entries(
    tensors: Sequence[Field],
    data_start: int,
    file_size: int,
    dtypes: Mapping[str, str],
    file: str,
) -> list[Entry]:
    """The tensors in the order of their data, which they fill without holes."""
    entries: list[Entry] = []
    at = block = 0
    for start, end, _, tensor in sorted(
        (*_span(tensor), n, tensor) for n, tensor in enumerate(tensors)
    ):
        dtype, shape, nbytes = _kind(tensor, dtypes)
        if (start, end) != (at, at + nbytes):
            told = f"{[at, at + nbytes]} for {tensor['dtype'].value} of shape {list(shape)} after those before it"
            tensor["data_offsets"].fail(f"expected {told}, got {[start, end]}")
        entries.append(
            Entry(str(tensor.keys[0]), dtype, shape, data_start + at, nbytes, block)
        )
        at, block = end, block + entries[-1].blocks
    if data_start + at != file_size:
        told = f"the header tells of {data_start + at} bytes, the file has {file_size}; it was cut short or added to"
        raise coded(CheckpointError, "HP503", told, file=file)
    return entries


def _span(tensor: Field) -> tuple[int, int]:
    tensor.at("name", tensor.keys[0]).text()
    tensor.record("dtype", "shape", "data_offsets")
    span = tensor["data_offsets"].integers(0)
    if len(span) != 2:
        tensor["data_offsets"].expected("a list of 2")
    return span[0], span[1]


def _kind(tensor: Field, dtypes: Mapping[str, str]) -> tuple[str, tuple[int, ...], int]:
    """(dtype, shape, bytes) of a tensor."""
    code, shape = tensor["dtype"].text(), tensor["shape"].integers(0)
    if code not in dtypes:
        tensor["dtype"].expected(f"one of {', '.join(dtypes)}")
    if len(shape) > MOST_DIMS:
        tensor["shape"].expected(f"a list of at most {MOST_DIMS}")
    nbytes = math.prod(shape) * ITEM_SIZES[dtypes[code]]
    if nbytes >= 2**63:
        tensor["shape"].fail("more than 2**63 bytes")
    return dtypes[code], shape, nbytes


def _sums(entries: Sequence[Entry], file: str) -> Entry:
    """The last tensor, which must have a sum for each block of the others."""
    for entry in entries[:-1]:
        if entry.key.startswith("@"):
            raise coded(
                CheckpointError,
                "HP503",
                "names do not begin with '@'",
                file=file,
                field=quoted(entry.key),
            )
    last = entries[-1] if entries else None
    if last is None or (last.key, last.dtype, last.shape) != (
        SUMS,
        "uint64",
        (last.first_block,),
    ):
        told = f"expected this as the last tensor, U64, with a number for each {BLOCK} bytes of each of the others"
        raise coded(CheckpointError, "HP503", told, file=file, field=SUMS)
    return last
