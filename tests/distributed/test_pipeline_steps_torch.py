# SPDX-License-Identifier: Apache-2.0
"""run, step and eval of a pipeline: what they take, return and add up, compared with one process."""

import weakref

import pytest
import torch
from pipeline_models import Layer, Pair, batch, close, layers, mse, new
from torch import nn

from hyper_parallel.core.pipeline_parallel import (
    BatchDimSpec,
    PipelineScheduleRuntime,
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    get_schedule_class,
)
from hyper_parallel.testing import on_ranks


class Loss(nn.Module):
    """A last stage that returns the loss, and what it was computed from."""

    def __init__(self):
        super().__init__()
        self.layer = Layer()

    def forward(self, x, target):
        return mse(self.layer(x), target)


@on_ranks(2)
def test_run_adds_up_what_step_averages():
    x, y = batch()
    whole = Pair(layers(2), loss=None)
    whole.loss = mse
    whole.run_alone(x, y, scale=1)  # the sum
    parts = new(Layer, Loss)
    parts[1].layer.load_state_dict(whole.alone[1].state_dict())
    parts[0].load_state_dict(whole.alone[0].state_dict())
    rank = torch.distributed.get_rank()
    schedule = Schedule1F1B(PipelineStage(parts[rank], rank, 2), 3)
    given = {} if rank == 0 else {"target": y}
    losses = schedule.run(*([x] if rank == 0 else []), **given)
    if rank == 0:
        assert losses == []
    else:
        assert len(losses) == 3
        close(sum(losses) / 3, mse(whole.forward_alone(x), y).detach())
    for own, other in zip(
        parts[rank].parameters(), whole.alone[rank].parameters(), strict=True
    ):
        close(own.grad, other.grad)


@on_ranks(2)
def test_run_joins_outputs_where_it_is_asked_to():
    rank = torch.distributed.get_rank()
    parts = layers(2)
    x, _ = batch()
    for dim in (None, 0, BatchDimSpec(1)):
        schedule = ScheduleGPipe(
            PipelineStage(parts[rank], rank, 2, has_backward=False),
            3,
            output_concat_dim=dim,
        )
        outputs = schedule.run(x)
        if rank == 0:
            assert outputs == []
        elif dim is None:
            assert [tuple(one.shape) for one in outputs] == [(2, 5)] * 3
        else:
            close(outputs, torch.cat(parts_of(parts, x), dim=0 if dim == 0 else 1))


def parts_of(parts, x):
    return [parts[1](parts[0](one)).detach() for one in x.chunk(3)]


@on_ranks(2)
def test_gradients_are_those_of_the_sum_without_scaling():
    pair = Pair(layers(2), scale_grads=False)
    x, y = batch()
    pair.run_alone(x, y, scale=1)
    pair.schedule.step(x, target=y)
    pair.check_gradients()


@on_ranks(2)
def test_scale_grads_with_accumulation():
    pair = Pair(layers(2), "ZB-H1")
    for seed in range(3):  # gradients add up
        pair.step(*batch(seed=seed))


@on_ranks(2)
def test_token_normalised_loss_equals_single_process():
    """Micro batches of unlike numbers of tokens; the sum of losses over the number of all tokens."""
    x, y = batch()
    mask = (torch.arange(30) % 7 < 4).view(6, 5)

    def loss(output, target, total):
        values, chosen = target.unbind(-1)
        return ((output - values).square() * chosen).sum() / total

    pair = Pair(layers(2), loss=loss, scale_grads=False)
    target = torch.stack([y, mask.double()], -1)
    total = int(mask.sum())
    loss(pair.forward_alone(x), target, total).backward()
    pair.schedule.step(x, target=target, loss_kwargs={"total": total})
    pair.check_gradients()


@on_ranks(2)
def test_losses_are_filled_in_order_on_the_last_stage_only():
    pair = Pair(layers(2))
    x, y = batch()
    _, losses = pair.run_alone(x, y)
    own = ["old"]
    output = pair.schedule.step(x, target=y, losses=own, return_outputs=False)
    assert output is None
    if pair.has_last:
        close(own, losses)
        assert not any(one.requires_grad for one in own)
    else:
        assert own == ["old"]


