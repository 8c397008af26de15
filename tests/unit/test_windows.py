# SPDX-License-Identifier: Apache-2.0
"""Boxes of arrays in files, looked at as memory: exact, and files that end too early raise instead of SIGBUS."""

import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.core.distributed_checkpoint import checksum
from hyper_parallel.core.distributed_checkpoint.checksum import BLOCK, block_sums

WINDOW = 4 << 20
DATA = np.random.default_rng(0).integers(
    0, 256, 2 * WINDOW + 3 * BLOCK + 77, dtype=np.uint8
)
START = 1000  # of the chunk in its file


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("windows") / "data"
    path.write_bytes(bytes(START) + DATA.tobytes() + b"behind")
    with path.open("rb") as opened:
        yield opened.fileno()


@pytest.fixture(scope="module")
def sums():
    return block_sums(DATA)


def read(fd, offset, strides, out, sums):
    return checksum.fast.read_box(fd, START, DATA.nbytes, offset, strides, out, sums, 0)


@given(st.data())
def test_boxes_are_those_of_numpy(file, sums, data):
    width = data.draw(
        st.sampled_from([7, 512, BLOCK, 3 * BLOCK + 5, 40_000, DATA.nbytes // 2])
    )
    rows = DATA.nbytes // width
    whole = DATA[: rows * width].reshape(rows, width)
    top, left = (
        data.draw(st.integers(0, rows - 1)),
        data.draw(st.integers(0, width - 1)),
    )
    box = whole[
        top : data.draw(st.integers(top + 1, rows)),
        left : data.draw(st.integers(left + 1, width)),
    ]
    out = np.zeros((box.shape[0], box.shape[1] + 40), np.uint8)[
        :, data.draw(st.integers(0, 40)) :
    ][:, : box.shape[1]]
    count, damaged = read(file, top * width + left, (width, 1), out, sums)
    assert damaged == -1
    assert count >= min(box.nbytes, DATA.nbytes)
    assert np.array_equal(out, box)


@pytest.mark.parametrize("at", [0, WINDOW - 1, 2 * WINDOW + 17, len(DATA) - 1])
def test_a_changed_byte_is_found_wherever_it_is(file, sums, at):
    other = sums.copy()
    other[at // BLOCK] ^= np.uint64(1)
    assert read(file, 0, (1,), np.empty(DATA.nbytes, np.uint8), other)[1] == at // BLOCK


@pytest.mark.parametrize("left", [START, START + 3 * BLOCK, START + WINDOW + 5 * BLOCK])
def test_a_file_that_ends_too_early_raises(tmp_path, sums, left):
    path = tmp_path / "short"
    path.write_bytes((bytes(START) + DATA.tobytes())[:left])
    before = signal.getsignal(signal.SIGBUS)
    for _ in range(2):  # the second time as well
        with (
            path.open("rb") as opened,
            pytest.raises(EOFError, match="the file ends within the chunk"),
        ):
            read(opened.fileno(), 0, (1,), np.empty(DATA.nbytes, np.uint8), sums)
    assert signal.getsignal(signal.SIGBUS) == before


def test_threads_find_the_end_of_their_own_file(tmp_path, file, sums):
    path = tmp_path / "short"
    path.write_bytes((bytes(START) + DATA.tobytes())[:WINDOW])
    found: dict[int, list[str]] = {n: [] for n in range(4)}

    def look(number):
        with path.open("rb") as opened:
            for _ in range(10):
                out = np.zeros(DATA.nbytes, np.uint8)
                try:
                    read(opened.fileno() if number % 2 else file, 0, (1,), out, sums)
                    found[number].append(
                        "whole" if np.array_equal(out, DATA) else "wrong"
                    )
                except EOFError:
                    found[number].append("short")

    threads = [threading.Thread(target=look, args=(number,)) for number in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: ["short" if n % 2 else "whole"] * 10 for n in range(4)}


ELSEWHERE = """
import mmap, sys, tempfile, threading, time
import numpy as np
from hyper_parallel.core.distributed_checkpoint import checksum
from hyper_parallel.core.distributed_checkpoint.checksum import block_sums

data = np.zeros(64 << 20, np.uint8)
file = tempfile.TemporaryFile()
file.write(data.tobytes())
sums = block_sums(data)

def look():
    while True:
        checksum.fast.read_box(file.fileno(), 0, data.nbytes, 0, (1,), data, sums, 0)

threading.Thread(target=look, daemon=True).start()
other = tempfile.TemporaryFile()
other.write(bytes(8192))
other.flush()
seen = mmap.mmap(other.fileno(), 8192)
other.truncate(0)
time.sleep(0.2)
print("so far", flush=True)
print(seen[5000])
"""


@pytest.mark.parametrize("options", [[], ["-X", "faulthandler"]])
def test_an_error_elsewhere_ends_as_it_would_have(options):
    command = [sys.executable, *options, "-c", ELSEWHERE]
    ended = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=120
    )
    assert ended.stdout == "so far\n"
    assert ended.returncode == -signal.SIGBUS
    assert ("Fatal Python error: Bus error" in ended.stderr) == bool(options)
