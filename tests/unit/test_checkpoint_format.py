# SPDX-License-Identifier: Apache-2.0
"""checkpoint.json: there and back, and every lie in it refused with the name of its field."""

import copy
import dataclasses
import itertools
import json
import math
import re
import tracemalloc
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel import FusedShard
from hyper_parallel.core.distributed_checkpoint.chunks import ChunkGrid, ChunkList, Cut
from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.format import (
    MOST_BYTES,
    Stored,
    data_file_name,
    fill,
    from_bytes,
    key_of,
    to_bytes,
)
from hyper_parallel.core.distributed_checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from tools import fuzz_checkpoint

FILE = "run/checkpoint.json"
TAG = "0123456789abcdef"
WHOLE = {
    "format": "hyper_parallel checkpoint", "version": 1, "tag": TAG, "block": 4096, "ranks": 8,
    "library": "another 1.0",
    "layouts": [
        {"mesh": [2, 4], "names": ["dp", "tp"], "first": 0, "cuts": [[1], []]},
        {"mesh": [4], "names": None, "ranks": [3, 1, 2, 0], "cuts": [[0]], "sections": {"0": [16, 8, 8]}},
    ],
    "tensors": {
        "model.w": {"dtype": "bfloat16", "shape": [8, 6], "layout": 0, "replica": 1, "requires_grad": True},
        "qkv": {"dtype": "float32", "shape": [32], "layout": 1, "replica": 0},
        "model.tied": {"dtype": "bfloat16", "shape": [8, 6], "stored_as": "model.w"},
        "part": {"dtype": "int64", "shape": [3, 2], "chunks": [[[0, 0], [3, 1], 5], [[0, 1], [3, 1], 0]]},
        "number": {"dtype": "complex64", "shape": [], "chunks": [[[], [], 0]]},
    },
    "objects": {"step": 12, "betas": {"$tuple": [0.9, 0.95]}, "state.5": "five"},
    "paths": {"model.w": ["model", "w"], "model.tied": ["model", "tied"], "state.5": ["state", [5]],
              "part": ["list", 0], "number": ["list", 1, "n"]},
}  # fmt: skip


def text_of(root):
    body = json.dumps(root)[:-1].encode()
    return body + b',\n"crc32":"%08x"}\n' % zlib.crc32(body)


def changed(*keys, to=None, root=WHOLE):
    """The whole file with one field set, or removed."""
    made = copy.deepcopy(root)
    holder = made
    for key in keys[:-1]:
        holder = holder[key]
    if to is None:
        del holder[keys[-1]]
    else:
        holder[keys[-1]] = to
    return made


def test_what_another_program_writes_is_understood():
    found = from_bytes(text_of(WHOLE), FILE)
    w, qkv, part = (
        found.state_dict_metadata[name] for name in ("model.w", "qkv", "part")
    )
    assert w.properties == TensorProperties("bfloat16", requires_grad=True)
    assert w.chunks.cut == Cut((2, 4), range(8), ((1,), ()), {}, ("dp", "tp"))
    assert [w.chunks.place(n) for n in range(len(w.chunks))] == [4, 5, 6, 7]
    assert w.chunks[1] == ChunkStorageMetadata((2, 0), (2, 6))
    assert qkv.chunks.cut == Cut(
        (4,), (3, 1, 2, 0), ((0,),), {0: FusedShard(0, (16, 8, 8))}
    )
    assert [(c.offsets, c.sizes) for c in part.chunks] == [
        ((0, 0), (3, 1)),
        ((0, 1), (3, 1)),
    ]
    assert part.chunks.places == (5, 0)
    tied = found.state_dict_metadata["model.tied"]
    assert tied.stored_as == "model.w"
    assert tied.chunks is w.chunks
    assert not tied.properties.requires_grad
    assert found.state_dict_metadata["step"] == BytesStorageMetadata()
    assert found.storage_data == Stored(
        TAG, 8, {"step": 12, "betas": (0.9, 0.95), "state.5": "five"}, "another 1.0"
    )
    assert found.planner_data == {
        "model.w": ("model", "w"), "model.tied": ("model", "tied"), "state.5": ("state", (5,)),
        "part": ("list", 0), "number": ("list", 1, "n"),
    }  # fmt: skip


