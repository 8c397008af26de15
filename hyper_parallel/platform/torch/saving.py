# SPDX-License-Identifier: Apache-2.0
"""What torch's and other people's ways of saving do with a distributed tensor: store all of it, or refuse.

pickle, torch.save and safetensors see one rank; what the others have would be missing from the file without a word, so
they take a tensor only where this rank has all of it. torch.distributed.checkpoint asks each rank for its chunks.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hyper_parallel.platform.error_codes import coded

_WAYS_OUT = (
    "On all ranks call save(state_dict, checkpoint_id=folder) of hyper_parallel.core.distributed_checkpoint, or "
    "save_hugging_face(state_dict, folder) of its module hugging_face for safetensors; or save "
    "{name: tensor.full_tensor()}, gathered on all ranks"
)

Box = tuple[tuple[int, int], ...]  # (offset, size) along each dim


class SavedInChunks:
    """The part of a distributed tensor that is about saving it."""

    _local: torch.Tensor
    _layout: Any
    _shape: torch.Size

    @property
    def _is_whole_here(self) -> bool:
        """Whether this rank has all of the tensor: no axis of several ranks cuts it or has a reduction pending."""
        pairs = zip(self._layout.placements, self._layout.mesh_shape, strict=True)
        return all(placement.is_replicate() or size == 1 for placement, size in pairs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not self._is_whole_here:
            mesh = self._layout.mesh
            raise coded(
                TypeError,
                "HP230",
                f"a tensor of shape {tuple(self._shape)} in {self._layout} cannot be pickled or saved by "
                f"torch.save: rank {mesh.rank} has {tuple(self._local.shape)} of it, and what the other ranks "
                f"have would be missing. {_WAYS_OUT}",
            )
        is_parameter = "_is_param" in self.__dict__
        return (
            _rebuild_whole,
            (type(self), self._local, *self._layout.mesh.__reduce__()[1], is_parameter),
        )

    # --- torch.distributed.checkpoint

    def data_ptr(self) -> int:
        """Where this rank's data begins; torch.distributed.checkpoint.async_save is told what to call instead."""
        from hyper_parallel.platform.torch.checkpoint_guards import refuse_staging

        refuse_staging(sys._getframe(1).f_globals.get("__name__"))
        return super().data_ptr()  # type: ignore[misc]

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:  # noqa: A002 - torch's name
        from torch.distributed.checkpoint import metadata, planner

        from hyper_parallel.platform.torch.checkpoint_guards import guard_saving

        if self._layout.is_partial():
            raise coded(
                ValueError,
                "HP213",
                f"torch.distributed.checkpoint: {fqn} lies in {self._layout}; reduce_partial() first",
            )
        guard_saving()
        properties = metadata.TensorProperties.create_from_tensor(self._local)
        return [
            planner.WriteItem(
                index=metadata.MetadataIndex(fqn, chunk.offsets),
                type=planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(
                    chunk=chunk, properties=properties, size=self._shape
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        from hyper_parallel.platform.torch.checkpoint_guards import guard_loading

        guard_loading()
        boxes = [box for box, _ in self._boxes()]
        return [
            ChunkStorageMetadata(
                torch.Size(offset for offset, _ in box),
                torch.Size(size for _, size in box),
            )
            for box in boxes
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        for box, part in self._boxes():
            if index.offset is None or tuple(offset for offset, _ in box) == tuple(
                index.offset
            ):
                return self._local.detach()[part]
        raise coded(
            ValueError,
            "HP220",
            f"{index.fqn}: rank {self._layout.mesh.rank} has no chunk at {tuple(index.offset)}",
        )

    def _boxes(self) -> Iterator[tuple[Box, tuple[slice, ...]]]:
        """Each box of the whole that this rank has, and where it is in the shard; none that is empty."""
        dims = []
        for spans in self._layout.spans_of(tuple(self._shape)):
            stops = list(itertools.accumulate(size for _, size in spans))
            dims.append(
                [
                    (span, slice(stop - span[1], stop))
                    for span, stop in zip(spans, stops, strict=True)
                ]
            )
        for pieces in itertools.product(*dims):
            box = tuple(span for span, _ in pieces)
            if self._shape.numel() == 0 or all(size for _, size in box):
                yield box, tuple(part for _, part in pieces)


def _rebuild_whole(
    cls: Any,
    local: torch.Tensor,
    device_type: str,
    ranks: Any,
    names: Sequence[str] | None,
    is_parameter: bool,
) -> Any:
    made = cls._on_every_rank(local, device_type, ranks, names)
    if is_parameter:
        made._is_param = True
    return made


def allow_loading(cls: type) -> None:
    """Has torch.load take tensors of this class without weights_only=False: they are made of plain values."""
    torch.serialization.add_safe_globals([cls, _rebuild_whole])


class UnpickledHook(functools.partial):  # type: ignore[type-arg]
    """A hook that belongs to a model on a mesh: copied with it, and refused by pickle and torch.compile in words."""

    @property
    def func(self) -> Any:
        """What is called; torch.compile looks at it before it traces the module."""
        from hyper_parallel.platform.torch.compilation import refuse_tracing

        refuse_tracing(lambda: "it met a module that lies on a mesh")
        return super().func

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # In Python, so that torch.compile looks at the hook also where it has skipped the module's own call.
        return super().__call__(*args, **kwargs)

    def __copy__(self) -> UnpickledHook:
        return self

    def __deepcopy__(self, memo: Any) -> UnpickledHook:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise coded(
            TypeError,
            "HP230",
            f"a model that lies on a mesh cannot be pickled or saved by torch.save(model). {_WAYS_OUT}",
        )


# --- safetensors


def _refuse_shards(read: Any) -> Any:
    """A function of safetensors that looks at tensors' memory, for tensors of which this rank has all."""

    def checked(tensors: Any, *more: Any, **named: Any) -> Any:
        if not isinstance(tensors, dict):
            return read(tensors, *more, **named)
        distributed = {
            name: value
            for name, value in tensors.items()
            if isinstance(value, SavedInChunks)
        }
        for name, value in distributed.items():
            if not value._is_whole_here:
                raise coded(
                    ValueError,
                    "HP230",
                    f"safetensors: {name} of shape {tuple(value._shape)} lies in {value._layout}; a file of this "
                    f"rank's shards would miss what the others have. {_WAYS_OUT}",
                )
        whole = {name: value._local.detach() for name, value in distributed.items()}
        return read({**tensors, **whole}, *more, **named)

    return checked


def guard_safetensors() -> None:
    """Has safetensors refuse shards, of which it would take the memory of this rank for the whole tensor."""
    module = importlib.import_module(
        "safetensors.torch"
    )  # once there are such tensors, for it takes a while
    # What save and save_file call, by version, and save_model.
    for name in ("_flatten", "_flatten_as_ptr", "_remove_duplicate_names"):
        if hasattr(module, name):
            setattr(module, name, _refuse_shards(getattr(module, name)))
