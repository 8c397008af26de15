# SPDX-License-Identifier: Apache-2.0
"""Recompute and swap: the plain module's gradients, less memory, and the same names."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from collections import Counter

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel import CheckpointPolicy, get_platform
from hyper_parallel.platform.torch import swap as swap_module

platform = get_platform()
aten = torch.ops.aten
MUST_SAVE, MUST_RECOMPUTE, MUST_SWAP = (
    CheckpointPolicy.MUST_SAVE,
    CheckpointPolicy.MUST_RECOMPUTE,
    CheckpointPolicy.MUST_SWAP,
)


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


class Block(nn.Module):
    """Attention and MLP, with dropout between."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x, *, shift=None):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = self.dropout((q @ k.transpose(-1, -2) * self.scale).softmax(-1))
        x = x + scores @ v
        if shift is not None:
            x = x + shift
        return x + self.dropout(self.mlp(self.norm(x)))

    def answer(self) -> int:
        return 42


class CountOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def gradients(module, x, seed=3, **kwargs):
    """(output, gradient of x, gradients of the parameters), the same draws each time."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(seed)
    out = module(x, **kwargs)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def assert_same(left, right):
    assert len(left) == len(right)
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def selective(policy, **kwargs):
    return {
        "context_fn": functools.partial(
            platform.create_selective_checkpoint_contexts, policy, **kwargs
        )
    }


def policy_for(**verdicts):
    """A policy by operator name; the rest is computed again."""

    def policy(ctx, op, *args, **kwargs):
        return verdicts.get(op.overloadpacket.__name__, MUST_RECOMPUTE)

    return policy


WRAPPERS = {
    "ckpt": platform.ckpt_wrapper,
    "ckpt reentrant": lambda m: platform.ckpt_wrapper(m, use_reentrant=True),
    "ckpt of ckpt": lambda m: platform.ckpt_wrapper(platform.ckpt_wrapper(m)),
    "swap": platform.swap_wrapper,
    "swap some": lambda m: platform.swap_wrapper(m, lambda t: t.dim() == 3),
    "swap of ckpt": lambda m: platform.swap_wrapper(platform.ckpt_wrapper(m)),
    "ckpt of swap": lambda m: platform.ckpt_wrapper(platform.swap_wrapper(m)),
    "list": lambda m: platform.ckpt_wrapper(
        m, **selective([aten.addmm.default, aten.bmm])
    ),
    "save by policy": lambda m: platform.ckpt_wrapper(
        m, **selective(policy_for(addmm=MUST_SAVE, gelu=True))
    ),
    "swap by policy": lambda m: platform.ckpt_wrapper(
        m, **selective(policy_for(addmm=MUST_SWAP, bmm=MUST_SWAP))
    ),
    "swap all": lambda m: platform.ckpt_wrapper(
        m, **selective(lambda ctx, op, *a, **k: MUST_SWAP)
    ),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_gradients_are_those_of_the_plain_module(wrap):
    block, x = Block(), torch.randn(2, 5, 8)
    plain = gradients(block, x)
    assert_same(gradients(wrap(block), x), plain)


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_inside_a_model_and_with_keyword_tensors(wrap):
    shift = torch.randn(2, 5, 8, requires_grad=True)

    class Model(nn.Module):
        def __init__(self, wrap):
            super().__init__()
            torch.manual_seed(1)
            self.layers = nn.ModuleList([wrap(Block()), wrap(Block())])
            self.head = nn.Linear(8, 2)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x, shift=shift)
            return self.head(x)

    plain, wrapped = Model(lambda m: m), Model(wrap)
    x = torch.randn(2, 5, 8)
    expected = [*gradients(plain, x), shift.grad]
    shift.grad = None
    assert_same([*gradients(wrapped, x), shift.grad], expected)
    assert wrapped.state_dict().keys() == plain.state_dict().keys()
    assert [n for n, _ in wrapped.named_parameters()] == [
        n for n, _ in plain.named_parameters()
    ]
    assert [n for n, _ in wrapped.named_buffers()] == [
        n for n, _ in plain.named_buffers()
    ]


def test_reentrant_flag_reaches_torch():
    seen = {}

    def spy(function, *args, **kwargs):
        seen.update(kwargs)
        return function(*args)

    assert torch.equal(
        platform.ckpt_wrapper(nn.Identity(), spy, debug=7)(torch.ones(1)), torch.ones(1)
    )
    assert seen == {"debug": 7}
    assert platform.checkpoint is torch.utils.checkpoint.checkpoint
    assert platform.noop_context_fn is torch.utils.checkpoint.noop_context_fn


# --- the wrapper passes for the module


@pytest.mark.parametrize("wrap", [platform.ckpt_wrapper, platform.swap_wrapper])
def test_state_goes_both_ways(wrap):
    bare = nn.Sequential(Block(), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(5)))
    wrapped = wrap(
        nn.Sequential(
            wrap(wrap(Block())),
            wrap(nn.Sequential(wrap(nn.Linear(8, 8)), nn.BatchNorm1d(5))),
        )
    )
    assert list(wrapped.state_dict()) == list(bare.state_dict())
    assert [n for n, _ in wrapped.named_parameters()] == [
        n for n, _ in bare.named_parameters()
    ]
    assert wrapped.load_state_dict(bare.state_dict()) == bare.load_state_dict(
        wrapped.state_dict()
    )
    assert_same(list(wrapped.state_dict().values()), list(bare.state_dict().values()))
    assert len(list(wrapped.parameters())) == len(list(bare.parameters()))
    assert len({id(m) for m in wrapped.modules()}) == len(list(wrapped.modules()))


def test_load_reports_the_bare_names():
    wrapped = nn.Sequential(
        platform.ckpt_wrapper(nn.Sequential(platform.swap_wrapper(nn.Linear(2, 3))))
    )
    state = {"0.0.weight": torch.zeros(3, 2), "0.0.extra": torch.zeros(1)}
    result = wrapped.load_state_dict(state, strict=False)
    assert result.missing_keys == ["0.0.bias"]
    assert result.unexpected_keys == ["0.0.extra"]
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.0\.weight"):
        wrapped.load_state_dict(
            {"0.0.weight": torch.zeros(9, 9), "0.0.bias": torch.zeros(3)}
        )
    assert list(state) == ["0.0.weight", "0.0.extra"]


@pytest.mark.parametrize("wrap", [platform.ckpt_wrapper, platform.swap_wrapper])
def test_attributes_indexing_modes_and_copies(wrap):
    inner = Block()
    wrapped = wrap(inner)
    assert wrapped.answer() == 42
    assert wrapped.qkv is inner.qkv
    assert wrapped.get_submodule("mlp.0") is inner.mlp[0]
    assert wrapped.get_parameter("qkv.weight") is inner.qkv.weight
    with pytest.raises(AttributeError, match="nonsense"):
        _ = wrapped.nonsense
    assert wrapped.eval().inner.training is False
    assert wrapped
    layers = wrap(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert isinstance(layers[1], nn.ReLU)
    assert len(layers) == 2
    assert [type(m) for m in layers] == [nn.Linear, nn.ReLU]
    assert wrap(inner.eval()).training is False
    for twin in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert twin.qkv.weight is not inner.qkv.weight
        assert_same(list(twin.state_dict().values()), list(inner.state_dict().values()))
        assert_same(
            gradients(twin, torch.ones(2, 5, 8)), gradients(inner, torch.ones(2, 5, 8))
        )


def test_setting_what_the_module_owns_sets_it_there():
    linear = nn.Linear(2, 2)
    linear.note = "old"
    wrapped = platform.ckpt_wrapper(platform.swap_wrapper(linear))
    wrapped.weight = new = nn.Parameter(torch.ones(2, 2))
    wrapped.note = "new"
    assert linear.weight is new
    assert linear.note == "new"
    assert [n for n, _ in wrapped.named_parameters()] == ["weight", "bias"]


def test_wrapping_what_is_no_module():
    for wrap in (platform.ckpt_wrapper, platform.swap_wrapper):
        with pytest.raises(ValueError, match=r"torch\.nn\.Module to wrap, got int"):
            wrap(3)
    with pytest.raises(ValueError, match="checkpoint_fn must be a function"):
        platform.ckpt_wrapper(nn.ReLU(), 3)


# --- what runs again


def backward_ops(module, x):
    torch.manual_seed(3)
    loss = module(x.clone().requires_grad_()).square().sum()
    with CountOps() as ops:
        loss.backward()
    return ops.counts


def test_recompute_happens_and_saved_operators_are_spared():
    block, x = Block(), torch.randn(2, 5, 8)
    assert backward_ops(block, x)["addmm"] == 0
    # The last addmm's output is needed by nothing but the dropout after it, whose mask is enough.
    assert backward_ops(platform.ckpt_wrapper(block, early_stop=False), x)["addmm"] == 3
    for verdict in (MUST_SAVE, MUST_SWAP, CheckpointPolicy.PREFER_SAVE, True):
        counts = backward_ops(
            platform.ckpt_wrapper(
                block, early_stop=False, **selective(policy_for(addmm=verdict))
            ),
            x,
        )
        assert counts["addmm"] == 0
        assert counts["gelu"] == 1
    counts = backward_ops(
        platform.ckpt_wrapper(
            block, early_stop=False, **selective([aten.addmm, aten.gelu.default])
        ),
        x,
    )
    assert (counts["addmm"], counts["gelu"], counts["native_layer_norm"]) == (0, 0, 2)


@pytest.mark.parametrize(
    ("theirs", "runs"),
    [
        ("MUST_SAVE", 0),
        ("PREFER_SAVE", 0),
        ("MUST_CPU_OFFLOAD", 0),
        ("PREFER_RECOMPUTE", 1),
        ("MUST_RECOMPUTE", 1),
    ],
)
def test_torchs_own_policies_are_understood(theirs, runs):
    policy = policy_for(gelu=torch.utils.checkpoint.CheckpointPolicy[theirs])
    assert (
        backward_ops(
            platform.ckpt_wrapper(Block(), **selective(policy)), torch.randn(2, 5, 8)
        )["gelu"]
        == runs
    )


@pytest.mark.parametrize("verdict", [MUST_SAVE, MUST_SWAP])
def test_draws_after_a_saved_draw_stay_the_same(verdict):
    """Torch's own contexts get this wrong: the second draw takes the first one's numbers."""

    class Noisy(nn.Module):
        def forward(self, x):
            first, second = torch.rand_like(x) * x, torch.rand_like(x) * x.sin()
            return (first.sin() * second.sin()).sum()

    calls = Counter()

    def policy(ctx, op, *args, **kwargs):
        name = op.overloadpacket.__name__
        calls[name] += 1
        return verdict if name == "rand_like" and calls[name] == 1 else MUST_RECOMPUTE

    x = torch.randn(32)
    after = []
    plain = gradients(Noisy(), x)
    after.append(torch.rand(1))
    assert_same(
        gradients(platform.ckpt_wrapper(Noisy(), **selective(policy)), x), plain
    )
    after.append(torch.rand(1))
    assert torch.equal(*after)


def test_without_preserved_draws_the_generator_is_not_turned_back():
    x = torch.randn(8, requires_grad=True)
    out = platform.checkpoint(
        lambda x: (torch.rand_like(x) * x.sin()).sin(),
        x,
        use_reentrant=False,
        preserve_rng_state=False,
        **selective([aten.rand_like]),
    )
    torch.rand(100)
    before = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("verdict", [MUST_SAVE, MUST_SWAP])
def test_in_place_operators_are_right_or_refused(verdict):
    class InPlace(nn.Module):
        def forward(self, x):
            y = x * 3
            y.mul_(2)
            flat = y.view(-1)
            y.add_(1)
            return (flat.sin() * y.view(-1)).sum()

    x = torch.randn(4, 4)
    plain = gradients(InPlace(), x)
    only_in_place = policy_for(mul_=verdict, add_=verdict)
    assert_same(
        gradients(platform.ckpt_wrapper(InPlace(), **selective(only_in_place)), x),
        plain,
    )
    everything = platform.ckpt_wrapper(
        InPlace(), **selective(lambda ctx, op, *a, **k: verdict)
    )
    if verdict is MUST_SWAP:
        assert_same(gradients(everything, x), plain)
    else:
        with pytest.raises(RuntimeError, match="modified by an in-place operation"):
            gradients(everything, x)


@pytest.mark.parametrize("allowed", [False, True])
def test_mutated_cache_entry_detected(allowed):
    """Only the operator that changes it needs what was kept, so no check of torch's own would notice."""
    kept = []

    def forward(x):
        kept.append(x.exp())
        return kept[-1].sin()

    x = torch.randn(3, requires_grad=True)
    contexts = functools.partial(
        platform.create_selective_checkpoint_contexts, [aten.exp], allowed
    )
    out = platform.checkpoint(forward, x, use_reentrant=False, context_fn=contexts)
    with torch.no_grad():
        kept[0].zero_()
    if allowed:
        out.sum().backward()
        assert not x.grad.any()  # the caller's own wish
        return
    with pytest.raises(RuntimeError, match="modified by an in-place operation"):
        out.sum().backward()


