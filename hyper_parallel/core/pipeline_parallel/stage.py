# SPDX-License-Identifier: Apache-2.0
"""A stage: a part of a model on this rank, and what its micro batches under way need for their backward.

stage = PipelineStage(part, 0, 2, group=mesh["pp"].get_group())
outputs = stage.forward_one_chunk(0, (x,))
stage.backward_one_chunk(0)                    of the last stage, whose output is the loss
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.pipeline_parallel.micro_batches import tensors_of
from hyper_parallel.core.pipeline_parallel.wire import shard_of
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


@dataclass(frozen=True)
class SharedParameterInfo:
    """A parameter that several stages have: ``shared_stage`` names all of them."""

    parameter: Any
    shared_stage: Sequence[int]


@dataclass
class Pass:
    """A micro batch between its forward and the end of its backward."""

    inputs: list[Any]  # leaves that receive gradients, and what needs none
    output: Any
    loss: Any = None
    finish: Callable[[], None] | None = None  # the rest of a backward in two parts


class PipelineStage:
    """A part of a model that runs as one stage of ``stage_num``.

    ``src_stage`` and ``dst_stage``: stages beyond the neighbours from which this one takes inputs as well, behind those
    of its neighbour, and to which it sends its output. ``dyn_shape``: shapes may differ between micro batches and
    steps. Without ``has_backward`` the pipeline only runs forward. ``shared_parameters``: those that other stages have
    too; they are made equal when the schedule is built, and get the sum of all gradients.
    """

    takes_arguments = False  # whether a later stage is given the arguments of a step

    def __init__(
        self,
        submodule: Any,
        stage_index: int,
        stage_num: int,
        device: Any = None,
        group: Any = None,
        src_stage: int | Sequence[int] | None = None,
        dst_stage: int | Sequence[int] | None = None,
        dyn_shape: bool = False,
        has_backward: bool = True,
        shared_parameters: Sequence[SharedParameterInfo] | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        _check_index(stage_index, stage_num)
        self.submodule, self.device, self.group = submodule, device, group
        self.stage_index, self.stage_num = stage_index, stage_num
        self.src_stage = _to_stages(
            "src_stage", src_stage, range(stage_index), neighbour=stage_index - 1
        )
        self.dst_stage = _to_stages(
            "dst_stage",
            dst_stage,
            range(stage_index + 1, stage_num),
            neighbour=stage_index + 1,
        )
        self.dyn_shape, self.has_backward = dyn_shape, has_backward
        self.shared_parameters = list(shared_parameters or ())
        self.mesh = mesh if mesh is not None else _find_mesh(submodule)
        self.passes: dict[int, Pass] = {}
        self.modules = [submodule]  # what the stage computes with

    @property
    def is_first_stage(self) -> bool:
        """Whether the stage takes the arguments of a step."""
        return self.stage_index == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether the stage computes what a step returns."""
        return self.stage_index == self.stage_num - 1

    # --- one micro batch

    def forward_one_chunk(
        self,
        micro_index: int,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        keep: bool = True,
        arguments: Sequence[Any] = (),
    ) -> Any:
        """Runs forward for a micro batch.

        ``keep``: what its backward needs. ``arguments``: those of the step, for stages that take them.
        """
        args, kwargs = tuple(args or ()), dict(kwargs or {})
        if not (keep and self.has_backward):
            return self.call_module(args, kwargs, arguments)
        # What the first stage is given belongs to the caller, and gets its gradients in backward as anywhere else.
        inputs = [] if self.is_first_stage else tensors_of(args)
        with platform.tape():
            if inputs:
                args = platform.apply_to_tensors(platform.use_leaf, args)
            output = self.call_module(args, kwargs, arguments)
        self.passes[micro_index] = Pass(inputs, output)
        return output

    def call_module(
        self,
        inputs: Sequence[Any],
        kwargs: Mapping[str, Any],
        arguments: Sequence[Any],  # noqa: ARG002 - of stages that take them
    ) -> Any:
        """Computes the stage's output from what other stages have handed to it."""
        return self.submodule(*inputs, **kwargs)

    def backward_one_chunk(
        self,
        micro_index: int,
        last_backward: bool = False,  # noqa: ARG002 - upstream's sign to reduce gradients, which an action does here
    ) -> None:
        """Runs backward of a micro batch on the last stage, from its loss, or its output if it is the loss."""
        one = self.passes[micro_index]
        losses = tensors_of(one.output if one.loss is None else one.loss)
        self.run_backward(micro_index, losses, [None] * len(losses))

    def run_backward(
        self, micro_index: int, outputs: Sequence[Any], gradients: Sequence[Any]
    ) -> list[Any]:
        """Runs backward of a micro batch from these outputs; returns the gradients of its inputs."""
        one = self.passes.pop(micro_index)
        if outputs:
            platform.backward(list(outputs), list(gradients))
        return _gradients_of(one.inputs)

    def run_backward_inputs(
        self, micro_index: int, outputs: Sequence[Any], gradients: Sequence[Any]
    ) -> list[Any]:
        """The part of a backward that gives the gradients of inputs; the rest waits for ``run_backward_weights``."""
        one = self.passes[micro_index]
        if outputs:
            leaves = [shard_of(x) for x in one.inputs if platform.requires_grad(x)]
            one.finish = platform.backward_inputs(outputs, gradients, leaves)
        one.output = one.loss = None
        found = _gradients_of(one.inputs)
        one.inputs = []
        return found

    def run_backward_weights(self, micro_index: int) -> None:
        """The rest of a backward in two parts."""
        one = self.passes.pop(micro_index)
        if one.finish is not None:
            one.finish()

    def clear_states(self) -> None:
        """Forgets the micro batches under way."""
        self.passes.clear()

    def sync_shared_parameters_grad(self) -> None:
        """Does nothing: every step of a schedule adds up the gradients of parameters that other stages have too."""


def _gradients_of(inputs: Iterable[Any]) -> list[Any]:
    """The gradients of inputs; None for those that have none."""
    found = []
    for tensor in inputs:
        gradient = None
        if platform.requires_grad(tensor):
            gradient = platform.gradient_of(shard_of(tensor))
        found.append(gradient)
    return found


def _find_mesh(module: Any) -> DeviceMesh | None:
    """The mesh of the module's parameters."""
    for parameter in platform.parameters_dict(module).values():
        if isinstance(parameter, DTensor):
            mesh: DeviceMesh = parameter.device_mesh
            return mesh
    return None


def _check_index(stage_index: int, stage_num: int) -> None:
    if not 0 <= stage_index < stage_num:
        raise coded(
            ValueError,
            "HP483",
            f"PipelineStage: stage_index must be from 0 to {stage_num - 1} for {stage_num} stages, got {stage_index!r}",
        )


def _to_stages(
    name: str, given: int | Sequence[int] | None, allowed: range, neighbour: int
) -> tuple[int, ...]:
    """The stages beyond the neighbour, which may be named as well."""
    stages = (given,) if isinstance(given, int) else tuple(given or ())
    if not set(stages) <= set(allowed):
        raise coded(
            ValueError,
            "HP483",
            f"PipelineStage: {name} must name stages of {list(allowed)}, got {given!r}",
        )
    return tuple(sorted(set(stages) - {neighbour}))
