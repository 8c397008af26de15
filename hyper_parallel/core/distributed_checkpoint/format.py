# SPDX-License-Identifier: Apache-2.0
"""The file ``checkpoint.json``: a checkpoint's metadata as text, and back, with nothing in it believed unchecked.

    data = to_bytes(metadata)                       one tensor a line
    from_bytes(data, "run/checkpoint.json")         the same metadata, or a CheckpointError that names the field

docs/checkpoint-format.md is the specification.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.core.distributed_checkpoint.chunks import (
    ChunkGrid,
    ChunkList,
    Chunks,
    Cut,
)
from hyper_parallel.core.distributed_checkpoint.codec import decode, encode
from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.metadata import (
    ITEM_SIZES,
    VERSION,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
    dtype_name,
)
from hyper_parallel.core.distributed_checkpoint.strict_json import (
    END,
    Field,
    is_text,
    parse,
)
from hyper_parallel.core.dtensor.placement_types import (
    FusedShard,
    Shard,
    parse_irregular,
)
from hyper_parallel.platform.error_codes import coded, without_hint

METADATA_FILE = "checkpoint.json"
FORMAT = "hyper_parallel checkpoint"
BLOCK = 4096  # bytes under one checksum in the data files
MOST_BYTES = 2**30  # of the file
MOST_DIMS = 64  # of a tensor, and axes of a mesh
MOST_STEPS = 64  # of a path
RANKS_END = 2**31

_FIELDS = (
    "format",
    "version",
    "tag",
    "block",
    "ranks",
    "library",
    "layouts",
    "tensors",
    "objects",
    "paths",
    "crc32",
)
_ENDING = b',\n"crc32":"%08x"}\n'
_ENDING_SIZE = len(_ENDING % 0)
_PRIME = 2**61 - 1
_json = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), allow_nan=False
).encode
_POSITION = 0
_Order = tuple[tuple[int, int, str], ...]


@dataclass(frozen=True)
class Stored:
    """What the storage knows of a checkpoint: the tag in its files' names, how many ranks saved it, its objects."""

    tag: str
    ranks: int
    objects: Mapping[str, Any]
    library: str


def data_file_name(tag: str, rank: int) -> str:
    """The file that a rank writes."""
    return f"data-{tag}-{rank:05d}.safetensors"


def key_of(name: str, chunk: ChunkStorageMetadata, size: Sequence[int]) -> str:
    """The key of a chunk in its file: the tensor's name, and where the chunk begins unless it is the whole."""
    return (
        name
        if chunk.sizes == tuple(size)
        else f"{name}@{','.join(map(str, chunk.offsets))}"
    )


def to_bytes(metadata: Metadata, *, allow_pickle: bool = False) -> bytes:
    """The whole file. What could not be read again is refused here."""
    stored: Stored = metadata.storage_data
    layouts = _Layouts()
    entries = metadata.state_dict_metadata.items()
    objects = {
        name: stored.objects[name]
        for name, entry in entries
        if isinstance(entry, BytesStorageMetadata)
    }
    paths = (metadata.planner_data or {}).items()
    root = {
        "format": FORMAT,
        "version": metadata.version,
        "tag": stored.tag,
        "block": BLOCK,
        "ranks": stored.ranks,
        "library": stored.library,
        "layouts": layouts.all,
        "tensors": {
            n: layouts.tensor(entry)
            for n, entry in entries
            if isinstance(entry, TensorStorageMetadata)
        },
        "objects": {
            name: encode(value, name, allow_pickle=allow_pickle)
            for name, value in objects.items()
        },
        "paths": {
            name: [list(step) if type(step) is tuple else step for step in path]
            for name, path in paths
        },
        "crc32": "",
    }
    _metadata(Field(root, METADATA_FILE), objects)
    text = _text({key: value for key, value in root.items() if key != "crc32"}).encode()
    if len(text) + _ENDING_SIZE > MOST_BYTES:
        raise coded(
            CheckpointError,
            "HP510",
            f"would have {len(text)} bytes, expected at most {MOST_BYTES}",
            file=METADATA_FILE,
        )
    return text + _ENDING % zlib.crc32(text)