def test_second_backward():
    x = torch.randn(2, 5, 8, requires_grad=True)
    loss = platform.ckpt_wrapper(Block())(x).sum()
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * first)
    for verdict in (MUST_SAVE, MUST_SWAP):
        loss = platform.ckpt_wrapper(Block(), **selective(policy_for(addmm=verdict)))(
            x
        ).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="backward an extra time"):
            loss.backward()


def test_a_recompute_that_does_something_else_is_refused():
    flag = [False]

    def forward(x):
        return (x.exp().cos() if flag[0] else x.sin()).sin()

    x = torch.randn(3, requires_grad=True)
    out = platform.checkpoint(forward, x, use_reentrant=False, **selective([aten.sin]))
    flag[0] = True
    with pytest.raises(
        RuntimeError, match=r"exp.*runs for time 1 .* ran 0 times in forward"
    ):
        out.sum().backward()


@pytest.mark.parametrize("bad", [torch.add, "aten.mm", 3])
def test_bad_lists(bad):
    with pytest.raises(ValueError, match="no operator"):
        platform.create_selective_checkpoint_contexts([aten.mm.default, bad])


@pytest.mark.parametrize("bad", [None, 3, aten.mm.default, aten.mm])
def test_bad_policies(bad):
    with pytest.raises(ValueError, match="expected a policy function"):
        platform.create_selective_checkpoint_contexts(bad)


