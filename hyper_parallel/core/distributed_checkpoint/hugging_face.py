# SPDX-License-Identifier: Apache-2.0
"""Folders of Hugging Face: loaded straight onto any mesh, and written from a mesh or from a checkpoint.

    load(model.state_dict(), storage_reader=HuggingFaceReader("llama-3-8b"))      each rank reads its part
    save_hugging_face(model.state_dict(), "exported")                              for from_pretrained

Such a folder has model.safetensors, or the shards that model.safetensors.index.json names. A safetensors file by itself
is read in the same way.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hyper_parallel.core.distributed_checkpoint.agreement import Ranks
from hyper_parallel.core.distributed_checkpoint.chunks import Place
from hyper_parallel.core.distributed_checkpoint.data_file import (
    DataFile,
    Piece,
    Progress,
    open_data_file,
    read_small_file,
    sync_folder,
)
from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.filesystem import FileSystemReader
from hyper_parallel.core.distributed_checkpoint.format import (
    METADATA_FILE,
    Stored,
    from_bytes,
)
from hyper_parallel.core.distributed_checkpoint.header import FOREIGN_CODES, Entry
from hyper_parallel.core.distributed_checkpoint.metadata import (
    ITEM_SIZES,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
    dtype_name,
)
from hyper_parallel.core.distributed_checkpoint.report import some
from hyper_parallel.core.distributed_checkpoint.saving import prepare
from hyper_parallel.core.distributed_checkpoint.stacking import (
    Found,
    ReadRename,
    SliceOf,
    apply_rename,
    put_together,
)
from hyper_parallel.core.distributed_checkpoint.state_dict import PerRank, flattened
from hyper_parallel.core.distributed_checkpoint.streaming import (
    Source,
    write_plain_file,
)
from hyper_parallel.core.distributed_checkpoint.strict_json import Field, parse, quoted
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OUR_TEXT = "hyper_parallel.checkpoint"  # what checkpoint.json would be, in the metadata of a file that `convert` wrote
MOST_INDEX_BYTES = 100_000_000
SHARD_BYTES = 5 * 2**30
_WEIGHTS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json)?")
_EMBEDDINGS = ("embed", "wte", "shared")

__all__ = [
    "HuggingFaceReader",
    "SliceOf",
    "export_hugging_face",
    "reader_for",
    "save_hugging_face",
]

Rename = Callable[[str], str] | Mapping[str, str] | None


def reader_for(
    path: str | os.PathLike[str], *, follow_links: bool = False, **options: Any
) -> FileSystemReader:
    """The reader of what is there: a checkpoint, a folder of Hugging Face, or a safetensors file."""
    place = Path(path)
    if not os.path.lexists(place / METADATA_FILE):
        is_file = place.suffix == ".safetensors" and not place.is_dir()
        if is_file or any(os.path.lexists(place / name) for name in (WHOLE, INDEX)):
            return HuggingFaceReader(place, follow_links=follow_links, **options)
    return FileSystemReader(place, **options)


class HuggingFaceReader(FileSystemReader):
    """Reads a folder of Hugging Face, or one safetensors file; there are no checksums to ``verify``.

    ``rename`` says what a tensor of the files is called in the state dict, or that it is a slice of a larger one
    (:class:`SliceOf`). Files that are links, as in the cache of Hugging Face, are opened with ``follow_links=True``
    only.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        follow_links: bool = False,
        rename: ReadRename = None,
        verify: bool = True,
        allow_pickle: bool | None = False,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(
            path, verify=verify, allow_pickle=allow_pickle, progress=progress
        )
        self._follow_links = follow_links
        self._rename = rename
        self._keys: dict[
            tuple[str, tuple[int, ...]], str
        ] = {}  # by a tensor's name and where a chunk begins in it

    def load_metadata(self) -> Metadata:
        tensors: dict[str, list[Found]] = {}
        for place, expected in self._files().items():
            with self.open(place) as file:
                text = file.header.metadata.get(OUR_TEXT)
                if text is not None and self._rename is None and self._is_file:
                    return self._our_own(file, text)
                _check_names(file, expected)
                for entry in file.header.entries.values():
                    target = apply_rename(self._rename, entry.key)
                    name = target if isinstance(target, str) else target.name
                    tensors.setdefault(name, []).append(
                        Found(entry, place, target, file.path)
                    )
        known, self._keys = put_together(tensors)
        return Metadata(known, {}, Stored("0" * 16, 1, {}, "safetensors"))

    def open(self, place: Place) -> DataFile:
        path = self.folder if self._is_file else self.folder / str(place)
        with _links_explained(self._follow_links):
            return open_data_file(path, ours=False, follow_links=self._follow_links)

    def key(self, name: str, chunk: ChunkStorageMetadata) -> str:
        return self._keys.get((name, tuple(chunk.offsets)), name)

    def entry(self, file: DataFile, name: str, chunk: ChunkStorageMetadata) -> Entry:
        in_file = file.header.entries.get(self.key(name, chunk))
        dtype = dtype_name(self._stored(name).properties.dtype)
        if in_file is not None and ((1, *in_file.shape), in_file.dtype) == (
            tuple(chunk.sizes),
            dtype,
        ):
            return replace(
                in_file, shape=tuple(chunk.sizes)
            )  # a slice, whose dim 0 is not in the file
        return super().entry(file, name, chunk)

    @property
    def _is_file(self) -> bool:
        return self.folder.suffix == ".safetensors" and not self.folder.is_dir()

    def _files(self) -> dict[str, set[str] | None]:
        """The names of the files, and the tensors that are expected in each; None for any."""
        if self._is_file:
            return {self.folder.name: None}
        if os.path.lexists(
            self.folder / WHOLE
        ):  # the one that transformers prefers, too
            return {WHOLE: None}
        if not os.path.lexists(self.folder / INDEX):
            raise coded(
                CheckpointError,
                "HP501",
                f"expected {WHOLE} or {INDEX} in this folder, found neither",
                file=self.folder,
            )
        with _links_explained(self._follow_links):
            data = read_small_file(
                self.folder / INDEX, MOST_INDEX_BYTES, follow_links=self._follow_links
            )
        return _indexed(parse(data, self.folder / INDEX))

    def _our_own(self, file: DataFile, text: str) -> Metadata:
        """What `convert` wrote into a file beside its tensors: names of tied tensors, paths, objects."""
        metadata = from_bytes(
            text.encode(), f"{file.path} ({OUR_TEXT})", allow_pickle=self._allow_pickle
        )
        known = metadata.state_dict_metadata.items()
        own = {
            n
            for n, e in known
            if isinstance(e, TensorStorageMetadata) and e.stored_as is None
        }
        _check_names(file, own)
        return metadata


