# SPDX-License-Identifier: Apache-2.0
"""Parameters that get their data later get exactly the numbers that one device draws."""

from __future__ import annotations

import copy
import gc
import random
import threading
import weakref

import pytest
import torch
from live_bytes import LiveBytes
from torch import nn

from hyper_parallel import get_platform
from hyper_parallel.platform.torch import deferred_init

platform = get_platform()
meta = platform.meta_device


def build(make, seed=7, **kwargs):
    """(on one device, on meta), each from the same seed; the generator stands where one device's started."""
    torch.manual_seed(seed)
    real = make()
    torch.manual_seed(seed)
    with platform.init_on_device(meta, **kwargs):
        deferred = make()
    return real, deferred


def assert_same(left, right):
    left, right = left.state_dict(), right.state_dict()
    assert list(left) == list(right)
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different
    assert all(
        left[n].dtype == right[n].dtype and left[n].stride() == right[n].stride()
        for n in left
    )


class Custom(nn.Module):
    """Every way to give a parameter its numbers."""

    def __init__(self):
        super().__init__()
        self.drawn = nn.Parameter(torch.randn(3, 4))
        self.through_data = nn.Parameter(torch.empty(5))
        self.through_data.data.normal_(0, 2)
        self.truncated = nn.Parameter(torch.zeros(6, 2))
        nn.init.trunc_normal_(self.truncated, std=0.02)
        self.orthogonal = nn.Parameter(torch.empty(4, 4))
        nn.init.orthogonal_(self.orthogonal)
        self.wide = nn.Parameter(torch.empty(3, 5))
        nn.init.orthogonal_(self.wide)
        self.sparse = nn.Parameter(torch.empty(6, 4))
        nn.init.sparse_(self.sparse, 0.5)
        self.replaced = nn.Parameter(torch.empty(3))
        self.replaced.data = torch.rand(3) * 2
        self.mixed = nn.Parameter(torch.ones(4))
        self.mixed.data = self.mixed.data + torch.randn(4)
        self.brain = nn.Parameter(
            torch.randn(4, dtype=torch.bfloat16), requires_grad=False
        )
        self.column = nn.Parameter(torch.randn(4, 6).t())
        with torch.no_grad():
            self.drawn[0].fill_(1)
            self.drawn[:, 1:].mul_(3)
            self.truncated.copy_(self.truncated + self.drawn.sum())
        self.steps = torch.linspace(0, 1, 4).tolist()
        self.given = nn.Parameter(torch.tensor([1.0, 2.0]) + torch.rand(2))
        local = nn.Parameter(torch.empty(3))
        self.local = local
        nn.init.normal_(local)  # the real one, after its twin was registered
        self.table = nn.ParameterList([nn.Parameter(torch.rand(2)) for _ in range(2)])
        self.register_buffer("count", torch.arange(3))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight
        shared = nn.Parameter(torch.randn(2))
        self.one, self.two = shared, shared
        memory = torch.randn(6)
        self.alias, self.again = nn.Parameter(memory), nn.Parameter(memory[2:])


class ApplyInit(nn.Module):
    """Drawn twice: by the layers, then by the model."""

    def __init__(self, layers=4, width=8):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.apply(self.init)

    @staticmethod
    def init(module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)


class Reseeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        torch.manual_seed(7)  # the seed of the test: the same state as at the start
        self.second = nn.Linear(3, 3)
        with torch.random.fork_rng():
            torch.manual_seed(99)
            self.third = nn.Linear(3, 3)
        self.fourth = nn.Linear(3, 3)
        generator = torch.Generator().manual_seed(5)
        self.own = nn.Parameter(torch.empty(4))
        nn.init.normal_(self.own, generator=generator)
        nn.init.uniform_(self.fourth.bias, generator=generator)
        self.fifth = nn.Linear(3, 3)


def weight_norm():
    return nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))


def spectral_norm():
    return nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))