@on_ranks(2)
def test_outputs_are_not_kept_where_they_are_not_returned():
    kept = []

    def note(output, target):
        kept.append(weakref.ref(output))
        return mse(output, target)

    pair = Pair(layers(2), loss=note)
    x, y = batch()
    pair.schedule.step(x, target=y, return_outputs=False)
    assert len(kept) == (3 if pair.has_last else 0)
    assert all(one() is None for one in kept)


@on_ranks(2)
def test_all_outputs_kept_in_order():
    pair = Pair(layers(2), "ZB-H1")
    x, y = batch()
    outputs, _ = pair.run_alone(x, y)
    output = pair.schedule.step(x, target=y)
    if pair.has_last:
        close(output, torch.cat(outputs))
        assert not output.requires_grad


# --- eval


@on_ranks(2)
def test_eval_records_nothing_and_follows_training():
    parts = new(
        Layer, lambda layer, x: nn.functional.dropout(layer(x), 0.5, layer.training)
    )
    pair = Pair(parts)
    x, y = batch()
    for part in [*pair.alone, *pair.piped]:
        part.eval()
    with torch.no_grad():
        expected = pair.forward_alone(x)
    first = pair.schedule.eval(x)  # before the first step
    assert all(stage.passes == {} for stage in pair.stages)
    assert not any("B" in str(one) for one in pair.schedule.trace)
    pair.step(x, y)
    with torch.no_grad():
        again = pair.schedule.eval(x)
    for part in pair.piped:
        part.train()
    dropped = pair.schedule.eval(x)
    if pair.has_last:
        close(first, expected)
        close(again, expected)
        assert (dropped != expected).any()
        assert not first.requires_grad


@on_ranks(2)
def test_step_within_no_grad_points_to_eval():
    pair = Pair(layers(2))
    x, y = batch()
    for method in (pair.schedule.step, pair.schedule.run):
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"eval\(\).*HP485"):
            method(x)
    pair.step(x, y)


@on_ranks(2)
def test_step_without_a_loss_warns():
    pair = Pair(layers(2), loss=None)
    x, _ = batch()
    with pytest.warns(UserWarning, match="nothing is trained: pass loss_fn"):
        output = pair.schedule.step(x)
    if pair.has_last:
        close(output, pair.forward_alone(x).detach())
    for part in pair.piped:
        part.requires_grad_(False)
    pair.schedule.step(x)  # a warning would be an error


@on_ranks(2)
def test_a_pipeline_without_backward():
    pair = Pair(layers(2), options=lambda stage, part: {"has_backward": False})
    x, y = batch()
    with torch.no_grad():
        expected = pair.forward_alone(x)
        losses = []
        output = pair.schedule.step(x, target=y, losses=losses)
    assert all(stage.passes == {} for stage in pair.stages)
    pair.schedule.run(x)
    if pair.has_last:
        close(output, expected)
        assert len(losses) == 3
    assert not any("B" in str(one) for one in pair.schedule.schedule.orders[0])


# --- what it is given


