# SPDX-License-Identifier: Apache-2.0
"""Checksums of blocks against the xxhash library: every way the processor has, every length and alignment."""

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.core.distributed_checkpoint import checksum
from hyper_parallel.core.distributed_checkpoint.checksum import (
    BLOCK,
    block_sums,
    copy_bytes,
)

RANDOM = np.random.default_rng(0).integers(0, 256, 5 * BLOCK, dtype=np.uint8)
TWINS = [pytest.param(checksum.fast, id="compiled"), pytest.param(None, id="python")]


@pytest.fixture(params=TWINS)
def twin(request, monkeypatch):
    """Both ways of computing sums."""
    monkeypatch.setattr(checksum, "fast", request.param)
    return request.param


def expected(data):
    """A sum for each block, by another library."""
    blocks = [data[at : at + BLOCK].tobytes() for at in range(0, len(data), BLOCK)]
    return [xxhash.xxh3_64_intdigest(block.ljust(BLOCK, b"\0")) for block in blocks]


def every_way(data):
    """The sums by numpy, and by each way of the compiled module."""
    found, kept = {}, checksum.fast
    checksum.fast = None
    try:
        found["numpy"] = block_sums(data).tolist()
    finally:
        checksum.fast = kept
    for number, name in enumerate(kept.ways):
        sums = np.empty(-(-len(data) // BLOCK), np.uint64)
        kept.block_sums(data, sums, number)
        found[name] = sums.tolist()
    return found


def test_the_compiled_module_was_built():
    assert checksum.fast is not None, (
        "without a compiler all of this runs in Python, and is not what is tested here"
    )
    assert checksum.fast.ways[0] == "plain"


@pytest.mark.parametrize(
    "size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK - 7]
)
def test_block_sums_are_those_of_xxhash(size, twin):
    found = block_sums(RANDOM[:size])
    assert found.dtype == np.uint64
    assert found.tolist() == expected(RANDOM[:size])


def test_every_length_of_the_last_block():
    for size in range(1, BLOCK + 1):
        data = RANDOM[size % 17 :][:size]
        wanted = expected(data)
        for way, found in every_way(data).items():
            assert found == wanted, (way, size)


@given(st.data())
def test_any_bytes(data):
    start = data.draw(st.integers(0, 64))
    fill = data.draw(st.sampled_from([None, 0, 1, 255]))
    size = data.draw(st.integers(0, len(RANDOM) - start))
    piece = (
        RANDOM[start : start + size] if fill is None else np.full(size, fill, np.uint8)
    )
    wanted = expected(piece)
    assert block_sums(piece).tolist() == wanted
    for way, found in every_way(piece).items():
        assert found == wanted, way


def test_one_changed_bit_changes_one_sum(twin):
    changed = RANDOM.copy()
    changed[BLOCK + 17] ^= 4
    assert np.flatnonzero(block_sums(changed) != block_sums(RANDOM)).tolist() == [1]


def test_wrong_calls_of_compiled_code_are_refused():
    for sums, way in [
        (np.empty(1, np.uint64), 0),
        (np.empty(5, np.uint32), 0),
        (np.empty(5, np.uint64), 9),
    ]:
        with pytest.raises(ValueError, match="eight bytes a block and a way below"):
            checksum.fast.block_sums(RANDOM, sums, way)
    out, sums = np.empty((2, 3), np.uint8), np.empty(1, np.uint64)
    for start, strides, known in [
        (-1, (8, 1), sums),
        (5, (8, 1), sums),
        (0, (2**62, 1), sums),
        (0, (8,), None),
    ]:
        with pytest.raises(ValueError, match="not within the chunk"):
            checksum.fast.read_box(0, 0, 15, start, strides, out, known, 0)
    for few, first in [(sums, 1), (np.empty(1, np.uint32), 0)]:
        with pytest.raises(ValueError, match="sums are not all there"):
            checksum.fast.read_box(0, 0, 15, 0, (8, 1), out, few, first)


@pytest.mark.parametrize(
    "size", [0, 1, 31, 2047, 2048, 2079, 2080, 4095, 10_000, 3 * BLOCK + 127]
)
@pytest.mark.parametrize("offset", [0, 1, 16, 31])
def test_copies_are_exact_and_stay_within_their_memory(size, offset, twin):
    out = np.full(size + 200, 77, np.uint8)
    part = out[100 + offset :][:size]
    copy_bytes(part, RANDOM[offset // 2 :][:size])
    assert part.tobytes() == RANDOM[offset // 2 :][:size].tobytes()
    assert (
        set(out[: 100 + offset].tolist())
        == set(out[100 + offset + size :].tolist())
        == {77}
    )


def test_copies_of_opaque_elements_of_any_shape(twin):
    data = RANDOM[: 3 * BLOCK].view("V4").reshape(3, -1)
    out = np.zeros(data.shape, "V4")
    copy_bytes(out, data)
    assert out.tobytes() == data.tobytes()


def test_a_copy_that_does_not_fit_is_refused(twin):
    with pytest.raises(ValueError, match=r"4 bytes|shape"):
        copy_bytes(np.zeros(5, np.uint8), np.zeros(4, np.uint8))
