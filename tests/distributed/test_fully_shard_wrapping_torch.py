# SPDX-License-Identifier: Apache-2.0
"""fully_shard: what becomes a unit and how it is sharded, precision, tied parameters, states, and bad input."""

import copy
import tempfile
from pathlib import Path

import pytest
import torch
from sharded_models import (
    Block,
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
    CommunicationLedger,
    DTensor,
    FusedColwiseParallel,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    init_device_mesh,
    init_empty_weights,
    load,
    local_batch,
    parallelize_module,
    replicate,
    save,
)
from hyper_parallel.core.distributed_checkpoint import ModelState, OptimizerState
from hyper_parallel.core.dtensor.initialisation import init_parameters
from hyper_parallel.core.fully_shard import (
    CPUOffloadPolicy,
    FSDPModule,
    HSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    get_model_state_dict,
    hsdp_sync_stream,
)
from hyper_parallel.core.fully_shard.running import runners_below
from hyper_parallel.core.fully_shard.unit import State
from hyper_parallel.testing import on_ranks


def new_mesh(shape=(2,), names=None):
    names = names or ("replicate", "shard")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def loss_of(net, x):
    return net(x).square().mean()


def train_both(one, many, mesh, steps=3, part=part_of):
    optimizers = [torch.optim.AdamW(net.parameters(), 1e-2) for net in (one, many)]
    for x in batches(steps):
        losses = []
        for net, rows, optimizer in zip(
            (one, many), (x, part(x, mesh)), optimizers, strict=True
        ):
            optimizer.zero_grad()
            losses.append(loss_of(net, rows))
            losses[-1].backward()
        mean = losses[1].detach().clone()
        torch.distributed.all_reduce(mean, group=mesh.get_group())
        torch.testing.assert_close(mean / mesh.size(), losses[0].detach())
        check_gradients(one, many)
        for optimizer in optimizers:
            optimizer.step()
    for own, true in zip(many.parameters(), one.parameters(), strict=True):
        check_same(own, true)


# --- wrapping


@on_ranks(2)
def test_names_and_classes_stay():
    mesh = new_mesh()
    one = Net()
    many = copy.deepcopy(one)
    wrapped = wrap(many, mesh)
    assert wrapped is many
    assert FSDPModule is HSDPModule
    for module in (many, many.blocks[0]):
        assert isinstance(module, HSDPModule)
    assert isinstance(many.blocks[0], Block)
    assert type(many).__name__ == "HSDPNet"
    for names in ("named_parameters", "named_modules"):
        own = [name for name, _ in getattr(many, names)()]
        assert own == [name for name, _ in getattr(one, names)()]
    assert list(many.state_dict()) == list(one.state_dict())
    pair = [nn.Linear(2, 2), nn.Linear(2, 2)]
    assert fully_shard(pair, mesh=mesh) is pair
    hsdp_sync_stream()


@on_ranks(4)
def test_uneven_and_empty_shards__any_dim():
    mesh = new_mesh((4,))
    torch.manual_seed(0)
    one = Net(dim=5, hidden=3).double()
    for place in (None, lambda parameter: Shard(parameter.dim() - 1)):
        many = copy.deepcopy(one)
        wrap(many, mesh, shard_placement_fn=place)
        train_both(copy.deepcopy(one), many, mesh)
    sizes = [tuple(p.to_local().shape) for p in many.blocks[0].up.parameters()]
    assert sizes[1] == ((1,) if mesh.get_local_rank() < 3 else (0,))


@on_ranks(2)
def test_five_rows_over_two_ranks_are_three_and_two():
    mesh = new_mesh()
    many = fully_shard(nn.Linear(4, 5), mesh=mesh)
    assert many.weight.to_local().shape == (3 - mesh.get_local_rank(), 4)
    assert many.weight.placements == (Shard(0),)
    transposed = nn.Linear(4, 6)
    transposed.weight = nn.Parameter(torch.randn(4, 6).t())
    whole = transposed.weight.detach().clone()
    fully_shard(transposed, mesh=mesh)
    assert transposed.weight.to_local().is_contiguous()
    full = transposed.weight.full_tensor()
    torch.distributed.broadcast(whole, 0)
    torch.testing.assert_close(full[:3], whole[:3])


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.layer(x) * self.scale


