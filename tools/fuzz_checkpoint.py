# SPDX-License-Identifier: Apache-2.0
"""Feeds damaged and forged checkpoints to what reads them: each must be accepted, or refused by a CheckpointError.

    python tools/fuzz_checkpoint.py --inputs 1000000 --seed 0

Good files are changed byte by byte and field by field; most of them then get the right checksum, so that what stands
behind the checksums is reached. Any other error, more than two seconds for one input, or memory above 64 times the
input and 1 MiB is a finding, which is printed with the line that repeats it.
"""

from __future__ import annotations

import argparse
import base64
import copy
import json
import random
import re
import signal
import sys
import time
import tracemalloc
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hyper_parallel.core.distributed_checkpoint.chunks import (
    ChunkGrid,
    ChunkList,
    Cut,
    chunk_of,
)
from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.format import (
    BLOCK,
    Stored,
    from_bytes,
    to_bytes,
)
from hyper_parallel.core.distributed_checkpoint.header import (
    CRC_PLACE,
    build_header,
    parse_header,
)
from hyper_parallel.core.distributed_checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from hyper_parallel.core.dtensor.placement_types import (
    FusedShard,
    RaggedShard,
    ZigzagShard,
)

TAG = "0123456789abcdef"
MOST_SECONDS = 2.0  # of processor time, so that a busy machine finds nothing
MEASURED = 50  # of so many inputs the memory of one is measured, which is slow


@dataclass(frozen=True)
class Input:
    """The bytes of a file, or of its beginning, and how long the whole file is."""

    data: bytes
    file_size: int


@dataclass(frozen=True)
class Target:
    """Something that reads files from outside."""

    corpus: Callable[[], list[Input]]
    read: Callable[[bytes, int], Any]
    text: Callable[[bytes], bytes]  # the JSON in a file
    sealed: Callable[[bytes], bytes]  # a file with this JSON, its checksum right


@dataclass
class Result:
    """What came of a run."""

    accepted: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)


# --- good files


def metadata_corpus() -> list[Input]:
    """Files of each kind of layout, tensor, object and path."""
    objects = [
        {
            "step": 12,
            "lr": 0.1,
            "name": "run",
            "none": None,
            "deep": [[[{"a": [1, 2.5, True]}]]],
        },
        {
            "t": (1, b"ab"),
            "s": {1, "a"},
            "d": {1: 2, (3,): 4},
            "f": [float("nan"), 1j],
            "c": Counter("aab"),
        },
        {
            "o": OrderedDict(a=1),
            "n": np.arange(6, dtype=np.int16).reshape(2, 3),
            "x": np.float32(1.5),
            "": {"$": 1},
        },
        {},
    ]
    files = [
        _metadata(tensors, plain)
        for tensors, plain in zip(_tensors(), objects, strict=True)
    ]
    return [Input(data, len(data)) for data in map(to_bytes, files)]


def _tensors() -> Iterator[dict[str, TensorStorageMetadata]]:
    grid = Cut((2, 4), range(8), ((1,), ()), names=("dp", "tp"))
    fused = Cut((4,), (3, 1, 2, 0), ((0,), ()), {0: FusedShard(0, (16, 8, 8))})
    zigzag = Cut((4,), range(4), ((), (0,)), {1: ZigzagShard(1)})
    ragged = Cut((3,), range(3), ((0,), ()), {0: RaggedShard(0, (20, 0, 12))})
    nested = Cut((2, 2, 2), range(8, 16), ((2, 0), ()))
    boxes = [
        ((0, 2), (0, 1)),
        ((0, 1), (1, 2)),
        ((1, 2), (2, 1)),
        ((2, 1), (0, 2)),
        ((1, 1), (1, 1)),
    ]
    pinwheel = ChunkList(tuple(map(chunk_of, boxes)), (0, 1, 2, 3, 4))
    w = _tensor("bfloat16", (32, 6), ChunkGrid((32, 6), grid, 1), requires_grad=True)
    yield {
        "model.w": w,
        "model.qkv": _tensor("float32", (32, 4), ChunkGrid((32, 4), fused)),
        "model.ids": _tensor("int64", (4, 32), ChunkGrid((4, 32), zigzag)),
        "model.rows": _tensor("float32", (32, 4), ChunkGrid((32, 4), ragged)),
    }
    yield {
        "model.w": w,
        "model.tied": TensorStorageMetadata(w.properties, w.size, w.chunks, "model.w"),
    }
    yield {
        "model.list": _tensor("complex64", (3, 3), pinwheel),
        "z": _tensor("int8", (0, 7), ChunkGrid((0, 7), nested)),
    }
    yield {
        f"model.{n}": _tensor("float16", (4, n), ChunkGrid((4, n), nested, 1))
        for n in range(12)
    }