@pytest.mark.parametrize("returned", [None, "must_save", 1, {}])
def test_a_policy_that_returns_nonsense(returned):
    module = platform.ckpt_wrapper(
        nn.Linear(2, 2), **selective(lambda ctx, op, *a, **k: returned)
    )
    with pytest.raises(ValueError, match=r"returned .* for aten\..*MUST_SWAP"):
        module(torch.ones(1, 2, requires_grad=True))


def test_must_swap_frees_the_device_copy():
    seen = []

    def policy(ctx, op, *args, **kwargs):
        if op is aten.exp.default:
            seen.append(StorageWeakRef(ctx.op_output.untyped_storage()))
            return MUST_SWAP
        return MUST_RECOMPUTE

    def forward(x):
        y = x.exp()
        assert len(seen) > 1 or not seen[0].expired()
        seen.append(None)
        return y.sin().sin()

    x = torch.randn(1000, requires_grad=True)
    out = platform.checkpoint(forward, x, use_reentrant=False, **selective(policy))
    gc.collect()
    assert seen[0].expired()
    out.sum().backward()
    y = x.detach().exp()
    assert torch.allclose(x.grad, y.sin().cos() * y.cos() * y)


# --- swap


class Saves(torch.autograd.Function):
    """Saves its input and shows what came back."""

    came_back: list = []  # noqa: RUF012 - a test's notebook

    @staticmethod
    def forward(ctx, anchor, *tensors):
        ctx.save_for_backward(*tensors)
        return anchor.clone()

    @staticmethod
    def backward(ctx, grad):
        Saves.came_back[:] = ctx.saved_tensors
        return grad, *([None] * len(ctx.saved_tensors))


