# SPDX-License-Identifier: Apache-2.0
"""Runs a schedule: one loop over the actions of this rank.

    runtime = Runtime(schedule, rank, {0: stage}, group)
    outputs = runtime.run(Step(args, kwargs, ...))
    runtime.trace == list(schedule.orders[rank])

An exception in any action is raised on all ranks: the rank goes on through its order without computing, sends that it
has failed where others wait for a tensor, and receives what they send. So every message is met, and the schedule can be
used again.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.pipeline_parallel.action import (
    MESSAGES,
    SENDS,
    Message,
    MetaStep,
    MetaStepType,
    StepType,
    message_of,
)
from hyper_parallel.core.pipeline_parallel.agreement import agree_on_failures
from hyper_parallel.core.pipeline_parallel.mailbox import (
    Known,
    Mailbox,
    PeerFailedError,
)
from hyper_parallel.core.pipeline_parallel.micro_batches import tensors_of
from hyper_parallel.core.pipeline_parallel.orders import Schedule
from hyper_parallel.core.pipeline_parallel.sharded_stage import ShardedStage
from hyper_parallel.core.pipeline_parallel.stage import PipelineStage
from hyper_parallel.core.pipeline_parallel.wire import (
    Spec,
    describe,
    place,
    shard_of,
)
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import code_of
from hyper_parallel.platform.errors import CommunicationError

platform = get_platform()

_Kind = MetaStepType


@dataclass
class Step:
    """What one step is given, and what it returns.

    ``loss_of(output, micro)`` gives the loss of a micro batch, None if the last stage returns it. ``seed_of(stage,
    micro)``: of the random numbers of a forward. ``is_trained``: whether backward runs. ``keeps_outputs``: whether the
    outputs of the last stage are returned.
    """

    args: Sequence[tuple[Any, ...]]
    kwargs: Sequence[Mapping[str, Any]]
    loss_of: Callable[[Any, int], Any] | None = None
    loss_scale: float = 1.0
    seed_of: Callable[[int, int], int] | None = None
    is_trained: bool = True
    keeps_outputs: bool = True
    outputs: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, Any] = field(default_factory=dict)
    error: Exception | None = None  # of what was given, which all ranks are told


class Runtime:
    """Runs one rank's actions. ``ranks``: the global ranks of the pipeline, in the order of its stages."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Mapping[int, PipelineStage],
        group: Any,
        ranks: Sequence[int],
    ) -> None:
        self.schedule, self._rank, self._stages = schedule, rank, dict(stages)
        self._group, self._ranks = group, list(ranks)
        self.trace: list[MetaStep] = []
        self.custom: dict[StepType, Callable[[MetaStep, Any], None]] = {}
        dynamic = any(stage.dyn_shape for stage in stages.values())
        self._boxes = {
            is_trained: Mailbox(group, self._global_rank, dynamic=dynamic)
            for is_trained in (True, False)
        }
        self._mailbox = self._boxes[True]
        self._sharded = {
            number: ShardedStage(stage.submodule) for number, stage in stages.items()
        }
        self._step = Step((), ())
        self._clear()
        self._handlers: dict[StepType, Callable[[MetaStep], None]] = {
            _Kind.FWD: self._forward,
            _Kind.BWD: self._backward,
            _Kind.BWD_INPUT: self._backward_input,
            _Kind.BWD_WEIGHT: self._backward_weight,
            _Kind.FWD_SEND: self._send_output,
            _Kind.FWD_RECV: self._post,
            _Kind.BWD_SEND: self._send_gradient,
            _Kind.BWD_RECV: self._post,
            _Kind.OVERLAP_F_B: self._run_parts,
            _Kind.OVERLAP_B_F: self._run_parts,
            _Kind.FSDP_UNSHARD: lambda step: self._sharded_of(step).gather(),
            _Kind.FSDP_RESHARD: lambda step: self._sharded_of(step).free(),
            _Kind.FSDP_REDUCE_GRAD: lambda step: self._sharded_of(step).reduce(),
        }

    def _clear(self) -> None:
        self._sent: dict[Message, Known] = {}  # what forward has handed to others
        self._handed: dict[Message, Any] = {}  # what is handed over on this rank
        self._outputs: dict[tuple[int, int], Any] = {}
        self._gradients: dict[Message, list[Any]] = {}  # of inputs, until they are sent
        self._counts: dict[tuple[int, int], list[int]] = {}  # inputs by source

    def _global_rank(self, stage: int, micro: int) -> int:
        return self._ranks[self.schedule.mapping.rank_of(stage, micro)]

    def _sharded_of(self, step: MetaStep) -> ShardedStage:
        assert step.stage_index is not None
        return self._sharded[step.stage_index]

    def prepare_sharded(self, *, keeps_whole: bool) -> None:
        """Before a step: has the units of ``fully_shard`` wait with their reductions."""
        for sharded in self._sharded.values():
            sharded.prepare(keeps_whole=keeps_whole)

    # --- the loop

    def run(self, step: Step, order: Sequence[MetaStep] | None = None) -> Step:
        """Runs one step, by this rank's order in the schedule or another one; raises on all ranks if one fails."""
        self._step, self._mailbox = step, self._boxes[step.is_trained]
        order = self.schedule.orders[self._rank] if order is None else order
        self.trace = []
        with self._grad_mode():
            failure = self._run_order(order)
        failed = agree_on_failures(failure, self._group, self._ranks)
        if failed is not None:
            self._reset()
            if step.error is not None:
                raise step.error
            raise failed from (None if failure is None else failure.error)
        self._mailbox.end_step()
        self._clear()
        return step

    def _grad_mode(self) -> AbstractContextManager[Any]:
        return platform.tape() if self._step.is_trained else platform.no_grad()

    def _run_order(self, order: Sequence[MetaStep]) -> Failure | None:
        """Runs actions until one fails; then only exchanges messages."""
        if self._step.error is not None:
            failure = Failure(None, self._step.error)
            self._drain(order, failure)
            return failure
        for index, step in enumerate(order):
            try:
                self._run_action(step)
            except Exception as error:  # noqa: BLE001 - it is raised on all ranks
                failure = Failure(step, error)
                try:
                    self._drain(order[index:], failure)
                except CommunicationError:  # a rank has ended: nobody can be told
                    raise error from error.__cause__
                return failure
            self.trace.append(step)
        return None

    def _run_action(self, step: MetaStep) -> None:
        custom = self.custom.get(step.type)
        if custom is not None:
            custom(step, self)
        else:
            self._handlers[step.type](step)

    def _run_parts(self, step: MetaStep) -> None:
        for part in step.sub_steps or ():
            self._run_action(part)

    def _drain(self, rest: Sequence[MetaStep], failure: Failure) -> None:
        """Goes through the rest of an order after a failure."""
        for step in rest[1:] if failure.has_been_sent else rest:
            if step.type in MESSAGES:
                self._drain_message(step)
        self._mailbox.discard_posted()
        self._mailbox.wait_for_sends()

    def _drain_message(self, step: MetaStep) -> None:
        message = message_of(step)
        if not message.is_forward and step.type in SENDS:
            # Whether the other side waits for gradients is known from what it has sent.
            forward = Message(True, message.target, message.source, message.micro)
            if self._mailbox.is_posted(forward):
                known = self._mailbox.discard(forward)
                if known is not None:
                    self._sent[forward] = known
        if self._is_skipped(step) or self._mailbox.is_posted(message):
            return
        if step.type in SENDS:
            self._mailbox.fail(message)
        else:
            self._mailbox.post(message)

    def _reset(self) -> None:
        self._mailbox.forget_step()
        self._clear()
        for stage in self._stages.values():
            stage.clear_states()
        for sharded in self._sharded.values():
            sharded.reset()

    # --- forward

    def _forward(self, step: MetaStep) -> None:
        number, micro = _place(step)
        stage = self._stages[number]
        inputs = self._collect_inputs(number, micro)
        with self._seeded(number, micro):
            output = stage.forward_one_chunk(
                micro, inputs, self._step.kwargs[micro], keep=self._step.is_trained
            )
            if stage.is_last_stage:
                self._finish_output(stage, micro, output)
        for message in self.schedule.hand_overs(step):
            source, target = self.schedule.ends_of(message)
            if source == target:
                self._hand_over(message, output)
            else:
                self._outputs[number, micro] = output

    def _collect_inputs(self, number: int, micro: int) -> tuple[Any, ...]:
        if not self.schedule.sources[number]:
            return tuple(self._step.args[micro])
        inputs: list[Any] = []
        counts = []
        for source in self.schedule.sources[number]:
            tree = self._take_input(Message(True, source, number, micro))
            counts.append(len(tensors_of(tree)))
            inputs += tree if isinstance(tree, tuple) else (tree,)
        self._counts[number, micro] = counts
        return tuple(inputs)

    def _take_input(self, message: Message) -> Any:
        if message in self._handed:
            return self._handed.pop(message)
        received = self._mailbox.receive(message)
        known = received.known
        self._sent[message] = known
        mesh = self._stages[message.target].mesh
        pairs = zip(received.tensors, known.specs, strict=True)
        return received.tree([self._take_leaf(one, spec, mesh) for one, spec in pairs])

    def _take_leaf(self, shard: Any, spec: Spec, mesh: Any) -> Any:
        if spec.requires_grad and self._step.is_trained:
            platform.set_requires_grad(shard, True)
        return place(shard, spec, mesh)

    def _hand_over(self, message: Message, output: Any) -> None:
        """Hands an output to a stage of this rank, as leaves of a graph of its own."""
        parcel = describe(output)
        self._sent[message] = Known(parcel.text, parcel.specs)
        pairs = iter(zip(parcel.tensors, parcel.specs, strict=True))

        def detach(_: Any) -> Any:
            tensor, spec = next(pairs)
            shard = platform.detach(shard_of(tensor))
            if spec.requires_grad:
                platform.set_requires_grad(shard, True)
            if not isinstance(tensor, DTensor):
                return shard
            return DTensor(shard, tensor.layout, tuple(tensor.shape))

        self._handed[message] = platform.apply_to_tensors(detach, output)

    def _finish_output(self, stage: PipelineStage, micro: int, output: Any) -> None:
        step = self._step
        if step.keeps_outputs:
            step.outputs[micro] = platform.apply_to_tensors(platform.detach, output)
        if step.loss_of is None:
            return
        loss = step.loss_of(output, micro)
        step.losses[micro] = platform.detach(loss)
        if step.is_trained:
            scaled = loss if step.loss_scale == 1 else loss * step.loss_scale
            stage.passes[micro].loss = scaled

    def _seeded(self, number: int, micro: int) -> AbstractContextManager[Any]:
        seed_of = self._step.seed_of
        return (
            nullcontext()
            if seed_of is None
            else platform.seeded(seed_of(number, micro))
        )

    def _send_output(self, step: MetaStep) -> None:
        message = message_of(step)
        key = message.source, message.micro
        parcel = describe(self._outputs[key])
        self._mailbox.send_parcel(message, parcel, parcel.tensors)
        self._sent[message] = Known(parcel.text, parcel.specs)
        if all(
            Message(True, key[0], target, key[1]) in self._sent
            for target in self.schedule.targets[key[0]]
        ):
            del self._outputs[key]
        self._mailbox.drop_finished()

    # --- backward

    def _backward(self, step: MetaStep) -> None:
        number, micro = _place(step)
        outputs, gradients = self._collect_gradients(number, micro)
        found = self._stages[number].run_backward(micro, outputs, gradients)
        self._keep_gradients(number, micro, found)

    def _backward_input(self, step: MetaStep) -> None:
        number, micro = _place(step)
        outputs, gradients = self._collect_gradients(number, micro)
        found = self._stages[number].run_backward_inputs(micro, outputs, gradients)
        self._keep_gradients(number, micro, found)

    def _backward_weight(self, step: MetaStep) -> None:
        number, micro = _place(step)
        self._stages[number].run_backward_weights(micro)

    def _collect_gradients(
        self, number: int, micro: int
    ) -> tuple[list[Any], list[Any]]:
        """(the outputs that backward begins with, their gradients)."""
        one = self._stages[number].passes[micro]
        self._outputs.pop((number, micro), None)
        targets = self.schedule.targets[number]
        if not targets:
            losses = tensors_of(one.output if one.loss is None else one.loss)
            losses = [loss for loss in losses if platform.is_recorded(shard_of(loss))]
            return losses, [None] * len(losses)
        outputs = tensors_of(one.output)
        sums: list[Any] = [None] * len(outputs)
        for target in targets:
            forward = Message(True, number, target, micro)
            for index, gradient in self._take_gradients(forward).items():
                sums[index] = (
                    gradient if sums[index] is None else sums[index] + gradient
                )
        used = [index for index, one in enumerate(sums) if one is not None]
        return [outputs[index] for index in used], [sums[index] for index in used]

    def _take_gradients(self, forward: Message) -> dict[int, Any]:
        """The gradients that came back for a message, by the position of its tensors."""
        known = self._sent.pop(forward)
        places = [index for index, spec in enumerate(known.specs) if spec.requires_grad]
        if not places:
            return {}
        back = Message(False, forward.target, forward.source, forward.micro)
        source, target = self.schedule.ends_of(back)
        if source == target:
            gradients = self._gradients.pop(back)
        else:
            mesh = self._stages[forward.source].mesh
            received = self._mailbox.receive(back)
            pairs = zip(received.tensors, received.known.specs, strict=True)
            gradients = [
                None if one is None else place(one, spec, mesh) for one, spec in pairs
            ]
        taken = zip(places, gradients, strict=True)
        return {index: one for index, one in taken if one is not None}

    def _keep_gradients(self, number: int, micro: int, found: Sequence[Any]) -> None:
        """Keeps the gradients of inputs until they are sent to the stages that the inputs came from."""
        if not self.schedule.sources[number]:
            return
        start = 0
        counts = self._counts.pop((number, micro))
        for source, count in zip(self.schedule.sources[number], counts, strict=True):
            known = self._sent[Message(True, source, number, micro)]
            own = zip(found[start : start + count], known.specs, strict=True)
            gradients = [gradient for gradient, spec in own if spec.requires_grad]
            self._gradients[Message(False, number, source, micro)] = gradients
            start += count

    def _send_gradient(self, step: MetaStep) -> None:
        message = message_of(step)
        gradients = self._gradients.pop(message)
        if self._is_skipped(step):
            return
        forward = Message(True, message.target, message.source, message.micro)
        known = self._sent.pop(forward)
        specs = tuple(
            spec._replace(requires_grad=False)
            for spec in known.specs
            if spec.requires_grad
        )
        self._mailbox.send_parcel(message, Known("gradients", specs), gradients)
        self._mailbox.drop_finished()

    # --- messages

    def _post(self, step: MetaStep) -> None:
        if not self._is_skipped(step):
            self._mailbox.post(message_of(step))

    def _is_skipped(self, step: MetaStep) -> bool:
        """Whether a message is left out: no gradient comes back for what needs none."""
        message = message_of(step)
        if message.is_forward:
            return False
        forward = Message(True, message.target, message.source, message.micro)
        known = self._sent.get(forward)
        return known is not None and not any(one.requires_grad for one in known.specs)


class Failure:
    """What an action of this rank has raised; ``step`` is None if that was before all actions."""

    def __init__(self, step: MetaStep | None, error: Exception) -> None:
        self.step = step
        self.error = error
        self.is_own = not isinstance(error, PeerFailedError)
        # A change of shapes is told to the other side in place of the message.
        is_send = step is not None and step.type in SENDS
        self.has_been_sent = is_send and code_of(error) == "HP482"
        self.text = "".join(traceback.format_exception_only(error)).strip()


def _place(step: MetaStep) -> tuple[int, int]:
    assert step.stage_index is not None
    assert step.micro_index is not None
    return step.stage_index, step.micro_index
