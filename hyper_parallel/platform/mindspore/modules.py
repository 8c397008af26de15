# SPDX-License-Identifier: Apache-2.0
"""Cells, parameters, hooks, state dicts and single-file checkpoints on MindSpore."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, mint, nn

from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.mindspore import deferred, optimizers, private
from hyper_parallel.platform.mindspore.dtensor_base import DTensorBase
from hyper_parallel.platform.mindspore.tensors import DTYPE_NAMES, Tensors
from hyper_parallel.platform.platform import Projection

# What the safetensors format calls the dtypes.
_STORED = {
    "bfloat16": "BF16", "bool": "BOOL", "complex64": "C64", "float16": "F16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int16": "I16", "int32": "I32", "int64": "I64", "int8": "I8",
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "uint8": "U8",
}  # fmt: skip

_LINEAR = (nn.Dense, mint.nn.Linear)
_EMBEDDING = (nn.Embedding, mint.nn.Embedding)
# By the number of dims of the images that they work on (a weight may have more): those from inputs to outputs, and the
# transposed ones.
_CONVOLUTIONS = {
    1: ((nn.Conv1d, mint.nn.Conv1d), (nn.Conv1dTranspose,)),
    2: ((nn.Conv2d, mint.nn.Conv2d), (nn.Conv2dTranspose, mint.nn.ConvTranspose2d)),
    3: ((nn.Conv3d, mint.nn.Conv3d), (nn.Conv3dTranspose,)),
}


class Modules(Tensors):
    """The part of the contract that is about modules and their parameters."""

    def get_cell_construct(self, cell: Any) -> Callable[..., Any]:
        return cell.construct

    def get_cells_and_names(self, cell: Any) -> Iterable[tuple[str, Any]]:
        return cell.cells_and_names()

    def parameters_dict(self, cell: Any) -> dict[str, Any]:
        return dict(cell.parameters_and_names())

    def search_parameter_by_name(
        self, cell: Any, param_name: str
    ) -> tuple[Any, str, Any] | None:
        path, _, name = param_name.removeprefix("self.").rpartition(".")
        owner = dict(cell.cells_and_names()).get(path)
        param = None if owner is None else private.own_parameters(owner).get(name)
        return None if param is None else (owner, name, param)

    def update_parameter_by_name(
        self, cell: Any, result: tuple[Any, str, Any], new_param: Any
    ) -> None:
        owner, name, old = result
        if name not in private.own_parameters(owner):
            raise coded(
                ValueError,
                "HP132",
                f"update_parameter_by_name: {type(owner).__name__} has no parameter {name!r}",
            )
        new = self._parameter_like(old, new_param)
        # Every place that shares the old parameter gets the new one, so that tied weights stay tied.
        for module in {owner, *(module for _, module in cell.cells_and_names())}:
            for key in [
                key
                for key, param in private.own_parameters(module).items()
                if param is old
            ]:
                setattr(module, key, new)

    def _parameter_like(self, old: Any, tensor: Any) -> Any:
        """The tensor as a parameter in the place of an old one, under its name: optimizers go by that."""
        is_parameter = isinstance(tensor, Parameter)
        new = (
            tensor
            if is_parameter
            else Parameter(tensor, name=old.name, requires_grad=old.requires_grad)
        )
        new.name = old.name
        if not is_parameter and (draw := deferred.draw_of(tensor)) is not None:
            deferred.remember(new, draw)
        return new

    def set_layout_into_parameter(self, param: Any, layout: Any) -> Any:
        if isinstance(param, self.DTensorBase):
            raise coded(
                ValueError,
                "HP132",
                f"set_layout_into_parameter: the parameter already has the layout {param.layout!r}",
            )
        if layout.is_partial():
            raise coded(
                ValueError,
                "HP132",
                f"set_layout_into_parameter: {layout} leaves a reduction pending, but a parameter of shape "
                f"{tuple(param.shape)} has its values; use Replicate() or Shard(dim)",
            )
        shape = tuple(param.shape)
        if self.is_meta(param):
            local = layout.local_shape(shape)
            shard = deferred.derived(
                param, local, lambda whole: self.clone(layout.part_of(whole))
            )
        else:
            shard = self.clone(layout.part_of(self.detach(param)))
        return Parameter(
            layout.tensor(shard, shape),
            name=param.name,
            requires_grad=param.requires_grad,
        )

    def get_param_local_shape(self, param: Any) -> Any:
        return self._local(param).shape

    def get_param_local_data(self, param: Any) -> Any:
        return self.detach(self._local(param))

    def get_param_type_size(self, param: Any) -> int:
        return self.get_element_size(param)

    def update_param_data(self, param: Any, data: Any) -> None:
        local = self._local(data)
        if isinstance(param, self.DTensorBase):
            param.set_data(local)  # both views of the shard
        else:
            param.data = local

    def load_into_param(self, param: Any, data: Any) -> None:
        target = self._local(param)
        if self.is_meta(target):
            raise coded(
                ValueError,
                "HP132",
                f"load_into_param: the parameter of shape {tuple(param.shape)} is on the meta device and cannot "
                "hold data; call init_parameters(module, stage_index) first",
            )
        self.copy_into(target, self.detach(self._fitting(param, data)))

    def _fitting(self, param: Any, data: Any) -> Any:
        """What of the data belongs into this rank's shard; moves distributed data if it lies otherwise."""
        is_distributed = isinstance(param, self.DTensorBase)
        if isinstance(data, self.DTensorBase):
            fits = [tuple(param.shape)]
            if (
                tuple(data.shape) == fits[0]
                and is_distributed
                and data.layout.mesh == param.layout.mesh
            ):
                return self._local(self.detach(data).redistribute(None, param.layout))
            source = (
                self.detach(data).full_tensor()
                if tuple(data.shape) == fits[0]
                else data
            )
        else:
            fits = [
                tuple(self._local(param).shape),
                *([tuple(param.shape)] if is_distributed else []),
            ]
            source = data if self.is_tensor(data) else mindspore.Tensor(data)
        if tuple(source.shape) not in fits:
            wanted = (
                f"fits neither of {fits}"
                if len(fits) > 1
                else f"does not fit {fits[0]}"
            )
            raise coded(
                ValueError,
                "HP132",
                f"load_into_param: data of shape {tuple(source.shape)} {wanted}",
            )
        if tuple(source.shape) == tuple(self._local(param).shape):
            return source
        return param.layout.part_of(source)

    def is_linear_module(self, module: Any) -> bool:
        return isinstance(module, _LINEAR)

    def is_embedding_module(self, module: Any) -> bool:
        return isinstance(module, _EMBEDDING)

    def is_compiled_module(self, module: Any) -> bool:  # noqa: ARG002 - distributed tensors refuse graph mode themselves
        return False

    def projection(self, module: Any) -> Projection | None:
        if isinstance(module, _LINEAR):
            return Projection("linear", out=0, into=1, features=-1)
        if isinstance(module, _EMBEDDING):
            return Projection("embedding", out=1, into=0, features=-1)
        for dims, (plain, transposed) in _CONVOLUTIONS.items():
            if isinstance(module, (*plain, *transposed)):
                turned = isinstance(module, transposed)
                return Projection(
                    "convolution", int(turned), int(not turned), features=-1 - dims
                )
        return None

    def register_forward_pre_hook(
        self,
        module: Any,
        hook: Callable[..., Any],
        prepend: bool = False,
        with_kwargs: bool = False,
    ) -> Any:
        return module.register_forward_pre_hook(
            hook, prepend=prepend, with_kwargs=with_kwargs
        )

    def register_forward_hook(
        self,
        module: Any,
        hook: Callable[..., Any],
        with_kwargs: bool = False,
        always_call: bool = False,
    ) -> Any:
        return module.register_forward_hook(
            hook, with_kwargs=with_kwargs, always_call=always_call
        )

    def own_tensors(self, module: Any) -> list[tuple[str, Any]]:
        found = [
            *private.own_parameters(module).items(),
            *private.own_buffers(module).items(),
        ]
        return [(name, tensor) for name, tensor in found if tensor is not None]

    def set_own_tensor(self, module: Any, name: str, tensor: Any) -> None:
        buffers = private.own_buffers(module)
        if name in buffers:
            buffers[name] = tensor
        else:
            setattr(
                module,
                name,
                self._parameter_like(private.own_parameters(module)[name], tensor),
            )

    def register_full_backward_hook(
        self, module: Any, hook: Callable[..., Any], prepend: bool = False
    ) -> Any:
        _refuse_prepending("register_full_backward_hook", prepend)
        return module.register_backward_hook(hook)

    def register_full_backward_pre_hook(
        self, module: Any, hook: Callable[..., Any], prepend: bool = False
    ) -> Any:
        _refuse_prepending("register_full_backward_pre_hook", prepend)
        return module.register_backward_pre_hook(hook)

    def get_model_state_dict(
        self, model: Any, *, options: Any = None
    ) -> dict[str, Any]:
        full = getattr(options, "full_state_dict", False)
        offload = getattr(options, "cpu_offload", False)
        state = dict(model.state_dict())
        if getattr(options, "ignore_frozen_params", False):
            state = {
                name: value
                for name, value in state.items()
                if not isinstance(value, Parameter) or value.requires_grad
            }
        if full:
            state = {name: self._whole(value) for name, value in state.items()}
        if offload:
            # As in torch: the whole state in host memory is wanted once, not once a rank.
            state = (
                {}
                if full and self.get_rank()
                else {n: self._to_host(value) for n, value in state.items()}
            )
        return state

    def _whole(self, value: Any) -> Any:
        return value.full_tensor() if isinstance(value, self.DTensorBase) else value

    def _to_host(self, value: Any) -> Any:
        """Untested on hardware: from an accelerator."""
        return self._like(value, self.host_tensor) if self.is_tensor(value) else value

    def optimizer_parts(
        self, optimizer: Any
    ) -> tuple[Sequence[dict[str, Any]], MutableMapping[Any, dict[str, Any]]]:
        """Of optimizers of ``mindspore.experimental.optim`` and ``nn``, whose state always is; others are refused."""
        return optimizers.parts(optimizer, self.load_into_param)

    def save_checkpoint(
        self, cell: Any, file_path: Any, ckpt_format: str = "safetensors"
    ) -> None:
        _check_format("save_checkpoint", ckpt_format)
        state = cell.state_dict() if isinstance(cell, nn.Cell) else dict(cell)
        wrong = sorted(
            name for name, value in state.items() if not self.is_tensor(value)
        )
        if wrong:
            raise coded(
                ValueError,
                "HP134",
                f"save_checkpoint: only tensors can be saved in one file; {wrong} are none",
            )
        tensors = {name: self.host_tensor(value) for name, value in state.items()}
        target = Path(file_path)
        with tempfile.NamedTemporaryFile(
            dir=target.parent, prefix=f".{target.name}.", delete=False
        ) as handle:
            temporary = Path(handle.name)
        try:
            _write(self, tensors, temporary)
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)

    def load_checkpoint(
        self, file_path: Any, ckpt_format: str = "safetensors"
    ) -> dict[str, Any]:
        _check_format("load_checkpoint", ckpt_format)
        from safetensors import SafetensorError, deserialize

        try:
            found = deserialize(Path(file_path).read_bytes())
        except SafetensorError as error:
            raise coded(
                ValueError,
                "HP134",
                f"load_checkpoint: {file_path} is not a whole safetensors file: {error}",
            ) from error
        return {name: self._stored(name, entry, file_path) for name, entry in found}

    def _stored(self, name: str, entry: dict[str, Any], path: Any) -> Any:
        names = {stored: dtype for dtype, stored in _STORED.items()}
        if entry["dtype"] not in names:
            raise coded(
                ValueError,
                "HP134",
                f"load_checkpoint: {name} in {path} is of {entry['dtype']}, which MindSpore does not have",
            )
        return self.tensor_from_bytes(
            np.array(bytearray(entry["data"])), names[entry["dtype"]], entry["shape"]
        )