def round_trip(*tensors):
    anchor = torch.zeros(1, requires_grad=True)
    with platform.async_save_on_cpu() as swap:
        out = Saves.apply(anchor, *tensors)
    out.backward()
    return list(Saves.came_back), swap


def odd_tensors():
    base = torch.randn(4, 6)
    return {
        "transposed": base.t(),
        "sliced": base[1:, ::2],
        "expanded": base[:, :1].expand(4, 100),
        "expanded scalar": torch.tensor(2.0).expand(5, 7),
        "scalar": torch.tensor(3.5),
        "integers": torch.arange(12).view(3, 4),
        "booleans": torch.tensor([True, False]),
        "bfloat16": base.bfloat16(),
        "complex": torch.randn(3, 2, dtype=torch.complex128),
        "conjugated": torch.randn(3, 2, dtype=torch.complex128).conj(),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "permuted view": torch.randn(2, 3, 4).permute(2, 0, 1)[1:],
        "empty": torch.empty(0, 3),
        "overlapping": torch.arange(10.0).as_strided((4, 3), (2, 1)),
    }


@pytest.mark.parametrize("name", odd_tensors())
def test_every_kind_of_tensor_comes_back(name):
    tensor = odd_tensors()[name]
    (back,), swap = round_trip(tensor)
    assert torch.equal(back, tensor)
    assert (back.dtype, back.device, back.shape) == (
        tensor.dtype,
        tensor.device,
        tensor.shape,
    )
    if name in {"transposed", "channels last", "expanded scalar"}:
        assert back.stride() == tensor.stride()
    assert swap.swapped_tensors == (name != "empty")
    assert name == "empty" or back.data_ptr() != tensor.data_ptr()


