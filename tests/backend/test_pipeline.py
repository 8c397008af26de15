# SPDX-License-Identifier: Apache-2.0
"""Pipelines on every framework: training on two ranks equals one process."""

import frame
import pytest

from hyper_parallel.core.pipeline_parallel import (
    CommComputeOverlap,
    PipelineStage,
    SharedParameterInfo,
    get_schedule_class,
)
from hyper_parallel.core.pipeline_parallel.agreement import PipelineError
from hyper_parallel.platform import get_platform
from hyper_parallel.testing import on_ranks

platform = get_platform()

DIM, MICROS, ROWS = 4, 3, 6
SCHEDULES = [("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2), ("ZB-H1", 1)]


class Layer(platform.Module):
    """A residual layer, which passes on what it was given with its input."""

    def __init__(self):
        super().__init__()
        self.linear = frame.linear(DIM, DIM)

    def forward(self, x, *others):
        y = x + frame.tanh(self.linear(x))
        return (y, *others) if others else y

    construct = forward


class First(Layer):
    """Sends a tensor, one without a gradient, a number and None."""

    def forward(self, x):
        y, mask = super().forward(x, platform.detach(x) > 0)
        return y, mask, 2, None

    construct = forward


class Last(Layer):
    def forward(self, x, mask, factor, nothing):
        assert nothing is None
        return super().forward(x * mask.to(x.dtype) * factor)

    construct = forward


def new_layers(count):
    layers = [First(), *(Layer() for _ in range(count - 2)), Last()]
    fill(layers)
    return layers


def fill(layers):
    for number, layer in enumerate(layers):
        for seed, parameter in enumerate(frame.cells(layer)[0].values()):
            values = frame.draw(*parameter.shape, seed=10 * number + seed)
            with platform.no_grad():
                platform.copy_into(
                    parameter, frame.tensor(values.astype("float32") / 2)
                )


def batch(seed=0):
    draws = (frame.draw(ROWS, DIM, seed=100 + seed + n) for n in range(2))
    return [frame.tensor(one.astype("float32")) for one in draws]


def mse(output, target):
    difference = output - target
    return (difference * difference).mean()


def run_chain(layers, x):
    given = (x,)
    for layer in layers:
        output = layer(*given)
        given = output if isinstance(output, tuple) else (output,)
    return output


def run_alone(layers, x, y):
    """(outputs, losses) of one process; its gradients are those of the mean of the losses."""
    outputs, losses = [], []
    for micro in range(MICROS):
        with platform.tape():
            output = run_chain(layers, platform.chunk(x, 0, MICROS, micro))
            loss = mse(output, platform.chunk(y, 0, MICROS, micro))
            scaled = loss / MICROS
        platform.backward([scaled])
        outputs.append(frame.array(platform.detach(output)))
        losses.append(frame.array(platform.detach(loss)))
    return outputs, losses


def parameters_of(layers):
    return [one for layer in layers for one in frame.cells(layer)[0].values()]


def forget(layers):
    for parameter in parameters_of(layers):
        platform.forget_gradient(parameter)


def close(actual, expected):
    frame.equal(actual, expected, 2e-6)


@on_ranks(2)
@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_training_equals_one_process(name, chunks):
    rank, count = platform.get_rank(), 2 * chunks
    alone, piped = new_layers(count), new_layers(count)
    own = range(rank, count, 2)
    stages = [PipelineStage(piped[stage], stage, count) for stage in own]
    schedule = get_schedule_class(name)(stages, MICROS, mse)
    forget(alone), forget(piped)
    for step in range(3):
        x, y = batch(step)
        outputs, losses = run_alone(alone, x, y)
        own_losses = []
        output = schedule.step(x, target=y, losses=own_losses)
        assert schedule.trace == schedule.exec_order[rank]
        if rank == 0:
            assert output is None
            assert own_losses == []
        else:
            for micro in range(MICROS):
                close(platform.chunk(output, 0, MICROS, micro), outputs[micro])
                close(own_losses[micro], losses[micro])
        for stage in own:
            for mine, other in zip(
                parameters_of([piped[stage]]),
                parameters_of([alone[stage]]),
                strict=True,
            ):
                close(frame.grad(mine), frame.grad(other))
        evaluated = schedule.eval(x)
        if rank == 1:
            close(evaluated, frame.array(output))


@on_ranks(2)
def test_the_norm_of_all_stages_is_clipped():
    rank = platform.get_rank()
    alone, piped = new_layers(2), new_layers(2)
    schedule = get_schedule_class("1F1B")(
        PipelineStage(piped[rank], rank, 2), MICROS, mse
    )
    forget(alone), forget(piped)
    x, y = batch()
    run_alone(alone, x, y)
    schedule.step(x, target=y)
    norm = platform.clip_grad_norm_(parameters_of(alone), 0.1)
    close(schedule.clip_grad_norm_(0.1), frame.array(norm))
    for mine, other in zip(
        parameters_of([piped[rank]]), parameters_of([alone[rank]]), strict=True
    ):
        close(frame.grad(mine), frame.array(frame.grad(other)))


class Loss(Last):
    """Returns the loss itself."""

    def forward(self, x, mask, factor, nothing, target):
        return mse(super().forward(x, mask, factor, nothing), target)

    construct = forward


@on_ranks(2)
def test_run_adds_up_gradients():
    rank = platform.get_rank()
    alone, piped = new_layers(2), [new_layers(2)[0], Loss()]
    for mine, other in zip(
        parameters_of(piped[1:]), parameters_of(alone[1:]), strict=True
    ):
        with platform.no_grad():
            platform.copy_into(mine, other)
    schedule = get_schedule_class("1F1B")([PipelineStage(piped[rank], rank, 2)], MICROS)
    forget(alone), forget(piped)
    x, y = batch()
    _, losses = run_alone(alone, x, y)
    outputs = schedule.run(
        *([x] if rank == 0 else []), **({"target": y} if rank else {})
    )
    assert len(outputs) == (MICROS if rank else 0)
    for output, loss in zip(outputs, losses, strict=False):
        close(output, loss)
    for mine, other in zip(
        parameters_of([piped[rank]]), parameters_of([alone[rank]]), strict=True
    ):
        close(frame.grad(mine), frame.array(frame.grad(other)) * MICROS)


class Tied(platform.Module):
    """One end of a model whose two ends have one weight."""

    def __init__(self, is_last):
        super().__init__()
        self.linear, self.is_last = frame.linear(DIM, DIM, bias=False), is_last

    def forward(self, x):
        y = self.linear(x)
        return y if self.is_last else frame.tanh(y)

    construct = forward


@on_ranks(2)
def test_tied_parameters_have_one_gradient():
    rank = platform.get_rank()
    ends = [Tied(False), Tied(True)]
    weights = [end.linear.weight for end in ends]
    for number, weight in enumerate(weights):
        values = frame.draw(DIM, DIM, seed=number).astype("float32")
        with platform.no_grad():
            platform.copy_into(weight, frame.tensor(values))
    info = SharedParameterInfo(weights[rank], [0, 1])
    stage = PipelineStage(ends[rank], rank, 2, shared_parameters=[info])
    schedule = get_schedule_class("1F1B")(stage, MICROS, mse)
    close(platform.detach(weights[rank]), frame.draw(DIM, DIM).astype("float32"))
    forget(ends)
    same = [Tied(False), Tied(True)]
    for end in same:
        with platform.no_grad():
            platform.copy_into(end.linear.weight, weights[rank])
    forget(same)
    for step in range(2):
        x, y = batch(step)
        schedule.step(x, target=y)
        for micro in range(MICROS):
            with platform.tape():
                output = run_chain(same, platform.chunk(x, 0, MICROS, micro))
                loss = mse(output, platform.chunk(y, 0, MICROS, micro)) / MICROS
            platform.backward([loss])
        total = sum(frame.array(frame.grad(end.linear.weight)) for end in same)
        close(frame.grad(weights[rank]), total)


@on_ranks(2)
def test_an_error_on_one_rank_is_an_error_on_all():
    rank = platform.get_rank()
    layers = new_layers(2)
    schedule = get_schedule_class("1F1B")(
        PipelineStage(layers[rank], rank, 2), MICROS, mse
    )
    x, y = batch()

    def fail(output, target):
        raise ValueError("the loss")

    for loss in (fail, mse):
        schedule._loss_fn = loss
        if loss is fail:
            with pytest.raises(PipelineError, match="rank 1 failed in 1F0.*the loss"):
                schedule.step(x, target=y)
        else:
            forget(layers)
            schedule.step(x, target=y)
            assert frame.grad(parameters_of([layers[rank]])[0]) is not None


class Experts(Layer):
    """Its tokens go somewhere and come back."""

    def __init__(self, overlap):
        super().__init__()
        self.dispatch = overlap.wrap_dispatch(lambda x: x * 2)
        self.combine = overlap.wrap_combine(lambda x: x / 2)

    def forward(self, x):
        return x + self.combine(frame.tanh(self.linear(self.dispatch(x))))

    construct = forward


@on_ranks(2)
def test_pairs_take_turns():
    rank, found = platform.get_rank(), []
    for overlap in (CommComputeOverlap(enabled=False), CommComputeOverlap()):
        experts = [Experts(overlap) for _ in range(4)]
        fill(experts)
        stages = [PipelineStage(experts[n], n, 4) for n in sorted({rank, 3 - rank})]
        schedule = get_schedule_class("DualPipeV")(stages, 5, mse, overlap=overlap)
        assert "OVERLAP_F_B" in str(schedule.exec_order[rank])
        forget(experts)
        x, y = (platform.cat([one] * 5, 0) for one in batch())
        losses = []
        for _ in range(2):
            schedule.step(x, target=y, losses=losses)
        own = parameters_of([stage.submodule for stage in stages])
        found.append([*losses, *map(frame.grad, own)])
    for value, other in zip(*found, strict=True):
        frame.equal(value, frame.array(other), 0)


class Twice(Layer):
    """Sends its result twice."""

    def forward(self, x):
        y = super().forward(x)
        return y, y

    construct = forward


class Sum(Layer):
    """Adds what it is given, so that both get one gradient."""

    def forward(self, x, other):
        return super().forward(x + other)

    construct = forward


@on_ranks(2)
def test_two_inputs_of_one_gradient():
    """MindSpore has no kernel on a CPU that copies a gradient for a second leaf."""
    rank = platform.get_rank()
    alone, piped = [Twice(), Sum()], [Twice(), Sum()]
    for layers in (alone, piped):
        for seed, parameter in enumerate(parameters_of(layers)):
            values = frame.draw(*parameter.shape, seed=seed).astype("float32")
            with platform.no_grad():
                platform.copy_into(parameter, frame.tensor(values))
    stage = PipelineStage(piped[rank], rank, 2)
    schedule = get_schedule_class("1F1B")(stage, MICROS, mse)
    forget([*alone, *piped])
    x, y = batch()
    run_alone(alone, x, y)
    schedule.step(x, target=y)
    pairs = zip(parameters_of([piped[rank]]), parameters_of([alone[rank]]), strict=True)
    for mine, other in pairs:
        close(frame.grad(mine), frame.grad(other))


@on_ranks(2)
def test_step_within_no_grad_points_to_eval():
    rank = platform.get_rank()
    layers = new_layers(2)
    stage = PipelineStage(layers[rank], rank, 2)
    schedule = get_schedule_class("1F1B")(stage, MICROS, mse)
    x, y = batch()
    for method in (schedule.step, schedule.run):
        with platform.no_grad(), pytest.raises(RuntimeError, match=r"eval\(\).*HP485"):
            method(x)
    with platform.no_grad():
        schedule.eval(x)
    schedule.step(x, target=y)
