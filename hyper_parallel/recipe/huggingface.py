# SPDX-License-Identifier: Apache-2.0
"""Models and tokenizers of a local folder of Hugging Face. Nothing is downloaded, and no code of the folder is run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.hugging_face import HuggingFaceReader

_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def model_of(folder: Path, dtype: str, *, weights: bool) -> Any:
    """The causal language model of a folder, with its weights or drawn anew."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind: Any = AutoModelForCausalLM
    if weights:
        return kind.from_pretrained(folder, dtype=dtype, use_safetensors=True, **_LOCAL)
    return kind.from_config(
        AutoConfig.from_pretrained(folder, **_LOCAL), trust_remote_code=False
    )


def find_reader(folder: Path, names: set[str]) -> HuggingFaceReader | None:
    """A reader of a folder that has all of these names."""
    reader = HuggingFaceReader(folder)
    try:
        known = reader.load_metadata().state_dict_metadata
    except (
        CheckpointError
    ):  # transformers may read it all the same, or says what is wrong
        return None
    finally:
        reader.close()
    return HuggingFaceReader(folder) if names <= known.keys() else None


def tokens_of(folder: Path, contents: Iterable[bytes]) -> NDArray[np.int32]:
    """Texts by the tokenizer of a folder; each ends with the token for that, if there is one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, **_LOCAL)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    found: list[int] = []
    for text in contents:
        found += (
            tokenizer(
                text.decode(errors="replace"), add_special_tokens=False, verbose=False
            )["input_ids"]
            + end
        )
    return np.array(found, np.int32)