def test_there_and_back():
    first = from_bytes(text_of(WHOLE), FILE)
    data = to_bytes(first)
    assert json.loads(data) | {"crc32": ""} == WHOLE | {"crc32": ""}
    assert to_bytes(from_bytes(data, FILE)) == data
    assert (
        data.count(b"\n") == 9 + 2 + 5 + 3 + 5 + 2
    )  # a line for each layout, tensor, object and path
    assert (
        b'\n"model.w":{"dtype":"bfloat16","shape":[8,6],"layout":0,"replica":1,"requires_grad":true},\n'
        in data
    )
    assert int(data[-11:-3], 16) == zlib.crc32(data[:-22])


def test_equal_layouts_are_stored_once_and_consecutive_ranks_as_one_number():
    cuts = [
        Cut((2,), (4, 5), ((0,),)),
        Cut((2,), range(4, 6), ((0,),)),
        Cut((2,), (5, 4), ((0,),)),
    ]
    entries = {
        str(n): TensorStorageMetadata(
            TensorProperties("bool"), (4,), ChunkGrid((4,), cut)
        )
        for n, cut in enumerate(cuts)
    }
    data = to_bytes(Metadata(entries, {}, Stored(TAG, 6, {}, "x")))
    assert [
        layout.get("first", layout.get("ranks"))
        for layout in json.loads(data)["layouts"]
    ] == [4, [5, 4]]
    assert [json.loads(data)["tensors"][n]["layout"] for n in "012"] == [0, 0, 1]


def test_names_of_files_and_keys():
    assert data_file_name(TAG, 12) == f"data-{TAG}-00012.safetensors"
    assert key_of("w", ChunkStorageMetadata((0, 0), (4, 2)), (4, 2)) == "w"
    assert key_of("w", ChunkStorageMetadata((0, 2), (4, 2)), (4, 4)) == "w@0,2"
    assert key_of("w", ChunkStorageMetadata((), ()), ()) == "w"


def tensor(**fields):
    return {"dtype": "int8", "shape": [4, 4], **fields}


def layout(**fields):
    return {"mesh": [2, 4], "names": None, "first": 0, "cuts": [[1], []], **fields}