class _Layouts:
    """The layouts of tensors, each of them once."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self._by_text: dict[str, int] = {}
        self._by_id: dict[int, int] = {}

    def tensor(self, entry: TensorStorageMetadata) -> dict[str, Any]:
        """The JSON of a tensor."""
        made: dict[str, Any] = {
            "dtype": dtype_name(entry.properties.dtype),
            "shape": list(entry.size),
        }
        if entry.stored_as is not None:
            made["stored_as"] = entry.stored_as
        elif isinstance(entry.chunks, ChunkGrid):
            made.update(
                layout=self._number(entry.chunks.cut), replica=entry.chunks.replica
            )
        else:
            assert isinstance(entry.chunks, Chunks)
            chunks = enumerate(entry.chunks)
            made["chunks"] = [
                [list(c.offsets), list(c.sizes), entry.chunks.place(number)]
                for number, c in chunks
            ]
        return (
            {**made, "requires_grad": True} if entry.properties.requires_grad else made
        )

    def _number(self, cut: Cut) -> int:
        if id(cut) not in self._by_id:  # the tensors keep their cuts alive
            layout = _layout_json(cut)
            number = self._by_text.setdefault(_json(layout), len(self.all))
            if number == len(self.all):
                self.all.append(layout)
            self._by_id[id(cut)] = number
        return self._by_id[id(cut)]


def _layout_json(cut: Cut) -> dict[str, Any]:
    made: dict[str, Any] = {
        "mesh": list(cut.mesh_shape),
        "names": None if cut.names is None else list(cut.names),
    }
    first = cut.ranks[0] if cut.ranks else 0
    if cut.ranks == (
        span := range(first, first + len(cut.ranks))
    ) or cut.ranks == tuple(span):
        made["first"] = first
    else:
        made["ranks"] = list(cut.ranks)
    made["cuts"] = [list(axes) for axes in cut.dim_axes]
    irregular = sorted(cut.irregular.items())
    sections = {
        str(dim): list(placement.sections)
        for dim, placement in irregular
        if isinstance(placement, FusedShard)
    }
    shards = {str(dim): str(p) for dim, p in irregular if str(dim) not in sections}
    if sections:
        made["sections"] = sections
    if shards:
        made["shards"] = shards
    return made


def _text(root: Mapping[str, Any]) -> str:
    """JSON with a line for each layout, tensor, object and path, and without the last brace."""
    parts = []
    for key, value in root.items():
        if isinstance(value, dict):
            lines = [f"{_json(name)}:{_json(inner)}" for name, inner in value.items()]
            parts.append(f"{_json(key)}:{{\n" + ",\n".join(lines) + "}")
        elif isinstance(value, list):
            parts.append(f"{_json(key)}:[\n" + ",\n".join(map(_json, value)) + "]")
        else:
            parts.append(f"{_json(key)}:{_json(value)}")
    return "{" + ",\n".join(parts)


def from_bytes(
    data: bytes, file: str | Path, *, allow_pickle: bool | None = False
) -> Metadata:
    """The metadata in a file; every number and name of it is good to be used."""
    root = _opened(data, file)
    root.record(*_FIELDS)
    values = root["objects"].object().items()
    objects = {
        name: decode(value, name, file, allow_pickle=allow_pickle)
        for name, value in values
    }
    return _metadata(root, objects)


def _opened(data: bytes, file: str | Path) -> Field:
    """The file's object, if its checksum is right and this library knows its version."""
    if len(data) > MOST_BYTES:
        raise coded(
            CheckpointError,
            "HP503",
            f"has {len(data)} bytes, expected at most {MOST_BYTES}",
            file=file,
        )
    body, ending = data[:-_ENDING_SIZE], data[-_ENDING_SIZE:]
    if not re.fullmatch(rb',\n"crc32":"[0-9a-f]{8}"}\n', ending):
        raise coded(
            CheckpointError,
            "HP502",
            "does not end with its checksum: it was cut short, or is no checkpoint",
            file=file,
        )
    if ending != _ENDING % (actual := zlib.crc32(body)):
        told = f"the bytes before it give {actual:08x}: the file is damaged, load another checkpoint"
        raise coded(CheckpointError, "HP502", told, file=file, field="crc32")
    root = parse(data, file)
    found = root.object()
    if found.get("format") != FORMAT:
        root.at("format", found.get("format")).expected(f'"{FORMAT}"')
    version = root.at("version", found.get("version"))
    if version.integer(1) > VERSION:
        told = f"written by a newer version {version.value}, this library reads up to {VERSION}; install a newer one"
        version.fail(told)
    return root