def _tensor(
    dtype: str, size: tuple[int, ...], chunks: Any, *, requires_grad: bool = False
) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(dtype, requires_grad), size, chunks)


def _metadata(
    tensors: dict[str, TensorStorageMetadata], objects: dict[str, Any]
) -> Metadata:
    paths: dict[str, Any] = {
        name: tuple(name.split(".")) for name in tensors if "." in name
    }
    paths.update({name: ("objects", number) for number, name in enumerate(objects)})
    entries = {**tensors, **{name: BytesStorageMetadata() for name in objects}}
    return Metadata(entries, paths, Stored(TAG, 16, objects, "hyper_parallel"))


def header_corpus() -> list[Input]:
    """The beginnings of data files."""
    pieces: list[list[tuple[str, str, tuple[int, ...]]]] = [
        [],
        [
            ("model.w@0,4", "bfloat16", (8, 4)),
            ("bias", "float32", (3,)),
            ("flag", "bool", ()),
        ],
        [
            ("c", "complex128", (2, 3)),
            ("e", "float8_e5m2", (5000,)),
            ("n", "int64", (0, 4)),
            ("u", "uint16", (3, 3, 3)),
        ],
        [(f"layers.{n}.w@{n},0", "float16", (n, 512)) for n in range(8)],
    ]
    made = []
    for chunks in pieces:
        head, entries = build_header(chunks, TAG, 3)
        made.append(Input(head, len(head) + sum(entry.nbytes for entry in entries)))
    return made


def _header_text(data: bytes) -> bytes:
    return data[8:].rstrip(b" ")