HUGE = 2**63
WRONG = [
    (("format",), "another", "format: expected"),
    (("version",), 7, "version: written by a newer version 7, this library reads up to 1"),
    (("version",), 0, "version: expected an int from 1"),
    (("version",), True, "version: expected an int from 1 to .*, got true"),
    (("version",), "1", 'version: expected an int .*, got "1"'),
    (("tag",), None, 'the field "tag" is missing'),
    (("more",), 1, 'the field "more" is unknown'),
    (("",), 1, 'the field "" is unknown'),
    (("tag",), "../../../etc/pas", "tag: expected 16 lower-case"),
    (("tag",), TAG + "\n", "tag: expected 16"),
    (("block",), 8192, "block: expected 4096"),
    (("ranks",), 0, "ranks: expected an int from 1"),
    (("ranks",), 2**31 + 1, "ranks: expected an int"),
    (("ranks",), 8.0, "ranks: expected an int .*, got 8.0"),
    (("library",), "\ud800", "library: expected a text without lone surrogates"),
    (("layouts",), {}, "layouts: expected a list"),
    (("layouts", 0), [], r"layouts\[0\]: expected an object"),
    (("layouts", 0), layout(mesh=[2, 0]), r"layouts\[0\].mesh\[1\]: expected an int from 1"),
    (("layouts", 0), layout(mesh=[2**20, 2**20]), r"layouts\[0\].mesh: its last rank would be"),
    (("layouts", 0), layout(mesh=[HUGE]), r"mesh\[0\]: expected an int"),
    (("layouts", 0), layout(mesh=[2, True]), r"mesh\[1\]: expected an int .*, got true"),
    (("layouts", 0), layout(mesh=[1] * 65), "has 65 axes"),
    (("layouts", 0), layout(cuts=[[]] * 65), "65 dims"),
    (("layouts", 0), layout(cuts=[[2], []]), r"cuts\[0\]\[0\]: expected an int from 0 to 1"),
    (("layouts", 0), layout(cuts=[[-1], []]), r"cuts\[0\]\[0\]: expected an int from 0 to 1"),
    (("layouts", 0), layout(cuts=[[1], [1]]), "cuts: an axis cuts twice"),
    (("layouts", 0), layout(names=["dp"]), "names: expected a name for each of 2 axes"),
    (("layouts", 0), layout(names=["dp", 1]), r"names\[1\]: expected a text"),
    (("layouts", 0), layout(ranks=[0] * 8), 'expected either "first" or "ranks"'),
    (("layouts", 0, "first"), None, 'expected either "first" or "ranks"'),
    (("layouts", 0), layout(first=2**31 - 7), "its last rank would be"),
    (("layouts", 1, "ranks"), [0, 1, 2, 2], r"layouts\[1\].ranks: expected 4 different ranks"),
    (("layouts", 1, "ranks"), [0, 1, 2], r"layouts\[1\].ranks: expected 4 different ranks"),
    (("layouts", 1, "ranks"), [0, 1, 2, 2**31], r"ranks\[3\]: expected an int"),
    (("layouts", 1, "sections"), {"1": [32]}, r'sections."1": is not a dim that exactly one axis cuts'),
    (("layouts", 1, "sections"), {"00": [32]}, r'sections."00": is not a dim'),
    (("layouts", 1, "sections"), {"0": []}, "expected at least one size"),
    (("layouts", 1, "sections"), {"0": [16, 8, 9]}, "qkv.layout: the sizes of .* add up to 33, but dim 0"),
    (("layouts", 1, "shards"), {"1": "Z(1)"}, r'shards."1": is not a dim that exactly one axis cuts'),
    (("layouts", 1, "shards"), {"0": "S(0)"}, "'S\\(0\\)' is not an irregular placement"),
    (("layouts", 1, "shards"), {"0": "Z(1)"}, "is about dim 1, expected 0"),
    (("layouts", 1, "shards"), {"0": "Z(0; 3)"}, "is not an irregular placement"),
    (("layouts", 1, "shards"), {"0": "G(0; 16+16)"}, "has 2 sizes, but the axis has 4 ranks"),
    (("layouts", 1, "shards"), {"0": "G(0; 1+2+3+4)"}, "add up to 10, but dim 0 has size 32"),
    (("layouts", 0), layout(cuts=[[0, 1], []], sections={"0": [8]}), "is not a dim that exactly one axis cuts"),
    (("tensors",), [], "tensors: expected an object"),
    (("tensors", "model.w"), 3, r'tensors."model.w": expected an object, got 3'),
    (("tensors", "model.w", "dtype"), "float7", 'tensors."model.w".dtype: expected one of bool'),
    (("tensors", "model.w", "dtype"), ["float32"], 'tensors."model.w".dtype: expected a text'),
    (("tensors", "model.w", "shape"), None, 'tensors."model.w": the field "shape" is missing'),
    (("tensors", "model.w", "replica"), 2, 'tensors."model.w".replica: expected an int from 0 to 1, got 2'),
    (("tensors", "model.w", "replica"), False, "replica: expected an int"),
    (("tensors", "model.w", "layout"), 2, "layout: expected an int from 0 to 1, got 2"),
    (("tensors", "model.w", "layout"), 1, "layout: cuts 1 dims, but the tensor has 2"),
    (("tensors", "model.w", "requires_grad"), 1, "requires_grad: expected true or false"),
    (("tensors", "model.w", "chunks"), [], 'the field "layout" is unknown'),
    (("tensors", "model.w", "shape"), [8, -6], r"shape\[1\]: expected an int from 0"),
    (("tensors", "model.w", "shape"), [8, 6.0], r"shape\[1\]: expected an int .*, got 6.0"),
    (("tensors", "model.w", "shape"), [2**31, 2**31], "shape: expected at most 64 dims and less than 2"),
    (("tensors", "model.w", "shape"), [2**40, 2**40], "shape: expected at most 64 dims and less than 2"),
    (("tensors", "model.w", "shape"), [0, 2**62, 8], "shape: expected at most 64 dims and less than 2"),
    (("tensors", "model.w", "shape"), [1] * 65, "shape: expected at most 64 dims"),
    (("tensors", "model.w", "shape"), [HUGE, 0], r"shape\[0\]: expected an int"),
    (("tensors", "@xxh3"), tensor(layout=0, replica=0), r"must not begin with @"),
    (("tensors", "__metadata__"), tensor(layout=0, replica=0), "must not be called"),
    (("tensors", "w@0,4"), tensor(layout=0, replica=0), "end like the key of a chunk"),
    (("tensors", "step"), tensor(layout=0, replica=0), "objects.step: is also the name of a tensor"),
    (("tensors", "\ud800"), tensor(layout=0, replica=0), "lone surrogates"),
    (("tensors", "part", "chunks"), [[[0, 0], [3, 2]]], r"part.chunks\[0\]: expected offsets, sizes and a rank"),
    (("tensors", "part", "chunks"), [[[0], [3, 2], 0]], r"chunks\[0\]: expected 2 offsets and sizes, got 1 and 2"),
    (("tensors", "part", "chunks"), [[[0, 0], [3, 3], 0]], r"chunks\[0\]: lies outside"),
    (("tensors", "part", "chunks"), [[[0, -1], [3, 3], 0]], r"chunks\[0\]\[0\]\[1\]: expected an int"),
    (("tensors", "part", "chunks"), [[[0, 0], [3, 2], 2**31]], r"chunks\[0\]\[2\]: expected an int"),
    (("tensors", "part", "chunks"), [], "chunks: the chunks overlap or do not cover"),
    (("tensors", "part", "chunks"), [[[0, 0], [3, 1], 0]] * 2, "chunks: the chunks overlap or do not cover"),
    (("tensors", "part", "chunks"), [[[0, 0], [3, 2], 0]] * 2, "chunks: the chunks overlap or do not cover"),
    (("tensors", "number", "chunks"), [[[], [], 0]] * 2, "chunks: the chunks overlap or do not cover"),
    (("tensors", "model.tied", "stored_as"), "v", "stored_as: expected the name of a tensor that is stored itself"),
    (("tensors", "model.tied", "stored_as"), "model.tied", "stored_as: expected the name of a tensor"),
    (("tensors", "model.tied", "stored_as"), "qkv", "stored_as: float32 of shape"),
    (("objects",), None, 'the field "objects" is missing'),
    (("objects",), [], "objects: expected an object"),
    (("objects", "@a"), 1, "must not begin with @"),
    (("objects", "step"), {"$tuple": 1}, r'objects.step."\$tuple": expected a list'),
    (("objects", "step"), {"$pickle": "AAAA"}, "is a pickle"),
    (("paths", "unknown"), ["a"], "paths.unknown: is not the name"),
    (("paths", "step"), [], "paths.step: expected 1 to 64 steps"),
    (("paths", "step"), ["a"] * 65, "paths.step: expected 1 to 64 steps"),
    (("paths", "step"), ["a", True], r"paths.step\[1\]: expected an int"),
    (("paths", "step"), ["a", [1, 2]], r"paths.step\[1\]: expected a text, a position"),
    (("paths", "step"), ["a", ["1"]], r"paths.step\[1\]\[0\]: expected an int"),
    (("paths", "step"), ["a", None], r"paths.step\[1\]: expected an int"),
    (("paths", "step"), [0, "a"], "paths.step: its path begins with a position"),
    (("paths", "step"), ["model", "w"], "its path is also that of another value, or leads through one"),
    (("paths", "step"), ["model", "w", "x"], "its path is also that of another value, or leads through one"),
    (("paths", "step"), ["model"], "its path is also that of another value, or leads through one"),
    (("paths", "step"), ["betas", "x"], "its path is also that of another value, or leads through one"),
    (("paths", "step"), ["model", 0], "takes something for a dict that another takes for a list"),
    (("paths", "step"), ["list", "a"], "takes something for a dict that another takes for a list"),
    (("paths", "step"), ["list", [2]], "takes something for a dict that another takes for a list"),
    (("paths", "step"), ["list", 3], "the position 3 in a list whose positions before it are not all taken"),
    (("paths", "step"), ["other", 1], "the position 1 in a list"),
    (("paths", "step"), ["list", 2, 1], "the position 1 in a list"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "to", "told"),
    WRONG,
    ids=[f"{n}-{case[2][:40]}" for n, case in enumerate(WRONG)],
)
def test_each_wrong_field_is_named(keys, to, told):
    with pytest.raises(CheckpointError, match=told) as caught:
        from_bytes(text_of(changed(*keys, to=to)), FILE)
    assert caught.value.file == FILE