@on_ranks(2)
def test_kwargs_are_not_mutated__interleaved_with_recompute():
    """Each rank passes its own; tensors are divided unless -1 says otherwise, and what is no tensor is passed on."""
    from hyper_parallel.core.activation_checkpoint import checkpoint

    def use(layer, x, *, mask, weight, power, rows):
        assert rows is kwargs["rows"]
        assert tuple(mask.shape) == (2, 5)
        return checkpoint(lambda x: layer(x) * mask * weight**power, x)

    pair = Pair(
        new(use, use, use, use), "Interleaved1F1B", kwargs_batch_dim={"weight": -1}
    )
    x, y = batch()
    mask = (torch.arange(30.0).view(6, 5) % 3 / 3).double().requires_grad_()
    kwargs = {
        "mask": mask,
        "weight": torch.linspace(0.5, 1, 5, dtype=torch.double, requires_grad=True),
        "power": 2,
        "rows": ["a", "b"],
    }
    before = dict(kwargs)
    pair.schedule.step(x, target=y, **kwargs)
    own = {name: kwargs[name].grad.clone() for name in ("mask", "weight")}
    assert kwargs == before
    assert mask.is_leaf
    assert mask.requires_grad
    assert tuple(mask.shape) == (6, 5)
    for name in own:
        kwargs[name].grad = None
    for part, target, one in zip(x.chunk(3), y.chunk(3), mask.chunk(3), strict=True):
        output = pair.forward_alone(part, **{**kwargs, "mask": one})
        (mse(output, target) / 3).backward()
    pair.check_gradients()
    for name, gradient in own.items():
        torch.distributed.all_reduce(gradient)  # every stage gives it a part
        close(gradient, kwargs[name].grad)


@on_ranks(2)
def test_arguments_that_require_gradients_get_them():
    for name in ("1F1B", "ZB-H1"):
        pair = Pair(layers(2), name)
        x, y = batch()
        x.requires_grad_()
        pair.run_alone(x, y)
        expected, x.grad = x.grad, None
        pair.schedule.step(x, target=y)
        pair.check_gradients()
        if pair.rank == 0:
            close(x.grad, expected)


@on_ranks(2)
def test_batch_dims_of_arguments():
    def first(layer, x, offset, both):
        return layer(x.transpose(0, 1) + offset + both["a"] + both["b"][0])

    pair = Pair(
        [*new(first), *layers(1)],
        args_batch_dim=(BatchDimSpec(1), -1, None),
    )
    x, y = batch()
    offset, both = torch.ones(5), {"a": x[:, :1].clone(), "b": [y[:, :1].clone()]}
    expected = pair.forward_alone(x.t(), offset, both).detach()
    output = pair.schedule.eval(x.t(), offset, both)
    if pair.has_last:
        close(output, expected)


def test_batch_dims_of_a_wrong_kind_are_refused():
    part = layers(1)[0]
    with pytest.raises(
        TypeError, match="args_batch_dim must be a list or tuple.*HP480"
    ):
        Schedule1F1B(PipelineStage(part, 0, 1), 2, 0)
    with pytest.raises(TypeError, match="kwargs_batch_dim must be a dict.*HP480"):
        Schedule1F1B(PipelineStage(part, 0, 1), 2, kwargs_batch_dim=(0,))
    with pytest.raises(TypeError, match="batch dim must be an int"):
        Schedule1F1B(PipelineStage(part, 0, 1), 2, ["0"]).eval(batch()[0])
    with pytest.raises(ValueError, match="positive int, got 0"):
        Schedule1F1B(PipelineStage(part, 0, 1), 0)
    with pytest.raises(ValueError, match="no dim 3"):
        Schedule1F1B(PipelineStage(part, 0, 1), 2, [3]).eval(batch()[0])


@on_ranks(2)
def test_a_batch_that_micro_batches_do_not_divide():
    pair = Pair(layers(2))
    x, y = batch(rows=7)
    given = [x] if pair.rank == 0 else []  # only one rank can see the error
    if pair.rank == 0:
        with pytest.raises(ValueError, match="size 7 at batch dim 0, which 3 micro"):
            pair.schedule.step(*given)
    else:
        with pytest.raises(
            RuntimeError, match="rank 0 failed in what it was given.*size 7"
        ):
            pair.schedule.step(*given, target=y[:6])
    pair.step(*batch())


@on_ranks(2)
def test_uneven_micro_batches_with_dyn_shape():
    for name in ("GPipe", "ZB-H1"):
        pair = Pair(layers(2), name, options=lambda stage, part: {"dyn_shape": True})
        pair.step(*batch(rows=7))  # pieces of 3, 3 and 1
        pair.step(*batch(rows=6))


