# SPDX-License-Identifier: Apache-2.0
"""What goes wrong with a checkpoint is a CheckpointError on every rank, names file and field, and spoils nothing."""

import errno
import io
import multiprocessing
import os
import resource
import shutil
import sys
import threading
import time
import zlib
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch

from hyper_parallel import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    get_platform,
    init_device_mesh,
)
from hyper_parallel.core.distributed_checkpoint import (
    CheckpointError,
    FileSystemReader,
    PerRank,
    async_save,
    checksum,
    data_file,
    header,
    load,
    save,
)
from hyper_parallel.core.distributed_checkpoint.agreement import Ranks
from hyper_parallel.testing import on_ranks

ROWS, COLUMNS = 64, 1024  # 128 KiB a rank


def rank():
    return get_platform().get_rank()


def numbers(generation):
    return (
        torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
        + generation
    )


def state(generation):
    """Cut, copied and plain tensors and objects; all of them tell the generation."""
    mesh = init_device_mesh("cpu", (2,))
    return {
        "model": {
            "w": distribute_tensor(numbers(generation), mesh, [Shard(0)]),
            "b": distribute_tensor(torch.full((5,), generation), mesh, [Replicate()]),
            "plain": torch.arange(7) * generation,
        },
        "step": generation,
        "betas": (0.9, generation),
    }


def whole(value):
    if isinstance(value, dict):
        return {key: whole(inner) for key, inner in value.items()}
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.tolist() if isinstance(value, torch.Tensor) else value


def only_here(value):
    """The same without the other rank."""
    if isinstance(value, dict):
        return {key: only_here(inner) for key, inner in value.items()}
    value = value.to_local() if isinstance(value, DTensor) else value
    return value.tolist() if isinstance(value, torch.Tensor) else value


def assert_holds(folder, generation, **options):
    found = state(-1)
    load(found, checkpoint_id=folder, **options)
    assert whole(found) == whole(state(generation))
    get_platform().barrier()


def assert_in_order(folder, generation):
    """The checkpoint loads, and nothing else lies about."""
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == 3, names
    assert not [name for name in names if name.endswith(".tmp")]
    assert_holds(folder, generation)


def refused(function, *args, match="", **kwargs):
    """The error, which comes on this rank; pytest's match would not show what came instead."""
    with pytest.raises(CheckpointError) as caught:
        function(*args, **kwargs)
    assert match in str(caught.value)
    get_platform().barrier()
    return caught.value


def finished(*args, **kwargs):
    """A save in the background, waited for."""
    async_save(*args, **kwargs).result()


def once(function, *args):
    """On one rank, while the other waits."""
    if rank() == 0:
        function(*args)
    get_platform().barrier()


# --- saving


@contextmanager
def failing(name, error, *, after=0, only=lambda *_: True, on=(0, 1)):
    """Lets a function of os fail, after some calls, on some ranks."""
    real, calls = getattr(os, name), []

    def call(*args, **kwargs):
        if only(*args):
            calls.append(args)
            if len(calls) > after:
                raise OSError(error, os.strerror(error))
        return real(*args, **kwargs)

    if rank() not in on:
        yield
        return
    with mock.patch.object(os, name, call):
        yield
    assert len(calls) > after, "the fault never came"