@pytest.mark.parametrize(
    "path",
    [
        ["a"],
        ["model", "x"],
        ["list", 2],
        ["list", 1, "m"],
        ["state", [6]],
        ["state", "5"],
    ],
)
def test_control_paths_that_go_together(path):
    assert (
        "step"
        in from_bytes(text_of(changed("paths", "step", to=path)), FILE).planner_data
    )


def test_control_large_numbers_that_are_allowed():
    root = changed("layouts", 0, to=layout(mesh=[2**15, 2**15], first=2**30))
    root = changed("tensors", "model.w", "shape", to=[2**31, 2**29], root=root)
    root = changed("tensors", "model.tied", root=root)
    del root["paths"]["model.tied"]
    tracemalloc.start()
    found = from_bytes(text_of(root), FILE)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert (
        found.state_dict_metadata["model.w"].chunks.place(2**15 - 1)
        == 2**30 + 2**15 + 2**15 - 1
    )


def test_what_could_not_be_read_is_not_written():
    whole = TensorStorageMetadata(
        TensorProperties("bool"), (2,), ChunkGrid((2,), Cut((), range(1), ((),)))
    )
    stored = Stored(TAG, 1, {}, "x")
    to_bytes(Metadata({"w": whole}, {}, stored))
    for name in ("@w", "w@0", "\ud800"):
        with pytest.raises(CheckpointError, match=r"checkpoint.json: tensors\..*name"):
            to_bytes(Metadata({name: whole}, {}, stored))
    half = TensorStorageMetadata(
        TensorProperties("bool"),
        (2,),
        ChunkList((ChunkStorageMetadata((0,), (1,)),), (0,)),
    )
    with pytest.raises(CheckpointError, match="do not cover"):
        to_bytes(Metadata({"w": half}, {}, stored))
    with pytest.raises(
        CheckpointError, match="objects.x: builtins.object cannot be stored"
    ):
        to_bytes(
            Metadata(
                {"x": BytesStorageMetadata()}, {}, Stored(TAG, 1, {"x": object()}, "x")
            )
        )


