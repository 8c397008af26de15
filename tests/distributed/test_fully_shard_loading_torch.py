# SPDX-License-Identifier: Apache-2.0
"""States of fully_shard units: what load_state_dict takes and refuses, buffers, and full state dicts on rank 0."""

import copy
import weakref
from types import SimpleNamespace

import pytest
import torch
from sharded_models import (
    Net,
    batches,
    both,
    check_gradients,
    check_same,
    part_of,
    wrap,
)
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    FusedColwiseParallel,
    Partial,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    init_device_mesh,
    init_empty_weights,
    parallelize_module,
)
from hyper_parallel.core.distributed_checkpoint import (
    StateDictOptions,
    set_model_state_dict,
)
from hyper_parallel.core.dtensor.initialisation import init_parameters
from hyper_parallel.core.fully_shard import (
    MixedPrecisionPolicy,
    fully_shard,
    get_model_state_dict,
)
from hyper_parallel.core.fully_shard.running import runners_below
from hyper_parallel.core.fully_shard.unit import State
from hyper_parallel.testing import on_ranks

FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def new_mesh(shape=(2,), names=None):
    names = names or ("replicate", "shard")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def loss_of(net, x):
    return net(x).square().mean()


def drawn(net, seed=5):
    """A full state dict for the net, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(value.shape, dtype=value.dtype, generator=generator)
        for name, value in net.state_dict().items()
    }


def check_state(net, expected):
    own = net.state_dict()
    assert list(own) == list(expected)
    for name, value in own.items():
        assert torch.equal(value.full_tensor(), expected[name]), name


def on_rank_0(state):
    return state if torch.distributed.get_rank() == 0 else {}


# --- what is taken


@on_ranks(4)
def test_load_state_dict__full_local_and_distributed_tensors_on_any_mesh():
    """With shards that are uneven and empty: also test_uneven_full_tensor_load."""
    mesh, other = new_mesh((4,), ("dp",)), new_mesh((2, 2), ("a", "b"))
    many = wrap(Net(layers=1).double(), mesh)
    own = many.state_dict()

    def shard(name, value):
        return own[name].layout.part_of(value)

    def spread(_, value):
        return distribute_tensor(value, mesh, [Shard(value.dim() - 1)])

    def elsewhere(_, value):
        return distribute_tensor(value, other, [Shard(0), Replicate()])

    def partial(_, value):
        part = value if mesh.get_local_rank() == 0 else torch.zeros_like(value)
        return DTensor.from_local(part, mesh, [Partial()])

    kinds = (lambda _, value: value, shard, spread, elsewhere, partial)
    for seed, (change, assign) in enumerate(
        [*((kind, False) for kind in kinds), (shard, True), (elsewhere, True)]
    ):
        full = drawn(many, seed)
        state = {name: change(name, value) for name, value in full.items()}
        given = dict(state)
        many.load_state_dict(state, assign=assign)
        check_state(many, full)
        assert all(state[name] is given[name] for name in state)
        assert {p.placements for p in many.parameters()} == {(Shard(0),)}
        assert {p.device_mesh for p in many.parameters()} == {mesh}


@on_ranks(2)
def test_load_before_the_first_forward_between_steps_and_after_a_failed_step():
    mesh = new_mesh()
    one, many = both(mesh, reshard_after_forward=False)
    x = batches(1)[0]

    def fail(*_):
        raise ArithmeticError("on purpose")

    for step in range(3):
        if step == 2:
            handle = many.blocks[1].up.register_full_backward_hook(fail)
            with pytest.raises(ArithmeticError):
                loss_of(many, part_of(x, mesh)).backward()
            handle.remove()
        state = drawn(many, step)
        for net in (one, many):
            net.load_state_dict(state)
            net.zero_grad()
        check_state(many, state)
        loss_of(one, x).backward()
        loss_of(many, part_of(x, mesh)).backward()
        check_gradients(one, many)


@on_ranks(2)
def test_whole_units_are_loaded_through_a_module_that_is_no_unit():
    mesh = new_mesh()
    net = Net()
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
        block.unshard()
    state = {name: torch.full(p.shape, 2.0) for name, p in net.named_parameters()}
    assert all(isinstance(p, DTensor) for p in net.blocks.state_dict().values())
    net.load_state_dict(state)
    for block in net.blocks:
        block.reshard()
        for value in block.state_dict().values():
            assert torch.equal(value.full_tensor(), torch.full(value.shape, 2.0))


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 18), nn.Linear(6, 4)
        self.up, self.down = nn.Linear(4, 7), nn.Linear(7, 3)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + self.out(torch.tanh(q) * k + v)
        return self.down(torch.tanh(self.up(x)))


PLAN = {
    "qkv": FusedColwiseParallel(sections=3, use_local_output=False),
    "out": RowwiseParallel(use_local_output=True),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


@on_ranks(4)
def test_load_into_fsdp_x_tp_strided_shards():
    """Halves of fused projections stay where they belong, and results are those of one process."""
    mesh = new_mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    one = Fused().double()
    many = parallelize_module(copy.deepcopy(one), mesh["tp"], PLAN)
    fully_shard(many, mesh=mesh["dp"])
    x = batches(1)[0]
    for seed in range(4):
        state = drawn(one, seed)
        one.load_state_dict(state)
        if seed < 2:
            many.load_state_dict(state, assign=seed == 1)
        elif seed == 2:
            set_model_state_dict(many, on_rank_0(state), options=FROM_RANK_0)
        else:
            own = many.state_dict()
            shards = {name: own[name].layout.part_of(state[name]) for name in own}
            copies = {name: shard.clone() for name, shard in shards.items()}
            many.load_state_dict(copies)
        check_state(many, state)
        for net in (one, many):
            net.zero_grad()
        loss_of(one, x).backward()
        loss_of(many, part_of(x, mesh["dp"])).backward()
        check_gradients(one, many)


# --- what is refused


@on_ranks(2)
def test_a_state_dict_that_does_not_fit_changes_nothing():
    mesh = new_mesh()
    one, many = both(mesh, reshard_after_forward=False)
    many(batches(1)[0])  # whole now
    before = {name: p.full_tensor() for name, p in many.state_dict().items()}
    state = drawn(many)
    wrong = (torch.ones(9, 9), distribute_tensor(torch.ones(2, 6), mesh, [Shard(0)]))
    for value in wrong:
        with pytest.raises(ValueError, match=r"head.weight.*\(3, 6\).*\(\d, 6\)") as e:
            many.load_state_dict({**state, "head.weight": value})
        assert e.value.code == "HP433"
        check_state(many, before)
        assert {one.unit.state for one in runners_below(many)} == {State.SHARDED}
    lacking = {name: value for name, value in state.items() if name != "head.bias"}
    with pytest.raises(RuntimeError, match="head.bias"):
        many.load_state_dict(lacking)
    with pytest.raises(RuntimeError, match="other"):
        many.load_state_dict({**state, "other": torch.ones(1)})
    found = many.load_state_dict({**lacking, "other": torch.ones(1)}, strict=False)
    assert found.missing_keys == ["head.bias"]
    assert found.unexpected_keys == ["other"]
    check_state(many, state)  # keys are compared after what fits is loaded, as in torch
    one.load_state_dict(state)
    x = batches(1)[0]
    torch.testing.assert_close(many(x), one(x))


# --- assign


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


@on_ranks(2)
def test_assign_is_honoured():
    mesh = new_mesh()
    torch.manual_seed(0)
    one = Tied()
    many = fully_shard(copy.deepcopy(one), mesh=mesh)
    ids = torch.tensor([0, 1, 2, 3])
    loss_of(many, ids).backward()
    optimizer = torch.optim.SGD(many.parameters(), 0.1)
    optimizer.step()
    state = {name: value.double() for name, value in drawn(one).items()}
    state["head.weight"] = state["embed.weight"]
    many.load_state_dict(state, assign=True)
    assert many.head.weight is many.embed.weight
    assert many.head.weight.dtype == torch.float64
    with pytest.raises(RuntimeError, match="construct the optimizer after"):
        optimizer.step()
    one.load_state_dict(state, assign=True)
    one.head.weight = one.embed.weight
    loss_of(one, ids).backward()
    loss_of(many, part_of(ids, mesh)).backward()
    check_same(many.head.weight.grad, one.head.weight.grad)


@on_ranks(2)
def test_assign_gives_parameters_without_data_theirs():
    mesh = new_mesh()
    one = Net().double()
    one.load_state_dict(drawn(one))
    with init_empty_weights():
        many = Net().double()
    wrap(many, mesh)
    many.load_state_dict(drawn(one), assign=True)
    x = batches(1)[0]
    loss_of(one, x).backward()
    loss_of(many, part_of(x, mesh)).backward()
    check_gradients(one, many)


# --- buffers


class Rotary(Net):
    """With buffers that no state dict has."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", 1.0 / torch.arange(1.0, 7.0), persistent=False)
        self.register_buffer("count", torch.tensor(7), persistent=False)
        self.register_buffer("scale", torch.full((6,), 2.0, dtype=torch.float64))

    def forward(self, x):
        x = self.embed(x)
        factor = self.steps.to(x.dtype) * self.scale.to(x.dtype) * self.count
        x = x * factor
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
@on_ranks(4)
def test_non_persistent_buffers_survive_meta_and_rank0_load__keep_their_dtype(shape):
    if len(shape) == 1 and torch.distributed.get_rank() > 1:
        return
    mesh = new_mesh(shape)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    torch.manual_seed(0)
    one = Rotary()
    with init_empty_weights():
        many = Rotary()
    wrap(many, mesh, mp_policy=policy)
    init_parameters(many)
    if len(shape) == 2:  # of all ranks
        set_model_state_dict(many, on_rank_0(one.state_dict()), options=FROM_RANK_0)
    else:
        many.load_state_dict(one.state_dict())
    x = batches(1)[0].float()
    loss_of(many, part_of(x, mesh)).backward()
    for (name, own), true in zip(many.named_buffers(), one.buffers(), strict=True):
        assert own.dtype == true.dtype, name
        assert torch.equal(own, true), name
    for own, true in zip(many.parameters(), one.parameters(), strict=True):
        assert torch.equal(own.full_tensor(), true)
    torch.testing.assert_close(many(x).float(), one(x), rtol=0.05, atol=0.05)