@contextmanager
def small_files():
    """The kernel refuses to let files grow over 64 KiB on the second rank."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def ends_with_tmp(path, *_):
    return str(path).endswith(".tmp")


WRITING = {
    "disk full at the header": lambda: failing("write", errno.ENOSPC, on=(1,)),
    "disk full at the data": lambda: failing("write", errno.ENOSPC, after=1, on=(1,)),
    "disk full at the sums, on both": lambda: failing("write", errno.ENOSPC, after=2),
    "disk full on the first rank": lambda: failing(
        "write", errno.ENOSPC, after=1, on=(0,)
    ),
    "disk full when synced": lambda: failing("fsync", errno.ENOSPC, on=(1,)),
    "the folder cannot be synced": lambda: failing(
        "fsync", errno.EIO, after=1, on=(1,)
    ),
    "the kernel's limit": small_files,
    "read-only": lambda: failing("open", errno.EROFS, only=ends_with_tmp),
    "no permission on one rank": lambda: failing(
        "open", errno.EACCES, only=ends_with_tmp, on=(1,)
    ),
    "cannot be renamed": lambda: failing("rename", errno.EIO, on=(1,)),
}


@pytest.mark.parametrize("in_background", [False, True])
@on_ranks(2)
def test_a_data_file_that_cannot_be_written(tmp_path, in_background):
    save(state(1), checkpoint_id=tmp_path)
    for name, fault in WRITING.items():
        with fault():
            do = finished if in_background else save
            error = refused(
                do, state(2), checkpoint_id=tmp_path, match="cannot be written"
            )
        culprit = (
            0
            if name
            in (
                "disk full at the sums, on both",
                "disk full on the first rank",
                "read-only",
            )
            else 1
        )
        assert error.file.endswith(f"-{culprit:05}.safetensors"), name
        assert f"rank {culprit}" in str(error), name
        assert_in_order(tmp_path, 1)
    save(state(3), checkpoint_id=tmp_path)
    assert_in_order(tmp_path, 3)


@on_ranks(2)
def test_what_cannot_be_removed_either_does_not_hide_the_error(tmp_path):
    save(state(1), checkpoint_id=tmp_path)
    with (
        failing("fsync", errno.EIO, after=1, on=(1,)),
        failing("unlink", errno.EACCES, after=1, on=(1,)),
    ):
        refused(
            save,
            state(2),
            checkpoint_id=tmp_path,
            match="cannot be written: Input/output error",
        )
    assert_holds(tmp_path, 1)
    save(state(3), checkpoint_id=tmp_path)
    assert_in_order(tmp_path, 3)


@pytest.mark.parametrize("name", ["fsync", "replace"])
@on_ranks(2)
def test_metadata_that_cannot_be_written(tmp_path, name):
    save(state(1), checkpoint_id=tmp_path)
    with failing(
        name, errno.ENOSPC, after={"fsync": 2}.get(name, 0), on=(0,)
    ):  # the data and its folder come first
        error = refused(
            save,
            state(2),
            checkpoint_id=tmp_path,
            match="the metadata cannot be written: No space left",
        )
    assert error.file == str(tmp_path / "checkpoint.json")
    assert_holds(tmp_path, 1)
    save(state(3), checkpoint_id=tmp_path)
    assert_in_order(tmp_path, 3)


@on_ranks(2)
def test_a_folder_that_is_a_file(tmp_path):
    file = tmp_path / "file"
    once(file.write_text, "not a folder")
    for path in (file, file / "inner"):
        error = refused(
            save, state(1), checkpoint_id=path, match="the folder cannot be made"
        )
        assert error.file == str(path)
        error = refused(load, state(1), checkpoint_id=path)
        assert error.file.startswith(str(path))
    assert file.read_text() == "not a folder"


class Unable:
    """Its state cannot be had on the second rank."""

    def state_dict(self):
        if rank() == 1:
            raise LookupError("the state is elsewhere")
        return {"a": 1}

    def load_state_dict(self, state):
        raise AssertionError


def on_second(value, other):
    return value if rank() == 1 else other


def pending():
    return DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (2,)), [Partial()])


STATES = {
    "an object that cannot be stored": (object, "object"),
    "one on the second rank only": (lambda: on_second(threading.Lock(), 1), "lock"),
    "objects that differ": (lambda: on_second(1, 2), "PerRank"),
    "plain tensors that differ": (lambda: torch.full((3,), rank()), "PerRank"),
    "plain tensors of other shapes": (lambda: torch.zeros(3 + rank()), "shape"),
    "plain tensors of other dtypes": (
        lambda: torch.zeros(3, dtype=on_second(torch.int8, torch.uint8)),
        "int8",
    ),
    "a tensor and an object": (
        lambda: on_second(torch.zeros(3), 0),
        "a tensor on some ranks",
    ),
    "own tensors of other shapes": (lambda: PerRank(torch.zeros(2 + rank())), "shape"),
    "a pending reduction": (pending, "reduce_partial()"),
    "a meta tensor": (lambda: torch.empty(3, device="meta"), "meta"),
    "a meta tensor on the second rank only": (
        lambda: torch.empty(3, device=on_second("meta", "cpu")),
        "meta",
    ),
    "a tuple of tensors": (lambda: (torch.ones(2),), "tuple"),
}


@pytest.mark.parametrize("do", [save, async_save])
@on_ranks(2)
def test_a_state_that_cannot_be_saved(tmp_path, do):
    save(state(1), checkpoint_id=tmp_path)
    for name, (make, match) in STATES.items():
        error = refused(
            do,
            {**state(2), "deep": [{"bad": make()}]},
            checkpoint_id=tmp_path,
            match=match,
        )
        assert "deep.0.bad" in error.field, name
        assert_in_order(tmp_path, 1)


@on_ranks(2)
def test_a_state_that_cannot_be_had_on_one_rank(tmp_path):
    save(state(1), checkpoint_id=tmp_path)
    with pytest.raises(
        LookupError if rank() == 1 else CheckpointError, match="the state is elsewhere"
    ) as caught:
        save({**state(2), "unable": Unable()}, checkpoint_id=tmp_path)
    assert rank() == 1 or "rank 1" in str(caught.value)
    assert_in_order(tmp_path, 1)


# --- damaged checkpoints


def files(folder):
    return sorted(folder.glob("data-*"))


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def reword(folder, old, new):
    """Changes the metadata, whose checksum is right again."""
    path = folder / "checkpoint.json"
    body = path.read_bytes()[:-22]
    assert body.count(old) == 1, body
    body = body.replace(old, new)
    path.write_bytes(body + b',\n"crc32":"%08x"}\n' % zlib.crc32(body))


def age_header(folder):
    """Gives a data file another version, and the right checksum for it."""
    path, old, new = files(folder)[1], b'"version":"1"', b'"version":"9"'
    data = bytearray(path.read_bytes())
    end = 8 + int.from_bytes(data[:8], "little")
    assert data[:end].count(old) == 1
    head = data[:end].replace(old, new)
    head[header.CRC_PLACE] = header.NO_CRC
    head[header.CRC_PLACE] = b"%08x" % zlib.crc32(head)
    path.write_bytes(head + data[end:])


def swap(folder):
    one, other = files(folder)
    one.rename(folder / "between")
    other.rename(one)
    (folder / "between").rename(other)


def put_other(folder):
    """The data file of another save under this one's name."""
    shutil.copy(files(folder.parent / "other")[0], files(folder)[0])


