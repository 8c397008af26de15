# SPDX-License-Identifier: Apache-2.0
"""CommComputeOverlap: a forward and a backward take turns behind each communication, with the values of a sequence."""

import threading
import time

import frame
import numpy as np
import pytest

from hyper_parallel import get_platform
from hyper_parallel.core.dtensor.modes import MODES, explicit
from hyper_parallel.core.pipeline_parallel import CommComputeOverlap

platform = get_platform()


class Exchange(platform.Function):
    """Stands for an all-to-all: doubles forward and backward, and notes in which order it is launched."""

    @staticmethod
    def forward(ctx, x, log):
        ctx.log = log
        log.append("forward")
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append("backward")
        return grad * 2, None


class Fails(platform.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError("the gradient")


class Model:
    """Layers of experts between a dispatch and a combine. ``fails_at``: the layer whose experts raise."""

    def __init__(self, layers, seed, overlap, log, fails_at=None, backward_fails=None):
        self.fails_at, self.backward_fails = fails_at, backward_fails
        self.leaves = [
            frame.leaf(frame.draw(4, 4, seed=100 * seed + n), "float32")
            for n in range(layers + 1)
        ]

        def exchange(x):
            return Exchange.apply(x, log)

        self.dispatch = overlap.wrap_dispatch(exchange)
        self.combines = [
            overlap.wrap_combine(exchange, is_last_layer=n == layers - 1)
            for n in range(layers)
        ]

    def forward(self):
        with platform.tape():
            x, *weights = self.leaves
            for number, weight in enumerate(weights):
                y = frame.tanh(self.dispatch(frame.tanh(x)) @ weight)
                if number == self.fails_at:
                    raise ZeroDivisionError("the experts")
                if number == self.backward_fails:
                    y = Fails.apply(y)
                x = x + self.combines[number](y)
            return (x * x).sum()

    def gradients(self):
        return [frame.array(frame.grad(one)) for one in self.leaves]


def run_both(counts, enabled, log=None, **fails):
    """A backward of one model and a forward of another, then the backward of the latter."""
    overlap = CommComputeOverlap(enabled)
    log = [] if log is None else log
    other = Model(counts[0], 1, overlap, log)
    own = Model(counts[1], 2, overlap, log, **fails)
    pending = other.forward()
    log.clear()
    loss, nothing = overlap.run(own.forward, lambda: platform.backward([pending]))
    assert nothing is None
    together = list(log)
    platform.backward([loss])
    values = [frame.array(platform.detach(loss)), *other.gradients(), *own.gradients()]
    return values, together


COUNTS = [(1, 1), (2, 2), (3, 1), (1, 3), (0, 2), (2, 0)]


@pytest.mark.parametrize("counts", COUNTS)
def test_overlap_with_unequal_layer_counts(counts):
    values, launched = run_both(counts, enabled=True)
    expected, in_order = run_both(counts, enabled=False)
    for value, other in zip(values, expected, strict=True):
        assert np.array_equal(value, other)
    behind, ahead = counts
    assert in_order == ["forward"] * 2 * ahead + ["backward"] * 2 * behind
    shared = 2 * min(counts)
    assert launched[: 2 * shared] == ["backward", "forward"] * shared
    assert sorted(launched) == sorted(in_order)
    assert run_both(counts, enabled=True)[1] == launched


def test_a_forward_that_fails_ends_the_backward():
    log, before = [], time.monotonic()
    with pytest.raises(ZeroDivisionError, match="the experts"):
        run_both((3, 3), enabled=True, log=log, fails_at=1)
    assert log.count("backward") < 6  # it has not run to its end
    assert time.monotonic() - before < 20


def test_a_backward_that_fails_ends_the_forward():
    log = []
    overlap = CommComputeOverlap()
    other = Model(3, 1, overlap, log, backward_fails=1)
    own = Model(3, 2, overlap, log)
    pending = other.forward()
    log.clear()
    threads = threading.active_count()
    with pytest.raises(ZeroDivisionError, match="the gradient"):
        overlap.run(own.forward, lambda: platform.backward([pending]))
    assert log.count("forward") < 6
    assert threading.active_count() == threads
    first, second = (Model(2, seed, overlap, log) for seed in (1, 2))
    pending = first.forward()
    overlap.run(second.forward, lambda: platform.backward([pending]))


def test_the_failure_that_came_first_is_raised_and_ends_the_other_side():
    overlap = CommComputeOverlap()
    dispatch = overlap.wrap_dispatch(lambda x: x)
    ended = []

    def forward():
        try:
            dispatch(frame.tensor([1.0]))
            dispatch(frame.tensor([1.0]))
        except RuntimeError as error:
            ended.append(str(error))
            raise

    def backward():
        dispatch(frame.tensor([1.0]))
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        overlap.run(forward, backward)
    assert "the forward ends because the other side failed: ValueError" in ended[0]
    assert "HP495" in ended[0]


def test_an_interrupt_ends_both_sides():
    overlap, ended = CommComputeOverlap(), threading.Event()
    dispatch = overlap.wrap_dispatch(lambda x: x)

    def forward():
        dispatch(frame.tensor([1.0]))
        raise KeyboardInterrupt

    def backward():
        try:
            for _ in range(3):
                dispatch(frame.tensor([1.0]))
        except RuntimeError:
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        overlap.run(forward, backward)
    assert ended.wait(10)
    assert overlap.run(int, int) == (0, 0)


def test_a_run_within_a_run_is_refused():
    overlap = CommComputeOverlap()
    with pytest.raises(RuntimeError, match="another run.*has not ended.*HP495"):
        overlap.run(lambda: overlap.run(int, int), int)
    assert overlap.run(lambda: 1, lambda: 2) == (1, 2)


def test_wrapped_calls_take_and_return_tensors():
    overlap = CommComputeOverlap()
    with pytest.raises(TypeError, match="expected a tensor in its arguments.*HP495"):
        overlap.wrap_dispatch(lambda x: x)(3)
    with pytest.raises(TypeError, match="expected a tensor in what it returns"):
        overlap.wrap_combine(lambda x: 3)(frame.tensor([1.0]))
    given = {"x": [frame.tensor([1.0])], "n": 2}
    returned = overlap.wrap_dispatch(lambda given, n: (given, n))(given, n=3)
    frame.equal(returned[0]["x"][0], [1.0])
    assert returned[1] == 3
    assert CommComputeOverlap(enabled=False).wrap_dispatch(lambda x: x)(3) == 3


def test_modes_of_the_thread_hold_on_both_sides():
    overlap = CommComputeOverlap()

    def look():
        return MODES.explicit, platform.is_recording_disabled()

    with explicit(), platform.no_grad():
        assert overlap.run(look, look) == ((True, True), (True, True))
    assert overlap.run(look, look) == ((False, False), (False, False))


@pytest.mark.parametrize("draws", ["forward", "backward", "neither"])
def test_random_numbers_are_those_of_a_sequence(draws):
    def numbers(overlap):
        platform.manual_seed(3)
        dispatch = overlap.wrap_dispatch(lambda x: x)
        drawn = {"forward": [], "backward": []}

        def side(name):
            for _ in range(3):
                dispatch(frame.tensor([1.0]))
                if name == draws:
                    drawn[name].append(frame.array(frame.drawn_by_the_framework(2)))
                with platform.seeded(len(drawn[name])):  # as the stages of a pipeline
                    dispatch(frame.tensor([1.0]))
                    drawn[name].append(frame.array(frame.drawn_by_the_framework(2)))

        overlap.run(lambda: side("forward"), lambda: side("backward"))
        after = frame.array(frame.drawn_by_the_framework(2))
        return [*drawn["forward"], *drawn["backward"], after]

    pairs = zip(
        numbers(CommComputeOverlap()), numbers(CommComputeOverlap(False)), strict=True
    )
    assert all(np.array_equal(one, other) for one, other in pairs)