def test_pickles_are_written_and_read_on_request():
    metadata = Metadata(
        {"x": BytesStorageMetadata()}, {}, Stored(TAG, 1, {"x": range(3)}, "x")
    )
    data = to_bytes(metadata, allow_pickle=True)
    assert from_bytes(data, FILE, allow_pickle=True).storage_data.objects == {
        "x": range(3)
    }
    with pytest.raises(CheckpointError, match="is a pickle"):
        from_bytes(data, FILE)


def test_every_flipped_byte_and_every_truncation_is_noticed():
    data = text_of(changed("layouts", to=[], root=WHOLE | {"tensors": {}, "paths": {}}))
    from_bytes(data, FILE)
    for place, bit in itertools.product(range(len(data)), (0, 5, 7)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << bit
        with pytest.raises(CheckpointError, match="checksum|crc32"):
            from_bytes(bytes(damaged), FILE)
    for length in range(len(data)):
        with pytest.raises(CheckpointError, match="checksum"):
            from_bytes(data[:length], FILE)


def test_the_length_is_limited():
    class Long(bytes):
        def __len__(self):
            return MOST_BYTES + 1

    with pytest.raises(CheckpointError, match="expected at most 1073741824"):
        from_bytes(Long(), FILE)


# --- which chunks fill a tensor, against counting


def counted(chunks, size):
    seen = [0] * math.prod(size)
    for chunk in chunks:
        spans = (
            range(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True)
        )
        for point in itertools.product(*spans):
            seen[
                sum(p * math.prod(size[dim + 1 :]) for dim, p in enumerate(point))
            ] += 1
    return all(count == 1 for count in seen)


@st.composite
def fillings(draw):
    """A tensor cut again and again, and then perhaps spoilt."""
    size = draw(st.lists(st.integers(0, 5), max_size=3))
    boxes = [tuple((0, n) for n in size)]
    for _ in range(draw(st.integers(0, 6)) if size else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(size) - 1))
        offset, n = box[dim]
        at = draw(st.integers(0, n))
        boxes += [
            (*box[:dim], span, *box[dim + 1 :])
            for span in ((offset, at), (offset + at, n - at))
        ]
    if draw(st.booleans()):
        boxes[draw(st.integers(0, len(boxes) - 1))] = tuple(
            draw(
                st.integers(0, n).flatmap(
                    lambda o, n=n: st.tuples(st.just(o), st.integers(0, n - o))
                )
            )
            for n in size
        )
    boxes = draw(st.permutations(boxes))
    return [
        ChunkStorageMetadata(tuple(o for o, _ in box), tuple(n for _, n in box))
        for box in boxes
    ], size


