# SPDX-License-Identifier: Apache-2.0
"""Modules, parameters, hooks, state dicts and single-file checkpoints on torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.platform import Projection
from hyper_parallel.platform.torch.recompute import Wrapper
from hyper_parallel.platform.torch.saving import UnpickledHook
from hyper_parallel.platform.torch.tensors import Tensors

_TRANSPOSED_LINEAR = (
    "transformers.pytorch_utils",
    "Conv1D",
)  # GPT-2's: its weight is (inputs, outputs)


def _unwrap(module: Any) -> Any:
    """The module itself: recompute and swap go by the wrapped module's names."""
    while isinstance(module, Wrapper):
        module = module.inner
    return module


class Modules(Tensors):
    """The part of the contract that is about modules and their parameters."""

    def get_cell_construct(self, cell: Any) -> Callable[..., Any]:
        return cell.forward

    def get_cells_and_names(self, cell: Any) -> Iterable[tuple[str, Any]]:
        return cell.named_modules()

    def own_modules(self, module: Any) -> list[tuple[str, Any]]:
        modules = _unwrap(module)._modules.items()
        return [(name, child) for name, child in modules if child is not None]

    def replace_submodule(self, parent: Any, name: str, module: Any) -> None:
        parent = _unwrap(parent)
        if name not in parent._modules:
            raise AttributeError(f"{type(parent).__name__} has no module {name!r}")
        parent._modules[name] = module

    def is_module_list(self, module: Any) -> bool:
        return isinstance(module, nn.ModuleList)

    def parameters_dict(self, cell: Any) -> dict[str, Any]:
        return dict(cell.named_parameters())

    def search_parameter_by_name(
        self, cell: Any, param_name: str
    ) -> tuple[Any, str, Any] | None:
        path, _, name = param_name.removeprefix("self.").rpartition(".")
        try:
            owner = cell.get_submodule(path)
        except AttributeError:
            return None
        owner = _unwrap(owner)
        param = owner._parameters.get(name)
        return None if param is None else (owner, name, param)

    def update_parameter_by_name(
        self, cell: Any, result: tuple[Any, str, Any], new_param: Any
    ) -> None:
        owner, name, old = result
        if name not in owner._parameters:
            raise coded(
                ValueError,
                "HP132",
                f"update_parameter_by_name: {type(owner).__name__} has no parameter {name!r}",
            )
        if not isinstance(new_param, nn.Parameter):
            new_param = nn.Parameter(new_param, requires_grad=old.requires_grad)
        # Every place that shares the old parameter gets the new one, so that tied weights stay tied.
        for module in {*cell.modules(), owner}:
            for key, param in module._parameters.items():
                if param is old:
                    self._own_parameter(module, key, new_param)

    def _shard_of(self, param: Any, layout: Any) -> Any:
        return self.clone(layout.part_of(param.detach()))

    def _parameter_of(self, tensor: Any, like: Any) -> Any:
        return nn.Parameter(tensor, requires_grad=like.requires_grad)

    def get_param_local_shape(self, param: Any) -> Any:
        return self._local(param).shape

    def get_param_local_data(self, param: Any) -> Any:
        return self._local(param).detach()

    def get_param_type_size(self, param: Any) -> int:
        return self.get_element_size(param)

    def update_param_data(self, param: Any, data: Any) -> None:
        self._local(param).data = self._local(data)

    def is_linear_module(self, module: Any) -> bool:
        return isinstance(module, nn.Linear)

    def is_embedding_module(self, module: Any) -> bool:
        return isinstance(module, nn.Embedding)

    def is_compiled_module(self, module: Any) -> bool:
        return "_orig_mod" in module._modules or module._compiled_call_impl is not None

    def projection(self, module: Any) -> Projection | None:
        if isinstance(module, nn.Linear):
            return Projection("linear", out=0, into=1, features=-1)
        if isinstance(module, nn.Embedding):
            return Projection("embedding", out=1, into=0, features=-1)
        if isinstance(module, nn.modules.conv._ConvNd):
            features = -1 - len(module.kernel_size)
            return Projection(
                "convolution",
                int(module.transposed),
                int(not module.transposed),
                features,
            )
        if any(
            (kind.__module__, kind.__name__) == _TRANSPOSED_LINEAR
            for kind in type(module).__mro__
        ):
            return Projection("linear", out=1, into=0, features=-1)
        return None

    def register_forward_pre_hook(
        self,
        module: Any,
        hook: Callable[..., Any],
        prepend: bool = False,
        with_kwargs: bool = False,
    ) -> Any:
        hook = hook if isinstance(hook, UnpickledHook) else UnpickledHook(hook)
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
        hook = hook if isinstance(hook, UnpickledHook) else UnpickledHook(hook)
        return module.register_forward_hook(
            hook, with_kwargs=with_kwargs, always_call=always_call
        )

    def own_tensors(self, module: Any) -> list[tuple[str, Any]]:
        found = [*module._parameters.items(), *module._buffers.items()]
        return [(name, tensor) for name, tensor in found if tensor is not None]

    def set_own_tensor(self, module: Any, name: str, tensor: Any) -> None:
        from hyper_parallel.platform.torch.owned import load_onto_mesh

        if name in module._buffers:
            module._buffers[name] = tensor
            load_onto_mesh(module)
            return
        old = module._parameters[name]
        is_parameter = isinstance(tensor, nn.Parameter)
        new = (
            tensor
            if is_parameter
            else nn.Parameter(tensor, requires_grad=old.requires_grad)
        )
        self._own_parameter(module, name, new)

    def remove_own_tensor(self, module: Any, name: str) -> None:
        tensors = module._buffers if name in module._buffers else module._parameters
        tensors[name] = None

    def put_tensor(self, module: Any, name: str, tensor: Any) -> None:
        module._parameters[name] = tensor

    def with_tensors(self, module: Any, kind: Any, tensors: Mapping[str, Any]) -> Any:
        twin = kind.__new__(kind)
        attributes = dict(vars(module))
        for own in ("_parameters", "_buffers"):
            old = attributes[own]
            attributes[own] = {name: tensors.get(name, old[name]) for name in old}
        object.__setattr__(twin, "__dict__", attributes)
        return twin

    def new_linear(self, inputs: int, outputs: int, bias: bool) -> Any:
        return nn.Linear(inputs, outputs, bias)

    def _own_parameter(self, module: Any, name: str, new: Any) -> None:
        from hyper_parallel.platform.torch.owned import load_onto_mesh, note_replaced

        old = module._parameters[name]
        module.register_parameter(name, new)
        if isinstance(new, self.DTensorBase):
            note_replaced(module, name, old, new)
            load_onto_mesh(module)

    def register_full_backward_hook(
        self, module: Any, hook: Callable[..., Any], prepend: bool = False
    ) -> Any:
        return module.register_full_backward_hook(hook, prepend=prepend)

    def register_full_backward_pre_hook(
        self, module: Any, hook: Callable[..., Any], prepend: bool = False
    ) -> Any:
        return module.register_full_backward_pre_hook(hook, prepend=prepend)

    def _frozen_names(self, model: Any) -> set[str]:
        named = model.named_parameters(remove_duplicate=False)
        return {name for name, param in named if not param.requires_grad}

    def _to_host(self, tensor: Any) -> Any:
        return tensor.cpu()

    def optimizer_parts(
        self, optimizer: Any
    ) -> tuple[Sequence[dict[str, Any]], MutableMapping[Any, dict[str, Any]]]:
        return optimizer.param_groups, optimizer.state

    _checkpoint_formats = ("safetensors", "pt")

    def _write_checkpoint(
        self, state: Mapping[str, Any], path: Path, ckpt_format: str
    ) -> None:
        tensors = {name: self._local(value).detach() for name, value in state.items()}
        _write(tensors, path, ckpt_format)

    def _read_checkpoint(self, path: Path, ckpt_format: str) -> dict[str, Any]:
        if ckpt_format == "pt":
            return dict(torch.load(path, map_location="cpu", weights_only=True))
        from safetensors.torch import load_file

        return load_file(path)


def _write(tensors: dict[str, torch.Tensor], path: Path, ckpt_format: str) -> None:
    if ckpt_format == "pt":
        torch.save(tensors, path)
        return
    from safetensors.torch import save_file

    # safetensors refuses views and shared memory; tied weights are written once a name.
    seen: set[int] = set()
    plain = {}
    for name, value in tensors.items():
        storage = value.untyped_storage().data_ptr()
        plain[name] = (
            value.clone(memory_format=torch.contiguous_format)
            if storage in seen
            else value.contiguous()
        )
        seen.add(storage)
    save_file(plain, path, metadata={"format": "pt"})
