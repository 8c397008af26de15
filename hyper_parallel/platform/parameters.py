# SPDX-License-Identifier: Apache-2.0
"""What is done with a module's parameters in the same way on every framework: loading, sharding and saving them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_parallel.platform.error_codes import coded

if TYPE_CHECKING:
    from hyper_parallel.platform.platform import Platform


def load_into(platform: Platform, param: Any, data: Any) -> None:
    """Copies full, local or distributed data into a parameter in place."""
    target = platform._local(param)
    if platform.is_meta(target):
        raise coded(
            ValueError,
            "HP132",
            f"load_into_param: the parameter of shape {tuple(param.shape)} is on the meta device and cannot hold data; "
            "call init_parameters(module, stage_index) first",
        )
    with platform.no_grad():
        shard = _shard_for(platform, param, data)
        platform.copy_into(target, platform.detach(shard))


def _shard_for(platform: Platform, param: Any, data: Any) -> Any:
    """Returns the part of the data that belongs into this rank's shard; redistributes distributed data."""
    if isinstance(data, platform.DTensorBase):
        return _shard_of_distributed(platform, param, data)
    source = data if platform.is_tensor(data) else platform.tensor(data)
    local_shape = tuple(platform._local(param).shape)
    shapes = [local_shape]
    if isinstance(param, platform.DTensorBase):
        shapes.append(tuple(param.shape))
    _check_shape(source, shapes)
    if tuple(source.shape) == local_shape:
        return source
    return param.layout.part_of(source)


def _shard_of_distributed(platform: Platform, param: Any, data: Any) -> Any:
    _check_shape(data, [tuple(param.shape)])
    source = platform.detach(data)
    if not isinstance(param, platform.DTensorBase):
        return source.full_tensor()
    if data.layout.mesh == param.layout.mesh:
        return platform._local(source.redistribute(None, param.layout))
    whole = source.full_tensor()
    is_local = tuple(whole.shape) == tuple(platform._local(param).shape)
    return whole if is_local else param.layout.part_of(whole)


def _check_shape(source: Any, shapes: list[tuple[int, ...]]) -> None:
    shape = tuple(source.shape)
    if shape in shapes:
        return
    several = len(shapes) > 1
    reason = f"fits neither of {shapes}" if several else f"does not fit {shapes[0]}"
    raise coded(ValueError, "HP132", f"load_into_param: data of shape {shape} {reason}")


def shard_parameter(platform: Platform, param: Any, layout: Any) -> Any:
    """Returns a parameter that holds this rank's shard of a plain one as a distributed tensor."""
    if isinstance(param, platform.DTensorBase):
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
    shard = platform._shard_of(param, layout)
    return platform._parameter_of(layout.tensor(shard, tuple(param.shape)), param)


def model_state_dict(platform: Platform, model: Any, options: Any) -> dict[str, Any]:
    """Returns the model's state dict; options: full_state_dict, cpu_offload, ignore_frozen_params.

    With full_state_dict and cpu_offload, rank 0 has all of it, and others hold one full tensor at a time.
    """
    gathers = getattr(options, "full_state_dict", False)
    offloads = getattr(options, "cpu_offload", False)
    state = dict(model.state_dict())
    if getattr(options, "ignore_frozen_params", False):
        frozen = platform._frozen_names(model)
        state = {name: value for name, value in state.items() if name not in frozen}
    # As in torch: the whole state in host memory is wanted once, not once per rank.
    is_left_out = gathers and offloads and platform.get_rank() != 0
    delivered = {}
    for name, value in state.items():
        if gathers and isinstance(value, platform.DTensorBase):
            value = value.full_tensor()  # noqa: PLW2901 - on every rank
        if offloads and platform.is_tensor(value) and not is_left_out:
            value = platform._to_host(value)  # noqa: PLW2901
        if not is_left_out:
            delivered[name] = value
    return delivered


def save_file(platform: Platform, cell: Any, file_path: Any, ckpt_format: str) -> None:
    """Writes a module or a dict of tensors to one file: all of it or nothing."""
    _check_format(platform, "save_checkpoint", ckpt_format)
    state = cell.state_dict() if isinstance(cell, platform.Module) else dict(cell)
    wrong = [name for name, value in state.items() if not platform.is_tensor(value)]
    if wrong:
        raise coded(
            ValueError,
            "HP134",
            f"save_checkpoint: only tensors can be saved in one file; {sorted(wrong)} are none",
        )
    target = Path(file_path)
    with tempfile.NamedTemporaryFile(
        dir=target.parent, prefix=f".{target.name}.", delete=False
    ) as handle:
        temporary = Path(handle.name)
    try:
        platform._write_checkpoint(state, temporary, ckpt_format)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def load_file(platform: Platform, file_path: Any, ckpt_format: str) -> dict[str, Any]:
    """Returns the tensors of a file by name."""
    _check_format(platform, "load_checkpoint", ckpt_format)
    from safetensors import SafetensorError

    try:
        return platform._read_checkpoint(Path(file_path), ckpt_format)
    except SafetensorError as error:
        raise coded(
            ValueError,
            "HP134",
            f"load_checkpoint: {file_path} is not a whole safetensors file: {error}",
        ) from error


def _check_format(platform: Platform, call: str, ckpt_format: str) -> None:
    formats = platform._checkpoint_formats
    if ckpt_format not in formats:
        raise coded(
            ValueError,
            "HP134",
            f"{call}: ckpt_format must be one of {', '.join(formats)}, got {ckpt_format!r}",
        )