def _write(platform: Tensors, tensors: dict[str, Any], path: Path) -> None:
    """A file of the safetensors format: the length of a header, the header, the data. Tied weights come twice."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        stored = _STORED[DTYPE_NAMES[tensor.dtype]]
        header[name] = {
            "dtype": stored,
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text = text.ljust(
        -(-len(text) // 8) * 8
    )  # the data is to begin where any dtype may lie
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(platform.tensor_memory(tensor).tobytes())


def _check_format(call: str, ckpt_format: str) -> None:
    if ckpt_format != "safetensors":
        raise coded(
            ValueError,
            "HP134",
            f"{call}: ckpt_format must be one of safetensors, got {ckpt_format!r}",
        )


def _refuse_prepending(call: str, prepend: bool) -> None:
    if prepend:
        raise ValueError(
            f"{call}: MindSpore runs backward hooks in the order in which they were set; prepend is False"
        )


def _set_on_shards(kind: Any) -> None:
    """Backward hooks of a Cell that gets distributed tensors are set on the shards, and told of shards' gradients."""
    usual = kind.__call__

    @functools.wraps(usual)
    def call(primitive: Any, args: Any) -> Any:
        items = args if isinstance(args, tuple) else (args,)
        if not any(isinstance(item, DTensorBase) for item in items):
            return usual(primitive, args)
        found = usual(
            primitive,
            tuple(
                item.to_local() if isinstance(item, DTensorBase) else item
                for item in items
            ),
        )
        made = tuple(
            item.layout.tensor(local, tuple(item.shape))
            if isinstance(item, DTensorBase)
            else local
            for item, local in zip(items, found, strict=True)
        )
        return made if isinstance(args, tuple) else made[0]

    kind.__call__ = call


_set_on_shards(private.backward_hooks())