def put_link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def put_pipe(path):
    path.unlink()
    os.mkfifo(path)


def cut(path, size):
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)


def metadata(folder):
    return folder / "checkpoint.json"


def unname(folder):
    metadata(folder).rename(folder / "checkpoint.json.0123456789abcdef.tmp")


FIRST, SECOND, JSON = "-00000.safetensors", "-00001.safetensors", "checkpoint.json"
W = "model.w@32,0"  # the second rank's chunk

DAMAGE = {
    "no data file": (lambda f: files(f)[1].unlink(), SECOND, None, "No such file"),
    "an empty data file": (lambda f: cut(files(f)[1], 0), SECOND, "length", ""),
    "a data file cut in the header": (lambda f: cut(files(f)[0], 100), FIRST, "length", ""),
    "a data file cut in the data": (lambda f: cut(files(f)[1], 50_000), SECOND, None, ""),
    "a data file cut at its end": (lambda f: cut(files(f)[1], -1), SECOND, None, ""),
    "a bit in the data": (lambda f: flip(files(f)[1], 60_000), SECOND, W, "do not have the checksum"),
    "a bit in the first data": (lambda f: flip(files(f)[0], 4096), FIRST, None, "do not have the checksum"),
    "a bit in the checksums": (lambda f: flip(files(f)[1], -1), SECOND, None, "do not have the checksum"),
    "a bit in the header": (lambda f: flip(files(f)[1], 200), SECOND, "header", ""),
    "a bit in the header's length": (lambda f: flip(files(f)[1], 2), SECOND, None, ""),
    "a newer data file": (age_header, SECOND, "__metadata__.version", "9"),
    "the data file of another save": (put_other, FIRST, "__metadata__.tag", "another checkpoint"),
    "the data files of other ranks": (swap, FIRST, "__metadata__.rank", "another checkpoint"),
    "a link to the data": (lambda f: put_link(files(f)[1]), SECOND, None, "a link"),
    "a pipe for the data": (lambda f: put_pipe(files(f)[1]), SECOND, None, "regular file"),
    "no metadata": (lambda f: metadata(f).unlink(), JSON, None, "did not come to its end"),
    "metadata that has no name yet": (unname, JSON, None, "did not come to its end"),
    "an empty folder": (lambda f: (shutil.rmtree(f), f.mkdir()), JSON, None, "nothing was saved there"),
    "no folder": (shutil.rmtree, JSON, None, "nothing was saved there"),
    "empty metadata": (lambda f: metadata(f).write_bytes(b""), JSON, None, "cut short"),
    "metadata cut": (lambda f: cut(metadata(f), -30), JSON, None, "cut short"),
    "a bit in the metadata": (lambda f: flip(metadata(f), 100), JSON, "crc32", "damaged"),
    "newer metadata": (lambda f: reword(f, b'"version":1,', b'"version":2,'), JSON, "version", "newer version 2"),
    "another format": (lambda f: reword(f, b'"hyper_parallel checkpoint"', b'"cake"'), JSON, "format", "cake"),
    "another shape": (lambda f: reword(f, b'"shape":[5]', b'"shape":[6]'), None, "model.b", "6"),
    "another tag": (lambda f: reword(f, b'"tag":"', b'"tag":"../'), JSON, "tag", "16"),
    "a link to the metadata": (lambda f: put_link(metadata(f)), JSON, None, "a link"),
    "a folder for the metadata": (lambda f: (metadata(f).unlink(), metadata(f).mkdir()), JSON, None, "regular file"),
    "a pipe for the metadata": (lambda f: put_pipe(metadata(f)), JSON, None, "regular file"),
}  # fmt: skip