@on_ranks(2)
def test_a_parameter_without_dims_is_replicated_and_reduced():
    mesh = new_mesh()
    torch.manual_seed(0)
    one = Scaled().double()
    many = copy.deepcopy(one)
    with pytest.warns(UserWarning, match="scale has no dim to shard"):
        fully_shard(many, mesh=mesh)
    assert many.scale.placements == (Replicate(),)
    train_both(one, many, mesh)


@on_ranks(4)
def test_reshard_after_forward_int__gathers_in_the_small_group():
    mesh = new_mesh((4,))
    one, many = both(mesh, reshard_after_forward=2)
    train_both(one, many, mesh)
    x = batches(1)[0]
    mine = loss_of(many, part_of(x, mesh))
    states = {runner.unit.state for runner in runners_below(many)}
    assert states == {State.REGROUPED}
    with CommunicationLedger(mesh) as ledger:
        mine.backward()
    counts = ledger.counts()
    assert counts["all_gather_into_tensor"] == 4
    gathered = [e for e in ledger.entries if e.collective == "all_gather_into_tensor"]
    # From one neighbour comes a half, where from three others would come three quarters.
    most = max(entry.nbytes for entry in gathered)
    whole = sum(p.numel() for p in many.blocks[0].parameters()) * 8
    assert most < 0.62 * whole
    with pytest.raises(ValueError, match="divisor of the 4"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, reshard_after_forward=3)
    with pytest.warns(UserWarning, match="use False"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, reshard_after_forward=1)


@on_ranks(1)
def test_shard_group_of_one__forward_meta_init_optimizer():
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    one = Net().double()
    torch.manual_seed(0)
    with init_empty_weights():
        many = Net().double()
    wrap(many, mesh)
    torch.manual_seed(0)
    init_parameters(many)
    train_both(one, many, mesh, part=lambda x, _: x)


