# SPDX-License-Identifier: Apache-2.0
"""Data files: round trips, boxes against numpy's slices, and every kind of damage found."""

import errno
import json
import os
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from hyper_parallel.core.distributed_checkpoint import checksum, data_file
from hyper_parallel.core.distributed_checkpoint.checksum import BLOCK
from hyper_parallel.core.distributed_checkpoint.data_file import (
    Piece,
    open_data_file,
    write_data_file,
)
from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.header import build_header, parse_header
from hyper_parallel.core.distributed_checkpoint.metadata import ITEM_SIZES

TAG = "0123456789abcdef"
TWINS = [pytest.param(checksum.fast, id="compiled"), pytest.param(None, id="python")]
RANDOM = np.random.default_rng(0)


@pytest.fixture(params=TWINS)
def twin(request, monkeypatch):
    """Both ways of reading."""
    monkeypatch.setattr(checksum, "fast", request.param)


def random_items(item_size, shape):
    """Opaque elements of random bytes."""
    return (
        RANDOM.integers(0, 256, (*shape, item_size), dtype=np.uint8)
        .view(f"V{item_size}")
        .reshape(shape)
    )


def piece(key, items, dtype=None):
    """A chunk of an array's bytes."""
    sizes = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64"}
    return Piece(
        key,
        dtype or sizes[items.itemsize],
        items.shape,
        lambda: items.reshape(-1).view(np.uint8),
    )


def write(path, **arrays):
    """A file with these arrays."""
    return write_data_file(
        path, [piece(key, items) for key, items in arrays.items()], tag=TAG, rank=3
    )


def read_all(path, **kwargs):
    """Everything in a file, compared with its sums."""
    found = {}
    with open_data_file(path, **kwargs) as file:
        for key, entry in file.header.entries.items():
            found[key] = np.empty(entry.shape, f"V{entry.item_size}")
            file.read(entry, (0,) * len(entry.shape), entry.shape, found[key])
            file.verify(entry)
    return found


# --- round trips


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 4), (17, 1000)])
def test_every_dtype_comes_back(tmp_path, shape, twin):
    path = tmp_path / "data.safetensors"
    arrays = {dtype: random_items(size, shape) for dtype, size in ITEM_SIZES.items()}
    size = write_data_file(
        path, [piece(k, items, k) for k, items in arrays.items()], tag=TAG, rank=3
    )
    assert size == path.stat().st_size
    found = read_all(path, tag=TAG, rank=3)
    assert found.keys() == arrays.keys()
    for dtype, items in arrays.items():
        assert found[dtype].tobytes() == items.tobytes()
    with open_data_file(path) as file:
        entries = file.header.entries
        assert (entries["complex64"].dtype, entries["complex64"].shape) == (
            "float32",
            (*shape, 2),
        )
        assert entries["bfloat16"].shape == shape
        assert file.header.data_start % BLOCK == 0
        assert all(
            entry.start % ITEM_SIZES[key] == 0 for key, entry in entries.items()
        ), "elements are aligned"


def test_safetensors_reads_our_files(tmp_path):
    path = tmp_path / "data.safetensors"
    arrays = {
        "a": RANDOM.random((30, 70)),
        "b.ü": np.arange(7, dtype=np.int8),
        "c": np.float32(3).reshape(()),
    }
    names = {"a": "float64", "b.ü": "int8", "c": "float32"}
    write_data_file(
        path, [piece(k, v, names[k]) for k, v in arrays.items()], tag=TAG, rank=3
    )
    with safe_open(path, "numpy") as file:
        assert set(file.keys()) == {*arrays, "@xxh3"}
        for key, expected in arrays.items():
            np.testing.assert_array_equal(file.get_tensor(key), expected)
        data = [
            arrays[key].tobytes() for key in ("a", "c", "b.ü")
        ]  # larger elements first
        blocks = [
            chunk[at : at + BLOCK]
            for chunk in data
            for at in range(0, len(chunk), BLOCK)
        ]
        sums = [xxhash.xxh3_64_intdigest(block.ljust(BLOCK, b"\0")) for block in blocks]
        assert file.get_tensor("@xxh3").tolist() == sums
        assert file.metadata()["tag"] == TAG