@pytest.mark.parametrize("pure", [False, True], ids=["compiled", "pure"])
@on_ranks(2)
def test_damaged_checkpoints(tmp_path, pure):
    save(state(1), checkpoint_id=tmp_path / "good")
    save(state(2), checkpoint_id=tmp_path / "other")
    with mock.patch.object(checksum, "fast", None if pure else checksum.fast):
        for name in [
            name for name in DAMAGE if name.startswith("a bit in") or not pure
        ]:
            damage, file, field, match = DAMAGE[name]
            folder = tmp_path / name
            once(shutil.copytree, tmp_path / "good", folder)
            once(damage, folder)
            target = state(-1)
            error = refused(load, target, checkpoint_id=folder, match=match)
            assert file is None or error.file.endswith(file), name
            assert field is None or error.field == field, (name, error.field)
            assert str(folder) in str(error) or file is None
            if (
                error.__cause__ is not None
            ):  # this rank saw it, and before the first byte went anywhere
                assert "do not have the checksum" in match or only_here(
                    target
                ) == only_here(state(-1)), name
            if metadata(folder).is_dir():
                refused(
                    save,
                    state(3),
                    checkpoint_id=folder,
                    match="the metadata cannot be written: Is a directory",
                )
            else:
                save(state(3), checkpoint_id=folder)
                assert_holds(folder, 3)
    assert_holds(tmp_path / "good", 1)


@on_ranks(2)
def test_it_is_the_checksum_that_sees_a_flipped_bit(tmp_path):
    save(state(1), checkpoint_id=tmp_path)
    once(flip, files(tmp_path)[1], 60_000)
    refused(load, state(-1), checkpoint_id=tmp_path, match="do not have the checksum")
    found, expected = state(-1), whole(state(1))
    load(found, storage_reader=FileSystemReader(tmp_path, verify=False))
    changed = np.flatnonzero(
        np.array(whole(found)["model"]["w"]) != np.array(expected["model"]["w"])
    )
    assert len(changed) == 1
    found["model"]["w"] = expected["model"]["w"]
    assert whole(found) == expected


@on_ranks(2)
def test_without_compiled_code_the_same_is_written_and_read(tmp_path):
    with mock.patch.dict(os.environ, {checksum.HYPER_PARALLEL_PURE_PYTHON: "1"}):
        pure = checksum._compiled()
    assert pure is None
    save(state(1), checkpoint_id=tmp_path / "compiled")
    with mock.patch.object(checksum, "fast", pure):
        assert_holds(tmp_path / "compiled", 1)
        save(state(1), checkpoint_id=tmp_path / "pure")
    assert_holds(tmp_path / "pure", 1)
    for one, other in zip(
        files(tmp_path / "compiled"), files(tmp_path / "pure"), strict=True
    ):
        assert one.read_bytes()[4096:] == other.read_bytes()[4096:]


