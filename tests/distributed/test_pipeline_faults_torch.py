# SPDX-License-Identifier: Apache-2.0
"""An error on one rank is an error on all, that names the action; a good step follows."""

import copy
import os
import time

import pytest
import torch
from pipeline_models import Layer, Pair, batch, close, layers, mse, new

from hyper_parallel.core.pipeline_parallel import (
    MetaStepType,
    PipelineContext,
    PipelineScheduleRuntime,
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
)
from hyper_parallel.core.pipeline_parallel.agreement import PipelineError
from hyper_parallel.core.pipeline_parallel.messages import add_messages
from hyper_parallel.core.pipeline_parallel.schedules import build_schedule
from hyper_parallel.core.pipeline_parallel.text import format_csv
from hyper_parallel.platform.errors import CommunicationError
from hyper_parallel.ranks import pool
from hyper_parallel.testing import RankError, on_ranks, run_ranks


class Fails(torch.autograd.Function):
    """Raises in forward or backward, of the micro batch that a tensor says."""

    @staticmethod
    def forward(ctx, x, fault):
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fault.calls_backward():
            raise RuntimeError("backward of this stage")
        return gradient, None


class Fault:
    """Where the next step fails: the kind, the micro batch."""

    def __init__(self):
        self.kind, self.micro, self.calls = None, None, {}

    def set(self, kind, micro):
        self.kind, self.micro, self.calls = kind, micro, {}

    def is_due(self, kind):
        self.calls[kind] = self.calls.get(kind, -1) + 1
        return self.kind == kind and self.calls[kind] == self.micro

    def calls_backward(self):
        return self.is_due("backward")

    def loss(self, output, target):
        if self.is_due("loss"):
            raise ValueError("the loss of this stage")
        return mse(output, target)


class Faulty(Layer):
    fault = None

    def forward(self, x):
        if self.fault is not None and self.fault.is_due("forward"):
            raise RuntimeError("forward of this stage")
        y = super().forward(x)
        return y if self.fault is None else Fails.apply(y, self.fault)


def faulty_pair(name, count, place):
    fault = Fault()
    pair = Pair(new(*[Faulty] * count), name, micros=4, loss=mse)
    if place in pair.own:
        pair.piped[place].fault = fault
    pair.schedule._loss_fn = fault.loss
    return pair, fault


def check_failure(pair, fault, place, kind, micro):
    before = torch.get_rng_state()
    fault.set(kind, micro)
    x, y = batch(8)
    what = f"stage {place}, {'backward' if kind == 'backward' else 'forward'}"
    with pytest.raises(PipelineError) as caught:
        pair.schedule.step(x, target=y)
    text = str(caught.value)
    rank = pair.mapping.rank_of(place, micro)
    assert f"rank {rank} failed in " in text, text
    assert what in text, text
    assert f"of micro batch {micro}" in text, text
    assert f"{kind} of this stage" in text, text
    assert "HP484" in text
    assert "Also failed" not in text
    assert torch.equal(torch.get_rng_state(), before)
    assert all(stage.passes == {} for stage in pair.stages)
    fault.set(None, None)
    pair.zero_grad()
    pair.step(x, y)
    pair.zero_grad()


CASES = [("GPipe", 2), ("1F1B", 2), ("ZB-H1", 2), ("Interleaved1F1B", 4), ("ZBV", 4)]


@on_ranks(2)
@pytest.mark.parametrize(("name", "count"), CASES)
def test_exception_on_rank_k_raises_on_all(name, count):
    for place in sorted({0, 1, count - 1}):
        pair, fault = faulty_pair(name, count, place)
        for kind in ("forward", "backward", *(["loss"] if place == count - 1 else [])):
            for micro in (0, 2) if kind != "loss" else (1,):
                if kind == "loss":
                    check_loss(pair, fault, place, micro)
                else:
                    check_failure(pair, fault, place, kind, micro)


def check_loss(pair, fault, place, micro):
    fault.set("loss", micro)
    x, y = batch(8)
    with pytest.raises(
        PipelineError,
        match=rf"stage {place}, forward of micro batch {micro}.*the loss of this stage",
    ):
        pair.schedule.step(x, target=y)
    fault.set(None, None)
    pair.zero_grad()
    pair.step(x, y)
    pair.zero_grad()


@on_ranks(4)
def test_exception_on_one_of_four_ranks():
    for name in ("1F1B", "ZB-H1", "DualPipe"):
        for place in (0, 2):
            pair, fault = faulty_pair(name, 4, place)
            fault.set("backward", 0)
            x, y = batch(8)
            with pytest.raises(PipelineError, match=rf"stage {place}, backward"):
                pair.schedule.step(x, target=y)
            fault.set(None, None)
            pair.zero_grad()
            pair.run_alone(x, y)
            pair.schedule.step(x, target=y)
            pair.check_gradients()