def test_we_read_files_of_safetensors(tmp_path, twin):
    path = tmp_path / "foreign.safetensors"
    arrays = {
        "w": RANDOM.random((40, 50)).astype(np.float32),
        "b": np.arange(5),
        "z": np.zeros((0, 3), np.float16),
    }
    save_file(arrays, path, metadata={"format": "pt"})
    found = read_all(path, ours=False)
    assert {key: items.tobytes() for key, items in found.items()} == {
        k: v.tobytes() for k, v in arrays.items()
    }
    with open_data_file(path, ours=False) as file:
        assert file.header.metadata == {"format": "pt"}
    with pytest.raises(CheckpointError, match="begins with its checksum"):
        open_data_file(path)


# --- boxes


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_boxes_are_numpys_slices(tmp_path_factory, data):
    item_size = data.draw(st.sampled_from([1, 2, 4, 8]))
    shape = tuple(
        data.draw(
            st.lists(st.sampled_from([1, 2, 3, 5, 40, 700]), max_size=4).filter(
                lambda s: np.prod(s) < 2e5
            )
        )
    )
    items = random_items(item_size, shape)
    path = tmp_path_factory.mktemp("box") / "data.safetensors"
    write(path, before=random_items(8, (3,)), w=items)
    spans = [
        sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))
        for n in shape
    ]
    lengths = tuple(end - start for start, end in spans)
    around = np.zeros(
        [2 * n + 3 for n in lengths], items.dtype
    )  # a box of a larger array, perhaps turned
    place = tuple(
        slice(1, 1 + 2 * n, 2) if data.draw(st.booleans()) else slice(2, 2 + n)
        for n in lengths
    )
    wanted = np.zeros_like(around)
    wanted[place] = items[tuple(slice(*span) for span in spans)]
    kept = checksum.fast
    with open_data_file(path) as file:
        for compiled in (kept, None):
            for verify in (True, False):
                around[...] = np.zeros((), items.dtype)
                checksum.fast = compiled
                try:
                    offsets = [start for start, _ in spans]
                    read = file.read(
                        file.header.entries["w"],
                        offsets,
                        lengths,
                        around[(*place, ...)],
                        verify=verify,
                    )
                finally:
                    checksum.fast = kept
                assert around.tobytes() == wanted.tobytes(), "nothing else is touched"
                assert read >= np.prod(lengths) * item_size


def test_only_what_is_needed_is_read(tmp_path, twin):
    items = random_items(4, (512, 4096))  # rows of four blocks
    write(tmp_path / "data", w=items)
    with open_data_file(tmp_path / "data") as file:
        entry = file.header.entries["w"]
        columns = np.empty((512, 1024), "V4")
        read = file.read(entry, (0, 0), (512, 1024), columns)
        assert read == columns.nbytes + 8 * (511 * 4 + 1), (
            "blocks, and sums from the first to the last"
        )
        assert file.read(entry, (0, 0), (512, 1024), columns) == columns.nbytes, (
            "sums are known by now"
        )
        assert (
            file.read(entry, (7, 9), (1, 1), np.empty((1, 1), "V4"), verify=False) == 4
        )
        assert file.read(entry, (7, 9), (1, 1), np.empty((1, 1), "V4")) == BLOCK


def test_long_runs_and_transposed_memory(tmp_path, twin, monkeypatch):
    monkeypatch.setattr(data_file, "UNINTERRUPTED", 300_000)
    items = random_items(2, (600, 1001))
    write(tmp_path / "data", w=items)
    with open_data_file(tmp_path / "data") as file:
        entry = file.header.entries["w"]
        out = np.empty((1001, 600), "V2").T
        file.read(entry, (0, 0), (600, 1001), out)
        assert out.tobytes() == items.tobytes()
        rows = np.empty((500, 1001), "V2")
        file.read(entry, (33, 0), (500, 1001), rows)
        assert rows.tobytes() == items[33:533].tobytes()


