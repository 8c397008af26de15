# SPDX-License-Identifier: Apache-2.0
"""Modules, parameters, hooks, state dicts and single-file checkpoints on torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.platform import Projection
from hyper_parallel.platform.torch.owned import load_onto_mesh, note_replaced
from hyper_parallel.platform.torch.recompute import Wrapper
from hyper_parallel.platform.torch.saving import UnpickledHook
from hyper_parallel.platform.torch.tensors import Tensors

_FORMATS = ("safetensors", "pt")
_TRANSPOSED_LINEAR = (
    "transformers.pytorch_utils",
    "Conv1D",
)  # GPT-2's: its weight is (inputs, outputs)


class Modules(Tensors):
    """The part of the contract that is about modules and their parameters."""

    def get_cell_construct(self, cell: Any) -> Callable[..., Any]:
        return cell.forward

    def get_cells_and_names(self, cell: Any) -> Iterable[tuple[str, Any]]:
        return cell.named_modules()

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
        while isinstance(
            owner, Wrapper
        ):  # recompute and swap go by the wrapped module's names
            owner = owner.inner
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
        shard = self.clone(layout.part_of(param.detach()))
        return nn.Parameter(
            layout.tensor(shard, shape), requires_grad=param.requires_grad
        )

    def get_param_local_shape(self, param: Any) -> Any:
        return self._local(param).shape

    def get_param_local_data(self, param: Any) -> Any:
        return self._local(param).detach()

    def get_param_type_size(self, param: Any) -> int:
        return self.get_element_size(param)

    def update_param_data(self, param: Any, data: Any) -> None:
        self._local(param).data = self._local(data)

    def load_into_param(self, param: Any, data: Any) -> None:
        target = self._local(param)
        if target.is_meta:
            raise coded(
                ValueError,
                "HP132",
                f"load_into_param: the parameter of shape {tuple(param.shape)} is on the meta device and cannot "
                "hold data; call init_parameters(module, stage_index) first",
            )
        with torch.no_grad():
            target.copy_(self._fitting(param, data))

    def _fitting(self, param: Any, data: Any) -> torch.Tensor:
        """What of the data belongs into this rank's shard; moves distributed data if it lies otherwise."""
        is_distributed = isinstance(param, self.DTensorBase)
        if isinstance(data, self.DTensorBase):
            fits = [tuple(param.shape)]
            if (
                data.shape == param.shape
                and is_distributed
                and data.layout.mesh == param.layout.mesh
            ):
                return self._local(data.detach().redistribute(None, param.layout))
            source = data.detach().full_tensor() if data.shape == param.shape else data
        else:
            fits = [
                tuple(self._local(param).shape),
                *([tuple(param.shape)] if is_distributed else []),
            ]
            source = torch.as_tensor(data)
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
        if source.shape == self._local(param).shape:
            return source
        return param.layout.part_of(source)

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

    def _own_parameter(self, module: Any, name: str, new: Any) -> None:
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

    def get_model_state_dict(
        self, model: Any, *, options: Any = None
    ) -> dict[str, Any]:
        full = getattr(options, "full_state_dict", False)
        offload = getattr(options, "cpu_offload", False)
        state = model.state_dict()
        if getattr(options, "ignore_frozen_params", False):
            frozen = {id(p) for p in model.parameters() if not p.requires_grad}
            names = {
                name
                for name, p in model.named_parameters(remove_duplicate=False)
                if id(p) in frozen
            }
            state = {name: value for name, value in state.items() if name not in names}
        if full:
            state = {name: self._whole(value) for name, value in state.items()}
        if offload:
            # As in torch: the whole state in host memory is wanted once, not once a rank.
            state = (
                {}
                if full and self.get_rank()
                else {n: self._to_host(value) for n, value in state.items()}
            )
        return dict(state)

    def _whole(self, value: Any) -> Any:
        return value.full_tensor() if isinstance(value, self.DTensorBase) else value

    def _to_host(self, value: Any) -> Any:
        return value.cpu() if self.is_tensor(value) else value

    def optimizer_parts(
        self, optimizer: Any
    ) -> tuple[Sequence[dict[str, Any]], MutableMapping[Any, dict[str, Any]]]:
        return optimizer.param_groups, optimizer.state

    def save_checkpoint(
        self, cell: Any, file_path: Any, ckpt_format: str = "safetensors"
    ) -> None:
        _check_format("save_checkpoint", ckpt_format)
        state = cell.state_dict() if isinstance(cell, nn.Module) else dict(cell)
        wrong = sorted(
            name for name, value in state.items() if not self.is_tensor(value)
        )
        if wrong:
            raise coded(
                ValueError,
                "HP134",
                f"save_checkpoint: only tensors can be saved in one file; {wrong} are none",
            )
        tensors = {name: self._local(value).detach() for name, value in state.items()}
        target = Path(file_path)
        with tempfile.NamedTemporaryFile(
            dir=target.parent, prefix=f".{target.name}.", delete=False
        ) as handle:
            temporary = Path(handle.name)
        try:
            _write(tensors, temporary, ckpt_format)
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)

    def load_checkpoint(
        self, file_path: Any, ckpt_format: str = "safetensors"
    ) -> dict[str, Any]:
        _check_format("load_checkpoint", ckpt_format)
        if ckpt_format == "pt":
            return dict(torch.load(file_path, map_location="cpu", weights_only=True))
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(file_path)
        except SafetensorError as error:
            raise coded(
                ValueError,
                "HP134",
                f"load_checkpoint: {file_path} is not a whole safetensors file: {error}",
            ) from error


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


def _check_format(call: str, ckpt_format: str) -> None:
    if ckpt_format not in _FORMATS:
        raise coded(
            ValueError,
            "HP134",
            f"{call}: ckpt_format must be one of {', '.join(_FORMATS)}, got {ckpt_format!r}",
        )
