# SPDX-License-Identifier: Apache-2.0
"""What can be known of a Hugging Face folder before any rank starts, from its config and the names of its files.

read_folder(path)            the keys of a recipe that trains the model of a folder
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hyper_parallel.planning.refusals import count_heads
from hyper_parallel.recipe.errors import Problem
from hyper_parallel.recipe.schema import Recipe

_LONGEST_HEADER = 100_000_000  # bytes, as in the format's own reader
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


class _Config:
    """A config.json as its keys, so that nothing of `transformers` is imported for it."""

    def __init__(self, values: dict[str, Any]) -> None:
        parts = {key: one for key, one in values.items() if isinstance(one, dict)}
        inner = {key: _Config(one) for key, one in parts.items()}
        vars(self).update({**values, **inner})


def read_folder(path: Path) -> dict[str, Any]:
    """The keys of a recipe for a folder that was given in the place of one."""
    return {
        "steps": 100,
        "precision": "float32",
        "folder": f"runs/{path.resolve().name}",
        "model": {"huggingface": str(path.resolve())},
        "data": {"tokens": "model"},
        "plan": "auto",
        "optimizer": {"lr": 2e-5},
        "schedule": {"kind": "linear", "warmup": 10, "floor": 0},
        "checkpoints": {"every": 50},
    }


def check_folder(recipe: Recipe) -> Iterator[Problem]:
    """Whether the model of a recipe's folder can be planned, and shared by the ranks of its mesh."""
    config = _read_config(recipe)
    if config is None:
        return
    if hasattr(config, "quantization_config"):
        told = "its weights are quantised, and such cannot be trained; take the folder with unquantised weights"
        yield Problem("model.huggingface", told)
    if hasattr(config, "auto_map"):
        told = "its architecture needs code of the folder, which is never run; take one that transformers has"
        yield Problem("model.huggingface", told)
    yield from _check_table(recipe, config)
    heads, ranks = count_heads(config), recipe.axes.get("tp", 1)
    if heads is not None and heads % ranks:
        told = f"{heads} attention heads cannot be shared by {ranks} ranks"
        sizes = [str(size) for size in range(1, heads + 1) if heads % size == 0]
        yield Problem("mesh.tp", f"{told}; say one of {', '.join(sizes)}")


def _check_table(recipe: Recipe, config: Any) -> Iterator[Problem]:
    """Whether the table of tokens has the shape that the config says; other weights are compared when they are read."""
    sizes = [getattr(config, name, None) for name in ("vocab_size", "hidden_size")]
    if None in sizes or not recipe.model.weights:
        return
    assert recipe.model.huggingface is not None
    for path in recipe.input_path(recipe.model.huggingface).glob("*.safetensors"):
        for name, shape in _read_shapes(path):
            if name.endswith("embed_tokens.weight") and shape != sizes:
                told = f"{name} in {path.name} has the shape {shape}, but config.json says {sizes}"
                yield Problem("model.huggingface", told)


def _read_shapes(path: Path) -> Iterator[tuple[str, list[int]]]:
    """The names and shapes in a safetensors file, of which the header alone is read."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, _LONGEST_HEADER)))
        for name, entry in header.items():
            if name != "__metadata__":
                yield name, entry["shape"]
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError):
        return  # who reads the weights says what is wrong with the file


def check_tokenizer(recipe: Recipe) -> Iterator[Problem]:
    """Whether the folder of the model has a tokenizer."""
    if _read_config(recipe) is None:
        return
    assert recipe.model.huggingface is not None
    folder = recipe.input_path(recipe.model.huggingface)
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        told = f"{folder} has no tokenizer ({', '.join(_TOKENIZERS)})"
        yield Problem("data.tokens", f"{told}; add one, or say tokens: bytes")


def _read_config(recipe: Recipe) -> Any:
    """The config of the recipe's folder; None where there is none that can be read."""
    if recipe.model.huggingface is None:
        return None
    path = recipe.input_path(recipe.model.huggingface) / "config.json"
    try:
        values = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return _Config(values) if isinstance(values, dict) else None
