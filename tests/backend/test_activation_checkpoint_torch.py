# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing on PyTorch: memory counted, second derivatives, threads, autocast, saved-tensor hooks."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections import Counter

import pytest
import torch
from live_bytes import LiveBytes
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel import CheckpointPolicy, checkpoint_wrapper, swap_wrapper
from hyper_parallel.core.activation_checkpoint import (
    SwapManager,
    checkpoint,
    groups,
    is_recomputing,
    swap,
)

aten = torch.ops.aten
MUST_SWAP = CheckpointPolicy.MUST_SWAP


@pytest.fixture(autouse=True)
def _one_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        groups._warn_on_cpu()
    torch.manual_seed(0)
    yield
    SwapManager().set_current_group_name("")


class CountOps(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def by_name(**verdicts):
    def policy(ctx, op, *args, **kwargs):
        name = op.overloadpacket.__name__
        return verdicts.get(name, CheckpointPolicy.MUST_RECOMPUTE)

    return policy


# --- A1: autocast


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, swap_wrapper])
def test_autocast_is_that_of_forward(wrap):
    layer = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    gradients = []
    for module in (layer, wrap(layer)):
        x = torch.randn(
            16, 32, generator=torch.Generator().manual_seed(1)
        ).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = module(x)
        assert out.dtype is torch.bfloat16
        out.float().square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_an_exception_of_the_recompute_restores_autocast_and_draws():
    def function(x):
        if is_recomputing():
            torch.rand(3)
            raise KeyError("the second time")
        return (x @ x).sin() * torch.rand(8, 8)

    x = torch.randn(8, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = checkpoint(function, x)
    state = torch.get_rng_state()
    with pytest.raises(KeyError, match="the second time"):
        out.sum().backward()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.get_rng_state(), state)