@contextmanager
def _links_explained(follows: bool) -> Iterator[None]:
    """Adds to the error about a link what to do."""
    try:
        yield
    except CheckpointError as error:
        cause = error.__cause__
        if follows or not isinstance(cause, OSError) or cause.errno != errno.ELOOP:
            raise
        told = "a link, which is not followed; HuggingFaceReader(folder, follow_links=True) follows it to anywhere"
        raise coded(CheckpointError, "HP516", told, file=error.file) from cause


def _indexed(root: Field) -> dict[str, set[str] | None]:
    """The tensors of each file; the files are in the folder of the index, whatever it says."""
    if "weight_map" not in root.object():
        root.fail('the field "weight_map" is missing')
    found: dict[str, set[str] | None] = {}
    for place in root["weight_map"].values():
        name = place.text()
        if (
            not name.endswith(".safetensors")
            or any(mark in name for mark in "/\\\0")
            or len(name) > 255
        ):
            place.expected("the name of a .safetensors file in the same folder")
        names = found.setdefault(name, set())
        assert names is not None
        names.add(place.at("name", place.keys[-1]).text())
    return found


def _check_names(file: DataFile, expected: set[str] | None) -> None:
    found = file.header.entries.keys()
    if expected is None or found == expected:
        return
    missing, more = sorted(expected - found), sorted(found - expected)
    told = (
        "is not in the file"
        if missing
        else "is in the file, but was not expected there"
    )
    raise coded(
        CheckpointError,
        "HP516",
        f"{told}: the index belongs to other files",
        file=file.path,
        field=quoted([*missing, *more][0]),
    )


def _renamed(rename: Rename, name: str) -> str:
    if rename is None:
        return name
    made = rename(name) if callable(rename) else rename.get(name, name)
    if type(made) is not str:
        raise coded(
            ValueError, "HP513", f"rename: expected a str for {name!r}, got {made!r}"
        )
    return made


# --- writing


@dataclass(frozen=True)
class _Weight:
    """A tensor of the checkpoint, and what it is in the file."""

    key: str
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


