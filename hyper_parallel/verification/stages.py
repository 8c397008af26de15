# SPDX-License-Identifier: Apache-2.0
"""What a rank of a pipeline has of a model, for a comparison with one process that has all of it.

part = Part(modules, stage_of, lambda: 0)
part.place_of("blocks.3.mlp", call=2)         "stage 1, micro batch 1"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.pipeline_parallel.agreement import PipelineError
from hyper_parallel.core.pipeline_parallel.mailbox import PeerFailedError
from hyper_parallel.platform import CommunicationError


@dataclass(frozen=True)
class Part:
    """The stages of this rank.

    ``modules``: those that compute here, by their names in the whole model. ``stage_of``: the stages of all pieces of
    the model. ``micro()``: the micro batch that runs.
    """

    modules: Mapping[str, Any]
    stage_of: Mapping[str, int]
    micro: Callable[[], int]

    def place_of(self, module: str, call: int) -> str:
        """The stage that a module is in, and the micro batch of a call."""
        pieces = [one for one in self.stage_of if f"{module}.".startswith(f"{one}.")]
        return f"stage {self.stage_of[pieces[0]]}, micro batch {call - 1}"


def is_consequence(error: BaseException) -> bool:
    """Whether an error only says that another rank has failed."""
    if isinstance(error, PipelineError):
        return error.__cause__ is None or isinstance(error.__cause__, PeerFailedError)
    return isinstance(error, CommunicationError)