MODELS = {
    "linear": lambda: nn.Linear(5, 3),
    "float64": lambda: nn.Linear(5, 3, dtype=torch.float64),
    "large": lambda: nn.Linear(300, 100),
    "norm": lambda: nn.LayerNorm(4),
    "embedding": lambda: nn.Embedding(10, 4, padding_idx=2),
    "conv": lambda: nn.Conv2d(2, 3, 3),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "attention, other sizes": lambda: nn.MultiheadAttention(
        8, 2, kdim=4, vdim=6, add_bias_kv=True
    ),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3
    ),
    "transformer": lambda: nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
    "lstm": lambda: nn.LSTM(3, 4, 2, bidirectional=True),
    "batch norm": lambda: nn.Sequential(nn.Conv1d(2, 4, 1), nn.BatchNorm1d(4)),
    "custom": Custom,
    "tied": Tied,
    "apply": ApplyInit,
    "reseeds": Reseeds,
    "cast": lambda: nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).to(torch.bfloat16),
    "copied": lambda: nn.ModuleList(
        [(layer := nn.Linear(4, 3)), copy.deepcopy(layer), nn.Linear(3, 2)]
    ),
    "weight norm": weight_norm,
    "spectral norm": spectral_norm,
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_the_numbers_of_one_device(make):
    real, deferred = build(make)
    assert {p.device for p in deferred.parameters()} == {meta}
    platform.init_parameters(deferred, 0)
    after = torch.rand(3)
    assert_same(real, deferred)
    assert [p.requires_grad for p in real.parameters()] == [
        p.requires_grad for p in deferred.parameters()
    ]
    torch.manual_seed(7)
    make()
    assert torch.equal(after, torch.rand(3))


@pytest.mark.parametrize(
    "name",
    sorted(n for n in vars(nn.init) if n.endswith("_") and not n.startswith("_")),
)
def test_every_initialiser_of_torch(name):
    fill = vars(nn.init)[name]
    options = {
        "constant_": [{"val": 3.0}],
        "sparse_": [
            {"sparsity": 0.5},
            {"sparsity": 0.2, "generator": torch.Generator().manual_seed(1)},
        ],
        # Both ways of drawing until the numbers fit.
        "trunc_normal_": [{}, {"a": -0.5, "b": 0.5}, {"a": 2.0, "b": 3.0}],
    }.get(name, [{}])

    def make():
        module = nn.Module()
        for i, kwargs in enumerate(options):
            if "generator" in kwargs:
                kwargs["generator"].manual_seed(1)
            shape = (4, 3, 3) if name == "dirac_" else (40, 30)
            module.register_parameter(
                f"weight{i}", nn.Parameter(torch.full(shape, 9.0))
            )
            fill(module.get_parameter(f"weight{i}"), **kwargs)
            local = nn.Parameter(torch.full(shape, 9.0))
            module.register_parameter(f"local{i}", local)
            fill(local, **kwargs)
        module.after = nn.Linear(3, 3)
        return module

    real, deferred = build(make)
    platform.init_parameters(deferred, 0)
    assert_same(real, deferred)


class Scrambled(nn.Module):
    """Draws, copies, scales and mixes its parameters in a random order."""

    def __init__(self, seed):
        super().__init__()
        choose = random.Random(seed)
        self.table = nn.ParameterList(
            [nn.Parameter(torch.empty(4, 3)) for _ in range(4)]
        )
        moves = [
            lambda x, _: nn.init.normal_(x),
            lambda x, _: nn.init.trunc_normal_(x),
            lambda x, _: x[1:3].uniform_(),
            lambda x, _: x.zero_(),
            lambda x, _: x.mul_(3),
            lambda x, _: x[:, 0].fill_(2),
            lambda x, _: x.add_(torch.rand(4, 3)),
            lambda x, y: x.copy_(y),
            lambda x, y: x.add_(y),
            lambda x, y: x[:2].copy_(y[2:]),
            lambda x, y: self.table.append(nn.Parameter(x + y)),
            lambda x, _: self.table.append(nn.Parameter(x.detach()[1:])),
            lambda x, _: self.table.append(copy.deepcopy(x)),
        ]
        with torch.no_grad():
            for parameter in self.table:
                nn.init.uniform_(parameter)
            for _ in range(14):
                x, y = (self.table[choose.randrange(4)] for _ in range(2))
                choose.choice(moves)(x, y)


def test_any_order_of_operators_gives_the_numbers_of_one_device():
    for seed in range(60):
        real, deferred = build(lambda seed=seed: Scrambled(seed))
        parts = list(range(len(deferred.table)))
        random.Random(seed).shuffle(parts)
        some = nn.ParameterList([deferred.table[i] for i in parts[:2]])
        platform.init_parameters(some, 0)
        for i, parameter in zip(parts, some, strict=False):
            assert torch.equal(parameter, real.table[i]), seed
        platform.init_parameters(deferred, 0)
        assert_same(real, deferred)
        assert_shared_alike(real.table, deferred.table, skip=parts[:2])