@on_ranks(2)
def test_two_ranks_are_bit_equal_to_replicate():
    mesh = new_mesh()
    torch.manual_seed(0)
    one = Net()
    twins = [wrap(copy.deepcopy(one), mesh), replicate(copy.deepcopy(one), mesh)]
    gradients = []
    x = part_of(batches(1)[0].float(), mesh)
    for net in twins:
        loss_of(net, x).backward()
        gradients.append([p.grad.full_tensor() for p in net.parameters()])
    for own, true in zip(*gradients, strict=True):
        torch.testing.assert_close(own, true, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
@on_ranks(4)
def test_whole_batch__exact_whatever_ranks_ignore(shape):
    if len(shape) == 1 and torch.distributed.get_rank() > 1:
        return
    mesh = new_mesh(shape)
    torch.manual_seed(0)
    one = Net().double()
    many = copy.deepcopy(one)
    for block in many.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(many, mesh=mesh, batch_dim=0)
    x = batches(1)[0]
    target = torch.tensor([0, 1, 2, -100, -100, -100, 1, -100])
    loss = nn.functional.cross_entropy(one(x), target)
    loss.backward()
    output = many(part_of(x, mesh))
    assert isinstance(output, DTensor)
    mine = nn.functional.cross_entropy(output, local_batch(part_of(target, mesh), many))
    torch.testing.assert_close(mine.full_tensor().detach(), loss.detach())
    mine.backward()
    check_gradients(one, many)


# --- with tensor parallel


class Attention(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(torch.tanh(q) * torch.sigmoid(k) + v)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.mlps = nn.ModuleList(Block(8, 6) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.embed(x)
        for block, mlp in zip(self.blocks, self.mlps, strict=True):
            x = mlp(block(x))
        return self.head(x)


PLAN = {
    "blocks.*.qkv": FusedColwiseParallel(sections=3, use_local_output=False),
    "blocks.*.out": RowwiseParallel(use_local_output=True),
    "mlps.*.up": ColwiseParallel(),
    "mlps.*.down": RowwiseParallel(),
}


def tensor_parallel(mesh, reshard=None):
    torch.manual_seed(0)
    one = Stack().double()
    many = copy.deepcopy(one)
    parallelize_module(many, mesh["tp"], PLAN)
    for block in (*many.blocks, *many.mlps):
        fully_shard(block, mesh=mesh["dp"], reshard_after_forward=reshard)
    fully_shard(many, mesh=mesh["dp"], reshard_after_forward=reshard)
    return one, many


@on_ranks(4)
def test_training_with_tensor_parallel_equals_one_process():
    mesh = new_mesh((2, 2), ("dp", "tp"))
    one, many = tensor_parallel(mesh)
    weight = many.mlps[0].up.weight
    assert weight.device_mesh.mesh_dim_names == ("dp", "tp")
    check_same(weight, one.mlps[0].up.weight)
    check_same(many.blocks[0].qkv.weight, one.blocks[0].qkv.weight)
    rows = mesh["dp"]
    train_both(one, many, rows, steps=20)


# --- ignored, tied


@on_ranks(2)
def test_ignored_parameters_are_left_alone():
    mesh = new_mesh()
    torch.manual_seed(0)
    one = Net().double()
    many = copy.deepcopy(one)
    ignored = [many.blocks[0].up.weight, *many.blocks[1].parameters()]
    wrap(many, mesh, ignored_params=ignored)
    assert many.blocks[0].up.weight is ignored[0]
    assert not isinstance(many.blocks[1].down.weight, DTensor)
    x = batches(1)[0]
    rows = part_of(x, mesh)
    loss_of(one, x).backward()
    loss_of(many, rows).backward()
    local = copy.deepcopy(one)
    local.zero_grad()
    loss_of(local, rows).backward()
    torch.testing.assert_close(ignored[0].grad, local.blocks[0].up.weight.grad)
    check_same(many.head.weight.grad, one.head.weight.grad)
    other = copy.deepcopy(one)
    fully_shard(other.blocks[0], mesh=mesh)
    with pytest.raises(ValueError, match="which a unit below shards already"):
        fully_shard(other, mesh=mesh, ignored_params=[other.blocks[0].up.weight])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.middle = Block(4, 6)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.middle(self.embed(ids)))


@on_ranks(2)
def test_tied_embedding_and_head__one_unit_list_unit_two_units_refused():
    mesh = new_mesh()
    torch.manual_seed(0)
    one = Tied().double()
    ids = torch.tensor([0, 1, 2, 3, 4, 0, 1, 1])
    loss_of(one, ids).backward()
    for as_list in (False, True):
        many = copy.deepcopy(one)
        many.zero_grad()
        fully_shard(many.middle, mesh=mesh)
        if as_list:
            fully_shard([many.embed, many.head], mesh=mesh)
        fully_shard(many, mesh=mesh)
        assert many.embed.weight is many.head.weight
        loss_of(many, part_of(ids, mesh)).backward()
        check_same(many.embed.weight.grad, one.embed.weight.grad)
        many.unshard()
        many.embed.unshard() if as_list else None
        assert many.embed.weight is many.head.weight
        many.load_state_dict(one.state_dict())
        assert many.embed.weight is many.head.weight
        check_same(many.embed.weight, one.embed.weight)
    many = copy.deepcopy(one)
    fully_shard(many.embed, mesh=mesh)
    with pytest.raises(ValueError, match=r"tied to 'weight'.*fully_shard\(\[first"):
        fully_shard(many.head, mesh=mesh)


# --- precision


@on_ranks(2)
def test_precision__dtypes_at_every_place():
    mesh = new_mesh()
    torch.manual_seed(0)
    seen = {}

    class Probe(Block):
        def forward(self, x, mask=None, scale=None):
            seen.update(
                x=x.dtype,
                weight=self.up.weight.dtype,
                mask=mask.dtype,
                scale=scale["by"].dtype,
            )
            return super().forward(x) * scale["by"]

    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        output_dtype=torch.float64,
    )
    block = fully_shard(Probe(4, 6), mesh=mesh, mp_policy=policy)
    x = torch.randn(3, 4, requires_grad=True)
    mask = torch.ones(3, dtype=torch.bool)
    with CommunicationLedger(mesh) as ledger:
        out = block(x, mask, scale={"by": torch.ones(3, 1)})
        out.sum().backward()
    assert out.dtype == torch.float64
    assert seen == {
        "x": torch.bfloat16,
        "weight": torch.bfloat16,
        "mask": torch.bool,
        "scale": torch.bfloat16,
    }
    assert x.grad.dtype == torch.float32
    for parameter in block.parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32
    gathers = [e for e in ledger.entries if e.collective == "all_gather_into_tensor"]
    reductions = [e for e in ledger.entries if e.collective == "reduce_scatter_tensor"]
    assert gathers[0].nbytes < reductions[0].nbytes  # two bytes beside four
    plain = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    kept = fully_shard(nn.Identity(), mesh=mesh, mp_policy=plain)
    assert kept(torch.ones(2)).dtype == torch.float32


@on_ranks(2)
def test_accumulation_is_in_the_reduce_dtype():
    """A thousand small gradients, each of which bfloat16 would round away."""
    mesh = new_mesh()
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    layer = nn.Linear(1, 1, bias=False)
    fully_shard(layer, mesh=mesh, mp_policy=policy)
    layer.set_requires_gradient_sync(requires_grad_sync=False)
    for step in range(1000):
        if step == 999:
            layer.set_requires_gradient_sync(True)
        layer(torch.ones(1, 1)).sum().backward()
    assert layer.weight.grad.full_tensor().item() == 1000


@on_ranks(2)
def test_norm_with_its_own_policy__buffers_keep_their_dtype():
    mesh = new_mesh()
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    single = MixedPrecisionPolicy(
        param_dtype=torch.float32, output_dtype=torch.bfloat16
    )
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    fully_shard(net[1], mesh=mesh, mp_policy=single)
    fully_shard(net, mesh=mesh, mp_policy=half)
    seen = []
    net[1].register_forward_pre_hook(lambda m, args: seen.append(m.weight.dtype))
    net(torch.randn(8, 4)).sum().backward()
    assert seen == [torch.float32]
    assert net[1].running_mean.dtype == torch.float32
    assert net[1].running_mean.abs().sum() > 0
    assert net[0].weight.grad.dtype == torch.float32


# --- states


@on_ranks(4)
def test_states_between_meshes__train_save_load():
    folder = [tempfile.mkdtemp()] if torch.distributed.get_rank() == 0 else [None]
    torch.distributed.broadcast_object_list(folder)
    path = Path(folder[0])
    four, two = new_mesh((4,)), new_mesh((2, 2), ("dp", "tp"))
    one, many = both(four)
    optimizer = torch.optim.AdamW(many.parameters(), 1e-2)
    reference = torch.optim.AdamW(one.parameters(), 1e-2)
    for x in batches(2):
        for net, rows, step in (
            (one, x, reference),
            (many, part_of(x, four), optimizer),
        ):
            step.zero_grad()
            loss_of(net, rows).backward()
            step.step()
    save(
        {"model": ModelState(many), "optimizer": OptimizerState(many, optimizer)},
        checkpoint_id=path / "four",
    )
    torch.manual_seed(5)
    other = Net().double()
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    parallelize_module(other, two["tp"], plan)
    wrap(other, two["dp"])
    other_optimizer = torch.optim.AdamW(other.parameters(), 1e-2)
    load(
        {
            "model": ModelState(other),
            "optimizer": OptimizerState(other, other_optimizer),
        },
        checkpoint_id=path / "four",
    )
    x = batches(3)[2]
    for net, rows, step in (
        (one, x, reference),
        (other, part_of(x, two["dp"]), other_optimizer),
    ):
        step.zero_grad()
        loss_of(net, rows).backward()
        step.step()
    for own, true in zip(other.parameters(), one.parameters(), strict=True):
        check_same(own, true)
    plain = Net().double()
    load({"model": ModelState(plain)}, checkpoint_id=path / "four")
    for own, before in zip(plain.parameters(), many.parameters(), strict=True):
        torch.testing.assert_close(own, before.full_tensor())
    torch.distributed.barrier()


@on_ranks(2)
def test_state_dict_and_load_state_dict():
    mesh = new_mesh()
    _, many = both(mesh, reshard_after_forward=False)
    many(batches(1)[0])  # whole now
    with CommunicationLedger(mesh) as ledger:
        own = many.state_dict()
    assert not ledger.counts()
    assert all(isinstance(value, DTensor) for value in own.values())
    torch.manual_seed(7)
    other = Net().double()
    full = other.state_dict()
    many.load_state_dict(full)
    for mine, true in zip(many.parameters(), other.parameters(), strict=True):
        check_same(mine, true)
    again = Net().double()
    distributed = {
        name: distribute_tensor(value, mesh, [Replicate()])
        for name, value in again.state_dict().items()
    }
    many.load_state_dict(distributed)
    check_same(many.head.weight, again.head.weight)
    torch.testing.assert_close(many(batches(1)[0]), again(batches(1)[0]))
    with pytest.raises(RuntimeError, match="head.weight"):
        many.load_state_dict({k: v for k, v in full.items() if k != "head.weight"})
    gathered = get_model_state_dict(many)
    assert set(gathered) == set(full)


@on_ranks(2)
def test_meta_initialisation__bit_equal_one_unit_at_a_time():
    mesh = new_mesh()
    torch.manual_seed(3)
    one = Net()
    torch.manual_seed(3)
    with init_empty_weights():
        many = Net()
    wrap(many, mesh)
    with pytest.raises(RuntimeError, match=r"have no data.*embed.weight"):
        many(torch.ones(2, 4))
    torch.manual_seed(3)
    init_parameters(many)
    for own, true in zip(many.parameters(), one.parameters(), strict=True):
        assert torch.equal(own.full_tensor(), true)
    torch.testing.assert_close(many(torch.ones(2, 4)), one(torch.ones(2, 4)))


@on_ranks(2)
def test_optimizer_built_after_the_first_forward__and_before_fully_shard():
    mesh = new_mesh()
    one, many = both(mesh)
    x = batches(1)[0]
    many(part_of(x, mesh))
    train_both(one, many, mesh)
    early = Net()
    optimizer = torch.optim.SGD(early.parameters(), 0.1)
    wrap(early, mesh)
    early(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="optimizer"):
        optimizer.step()


@on_ranks(2)
def test_clip_grad_norm__with_cpu_offload():
    mesh = new_mesh()
    one, many = both(mesh, offload_policy=CPUOffloadPolicy())
    x = batches(1)[0]
    loss_of(one, x).backward()
    loss_of(many, part_of(x, mesh)).backward()
    many.blocks[0].up.weight.grad = None
    one.blocks[0].up.weight.grad = None
    norms = [nn.utils.clip_grad_norm_(net.parameters(), 0.01) for net in (one, many)]
    whole = norms[1].full_tensor() if isinstance(norms[1], DTensor) else norms[1]
    torch.testing.assert_close(whole, norms[0])
    check_gradients(one, many)


# --- bad input


@on_ranks(4)
def test_bad_input_is_told():
    mesh = new_mesh((4,))
    cases = [
        (lambda: fully_shard([], mesh=mesh), ValueError, "got no module"),
        (lambda: fully_shard("x", mesh=mesh), ValueError, "got str"),
        (lambda: fully_shard(nn.ModuleList(), mesh=mesh), ValueError, "has no forward"),
        (
            lambda: fully_shard(
                nn.Linear(2, 2), mesh=new_mesh((2, 1, 2), ("a", "b", "c"))
            ),
            ValueError,
            "flatten its data axes",
        ),
        (
            lambda: fully_shard(nn.Linear(2, 2), mesh=new_mesh((2, 2), ("dp", "cp"))),
            ValueError,
            "taken for data axes",
        ),
        (
            lambda: fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2, 2))),
            ValueError,
            "needs names",
        ),
        (
            lambda: fully_shard(
                nn.Linear(2, 2), mesh=mesh, shard_placement_fn=lambda p: Shard(5)
            ),
            ValueError,
            r"returned Shard\(dim=5\)|S\(5\)",
        ),
    ]
    for call, kind, words in cases:
        with pytest.raises(kind, match=words) as raised:
            call()
        assert raised.value.code.startswith("HP42")
    layer = fully_shard(nn.Linear(2, 2), mesh=mesh)
    with pytest.raises(ValueError, match="is a unit already"):
        fully_shard(layer, mesh=mesh)
    with pytest.raises(ValueError, match="expected a bool"):
        layer.set_requires_gradient_sync(1)
    with pytest.raises(RuntimeError, match="cannot be copied"):
        copy.deepcopy(layer)


@on_ranks(2)
def test_a_child_that_ran_before_its_parent_is_told():
    mesh = new_mesh()
    many = Net().double()
    for block in many.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(many, mesh=mesh)
    many.blocks[0](torch.ones(2, 6, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="outermost unit before"):
        many(batches(1)[0])
