# SPDX-License-Identifier: Apache-2.0
"""differentiable_sync_hook: a forward and a backward take turns at communication, and nothing else changes."""

import time
from concurrent.futures import ThreadPoolExecutor

import frame
import numpy as np
import pytest

from hyper_parallel import get_platform
from hyper_parallel.core.pipeline_parallel import HookCoordinator

LAYERS = 3
NAMES = ["A", "B", "C", "D"] * LAYERS
NAMES.pop()  # no D after the last layer: forward and backward would both begin as COMM
FORWARD_ROLES = {"A": "COMM", "B": "COMPUTE", "C": "COMM", "D": "COMPUTE"}
BACKWARD_ROLES = {"A": "COMPUTE", "B": "COMM", "C": "COMPUTE", "D": "COMM"}


class Logged(HookCoordinator):
    """A coordinator that writes down who was let through, as which."""

    def __init__(self, log, timeout=10.0):
        super().__init__(timeout)
        self.log = log

    def rendezvous(self, role):
        super().rendezvous(role)
        self.log.append(("goes on", role))


class Communication(get_platform().Function):
    """Stands for a collective: doubles forward, and its adjoint doubles backward; notes when it has been launched."""

    @staticmethod
    def forward(ctx, x, log):
        ctx.log = log
        log.append(("launched", "forward"))
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append(("launched", "backward"))
        return grad * 2, None


def run_model(x, weights, coordinator=None, log=None, fail_at=None):
    """A comm B compute C comm D compute, and so on; D stands between layers only."""
    log = [] if log is None else log

    def hook(x, name):
        return (
            x
            if coordinator is None
            else get_platform().differentiable_sync_hook(x, name, coordinator)
        )

    for layer, weight in enumerate(weights):
        x = Communication.apply(hook(x, "A"), log)
        x = (hook(x, "B") @ weight).tanh()
        if fail_at == layer:
            raise ZeroDivisionError("the expert failed")
        x = Communication.apply(hook(x, "C"), log)
        if layer < len(weights) - 1:
            x = hook(x, "D").sin()
    return x


def new_leaves(seed):
    return [
        frame.leaf(frame.draw(4, 4, seed=100 * seed + i), "float32")
        for i in range(LAYERS + 1)
    ]


def same(actual, expected):
    """Equal bit by bit."""
    return np.array_equal(
        *(frame.array(get_platform().detach(x)) for x in (actual, expected))
    )


def gradients(leaves):
    """The gradients of the sum of the model's output, alone."""
    fresh = [
        frame.leaf(frame.array(get_platform().detach(leaf)), "float32")
        for leaf in leaves
    ]
    frame.run_backward([run_model(fresh[0], fresh[1:]).sum()])
    return [frame.grad(leaf) for leaf in fresh]


def side_by_side(coordinator, *functions):
    def run(function):
        frame.recording()  # on this thread
        with coordinator.side():
            return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        futures = [pool.submit(run, function) for function in functions]
        return [future.exception(30) or future.result() for future in futures]


def test_forward_and_backward_take_turns_and_change_nothing():
    x1, *w1 = new_leaves(1)
    x2, *w2 = new_leaves(2)
    expected1, expected2 = run_model(x1, w1), run_model(x2, w2)
    expected_grads = gradients([x2, *w2])

    log = []
    coordinator = Logged(log)
    y2 = run_model(x2, w2, coordinator, log)  # disabled: runs through alone
    assert same(y2, expected2)
    assert [kind for kind, _ in log] == ["launched"] * (2 * LAYERS)
    log.clear()
    coordinator.enable()
    y1, failure = side_by_side(
        coordinator,
        lambda: run_model(x1, w1, coordinator, log),
        lambda: frame.run_backward([y2.sum()]),
    )

    assert failure is None, failure
    assert same(y1, expected1)
    for leaf, grad in zip([x2, *w2], expected_grads, strict=True):
        assert same(frame.grad(leaf), grad)
    assert_alternates(log)
    # And the forward that ran side by side has a graph as good as any.
    frame.run_backward([y1.sum()])
    for leaf, grad in zip([x1, *w1], gradients([x1, *w1]), strict=True):
        assert same(frame.grad(leaf), grad)


