# SPDX-License-Identifier: Apache-2.0
"""The model of a Hugging Face folder without data: its config alone is read, and no code of the folder is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def make_model_without_data(folder: Path) -> Any:
    """The model of the class that the config names, else of its kind as a language model."""
    import transformers

    config = _read_config(folder)
    platform = get_platform()
    name = (getattr(config, "architectures", None) or [""])[0]
    kind = getattr(transformers, name, None)
    with platform.init_on_device(platform.meta_device, include_buffers=True):
        if kind is not None:
            return kind(config)
        auto: Any = transformers.AutoModelForCausalLM
        return auto.from_config(config, trust_remote_code=False)


def _read_config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, **_LOCAL)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).splitlines()[0]
        raise coded(
            ValueError,
            "HP903",
            f"{folder}: its config names no architecture that transformers has, and code of a folder is never run: "
            f"{first}",
        ) from error
