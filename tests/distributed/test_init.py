# SPDX-License-Identifier: Apache-2.0
"""The same seed gives the same model on every mesh: distributed parameters get the numbers of one device, sliced."""

import gc

import pytest
import torch
from live_bytes import LiveBytes
from torch import nn

from hyper_parallel import (
    DTensor,
    Layout,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    get_platform,
    init_device_mesh,
)
from hyper_parallel.core.dtensor.initialisation import (
    init_empty_weights,
    init_on_device,
    init_parameters,
)
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.testing import on_ranks


class Custom(nn.Module):
    """Draws in every way: through nn.init, in place, twice, from another parameter, and at the end of it all."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.empty(5, 3))
        self.second = nn.Parameter(torch.randn(7), requires_grad=False)
        self.third = nn.Parameter(torch.empty(3, 5))
        self.inner = nn.Linear(3, 7)
        self.derived = nn.Parameter(self.inner.weight.detach().clone())
        self.reset_parameters()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.5)

    def reset_parameters(self):
        nn.init.trunc_normal_(self.first, std=0.2)
        nn.init.kaiming_uniform_(self.third, a=5**0.5)
        nn.init.orthogonal_(self.third)
        nn.init.ones_(self.second)
        nn.init.normal_(self.inner.weight)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 3, padding_idx=2)
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 11, bias=False)
        self.head.weight = self.embed.weight


MODELS = {
    "linear": lambda: nn.Linear(5, 7),
    "embedding": lambda: nn.Embedding(9, 5, padding_idx=1),
    "norm": lambda: nn.LayerNorm(6),
    "encoder": lambda: nn.TransformerEncoderLayer(6, 2, 10, batch_first=True),
    "layers": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(6, 2, 10, batch_first=True), 2
    ),
    "custom": Custom,
    "tied": Tied,
}


def placements(mesh, ndim, turn):
    """All ways to lay a tensor on the mesh, one after the other."""
    choices = [Replicate(), *(Shard(dim) for dim in range(ndim))]
    picked = []
    for _ in range(mesh.ndim):
        turn, choice = divmod(turn, len(choices))
        picked.append(choices[choice])
    return picked


def distribute(module, mesh, turn, way):
    """Replaces every parameter by a distributed one, tied ones by one."""
    platform = get_platform()
    for number, name in enumerate(platform.parameters_dict(module)):
        found = platform.search_parameter_by_name(module, name)
        parameter = found[2]
        placed = placements(mesh, parameter.ndim, turn + number)
        if way == "set_layout":
            new = platform.set_layout_into_parameter(
                parameter, Layout.from_device_mesh(mesh)(placed)
            )
        else:
            new = nn.Parameter(
                distribute_tensor(parameter, mesh, placed),
                requires_grad=parameter.requires_grad,
            )
        platform.update_parameter_by_name(module, found, new)
        assert platform.search_parameter_by_name(module, name)[2] is new


def check_same(module, real):
    """Bit-equal to one device, each rank holding its shard and no more."""
    mine, truth = dict(module.named_parameters()), dict(real.named_parameters())
    assert list(mine) == list(truth)
    for name, parameter in mine.items():
        expected = truth[name].detach()
        shard = parameter.to_local().detach()
        assert isinstance(parameter, DTensor)
        assert isinstance(parameter, nn.Parameter)
        assert parameter.is_leaf
        assert parameter.requires_grad == truth[name].requires_grad
        assert not parameter.is_meta
        assert torch.equal(
            shard, expected[parameter.layout.local_slices(expected.shape)]
        ), name
        assert torch.equal(parameter.detach().full_tensor(), expected), name
        assert shard.untyped_storage().nbytes() == shard.nbytes


def check_meshes(*shapes):
    platform = get_platform()
    for shape in shapes:
        mesh = init_device_mesh(
            "cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :]
        )
        for turn, (name, make) in enumerate(MODELS.items()):
            for way in ("distribute_tensor", "set_layout"):
                torch.manual_seed(11)
                real, after = make(), torch.rand(3)
                torch.manual_seed(11)
                with platform.init_on_device(platform.meta_device):
                    module = make()
                with CommunicationLedger() as ledger:
                    distribute(module, mesh, turn, way)
                    assert all(parameter.is_meta for parameter in module.parameters())
                    platform.init_parameters(module, 0)
                assert not ledger.entries
                assert torch.equal(
                    torch.rand(3), after
                )  # the generator is where one device's is
                check_same(module, real)
                if name == "tied":
                    assert module.head.weight is module.embed.weight


@on_ranks(2)
def test_the_numbers_of_one_device_on_two_ranks():
    check_meshes((2,))


@on_ranks(4)
def test_the_numbers_of_one_device_on_four_ranks():
    check_meshes((4,), (2, 2))


@on_ranks(2)
def test_a_wrong_draw_would_be_noticed():
    """The negative control: a generator that does not stand where the model's did."""
    platform, mesh = get_platform(), init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    real = nn.Linear(5, 7)
    torch.manual_seed(2)
    with platform.init_on_device(platform.meta_device):
        module = nn.Linear(5, 7)
    distribute(module, mesh, 1, "set_layout")
    platform.init_parameters(module, 0)
    with pytest.raises(AssertionError):
        check_same(module, real)


