# SPDX-License-Identifier: Apache-2.0
"""Plain Python objects as JSON and back, type for type; what JSON does not know gets a tag.

encode((1, math.inf), "limits")         {"$tuple": [1, {"$float": "inf"}]}
decode(that, "limits", "checkpoint.json")       (1, math.inf)

Types are exact: a subclass comes back as itself or is refused, never as something like it.
"""

from __future__ import annotations

import base64
import json
import math
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.core.distributed_checkpoint.metadata import ITEM_SIZES, dtype_name
from hyper_parallel.core.distributed_checkpoint.strict_json import (
    END,
    MOST_DIGITS,
    MOST_NESTED,
    Field,
    is_text,
)
from hyper_parallel.platform import get_platform

ARRAYS = frozenset(
    name
    for name in ITEM_SIZES
    if name not in {"bfloat16", "float8_e4m3fn", "float8_e5m2"}
)
MOST_DIMS = 32  # of an array, as numpy has it
DEEPEST = (
    MOST_NESTED - 3
)  # brackets around a value; no value without others inside opens more than three
AROUND = 2  # brackets around an object in its file
MOST_EQUAL_HASHES = (
    100  # of different keys; only a file that was made to waste time has more
)

Inner = Callable[[Any, Any, int], Any]  # key, value, brackets around it -> JSON


def encode(value: Any, name: str, *, allow_pickle: bool = False) -> Any:
    """The JSON of an object that a state dict has under a name."""
    return _encode(Field(value, None, ("objects", name)), AROUND, allow_pickle)


@dataclass(frozen=True)
class Pickled:
    """An object that was pickled, for those who only pass it on."""

    data: bytes


def decode(
    value: Any, name: str, file: str | Path, *, allow_pickle: bool | None = False
) -> Any:
    """The object; ``value`` is used up, for its lists and dicts become those of the object.

    Pickles are refused, or unpickled, or, with None, left as they are.
    """
    return _decode(Field(value, file, ("objects", name)), allow_pickle)


def _encode(field: Field, depth: int, allow_pickle: bool) -> Any:
    if depth > DEEPEST:
        field.fail(
            f"is nested too deeply, or contains itself: at most {MOST_NESTED} levels can be stored"
        )

    def inner(key: Any, value: Any, levels: int) -> Any:
        return _encode(field.at(key, value), depth + levels, allow_pickle)

    value, kind = field.value, type(field.value)
    if kind in ENCODERS:
        return ENCODERS[kind](field, inner)
    if (
        isinstance(value, np.generic)
        and value.dtype.name in ARRAYS
        and kind is np.dtype(value.dtype.name).type
    ):
        return {
            "$scalar": {"dtype": value.dtype.name, "data": _base64(value.tobytes())}
        }
    if kind in _dtype_types() and dtype_name(value) in ITEM_SIZES:
        return {"$dtype": dtype_name(value)}
    return _pickled(field) if allow_pickle else _refuse(field)