# --- a state dict and a checkpoint that do not fit


def without(name):
    wanted = state(-1)
    del wanted["model"][name]
    return wanted


def instead(name, value):
    wanted = state(-1)
    wanted["model"][name] = value
    return wanted


SEVEN = torch.zeros(7, dtype=torch.int64)
MISFITS = {
    "a name too many": (lambda: instead("bias", torch.zeros(5)), None, "model.bias"),
    "one on the second rank": (lambda: on_second(instead("bias", torch.zeros(5)), state(-1)), None, "model.bias"),
    "a name too few": (lambda: without("plain"), None, "model.plain"),
    "float for int": (lambda: instead("plain", torch.zeros(7)), "model.plain", "int64"),
    "int for float": (lambda: instead("w", torch.zeros(ROWS, COLUMNS, dtype=torch.int32)), "model.w", "float32"),
    "another int": (lambda: instead("plain", torch.zeros(7, dtype=torch.int32)), "model.plain", "int64"),
    "another shape": (lambda: instead("plain", torch.zeros(8, dtype=torch.int64)), "model.plain", "(8,)"),
    "as many elements": (lambda: instead("w", torch.zeros(COLUMNS, ROWS)), "model.w", "(1024, 64)"),
    "an object for a tensor": (lambda: instead("plain", 0), "model.plain", "has a tensor"),
    "a tensor for an object": (lambda: {**state(-1), "step": torch.zeros(())}, "step", "has an object"),
    "one on the second rank for an object": (lambda: {**state(-1), "step": on_second(torch.zeros(()), 0)}, "step", ""),
    "a pending reduction": (lambda: instead("plain", pending()), "model.plain", "reduce_partial()"),
    "a meta tensor": (lambda: instead("plain", SEVEN.to("meta")), "model.plain", "meta"),
    "each its own": (lambda: instead("plain", PerRank(SEVEN)), "model.plain", "shape"),
}  # fmt: skip


@on_ranks(2)
def test_a_state_dict_that_does_not_fit(tmp_path):
    save(state(1), checkpoint_id=tmp_path)
    for name, (make, field, match) in MISFITS.items():
        target = make()
        error = refused(load, target, checkpoint_id=tmp_path, match=match)
        assert error.field == field, name
        assert target["model"]["w"].sum() in (numbers(-1).sum(), 0), (
            f"{name}: something was filled"
        )
    assert_in_order(tmp_path, 1)


@on_ranks(2)
def test_a_name_that_another_rank_asks_for_is_not_unexpected(tmp_path):
    """As the names of other stages of a pipeline."""
    save(state(1), checkpoint_id=tmp_path)
    target, expected = on_second(without("plain"), state(-1)), state(1)
    report = load(target, checkpoint_id=tmp_path)
    assert report.unexpected == ()
    asked = "plain" in target["model"]
    assert ("model.plain" in report.loaded) == asked
    if asked:
        assert torch.equal(target["model"]["plain"], expected["model"]["plain"])
    assert_in_order(tmp_path, 1)


# --- saving in the background


@contextmanager
def held_back():
    """Writing waits until the returned event is set."""
    go = threading.Event()

    def wait(_):
        assert go.wait(20)

    with mock.patch.object(data_file, "phase", wait):
        try:
            yield go
        finally:
            go.set()


def changed(anything):
    for value in anything.values():
        if isinstance(value, dict):
            changed(value)
        elif isinstance(value, DTensor):
            value.to_local().fill_(-9)
        elif isinstance(value, torch.Tensor):
            value.fill_(-9)
        elif isinstance(value, np.ndarray):
            value[...] = -9
        elif isinstance(value, list):
            value.append(-9)


@on_ranks(2)
def test_what_changes_after_async_save_is_not_saved(tmp_path):
    def with_objects(generation):
        return {
            **state(generation),
            "losses": [generation, 2],
            "array": np.full(3, generation),
            "own": PerRank([rank()]),
        }

    saved = with_objects(1)
    with held_back() as go:
        response = async_save(saved, checkpoint_id=tmp_path)
        changed(saved)
        saved["own"].value.append(-9)
        assert not response.done()
        go.set()
        response.result()
    found = with_objects(-1)
    load(found, checkpoint_id=tmp_path)
    assert found["losses"] == [1, 2]
    assert found["array"].tolist() == [1, 1, 1]
    assert found["own"].value == [rank()]
    assert whole(found)["model"] == whole(state(1))["model"]