@on_ranks(2)
def test_copies_of_one_parameter_are_independent():
    platform, mesh = get_platform(), init_device_mesh("cpu", (2,))
    torch.manual_seed(5)
    real = nn.Linear(4, 6)
    torch.manual_seed(5)
    with platform.init_on_device(platform.meta_device):
        module = nn.Linear(4, 6)
    source = module.weight
    module.weight = nn.Parameter(distribute_tensor(source, mesh, [Shard(0)]))
    module.columns = nn.Parameter(distribute_tensor(source, mesh, [Shard(1)]))
    module.again = nn.Parameter(distribute_tensor(source, mesh, [Shard(0)]))
    module.view = nn.Parameter(
        module.again.detach()
    )  # shares the memory, as a plain tensor's would
    module.register_buffer(
        "table", distribute_tensor(source.detach(), mesh, [Replicate()])
    )
    module.weight.note = "kept"
    platform.init_parameters(module, 0)
    for parameter in (
        module.weight,
        module.columns,
        module.again,
        module.view,
        module.table,
    ):
        assert torch.equal(parameter.full_tensor().detach(), real.weight)
        assert (
            parameter.to_local().untyped_storage().nbytes()
            == parameter.to_local().nbytes
        )
    assert module.weight.note == "kept"
    assert module.view.data_ptr() == module.again.data_ptr() != module.weight.data_ptr()
    assert isinstance(module.table, DTensor)
    assert not isinstance(module.table, nn.Parameter)
    assert torch.equal(module.bias, real.bias)  # plain among distributed ones


class Conventional(nn.Module):
    """A module that can be initialised anew, and whose parameters another one may share."""

    def __init__(self, weight=None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(7, 3)) if weight is None else weight
        self.scale = nn.Parameter(torch.empty(3))
        self.register_buffer("steps", torch.full((2,), 4.0))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.xavier_normal_(self.weight)
        nn.init.uniform_(self.scale, 1, 2)
        self.steps.zero_()


@on_ranks(4)
def test_without_a_tape_modules_reset_themselves():
    platform, mesh = (
        get_platform(),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
    )

    def make():
        first = Conventional()
        return nn.Sequential(first, nn.Linear(3, 5), Conventional(first.weight))

    def initialised(*how):
        with torch.device("meta"):
            module = make()
        module[0].steps = module[2].steps = torch.full((2,), 9.0)
        if how:
            distribute(module, mesh, *how)
        torch.manual_seed(3)
        platform.init_parameters(module, 0)
        return module

    for how in ((1, "set_layout"), (5, "distribute_tensor")):
        module = initialised(*how)
        check_same(module, initialised())
        assert module[2].weight is module[0].weight
        assert module[0].steps.tolist() == [9.0, 9.0]  # what has data keeps it
    late = nn.Sequential(Conventional())
    late[0].weight = module[
        0
    ].weight  # initialised already, but now beside one that is not
    late[0].scale = nn.Parameter(
        distribute_tensor(torch.empty(3, device="meta"), mesh, [Shard(0), Replicate()])
    )
    before = module[0].weight.to_local().detach().clone()
    platform.init_parameters(late, 0)
    assert late[0].weight is module[0].weight
    assert torch.equal(before, module[0].weight.to_local())
    assert late[0].scale.full_tensor().ge(1).all()
    lost = nn.Module()
    lost.weight = nn.Parameter(
        distribute_tensor(torch.empty(3, device="meta"), mesh, [Shard(0), Replicate()])
    )
    with pytest.raises(
        ValueError,
        match=r"nobody knows how to initialise weight: .*define reset_parameters\(\)",
    ):
        platform.init_parameters(lost, 0)


# --- memory


class Stack(nn.Module):
    """Layers that are drawn by themselves, then by the model, then scaled by it."""

    def __init__(self, layers, width, again):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(width, width, bias=False) for _ in range(layers)]
        )
        for layer in self.layers:
            again(layer.weight)
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.div_(layers)


def only_scale(weight):
    pass


@on_ranks(4)
def test_no_more_than_one_whole_parameter_is_held():
    platform, mesh = get_platform(), init_device_mesh("cpu", (4,))
    layers, width = 12, 64
    for again in (nn.init.normal_, nn.init.trunc_normal_, nn.init.zeros_, only_scale):
        torch.manual_seed(2)
        real = Stack(layers, width, again)
        torch.manual_seed(2)
        with platform.init_on_device(platform.meta_device):
            module = Stack(layers, width, again)
        distribute(module, mesh, 1, "distribute_tensor")
        gc.collect()
        with LiveBytes() as live:
            platform.init_parameters(module, 0)
        check_same(module, real)
        shards = sum(parameter.to_local().nbytes for parameter in module.parameters())
        with (
            LiveBytes() as alone
        ):  # one parameter, and what torch needs for a moment to draw it
            again(torch.empty(width, width).fill_(0))
        assert live.peak - shards <= alone.peak + 100, again