def _refuse(field: Field) -> Any:
    kind = type(field.value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if get_platform().is_tensor(field.value):
        field.fail(
            f"{name} cannot be stored inside an object: give it a name of its own in the state dict"
        )
    field.fail(
        f"{name} cannot be stored as JSON: convert it to None, bool, int, float, complex, str, bytes, list, tuple, "
        "set, dict, OrderedDict, Counter, a numpy array or a dtype, or pass allow_pickle=True, here and when loading"
    )


def _still_pickled(field: Field, _: Inner) -> Any:
    return {"$pickle": _base64(field.value.data)}


def _pickled(field: Field) -> dict[str, str]:
    try:
        return {"$pickle": _base64(pickle.dumps(field.value))}
    except Exception as error:  # noqa: BLE001 - pickling runs code of the object's class, which may raise anything
        field.fail(f"cannot be pickled: {error!r}")


def _as_it_is(field: Field, _: Inner) -> Any:
    return field.value


def _int(field: Field, _: Inner) -> int:
    if abs(field.value) >= 10 ** (MOST_DIGITS - 1):  # one for the sign
        field.fail(f"an int of {MOST_DIGITS} digits or more cannot be stored")
    return int(field.value)


def _float(field: Field, _: Inner) -> Any:
    return field.value if math.isfinite(field.value) else {"$float": repr(field.value)}


def _str(field: Field, _: Inner) -> str:
    if not is_text(field.value):
        field.fail("a str with lone surrogates cannot be stored; store bytes")
    return str(field.value)


def _bytes(field: Field, _: Inner) -> Any:
    return {"$bytes": _base64(field.value)}


def _complex(field: Field, inner: Inner) -> Any:
    return {
        "$complex": [
            inner("real", field.value.real, 2),
            inner("imag", field.value.imag, 2),
        ]
    }


def _list(field: Field, inner: Inner) -> list[Any]:
    return [inner(number, value, 1) for number, value in enumerate(field.value)]


def _tuple(field: Field, inner: Inner) -> Any:
    return {
        "$tuple": [inner(number, value, 2) for number, value in enumerate(field.value)]
    }


def _set(field: Field, inner: Inner) -> Any:
    return {
        "$set": sorted(
            (inner("element", value, 2) for value in field.value), key=json.dumps
        )
    }


def _dict(field: Field, inner: Inner) -> Any:
    if any(
        type(key) is not str or key.startswith("$") or not is_text(key)
        for key in field.value
    ):
        return _pairs("$dict", field, inner)
    return {key: inner(key, value, 1) for key, value in field.value.items()}


def _pairs(tag: str, field: Field, inner: Inner) -> Any:
    pairs = enumerate(field.value.items())
    return {
        tag: [
            [inner(f"key {n}", key, 3), inner(f"value {n}", value, 3)]
            for n, (key, value) in pairs
        ]
    }


def _array(field: Field, _: Inner) -> Any:
    array = field.value
    name = array.dtype.name
    if name not in ARRAYS or array.dtype != np.dtype(name):
        field.fail(
            f"an array of dtype {array.dtype!r} cannot be stored; convert it to a native bool, int, float or complex"
        )
    return {
        "$ndarray": {
            "dtype": name,
            "shape": list(array.shape),
            "data": _base64(array.tobytes()),
        }
    }


ENCODERS: dict[type, Callable[[Field, Inner], Any]] = {
    Pickled: _still_pickled,
    type(None): _as_it_is, bool: _as_it_is, int: _int, float: _float, complex: _complex, str: _str, bytes: _bytes,
    list: _list, tuple: _tuple, set: _set, dict: _dict, OrderedDict: partial(_pairs, "$ordered"),
    Counter: partial(_pairs, "$counter"), np.ndarray: _array,
}  # fmt: skip


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@cache
def _dtype_types() -> frozenset[type]:
    """The types that the framework's dtypes have."""
    platform = get_platform()
    found = set()
    for name in ITEM_SIZES:
        try:
            found.add(type(platform.str_to_dtype(name)))
        except ValueError:  # a framework need not have them all
            continue
    return frozenset(found)


def _decode(field: Field, allow_pickle: bool | None) -> Any:
    value, kind = field.value, type(field.value)
    if len(field.keys) > MOST_NESTED:
        field.fail(f"is nested deeper than {MOST_NESTED} levels")
    if kind is str:
        return field.text()
    if kind is float and not math.isfinite(value):
        field.expected("a finite number")
    if kind is dict and any(key.startswith("$") for key in value):
        return _decode_tag(field, allow_pickle)
    if kind is dict or kind is list:
        _decode_inside(field, allow_pickle)
    return value


def _decode_inside(field: Field, allow_pickle: bool | None) -> None:
    """In place, so that a file does not need its memory twice."""
    value = field.value
    for key, item in value.items() if type(value) is dict else enumerate(value):
        if type(key) is str and not is_text(key):
            field.at(key, item).fail("a key has lone surrogates")
        if type(item) not in (int, bool, type(None)):
            value[key] = _decode(field.at(key, item), allow_pickle)


def _decode_tag(field: Field, allow_pickle: bool | None) -> Any:
    tag = next(key for key in field.value if key.startswith("$"))
    if len(field.value) > 1 or (tag not in DECODERS and tag != "$pickle"):
        field.at(tag, None).fail(
            f"is not a tag, or not alone; known are {', '.join([*DECODERS, '$pickle'])}"
        )
    content = field[tag]
    if tag == "$pickle":
        return _unpickled(content, allow_pickle)
    if tag in HOLDERS:
        content.list()
        _decode_inside(content, allow_pickle)
    return DECODERS[tag](content)


def _unpickled(field: Field, allow_pickle: bool | None) -> Any:
    if allow_pickle is None:
        return Pickled(_data(field))
    if not allow_pickle:
        field.fail(
            "is a pickle, which can run any code when it is loaded; pass allow_pickle=True if you trust who wrote it"
        )
    data = _data(field)
    try:
        return pickle.loads(data)  # noqa: S301 - the caller asked for it
    except Exception as error:  # noqa: BLE001 - unpickling runs any code, which may raise anything
        field.fail(f"cannot be unpickled: {error!r}")


def _data(field: Field, nbytes: int | None = None) -> bytes:
    """The bytes of a base64 text; where their number is known it is checked before memory is taken."""
    text = field.text()
    if nbytes is not None and len(text) != 4 * (-(-nbytes // 3)):
        field.fail(f"expected the base64 of {nbytes} bytes, got {len(text)} characters")
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        field.fail(f"is not base64: {error}")
    if nbytes is not None and len(data) != nbytes:
        field.fail(f"expected {nbytes} bytes, got {len(data)}")
    return data


def _special_float(field: Field) -> float:
    if type(field.value) is not str or field.value not in ("nan", "inf", "-inf"):
        field.expected('"nan", "inf" or "-inf"')
    return float(field.value)


def _number(field: Field) -> complex:
    parts = field.list()
    if len(parts) != 2 or any(type(part) is not float for part in parts):
        field.fail("expected two floats")
    return complex(*parts)


def _members(field: Field) -> set[Any]:
    return set(_hashable(field, field.value))


def _mapping(make: Callable[[Iterable[tuple[Any, Any]]], Any], field: Field) -> Any:
    for pair in field.elements():
        if len(pair.list()) != 2:
            pair.expected("a key and a value")
    _hashable(field, [key for key, _ in field.value])
    return make((key, value) for key, value in field.value)


def _counter(pairs: Iterable[tuple[Any, Any]]) -> Counter[Any]:
    return Counter(dict(pairs))


def _hashable(field: Field, keys: list[Any]) -> list[Hashable]:
    """Keys that differ, and do not make a table slow."""
    try:
        most = max(Counter(map(hash, keys)).values(), default=0)
    except TypeError as error:
        field.fail(f"holds a key that cannot be one: {error}")
    if most > MOST_EQUAL_HASHES:
        field.fail(
            f"{most} keys have the same hash, expected at most {MOST_EQUAL_HASHES}"
        )
    if len(set(keys)) < len(keys):
        field.fail("has a key twice")
    return keys


def _ndarray(field: Field) -> Any:
    field.record("dtype", "shape", "data")
    shape = field["shape"].integers(0)
    if len(shape) > MOST_DIMS or math.prod(max(size, 1) for size in shape) * 16 >= END:
        field["shape"].fail("is too large for an array")
    return np.array(_elements(field, shape))  # a copy, which can be written to


def _scalar(field: Field) -> Any:
    field.record("dtype", "data")
    return _elements(field, ())[()]


def _elements(field: Field, shape: tuple[int, ...]) -> Any:
    """An array on top of the bytes of a field's ``data``."""
    name = field["dtype"].text()
    if name not in ARRAYS:
        field["dtype"].expected(f"one of {', '.join(sorted(ARRAYS))}")
    data = _data(field["data"], math.prod(shape) * np.dtype(name).itemsize)
    if name == "bool" and data.strip(b"\0\1"):
        field["data"].fail("a bool is a byte 0 or 1")
    return np.ndarray(shape, name, data)


def _dtype(field: Field) -> Any:
    if field.text() not in ITEM_SIZES:
        field.expected(f"one of {', '.join(ITEM_SIZES)}")
    try:
        return get_platform().str_to_dtype(field.value)
    except ValueError as error:
        field.fail(str(error))


HOLDERS = frozenset(
    {"$tuple", "$set", "$dict", "$ordered", "$counter", "$complex"}
)  # of values that may have tags

DECODERS: dict[str, Callable[[Field], Any]] = {
    "$tuple": lambda field: tuple(field.value),
    "$set": _members,
    "$dict": partial(_mapping, dict),
    "$ordered": partial(_mapping, OrderedDict),
    "$counter": partial(_mapping, _counter),
    "$bytes": _data,
    "$float": _special_float,
    "$complex": _number,
    "$ndarray": _ndarray,
    "$scalar": _scalar,
    "$dtype": _dtype,
}