@given(fillings())
@settings(max_examples=200)
def test_filling_is_what_counting_says(filling):
    chunks, size = filling
    assert fill(chunks, size) == counted(chunks, size)


def test_chunks_of_equal_volume_that_do_not_fill():
    boxes = [
        ((0, 0), (2, 1)),
        ((0, 1), (1, 2)),
        ((1, 2), (2, 1)),
        ((2, 0), (1, 2)),
        ((1, 1), (1, 1)),
    ]  # a pinwheel
    assert fill([ChunkStorageMetadata(*box) for box in boxes], (3, 3))
    boxes[4] = ((0, 0), (1, 1))
    assert not fill([ChunkStorageMetadata(*box) for box in boxes], (3, 3))


# --- hostile input


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_value_anywhere_is_accepted_or_refused(data):
    """One field of a good file is replaced by any JSON, its checksum being right."""
    holder = made = copy.deepcopy(WHOLE)
    while True:
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        key = data.draw(st.sampled_from(keys))
        if (
            not holder[key]
            or not isinstance(holder[key], (dict, list))
            or data.draw(st.booleans())
        ):
            break
        holder = holder[key]
    anything = st.recursive(
        st.none() | st.booleans() | st.integers() | st.integers(0, 8) | st.floats(allow_nan=False, allow_infinity=False)
        | st.text() | st.sampled_from(["$tuple", "model.w", "@x", "int8"]),
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$tuple", "$set", "$dict", "$ndarray", "a", "0"]), inner, max_size=2),
        max_leaves=6,
    )  # fmt: skip
    holder[key] = data.draw(anything)
    try:
        found = from_bytes(text_of(made), FILE)
    except CheckpointError:
        return
    assert to_bytes(from_bytes(to_bytes(found), FILE)) == to_bytes(found)


def test_a_small_part_of_the_fuzzing():
    result = fuzz_checkpoint.run(inputs=4000, seed=0)
    assert result.findings == []
    for target in fuzz_checkpoint.TARGETS:
        assert result.accepted[target] > 20, target
        assert result.refused[target] > 1000, target


def test_control_the_fuzzer_finds_what_is_wrong(monkeypatch):
    def careless(data, _):
        return json.loads(data)["tensors"]

    def greedy(data, _):
        return bytearray(len(data) * 100 + (2 << 20)) and None

    def slow(data, _):
        while True:
            pass

    monkeypatch.setattr(fuzz_checkpoint, "MOST_SECONDS", 0.01)
    for read, count, told in (
        (careless, 200, "metadata: .*Error"),
        (greedy, 10, "bytes of memory"),
        (slow, 2, "seconds"),
    ):
        target = dataclasses.replace(fuzz_checkpoint.TARGETS["metadata"], read=read)
        monkeypatch.setattr(fuzz_checkpoint, "TARGETS", {"metadata": target})
        findings = fuzz_checkpoint.run(inputs=count, seed=1).findings
        assert re.match(
            told if told.startswith("metadata") else f".*{told}", findings[0]
        )