@on_ranks(2)
def test_saves_that_are_queued_are_all_whole(tmp_path):
    with held_back() as go:
        responses = [
            async_save(state(n), checkpoint_id=tmp_path / "ab"[n % 2])
            for n in range(1, 5)
        ]
        assert not responses[0].done()
        go.set()
        [response.result() for response in responses]
    assert_in_order(tmp_path / "b", 3)
    assert_in_order(tmp_path / "a", 4)


@on_ranks(2)
def test_a_busy_writer_refuses_if_asked(tmp_path):
    with held_back() as go:
        first = async_save(state(1), checkpoint_id=tmp_path)
        refused(
            async_save,
            state(2),
            checkpoint_id=tmp_path,
            when_busy="refuse",
            match="1 earlier saves",
        )
        go.set()
        first.result()
    assert_in_order(tmp_path, 1)
    async_save(state(2), checkpoint_id=tmp_path, when_busy="refuse").result()
    assert_in_order(tmp_path, 2)


@pytest.mark.parametrize("next_save", [save, async_save])
@on_ranks(2)
def test_an_error_that_nobody_asked_for_comes_with_the_next_save(tmp_path, next_save):
    save(state(1), checkpoint_id=tmp_path)
    with failing("write", errno.ENOSPC, on=(1,)):
        response = async_save(state(2), checkpoint_id=tmp_path)
        while not response.done():
            threading.Event().wait(0.01)
    get_platform().barrier()
    error = refused(next_save, state(3), checkpoint_id=tmp_path, match="No space left")
    assert error.file.endswith(SECOND)
    assert_in_order(tmp_path, 1)
    save(state(4), checkpoint_id=tmp_path)  # it was told once
    assert_in_order(tmp_path, 4)


@on_ranks(2)
def test_an_exception_of_the_caller_does_not_lose_the_save(tmp_path):
    with held_back() as go, pytest.raises(ZeroDivisionError):
        async_save(state(1), checkpoint_id=tmp_path)
        try:
            1 / 0  # noqa: B018
        finally:
            go.set()
    save(state(2), checkpoint_id=tmp_path / "next")  # waits for the one before
    assert_in_order(tmp_path / "next", 2)
    assert_holds(tmp_path, 1)


@on_ranks(2, timeout=17)
def test_a_missing_rank_is_waited_for_no_longer_than_in_the_job():
    group = Ranks().beside()._group
    assert group is not torch.distributed.group.WORLD
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(
        seconds=17
    )
    get_platform().barrier()  # the other may still be joining the group


@on_ranks(2)
def test_a_job_that_ends_first_ends_its_save(tmp_path):
    with mock.patch.object(data_file, "phase", lambda _: time.sleep(0.02)):  # noqa: PT008 - it sleeps
        async_save(state(1), checkpoint_id=tmp_path)
        get_platform().destroy_process_group()
    found = {"model": {"w": torch.zeros(ROWS, COLUMNS)}}
    load(found, checkpoint_id=tmp_path, strict=False)
    assert torch.equal(found["model"]["w"], numbers(1))


def train_and_fail(port, number, folder):
    sys.stderr = io.StringIO()  # the traceback is meant to be
    platform = get_platform()
    store = platform.new_store(port, is_master=False)
    platform.init_process_group(store=store, rank=number, world_size=2, timeout=30)
    data_file.phase = lambda _: time.sleep(0.05)
    async_save(state(1), checkpoint_id=folder)
    raise ZeroDivisionError


def test_a_process_that_ends_with_an_exception_first_ends_its_save(tmp_path):
    context = multiprocessing.get_context("forkserver")
    store = get_platform().new_store(is_master=True)
    ranks = [
        context.Process(target=train_and_fail, args=(store.port, number, tmp_path))
        for number in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(40)
    assert [process.exitcode for process in ranks] == [1, 1]
    found = {"model": {"w": torch.zeros(ROWS, COLUMNS)}}
    load(found, checkpoint_id=tmp_path, strict=False)
    assert torch.equal(found["model"]["w"], numbers(1))