def _metadata(root: Field, objects: Mapping[str, Any]) -> Metadata:
    """What the fields of the file say; its objects are decoded already."""
    if root["block"].integer(1) != BLOCK:
        root["block"].expected(str(BLOCK))
    if not re.fullmatch("[0-9a-f]{16}", root["tag"].text()):
        root["tag"].expected("16 lower-case hexadecimal digits")
    stored = Stored(
        root.value["tag"],
        root["ranks"].integer(1, RANKS_END),
        objects,
        root["library"].text(),
    )
    layouts = [_layout(field) for field in root["layouts"].elements()]
    everything = {_tensor_name(field): field for field in root["tensors"].values()}
    is_tied = {
        name: "stored_as" in field.object() for name, field in everything.items()
    }
    tensors = {
        name: _tensor(field, layouts)
        for name, field in everything.items()
        if not is_tied[name]
    }
    tied = {
        name: _tied(field, tensors)
        for name, field in everything.items()
        if is_tied[name]
    }
    plain = {_name(field): BytesStorageMetadata() for field in root["objects"].values()}
    for name in plain.keys() & everything.keys():
        root["objects"][name].fail("is also the name of a tensor")
    paths = _paths(root["paths"], [*everything, *plain])
    return Metadata({**tensors, **tied, **plain}, paths, stored, root.value["version"])


def _name(field: Field) -> str:
    name = field.keys[-1]
    if not is_text(name) or str(name).startswith("@"):
        field.fail(
            "a name must be text without lone surrogates and must not begin with @; rename it"
        )
    return str(name)


def _tensor_name(field: Field) -> str:
    """A name that no other tensor's chunk has as its key."""
    name = _name(field)
    if name == "__metadata__" or re.search(r"@[0-9]+(,[0-9]+)*\Z", name):
        field.fail(
            'a tensor must not be called "__metadata__" or end like the key of a chunk, "@0,4"; rename it'
        )
    return name


def _layout(field: Field) -> Cut:
    field.record(
        "mesh", "names", "cuts", optional=("first", "ranks", "sections", "shards")
    )
    mesh = field["mesh"].integers(1, RANKS_END)
    cuts = tuple(axes.integers(0, len(mesh)) for axes in field["cuts"].elements())
    if len(mesh) > MOST_DIMS or len(cuts) > MOST_DIMS:
        field.fail(
            f"has {len(mesh)} axes and {len(cuts)} dims, expected at most {MOST_DIMS} of each"
        )
    used = [axis for axes in cuts for axis in axes]
    if len(used) > len(set(used)):
        field["cuts"].fail("an axis cuts twice")
    names = (
        None
        if field.value["names"] is None
        else tuple(name.text() for name in field["names"].elements())
    )
    if names is not None and len(names) != len(mesh):
        field["names"].expected(f"a name for each of {len(mesh)} axes")
    irregular = {**_sections(field, cuts), **_shards(field, cuts, mesh)}
    return Cut(mesh, _mesh_ranks(field, math.prod(mesh)), cuts, irregular, names)


def _mesh_ranks(field: Field, count: int) -> range | tuple[int, ...]:
    if ("first" in field.value) == ("ranks" in field.value):
        field.fail('expected either "first" or "ranks"')
    if "first" in field.value:
        first = field["first"].integer(0, RANKS_END)
        if first + count > RANKS_END:
            field["mesh"].fail(
                f"its last rank would be {first + count - 1}, expected at most {RANKS_END - 1}"
            )
        return range(first, first + count)
    ranks = field["ranks"].integers(0, RANKS_END)
    if len(ranks) != count or len(set(ranks)) != count:
        field["ranks"].expected(
            f"{count} different ranks, as many as the mesh has places"
        )
    return ranks