# --- loading


@on_ranks(4)
def test_loading_full_local_and_distributed_data():
    platform = get_platform()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = init_device_mesh("cpu", (4,))
    data = torch.arange(40.0).view(8, 5)
    for placed in (
        [Shard(0), Shard(0)],
        [Shard(1), Shard(0)],
        [Replicate(), Shard(1)],
        (("tp", "dp"), "None"),
    ):
        parameter = nn.Parameter(distribute_tensor(torch.zeros(8, 5), mesh, placed))
        shard, memory = parameter.to_local(), parameter.to_local().data_ptr()
        given = {
            "full": data,
            "numpy": data.double().numpy(),
            "local": data[parameter.layout.local_slices((8, 5))],
            "same layout": distribute_tensor(data, mesh, placed),
            "other order": distribute_tensor(
                data, mesh, [Shard(0), Shard(0)]
            ),  # shards of the same shape, elsewhere
            "other mesh": distribute_tensor(data, flat, [Shard(0)]),
            "parameter": nn.Parameter(
                distribute_tensor(data, mesh, [Replicate(), Shard(0)])
            ),
        }
        for kind, source in given.items():
            platform.load_into_param(parameter, source)
            assert torch.equal(parameter.detach().full_tensor(), data), (kind, placed)
            assert parameter.to_local() is shard
            assert shard.data_ptr() == memory
            assert parameter.is_leaf
            with torch.no_grad():
                shard.zero_()
    plain = nn.Parameter(torch.zeros(8, 5))
    platform.load_into_param(plain, distribute_tensor(data, mesh, [Shard(0), Shard(1)]))
    assert torch.equal(plain, data)
    with pytest.raises(
        ValueError, match=r"data of shape \(8, 4\) does not fit \(8, 5\)"
    ):
        platform.load_into_param(
            parameter, distribute_tensor(data[:, :4], mesh, [Shard(0), Shard(0)])
        )
    with pytest.raises(
        ValueError,
        match=r"data of shape \(7, 5\) fits neither of \[\(2, 5\), \(8, 5\)\]",
    ):
        platform.load_into_param(parameter, data[1:])
    empty = nn.Parameter(
        distribute_tensor(torch.empty(8, 5, device="meta"), mesh, [Shard(0), Shard(0)])
    )
    with pytest.raises(
        ValueError,
        match=r"shape \(8, 5\) is on the meta device .* call init_parameters",
    ):
        platform.load_into_param(empty, data)


@on_ranks(2)
def test_distributed_parameters_by_name():
    platform, mesh = get_platform(), init_device_mesh("cpu", (2,))
    model = Tied()
    found = platform.search_parameter_by_name(model, "self.head.weight")
    assert found[:2] == (model.head, "weight")
    new = distribute_tensor(found[2], mesh, [Shard(1)])
    platform.update_parameter_by_name(model, found, new)  # a tensor becomes a parameter
    owner, name, parameter = platform.search_parameter_by_name(model, "embed.weight")
    assert isinstance(parameter, nn.Parameter)
    assert isinstance(parameter, DTensor)
    assert parameter.requires_grad
    assert (owner, name) == (model.embed, "weight")
    assert model.head.weight is parameter
    assert platform.get_param_local_shape(parameter) == (11, 2 - platform.get_rank())
    assert (
        platform.get_param_local_data(parameter).data_ptr() == new.to_local().data_ptr()
    )
    assert isinstance(model.state_dict()["head.weight"], DTensor)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert any(
        p is parameter for group in optimizer.param_groups for p in group["params"]
    )
    platform.update_parameter_by_name(
        model, (owner, name, parameter), torch.ones(11, 3)
    )  # and back
    assert not isinstance(model.head.weight, DTensor)
    assert model.head.weight is model.embed.weight


@on_ranks(2)
def test_a_module_without_data_is_distributed_and_then_drawn():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(7)
    one = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 5), nn.LayerNorm(5))
    expected = one.state_dict()
    torch.manual_seed(7)
    with init_empty_weights():
        many = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 5), nn.LayerNorm(5))
    assert all(p.is_meta for p in many.parameters())

    def rows(_, module, mesh):
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(
                module,
                name,
                nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])),
            )

    distribute_module(many, mesh, rows)
    assert all(p.is_meta for p in many.parameters())
    init_parameters(many)
    for name, parameter in many.state_dict().items():
        assert parameter.placements == (Shard(0),)
        assert torch.equal(parameter.full_tensor(), expected[name]), name
    with init_on_device("cpu", include_buffers=True):
        assert not nn.BatchNorm1d(3).running_mean.is_meta
