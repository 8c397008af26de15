# SPDX-License-Identifier: Apache-2.0
"""Stages of an unchanged model: the model's own forward runs, but only the modules of one stage compute.

    stages = build_stages(model, plan, [1], group=mesh["pp"].get_group())

Every stage calls the whole model with the inputs of the model. In a later stage, modules of earlier ones return
placeholders (nan), until the last block before the stage returns what was received from there. The call ends with the
last block of the stage. The first call of a stage makes sure that it computes with no placeholder.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.modules.blocks import modules_by_name
from hyper_parallel.core.modules.boundary import EndedEarly
from hyper_parallel.core.pipeline_parallel.micro_batches import tensors_of
from hyper_parallel.core.pipeline_parallel.stage import (
    PipelineStage,
    SharedParameterInfo,
)
from hyper_parallel.core.pipeline_parallel.stage_plan import StagePlan
from hyper_parallel.core.pipeline_parallel.wire import shard_of
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


def build_stages(
    model: Any,
    plan: StagePlan,
    stages: Sequence[int],
    *,
    forward: Callable[..., Any] | None = None,
    **options: Any,
) -> list[PipelineStage]:
    """The stages of a model that this rank has.

    Call it last, when modules are distributed, sharded and wrapped. ``forward(*args)`` is called in place of
    ``model(*args)`` and calls the model itself. ``options``: those of ``PipelineStage``, such as ``group``.
    """
    gates = _Gates(model, plan, stages)
    call = model if forward is None else forward
    return [SplitStage(gates, stage, call, options) for stage in stages]


class SplitStage(PipelineStage):
    """A stage of an unchanged model; all ranks are given the inputs of the model."""

    takes_arguments = True

    def __init__(
        self,
        gates: _Gates,
        stage_index: int,
        forward: Callable[..., Any],
        options: Mapping[str, Any],
    ) -> None:
        shared = list(gates.find_shared(stage_index))
        stages = gates.plan.stages
        super().__init__(
            gates.model, stage_index, stages, shared_parameters=shared, **options
        )
        self.modules = gates.find_modules(stage_index)
        self._gates, self._forward = gates, forward
        self._is_checked = False

    def call_module(
        self,
        inputs: Sequence[Any],
        kwargs: Mapping[str, Any],
        arguments: Sequence[Any],
    ) -> Any:
        """Runs the model's forward from the beginning of this stage to its end."""
        received = None if self.is_first_stage else inputs[0][0]
        one = _Pass(self._gates.plan, self.stage_index, received)
        one.is_checked = not self._is_checked and not _has_nan(received)
        output = self._call_model(one, arguments, kwargs)
        self._is_checked = True
        if self.is_last_stage:
            return output
        # In a list, which no neighbour takes for several arguments.
        return [platform.apply_to_tensors(_reduce, output)]

    def _call_model(
        self, one: _Pass, arguments: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if not arguments and not kwargs:
            raise coded(
                ValueError,
                "HP494",
                f"pipeline: stage {self.stage_index} was given no inputs; pass those of the model on every rank, since "
                "the model's forward runs in every stage",
            )
        try:
            with self._gates.entered(one):
                output = self._forward(*arguments, **kwargs)
        except EndedEarly as end:
            one.check("what it hands over", end.output)
            return end.output
        if not one.has_begun or one.end:
            missing = one.end if one.has_begun else one.start
            raise coded(
                ValueError,
                "HP494",
                f"pipeline: the model's forward ended without a call of {missing}, which stage {self.stage_index} "
                "begins or ends with",
            )
        return output


class _Pass:
    """A call of the model for one stage. ``is_checked``: whether the stage is to make sure of its inputs."""

    def __init__(self, plan: StagePlan, stage: int, received: Any) -> None:
        self.stage, self.received = stage, received
        self.start = plan.ends[stage - 1] if stage else ""
        self.end = plan.ends[stage] if stage < plan.stages - 1 else ""
        self.has_begun = stage == 0
        self.is_checked = False
        self._placeholders: Any = None

    def make_placeholder(self, name: str) -> Any:
        """What a module of an earlier stage returns: a block what blocks return, others a tensor."""
        if self._placeholders is None:
            self._placeholders = platform.apply_to_tensors(_fill_nan, self.received)
        if name.rpartition(".")[0] == self.start.rpartition(".")[0]:
            return self._placeholders
        return tensors_of(self._placeholders)[0]

    def check(self, what: str, value: Any) -> None:
        """Raises if a value of this stage was computed with placeholders."""
        if self.is_checked and _has_nan(value):
            raise coded(
                ValueError,
                "HP494",
                f"pipeline: stage {self.stage}: {what} is nan, because it is computed from modules of another stage, "
                "and only the output of a block goes from stage to stage; divide the model elsewhere, or build the "
                "stages by hand (or the model computes nan by itself)",
            )


class _Gates:
    """Wrappers around the pieces of a model, which decide what each of them does in a call for one stage."""

    def __init__(self, model: Any, plan: StagePlan, stages: Sequence[int]) -> None:
        self.model, self.plan = model, plan
        self._kept = frozenset(stages)
        self._here = threading.local()
        self._modules = modules_by_name(model)
        inner = dict(platform.get_cells_and_names(model))
        for name in plan.stage_of:
            parent, _, own = name.rpartition(".")
            gate = platform.ckpt_wrapper(
                self._modules[name], checkpoint_fn=self._make_gate(name)
            )
            platform.replace_submodule(inner[parent], own, gate)

    def find_modules(self, stage: int) -> list[Any]:
        """The modules that a stage has."""
        return [self._modules[name] for name in self.plan.pieces_of(stage)]

    def find_shared(self, stage: int) -> Iterator[SharedParameterInfo]:
        """The parameters of a stage that others have too."""
        for names in self.plan.shared:
            if stage not in names:
                continue
            found = platform.search_parameter_by_name(self.model, names[stage])
            assert found is not None
            *_, parameter = found
            yield SharedParameterInfo(parameter, sorted(names))

    @contextmanager
    def entered(self, one: _Pass) -> Iterator[None]:
        """A call of the model for a stage, in this thread."""
        self._here.running = one
        try:
            yield
        finally:
            self._here.running = None

    def _make_gate(self, name: str) -> Callable[..., Any]:
        owner = self.plan.stage_of[name]

        def run(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            running: _Pass | None = getattr(self._here, "running", None)
            if running is None:  # called by hand
                self._check_kept(name, owner)
                return call(*args, **kwargs)
            if owner == running.stage and running.has_begun:
                running.check(f"an input of {name}", (args, kwargs))
                output = call(*args, **kwargs)
                if name == running.end:
                    raise EndedEarly(output)
                return output
            if owner >= running.stage or running.has_begun:
                raise _make_order_error(name, owner, running)
            if name == running.start:
                running.has_begun = True
                return running.received
            return running.make_placeholder(name)

        return run

    def _check_kept(self, name: str, owner: int) -> None:
        if owner not in self._kept:
            raise coded(
                RuntimeError,
                "HP494",
                f"pipeline: {name} belongs to stage {owner}, and this rank has {sorted(self._kept)}; run the model by "
                "a schedule of all stages",
            )


def _make_order_error(name: str, owner: int, running: _Pass) -> Exception:
    if running.has_begun:
        where, remedy = f"after {running.start or 'the beginning'}", "last"
    else:
        where, remedy = f"before {running.start} has ended", "first"
    return coded(
        ValueError,
        "HP494",
        f"pipeline: {name} belongs to stage {owner}, but forward calls it in stage {running.stage}, {where}; name it "
        f"in {remedy}= of plan_stages, or divide the model elsewhere",
    )


def _fill_nan(tensor: Any) -> Any:
    if not platform.is_floating_point(tensor):
        return tensor
    return platform.full_like(platform.detach(tensor), float("nan"))


def _has_nan(tree: Any) -> bool:
    with platform.no_grad():
        return any(
            bool((shard_of(one) != shard_of(one)).any())
            for one in tensors_of(tree)
            if platform.is_floating_point(one)
        )


def _reduce(tensor: Any) -> Any:
    return tensor.reduce_partial() if isinstance(tensor, DTensor) else tensor
