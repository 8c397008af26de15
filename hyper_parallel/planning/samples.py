# SPDX-License-Identifier: Apache-2.0
"""Inputs without data with which a model's forward can be traced, from its signature and its config.

find_samples(model)         [{"input_ids": ..., "use_cache": False}, ...], the most complete first

The sizes do not matter to a plan: it is chosen by what operators do to shapes, and printed for the model's own sizes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from hyper_parallel.platform import get_platform

platform = get_platform()
ROWS, LENGTH = 4, 16
_SAMPLES_PER_SECOND = 16000
_PARTS = ("text_config", "vision_config", "audio_config", "encoder", "decoder")


def find_samples(model: Any) -> list[dict[str, Any]]:
    """Keyword arguments of forward that may serve, made where new tensors have no data."""
    signature = inspect.signature(platform.get_cell_construct(model))
    names = list(signature.parameters)
    config = getattr(model, "config", None)
    if getattr(config, "model_type", None) is None:
        return list(_plain_samples(signature))
    known = _tensors_of(config, names, find_dtype(model))
    encoder_decoder = getattr(config, "is_encoder_decoder", False)
    own = getattr(model, "main_input_name", "input_ids")
    fixed = {name: False for name in ("use_cache",) if name in names}
    wanted = [name for name in known if name != "decoder_input_ids" or encoder_decoder]
    choices = [wanted, [own, "decoder_input_ids"], ["input_ids"], [own]]
    samples: list[dict[str, Any]] = []
    for choice in choices:
        given = {name: known[name] for name in choice if name in known}
        if given and all(given.keys() != sample.keys() - fixed for sample in samples):
            samples.append({**given, **fixed})
    return samples


def _plain_samples(signature: inspect.Signature) -> Iterator[dict[str, Any]]:
    """For a module without a config: whole numbers as its first argument, which is all that it needs."""
    required = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if len(required) == 1:
        yield {required[0]: _numbers(ROWS, LENGTH)}


def _tensors_of(config: Any, names: list[str], dtype: Any) -> dict[str, Any]:
    """A tensor for each argument of forward that is known by name and size."""
    found: dict[str, Any] = {}
    if "input_ids" in names:
        found["input_ids"] = _numbers(ROWS, LENGTH)
    if "decoder_input_ids" in names:
        found["decoder_input_ids"] = _numbers(ROWS, LENGTH)
    if "pixel_values" in names and (shape := _picture(config)):
        found["pixel_values"] = _floats(dtype, ROWS, *shape)
    if "input_values" in names:
        found["input_values"] = _floats(dtype, ROWS, _SAMPLES_PER_SECOND // 2)
    if "input_features" in names:
        bins = look_up(config, "num_mel_bins", "feature_size", "input_feat_per_channel")
        positions = look_up(config, "max_source_positions")
        frames = 2 * positions if positions else 128
        if bins:
            is_first = look_up(config, "input_feat_per_channel") is None
            shape = (bins, frames) if is_first else (frames, bins)
            found["input_features"] = _floats(dtype, ROWS, *shape)
    return found


def find_dtype(model: Any) -> Any:
    """The dtype of the model's first parameter of floats."""
    parameters = platform.parameters_dict(model).values()
    floats = (one.dtype for one in parameters if platform.is_floating_point(one))
    return next(floats, None)


def _picture(config: Any) -> tuple[int, ...]:
    """(channels, height, width) of a picture."""
    size = look_up(config, "image_size")
    channels = look_up(config, "num_channels") or 3
    if isinstance(size, Mapping):
        size = size.get("height")
    if isinstance(size, (list, tuple)):
        return (channels, *size)
    return (channels, size, size) if isinstance(size, int) else ()


def look_up(config: Any, *names: str) -> Any:
    """The first of these entries that a config has, or a config inside of it."""
    inner = [getattr(config, part, None) for part in _PARTS]
    for one in (config, *inner):
        for name in names:
            value = getattr(one, name, None)
            if value is not None:
                return value
    return None


def _numbers(*shape: int) -> Any:
    return platform.zeros(shape, platform.str_to_dtype("int64"), platform.meta_device)


def _floats(dtype: Any, *shape: int) -> Any:
    return platform.empty(shape, dtype, platform.meta_device)
