# SPDX-License-Identifier: Apache-2.0
"""Schedules that train: the stages of this rank, the loss, and what a step divides and joins.

schedule = Schedule1F1B(stage, 8, loss_fn=cross_entropy)
output = schedule.step(x, target=y)       gradients of the mean of the micro batches' losses
outputs = schedule.run(x)                 the last stage returns the loss; gradients add up
output = schedule.eval(x)                 forward only
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.core.pipeline_parallel.action import (
    CustomStepType,
    MetaStep,
    MetaStepType,
    StepType,
)
from hyper_parallel.core.pipeline_parallel.clipping import clip_over_stages
from hyper_parallel.core.pipeline_parallel.comm_compute_overlap import (
    CommComputeOverlap,
)
from hyper_parallel.core.pipeline_parallel.context import PipelineContext
from hyper_parallel.core.pipeline_parallel.fronts import (
    add_send_recv,
    detect_cycle_in_graph,
    generate_operations,
    parse_and_validate,
    validate_pipeline_execution,
)
from hyper_parallel.core.pipeline_parallel.messages import (
    add_messages,
    add_parameter_actions,
)
from hyper_parallel.core.pipeline_parallel.micro_batches import Divider, join
from hyper_parallel.core.pipeline_parallel.orders import Schedule
from hyper_parallel.core.pipeline_parallel.pipeline import Pipeline, connect
from hyper_parallel.core.pipeline_parallel.runtime import Runtime, Step
from hyper_parallel.core.pipeline_parallel.schedules import (
    SCHEDULES,
    build_schedule,
    find_schedule,
)
from hyper_parallel.core.pipeline_parallel.shared_parameters import SharedParameters
from hyper_parallel.core.pipeline_parallel.stage import PipelineStage
from hyper_parallel.core.pipeline_parallel.text import read_csv
from hyper_parallel.core.pipeline_parallel.validate import validate
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

__all__ = [
    "CustomStepType",
    "MetaStep",
    "MetaStepType",
    "PipelineScheduleRuntime",
    "Schedule1F1B",
    "ScheduleDualPipe",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleVHalf",
    "ScheduleVMin",
    "ScheduleZBH1",
    "ScheduleZBH2",
    "ScheduleZBVZeroBubble",
    "add_send_recv",
    "detect_cycle_in_graph",
    "generate_operations",
    "get_schedule_class",
    "parse_and_validate",
    "validate_pipeline_execution",
]

platform = get_platform()


class PipelineScheduleRuntime:
    """Runs micro batches through stages by a schedule.

    ``stages``: this rank's stage, or all of them. ``micro_batch_num``: into how many micro batches a step is divided.
    ``args_batch_dim``, ``kwargs_batch_dim``: at which dims, as ints or ``BatchDimSpec``; a third positional argument
    that can be called is the loss function, as in torch. ``output_concat_dim``: ``run`` joins outputs there.
    ``loss_fn(output, target, **loss_kwargs)`` is needed on the ranks of the last stage; with ``scale_grads`` gradients
    of ``step`` are those of the mean of all losses, else of their sum. ``output_merge_spec``: how ``step`` joins
    outputs. ``overlap_p2p`` is always on: receives are posted before they are needed. ``schedule``: the name of a
    schedule, a ``Schedule``, or the path of a CSV file; classes below have theirs. ``overlap``: runs the two parts of
    the pairs of DualPipe and DualPipeV, which else run in order.
    """

    schedule_name = "1F1B"

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        micro_batch_num: int | None = None,
        args_batch_dim: Any = None,
        kwargs_batch_dim: Any = None,
        output_concat_dim: Any = None,
        overlap_p2p: bool = False,
        *,
        schedule: str | Schedule | None = None,
        loss_fn: Callable[..., Any] | None = None,
        scale_grads: bool = True,
        n_microbatches: int | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        keep_parameters_whole: bool = True,
        overlap: CommComputeOverlap | None = None,
    ) -> None:
        if callable(args_batch_dim):
            args_batch_dim, loss_fn = None, args_batch_dim
        count = micro_batch_num if micro_batch_num is not None else n_microbatches
        self.micro_batch_num = _check_count(count)
        self.overlap_p2p = overlap_p2p
        given = args_batch_dim if args_chunk_spec is None else args_chunk_spec
        self._args_dims = _check_dims("args_batch_dim", given, (list, tuple))
        given = kwargs_batch_dim if kwargs_chunk_spec is None else kwargs_chunk_spec
        self._kwargs_dims = _check_dims("kwargs_batch_dim", given, (dict,))
        self._concat_dim, self._merge_spec = output_concat_dim, output_merge_spec
        self._loss_fn, self._scale_grads = loss_fn, scale_grads
        self._keeps_whole = keep_parameters_whole
        self.stages = [stages] if isinstance(stages, PipelineStage) else list(stages)
        self._pipeline: Pipeline = connect(
            self.stages,
            self.micro_batch_num,
            _describe_schedule(schedule or self.schedule_name),
            has_loss=loss_fn is not None,
        )
        computations = self._find_schedule(schedule or self.schedule_name)
        self.schedule = self._complete(computations)
        forward = self._complete(computations.forward_only())
        self._forward_order = forward.orders[self._pipeline.rank]
        self._runtime = Runtime(
            self.schedule,
            self._pipeline.rank,
            {stage.stage_index: stage for stage in self.stages},
            self._pipeline.group,
            self._pipeline.ranks,
            overlap,
        )
        self._shared = SharedParameters(self._pipeline, self.stages)
        self._steps = 0

    def _find_schedule(self, schedule: str | Schedule) -> Schedule:
        """The computations of all ranks, which fit the stages."""
        pipeline = self._pipeline
        if isinstance(schedule, Schedule):
            found = schedule
        elif schedule.endswith(".csv"):
            found = read_csv(schedule)
        else:
            chunks = _count_chunks(schedule, pipeline)
            size, count = pipeline.size, self.micro_batch_num
            found = build_schedule(schedule, size, count, chunks)
        pipeline.check_fits(found, self.micro_batch_num)
        return found if pipeline.has_backward else found.forward_only()

    def _complete(self, schedule: Schedule) -> Schedule:
        """The schedule with messages and the actions of parameters, proven to run."""
        if self._pipeline.is_sharded:
            schedule = add_parameter_actions(schedule)
        schedule = add_messages(schedule, self._pipeline.skips)
        validate(schedule, blocking_receives=False)
        return schedule

    @property
    def exec_order(self) -> dict[int, list[MetaStep]]:
        """The actions of every rank, as they run."""
        return dict(enumerate(map(list, self.schedule.orders)))

    @property
    def trace(self) -> list[MetaStep]:
        """The actions that this rank has run in the last step."""
        return list(self._runtime.trace)

    @property
    def micro_batch(self) -> int:
        """The micro batch of the action that this rank runs, or has run last."""
        running = self._runtime.running
        return 0 if running is None else running.micro_index or 0

    @property
    def idle(self) -> float:
        """The part of the last step's time, from 0 to 1, in which this rank waited for others."""
        seconds = self._runtime.seconds
        return self._runtime.idle_seconds / seconds if seconds else 0.0

    def gather_numbers(self, *numbers: float) -> list[list[float]]:
        """Numbers of every rank of the pipeline, in its order; all ranks call this."""
        if self._pipeline.size == 1:
            return [list(numbers)]
        own = platform.tensor(np.array([numbers], "float64")).to(platform.device())
        rows = platform.all_gather_into_tensor(own, self._pipeline.group)
        gathered: list[list[float]] = platform.tensor_to_numpy(rows).tolist()
        return gathered

    # --- steps

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a step whose last stage returns the loss; gradients add up over micro batches.

        Positional arguments enter at the first stage; every rank passes the keyword arguments of its own stages.
        Returns the last stage's outputs, one per micro batch, and an empty list on other ranks.
        """
        _refuse_without_recording("run", self._pipeline)
        step = Step((), (), is_trained=self._pipeline.has_backward)
        with _telling(step):
            step.args, step.kwargs = self.split_microbatches(args, kwargs)
        if self._concat_dim is not None:
            step.join = lambda outputs: join(_in_order(outputs), self._concat_dim)
        done = self._run(step)
        return _in_order(done.outputs) if done.joined is None else done.joined

    def run_microbatches(
        self,
        arg_mbs: Sequence[tuple[Any, ...]],
        kwarg_mbs: Sequence[Mapping[str, Any]],
        losses: list[Any],
    ) -> None:
        """Runs a step on arguments that are divided already; ``losses`` gets the last stage's outputs."""
        _refuse_without_recording("run_microbatches", self._pipeline)
        step = Step(arg_mbs, kwarg_mbs, is_trained=self._pipeline.has_backward)
        losses[:] = _in_order(self._run(step).outputs)

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Trains on a batch; returns the joined output on the rank of the last stage, and None on others.

        ``target`` is given on the rank of the last stage, and divided at dim 0. ``losses`` gets the losses of all micro
        batches there.
        """
        _refuse_without_recording("step", self._pipeline)
        is_trained = self._pipeline.has_loss and self._pipeline.has_backward
        if self._pipeline.has_backward and not is_trained:
            self._warn_without_loss()
        done = self._run_batch(
            args, kwargs, target, loss_kwargs, is_trained, return_outputs
        )
        return self._finish_batch(done, losses)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs forward only; returns the joined output on the rank of the last stage, and None on others."""
        done = self._run_batch(args, kwargs, target, loss_kwargs, False, return_outputs)
        return self._finish_batch(done, losses)

    def split_microbatches(
        self, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        """The positional and keyword arguments of every micro batch."""
        dims = self._args_dims if args else None
        return self._divider(args, kwargs or {}, dims, self._kwargs_dims)

    @property
    def _divider(self) -> Divider:
        is_dynamic = any(stage.dyn_shape for stage in self.stages)
        return Divider(self.micro_batch_num, allows_uneven=is_dynamic)

    def _run_batch(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        target: Any,
        loss_kwargs: Mapping[str, Any] | None,
        is_trained: bool,
        keeps_outputs: bool,
    ) -> Step:
        step = Step((), (), is_trained=is_trained, keeps_outputs=keeps_outputs)
        step.join = lambda outputs: join(_in_order(outputs), self._merge_spec)
        with _telling(step):
            step.args, step.kwargs = self.split_microbatches(args, kwargs)
            if self._loss_fn is not None and self._pipeline.has_last_stage:
                step.loss_of = self._make_loss(target, loss_kwargs or {}, is_trained)
        if self._scale_grads:
            step.loss_scale = 1 / self.micro_batch_num
        return self._run(step)

    def _make_loss(
        self, target: Any, loss_kwargs: Mapping[str, Any], is_trained: bool
    ) -> Callable[[Any, int], Any] | None:
        loss_fn = self._loss_fn
        assert loss_fn is not None
        if target is None:
            if not is_trained:
                return None
            raise coded(
                ValueError,
                "HP485",
                "pipeline: the rank of the last stage needs target= for the loss function",
            )
        targets = self._divider.divide(target, 0, "target")
        return lambda output, micro: loss_fn(output, targets[micro], **loss_kwargs)

    def _finish_batch(self, done: Step, losses: list[Any] | None) -> Any:
        if losses is not None and self._pipeline.has_last_stage:
            losses[:] = _in_order(done.losses)
        return done.joined

    def _run(self, step: Step) -> Step:
        self._steps += 1
        seed = self._pipeline.seed + self._steps
        step.seed_of = lambda stage, micro: _mix(seed, stage, micro)
        if not step.is_trained:
            return self._runtime.run(step, self._forward_order)
        self._runtime.prepare_sharded(keeps_whole=self._keeps_whole)
        with self._shared.summed():
            return self._runtime.run(step)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Any:
        """Scales the gradients of all stages down to ``max_norm``; returns their total norm before, on every rank.

        Every rank calls it, between ``step`` and the optimizer. Shared parameters count once, sharded ones whole.
        """
        parameters = [
            parameter
            for stage in self.stages
            for module in stage.modules
            for parameter in platform.parameters_dict(module).values()
        ]
        return clip_over_stages(
            self._pipeline,
            parameters,
            max_norm,
            norm_type,
            error_if_nonfinite,
            is_counted=self._shared.is_counted,
        )

    def sync_shared_parameters_grad(self) -> None:
        """Does nothing: every step adds up the gradients of parameters that several stages have."""

    def register_custom_function(
        self, step_type: StepType, function: Callable[[MetaStep, PipelineContext], None]
    ) -> None:
        """Runs ``function(step, context)`` in place of the actions of a type."""
        self._runtime.custom[step_type] = function

    def _warn_without_loss(self) -> None:
        trained = any(
            platform.requires_grad(parameter)
            for stage in self.stages
            for parameter in platform.parameters_dict(stage.submodule).values()
        )
        if trained:
            warnings.warn(
                "pipeline: nothing is trained: pass loss_fn to the schedule, or use run() if the last stage returns "
                "the loss",
                stacklevel=3,
            )


@contextmanager
def _telling(step: Step) -> Iterator[None]:
    """Keeps an error for the runtime, which tells it to all ranks."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the runtime raises it
        step.error = error


def _refuse_without_recording(method: str, pipeline: Pipeline) -> None:
    if pipeline.has_backward and platform.is_recording_disabled():
        raise coded(
            RuntimeError,
            "HP485",
            f"pipeline: {method}() within no_grad() would train nothing; use eval()",
        )


def _describe_schedule(schedule: str | Schedule) -> str:
    """What all ranks must agree on: a name, all actions, or the content of a file."""
    if isinstance(schedule, Schedule) or not schedule.endswith(".csv"):
        return str(schedule)
    try:
        content = Path(schedule).read_bytes()
    except OSError as error:
        return str(error)
    return f"{Path(schedule).name} ({zlib.crc32(content):08x})"


def _in_order(by_micro: Mapping[int, Any]) -> list[Any]:
    return [by_micro[micro] for micro in sorted(by_micro)]


def _check_dims(name: str, given: Any, kinds: tuple[type, ...]) -> Any:
    if given is None or isinstance(given, kinds):
        return given
    words = " or ".join(kind.__name__ for kind in kinds)
    raise coded(
        TypeError, "HP480", f"pipeline: {name} must be a {words}, got {given!r}"
    )


def _check_count(count: Any) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise coded(
            ValueError,
            "HP480",
            f"pipeline: the number of micro batches must be a positive int, got {count!r}",
        )
    return count


def _count_chunks(name: str, pipeline: Pipeline) -> int | None:
    _, kind = find_schedule(name)
    if kind.style == "bidirectional":
        return 1
    return pipeline.stages // pipeline.size if kind.chunks is None else kind.chunks


def _mix(seed: int, stage: int, micro: int) -> int:
    """A seed for the random numbers of a forward, which no schedule changes."""
    mixed = seed * 0x9E3779B97F4A7C15
    mixed ^= (stage + 1) * 0xC2B2AE3D27D4EB4F
    mixed ^= (micro + 1) * 0x165667B19E3779F9
    return mixed % 2**62


# --- one class per schedule


def _make_class(name: str, schedule: str) -> type[PipelineScheduleRuntime]:
    about = f"The schedule {schedule}; see ``hyper-parallel schedule {schedule}``."
    members = {"schedule_name": schedule, "__doc__": about, "__module__": __name__}
    return type(name, (PipelineScheduleRuntime,), members)


ScheduleGPipe = _make_class("ScheduleGPipe", "GPipe")
Schedule1F1B = _make_class("Schedule1F1B", "1F1B")
ScheduleInterleaved1F1B = _make_class("ScheduleInterleaved1F1B", "Interleaved1F1B")
ScheduleLoopedBFS = _make_class("ScheduleLoopedBFS", "LoopedBFS")
ScheduleZBH1 = _make_class("ScheduleZBH1", "ZB-H1")
ScheduleZBH2 = _make_class("ScheduleZBH2", "ZB-H2")
ScheduleInterleavedZeroBubble = _make_class(
    "ScheduleInterleavedZeroBubble", "InterleavedZeroBubble"
)
ScheduleZBVZeroBubble = _make_class("ScheduleZBVZeroBubble", "ZBV")
ScheduleVHalf = _make_class("ScheduleVHalf", "V-Half")
ScheduleVMin = _make_class("ScheduleVMin", "V-Min")
ScheduleDualPipe = _make_class("ScheduleDualPipe", "DualPipe")
ScheduleDualPipeV = _make_class("ScheduleDualPipeV", "DualPipeV")

_CLASSES = {
    kind.schedule_name: kind
    for kind in PipelineScheduleRuntime.__subclasses__()
    if kind.schedule_name in SCHEDULES
}


def get_schedule_class(schedule_name: str) -> type[PipelineScheduleRuntime]:
    """The class of a schedule by any of its names, in any letter case."""
    name, _ = find_schedule(schedule_name)
    return _CLASSES[name]