@on_ranks(2)
def test_dynamic_shapes__two_lengths_in_one_step():
    """A stage that shortens some micro batches."""

    def shorten(layer, x):
        return layer(x)[:1] if x[0, 0] > 0 else layer(x)

    pair = Pair(
        [*new(shorten), *layers(1)],
        loss=lambda output, target: output.square().sum() + target.sum(),
        options=lambda stage, part: {"dyn_shape": True},
    )
    x, y = alternating()
    pair.schedule.step(x, target=y, return_outputs=False)
    pair.run_alone(x, y)
    pair.check_gradients()


def alternating():
    """A batch whose micro batches begin with numbers of both signs."""
    x, y = batch()
    x[::2, 0] = torch.tensor([1.0, -1.0, 1.0])
    return x, y


@on_ranks(2)
def test_dynamic_shapes__two_lengths_in_one_step_are_refused_otherwise():
    def shorten(layer, x):
        return layer(x)[:1] if x[0, 0] > 0 else layer(x)

    for name in ("GPipe", "1F1B"):
        pair = Pair([*new(shorten), *layers(1)], name)
        x, y = alternating()
        with pytest.raises(
            RuntimeError, match=r"rank 0 failed .*float64\[[12], 5\].*HP482"
        ):
            pair.schedule.step(x, target=y)


@on_ranks(2)
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "ZBV"])
def test_dynamic_shapes__between_steps(name):
    count = 2 if name in ("GPipe", "1F1B") else 4
    pair = Pair(layers(count), name)
    pair.step(*batch())
    pair.zero_grad()
    x, y = batch(rows=9)
    with pytest.raises(RuntimeError, match=r"\[3, 5\].*but sent.*\[2, 5\].*HP482"):
        pair.schedule.step(x, target=y)
    pair.zero_grad()
    pair.step(*batch())
    pair.schedule.eval(x)  # evaluation has shapes of its own


# --- one process


def test_one_process_needs_no_group():
    for name, chunks in [
        ("1F1B", 1),
        ("GPipe", 1),
        ("Interleaved1F1B", 3),
        ("ZBV", 2),
        ("ZB-H1", 1),
    ]:
        parts, same = layers(chunks), layers(chunks)
        x, y = batch()
        for one, target in zip(x.chunk(3), y.chunk(3), strict=True):
            (mse(nn.Sequential(*same)(one), target) / 3).backward()
        stages = [PipelineStage(part, n, chunks) for n, part in enumerate(parts)]
        schedule = get_schedule_class(name)(stages, 3, mse)
        output = schedule.step(x, target=y)
        close(output, nn.Sequential(*same)(x).detach())
        for part, other in zip(parts, same, strict=True):
            for own, expected in zip(
                part.parameters(), other.parameters(), strict=True
            ):
                close(own.grad, expected.grad)
        assert "SEND" not in str(schedule.trace)


# --- outputs


@on_ranks(2)
def test_outputs_of_other_structures_are_joined():
    def last(layer, x):
        output = layer(x)
        return {"output": output, "count": 3, "mean": output.mean(), "t": output.t()}

    parts = [*layers(1), *new(last)]
    merge = {"output": 0, "count": None, "mean": None, "t": BatchDimSpec(1)}
    pair = Pair(
        parts,
        loss=lambda output, target: mse(output["output"], target),
        output_merge_spec=merge,
    )
    x, y = batch()
    output = pair.schedule.step(x, target=y)
    expected = pair.forward_alone(x)
    if pair.has_last:
        assert output["count"] == 3
        for name in ("output", "mean", "t"):
            close(output[name], expected[name].detach())


@on_ranks(2)
def test_outputs_are_joined_by_a_function():
    pair = Pair(layers(2), output_merge_spec=torch.stack)
    x, y = batch()
    output = pair.schedule.step(x, target=y)
    if pair.has_last:
        assert tuple(output.shape) == (3, 2, 5)


def test_names_of_schedules():
    assert get_schedule_class("1f1b") is Schedule1F1B
    assert issubclass(get_schedule_class("zbv"), PipelineScheduleRuntime)
    with pytest.raises(ValueError, match="1F1B"):
        get_schedule_class("2F2B")
