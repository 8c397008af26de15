# SPDX-License-Identifier: Apache-2.0
"""Models and ranks that are not there, on which plans are found."""

import pytest
import torch
from torch import nn

from hyper_parallel import DeviceMesh, get_platform
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.core.dtensor.placement_types import Partial, Replicate, Shard

platform = get_platform()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.ones(4))
        self.angles = torch.ones(4)  # neither a parameter nor a buffer


def test_a_copy_has_shapes_and_ties_and_no_data():
    model = Tied()
    copied = platform.copy_without_data(model)
    assert copied.head.weight is copied.table.weight
    tensors = [copied.head.weight, copied.scale, copied.angles]
    assert all(platform.is_meta(one) for one in tensors)
    assert isinstance(copied.head.weight, nn.Parameter)
    assert copied.head.weight.shape == (8, 4)
    assert not platform.is_meta(model.head.weight)


@pytest.mark.parametrize(
    ("placement", "target", "expected"),
    [
        (Partial(), Replicate(), "all_reduce"),
        (Partial(), Shard(0), "reduce_scatter_tensor"),
        (Shard(0), Replicate(), "all_gather_into_tensor"),
        (Shard(0), Shard(1), "all_to_all_single"),
    ],
)
def test_simulated_ranks_count_collectives_and_send_nothing(
    placement, target, expected
):
    with platform.simulate_ranks():
        mesh = DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("tp",))
        local = torch.zeros(4, 8) if placement.is_partial() else torch.zeros(1, 8)
        tensor = DTensor.from_local(local, mesh, [placement])
        with CommunicationLedger(mesh) as ledger:
            moved = tensor.redistribute(mesh, [target])
    assert ledger.counts() == {expected: 1}
    assert ledger.entries[0].axis == "tp"
    assert tuple(moved.shape) == (4, 8)
    assert platform.is_meta(moved.to_local())


def test_numbers_that_code_reads_are_guessed():
    with platform.simulate_ranks():
        mask = torch.ones(4, dtype=torch.bool)
        assert mask.all()
        assert not torch.isnan(torch.zeros(4)).any()
        assert torch.zeros(1).item() == 1
        assert len(mask.nonzero()) == 4
    with pytest.raises(RuntimeError):
        torch.zeros(1, device="meta").item()


def test_the_platform_is_itself_again_after_an_error():
    kind = type(platform)
    with pytest.raises(KeyError), platform.simulate_ranks():
        assert type(platform) is not kind
        raise KeyError
    assert type(platform) is kind
    assert platform.get_world_size() == 1


def test_functions_are_heard():
    heard = []
    with platform.listen_to_functions(lambda name, args, _: heard.append((name, args))):
        x = torch.ones(2)
        (x + x).chunk(2)
    assert [name for name, _ in heard] == ["ones", "add", "chunk"]