# --- full state dicts


@on_ranks(2)
def test_full_state_dict__options():
    from torch.distributed.checkpoint.state_dict import StateDictOptions as TorchOptions

    mesh = new_mesh()
    one, many = both(mesh)
    many.blocks[1].requires_grad_(False)
    names = list(one.state_dict())
    whole = get_model_state_dict(many, options=StateDictOptions(full_state_dict=True))
    assert list(whole) == names
    assert all(torch.equal(whole[n], v) for n, v in one.state_dict().items())
    kept = StateDictOptions(ignore_frozen_params=True)
    trained = [name for name in names if not name.startswith("blocks.1.")]
    assert list(get_model_state_dict(many, options=kept)) == trained
    sharded = get_model_state_dict(many, options=StateDictOptions(cpu_offload=True))
    assert all(isinstance(value, DTensor) for value in sharded.values())
    with pytest.raises(ValueError, match="needs full_state_dict=True"):
        StateDictOptions(broadcast_from_rank0=True)
    for kind in (SimpleNamespace, TorchOptions):
        with pytest.raises(ValueError, match="needs full_state_dict=True") as raised:
            get_model_state_dict(many, options=kind(broadcast_from_rank0=True))
        assert raised.value.code == "HP429"


@on_ranks(2)
def test_full_state_dict_on_rank_0__one_full_tensor_at_a_time_elsewhere():
    mesh = new_mesh()
    one, many = both(mesh)
    gathered, most = [], 0
    gather = DTensor.full_tensor

    def counted(self, *args, **kwargs):
        nonlocal most
        most = max(most, sum(one() is not None for one in gathered))
        whole = gather(self, *args, **kwargs)
        gathered.append(weakref.ref(whole))
        return whole

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "full_tensor", counted)
        state = get_model_state_dict(many, options=options)
    assert len(gathered) == len(one.state_dict())
    if mesh.get_local_rank() == 0:
        assert all(torch.equal(state[n], v) for n, v in one.state_dict().items())
    else:
        assert state == {}
        assert most <= 1
