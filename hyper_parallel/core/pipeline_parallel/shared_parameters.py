# SPDX-License-Identifier: Apache-2.0
"""Parameters that several stages have, such as tied embeddings: equal from the start, with the sum of all gradients.

shared = SharedParameters(pipeline, stages)
with shared.summed():
    run_step()
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from hyper_parallel.core.pipeline_parallel.pipeline import Pipeline
from hyper_parallel.core.pipeline_parallel.stage import PipelineStage
from hyper_parallel.core.pipeline_parallel.wire import shard_of
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


class _Shared(NamedTuple):
    """One parameter: the ranks that hold it, the first of which has its values, and what this rank has of it."""

    ranks: list[int]
    own: list[Any]


class SharedParameters:
    """The shared parameters of this rank's stages."""

    def __init__(self, pipeline: Pipeline, stages: Sequence[PipelineStage]) -> None:
        declared = _find_declared(pipeline, stages)
        known = {id(parameter) for shared in declared for parameter in shared.own}
        self._all = [*declared, *_find_copies(pipeline, stages, known)]
        self._groups = [_create_group(shared) for shared in self._all]
        own = (parameter for shared in self._all for parameter in shared.own)
        self._own = list({id(parameter): parameter for parameter in own}.values())
        self._uncounted = set(_find_uncounted(self._all, pipeline.ranks[pipeline.rank]))
        with platform.no_grad():
            for shared, group in zip(self._all, self._groups, strict=True):
                _make_equal(shared, group)

    def is_counted(self, parameter: Any) -> bool:
        """Whether a norm of all parameters has this one here: of shared ones, that of the first stage."""
        return id(parameter) not in self._uncounted

    @contextmanager
    def summed(self) -> Iterator[None]:
        """A step: at its end each parameter has the sum of the gradients of all stages, and what it had before."""
        before = list(map(_take_gradient, self._own))
        try:
            yield
            for shared, group in zip(self._all, self._groups, strict=True):
                _share_sum(shared, group)
        finally:
            for parameter, gradient in zip(self._own, before, strict=True):
                if gradient is not None:
                    platform.accumulate_gradient(shard_of(parameter), gradient)


def _find_declared(
    pipeline: Pipeline, stages: Sequence[PipelineStage]
) -> list[_Shared]:
    """The parameters that stages name in ``shared_parameters``."""
    by_place: dict[tuple[tuple[int, ...], int], list[Any]] = {}
    for stage in stages:
        counts: dict[tuple[int, ...], int] = {}
        for info in stage.shared_parameters:
            owners = tuple(sorted(info.shared_stage))
            number = counts[owners] = counts.get(owners, -1) + 1
            by_place.setdefault((owners, number), []).append(info.parameter)
    return [
        _Shared(
            [rank for stage in owners for rank in _find_holders(pipeline, stage)], own
        )
        for (owners, _), own in sorted(by_place.items(), key=lambda one: one[0])
    ]


def _find_holders(pipeline: Pipeline, stage: int) -> list[int]:
    """The ranks that hold a stage: two if a schedule has one for each direction."""
    pairs = zip(pipeline.ranks, pipeline.holds, strict=True)
    ranks = [rank for rank, held in pairs if stage in held]
    if not ranks:
        raise coded(
            ValueError,
            "HP483",
            f"pipeline: a shared parameter names stage {stage}, but there are {pipeline.stages} stages",
        )
    return ranks


def _find_copies(
    pipeline: Pipeline, stages: Sequence[PipelineStage], known: Collection[int]
) -> Iterator[_Shared]:
    """The parameters of stages that two ranks hold, but those that are shared anyway."""
    for stage in sorted(stages, key=lambda one: one.stage_index):
        ranks = _find_holders(pipeline, stage.stage_index)
        if len(ranks) == 1:
            continue
        for module in stage.modules:
            for parameter in platform.parameters_dict(module).values():
                if id(parameter) not in known:
                    yield _Shared(ranks, [parameter])


def _find_uncounted(all_shared: Sequence[_Shared], rank: int) -> Iterator[int]:
    """The ids of parameters that another rank or another stage of this rank counts."""
    for shared in all_shared:
        first, *others = shared.own
        if rank != shared.ranks[0]:
            yield id(first)
        yield from (id(other) for other in others if other is not first)


def _create_group(shared: _Shared) -> Any:
    ranks = sorted(set(shared.ranks))
    return platform.create_group(ranks) if len(ranks) > 1 else None


def _make_equal(shared: _Shared, group: Any) -> None:
    first, *others = map(shard_of, shared.own)
    if group is not None:
        platform.broadcast(first, shared.ranks[0], group)
    for other in others:
        platform.copy_into(other, first)


def _take_gradient(parameter: Any) -> Any:
    shard = shard_of(parameter)
    gradient = platform.gradient_of(shard)
    platform.forget_gradient(shard)
    return gradient


def _share_sum(shared: _Shared, group: Any) -> None:
    """Gives a parameter, in all stages, the sum of the gradients of all of them."""
    shards = list({id(one): shard_of(one) for one in shared.own}.values())
    with platform.no_grad():
        total = platform.full_like(shards[0], 0)
        for shard in shards:
            gradient = platform.gradient_of(shard)
            total = total if gradient is None else total + gradient
        if group is not None:
            total = platform.all_reduce(total, group)
        for shard in filter(platform.requires_grad, shards):
            platform.forget_gradient(shard)
            platform.accumulate_gradient(shard, platform.clone(total))
