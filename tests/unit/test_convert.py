# SPDX-License-Identifier: Apache-2.0
"""Checkpoints, files of Hugging Face, single files and state dicts into each other; verified and compared."""

import itertools
import json
import math
import tracemalloc
from collections import OrderedDict

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hyper_parallel.core.distributed_checkpoint.api import load, save
from hyper_parallel.core.distributed_checkpoint.codec import Pickled
from hyper_parallel.core.distributed_checkpoint.convert import (
    checkpoint_to_file,
    checkpoint_to_hugging_face,
    checkpoint_to_state_dict,
    file_to_checkpoint,
    hugging_face_to_checkpoint,
    state_dict_to_checkpoint,
)
from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.hugging_face import reader_for
from hyper_parallel.core.distributed_checkpoint.inspection import (
    compare_checkpoints,
    verify_checkpoint,
)
from hyper_parallel.core.distributed_checkpoint.standard_planner import (
    StandardSavePlanner,
)
from hyper_parallel.core.distributed_checkpoint.streaming import Source, boxes_in_order

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.int16,
    torch.float16, torch.bfloat16, torch.uint32, torch.int32, torch.float32, torch.uint64, torch.int64, torch.float64,
    torch.complex64, torch.complex128,
]  # fmt: skip


def everything():
    generator = torch.Generator().manual_seed(0)
    tensors = {
        str(t).split(".")[1]: torch.randn(5, 3, generator=generator).abs().mul(9).to(t)
        for t in DTYPES
    }
    w = torch.randn(300, 7, generator=generator)
    return {
        "model": {
            **tensors,
            "w": w,
            "head.w": w,
            "none": torch.empty(0, 4),
            "number": torch.tensor(2.5),
        },
        "groups": [
            {"lr": 0.1, "betas": (0.9, math.nan)},
            {"lr": 1, 5: torch.arange(3)},
        ],
        "step": 12,
        "array": np.arange(3, dtype=np.int16),
        "ordered": (OrderedDict(b=1, a=2), {1, 2}, b"x", True, None, {}),
    }


