# SPDX-License-Identifier: Apache-2.0
"""Checksums of blocks against zlib: every way the processor has, every length and alignment."""

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.core.distributed_checkpoint import checksum
from hyper_parallel.core.distributed_checkpoint.checksum import BLOCK, block_sums, crc32

RANDOM = np.random.default_rng(0).integers(0, 256, 5 * BLOCK, dtype=np.uint8)
TWINS = [pytest.param(checksum.fast, id="compiled"), pytest.param(None, id="python")]


@pytest.fixture(params=TWINS)
def twin(request, monkeypatch):
    """Both ways of computing sums."""
    monkeypatch.setattr(checksum, "fast", request.param)
    return request.param


def expected(data):
    """A sum for each block, by zlib."""
    return [zlib.crc32(data[at : at + BLOCK].tobytes()) for at in range(0, len(data), BLOCK)]


def test_the_compiled_module_was_built():
    assert checksum.fast is not None, "without a compiler all of this runs in Python, and is not what is tested here"
    assert checksum.fast.ways[0] == "tables"


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK - 7])
def test_block_sums_are_those_of_zlib(size, twin):
    found = block_sums(RANDOM[:size])
    assert found.dtype == np.uint32
    assert found.tolist() == expected(RANDOM[:size])
    assert crc32(RANDOM[:size]) == zlib.crc32(RANDOM[:size])


def test_every_short_length_and_alignment():
    for way in range(len(checksum.fast.ways)):
        for start in range(17):
            for size in range(300):
                data = RANDOM[start : start + size]
                assert checksum.fast.crc32(data, way) == zlib.crc32(data), (checksum.fast.ways[way], start, size)


@given(st.data())
def test_any_bytes(data):
    start = data.draw(st.integers(0, 64))
    fill = data.draw(st.sampled_from([None, 0, 1, 255]))
    size = data.draw(st.integers(0, len(RANDOM) - start))
    piece = RANDOM[start : start + size] if fill is None else np.full(size, fill, np.uint8)
    assert block_sums(piece).tolist() == expected(piece)
    for way in range(len(checksum.fast.ways)):
        assert checksum.fast.crc32(piece, way) == zlib.crc32(piece)


def test_one_changed_bit_changes_one_sum(twin):
    changed = RANDOM.copy()
    changed[BLOCK + 17] ^= 4
    assert np.flatnonzero(block_sums(changed) != block_sums(RANDOM)).tolist() == [1]


def test_wrong_calls_of_compiled_code_are_refused():
    with pytest.raises(ValueError, match="four bytes"):
        checksum.fast.block_sums(RANDOM, np.empty(1, np.uint32))
    with pytest.raises(ValueError, match="no way 9"):
        checksum.fast.crc32(RANDOM, 9)
    out, sums = np.empty((2, 3), np.uint8), np.empty(1, np.uint32)
    for start, strides, known in [(-1, (8, 1), sums), (5, (8, 1), sums), (0, (2**62, 1), sums), (0, (8,), None)]:
        with pytest.raises(ValueError, match="not within the chunk"):
            checksum.fast.read_box(0, 0, 15, start, strides, out, known, 0)
    with pytest.raises(ValueError, match="sums are not all there"):
        checksum.fast.read_box(0, 0, 15, 0, (8, 1), out, sums, 1)