def test_a_wrong_box_is_refused(tmp_path):
    write(tmp_path / "data", w=random_items(4, (3, 5)))
    with open_data_file(tmp_path / "data") as file:
        for offsets, lengths, out in [
            ((0, 0), (4, 5), np.empty((4, 5), "V4")),
            ((-1, 0), (1, 5), np.empty((1, 5), "V4")),
            ((0,), (3,), np.empty(3, "V4")),
            ((0, 0), (3, 5), np.empty((3, 4), "V4")),
            ((0, 0), (3, 5), np.empty((3, 5), "V2")),
        ]:
            with pytest.raises(ValueError, match="read: "):
                file.read(file.header.entries["w"], offsets, lengths, out)


# --- damage


@pytest.fixture
def small(tmp_path):
    """A file with several chunks, one of more than a block."""
    path = tmp_path / "small.safetensors"
    write(
        path,
        w=random_items(4, (25, 45)),
        b=random_items(2, (7,)),
        s=random_items(8, ()),
        m=random_items(1, (3, 3)),
    )
    return path


def test_every_flipped_byte_is_found(small, twin):
    whole = small.read_bytes()
    read_all(small)
    first = 0 if checksum.fast else BLOCK  # headers have no twin
    with small.open("r+b", buffering=0) as file:
        for at, byte in enumerate(whole[first:], first):
            os.pwrite(file.fileno(), bytes([byte ^ (1 << at % 8)]), at)
            with pytest.raises(CheckpointError, match=re.escape(str(small))):
                read_all(small)
            os.pwrite(file.fileno(), bytes([byte]), at)
    read_all(small)


def test_every_length_that_is_wrong_is_found(small):
    whole = small.read_bytes()
    for size in range(len(whole)):
        os.truncate(small, len(whole) - 1 - size)
        with pytest.raises(CheckpointError, match=re.escape(str(small))):
            open_data_file(small)
    small.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match="cut short or added to"):
        open_data_file(small)


def test_damage_says_where(small, twin):
    with open_data_file(small) as file:
        entry = file.header.entries["w"]
    with small.open("r+b") as raw:
        raw.seek(entry.start + 4400)
        raw.write(b"damage!!")
    place = rf"small.safetensors: w: bytes 4096 to 4500 of the chunk, {entry.start + 4096} to {entry.start + 4500} of"
    with open_data_file(small) as file:
        with pytest.raises(CheckpointError, match=place):
            file.read(entry, (0, 0), (25, 45), np.empty((25, 45), "V4"))
        with pytest.raises(CheckpointError, match=place):
            file.verify(entry)
        file.read(entry, (0, 0), (25, 45), np.empty((25, 45), "V4"), verify=False)
        file.read(
            entry, (0, 0), (20, 45), np.empty((20, 45), "V4")
        )  # the first block is whole


def test_a_file_cut_short_while_it_is_open(small, twin):
    with open_data_file(small) as file:
        entry = file.header.entries["w"]
        file.read(entry, (0, 0), (25, 45), np.empty((25, 45), "V4"))
        os.truncate(small, entry.start + 100)
        with pytest.raises(CheckpointError, match="cut short meanwhile"):
            file.read(entry, (0, 0), (25, 45), np.empty((25, 45), "V4"))


def test_reading_is_progress_too(small):
    steps = []
    with open_data_file(small) as file:
        file.verify(file.header.entries["w"], steps.append)
    assert sum(steps) == 4500


# --- what stands in place of a file


def test_what_is_no_data_file(small, tmp_path):
    (tmp_path / "link").symlink_to(small)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    for name, told in [
        ("missing", "No such file"),
        ("link", "a link, which is not followed"),
        ("folder", "a regular file was expected"),
        ("pipe", "a regular file was expected"),
        ("empty", "at least 8 bytes"),
    ]:
        with pytest.raises(CheckpointError, match=f"{name}: .*{told}"):
            open_data_file(tmp_path / name)
    open_data_file(tmp_path / "link", follow_links=True).close()
    with pytest.raises(
        CheckpointError, match=r"__metadata__.tag: .*another checkpoint"
    ):
        open_data_file(small, tag="f" * 16)
    with pytest.raises(CheckpointError, match="rank: 5 was expected, 3 came"):
        open_data_file(small, tag=TAG, rank=5)


