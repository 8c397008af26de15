# SPDX-License-Identifier: Apache-2.0
"""Where torch.distributed.checkpoint would lose shards, load only some of them, or hang: an error on every rank.

    dcp.save(model.state_dict(), checkpoint_id=folder, no_dist=True)     HP230: only this rank's shards would be saved

Torch's planners and storages are wrapped when the first distributed tensor reaches them.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from typing import Any

from hyper_parallel.platform.error_codes import coded

# The modules of torch that copy a state dict to host memory, by way of each tensor's storage.
_STAGERS = (
    "torch.distributed._state_dict_utils",
    "torch.distributed.checkpoint._state_dict_stager",
)


def refuse_staging(caller: str | None) -> None:
    """Raises if the calling module is one of torch's that would copy the storage of a distributed tensor."""
    if caller in _STAGERS:
        raise coded(
            TypeError,
            "HP230",
            "torch.distributed.checkpoint.async_save copies a tensor by its storage, which a distributed tensor "
            "does not have. Call async_save(state_dict, checkpoint_id=folder) of "
            "hyper_parallel.core.distributed_checkpoint on all ranks, or torch.distributed.checkpoint.save",
        )


@functools.cache
def guard_saving() -> None:
    """Has torch's planner and its writer of Hugging Face's files refuse shards that would be lost."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    make_plan = DefaultSavePlanner.create_global_plan
    prepare = HuggingFaceStorageWriter.prepare_local_plan

    def make_checked_plan(planner: Any, all_plans: Any) -> Any:
        if (
            len(all_plans) == 1
        ):  # Torch compares the sizes only where there are several.
            _refuse_one_rank_of_several(all_plans[0], _distributed(planner))
        return make_plan(planner, all_plans)

    def prepare_checked(writer: Any, plan: Any) -> Any:
        if not writer.save_distributed:
            _refuse_one_file(plan)
        return prepare(writer, plan)

    DefaultSavePlanner.create_global_plan = make_checked_plan  # type: ignore[method-assign, assignment]
    HuggingFaceStorageWriter.prepare_local_plan = prepare_checked  # type: ignore[method-assign, assignment]


def _refuse_one_rank_of_several(plan: Any, distributed: dict[str, Any]) -> None:
    covered: defaultdict[str, int] = defaultdict(int)
    for item in plan.items:
        if item.tensor_data is not None:
            covered[item.index.fqn] += math.prod(item.tensor_data.chunk.sizes)
    for name, tensor in distributed.items():
        shape = tuple(tensor.shape)
        if covered[name] < math.prod(shape):
            raise coded(
                ValueError,
                "HP230",
                f"torch.distributed.checkpoint: this rank has {covered[name]} of the {math.prod(shape)} elements "
                f"of {name}, of shape {shape}, and with no_dist=True or use_collectives=False a checkpoint of "
                "this rank alone would miss the others. Call save on all ranks without that argument, or save "
                "{name: tensor.full_tensor()}",
            )


def _refuse_one_file(plan: Any) -> None:
    for item in plan.items:
        data = item.tensor_data
        if data is not None and data.chunk.sizes != data.size:
            raise coded(
                ValueError,
                "HP230",
                f"HuggingFaceStorageWriter: {item.index.fqn} is one of several shards, which every rank would "
                "write to the same file; pass save_distributed=True, and enable_consolidation=True for whole files",
            )


@functools.cache
def guard_loading() -> None:
    """Has torch's planner refuse to fill shards in part, and readers that send tensors from one rank to all."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    finish = DefaultLoadPlanner.finish_plan

    def finish_checked(planner: Any, new_plan: Any) -> Any:
        plan = finish(planner, new_plan)
        _refuse_broadcasts(planner)
        _refuse_gaps(planner, plan)
        return plan

    DefaultLoadPlanner.finish_plan = finish_checked  # type: ignore[method-assign, assignment]


def _distributed(planner: Any) -> dict[str, Any]:
    from hyper_parallel.platform.torch.saving import SavedInChunks

    return {
        name: value
        for name, value in planner.state_dict.items()
        if isinstance(value, SavedInChunks)
    }


def _refuse_broadcasts(planner: Any) -> None:
    """That reader broadcasts once for each chunk that a rank needs; with shards the ranks would wait in vain."""
    from torch.distributed.checkpoint.format_utils import DynamicMetaLoadPlanner

    names = (
        list(_distributed(planner))
        if isinstance(planner, DynamicMetaLoadPlanner)
        else []
    )
    if names:
        raise coded(
            ValueError,
            "HP144",
            f"DynamicMetaLoadPlanner and BroadcastingTorchSaveReader: {names[0]} is a distributed tensor, which "
            "they cannot fill. Call model.load_state_dict(torch.load(file, mmap=True)), of which each rank takes "
            "its part, or convert the file with torch_save_to_dcp and load the folder",
        )


def _refuse_gaps(planner: Any, plan: Any) -> None:
    filled: defaultdict[str, int] = defaultdict(int)
    for item in plan.items:
        filled[item.dest_index.fqn] += math.prod(item.lengths)
    for name, tensor in _distributed(planner).items():
        needed = tensor._local.numel()
        # A name that the checkpoint lacks altogether is the planner's own affair (allow_partial_load).
        if name in planner.metadata.state_dict_metadata and filled[name] < needed:
            raise coded(
                ValueError,
                "HP144",
                f"torch.distributed.checkpoint: the checkpoint has only {filled[name]} of the {needed} elements "
                f"of {name} that this rank needs. It was saved by some of the ranks alone (no_dist=True, "
                "use_collectives=False); save it again on all ranks",
            )