def same(one, other):
    """Type for type and bit by bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            same(one[key], other[key]) for key in one
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        alike = one.dtype is other.dtype and one.shape == other.shape
        return alike and one.contiguous().view(-1).view(torch.uint8).equal(
            other.contiguous().view(-1).view(torch.uint8)
        )
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return one == other or (one != one and other != other)


@pytest.fixture
def folder(tmp_path):
    state_dict_to_checkpoint(everything(), tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def test_a_state_dict_comes_back(folder):
    found = checkpoint_to_state_dict(folder)
    assert same(found, everything())
    assert found["model"]["w"] is found["model"]["head.w"]


def test_control_same_sees_differences():
    for path, value in (
        (("step",), 12.0),
        (("groups", 0, "betas"), (0.9, 0.0)),
        (("model", "number"), torch.tensor(2.4)),
    ):
        changed = everything()
        holder = changed
        for step in path[:-1]:
            holder = holder[step]
        holder[path[-1]] = value
        assert not same(everything(), changed)


def test_a_single_file_and_back(folder, tmp_path):
    file = tmp_path / "sub" / "all.safetensors"
    checkpoint_to_file(folder, file)
    tensors = load_file(file)
    assert torch.equal(tensors["model.bfloat16"], everything()["model"]["bfloat16"])
    assert torch.equal(
        torch.view_as_complex(tensors["model.complex128"]),
        everything()["model"]["complex128"],
    )
    assert len(tensors) == len(DTYPES) + 4  # w is there once
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["format"] == "pt"
    assert [path.name for path in file.parent.iterdir()] == ["all.safetensors"]
    assert same(checkpoint_to_state_dict(file), everything())
    file_to_checkpoint(file, tmp_path / "back")
    assert same(checkpoint_to_state_dict(tmp_path / "back"), everything())
    assert verify_checkpoint(tmp_path / "back") == []
    with pytest.raises(CheckpointError, match="is there already"):
        checkpoint_to_file(folder, file)


def test_a_file_whose_notes_are_of_other_tensors_is_refused(folder, tmp_path):
    checkpoint_to_file(folder, tmp_path / "all.safetensors")
    data = (tmp_path / "all.safetensors").read_bytes()
    (tmp_path / "all.safetensors").write_bytes(
        data.replace(b'"model.w":{', b'"model.v":{').replace(
            b'"model.head.w":{', b'"model.tail.w":{'
        )
    )
    with pytest.raises(CheckpointError, match="is not in the file"):
        checkpoint_to_state_dict(tmp_path / "all.safetensors")
    (tmp_path / "all.safetensors").write_bytes(
        data.replace(b"hyper_parallel 0", b"hyper_parallel 1")
    )
    with pytest.raises(CheckpointError, match="crc32"):
        checkpoint_to_state_dict(tmp_path / "all.safetensors")


def test_to_hugging_face_and_back(tmp_path):
    state = everything()
    del state["model"]["complex128"]
    state_dict_to_checkpoint(state, tmp_path / "a")
    files = checkpoint_to_hugging_face(
        tmp_path / "a", tmp_path / "hf", max_shard_bytes=1000
    )
    assert len(set(files.values())) > 1
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert index["weight_map"] == files
    del state["model"]["w"]  # head.w is stored
    found = {}
    for name in set(files.values()):
        found.update(load_file(tmp_path / "hf" / name))
    assert same(dict(sorted(found.items())), dict(sorted(state["model"].items())))
    hugging_face_to_checkpoint(tmp_path / "hf", tmp_path / "back")
    assert same(
        checkpoint_to_state_dict(tmp_path / "back"),
        {"model": dict(sorted(state["model"].items()))},
    )
    assert verify_checkpoint(tmp_path / "back") == []
    hugging_face_to_checkpoint(tmp_path / "hf", tmp_path / "flat", prefix="")
    assert same(
        checkpoint_to_state_dict(tmp_path / "flat"),
        dict(sorted(state["model"].items())),
    )
    with pytest.raises(ValueError, match="each end with a dot"):
        hugging_face_to_checkpoint(tmp_path / "hf", tmp_path / "c", prefix="model")


def test_what_hugging_face_cannot_hold_is_refused(folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"model\.complex128: .* no complex128"):
        checkpoint_to_hugging_face(folder, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_pickles_are_passed_on_and_never_loaded(tmp_path):
    planner = StandardSavePlanner(allow_pickle=True)
    save(
        {"slice": slice(1, 2), "w": torch.ones(2)},
        checkpoint_id=tmp_path / "a",
        planner=planner,
        no_dist=True,
    )
    with pytest.raises(CheckpointError, match="is a pickle"):
        checkpoint_to_state_dict(tmp_path / "a")
    assert verify_checkpoint(tmp_path / "a") == []
    checkpoint_to_file(tmp_path / "a", tmp_path / "a.safetensors")
    file_to_checkpoint(tmp_path / "a.safetensors", tmp_path / "b")
    assert compare_checkpoints(tmp_path / "a", tmp_path / "b").is_equal
    with Source(reader_for(tmp_path / "b", allow_pickle=None)) as source:
        assert isinstance(source.objects["slice"], Pickled)
    assert checkpoint_to_state_dict(tmp_path / "b", allow_pickle=True)[
        "slice"
    ] == slice(1, 2)


@pytest.mark.parametrize(
    "size", [(), (0,), (7,), (3, 0, 2), (4, 5), (2, 3, 4), (1, 1, 9), (9, 1, 1)]
)
def test_boxes_fill_a_tensor_in_order(size):
    for most in (2, 3, 8, 10, 16, 64, 1000):
        whole = np.arange(math.prod(size)).reshape(size)
        parts = []
        for box in boxes_in_order(size, 2, most):
            part = whole[tuple(slice(start, start + n) for start, n in box)]
            assert part.nbytes // 8 * 2 <= most
            parts.append(part.reshape(-1))
        assert np.array_equal(
            np.concatenate([np.empty(0, int), *parts]), whole.reshape(-1)
        )


def test_little_memory_is_needed(tmp_path):
    """A tensor of 48 MiB goes everywhere in pieces."""
    w = torch.arange(12 * 2**20, dtype=torch.int32).reshape(4096, -1)
    state_dict_to_checkpoint({"model": {"w": w}}, tmp_path / "a")
    moves = [
        lambda: checkpoint_to_hugging_face(tmp_path / "a", tmp_path / "hf"),
        lambda: checkpoint_to_file(tmp_path / "a", tmp_path / "a.safetensors"),
        lambda: hugging_face_to_checkpoint(tmp_path / "hf", tmp_path / "b"),
        lambda: not verify_checkpoint(tmp_path / "b"),
        lambda: compare_checkpoints(tmp_path / "a", tmp_path / "b").is_equal,
    ]
    for move in moves:
        tracemalloc.start()
        try:
            assert move() is not False
            assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
        finally:
            tracemalloc.stop()
    state = {"model": {"w": torch.zeros(4096, 3072, dtype=torch.int32)}}
    load(state, checkpoint_id=tmp_path / "b", no_dist=True)
    assert torch.equal(state["model"]["w"], w)


# --- verifying


def small(tmp_path, name="a", **more):
    state_dict_to_checkpoint(
        {"w": torch.arange(3000.0), "b": torch.arange(5), "step": 3, **more},
        tmp_path / name,
    )
    return tmp_path / name


def test_every_damaged_byte_is_found(tmp_path):
    folder = small(tmp_path)
    assert verify_checkpoint(folder) == []
    for path in folder.iterdir():
        data = path.read_bytes()
        for place in itertools.chain(
            range(0, len(data), 97), range(len(data) - 20, len(data))
        ):
            path.write_bytes(
                data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
            )
            problems = verify_checkpoint(folder)
            assert any(problem.file == str(path) for problem in problems), (
                path.name,
                place,
            )
        path.write_bytes(data)
    assert verify_checkpoint(folder) == []


def test_all_problems_are_listed(tmp_path):
    folder = small(tmp_path)
    [data] = folder.glob("data-*")
    content = bytearray(data.read_bytes())
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    start = 8 + int.from_bytes(content[:8], "little")
    for name in ("w", "b"):
        content[start + header[name]["data_offsets"][0]] ^= 1
    data.write_bytes(content)
    (folder / "checkpoint.json.0123456789abcdef.tmp").write_text("")
    (folder / "data-0123456789abcdef-00000.safetensors").write_text("")
    (folder / "notes.txt").write_text("of no concern")
    assert {
        (problem.file.rpartition("/")[2], problem.field)
        for problem in verify_checkpoint(folder)
    } == {
        ("checkpoint.json.0123456789abcdef.tmp", None),
        ("data-0123456789abcdef-00000.safetensors", None),
        (data.name, "w"),
        (data.name, "b"),
    }
    data.unlink()
    assert any(
        "is missing; 2 chunks" in problem.message
        for problem in verify_checkpoint(folder)
    )


def test_data_is_verified_without_metadata(tmp_path):
    folder = small(tmp_path)
    [data] = folder.glob("data-*")
    content = bytearray(data.read_bytes())
    content[5000] ^= 1
    data.write_bytes(content)
    (folder / "checkpoint.json").write_text("")
    files = [problem.file for problem in verify_checkpoint(folder)]
    assert files == [str(folder / "checkpoint.json"), str(data)]


def test_a_file_of_another_checkpoint_is_found(tmp_path):
    one, other = small(tmp_path), small(tmp_path, "b")
    [own], [foreign] = one.glob("data-*"), other.glob("data-*")
    own.write_bytes(foreign.read_bytes())
    [problem] = verify_checkpoint(one)
    assert problem.field == "__metadata__.tag"


# --- comparing


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_differences_are_counted_and_measured(dtype, tmp_path):
    generator = torch.Generator().manual_seed(3)
    one = torch.randint(0, 100, (40, 3), generator=generator).to(dtype)
    other = one.clone()
    other[7, 1] = (
        (one[7, 1].to(torch.complex128) + 16).to(dtype)
        if dtype.is_complex
        else (0 if one[7, 1] else 1)
    )
    state_dict_to_checkpoint({"w": one}, tmp_path / "a")
    state_dict_to_checkpoint({"w": other}, tmp_path / "b")
    found = compare_checkpoints(tmp_path / "a", tmp_path / "b").values["w"]
    wide = torch.complex128 if dtype.is_complex else torch.float64
    assert (found.count, found.elements) == (1, 120)
    assert found.largest == (one.to(wide) - other.to(wide)).abs().max().item() > 0


def test_extreme_numbers_are_measured(tmp_path):
    ends = torch.iinfo(torch.int64)
    one = {
        "i": torch.tensor([ends.min, 2**60]),
        "n": torch.tensor([1.0, math.nan]),
        "z": torch.tensor([0.0]),
    }
    other = {
        "i": torch.tensor([ends.max, 2**60 + 1]),
        "n": torch.tensor([math.nan, math.nan]),
        "z": torch.tensor([-0.0]),
    }
    state_dict_to_checkpoint(one, tmp_path / "a")
    state_dict_to_checkpoint(other, tmp_path / "b")
    values = compare_checkpoints(tmp_path / "a", tmp_path / "b").values
    assert (values["i"].count, values["i"].largest) == (2, 2.0**64)
    assert (values["n"].count, math.isnan(values["n"].largest)) == (1, True)
    assert (values["z"].count, values["z"].largest) == (1, 0.0)


def test_names_kinds_and_objects_are_compared(tmp_path):
    one = small(
        tmp_path,
        "a",
        first=1,
        shape=torch.ones(2),
        kind=torch.ones(2),
        nan=math.nan,
        type=1,
    )
    other = small(
        tmp_path, "b", second=1, shape=torch.ones(3), kind=3, nan=math.nan, type=True
    )
    found = compare_checkpoints(one, other)
    assert (found.only_in_first, found.only_in_second) == (("first",), ("second",))
    assert found.kinds == {
        "shape": ("float32 [2]", "float32 [3]"),
        "kind": ("float32 [2]", "object"),
    }
    assert found.objects == {"type": (1, True)}
    assert not found.values
    assert not found.is_equal
    assert compare_checkpoints(one, one).is_equal


def test_tied_names_that_hugging_face_lacks_are_no_difference(tmp_path):
    w = torch.ones(2, 2)
    state = {"model": {"wte.w": w, "head.w": w, "b": torch.ones(2)}, "step": 1}
    state_dict_to_checkpoint(state, tmp_path / "a")
    assert "wte.w" in checkpoint_to_hugging_face(tmp_path / "a", tmp_path / "hf")
    assert compare_checkpoints(
        tmp_path / "a", tmp_path / "hf", prefixes=("model.", "")
    ).is_equal
    del state["model"]["b"]
    state_dict_to_checkpoint(state, tmp_path / "b")
    found = compare_checkpoints(
        tmp_path / "hf", tmp_path / "b", prefixes=("", "model.")
    )
    assert (found.only_in_first, found.only_in_second) == (("b",), ())