def assert_shared_alike(left, right, skip):
    """Parameters share memory where their twins do; those initialised apart, before the others, do not count."""
    keep = [i for i in range(len(left)) if i not in skip]
    memory = [[t[i].untyped_storage().data_ptr() for i in keep] for t in (left, right)]
    assert (
        len(set(zip(*memory, strict=True)))
        == len(set(memory[0]))
        == len(set(memory[1]))
    )


def test_a_wrong_order_would_be_noticed():
    """The negative control: the same tape with two draws exchanged."""
    real, deferred = build(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    steps = deferred_init._tapes[-1]._steps
    draws = [i for i, step in enumerate(steps) if step.streams]
    steps[draws[0]], steps[draws[2]] = steps[draws[2]], steps[draws[0]]
    platform.init_parameters(deferred, 0)
    with pytest.raises(AssertionError):
        assert_same(real, deferred)


def test_a_trained_model_is_the_same():
    real, deferred = build(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    )
    platform.init_parameters(deferred, 0)
    x = torch.randn(2, 3, 8)
    for model in (real, deferred):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    assert_same(real, deferred)


def test_lstm_computes_with_its_new_weights():
    real, deferred = build(MODELS["lstm"])
    platform.init_parameters(deferred, 0)
    x = torch.randn(5, 2, 3)
    assert torch.equal(real(x)[0], deferred(x)[0])
    assert all(
        a is b
        for a, b in zip(deferred._flat_weights, deferred.parameters(), strict=True)
    )


def test_ties_hold():
    real, deferred = build(Tied)
    assert deferred.head.weight is deferred.embed.weight
    platform.init_parameters(deferred, 0)
    assert deferred.head.weight is deferred.embed.weight
    assert deferred.one is deferred.two
    assert (
        deferred.alias.untyped_storage().data_ptr()
        == deferred.again.untyped_storage().data_ptr()
    )
    assert len(list(real.parameters())) == len(list(deferred.parameters()))


def test_subclass_and_attributes_are_kept():
    class Special(nn.Parameter):
        pass

    def make():
        module = nn.Module()
        parameter = Special(torch.randn(3))
        parameter.note = "kept"
        module.weight = parameter
        return module

    real, deferred = build(make)
    assert type(deferred.weight) is Special
    platform.init_parameters(deferred, 0)
    assert type(deferred.weight) is Special
    assert deferred.weight.note == "kept"
    assert_same(real, deferred)


# --- buffers


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("random", torch.randn(4))
        self.register_buffer("plain", torch.ones(2))
        self.register_buffer("derived", self.weight.detach() * 2, persistent=False)
        self.attribute = torch.rand(2)
        self.last = nn.Parameter(torch.rand(2))


def test_buffers_are_real_unless_asked_for():
    real, deferred = build(Buffers)
    assert deferred.random.device.type == deferred.plain.device.type == "cpu"
    assert deferred.derived.is_meta  # nobody knows it yet
    random = deferred.random
    platform.init_parameters(deferred, 0)
    assert_same(real, deferred)
    assert deferred.random is random
    assert torch.equal(real.derived, deferred.derived)
    assert torch.equal(real.attribute, deferred.attribute)

    real, deferred = build(Buffers, include_buffers=True)
    assert {b.device for b in deferred.buffers()} == {meta}
    platform.init_parameters(deferred, 0)
    assert_same(real, deferred)
    assert torch.equal(real.derived, deferred.derived)
    assert list(deferred.state_dict()) == ["weight", "last", "random", "plain"]


def test_a_buffer_that_the_user_changed_is_the_users():
    _, deferred = build(Buffers)
    deferred.random.fill_(3)
    platform.init_parameters(deferred, 0)
    assert deferred.random.tolist() == [3.0] * 4


# --- parts of a model


def test_every_stage_gets_the_numbers_of_one_device():
    real, deferred = build(lambda: ApplyInit(6))
    parts = [nn.Sequential(*deferred.layers[i : i + 2]) for i in (0, 2, 4)]
    for index in (2, 0, 1):
        platform.init_parameters(parts[index], index)
    assert_same(real, deferred)


def test_a_stage_keeps_no_more_than_one_parameter_too_many():
    layers, width = 10, 64
    one = width * width * 4
    with platform.init_on_device(meta):
        model = ApplyInit(layers, width)
    stage = nn.Sequential(model.layers[7])
    gc.collect()
    with LiveBytes() as live:
        platform.init_parameters(stage, 1)
    assert live.peak < 2.1 * one  # its own weight, and one that is drawn and dropped
    assert model.layers[0].weight.is_meta
    assert stage[0].weight.untyped_storage().nbytes() == one


def test_the_tape_lives_as_long_as_it_is_needed():
    real, deferred = build(lambda: ApplyInit(2))
    tape = weakref.ref(deferred_init._tapes[-1])
    platform.init_parameters(deferred.layers[0], 0)
    assert tape() is not None
    platform.init_parameters(deferred.layers[1], 1)
    gc.collect()
    assert tape() is None
    assert_same(real, deferred)


class FakeLayout:
    """Half of dim 0."""

    def local_slices(self, shape):
        return [slice(0, shape[0] // 2)]


def test_a_shard_of_a_deferred_parameter_is_drawn_and_sliced():
    real, deferred = build(lambda: nn.Linear(4, 6))
    layout = FakeLayout()
    shard = deferred.weight.detach()[layout.local_slices((6, 4))[0]]
    deferred.weight = nn.Parameter(platform.DTensorBase(shard, layout, (6, 4)))
    platform.init_parameters(deferred, 0)
    assert isinstance(deferred.weight, platform.DTensorBase)
    local = deferred.weight.to_local()
    assert torch.equal(local, real.weight[:3])
    assert local.untyped_storage().nbytes() == 3 * 4 * 4
    assert deferred.weight.requires_grad
    assert torch.equal(deferred.bias, real.bias)


# --- the generator


def test_the_generator_is_left_alone_by_the_context():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with platform.init_on_device(meta):
        Custom()
    assert torch.equal(torch.get_rng_state(), before)


def test_the_generator_is_left_alone_if_somebody_has_drawn_since():
    real, deferred = build(lambda: nn.Linear(3, 3))
    torch.rand(5)
    before = torch.get_rng_state()
    platform.init_parameters(deferred, 0)
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(real, deferred)


def test_a_second_init_changes_nothing():
    real, deferred = build(lambda: nn.Linear(3, 3))
    platform.init_parameters(deferred, 0)
    before, weight = torch.get_rng_state(), deferred.weight
    platform.init_parameters(deferred, 0)
    assert torch.equal(torch.get_rng_state(), before)
    assert deferred.weight is weight
    assert_same(real, deferred)


# --- the context


def test_other_devices_and_nesting():
    torch.manual_seed(1)
    real = nn.Linear(3, 3)
    torch.manual_seed(1)
    with platform.init_on_device("cpu"):
        same = nn.Linear(3, 3)
    assert_same(real, same)

    def make():
        first = nn.Linear(3, 3)
        with platform.init_on_device("cpu"):
            second = nn.Linear(3, 3)
            with platform.init_on_device(meta):
                third = nn.Linear(3, 3)
        return nn.ModuleList([first, second, third, nn.Linear(3, 3)])

    torch.manual_seed(7)
    real = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])
    torch.manual_seed(7)
    with platform.init_on_device("meta"):
        deferred = make()
    assert [m.weight.device.type for m in deferred] == ["meta", "cpu", "meta", "meta"]
    platform.init_parameters(deferred, 0)
    assert_same(real, deferred)


def test_default_dtype_and_default_device_of_the_context_hold():
    def make():
        return nn.Linear(3, 3)

    torch.set_default_dtype(torch.float64)
    try:
        real, deferred = build(make)
    finally:
        torch.set_default_dtype(torch.float32)
    platform.init_parameters(deferred, 0)
    assert_same(real, deferred)
    torch.manual_seed(7)
    real = make()
    torch.manual_seed(7)
    with torch.device("meta"), platform.init_on_device(meta):
        deferred = make()
    platform.init_parameters(deferred, 0)
    assert_same(real, deferred)


def test_undone_on_error_and_not_seen_by_other_threads():
    started, finish = threading.Event(), threading.Event()
    elsewhere = []

    def other():
        started.wait(10)
        elsewhere.append(nn.Linear(2, 2))
        finish.set()

    thread = threading.Thread(target=other)
    thread.start()

    def fail():
        with platform.init_on_device(meta, include_buffers=True):
            started.set()
            assert finish.wait(10)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    thread.join()
    assert elsewhere[0].weight.device.type == "cpu"
    assert nn.BatchNorm1d(2).running_mean.device.type == "cpu"
    assert nn.Linear(2, 2).weight.device.type == "cpu"
    assert deferred_init._here.tape is None
    assert not deferred_init._here.targets


def test_a_constructor_that_reads_random_values_is_refused():
    for read in (
        lambda t: t.sum().item(),
        lambda t: t.tolist(),
        lambda t: t.numpy(),
        lambda t: bool(t.sum() > 0),
    ):
        with (
            pytest.raises(
                RuntimeError, match="random numbers are drawn in init_parameters"
            ),
            platform.init_on_device(meta),
        ):
            read(torch.rand(3))
    with platform.init_on_device(meta):
        assert torch.arange(3).sum().item() == 3
        assert torch.zeros(2).tolist() == [0.0, 0.0]
        filled = torch.rand(2)
        filled.fill_(1)
        assert filled.tolist() == [1.0, 1.0]


def test_lazy_modules_are_left_to_torch():
    with platform.init_on_device(meta):
        lazy = nn.LazyLinear(3)
    platform.init_parameters(lazy, 0)
    assert nn.parameter.is_lazy(lazy.weight)


@pytest.mark.parametrize("device", ["nonsense", "cpu:x", [1]])
def test_a_bad_device(device):
    with pytest.raises(
        (RuntimeError, TypeError), match=r"init_on_device: .* is not a device"
    ):
        platform.init_on_device(device)


# --- without a tape


class Plain(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.inner = nn.Linear(3, 3, **kwargs)
        self.weight = nn.Parameter(torch.empty(2, **kwargs))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.weight)


def test_the_module_convention():
    torch.manual_seed(5)
    real = Plain()
    for deferred in (Plain(device="meta"), Plain().to("meta")):
        torch.manual_seed(5)
        platform.init_parameters(deferred, 0)
        assert_same(real, deferred)
    torch.manual_seed(5)
    with torch.device("meta"):
        deferred = Plain()
    before = torch.get_rng_state()
    platform.init_parameters(deferred, 2)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5 + 2)
    assert_same(Plain(), deferred)