def _sections(field: Field, cuts: Sequence[Sequence[int]]) -> dict[int, Shard]:
    made: dict[int, Shard] = {}
    if "sections" not in field.value:
        return made
    for sizes in field["sections"].values():
        dim = _irregular_dim(sizes, cuts)
        sections = sizes.integers(0)
        if not sections:
            sizes.expected("at least one size")
        made[dim] = FusedShard(dim, sections)
    return made


def _shards(
    field: Field, cuts: Sequence[Sequence[int]], mesh: Sequence[int]
) -> dict[int, Shard]:
    made: dict[int, Shard] = {}
    if "shards" not in field.value:
        return made
    for text in field["shards"].values():
        dim = _irregular_dim(text, cuts)
        try:
            placement = parse_irregular(text.text())
        except ValueError as error:
            text.fail(without_hint(error))
        ranks, size = mesh[cuts[dim][0]], placement.whole_size(0, 1)
        if placement.dim != dim:
            text.fail(f"is about dim {placement.dim}, expected {dim}")
        try:
            placement.spans(size, ranks, 0)
        except ValueError as error:
            text.fail(without_hint(error))
        made[dim] = placement
    return made


def _irregular_dim(field: Field, cuts: Sequence[Sequence[int]]) -> int:
    dims = {str(dim): dim for dim in range(len(cuts))}
    dim = dims.get(str(field.keys[-1]))
    if dim is None or len(cuts[dim]) != 1:
        field.fail("is not a dim that exactly one axis cuts")
    return dim


def _tensor(field: Field, layouts: Sequence[Cut]) -> TensorStorageMetadata:
    where = ("chunks",) if "chunks" in field.value else ("layout", "replica")
    field.record("dtype", "shape", *where, optional=("requires_grad",))
    dtype, size = _kind(field)
    chunks = (
        _list(field["chunks"], size)
        if "chunks" in where
        else _grid(field, size, layouts)
    )
    return TensorStorageMetadata(_properties(field, dtype), size, chunks)


def _kind(field: Field) -> tuple[str, tuple[int, ...]]:
    """dtype and shape."""
    dtype, size = field["dtype"].text(), field["shape"].integers(0)
    if dtype not in ITEM_SIZES:
        field["dtype"].expected(f"one of {', '.join(ITEM_SIZES)}")
    # Sizes of 0 count as 1, so that no part of the shape is too large to be multiplied either.
    if (
        len(size) > MOST_DIMS
        or math.prod(max(n, 1) for n in size) * ITEM_SIZES[dtype] >= END
    ):
        field["shape"].fail(
            f"expected at most {MOST_DIMS} dims and less than 2**63 bytes"
        )
    return dtype, size


def _properties(field: Field, dtype: str) -> TensorProperties:
    requires_grad = field.value.get("requires_grad", False)
    if type(requires_grad) is not bool:
        field["requires_grad"].expected("true or false")
    return TensorProperties(dtype, requires_grad)


def _grid(field: Field, size: tuple[int, ...], layouts: Sequence[Cut]) -> ChunkGrid:
    cut = layouts[field["layout"].integer(0, len(layouts))]
    if len(cut.dim_axes) != len(size):
        field["layout"].fail(
            f"cuts {len(cut.dim_axes)} dims, but the tensor has {len(size)}"
        )
    for dim, placement in cut.irregular.items():
        ranks = cut.mesh_shape[cut.dim_axes[dim][0]]
        try:
            placement.spans(size[dim], ranks, 0)
        except ValueError as error:
            field["layout"].fail(without_hint(error))
    return ChunkGrid(size, cut, field["replica"].integer(0, cut.replicas))


def _list(field: Field, size: tuple[int, ...]) -> ChunkList:
    chunks, places = [], []
    for chunk in field.elements():
        if len(chunk.list()) != 3:
            chunk.expected("offsets, sizes and a rank")
        offsets, sizes = chunk[0].integers(0), chunk[1].integers(0)
        if not len(offsets) == len(sizes) == len(size):
            chunk.fail(
                f"expected {len(size)} offsets and sizes, got {len(offsets)} and {len(sizes)}"
            )
        if any(o + n > whole for o, n, whole in zip(offsets, sizes, size, strict=True)):
            chunk.fail(f"lies outside of the tensor, whose shape is {size}")
        chunks.append(ChunkStorageMetadata(offsets, sizes))
        places.append(chunk[2].integer(0, RANKS_END))
    if not fill(chunks, size):
        field.fail("the chunks overlap or do not cover the tensor")
    return ChunkList(tuple(chunks), tuple(places))