def assert_alternates(log):
    """Each meeting lets COMM go on, then COMPUTE; in between COMM's side launches, forward and backward in turn."""
    assert log[0] == (
        "launched",
        "backward",
    )  # the last combine's adjoint: no hook stands before it
    meetings = [log[at : at + 3] for at in range(1, len(log), 3)]
    sides = ["forward", "backward"] * LAYERS
    assert meetings == [
        [("goes on", "COMM"), ("launched", side), ("goes on", "COMPUTE")]
        for side, _ in zip(sides * 2, NAMES, strict=False)
    ]


def test_the_alternation_is_due_to_the_hooks():
    """The control: without a coordinator the communications of one side are launched without waiting for the other."""
    log = []
    x, *weights = new_leaves(3)
    run_model(x, weights, HookCoordinator(), log)
    assert log == [("launched", "forward")] * (2 * LAYERS)


@pytest.mark.parametrize("name", ["A", "B", "C", "D"])
def test_roles_by_name_and_direction(name):
    calls = []

    class Recorder:
        COMM, COMPUTE = "COMM", "COMPUTE"

        def is_enabled(self):
            return True

        def rendezvous(self, role):
            calls.append(role)

        def notify_dispatched(self, role):
            calls.append(f"dispatched {role}")

    x = frame.leaf([0.0, 1.0, 2.0])
    y = get_platform().differentiable_sync_hook(x, name, Recorder())
    frame.equal(get_platform().detach(y), [0.0, 1.0, 2.0], 0)
    forward, calls[:] = list(calls), []
    frame.backward([y], [[1.0, 2.0, 3.0]])
    frame.equal(frame.grad(x), [1.0, 2.0, 3.0], 0)

    def told(role):
        # COMPUTE stands behind a communication, which has been dispatched then.
        return ["dispatched COMM", role] if role == "COMPUTE" else [role]

    assert forward == told(FORWARD_ROLES[name])
    assert calls == told(BACKWARD_ROLES[name])


def test_a_forward_that_fails_releases_the_backward():
    x1, *w1 = new_leaves(1)
    x2, *w2 = new_leaves(2)
    coordinator = HookCoordinator(timeout=20.0)
    y2 = run_model(x2, w2, coordinator)
    coordinator.enable()
    before = time.monotonic()
    failed, released = side_by_side(
        coordinator,
        lambda: run_model(x1, w1, coordinator, fail_at=1),
        lambda: frame.run_backward([y2.sum()]),
    )
    assert time.monotonic() - before < 10
    assert isinstance(failed, ZeroDivisionError)
    assert isinstance(released, RuntimeError)
    assert "the expert failed" in str(released)


def test_a_backward_that_fails_releases_the_forward():
    x1, *w1 = new_leaves(1)
    x2, *w2 = new_leaves(2)
    coordinator = HookCoordinator(timeout=20.0)
    y2 = run_model(x2, w2, coordinator)
    w2[1].register_hook(fail)
    coordinator.enable()
    before = time.monotonic()
    released, failed = side_by_side(
        coordinator,
        lambda: run_model(x1, w1, coordinator),
        lambda: frame.run_backward([y2.sum()]),
    )
    assert time.monotonic() - before < 10
    assert isinstance(failed, ZeroDivisionError)
    assert isinstance(released, RuntimeError)
    assert released.__cause__ is failed


def fail(grad):
    raise ZeroDivisionError("the gradient failed")


def test_the_side_that_finishes_first_lets_the_other_run_on():
    x1, *w1 = new_leaves(1)
    x2, *w2 = new_leaves(2)
    expected = run_model(x1, w1)
    coordinator = HookCoordinator(timeout=20.0)
    y2 = run_model(x2, w2[:1], coordinator)  # one layer only, of three
    coordinator.enable()
    y1, failure = side_by_side(
        coordinator,
        lambda: run_model(x1, w1, coordinator),
        lambda: frame.run_backward([y2.sum()]),
    )
    assert failure is None
    assert same(y1, expected)


@pytest.mark.parametrize("name", ["E", "", "a", None])
def test_an_unknown_hook_is_refused(name):
    with pytest.raises(ValueError, match="hook_name must be one of A, B, C, D"):
        get_platform().differentiable_sync_hook(
            frame.tensor([1.0]), name, HookCoordinator()
        )


@pytest.mark.parametrize("value", [None, [1.0], 3.0])
def test_what_is_no_tensor_is_refused(value):
    with pytest.raises(TypeError):
        get_platform().differentiable_sync_hook(value, "A", HookCoordinator())