def test_an_expanded_tensor_is_stored_once():
    _, swap = round_trip(torch.randn(4, 1).expand(4, 1000))
    assert swap.swapped_bytes == 32


def test_one_copy_of_what_is_saved_often():
    x = torch.randn(4, 6)
    back, swap = round_trip(x, x, x.view(-1), x.t(), x[:2])
    assert swap.swapped_tensors == 2  # the half is a copy of its own
    assert all(
        torch.equal(a, b)
        for a, b in zip(back, (x, x, x.view(-1), x.t(), x[:2]), strict=True)
    )


def test_memory_that_is_used_again_is_not_taken_for_the_old_tensor():
    anchor = torch.zeros(1, requires_grad=True)
    with platform.async_save_on_cpu() as swap:
        out = anchor
        expected = []
        for i in range(20):
            saved = torch.full(
                (1000,), float(i)
            )  # the allocator hands out the same address again
            out = Saves.apply(out, saved)
            expected.append(i)
            del saved
    assert swap.swapped_tensors == 20
    node, found = out.grad_fn, []
    while hasattr(node, "saved_tensors"):
        found.append(int(node.saved_tensors[0][0]))
        node = node.next_functions[0][0]
    assert found == expected[::-1]


def test_the_original_is_released_and_the_host_copy_follows():
    x = torch.randn(1000, requires_grad=True)
    with platform.async_save_on_cpu() as swap:
        hidden = x.exp()
        memory = StorageWeakRef(hidden.untyped_storage())
        out = hidden.sin().sum()
        assert not memory.expired()
        del hidden
    assert memory.expired()
    assert swap.swapped_tensors >= 1
    host = [weakref.ref(copied) for copied in swap._copies.values()]
    assert host
    out.backward()
    assert torch.allclose(x.grad, x.exp().cos().mul(x.exp()).detach())
    del out
    assert all(copied() is None for copied in host)


def test_an_unused_graph_drops_its_copies():
    x = torch.randn(10, requires_grad=True)
    with platform.async_save_on_cpu() as swap:
        out = x.exp().sin()
    assert len(swap._copies) > 0
    del out
    assert len(swap._copies) == 0


def test_parameters_stay_and_the_policy_decides():
    block, x = Block(), torch.randn(2, 5, 8)
    seen = []

    def policy(tensor):
        seen.append(tensor)
        return tensor.dim() == 2

    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
    with platform.async_save_on_cpu(policy) as swap:
        out = block(x)
    assert seen
    assert not weights & {t.untyped_storage().data_ptr() for t in seen}
    some = swap.swapped_bytes
    with platform.async_save_on_cpu(lambda t: False) as none:
        block(x)
    with platform.async_save_on_cpu() as everything:
        block(x)
    assert 0 == none.swapped_bytes < some < everything.swapped_bytes
    del out
    with pytest.raises(ValueError, match="policy_fn must be a function"):
        platform.async_save_on_cpu(3)
    with pytest.raises(ValueError, match="policy_fn must be a function"):
        platform.swap_wrapper(block, 3)


def test_swap_wrapper_spares_parameters_and_buffers():
    class Detached(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))
            self.register_buffer("table", torch.randn(3))

        def forward(self, x):
            return x * self.weight.data * self.table * self.weight

    seen = []
    module = Detached()
    platform.swap_wrapper(module, lambda t: bool(seen.append(t.data_ptr())) or True)(
        torch.randn(3, requires_grad=True)
    )
    assert seen
    assert not {module.weight.data_ptr(), module.table.data_ptr()} & set(seen)


def test_backward_twice_and_second_derivatives():
    x = torch.randn(6, requires_grad=True)
    with platform.async_save_on_cpu():
        loss = (x.exp().sin() * x).sum()
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    loss.backward(retain_graph=True)
    assert torch.equal(x.grad, 2 * first)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    (plain,) = torch.autograd.grad((x.exp().sin() * x).sum(), x, create_graph=True)
    assert torch.equal(second, torch.autograd.grad(plain.sum(), x)[0])