def save_hugging_face(
    state_dict: Mapping[str, Any],
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int = SHARD_BYTES,
    names: Rename = None,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> dict[str, str]:
    """Writes the tensors of a state dict, on all ranks; returns the file of each.

    Of tied tensors the first one is stored. ``names`` says what a tensor is called in the files.
    The data is first saved to a checkpoint inside the folder, which is removed.
    """
    ranks = Ranks()
    target = Path(folder)
    beside = target / "unfinished.tmp"
    order = ranks.together(
        lambda: _only_tensors(state_dict, target, overwrite=overwrite)
    )
    options: dict[str, Any] = {
        "max_shard_bytes": max_shard_bytes,
        "names": names,
        "metadata": metadata,
    }

    def discard() -> None:
        if ranks.is_coordinator:
            shutil.rmtree(beside, ignore_errors=True)

    try:
        prepare(state_dict, beside, None, None, ranks).write(ranks)
        made = export_hugging_face(
            beside, target, prefix="", overwrite=overwrite, keep=order, **options
        )
    except BaseException:
        discard()  # an error of one is an error of all, so nobody reads it any more
        raise
    ranks.together(discard)
    return made


def export_hugging_face(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    prefix: str = "model.",
    max_shard_bytes: int = SHARD_BYTES,
    dtype: Any = None,
    names: Rename = None,
    metadata: Mapping[str, str] | None = None,
    keep: Sequence[str] = (),
    overwrite: bool = False,
    follow_links: bool = False,
    no_dist: bool = False,
    progress: Progress | None = None,
) -> dict[str, str]:
    """Writes those tensors of a checkpoint whose names begin with ``prefix``, without it; returns the file of each.

    Floating-point numbers may be cast to ``dtype``. Of tied tensors one is stored: the one that comes first in
    ``keep``, else the embedding, as in the files of transformers. All ranks write, each some of the shards.
    """
    ranks, target = Ranks(alone=no_dist), Path(folder)
    if max_shard_bytes < 1:
        raise coded(
            ValueError,
            "HP513",
            f"max_shard_bytes must be positive, got {max_shard_bytes}",
        )

    def look() -> tuple[Source, dict[str, list[_Weight]]]:
        _check_target(target, overwrite=overwrite)
        source = Source(
            reader_for(checkpoint, follow_links=follow_links, allow_pickle=None)
        )
        weights = _weights(
            source, prefix, None if dtype is None else dtype_name(dtype), names, keep
        )
        return source, _shards(weights, max_shard_bytes)

    source, shards = ranks.together(look)
    own = list(shards)[ranks.rank :: ranks.world_size]
    notes = {"format": "pt"} if metadata is None else metadata

    def write() -> None:
        target.mkdir(parents=True, exist_ok=True)
        for name in own:
            write_plain_file(
                _growing(target, name),
                list(_pieces(source, shards[name])),
                notes,
                progress,
            )

    with source:
        ranks.together(write, lambda: _remove(target, own))
    ranks.together(lambda: _publish(target, shards) if ranks.is_coordinator else None)
    return {weight.key: name for name, weights in shards.items() for weight in weights}


def _only_tensors(
    state_dict: Mapping[str, Any], target: Path, *, overwrite: bool
) -> list[str]:
    """The names in order; refuses what cannot be in such files."""
    _check_target(target, overwrite=overwrite)
    leaves = flattened(state_dict)
    for name, leaf in leaves.items():
        if isinstance(leaf.value, PerRank) or not get_platform().is_tensor(leaf.value):
            told = f"only tensors can be in files of Hugging Face, got {type(leaf.value).__name__}; leave it out"
            raise coded(CheckpointError, "HP516", told, field=name)
    return list(leaves)


def _check_target(folder: Path, *, overwrite: bool) -> None:
    if not overwrite and (found := _old_weights(folder)):
        told = f"there are weights already: {some(found)}; choose another folder, or pass overwrite=True"
        raise coded(CheckpointError, "HP516", told, file=folder)


def _old_weights(folder: Path) -> list[str]:
    return (
        sorted(path.name for path in folder.iterdir() if _WEIGHTS.fullmatch(path.name))
        if folder.is_dir()
        else []
    )


def _check_options(prefix: str, dtype: str | None) -> None:
    if dtype is not None and "float" not in dtype:
        raise coded(
            ValueError,
            "HP513",
            f"dtype: expected one of floating-point numbers, got {dtype}",
        )
    if prefix and not prefix.endswith("."):
        raise coded(
            ValueError,
            "HP513",
            f"prefix: expected one that ends with a dot, like 'model.', or '', got {prefix!r}",
        )


def _group_names(source: Source, prefix: str) -> dict[str, list[str]]:
    """The names that begin with the prefix, those of one stored tensor together."""
    groups: dict[str, list[str]] = {}
    for name, entry in source.tensors.items():
        if name.startswith(prefix):
            groups.setdefault(entry.stored_as or name, []).append(name)
    if not groups:
        tops = sorted({name.split(".")[0] for name in source.tensors})
        raise coded(
            CheckpointError,
            "HP516",
            f"no tensor has a name that begins with {prefix!r}; there are {some(tops)}; choose a prefix",
        )
    return groups


def _weights(
    source: Source, prefix: str, dtype: str | None, names: Rename, keep: Sequence[str]
) -> list[_Weight]:
    """The tensors that are stored, in the order of their names."""
    _check_options(prefix, dtype)
    groups = _group_names(source, prefix)
    places = {name: place for place, name in enumerate(keep)}
    chosen = sorted(
        min(group, key=lambda name: _preference(name, places))
        for group in groups.values()
    )
    made = [
        _weight(source, name, _renamed(names, name[len(prefix) :]), dtype)
        for name in chosen
    ]
    [(key, count)] = Counter(weight.key for weight in made).most_common(1)
    if count > 1:
        raise coded(
            CheckpointError,
            "HP516",
            "two tensors would have this name in the files",
            field=key,
        )
    return made


def _preference(name: str, places: Mapping[str, int]) -> tuple[int, bool, str]:
    return (
        places.get(name, len(places)),
        not any(word in name for word in _EMBEDDINGS),
        name,
    )


def _weight(source: Source, name: str, key: str, dtype: str | None) -> _Weight:
    own = source.dtype(name)
    kind = dtype if dtype is not None and "float" in own else own
    if kind not in FOREIGN_CODES:
        raise coded(
            CheckpointError,
            "HP516",
            f"files of Hugging Face have no {kind}; leave it out",
            field=name,
        )
    return _Weight(key, name, kind, tuple(source.tensors[name].size))


def _shards(weights: Sequence[_Weight], most: int) -> dict[str, list[_Weight]]:
    """The weights of each file, which has at most so many bytes unless a single tensor has more."""
    shards: list[list[_Weight]] = [[]]
    size = 0
    for weight in weights:
        if shards[-1] and size + weight.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(weight)
        size += weight.nbytes
    if len(shards) == 1:
        return {WHOLE: shards[0]}
    return {
        f"model-{n:05d}-of-{len(shards):05d}.safetensors": shard
        for n, shard in enumerate(shards, 1)
    }


def _pieces(source: Source, weights: Sequence[_Weight]) -> Iterator[Piece]:
    for weight in weights:
        yield Piece(
            weight.key,
            weight.dtype,
            weight.shape,
            lambda w=weight: source.stream(w.name, w.dtype),  # type: ignore[misc]
        )


def _growing(folder: Path, name: str) -> Path:
    return folder / f"{name}.tmp"


def _remove(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        with suppress(OSError):
            _growing(folder, name).unlink(missing_ok=True)


def _publish(folder: Path, shards: Mapping[str, Sequence[_Weight]]) -> None:
    """Gives the files their names; what is read first comes last, so that nobody sees a mixture."""
    try:
        if len(shards) > 1:
            _write_index(_growing(folder, INDEX), shards)
        for name in sorted(
            _old_weights(folder), key=lambda name: name not in (WHOLE, INDEX)
        ):
            (folder / name).unlink()
        for name in shards:
            _growing(folder, name).rename(folder / name)
        sync_folder(folder)
        if len(shards) > 1:
            _growing(folder, INDEX).rename(folder / INDEX)
            sync_folder(folder)
    except OSError as error:
        _remove(folder, [*shards, INDEX])
        raise coded(
            CheckpointError,
            "HP505",
            f"the weights cannot be given their names: {error.strerror}",
            file=folder,
        ) from error


def _write_index(path: Path, shards: Mapping[str, Sequence[_Weight]]) -> None:
    places = {
        weight.key: name for name, weights in shards.items() for weight in weights
    }
    total = sum(weight.nbytes for weights in shards.values() for weight in weights)
    text = (
        json.dumps(
            {
                "metadata": {"total_size": total},
                "weight_map": dict(sorted(places.items())),
            },
            indent=2,
        )
        + "\n"
    )
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
