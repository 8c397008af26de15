# SPDX-License-Identifier: Apache-2.0
"""Objects as JSON and back: type for type, bit for bit; what cannot be stored is refused with its place and type."""

import base64
import collections
import enum
import json
import math
import os
import pickle
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.core.distributed_checkpoint.codec import decode, encode
from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.strict_json import (
    MOST_NESTED,
    nesting,
    parse,
)

Point = collections.namedtuple("Point", "x y")
Color = enum.Enum("Color", "RED")
Level = enum.IntEnum("Level", "LOW")


class Text(str):
    __slots__ = ()


def there_and_back(value, **options):
    text = json.dumps(encode(value, "name", **options), allow_nan=False)
    return decode(json.loads(text), "name", "checkpoint.json", **options)


def alike(one, other):
    """Equal, and of one type all the way down, with NaN equal to itself and 0.0 not to -0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict):
        return alike(list(one.items()), list(other.items()))
    if isinstance(one, set):
        return alike(sorted(one, key=repr), sorted(other, key=repr))
    if isinstance(one, (np.ndarray, np.generic)):
        return (one.dtype, one.shape, one.tobytes()) == (
            other.dtype,
            other.shape,
            other.tobytes(),
        )
    if isinstance(one, complex):
        return alike((one.real, one.imag), (other.real, other.imag))
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or struct.pack(
            "d", one
        ) == struct.pack("d", other)
    return one == other


numbers = st.one_of(
    st.integers(-(10**40), 10**40),
    st.floats(),
    st.complex_numbers(),
    st.booleans(),
    st.none(),
)
keys = st.one_of(
    st.integers(),
    st.text(),
    st.binary(max_size=4),
    st.booleans(),
    st.tuples(st.integers(), st.text()),
)
values = st.recursive(
    st.one_of(numbers, st.text(), st.binary()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(
            st.one_of(st.text(), st.sampled_from(["$tuple", "$", "a"])),
            inner,
            max_size=3,
        ),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict),
        st.dictionaries(keys, st.integers(), max_size=3).map(collections.Counter),
        st.sets(keys, max_size=3),
    ),
    max_leaves=12,
)


@given(values)
def test_everything_comes_back_as_it_was(value):
    assert alike(there_and_back(value), value)


ARRAYS = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32",
          "float64", "complex64", "complex128")  # fmt: skip


@pytest.mark.parametrize("dtype", ARRAYS)
def test_arrays_and_scalars_of_numpy(dtype):
    array = np.array([[0, 1, 3], [1, 0, 100]]).astype(dtype)
    for value in (
        array,
        array.T,
        array[:, ::2],
        array[:0],
        array[0, 1],
        np.array(array[1, 2]),
    ):
        back = there_and_back(value)
        assert alike(back, value)
        assert not isinstance(back, np.ndarray) or back.flags.writeable


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float32, torch.bool, torch.float8_e4m3fn, torch.complex128],
)
def test_dtypes_of_the_framework(dtype):
    assert encode(dtype, "x") == {"$dtype": str(dtype).removeprefix("torch.")}
    assert there_and_back({"dtype": dtype}) == {"dtype": dtype}


def test_the_text_of_each_tag():
    assert encode((1, [2.5]), "x") == {"$tuple": [1, [2.5]]}
    assert encode({"b", "a", 1}, "x") == {"$set": ["a", "b", 1]}
    assert encode(b"\0\xff", "x") == {"$bytes": "AP8="}
    assert encode([math.nan, math.inf, -math.inf], "x") == [
        {"$float": "nan"},
        {"$float": "inf"},
        {"$float": "-inf"},
    ]
    assert encode(complex(1, -math.inf), "x") == {"$complex": [1.0, {"$float": "-inf"}]}
    assert encode({1: "a", "b": None}, "x") == {"$dict": [[1, "a"], ["b", None]]}
    assert encode({"$a": 1}, "x") == {"$dict": [["$a", 1]]}
    assert encode(collections.Counter("aab"), "x") == {"$counter": [["a", 2], ["b", 1]]}
    assert encode(collections.OrderedDict(a=1), "x") == {"$ordered": [["a", 1]]}
    array = np.array([[1, 2]], np.int16)
    assert encode(array, "x") == {
        "$ndarray": {"dtype": "int16", "shape": [1, 2], "data": "AQACAA=="}
    }
    assert encode(np.float16(1), "x") == {
        "$scalar": {"dtype": "float16", "data": "ADw="}
    }


def schedules():
    optimizer = torch.optim.SGD(
        [torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9
    )
    kinds = torch.optim.lr_scheduler
    step = kinds.MultiStepLR(optimizer, [3, 3, 5])
    yield step
    yield kinds.ReduceLROnPlateau(optimizer)
    yield kinds.OneCycleLR(optimizer, 0.5, total_steps=10)
    yield kinds.CosineAnnealingLR(optimizer, 10)
    yield kinds.SequentialLR(
        optimizer,
        [kinds.ConstantLR(optimizer), kinds.ExponentialLR(optimizer, 0.5)],
        [2],
    )


def test_the_states_of_schedules():
    for schedule in schedules():
        assert alike(there_and_back(schedule.state_dict()), schedule.state_dict()), (
            schedule
        )


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (Point(1, 2), "Point"),
        (Color.RED, "Color"),
        (Level.LOW, "Level"),
        (Text("a"), "Text"),
        (collections.defaultdict(int), "collections.defaultdict"),
        (torch.Size([2]), "torch.Size"),
        (bytearray(b"a"), "bytearray"),
        (frozenset(), "frozenset"),
        (range(3), "range"),
        (object(), "builtins.object"),
        (print, "builtin_function_or_method"),
        (np.longdouble(1), "numpy.longdouble|numpy.float128"),
        (np.str_("a"), "numpy.str_"),
        (np.dtype("float32"), "numpy.dtype"),
        (np.array(["a"]), "an array of dtype"),
        (np.array([None]), "an array of dtype"),
        (np.zeros(2, ">f4"), "an array of dtype"),
        (np.zeros(2, "f4,i4"), "an array of dtype"),
        (np.ma.array([1]), "MaskedArray"),
        ("\ud800", "surrogates"),
        ({"\ud800": 1}, "surrogates"),
        (10**1000, "an int of 1000 digits or more"),
        (torch.zeros(2), "torch.Tensor cannot be stored inside an object"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_its_place(value, told):
    with pytest.raises(CheckpointError, match=told) as caught:
        encode({"a b": [0, value]}, "schedule")
    assert caught.value.field.startswith('objects.schedule."a b"[1]')


def test_a_refusal_says_the_way_out():
    with pytest.raises(
        CheckpointError,
        match=r"objects.x.a: .*Point cannot be stored as JSON: convert it .* allow_pickle",
    ):
        encode({"a": Point(1, 2)}, "x")


def test_what_holds_itself_or_is_too_deep_is_refused():
    loop = {"a": [1]}
    loop["a"].append((loop,))
    with pytest.raises(CheckpointError, match="nested too deeply, or contains itself"):
        encode(loop, "x")
    for wrap in (
        lambda v: [v],
        lambda v: (v,),
        lambda v: {"a": v},
        lambda v: {1: v},
        lambda v: collections.Counter({1: v}),
    ):
        deep = math.nan
        with pytest.raises(CheckpointError, match="nested too deeply"):
            for _ in range(MOST_NESTED):
                stored = json.dumps({"objects": {"x": encode(deep, "x")}})
                assert nesting(stored.encode()) <= MOST_NESTED
                deep = wrap(deep)
        assert (
            nesting(stored.encode()) > MOST_NESTED - 6
        )  # refused no earlier than needed
        decode(parse(stored.encode(), "f").value["objects"]["x"], "x", "f")


def test_pickles_only_on_request():
    value = {"a": Point(1, 2), "b": [Level.LOW, 1]}
    stored = encode(value, "x", allow_pickle=True)
    assert set(stored["a"]) == {"$pickle"}
    assert stored["b"][1] == 1
    assert alike(
        decode(json.loads(json.dumps(stored)), "x", "f", allow_pickle=True), value
    )
    with pytest.raises(
        CheckpointError,
        match=r"f: objects.x.a.\"\$pickle\": is a pickle, .* allow_pickle=True",
    ):
        decode(stored, "x", "f")
    with pytest.raises(CheckpointError, match="cannot be pickled"):
        encode(lambda: 0, "x", allow_pickle=True)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("must not exist",)


def test_a_pickle_is_not_touched_without_request(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stored = {"$pickle": base64.b64encode(pickle.dumps(Bomb())).decode()}
    for value in (
        stored,
        [stored],
        {"$tuple": [stored]},
        {"$dict": [[1, stored]]},
        {"$dict": [[stored, 1]]},
    ):
        with pytest.raises(CheckpointError, match="is a pickle"):
            decode(json.loads(json.dumps(value)), "x", "f")
    assert not list(tmp_path.iterdir())
    decode(stored, "x", "f", allow_pickle=True)  # the control
    assert list(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="cannot be unpickled"):
        decode({"$pickle": "AAAA"}, "x", "f", allow_pickle=True)


BOX = {"dtype": "int8", "shape": [2], "data": "AAA="}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"$tuple": {}}, "expected a list, got an object of 0"),
        ({"$tuple": [], "a": 1}, "not a tag, or not alone"),
        ({"$what": 1}, "not a tag"),
        ({"$float": "1"}, 'expected "nan"'),
        ({"$float": 1}, 'expected "nan"'),
        ({"$complex": [1, 2.0]}, "expected two floats"),
        ({"$complex": [1.0]}, "expected two floats"),
        ({"$bytes": "A"}, "is not base64"),
        ({"$bytes": "A A="}, "is not base64"),
        ({"$bytes": "é"}, "is not base64"),
        ({"$bytes": 1}, "expected a text"),
        ({"$set": [1, 1]}, "has a key twice"),
        ({"$set": [1, True]}, "has a key twice"),
        ({"$set": [[]]}, "cannot be one: unhashable"),
        ({"$dict": [1]}, "expected a list"),
        ({"$dict": [[1]]}, "expected a key and a value"),
        ({"$dict": [{"$ndarray": BOX}]}, "expected a list, got ndarray"),
        ({"$dict": [[1, 2], [1.0, 3]]}, "has a key twice"),
        ({"$dict": [[{}, 2]]}, "cannot be one: unhashable"),
        (
            {"$set": [n * (2**61 - 1) for n in range(200)]},
            "200 keys have the same hash",
        ),
        ({"$dtype": "int7"}, "expected one of bool"),
        ({"$ndarray": {**BOX, "more": 1}}, 'the field "more" is unknown'),
        ({"$ndarray": {**BOX, "": 1}}, 'the field "" is unknown'),
        ({"$ndarray": {**BOX, "dtype": "object"}}, "expected one of bool"),
        ({"$ndarray": {**BOX, "dtype": "bfloat16"}}, "expected one of bool"),
        ({"$ndarray": {**BOX, "shape": [3]}}, "expected 3 bytes, got 2"),
        ({"$ndarray": {**BOX, "shape": [2**40, 2**40]}}, "too large"),
        ({"$ndarray": {**BOX, "shape": [2**40, 2**20, 0]}}, "too large"),
        ({"$ndarray": {**BOX, "shape": [2**40]}}, "expected the base64 of"),
        ({"$ndarray": {**BOX, "shape": [True]}}, "expected an int"),
        ({"$ndarray": {**BOX, "shape": [-1]}}, "expected an int"),
        ({"$ndarray": {**BOX, "shape": [1] * 33, "data": "AA=="}}, "too large"),
        (
            {"$ndarray": {**BOX, "dtype": "bool", "data": "AAI="}},
            "a bool is a byte 0 or 1",
        ),
        ({"$scalar": {"dtype": "int8", "data": "AAA="}}, "expected 1 bytes, got 2"),
        ("\ud800", "surrogates"),
        ({"\udfff": 1}, "surrogates"),
        (math.inf, "finite"),
    ],
)
def test_values_that_are_wrong_are_refused(value, told):
    with pytest.raises(CheckpointError, match=told) as caught:
        decode([value], "x", "f")
    assert (caught.value.file, caught.value.field[:12]) == ("f", "objects.x[0]")


def test_numbers_that_share_a_hash_by_chance_are_no_matter():
    assert alike(there_and_back({-1, -2, 0, 2**61 - 1}), {-1, -2, 0, 2**61 - 1})


def brute_nesting(text):
    depth = deepest = 0
    inside = escaped = False
    for code in text:
        if escaped:
            escaped = False
        elif inside:
            escaped, inside = code == ord("\\"), code != ord('"')
        elif code == ord('"'):
            inside = True
        else:
            depth += (code in b"[{") - (code in b"]}")
            deepest = max(deepest, depth)
    return deepest


@given(
    st.recursive(
        st.text('"\\[{]}ab'),
        lambda inner: st.lists(inner) | st.dictionaries(st.text('"\\[}'), inner),
    )
)
def test_nesting_is_counted_outside_of_strings(value):
    text = json.dumps(value).encode()
    assert nesting(text) == brute_nesting(text)


def test_nesting_over_long_texts():
    text = b'"%s"' % (b"[" * 3_000_000)
    assert nesting(text) == 0
    assert nesting(b"[" * 3_000_000) == 3_000_000
    assert nesting(b"[%s,%s]" % (text, b"[[]]" * 600_000)) == 3
    assert nesting(b"") == 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"[" * 65 + b"]" * 65, "nested 65 levels deep"),
        (b'{"a":1,"b":2,"a":3}', 'the key \\\\"a\\\\" twice|the key "a" twice'),
        (b"[NaN]", "NaN is not finite"),
        (b"[-Infinity]", "not finite"),
        (b"1e999", "not finite"),
        (b"1" * 1001, "an int of 1001 digits"),
        (b"\xff", "cannot be read as JSON"),
        (b"\xef\xbb\xbf1", "cannot be read as JSON"),
        ("1".encode("utf-16"), "cannot be read as JSON"),
        (b"", "cannot be read as JSON"),
        (b"[1,]", "cannot be read as JSON"),
        (b'"' + b"\0" + b'"', "cannot be read as JSON"),
    ],
)
def test_texts_that_are_no_strict_json(text, told):
    with pytest.raises(CheckpointError, match=told):
        parse(text, "f")
