# SPDX-License-Identifier: Apache-2.0
"""The ranks of a pipeline, agreed on once: who holds which stages, skip connections, and shared parameters.

pipeline = connect(stages, micro_batches=8, name="1F1B")      every rank of the group calls it
pipeline.rank, pipeline.size, pipeline.stages
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.pipeline_parallel.agreement import gather_words
from hyper_parallel.core.pipeline_parallel.orders import Schedule
from hyper_parallel.core.pipeline_parallel.sharded_stage import ShardedStage
from hyper_parallel.core.pipeline_parallel.stage import PipelineStage
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


@dataclass(frozen=True)
class Pipeline:
    """A group of ranks that hold the stages of one model; ``holds``: the stages of every rank."""

    group: Any
    ranks: list[int]
    rank: int
    stages: int
    holds: list[list[int]]
    skips: tuple[tuple[int, int], ...]
    has_backward: bool
    has_loss: bool  # whether the ranks of the last stage have a loss function
    is_sharded: bool
    seed: int

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.stages - 1 in self.holds[self.rank]

    def check_fits(self, schedule: Schedule, micro_batches: int) -> None:
        """Raises if the stages are not where the schedule runs them."""
        if schedule.micro_batches != micro_batches:
            raise coded(
                ValueError,
                "HP483",
                f"pipeline: the schedule is for {schedule.micro_batches} micro batches, got {micro_batches}",
            )
        wanted = [
            list(schedule.mapping.stages_of(rank)) for rank in range(schedule.ranks)
        ]
        if schedule.ranks != self.size or wanted != self.holds:
            raise coded(
                ValueError,
                "HP483",
                f"pipeline: {schedule.name} runs the stages {wanted} on its ranks, but the ranks {self.ranks} hold "
                f"{self.holds}",
            )


def connect(
    stages: Sequence[PipelineStage],
    micro_batches: int,
    name: str,
    *,
    has_loss: bool = False,
) -> Pipeline:
    """The pipeline of these stages; every rank of their group calls it, and all raise if they do not fit together."""
    group, ranks = _find_ranks(stages)
    own = {**_describe(stages, micro_batches, name), "has_loss": has_loss}
    said = [own] if len(ranks) == 1 else gather_words(own, group)
    _check_agreement(said, ranks)
    has_loss = _agree_on_loss(said, ranks)
    _check_shared([pair for one in said for pair in one["shared"]])
    skips = {tuple(skip) for one in said for skip in one["skips"]}
    return Pipeline(
        group=group,
        ranks=ranks,
        rank=ranks.index(platform.get_rank()) if len(ranks) > 1 else 0,
        stages=said[0]["of"][0],
        holds=[sorted(one["stages"]) for one in said],
        skips=tuple(sorted(skips)),
        has_backward=said[0]["has_backward"],
        has_loss=has_loss,
        is_sharded=any(one["is_sharded"] for one in said),
        seed=said[0]["seed"],
    )


def _describe(
    stages: Sequence[PipelineStage], micro_batches: int, name: str
) -> dict[str, Any]:
    """What the other ranks must know of this one's stages."""
    skips = []
    for stage in stages:
        skips += [[source, stage.stage_index] for source in stage.src_stage]
        skips += [[stage.stage_index, target] for target in stage.dst_stage]
    return {
        "stages": [stage.stage_index for stage in stages],
        "of": sorted({stage.stage_num for stage in stages}),
        "skips": skips,
        "micro_batches": micro_batches,
        "schedule": name,
        "dyn_shape": any(stage.dyn_shape for stage in stages),
        "has_backward": all(stage.has_backward for stage in stages),
        "is_sharded": any(
            ShardedStage(one.modules, one.submodule).is_sharded for one in stages
        ),
        "shared": [[one.stage_index, _describe_shared(one)] for one in stages],
        "seed": platform.draw_seed(),
    }


def _describe_shared(stage: PipelineStage) -> list[list[Any]]:
    """The stages that have each shared parameter, its shape and its dtype."""
    return [
        [
            sorted(info.shared_stage),
            list(map(int, info.parameter.shape)),
            str(info.parameter.dtype),
        ]
        for info in stage.shared_parameters
    ]


def _find_ranks(stages: Sequence[PipelineStage]) -> tuple[Any, list[int]]:
    if not stages:
        raise coded(ValueError, "HP483", "pipeline: expected a stage, got none")
    group = stages[0].group
    if group is None and platform.get_world_size() == 1:
        return None, [0]
    return group, list(platform.get_process_group_ranks(group))


def _check_agreement(said: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> None:
    for key in ("of", "micro_batches", "schedule", "dyn_shape", "has_backward"):
        _check_key(key, said, ranks)


def _check_key(
    key: str, said: Sequence[Mapping[str, Any]], ranks: Sequence[int]
) -> None:
    values = [one[key] for one in said]
    if any(value != values[0] for value in values) or (
        key == "of" and len(values[0]) != 1
    ):
        words = ", ".join(
            f"rank {rank}: {value}" for rank, value in zip(ranks, values, strict=True)
        )
        raise coded(
            ValueError,
            "HP483",
            f"pipeline: all ranks and stages must agree on {_WORDS[key]}, got {words}",
        )


def _agree_on_loss(said: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> bool:
    """Whether the ranks of the last stage have a loss function; raises if only some of them do."""
    last = said[0]["of"][0] - 1
    pairs = zip(said, ranks, strict=True)
    with_last = {rank: one for one, rank in pairs if last in one["stages"]}
    _check_key("has_loss", list(with_last.values()), list(with_last))
    return any(one["has_loss"] for one in with_last.values())


def _check_shared(said: Sequence[tuple[int, Sequence[Any]]]) -> None:
    """Raises if stages do not name the same shared parameters; ``said``: each stage, and those that it names.

    Stages that are not there are found later.
    """
    named = dict(said)
    for stage, all_shared in said:
        for owners, *_ in all_shared:
            own = [one for one in all_shared if one[0] == owners]
            if not named.keys() >= set(owners):
                continue
            for other in sorted({stage, *owners}):
                theirs = [one for one in named[other] if one[0] == owners]
                if theirs != own or stage not in owners:
                    raise coded(
                        ValueError,
                        "HP483",
                        f"pipeline: stage {stage} shares {_show_shared(own)} with the stages {owners}, but stage "
                        f"{other} shares {_show_shared(theirs)} with them; name each shared parameter on all of its "
                        "stages, in the same order",
                    )


def _show_shared(shared: Sequence[Any]) -> str:
    words = [f"{dtype.rpartition('.')[2]}{shape}" for _, shape, dtype in shared]
    return ", ".join(words) or "nothing"


_WORDS = {
    "of": "the number of stages",
    "micro_batches": "the number of micro batches",
    "schedule": "the schedule",
    "dyn_shape": "dyn_shape",
    "has_backward": "has_backward",
    "has_loss": "whether the last stage has a loss function",
}
