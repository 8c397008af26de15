# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a pipeline tell each other outside of its messages: what they are, and whether one has failed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.pipeline_parallel.action import MetaStep, computations
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.messages import Messages

platform = get_platform()

_KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward of inputs",
    "W": "backward of parameters",
}


class PipelineError(RuntimeError):
    """An action of a pipeline has failed on some rank; raised on all of them."""


def gather_words(own: Any, group: Any) -> list[Any]:
    """What every rank of the group says, as JSON, in the order of the group."""
    data = json.dumps(own).encode()
    size = platform.full((1,), len(data), platform.str_to_dtype("int64"))
    sizes = platform.all_gather_into_tensor(size.to(platform.device()), group)
    longest = int(sizes.max().item())
    packed = platform.pack_bytes(data.ljust(longest), [])
    gathered = platform.all_gather_into_tensor(packed, group)
    rows = platform.tensor_to_numpy(gathered).reshape(len(sizes.tolist()), -1)
    return [json.loads(row.tobytes()[:longest]) for row in rows]


def agree_on_failures(
    failure: Any, messages: Messages, group: Any, ranks: Sequence[int]
) -> PipelineError | None:
    """The error that all ranks raise, if an action has failed on any."""
    if len(ranks) == 1:
        return None if failure is None else _explain([[ranks[0], *_say(failure)]])
    if not messages.find_largest(int(failure is not None)):
        return None
    words = gather_words(None if failure is None else _say(failure), group)
    said = [
        [rank, *one] for rank, one in zip(ranks, words, strict=True) if one is not None
    ]
    return _explain(said)


def _say(failure: Any) -> list[Any]:
    return [failure.is_own, describe_action(failure.step), failure.text]


def _explain(said: Sequence[Sequence[Any]]) -> PipelineError:
    own = [one for one in said if one[1]] or said
    rank, _, action, reason = own[0]
    if len(own) > 1:
        others = ", ".join(f"rank {one[0]} in {one[2]}" for one in own[1:])
        reason = f"{reason}. Also failed: {others}"
    return coded(
        PipelineError,
        "HP484",
        f"pipeline: rank {rank} failed in {action}: {reason}. No rank has finished the step; the schedule can be "
        "used again",
    )


def describe_action(step: MetaStep | str) -> str:
    """An action in words: ``1F3 (stage 1, forward of micro batch 3)``; what is no action is words already."""
    if isinstance(step, str):
        return step
    parts = computations(step)
    words = [
        f"stage {part.stage_index}, {_KINDS[str(part.type.value)]} of micro batch {part.micro_index}"
        for part in parts
    ]
    if not words and step.stage_index is not None:
        words = [f"stage {step.stage_index}, {step.type.value}"]
    return f"{step} ({'; '.join(words)})"
