# SPDX-License-Identifier: Apache-2.0
"""docs/checkpoint-format.md says all that another program needs: a reader and a writer that know only the page."""

import itertools
import json
import math
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch
import xxhash

from hyper_parallel import (
    FusedShard,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from hyper_parallel.core.distributed_checkpoint import load, save
from hyper_parallel.core.distributed_checkpoint.format import from_bytes
from hyper_parallel.testing import run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs/checkpoint-format.md"

# --- a reader, of json, zlib, xxhash, numpy and safetensors; elements are raw bytes, so that it reads any dtype


def read_checkpoint(folder):
    """({name: array of raw elements}, the objects as JSON)."""
    text = (folder / "checkpoint.json").read_bytes()
    assert int(text[-11:-3], 16) == zlib.crc32(text[:-22])
    root = json.loads(text)
    assert (root["format"], root["version"]) == ("hyper_parallel checkpoint", 1)
    files = {
        int(file.stem[22:]): read_data_file(file)
        for file in folder.glob(f"data-{root['tag']}-*.safetensors")
    }
    tensors = {}
    for name, tensor in root["tensors"].items():
        stored_as = tensor.get("stored_as", name)
        made = None
        for offsets, sizes, rank in chunks_of(
            root["tensors"][stored_as], root["layouts"]
        ):
            key = (
                stored_as
                if sizes == tensor["shape"]
                else f"{stored_as}@{','.join(map(str, offsets))}"
            )
            raw = np.frombuffer(files[rank][key], np.uint8).reshape(
                *sizes, -1
            )  # the last dim: bytes of an element
            made = (
                np.empty((*tensor["shape"], raw.shape[-1]), np.uint8)
                if made is None
                else made
            )
            made[
                tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
            ] = raw
        tensors[name] = made
    return tensors, root["objects"]


def read_data_file(file):
    """The bytes of each key, every checksum compared."""
    data = file.read_bytes()
    head = data[: 8 + int.from_bytes(data[:8], "little")]
    assert int(head[34:42], 16) == zlib.crc32(head[:34] + b"00000000" + head[42:])
    assert len(head) % 4096 == 0
    spans = {
        key: value["data_offsets"]
        for key, value in json.loads(head[8:]).items()
        if key != "__metadata__"
    }
    found = {key: bytes(value["data"]) for key, value in safetensors.deserialize(data)}
    in_order = sorted(spans, key=spans.get)
    assert found["@xxh3"] == b"".join(sums_of(found[key]) for key in in_order[:-1])
    return found


def sums_of(data):
    """The checksums of the blocks of a chunk."""
    blocks = [data[n : n + 4096].ljust(4096, b"\0") for n in range(0, len(data), 4096)]
    return b"".join(
        xxhash.xxh3_64_intdigest(block).to_bytes(8, "little") for block in blocks
    )


def chunks_of(tensor, layouts):
    """(offsets, sizes, rank) of each chunk that has elements."""
    if "chunks" in tensor:
        return [chunk for chunk in tensor["chunks"] if math.prod(chunk[1])]
    layout, found = layouts[tensor["layout"]], []
    mesh = layout["mesh"]
    cutting = {axis for axes in layout["cuts"] for axis in axes}
    copying = [axis for axis in range(len(mesh)) if axis not in cutting]
    replica = (
        np.unravel_index(tensor["replica"], [mesh[axis] for axis in copying])
        if copying
        else ()
    )
    dims = [pieces_of(layout, dim, size) for dim, size in enumerate(tensor["shape"])]
    for cell in itertools.product(*dims):
        where = dict(zip(copying, map(int, replica), strict=True)) | {
            a: i for _, _, at in cell for a, i in at.items()
        }
        place = sum(
            where[axis] * math.prod(mesh[axis + 1 :]) for axis in range(len(mesh))
        )
        rank = layout["ranks"][place] if "ranks" in layout else layout["first"] + place
        found.append(
            ([offset for offset, _, _ in cell], [size for _, size, _ in cell], rank)
        )
    return [chunk for chunk in found if math.prod(chunk[1])]


def pieces_of(layout, dim, size):
    """(offset, size, {axis: coordinate}) of each piece of a dim."""
    sections = layout.get("sections", {}).get(str(dim), [size])
    found = [
        (sum(sections[:number]), length, {}) for number, length in enumerate(sections)
    ]
    for axis in layout["cuts"][dim]:
        parts = layout["mesh"][axis]
        cut = [
            (offset, length, at, -(-length // parts), i)
            for offset, length, at in found
            for i in range(parts)
        ]
        spans = [
            (o, min(i * step, n), min((i + 1) * step, n), {**at, axis: i})
            for o, n, at, step, i in cut
        ]
        found = [(offset + begin, end - begin, at) for offset, begin, end, at in spans]
    return found


# --- what is read


def whole(dtype, *shape):
    """Values that say where they are."""
    return (
        torch.arange(1, math.prod(shape) + 1).reshape(shape).to(getattr(torch, dtype))
    )


R = Replicate()
TENSORS = {
    "rows": (whole("bfloat16", 7, 3), [Shard(0), R]),
    "columns": (whole("float32", 4, 5), [R, Shard(1)]),
    "both": (whole("int64", 7, 2), [Shard(0), Shard(0)]),
    "grid": (whole("complex64", 3, 5), [Shard(1), Shard(0)]),
    "fused": (whole("float16", 14, 2), [R, FusedShard(0, (7, 4, 3))]),
    "copied": (whole("float8_e5m2", 6), [R, R]),
    "long": (whole("uint8", 9, 3000), [Shard(1), R]),
    "little": (whole("bool", 2, 1), [Shard(0), Shard(0)]),
}


def save_on_this_rank(folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    made = {
        name: distribute_tensor(tensor, mesh, placed)
        for name, (tensor, placed) in TENSORS.items()
    }
    save(
        {
            "model": {**made, "tied": made["rows"]},
            "list": [torch.tensor(2.5), {"a": (1, b"\0")}],
            "step": 12,
        },
        checkpoint_id=folder,
    )


def written_checkpoint(folder):
    """What `save` wrote on 4 ranks."""
    run_ranks(save_on_this_rank, 4, folder)
    return folder


def raw(tensor):
    return tensor.reshape(-1).view(torch.uint8).reshape(*tensor.shape, -1).numpy()


def test_the_page_is_enough_to_read(tmp_path):
    tensors, objects = read_checkpoint(written_checkpoint(tmp_path / "saved"))
    expected = {f"model.{name}": tensor for name, (tensor, _) in TENSORS.items()}
    expected |= {"model.tied": expected["model.rows"], "list.0": torch.tensor(2.5)}
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(tensors[name], raw(tensor), err_msg=name)
    assert objects == {"list.1.a": {"$tuple": [1, {"$bytes": "AA=="}]}, "step": 12}


def test_control_the_reader_sees_damage(tmp_path):
    folder = written_checkpoint(tmp_path / "saved")
    file = min(folder.glob("data-*"))
    data = bytearray(file.read_bytes())
    for place in (3000, 4096, len(data) - 2):
        data[place] ^= 1
        file.write_bytes(data)
        with pytest.raises(AssertionError):
            read_checkpoint(folder)
        data[place] ^= 1


# --- a writer, of json, zlib and xxhash


def write_checkpoint(folder, arrays, objects):
    """A checkpoint of float32 arrays whose rows two ranks have, cut as the page says."""
    tag, folder = "00112233445566ff", Path(folder)
    folder.mkdir()
    for rank in range(2):
        chunks = {}
        for name, array in arrays.items():
            step = -(-len(array) // 2)
            part = array[rank * step : (rank + 1) * step]
            key = (
                name
                if part.shape == array.shape
                else f"{name}@{min(rank * step, len(array))},0"
            )
            chunks |= {key: part} if part.size else {}
        (folder / f"data-{tag}-{rank:05d}.safetensors").write_bytes(
            data_file(chunks, tag, rank)
        )
    root = {
        "format": "hyper_parallel checkpoint", "version": 1, "tag": tag, "block": 4096, "ranks": 2, "library": "a test",
        "layouts": [{"mesh": [2], "names": None, "first": 0, "cuts": [[0], []]}],
        "tensors": {n: {"dtype": "float32", "shape": a.shape, "layout": 0, "replica": 0} for n, a in arrays.items()},
        "objects": objects,
        "paths": {},
    }  # fmt: skip
    body = json.dumps(root, indent=1)[:-1].rstrip().encode()
    (folder / "checkpoint.json").write_bytes(
        body + b',\n"crc32":"%08x"}\n' % zlib.crc32(body)
    )


def data_file(chunks, tag, rank):
    data, sums = b"", b""
    header = {
        "__metadata__": {
            "crc32": "0" * 8,
            "format": "hyper_parallel",
            "version": "1",
            "tag": tag,
            "rank": str(rank),
        }
    }
    for key, array in chunks.items():
        made = array.astype("<f4").tobytes()
        header[key] = {
            "dtype": "F32",
            "shape": array.shape,
            "data_offsets": [len(data), len(data) + len(made)],
        }
        sums += sums_of(made)
        data += made
    span = [len(data), len(data) + len(sums)]
    header["@xxh3"] = {"dtype": "U64", "shape": [len(sums) // 8], "data_offsets": span}
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-(8 + len(text)) // 4096) * 4096 - 8)
    head = len(text).to_bytes(8, "little") + text
    return head[:34] + b"%08x" % zlib.crc32(head) + head[42:] + data + sums


def test_the_page_is_enough_to_write(tmp_path):
    arrays = {
        "a": np.arange(5000.0).reshape(5, 1000),
        "b": np.ones((1, 3)),
        "c": np.arange(4.0).reshape(2, 2),
    }
    write_checkpoint(
        tmp_path / "made",
        arrays,
        {"step": 3, "betas": {"$tuple": [0.5, {"$float": "inf"}]}},
    )
    found = from_bytes(
        (tmp_path / "made/checkpoint.json").read_bytes(), "checkpoint.json"
    )
    assert found.storage_data.objects == {"step": 3, "betas": (0.5, math.inf)}
    assert [chunk.sizes for chunk in found.state_dict_metadata["a"].chunks] == [
        (3, 1000),
        (2, 1000),
    ]
    state = {name: torch.zeros(array.shape) for name, array in arrays.items()} | {
        "step": 0,
        "betas": None,
    }
    load(state, checkpoint_id=tmp_path / "made", no_dist=True)
    for name, array in arrays.items():
        np.testing.assert_array_equal(state[name].numpy(), array)
    assert (state["step"], state["betas"]) == (3, (0.5, math.inf))


def test_the_example_on_the_page(tmp_path):
    [example] = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    found = from_bytes(example.encode(), "the page")
    w = found.state_dict_metadata["model.w"]
    assert [
        (w.chunks[n].offsets, w.chunks[n].sizes, w.chunks.place(n)) for n in range(2)
    ] == [
        ((0, 0), (2, 2), 0),
        ((2, 0), (1, 2), 1),
    ]
    assert found.storage_data.objects == {"betas": (0.9, 0.95), "step": 12}