def test_the_module_convention_with_ties_and_real_parameters():
    deferred = nn.Sequential(
        nn.Linear(3, 3, bias=False, device="meta"), nn.Linear(3, 3, device="meta")
    )
    deferred[1].weight = deferred[0].weight
    torch.manual_seed(5)
    platform.init_parameters(deferred, 0)
    torch.manual_seed(5)
    assert torch.equal(deferred[0].weight, nn.Linear(3, 3, bias=False).weight)
    assert deferred[1].weight is deferred[0].weight
    assert not deferred[1].bias.is_meta
    half = nn.Linear(3, 3)
    weight = half.weight.clone()
    half.bias = nn.Parameter(torch.empty(3, device="meta"))
    platform.init_parameters(half, 0)
    assert torch.equal(half.weight, weight)


def test_taped_and_untaped_together():
    real, deferred = build(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    deferred.append(nn.BatchNorm1d(3, device="meta"))
    platform.init_parameters(deferred, 0)
    assert_same(real, deferred[:2])
    assert deferred[2].running_var.tolist() == [1.0] * 3


def test_nobody_knows_how():
    module = nn.Module()
    module.inner = nn.Module()
    module.inner.weight = nn.Parameter(torch.empty(3, device="meta"))
    module.known = nn.Linear(2, 2, device="meta")
    with pytest.raises(
        ValueError,
        match=r"inner\.weight: .*init_on_device\(meta_device\), or define reset_parameters",
    ):
        platform.init_parameters(module, 0)
    assert module.known.weight.is_meta  # nothing was begun


@pytest.mark.parametrize("stage_index", [-1, None, 1.0, "0", True])
def test_a_bad_stage(stage_index):
    with pytest.raises(ValueError, match="stage_index must be an int"):
        platform.init_parameters(nn.Linear(2, 2), stage_index)


@pytest.mark.parametrize("module", [None, 3, torch.zeros(1)])
def test_a_bad_module(module):
    with pytest.raises(ValueError, match=r"expected a torch\.nn\.Module"):
        platform.init_parameters(module, 0)


def test_inside_the_context_is_too_early():
    with platform.init_on_device(meta):
        module = nn.Linear(2, 2)
        with pytest.raises(RuntimeError, match="after the init_on_device context"):
            platform.init_parameters(module, 0)


def test_without_deferred_parameters_nothing_happens():
    module = nn.Linear(2, 2)
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    platform.init_parameters(module, 3)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[n], v) for n, v in module.state_dict().items())