def test_no_host_buffers_leak_after_an_exception():
    copies = []

    class Noting(groups._OwnTime):
        def add(self, tensor):
            copies.append(weakref.ref(tensor))
            super().add(tensor)

    def function(x):
        if is_recomputing():
            raise KeyError("the second time")
        return x.exp().sin()

    x = torch.randn(64, 64, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        for home in ("offload", "recompute"):
            patch.setattr(
                f"hyper_parallel.core.activation_checkpoint.{home}.new_storage", Noting
            )
        out = checkpoint(
            function, x * 2, swap_inputs=True, policy_fn=by_name(exp=MUST_SWAP)
        )
    assert len(copies) == 2
    with pytest.raises(KeyError):
        out.sum().backward()
    del out
    gc.collect()
    assert [copy() for copy in copies] == [None, None]


# --- A5: backward twice, and gradients of gradients


def test_second_derivatives():
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    found = []
    for call in (
        lambda f, x: f(x),
        checkpoint,
        swap,
        lambda f, x: checkpoint(lambda x: checkpoint(f, x), x),
    ):
        out = call(lambda x: x.sin().exp(), x)
        (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        found.append(second)
    assert all(torch.equal(one, found[0]) for one in found)


def test_backward_twice_needs_retain_graph():
    x = torch.randn(5, requires_grad=True)
    out = checkpoint(lambda x: x.sin().exp(), x).sum()
    out.backward(retain_graph=True)
    first = x.grad.clone()
    out.backward()
    assert torch.equal(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward()


# --- A6: the determinism check


def test_debug_prints_the_operators_of_both_runs():
    def function(x):
        return x[1:].exp().sin() if is_recomputing() else x.exp().sin()

    x = torch.randn(4, requires_grad=True)
    out = checkpoint(function, x, debug=True)
    with pytest.raises(torch_checkpoint.CheckpointError, match="slice"):
        out.sum().backward()
    out = checkpoint(function, x)
    with pytest.raises(
        torch_checkpoint.CheckpointError,
        match=r"position 0:\n(.*\[4\].*\n)(.*\[3\])",
    ):
        out.sum().backward()


def test_sdpa_backend_equal_at_recompute():
    q = torch.randn(1, 2, 16, 8, requires_grad=True)
    with CountOps() as ops:
        out = checkpoint(
            lambda q: nn.functional.scaled_dot_product_attention(
                q, q, q, is_causal=True
            ),
            q,
            early_stop=False,
        )
        out.square().sum().backward()
    forwards = {
        name: count
        for name, count in ops.counts.items()
        if name.startswith("_scaled_dot_product") and "backward" not in name
    }
    assert list(forwards.values()) == [2]


# --- A7: hooks around a selective region


def test_must_swap_swaps_and_does_not_recompute():
    layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    x = torch.randn(32, 64, requires_grad=True)
    for verdict, runs in ((MUST_SWAP, 2), (CheckpointPolicy.MUST_RECOMPUTE, 4)):
        module = checkpoint_wrapper(
            layers, policy_fn=by_name(addmm=verdict), early_stop=False
        )
        with CountOps() as ops:
            module(x).sum().backward()
        assert ops.counts["addmm"] == runs


def test_saved_tensor_hooks_around_selective_region():
    """What a policy keeps does not pass by the hooks of others; the inputs do."""
    packed = []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor

    x = torch.randn(4, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = checkpoint(lambda x: x.exp().sin(), x, policy_fn=[aten.exp])
    assert packed == [(4, 8)]
    out.sum().backward()
    assert torch.allclose(x.grad, x.exp().cos() * x.exp())


# --- A10: inputs in host memory


def test_inputs_are_freed_when_the_caller_drops_them():
    for swap_inputs in (False, True):
        x = torch.randn(64, 64, requires_grad=True)
        hidden = x * 2
        out = checkpoint(lambda x: x.exp().sin(), hidden, swap_inputs=swap_inputs)
        storage = StorageWeakRef(hidden.untyped_storage())
        del hidden
        assert storage.expired() is swap_inputs
        expected = 2 * (2 * x).exp().cos() * (2 * x).exp()
        out.sum().backward()
        assert torch.allclose(x.grad, expected)


# --- A14: threads


def test_two_threads_recompute():
    def block(x, weight, log):
        log.append(is_recomputing())
        for _ in range(20):
            x = (x @ weight).tanh()
        return x

    def train(number, results):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(16, 16, generator=generator, requires_grad=True)
        weight = torch.randn(16, 16, generator=generator, requires_grad=True)
        found = []
        for call in (
            lambda f, *a: f(*a),
            checkpoint,
            lambda *a: checkpoint(*a, policy_fn=[aten.mm]),
        ):
            for _ in range(5):
                log = []
                x.grad = weight.grad = None
                call(block, x, weight, log).sum().backward()
                found.append((x.grad, weight.grad, log))
        results[number] = found

    results = {}
    threads = [threading.Thread(target=train, args=(n, results)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        plain, *others = results[number]
        assert plain[2] == [False]
        assert {tuple(log) for *_, log in others[4:]} == {(False, True)}
        for x, weight, _ in others:
            assert torch.equal(x, plain[0])
            assert torch.equal(weight, plain[1])


# --- A16: memory


class Mlp(nn.Module):
    """Saves three activations: its input, and twice the hidden one."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return self.down(self.up(x).tanh())


@pytest.mark.parametrize(
    ("name", "kept"),
    [("plain", 32 + 128), ("full", 32), ("selective", 32 + 128), ("swap", 0)],
)
def test_memory_of_n_layers_is_n_inputs(name, kept):
    """After forward, what lives of each layer but the last: counted in bytes, and compared between two depths."""
    wraps = {
        "plain": lambda module: module,
        "full": checkpoint_wrapper,
        "selective": lambda m: checkpoint_wrapper(m, policy_fn=[aten.tanh]),
        "swap": lambda m: checkpoint_wrapper(m, swap_inputs=True),
    }
    rows = 64

    def live(depth):
        layers = nn.Sequential(*(wraps[name](Mlp()) for _ in range(depth)))
        x = torch.randn(rows, 32, requires_grad=True)
        with LiveBytes() as counted:
            out = layers(x)
            counted.peak = 0
            out.sum()  # an operator, so that what lives is counted
        parameters = sum(p.nbytes for p in layers.parameters())
        return counted.peak - parameters

    host = rows * 32 * 4 if name == "swap" else 0  # host and device are one here
    assert live(7) - live(4) == 3 * (rows * kept * 4 + host)
