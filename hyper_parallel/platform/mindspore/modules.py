# SPDX-License-Identifier: Apache-2.0
"""Cells, parameters, hooks, state dicts and single-file checkpoints on MindSpore."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Parameter, mint, nn

from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.mindspore import deferred_tensor, optimizers, private
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

    def own_modules(self, module: Any) -> list[tuple[str, Any]]:
        cells = private.own_cells(module).items()
        return [(name, child) for name, child in cells if child is not None]

    def replace_submodule(self, parent: Any, name: str, module: Any) -> None:
        # Not by parent[name] = module, which renames the parameters as if they had no names yet.
        cells = private.own_cells(parent)
        if name not in cells:
            raise AttributeError(f"{type(parent).__name__} has no cell {name!r}")
        cells[name] = module
        if isinstance(parent, nn.SequentialCell):
            parent.cell_list = list(cells.values())

    def is_module_list(self, module: Any) -> bool:
        return isinstance(module, nn.CellList)

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
        if not is_parameter and (draw := deferred_tensor.draw_of(tensor)) is not None:
            deferred_tensor.remember(new, draw)
        return new

    def _shard_of(self, param: Any, layout: Any) -> Any:
        if not self.is_meta(param):
            return self.clone(layout.part_of(self.detach(param)))
        local = layout.local_shape(tuple(param.shape))
        return deferred_tensor.derived(
            param, local, lambda whole: self.clone(layout.part_of(whole))
        )

    def _parameter_of(self, tensor: Any, like: Any) -> Any:
        return Parameter(tensor, name=like.name, requires_grad=like.requires_grad)

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

    def remove_own_tensor(self, module: Any, name: str) -> None:
        vars(module).pop(name, None)
        buffers = private.own_buffers(module)
        tensors = buffers if name in buffers else private.own_parameters(module)
        tensors[name] = None

    def put_tensor(self, module: Any, name: str, tensor: Any) -> None:
        # Cells ask their parameters for more than tensors have: what is no parameter hides the one of its name.
        if isinstance(tensor, Parameter):
            vars(module).pop(name, None)
            private.own_parameters(module)[name] = tensor
        else:
            vars(module)[name] = tensor

    def with_tensors(self, module: Any, kind: Any, tensors: Mapping[str, Any]) -> Any:
        return private.cell_on(kind, {**vars(module), **tensors})

    def new_linear(self, inputs: int, outputs: int, bias: bool) -> Any:
        return nn.Dense(inputs, outputs, has_bias=bias)

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

    def _frozen_names(self, model: Any) -> set[str]:
        return {
            name
            for name, value in model.state_dict().items()
            if isinstance(value, Parameter) and not value.requires_grad
        }

    def _to_host(self, tensor: Any) -> Any:
        """Untested on hardware: from an accelerator."""
        return self._like(tensor, self.host_tensor)

    def optimizer_parts(
        self, optimizer: Any
    ) -> tuple[Sequence[dict[str, Any]], MutableMapping[Any, dict[str, Any]]]:
        """Of optimizers of ``mindspore.experimental.optim`` and ``nn``, whose state always is; others are refused."""
        return optimizers.parts(optimizer, self.load_into_param)

    def _write_checkpoint(
        self,
        state: Mapping[str, Any],
        path: Path,
        ckpt_format: str,  # noqa: ARG002 - there is one
    ) -> None:
        tensors = {name: self.host_tensor(value) for name, value in state.items()}
        _write(self, tensors, path)

    def _read_checkpoint(self, path: Path, ckpt_format: str) -> dict[str, Any]:  # noqa: ARG002 - there is one
        from safetensors import deserialize

        entries = deserialize(path.read_bytes())
        return {name: self._stored(name, entry, path) for name, entry in entries}

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


def _refuse_prepending(call: str, prepend: bool) -> None:
    if prepend:
        raise ValueError(
            f"{call}: MindSpore runs backward hooks in the order in which they were set; prepend is False"
        )
