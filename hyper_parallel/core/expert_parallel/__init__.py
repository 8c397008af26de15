# SPDX-License-Identifier: Apache-2.0
"""Expert parallel: each rank has some of the experts of a mixture, and tokens travel to them."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.core.expert_parallel.capacity import Capacity
    from hyper_parallel.core.expert_parallel.dispatcher import (
        AllToAllTokenDispatcher,
        DispatchContext,
    )
    from hyper_parallel.core.expert_parallel.grouped import grouped_linear
    from hyper_parallel.core.expert_parallel.losses import (
        AuxLosses,
        collect_aux_losses,
        load_balance_loss,
        note_loss,
        z_loss,
    )
    from hyper_parallel.core.expert_parallel.modules import FeedForward, GroupedExperts
    from hyper_parallel.core.expert_parallel.moe import MoE, update_expert_bias
    from hyper_parallel.core.expert_parallel.router import TokenChoiceTopKRouter
    from hyper_parallel.core.expert_parallel.style import (
        BaseExpertParallel,
        ExpertParallel,
        ExpertTensorParallel,
        TensorParallel,
    )
    from hyper_parallel.core.expert_parallel.telemetry import (
        ExpertCall,
        ExpertLoad,
        watch_experts,
    )

__all__ = [
    "AllToAllTokenDispatcher",
    "AuxLosses",
    "BaseExpertParallel",
    "Capacity",
    "DispatchContext",
    "ExpertCall",
    "ExpertLoad",
    "ExpertParallel",
    "ExpertTensorParallel",
    "FeedForward",
    "GroupedExperts",
    "MoE",
    "TensorParallel",
    "TokenChoiceTopKRouter",
    "collect_aux_losses",
    "grouped_linear",
    "load_balance_loss",
    "note_loss",
    "update_expert_bias",
    "watch_experts",
    "z_loss",
]

_HOMES = {
    "AllToAllTokenDispatcher": "dispatcher",
    "AuxLosses": "losses",
    "Capacity": "capacity",
    "DispatchContext": "dispatcher",
    "ExpertCall": "telemetry",
    "ExpertLoad": "telemetry",
    "FeedForward": "modules",
    "GroupedExperts": "modules",
    "MoE": "moe",
    "TokenChoiceTopKRouter": "router",
    "collect_aux_losses": "losses",
    "grouped_linear": "grouped",
    "load_balance_loss": "losses",
    "note_loss": "losses",
    "update_expert_bias": "moe",
    "watch_experts": "telemetry",
    "z_loss": "losses",
}


# All of it needs tensors: asking for a name chooses the framework and imports it.
def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name, "style")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
