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

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from hyper_parallel.core.pipeline_parallel.comm_compute_overlap import (
    CommComputeOverlap,
)
from hyper_parallel.core.pipeline_parallel.context import PipelineContext
from hyper_parallel.core.pipeline_parallel.links import Cell, Link, Links
from hyper_parallel.core.pipeline_parallel.mailbox import (
    Mailbox,
    PeerFailedError,
    Received,
)
from hyper_parallel.core.pipeline_parallel.micro_batches import tensors_of
from hyper_parallel.core.pipeline_parallel.orders import Schedule
from hyper_parallel.core.pipeline_parallel.sharded_stage import ShardedStage
from hyper_parallel.core.pipeline_parallel.stage import PipelineStage
from hyper_parallel.core.pipeline_parallel.wire import (
    Spec,
    describe,
    describe_gradients,
    find_trained,
    place,
    shard_of,
)
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import code_of
from hyper_parallel.platform.errors import CommunicationError
from hyper_parallel.platform.messages import BackendMessages, Messages

platform = get_platform()

_Kind = MetaStepType


@dataclass
class Step:
    """What one step is given, and what it returns.

    ``loss_of(output, micro)`` gives the loss of a micro batch, None if the last stage returns it. ``seed_of(stage,
    micro)``: of the random numbers of a forward. ``join(outputs)`` gives ``joined`` where the last stage is.
    ``is_trained``: whether backward runs. ``keeps_outputs``: whether the outputs of the last stage are returned.
    """

    args: Sequence[tuple[Any, ...]]
    kwargs: Sequence[Mapping[str, Any]]
    loss_of: Callable[[Any, int], Any] | None = None
    loss_scale: float = 1.0
    seed_of: Callable[[int, int], int] | None = None
    join: Callable[[Mapping[int, Any]], Any] | None = None
    is_trained: bool = True
    keeps_outputs: bool = True
    outputs: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, Any] = field(default_factory=dict)
    joined: Any = None
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
        overlap: CommComputeOverlap | None = None,
    ) -> None:
        self._overlap = overlap
        self.schedule, self._rank, self._stages = schedule, rank, dict(stages)
        self._group, self._ranks = group, list(ranks)
        self.trace: list[MetaStep] = []
        self.running: MetaStep | None = None
        self.seconds = 0.0  # of the last step
        self.idle_seconds = 0.0  # those of them in which this rank waited for others
        self.custom: dict[StepType, Callable[[MetaStep, PipelineContext], None]] = {}
        dynamic = any(stage.dyn_shape for stage in stages.values())
        self._messages: Messages = BackendMessages(platform, group)
        if len(ranks) > 1:
            self._messages = platform.connect_messages(group)
        self._boxes = {
            is_trained: Mailbox(
                self._messages, self._ranks[rank], self._global_rank, dynamic=dynamic
            )
            for is_trained in (True, False)
        }
        self._mailbox = self._boxes[True]
        self._sharded = {
            number: ShardedStage(stage.modules, stage.submodule)
            for number, stage in stages.items()
        }
        self._step = Step((), ())
        self._seeded: Callable[[int], AbstractContextManager[Any]] = platform.seeded
        self._links = Links(schedule, rank, self._stages)
        # Those whose gradients are received once it is known that there are any.
        self._early: set[Link] = set()
        # The work of an order, by its identity; the order is kept, so that no other gets that.
        self._jobs: dict[int, tuple[Sequence[MetaStep], list[_Job]]] = {}

    def _global_rank(self, stage: int, micro: int) -> int:
        return self._ranks[self.schedule.mapping.rank_of(stage, micro)]

    def _sharded_of(self, step: MetaStep) -> ShardedStage:
        assert step.stage_index is not None
        return self._sharded[step.stage_index]

    def prepare_sharded(self, *, keeps_whole: bool) -> None:
        """Before a step: has the units of ``fully_shard`` wait with their reductions."""
        for sharded in self._sharded.values():
            sharded.prepare(keeps_whole=keeps_whole)

    def _find_jobs(self, order: Sequence[MetaStep]) -> list[_Job]:
        """What the actions of an order do."""
        found = self._jobs.get(id(order))
        if found is None:
            jobs = [self._find_job(step) for step in order]
            found = self._jobs[id(order)] = order, jobs
        return found[1]

    def _find_job(self, step: MetaStep) -> _Job:
        """A function, and the one argument that it takes."""
        on_cells: dict[StepType, Callable[[Cell], None]] = {
            _Kind.FWD: self._forward,
            _Kind.BWD: self._backward,
            _Kind.BWD_INPUT: self._backward_input,
            _Kind.BWD_WEIGHT: self._backward_weight,
        }
        on_links: dict[StepType, Callable[[Link], None]] = {
            _Kind.FWD_SEND: self._send_output,
            _Kind.FWD_RECV: self._post_output,
            _Kind.BWD_SEND: self._send_gradient,
            _Kind.BWD_RECV: self._post_gradient,
        }
        on_stages: dict[StepType, Callable[[ShardedStage], None]] = {
            _Kind.FSDP_UNSHARD: ShardedStage.gather,
            _Kind.FSDP_RESHARD: ShardedStage.free,
            _Kind.FSDP_REDUCE_GRAD: ShardedStage.reduce,
        }
        if step.type in on_cells:
            return on_cells[step.type], self._links.cell(*_place(step))
        if step.type in on_links:
            return on_links[step.type], self._links.link(message_of(step))
        if step.type in on_stages:
            return on_stages[step.type], self._sharded_of(step)
        if step.sub_steps:
            return self._run_parts, [
                (one, self._find_job(one)) for one in step.sub_steps
            ]
        return self._refuse, step

    # --- the loop

    def run(self, step: Step, order: Sequence[MetaStep] | None = None) -> Step:
        """Runs one step, by this rank's order in the schedule or another one; raises on all ranks if one fails."""
        self._step, self._mailbox = step, self._boxes[step.is_trained]
        order = self.schedule.orders[self._rank] if order is None else order
        self.trace, self.idle_seconds = [], 0.0
        began = time.perf_counter()
        with self._grad_mode(), platform.reseeding() as self._seeded:
            failure = self._run_order(order) or self._join_outputs()
        with self._waiting():
            failed = agree_on_failures(
                failure, self._messages, self._group, self._ranks
            )
        self.seconds = time.perf_counter() - began
        self._step = Step((), ())  # what was given and returned is not kept
        if failed is not None:
            self._reset()
            if step.error is not None:
                raise step.error
            raise failed from (None if failure is None else failure.error)
        self._mailbox.end_step()
        self._links.clear()
        return step

    def _grad_mode(self) -> AbstractContextManager[Any]:
        return platform.tape() if self._step.is_trained else platform.no_grad()

    def _run_order(self, order: Sequence[MetaStep]) -> Failure | None:
        """Runs actions until one fails; then only exchanges messages."""
        if self._step.error is not None:
            failure = Failure("what it was given", self._step.error)
            self._drain(order, failure)
            return failure
        for index, (step, job) in enumerate(
            zip(order, self._find_jobs(order), strict=True)
        ):
            try:
                self._run_action(step, job)
            except Exception as error:  # noqa: BLE001 - it is raised on all ranks
                failure = Failure(step, error)
                try:
                    self._drain(order[index:], failure)
                except CommunicationError:  # a rank has ended: nobody can be told
                    raise error from error.__cause__
                return failure
            self.trace.append(step)
        return None

    def _join_outputs(self) -> Failure | None:
        step = self._step
        if step.join is not None and step.outputs:
            try:
                step.joined = step.join(step.outputs)
            except Exception as error:  # noqa: BLE001 - it is raised on all ranks
                return Failure("what it returns", error)
        return None

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.idle_seconds += time.perf_counter() - began

    def _receive(self, message: Message) -> Received:
        began = time.perf_counter()
        try:
            return self._mailbox.receive(message)
        finally:
            self.idle_seconds += time.perf_counter() - began

    def _run_action(self, step: MetaStep, job: _Job) -> None:
        self.running = step
        if step.meta_type in self.custom:
            self.custom[step.meta_type](step, self._make_context())
        else:
            function, argument = job
            function(argument)

    def _run_own(self, step: MetaStep) -> None:
        function, argument = self._find_job(step)
        function(argument)

    def _refuse(self, step: MetaStep) -> None:
        raise KeyError(step.type)

    def _make_context(self) -> PipelineContext:
        step = self._step
        return PipelineContext(
            self.schedule,
            self._stages,
            step.args,
            step.kwargs,
            step.losses,
            self._run_own,
        )

    def _run_parts(self, parts: Sequence[tuple[MetaStep, _Job]]) -> None:
        if self._overlap is None or not self._overlap.enabled:
            for part in parts:
                self._run_action(*part)
            return
        forward, backward = sorted(parts, key=lambda one: one[0].type is not _Kind.FWD)
        self._overlap.run(
            lambda: self._run_action(*forward), lambda: self._run_action(*backward)
        )

    def _drain(self, rest: Sequence[MetaStep], failure: Failure) -> None:
        """Goes through the rest of an order after a failure."""
        for step in rest[1:] if failure.has_been_sent else rest:
            if step.type in MESSAGES:
                self._drain_message(step)
        for link in self._early:
            self._mailbox.post(link.back)
        self._mailbox.discard_posted()
        self._mailbox.wait_for_sends()

    def _drain_message(self, step: MetaStep) -> None:
        message = message_of(step)
        link = self._links.link(message)
        is_backward = not message.is_forward
        is_send_back = is_backward and step.type in SENDS
        if is_send_back and self._mailbox.is_posted(link.forward):
            # Whether the other side waits for gradients is known from what it has sent.
            link.known = self._mailbox.discard(link.forward) or link.known
        if is_backward and _sends_nothing_back(link):
            return
        if self._mailbox.is_posted(message):
            return
        if is_backward and link.known is not None:
            self._mailbox.expect_gradients(message, link.known)
        if step.type in SENDS:
            self._mailbox.fail(message)
        else:
            self._mailbox.post(message)

    def _reset(self) -> None:
        self._mailbox.forget_step()
        self._early.clear()
        self._links.clear()
        for stage in self._stages.values():
            stage.clear_states()
        for sharded in self._sharded.values():
            sharded.reset()

    # --- forward

    def _forward(self, cell: Cell) -> None:
        stage, micro, given = cell.stage, cell.micro, self._step
        inputs = self._collect_inputs(cell)
        with self._seeded_for(cell):
            output = stage.forward_one_chunk(
                micro,
                inputs,
                given.kwargs[micro],
                keep=given.is_trained,
                arguments=given.args[micro],
            )
            if stage.is_last_stage:
                self._finish_output(stage, micro, output)
        cell.unsent = 0
        for link in cell.targets:
            if link.is_local:
                self._hand_over(link, output)
            else:
                cell.output = output
                cell.unsent += 1

    def _seeded_for(self, cell: Cell) -> AbstractContextManager[Any]:
        seed_of = self._step.seed_of
        if seed_of is None:
            return nullcontext()
        return self._seeded(seed_of(cell.number, cell.micro))

    def _collect_inputs(self, cell: Cell) -> tuple[Any, ...]:
        if not cell.sources:
            return tuple(self._step.args[cell.micro])
        inputs: list[Any] = []
        counts = []
        for link in cell.sources:
            tree = self._take_input(link)
            counts.append(len(tensors_of(tree)))
            inputs += tree if isinstance(tree, tuple) else (tree,)
        cell.counts = counts
        return tuple(inputs)

    def _take_input(self, link: Link) -> Any:
        if link.is_local:
            tree, link.handed = link.handed, None
            return tree
        received = self._receive(link.forward)
        link.known = received.known
        mesh = self._stages[link.forward.target].mesh
        pairs = zip(received.tensors, received.known.specs, strict=True)
        return received.tree([self._take_leaf(one, spec, mesh) for one, spec in pairs])

    def _take_leaf(self, shard: Any, spec: Spec, mesh: Any) -> Any:
        if spec.requires_grad and self._step.is_trained:
            platform.set_requires_grad(shard, True)
        return place(shard, spec, mesh)

    def _hand_over(self, link: Link, output: Any) -> None:
        """Hands an output to a stage of this rank, as leaves of a graph of its own."""
        link.known, tensors = describe(output)
        pairs = iter(zip(tensors, link.known.specs, strict=True))

        def detach(_: Any) -> Any:
            tensor, spec = next(pairs)
            shard = platform.detach(shard_of(tensor))
            if spec.requires_grad:
                platform.set_requires_grad(shard, True)
            if not isinstance(tensor, DTensor):
                return shard
            return DTensor(shard, tensor.layout, tuple(tensor.shape))

        link.handed = platform.apply_to_tensors(detach, output)

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

    def _send_output(self, link: Link) -> None:
        cell = link.source
        assert cell is not None
        known, tensors = describe(cell.output)
        self._mailbox.send(link.forward, known, tensors)
        link.known = known
        if link in self._early:
            self._early.remove(link)
            self._post_gradient(link)
        cell.unsent -= 1
        if not cell.unsent:
            cell.output = None
        self._mailbox.drop_finished()

    # --- backward

    def _backward(self, cell: Cell) -> None:
        outputs, gradients = self._collect_gradients(cell)
        found = cell.stage.run_backward(cell.micro, outputs, gradients)
        self._keep_gradients(cell, found)

    def _backward_input(self, cell: Cell) -> None:
        outputs, gradients = self._collect_gradients(cell)
        found = cell.stage.run_backward_inputs(cell.micro, outputs, gradients)
        self._keep_gradients(cell, found)

    def _backward_weight(self, cell: Cell) -> None:
        cell.stage.run_backward_weights(cell.micro)

    def _collect_gradients(self, cell: Cell) -> tuple[list[Any], list[Any]]:
        """(the outputs that backward begins with, their gradients)."""
        one = cell.stage.passes[cell.micro]
        if not cell.targets:
            losses = tensors_of(one.output if one.loss is None else one.loss)
            losses = [loss for loss in losses if platform.is_recorded(shard_of(loss))]
            return losses, [None] * len(losses)
        outputs = tensors_of(one.output)
        sums: list[Any] = [None] * len(outputs)
        for link in cell.targets:
            for index, gradient in self._take_gradients(link):
                earlier = sums[index]
                sums[index] = gradient if earlier is None else earlier + gradient
        used = [index for index, one in enumerate(sums) if one is not None]
        return [outputs[index] for index in used], [sums[index] for index in used]

    def _take_gradients(self, link: Link) -> list[tuple[int, Any]]:
        """The gradients that came back for an output, with the positions of its tensors."""
        known, link.known = link.known, None
        assert known is not None
        places = find_trained(known.specs)
        if not places:
            return []
        if link.is_local:
            gradients, link.gradients = link.gradients, None
            specs = [known.specs[index] for index in places]
        else:
            received = self._receive(link.back)
            gradients, specs = received.tensors, list(received.known.specs)
        assert gradients is not None
        mesh = self._stages[link.forward.source].mesh
        return [
            (index, place(one, spec, mesh))
            for index, one, spec in zip(places, gradients, specs, strict=True)
            if one is not None
        ]

    def _keep_gradients(self, cell: Cell, found: Sequence[Any]) -> None:
        """Keeps the gradients of inputs until they are sent to the stages that the inputs came from."""
        start = 0
        for link, count in zip(cell.sources, cell.counts, strict=True):
            assert link.known is not None
            places = find_trained(link.known.specs)
            link.gradients = [found[start + index] for index in places]
            start += count
        cell.counts = []

    def _send_gradient(self, link: Link) -> None:
        gradients, link.gradients = link.gradients, None
        known = link.known
        assert gradients is not None
        assert known is not None
        if _sends_nothing_back(link):
            return
        link.known = None
        self._mailbox.expect_gradients(link.back, known)
        self._mailbox.send(link.back, describe_gradients(known.specs), gradients)
        self._mailbox.drop_finished()

    # --- messages

    def _post_output(self, link: Link) -> None:
        self._mailbox.post(link.forward)

    def _post_gradient(self, link: Link) -> None:
        if link.known is None:
            self._early.add(link)
        elif find_trained(link.known.specs):
            self._mailbox.expect_gradients(link.back, link.known)
            self._mailbox.post(link.back)


# What an action does: a function, and the one argument that it takes.
_Job = tuple[Callable[[Any], None], Any]


def _sends_nothing_back(link: Link) -> bool:
    """Whether no gradient comes back for what was handed over, because it needs none."""
    return link.known is not None and not find_trained(link.known.specs)


class Failure:
    """What an action of this rank has raised, or what precedes or follows all actions."""

    def __init__(self, step: MetaStep | str, error: Exception) -> None:
        self.step = step
        self.error = error
        self.is_own = not isinstance(error, PeerFailedError)
        # A change of shapes is told to the other side in place of the message.
        is_send = not isinstance(step, str) and step.type in SENDS
        self.has_been_sent = is_send and code_of(error) == "HP482"
        self.text = "".join(traceback.format_exception_only(error)).strip()


def _place(step: MetaStep) -> tuple[int, int]:
    assert step.stage_index is not None
    assert step.micro_index is not None
    return step.stage_index, step.micro_index