def test_small_files(tmp_path):
    (tmp_path / "a").write_bytes(b"text")
    assert data_file.read_small_file(tmp_path / "a") == b"text"
    with pytest.raises(CheckpointError, match="at most 3 bytes"):
        data_file.read_small_file(tmp_path / "a", 3)
    for name, told in [("missing", "No such file"), (".", "a regular file")]:
        with pytest.raises(CheckpointError, match=told):
            data_file.read_small_file(tmp_path / name)


# --- headers


def head_of(header):
    """The first bytes of a file with this header, checksum included."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % BLOCK)
    head = bytearray(struct.pack("<Q", len(text)) + text)
    head[34:42] = b"%08x" % zlib.crc32(head)
    return bytes(head)


def good():
    """A header, and the bytes that must follow it."""
    metadata = {
        "crc32": "00000000",
        "format": "hyper_parallel",
        "version": "1",
        "tag": TAG,
        "rank": "3",
    }
    w = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    return {
        "__metadata__": metadata,
        "w": w,
        "@xxh3": {"dtype": "U64", "shape": [1], "data_offsets": [24, 32]},
    }, 32


def test_a_header_that_others_make_is_read():
    header, size = good()
    head = head_of(header)
    assert head == build_header([("w", "float32", (2, 3))], TAG, 3)[0]
    assert parse_header(head, len(head) + size, "f").entries["w"].shape == (2, 3)


WRONG = {
    "version": (
        ("__metadata__", "version"),
        "7",
        "newer version 7, this library reads up to 1",
    ),
    "version text": (("__metadata__", "version"), "one", "version"),
    "format": (("__metadata__", "format"), "pt", "format"),
    "tag": (("__metadata__", "tag"), "../../etc/passwd", "tag"),
    "rank": (("__metadata__", "rank"), "-1", "rank"),
    "large rank": (("__metadata__", "rank"), str(2**31), "rank"),
    "more": (("__metadata__", "more"), "x", "more"),
    "metadata": (("__metadata__", "rank"), 3, "rank"),
    "dtype": (("w", "dtype"), "F33", "dtype"),
    "complex": (("w", "dtype"), "C64", "dtype"),
    "dtype type": (("w", "dtype"), ["F32"], "dtype"),
    "shape": (("w", "shape"), [2, 4], "data_offsets"),
    "negative": (("w", "shape"), [-2, -3], "shape"),
    "bool": (("w", "shape"), [True, 6], "shape"),
    "float": (("w", "shape"), [2.0, 3], "shape"),
    "huge": (("w", "shape"), [2**62, 2**62], "shape"),
    "dims": (("w", "shape"), [1] * 65, "shape"),
    "text": (("w", "shape"), "23", "shape"),
    "overlap": (("@xxh3", "data_offsets"), [20, 28], "data_offsets"),
    "hole": (("@xxh3", "data_offsets"), [28, 36], "data_offsets"),
    "reversed": (("w", "data_offsets"), [24, 0], "data_offsets"),
    "three": (("w", "data_offsets"), [0, 24, 28], "data_offsets"),
    "sums": (("@xxh3", "dtype"), "F64", "@xxh3"),
    "extra": (("w", "strides"), [3, 1], "strides"),
    "not an object": (("w",), 5, "w"),
    "deep": (("w", "shape"), eval("[" * 70 + "]" * 70), "nested"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_header_is_refused(case):
    (*path, last), value, told = WRONG[case]
    header, size = good()
    place = header
    for key in path:
        place = place[key]
    place[last] = value
    head = head_of(header)
    with pytest.raises(CheckpointError, match=told) as caught:
        parse_header(head, len(head) + size, "some.safetensors")
    assert caught.value.file == "some.safetensors"


def test_other_wrong_headers():
    header, size = good()
    at_names = {**header, "@w": header["w"]}
    del at_names["w"]
    no_sums = {key: value for key, value in header.items() if key != "@xxh3"}
    no_shape = {**header, "w": {"dtype": "F32", "data_offsets": [0, 24]}}
    surrogate = {
        **header,
        "\ud800": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]},
    }
    for wrong, size_of in [
        (at_names, size),
        (no_sums, 24),
        (no_shape, size),
        (surrogate, size),
        ({}, 0),
    ]:
        head = head_of(wrong)
        with pytest.raises(CheckpointError):
            parse_header(head, len(head) + size_of, "f")
    head = head_of(header)
    for wrong_head in [
        b"",
        head[:7],
        head[:-1],
        head + b" ",
        struct.pack("<Q", 2**63) + head[8:],
    ]:
        with pytest.raises(CheckpointError):
            parse_header(wrong_head, len(head) + size, "f")
    for text in [
        b'{"a":1,"a":1}',
        b"[]",
        b"{",
        b'{"a":NaN}',
        b"\xff",
        b'{"__metadata__":[]}',
        b'{"a":' + b"9" * 5000 + b"}",
    ]:
        with pytest.raises(CheckpointError):
            parse_header(
                struct.pack("<Q", len(text)) + text, 8 + len(text), "f", ours=False
            )


@pytest.mark.parametrize(
    "keys", [["a", "a"], ["@xxh3"], ["@x"], ["__metadata__"], ["\ud800"]]
)
def test_keys_that_cannot_be_written(keys, tmp_path):
    with pytest.raises(CheckpointError, match="rename"):
        write_data_file(
            tmp_path / "data",
            [piece(key, random_items(4, (2,))) for key in keys],
            tag=TAG,
            rank=0,
        )
    assert not list(tmp_path.iterdir())


# --- writing


PHASES = [
    "created",
    "header",
    "data",
    "data",
    "data",
    "sums",
    "synced",
    "renamed",
    "folder synced",
]


def test_a_file_is_whole_or_absent_in_every_phase(tmp_path, monkeypatch):
    path, seen, steps = tmp_path / "data", [], []
    arrays = {"w": random_items(4, (300, 300)), "b": random_items(2, (9,))}

    def look(name):
        seen.append((name, path.exists()))
        if path.exists():
            assert read_all(path).keys() == arrays.keys()

    monkeypatch.setattr(data_file, "phase", look)
    (tmp_path / "data.tmp").write_bytes(b"what a crash left")
    write_data_file(
        path,
        [piece(k, v) for k, v in arrays.items()],
        tag=TAG,
        rank=3,
        progress=steps.append,
    )
    assert [name for name, _ in seen] == PHASES
    assert [name for name, exists in seen if exists] == ["renamed", "folder synced"]
    assert sum(steps) == 360_018
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize("phase", sorted(set(PHASES) - {"renamed", "folder synced"}))
def test_what_fails_leaves_nothing(tmp_path, monkeypatch, phase):
    def fail(name):
        if name == phase:
            raise KeyboardInterrupt

    monkeypatch.setattr(data_file, "phase", fail)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "data", w=random_items(4, (3,)))
    assert not list(tmp_path.iterdir())


def test_short_writes_and_a_full_disk(tmp_path, monkeypatch):
    real, room = os.write, [10**9]

    def some(fd, data):
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room[0] -= 1000
        return real(fd, bytes(data[:1000]))

    monkeypatch.setattr(os, "write", some)
    items = random_items(4, (100, 100))
    write(tmp_path / "data", w=items)
    assert read_all(tmp_path / "data")["w"].tobytes() == items.tobytes()
    room[0] = 20_000
    with pytest.raises(
        CheckpointError, match="full: cannot be written: No space left on device"
    ):
        write(tmp_path / "full", w=items)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize("call", ["open", "fsync", "close"])
def test_what_the_system_refuses(tmp_path, monkeypatch, call):
    real = getattr(os, call)

    def refuse(*args, **kwargs):
        if call == "close":
            real(*args)
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, refuse)
        with pytest.raises(
            CheckpointError, match="data: cannot be written: Read-only file system"
        ) as caught:
            write(tmp_path / "data", w=random_items(4, (3,)))
    assert caught.value.file == str(tmp_path / "data")
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_and_wrong_memory(tmp_path):
    with pytest.raises(CheckpointError, match="No such file or directory"):
        write(tmp_path / "missing" / "data", w=random_items(4, (3,)))
    with pytest.raises(CheckpointError, match="w: 12 bytes were expected, 5 came"):
        write_data_file(
            tmp_path / "x",
            [Piece("w", "float32", (3,), lambda: np.zeros(5, np.uint8))],
            tag=TAG,
            rank=0,
        )
    assert not list(Path(tmp_path).iterdir())