def lose_a_rank(shares_memory, micro):
    """Rank 1 ends in the forward of a micro batch."""
    os.environ["HYPER_PARALLEL_SHARE_MEMORY"] = shares_memory
    ranks = torch.distributed.new_group(range(2))  # which has agreed on nothing yet
    pair = Pair(layers(2), "1F1B", micros=4, group=ranks)
    x, y = batch(8)
    if pair.rank == 1:
        fault = Fault()
        fault.set("forward", micro)
        fault.end = lambda *_: os._exit(3) if fault.is_due("forward") else None
        pair.piped[1].register_forward_pre_hook(fault.end)
    began = time.monotonic()
    try:
        pair.schedule.step(x, target=y)
    except CommunicationError as error:
        took = time.monotonic() - began
        raise RuntimeError(f"missing {error.missing}, late {took > 20}") from error


@pytest.mark.parametrize(
    ("shares_memory", "micro"), [("1", 0), ("1", 1), ("0", 1)]
)  # before and after its first message, in memory and through sockets
def test_a_killed_rank_is_named(monkeypatch, shares_memory, micro):
    monkeypatch.setattr(pool, "GRACE", 10)
    with pytest.raises(RankError) as raised:
        run_ranks(lose_a_rank, 2, shares_memory, micro)
    assert "missing (1,), late False" in str(raised.value)


@on_ranks(2)
def test_two_ranks_fail_at_once():
    pair = Pair(new(Faulty, Faulty), "GPipe", micros=4)
    fault = Fault()
    pair.piped[pair.rank].fault = fault
    fault.set("forward", 1)
    x, y = batch(8)
    if pair.rank == 0:
        fault.set("forward", 3)
    with pytest.raises(
        PipelineError, match="rank 0 failed in 0F3.*Also failed: rank 1 in 1F1"
    ):
        pair.schedule.step(x, target=y)
    fault.set(None, None)
    pair.step(x, y)


@on_ranks(2)
def test_a_failure_with_a_frozen_first_stage():
    """No gradient is awaited by a stage that needs none, though the other has not read its message."""
    for name in ("GPipe", "1F1B"):
        parts = new(Faulty, Faulty)
        parts[0].requires_grad_(False)
        pair = Pair(parts, name, micros=4)
        fault = Fault()
        if pair.rank == 1:
            pair.piped[1].fault = fault
        for micro in range(4):
            fault.set("forward", micro)
            x, y = batch(8)
            with pytest.raises(PipelineError, match="rank 1 failed"):
                pair.schedule.step(x, target=y)
            fault.set(None, None)
            pair.zero_grad()
            pair.step(x, y)


@on_ranks(2)
def test_a_missing_target_is_told_to_all():
    pair = Pair(layers(2))
    x, y = batch()
    if pair.has_last:
        with pytest.raises(
            ValueError, match="needs target= for the loss function.*HP485"
        ):
            pair.schedule.step(x)
    else:
        with pytest.raises(
            PipelineError, match="rank 1 failed in what it was given.*needs target="
        ):
            pair.schedule.step(x)
    pair.step(x, y)


@on_ranks(2)
def test_ranks_that_disagree_are_all_told():
    rank = torch.distributed.get_rank()
    part = layers(1)[0]
    stage = PipelineStage(part, rank, 2)
    cases = [
        (
            lambda: Schedule1F1B(stage, 3 + rank),
            "agree on the number of micro batches, got rank 0: 3, rank 1: 4",
        ),
        (
            lambda: (Schedule1F1B, ScheduleGPipe)[rank](stage, 3),
            "agree on the schedule, got rank 0: 1F1B, rank 1: GPipe",
        ),
        (
            lambda: Schedule1F1B(PipelineStage(part, rank, 2 + rank), 3),
            r"the number of stages, got rank 0: \[2\], rank 1: \[3\]",
        ),
        (
            lambda: Schedule1F1B(PipelineStage(part, 0, 2), 3),
            r"1F1B runs the stages \[\[0\], \[1\]\].*hold \[\[0\], \[0\]\]",
        ),
        (
            lambda: Schedule1F1B(PipelineStage(part, rank, 2, dyn_shape=rank == 1), 3),
            "agree on dyn_shape",
        ),
        (
            lambda: Schedule1F1B(
                PipelineStage(part, rank, 2, has_backward=rank == 1), 3
            ),
            "agree on has_backward",
        ),
    ]
    for build, message in cases:
        with pytest.raises(ValueError, match=message):
            build()
    schedule = Schedule1F1B(stage, 3, mse)
    schedule.eval(batch()[0])