def test_a_backward_that_spoils_what_it_got_does_not_spoil_the_next():
    class Careless(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(y)
            return x * y

        @staticmethod
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            out = grad * y
            y.zero_()
            return out, None

    x, y = torch.ones(3, requires_grad=True), torch.randn(3)
    with platform.async_save_on_cpu():
        loss = (Careless.apply(x, y) + Careless.apply(x, y)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(x.grad, 4 * y)


def test_in_place_changes_after_saving_are_right_or_refused():
    def run(policy):
        x = torch.randn(5, requires_grad=True)
        hidden = x * 2
        with platform.async_save_on_cpu(policy):
            out = hidden.sin()  # saves hidden
            hidden.mul_(3)
            out = out + hidden.sin()  # saves it again, at another version
        out.sum().backward()
        return x

    x = run(None)
    assert torch.allclose(
        x.grad, 2 * (2 * x).cos().detach() + 6 * (6 * x).cos().detach()
    )
    with pytest.raises(
        RuntimeError,
        match=r"modified by an in-place operation.*version 1, saved was version 0",
    ):
        run(lambda t: False)


def test_a_parameter_changed_before_backward_is_refused():
    linear = nn.Linear(3, 3)
    x = torch.randn(2, 3, requires_grad=True)
    with platform.async_save_on_cpu():
        out = linear(x).sum()
    with torch.no_grad():
        linear.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an in-place operation"):
        out.backward()


def test_aliases_with_versions_of_their_own_are_not_mixed_up():
    anchor, x = torch.zeros(1, requires_grad=True), torch.ones(3)
    with platform.async_save_on_cpu():
        out = Saves.apply(anchor, x)
        x.data.mul_(2)  # torch counts no version of x for this
        out = Saves.apply(out, x.data)
    assert out.grad_fn.saved_tensors[0].tolist() == [2.0] * 3


def test_backward_is_fed_ahead():
    layers = nn.Sequential(
        *[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)]
    )
    x = torch.randn(4, 8)
    plain = gradients(layers, x)
    layers.zero_grad()
    leaf = x.clone().requires_grad_()
    with platform.async_save_on_cpu() as swap:
        out = layers(leaf)
    loss = out.square().sum()
    assert swap.prefetched == 0
    loss.backward()
    # All but the last packed arrive ahead of use, each once.
    assert swap.prefetched == swap.swapped_tensors - 1
    assert_same(
        [out.detach(), leaf.grad, *(p.grad for p in layers.parameters())], plain
    )


def test_a_step_of_training_under_one_context():
    block, x = Block(0.0), torch.randn(2, 5, 8)
    twin = copy.deepcopy(block)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (block, twin)]
    for _ in range(3):
        with platform.async_save_on_cpu():
            block(x).square().sum().backward()
        twin(x).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(list(block.parameters()), list(twin.parameters()))


def test_nothing_is_saved_without_grad():
    with torch.no_grad(), platform.async_save_on_cpu() as swap:
        Block()(torch.randn(2, 5, 8))
    assert swap.swapped_tensors == 0


# --- the accelerator's path, on a stand-in that notes the order of events


class FakeStreams:
    def __init__(self):
        self.log = []

    def Stream(self, device):  # noqa: N802
        return FakeStream("side", self.log)

    def current_stream(self, device):
        return FakeStream("main", self.log)

    def stream(self, stream):
        return stream

    def Event(self):  # noqa: N802
        return FakeEvent(self.log)


class FakeStream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for the event")

    def __enter__(self):
        self.log.append(f"on {self.name}")

    def __exit__(self, *error):
        self.log.append(f"off {self.name}")


class FakeEvent:
    def __init__(self, log):
        self.log = log

    def record(self, stream):
        self.log.append(f"event on {stream.name}")


def test_order_of_streams_and_events(monkeypatch):
    fake = FakeStreams()
    empty_like = torch.empty_like
    monkeypatch.setattr(swap_module, "streams_of", lambda device: fake)
    monkeypatch.setattr(swap_module, "_side_stream", fake.Stream)
    monkeypatch.setattr(
        torch.Tensor,
        "record_stream",
        lambda t, stream: fake.log.append(f"held for {stream.name}"),
    )
    monkeypatch.setattr(
        torch, "empty_like", lambda t, device, pin_memory: empty_like(t, device=device)
    )
    x = torch.randn(3)
    copied = swap_module.HostCopy(x)
    assert fake.log == ["side waits for main", "on side", "off side", "held for side"]
    fake.log.clear()
    assert torch.equal(copied.take(), x)
    assert fake.log == [
        "on side",
        "event on side",
        "off side",
        "main waits for the event",
        "held for main",
    ]