def _sealed_header(text: bytes) -> bytes:
    padded = text.ljust(-(-(8 + len(text)) // BLOCK) * BLOCK - 8)
    head = bytearray(len(padded).to_bytes(8, "little") + padded)
    head[CRC_PLACE] = b"00000000"
    head[CRC_PLACE] = b"%08x" % zlib.crc32(head)
    return bytes(head)


def _sealed_metadata(text: bytes) -> bytes:
    body = re.sub(rb',\s*"crc32":\s*"[^"]*"\s*}\s*\Z', b"", text)
    return body + b',\n"crc32":"%08x"}\n' % zlib.crc32(body)


TARGETS = {
    "metadata": Target(
        metadata_corpus,
        lambda data, _: from_bytes(data, "f"),
        lambda data: data,
        _sealed_metadata,
    ),
    "header": Target(
        header_corpus,
        lambda data, size: parse_header(data, size, "f"),
        _header_text,
        _sealed_header,
    ),
}


# --- changes

NUMBERS = (
    0, 1, -1, 2, 3, 255, 4096, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63), 10**999,
)  # fmt: skip
VALUES = (
    *NUMBERS, None, True, False, 0.0, 1.0, -0.5, 1e308, "", "a", "0", "@a", "w@0", "\ud800", "../..", "nan", "AAAA",
    "int8", [], {}, [[]], [0], [1, 2], [[0], [1], 0], {"a": 1}, {"$tuple": []}, {"$set": [1, 1]}, {"$pickle": "AAAA"},
    {"$dict": [[[], 1]]}, {"$bytes": "="}, {"$complex": [1, 2]}, {"$dtype": "bool"},
    {"$ndarray": {"dtype": "int8", "shape": [2**40], "data": ""}},
)  # fmt: skip
TOKENS = (
    b"[", b"]", b"{", b"}", b'"', b",", b":", b"\\", b"\\u", b"\\ud800", b"NaN", b"-Infinity", b"1e999", b"-", b"0",
    b"00", b"[" * 100, b'{"":' * 70, b"9" * 1100, b"\xff", b"\xed\xa0\x80", b"\0", b" " * 50, b"true", b"null",
)  # fmt: skip


def _flip(data: bytearray, chance: random.Random) -> None:
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _truncate(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(len(data)) :]


def _remove(data: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(data))
    del data[start : start + chance.randrange(1, 20)]


def _insert(data: bytearray, chance: random.Random) -> None:
    place = chance.randrange(len(data))
    data[place:place] = chance.choice(TOKENS)


def _splice(data: bytearray, chance: random.Random) -> None:
    start, place = chance.randrange(len(data)), chance.randrange(len(data))
    data[place:place] = data[start : start + chance.randrange(1, 60)]


def _renumber(data: bytearray, chance: random.Random) -> None:
    if places := list(re.finditer(rb"-?\d+", data)):
        found = chance.choice(places)
        data[found.start() : found.end()] = b"%d" % chance.choice(NUMBERS)


def _repeat_key(data: bytearray, chance: random.Random) -> None:
    if places := list(re.finditer(rb'"[^"]*":', data)):
        found = chance.choice(places)
        data[found.start() : found.start()] = found.group() + b"0,"


BYTE_CHANGES = (_flip, _truncate, _remove, _insert, _splice, _renumber, _repeat_key)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(holder, key) of everything in a JSON value."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from _places(inner)


def _change_field(root: Any, chance: random.Random) -> None:
    places = list(_places(root))
    if not places:
        return
    holder, key = chance.choice(places)
    other, place = chance.choice(places)
    match chance.randrange(5):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[chance.choice([str(place), "", "$tuple", "@", "\ud800"])] = (
                copy.deepcopy(holder[key])
            )
        case 1:
            holder.insert(key, copy.deepcopy(holder[key]))
        case 2:
            holder[key] = copy.deepcopy(other[place])
        case _:
            holder[key] = copy.deepcopy(chance.choice(VALUES))


def changed(target: Target, good: Input, chance: random.Random) -> Input:
    """A bad file, most likely, made of a good one."""
    if chance.random() < 0.5:
        root = json.loads(target.text(good.data))
        for _ in range(chance.randrange(1, 4)):
            _change_field(root, chance)
        separators = (",", ":") if chance.random() < 0.9 else (" , ", " : ")
        text = json.dumps(root, separators=separators).encode()
        data = target.sealed(text)
    else:
        text = target.text(good.data)
        is_sealed = chance.random() < 0.5
        made = bytearray(text if is_sealed else good.data)
        for _ in range(chance.randrange(1, 4)):
            if made:
                chance.choice(BYTE_CHANGES)(made, chance)
        data = target.sealed(bytes(made)) if is_sealed else bytes(made)
    size = (
        good.file_size - len(good.data) + len(data)
        if chance.random() < 0.9
        else chance.choice(NUMBERS[:-1])
    )
    return Input(data, size)


# --- running


class TooSlowError(BaseException):
    """Not an Exception, so that nothing takes it for one of its own."""


@contextmanager
def _limited() -> Iterator[None]:
    """Ends what runs for much too long, by processor time."""

    def stop(*_: Any) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def tried(target: Target, made: Input, *, is_measured: bool) -> bool | str:
    """Whether it was accepted; a text for a finding."""
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
    if is_measured:
        tracemalloc.start()
    try:
        target.read(made.data, made.file_size)
        is_accepted = True
    except CheckpointError:
        is_accepted = False
    except TooSlowError:
        return f"more than {MOST_SECONDS} seconds"
    except BaseException as error:  # noqa: BLE001 - any other error is what is looked for
        return repr(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1] if is_measured else 0
        tracemalloc.stop()
    if peak > 64 * len(made.data) + (1 << 20):
        return f"{peak} bytes of memory for an input of {len(made.data)}"
    return is_accepted


def run(inputs: int, seed: int) -> Result:
    """As many inputs, shared by the targets."""
    result = Result()
    with _limited():
        for name, target in TARGETS.items():
            chance = random.Random(f"{name} {seed}")
            corpus = target.corpus()
            start = time.perf_counter()
            for number in range(inputs // len(TARGETS)):
                good = chance.choice(corpus)
                made = good if number % 100 == 0 else changed(target, good, chance)
                outcome = tried(target, made, is_measured=number % MEASURED == 0)
                if isinstance(outcome, str):
                    result.findings.append(_told(name, made, outcome))
                else:
                    (result.accepted if outcome else result.refused)[name] += 1
            result.seconds[name] = time.perf_counter() - start
    return result


def _told(name: str, made: Input, what: str) -> str:
    text = base64.b64encode(made.data).decode()
    return f'{name}: {what}\n    TARGETS["{name}"].read(base64.b64decode("{text}"), {made.file_size})'


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    result = run(options.inputs, options.seed)
    print(
        f"{'target':10} {'inputs':>10} {'accepted':>10} {'refused':>10} {'inputs/s':>10}"
    )
    for name in TARGETS:
        accepted, refused = result.accepted[name], result.refused[name]
        print(
            f"{name:10} {accepted + refused:>10,} {accepted:>10,} {refused:>10,} "
            f"{(accepted + refused) / result.seconds[name]:>10,.0f}"
        )
    print(f"{len(result.findings)} findings, seed {options.seed}")
    print(*result.findings[:20], sep="\n")
    return 1 if result.findings else 0


if __name__ == "__main__":
    sys.exit(main())