def test_stages_that_are_not_there_are_refused():
    part = layers(1)[0]
    with pytest.raises(
        ValueError, match="stage_index must be from 0 to 1 for 2 stages, got 2.*HP483"
    ):
        PipelineStage(part, 2, 2)
    with pytest.raises(ValueError, match="expected a stage, got none.*HP483"):
        Schedule1F1B([], 2)


# --- schedules of users


@on_ranks(2)
def test_a_csv_file_as_schedule(tmp_path):
    path = tmp_path / "mine.csv"
    for complete in (False, True):
        schedule = build_schedule("Interleaved1F1B", 2, 4, 2)
        if complete:
            schedule = add_messages(schedule)
        if torch.distributed.get_rank() == 0:
            path.write_text(format_csv(schedule))
        torch.distributed.barrier()
        stages, same = layers(4), layers(4)
        rank = torch.distributed.get_rank()
        own = [PipelineStage(stages[n], n, 4) for n in (rank, rank + 2)]
        runtime = PipelineScheduleRuntime(own, 4, schedule=str(path), loss_fn=mse)
        x, y = batch(8)
        for one, target in zip(x.chunk(4), y.chunk(4), strict=True):
            (mse(torch.nn.Sequential(*same)(one), target) / 4).backward()
        runtime.step(x, target=y)
        for n in (rank, rank + 2):
            for parameter, other in zip(
                stages[n].parameters(), same[n].parameters(), strict=True
            ):
                close(parameter.grad, other.grad)
        assert runtime.trace == runtime.exec_order[rank]
        torch.distributed.barrier()


@on_ranks(2)
def test_a_schedule_that_cannot_run_is_refused_on_all_ranks():
    rank = torch.distributed.get_rank()
    schedule = build_schedule("GPipe", 2, 2)
    orders = list(map(list, schedule.orders))
    orders[0][0], orders[0][-1] = orders[0][-1], orders[0][0]
    bad = schedule.with_orders(tuple(map(tuple, orders)))
    stage = PipelineStage(layers(1)[0], rank, 2)
    with pytest.raises(ValueError, match="0B1"):
        PipelineScheduleRuntime(stage, 2, schedule=bad, loss_fn=mse)
    with pytest.raises(ValueError, match="schedule is for 2 micro batches, got 3"):
        PipelineScheduleRuntime(stage, 3, schedule=schedule, loss_fn=mse)


@on_ranks(2)
def test_a_function_in_place_of_a_type_of_action():
    pair = Pair(layers(2))
    x, y = batch()
    calls = []

    def forward(step, context):
        assert isinstance(context, PipelineContext)
        assert context.schedule is pair.schedule.schedule
        assert list(context.stages) == pair.own
        close(context.arg_mbs[step.micro_index][0], x.chunk(3)[step.micro_index])
        assert context.kwarg_mbs == [{}] * 3
        assert list(context.losses) == (list(range(len(calls))) if pair.rank else [])
        context.run(step)
        calls.append(str(step))

    pair.schedule.register_custom_function(MetaStepType.FWD, forward)
    pair.step(x, y)
    assert calls == [f"{pair.rank}F{micro}" for micro in range(3)]


# --- memory


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("GPipe", 2),
        ("1F1B", 2),
        ("ZB-H1", 2),
        ("Interleaved1F1B", 4),
        ("ZBV", 4),
        ("V-Min", 4),
    ],
)
def test_live_activations_match_formula(name, count):
    """Counted when a forward begins; the outputs of all micro batches are freed at the end."""
    from hyper_parallel.core.pipeline_parallel.orders import count_live

    pair = Pair(layers(count), name, micros=4)
    peaks = []

    def count_passes(stage, forward):
        def counted(*args, **kwargs):
            output = forward(*args, **kwargs)
            peaks.append(sum(len(one.passes) for one in pair.stages))
            return output

        return counted

    for stage in pair.stages:
        stage.forward_one_chunk = count_passes(stage, stage.forward_one_chunk)
    pair.schedule.step(*batch(8)[:1], target=batch(8)[1])
    assert max(peaks) == count_live(pair.schedule.schedule.orders[pair.rank])
    assert all(stage.passes == {} for stage in pair.stages)
    runtime = pair.schedule._runtime
    assert runtime._links.is_clear
    assert not runtime._mailbox._posted


@on_ranks(2)
def test_state_dicts_have_the_names_of_the_whole_model():
    rank = torch.distributed.get_rank()
    whole = torch.nn.Sequential(*layers(4))
    part = torch.nn.Sequential()
    for index in (2 * rank, 2 * rank + 1):
        part.add_module(str(index), copy.deepcopy(whole[index]))
    PipelineStage(part, rank, 2)
    assert set(part.state_dict()) <= set(whole.state_dict())