def fill(chunks: Iterable[ChunkStorageMetadata], size: Sequence[int]) -> bool:
    """Whether every element of a tensor is in exactly one of the chunks, found in one pass over them.

    Each border gets a random number, and a box the product over its dims of (number of its end - number of its start).
    With the coordinates themselves as numbers that is the volume; like volumes, the products of boxes that fill a whole
    add up to that of the whole, whatever the numbers are. For boxes that do not, the difference is a polynomial of the
    numbers that is not zero, and such a one is 0 at a random point with a probability below 2**-50.
    """
    numbers: defaultdict[tuple[int, int], int] = defaultdict(
        lambda: secrets.randbelow(_PRIME)
    )

    def product(offsets: Sequence[int], sizes: Sequence[int]) -> int:
        made = 1
        for dim, (offset, n) in enumerate(zip(offsets, sizes, strict=True)):
            made = made * (numbers[dim, offset + n] - numbers[dim, offset]) % _PRIME
        return made

    total = sum(product(chunk.offsets, chunk.sizes) for chunk in chunks)
    return (total - product([0] * len(size), size)) % _PRIME == 0


def _tied(
    field: Field, stored: Mapping[str, TensorStorageMetadata]
) -> TensorStorageMetadata:
    """A tensor that has no chunks of its own."""
    field.record("dtype", "shape", "stored_as", optional=("requires_grad",))
    other = stored.get(field["stored_as"].text())
    if other is None:
        field["stored_as"].expected("the name of a tensor that is stored itself")
    dtype, size = _kind(field)
    if (other.properties.dtype, other.size) != (dtype, size):
        field["stored_as"].fail(
            f"{other.properties.dtype} of shape {other.size} is stored there"
        )
    return TensorStorageMetadata(
        _properties(field, dtype), size, other.chunks, field.value["stored_as"]
    )


def _paths(field: Field, names: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """Ways through dicts and lists that together are one nested state dict."""
    orders: dict[str, _Order] = {name: (_order(name),) for name in names}
    made = {}
    for path in field.values():
        name = str(path.keys[-1])
        if name not in orders:
            path.fail("is not the name of a tensor or an object")
        if not 1 <= len(path.list()) <= MOST_STEPS:
            path.expected(f"1 to {MOST_STEPS} steps")
        made[name] = tuple(map(_step, path.elements()))
        orders[name] = tuple(map(_order, made[name]))
    before: _Order = ()
    for name, order in sorted(orders.items(), key=lambda item: item[1]):
        if problem := _problem(before, order):
            field.at(name, None).fail(problem)
        before = order
    return made


def _step(field: Field) -> Any:
    if type(field.value) is str:
        return field.text()
    if type(field.value) is not list:
        return field.integer(0, RANKS_END)
    if len(field.value) != 1:
        field.expected("a text, a position, or a list of one int")
    return field.integers(-END)


def _order(step: Any) -> tuple[int, int, str]:
    """What makes steps of all kinds comparable: positions in lists first."""
    if type(step) is int:
        return (_POSITION, step, "")
    return (
        (_POSITION + 1, step[0], "")
        if type(step) is tuple
        else (_POSITION + 2, 0, step)
    )


def _problem(before: _Order, path: _Order) -> str | None:
    """What is wrong with a path, if ``before`` is the one before it in order; there is none before the first."""
    same = next(
        (
            n
            for n, (one, other) in enumerate(zip(before, path, strict=False))
            if one != other
        ),
        len(before),
    )
    if before and same == len(before):
        return "its path is also that of another value, or leads through one"
    if path[0][0] == _POSITION:
        return "its path begins with a position, but a state dict is no list"
    after = before[same] if before else None
    if after and (after[0] == _POSITION) != (path[same][0] == _POSITION):
        return "its path takes something for a dict that another takes for a list"
    for kind, position, _ in path[same:]:
        if kind == _POSITION and position != (after[1] + 1 if after else 0):
            return f"its path has the position {position} in a list whose positions before it are not all taken"
        after = None
    return None
