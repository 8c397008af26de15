# SPDX-License-Identifier: Apache-2.0
"""Unchanged models whose sequences are sharded, alone and beside tensor and data parallel, against one device."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it

from examples.llama.model import Config, Llama, Rotary
from examples.llama.plan import put_on_mesh
from hyper_parallel import (
    CommunicationLedger,
    DTensor,
    Shard,
    ZigzagShard,
    fully_shard,
    init_device_mesh,
    local_batch,
    loss_parallel,
    replicate,
    strict,
    verify,
)
from hyper_parallel.core.activation_checkpoint import checkpoint_wrapper
from hyper_parallel.core.context_parallel import kernel
from hyper_parallel.core.context_parallel.blocks import Visibility
from hyper_parallel.core.context_parallel.model import shard_sequence
from hyper_parallel.core.dtensor import routes
from hyper_parallel.core.dtensor.modes import MODES
from hyper_parallel.testing import on_ranks

VOCAB, BATCH, SIZE = 32, 2, 11
MESHES = {"cp": (4,), "cp tp": (2, 2), "dp cp": (2, 2)}


def llama():
    torch.manual_seed(0)
    config = Config(
        vocab=VOCAB, dim=16, layers=2, heads=4, kv_heads=2, hidden=24, context=16
    )
    model = Llama(config).double()
    for parameter in model.parameters():  # so that nothing is too small to be seen
        torch.nn.init.normal_(parameter, std=0.4)
    return model


def batch(size=SIZE):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (BATCH, size + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[0, size // 2 :] = -100  # many on the second rank
    return ids[:, :-1], labels


def loss_by_classes(model, ids, labels):
    return F.cross_entropy(model(ids).transpose(1, 2), labels, ignore_index=-100)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def close(found, expected, what=""):
    torch.testing.assert_close(
        whole(found.detach()),
        expected,
        rtol=1e-10,
        atol=1e-12,
        msg=lambda told: f"{what} {told}",
    )


def check(model, one, loss, expected):
    close(loss, expected.detach(), "loss")
    found = dict(model.named_parameters())
    assert found.keys() == dict(one.named_parameters()).keys()
    for name, parameter in one.named_parameters():
        assert found[name].grad.placements == found[name].placements
        assert parameter.grad.abs().max() > 1e-3
        close(found[name].grad, parameter.grad, name)


def spread(model, mesh, **how):
    """On all axes of the mesh that there are."""
    names = mesh.mesh_dim_names
    if "tp" in names:
        put_on_mesh(model, mesh)
    shard_sequence(model, mesh["cp"], **how)
    if "dp" in names:
        replicate(model, mesh["dp"])
    return model


def own_rows(mesh, *tensors):
    if "dp" not in mesh.mesh_dim_names:
        return tensors
    row = mesh.get_local_rank("dp")
    return [x[row : row + 1] for x in tensors]


@on_ranks(4)
@pytest.mark.parametrize("names", MESHES)
def test_llama_has_the_loss_and_gradients_of_one_device(names):
    mesh = init_device_mesh("cpu", MESHES[names], mesh_dim_names=tuple(names.split()))
    start = llama()
    ids, labels = batch()
    one = copy.deepcopy(start)
    expected = loss_by_classes(one, ids, labels)
    expected.backward()
    for how in (
        {"method": "ring"},
        {"method": "ring", "load_balance": True},
        {"method": "ulysses", "load_balance": True},
        {"method": "ring", "ulysses_degree": 2, "load_balance": True},
        {},
    ):
        many = spread(copy.deepcopy(start), mesh, **how)
        mine, own_labels = own_rows(mesh, ids, labels)
        with strict():
            loss = loss_by_classes(many, mine, local_batch(own_labels, many))
        loss.backward()
        check(many, one, loss, expected)


@on_ranks(4)
def test_a_data_axis_may_come_first():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    start = llama()
    ids, labels = batch()
    one = copy.deepcopy(start)
    expected = loss_by_classes(one, ids, labels)
    expected.backward()
    many = replicate(copy.deepcopy(start), mesh["dp"])
    shard_sequence(many, mesh["cp"], method="ring", load_balance=True)
    mine, own_labels = own_rows(mesh, ids, labels)
    loss = loss_by_classes(many, mine, local_batch(own_labels, many))
    loss.backward()
    check(many, one, loss, expected)


@on_ranks(4)
@pytest.mark.parametrize("batch_dim", [0, None])
def test_parameters_may_be_sharded_along_a_data_axis(batch_dim):
    """With whole batches the loss is that of all rows; else each data rank has the loss of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    ids, labels = batch()
    labels = labels.clamp(min=0)  # all rows have as many
    one = llama()
    expected = loss_by_classes(one, ids, labels)
    expected.backward()
    many = shard_sequence(llama(), mesh["cp"], method="ring", load_balance=True)
    for block in many.blocks:
        fully_shard(block, mesh=mesh["dp"], batch_dim=batch_dim)
    fully_shard(many, mesh=mesh["dp"], batch_dim=batch_dim)
    mine, own_labels = own_rows(mesh, ids, labels)
    logits = many(mine)
    loss = loss_by_classes(lambda _: logits, mine, local_batch(own_labels, many))
    loss.backward()
    if batch_dim == 0:
        check(many, one, loss, expected)
        return
    for found, parameter in zip(many.parameters(), one.parameters(), strict=True):
        close(found.grad, parameter.grad)


@on_ranks(2)
def test_only_keys_and_gradients_travel():
    """One exchange per layer, and one sum for all parameters; logits stay where they are."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    ids, labels = batch()
    for load_balance, placement in ((False, Shard(1)), (True, ZigzagShard(1))):
        many = spread(llama(), mesh, method="ring", load_balance=load_balance)
        with CommunicationLedger(mesh) as ledger:
            logits = many(ids)
            assert logits.placements == (placement,)
            loss = F.cross_entropy(logits.transpose(1, 2), local_batch(labels, many))
            loss.backward()
        forward, backward = ledger.counts(backward=False), ledger.counts(backward=True)
        assert forward == {"isend": 2, "irecv": 2}
        assert backward == {"isend": 6, "irecv": 6, "all_reduce": 1}


@on_ranks(2)
@pytest.mark.parametrize("ours", [True, False])
def test_recomputed_blocks_exchange_the_same(ours):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    ids, labels = batch()
    start, one = llama(), llama()
    expected = loss_by_classes(one, ids, labels)
    expected.backward()
    many = spread(start, mesh, method="ring", load_balance=True)
    for number, block in enumerate(many.blocks):
        if ours:
            many.blocks[number] = checkpoint_wrapper(block)
        else:
            block.forward = recomputed(block.attention, block)
    with CommunicationLedger(mesh) as ledger:
        loss = loss_by_classes(many, ids, local_batch(labels, many))
        loss.backward()
    close(loss, expected.detach())
    for found, parameter in zip(many.parameters(), one.parameters(), strict=True):
        close(found.grad, parameter.grad)
    assert ledger.counts()["isend"] == 2 + 2 + 6


def recomputed(attention_of_block, block):
    """The forward of a block as it is written with torch's own checkpoint."""

    def forward(x, rotary):
        x = x + torch.utils.checkpoint.checkpoint(
            attention_of_block, block.attention_norm(x), rotary, use_reentrant=False
        )
        return x + block.mlp(block.mlp_norm(x))

    return forward


@on_ranks(2)
def test_two_models_in_one_process():
    """With other methods and other numbers of heads, one after the other and with backward the other way round."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    ids, labels = batch()
    starts = [llama(), llama()]
    ones = [copy.deepcopy(start) for start in starts]
    expected = [loss_by_classes(one, ids, labels) for one in ones]
    sum(expected).backward()
    hows = [{"method": "ulysses"}, {"method": "ring", "load_balance": True}]
    many = [spread(start, mesh, **how) for start, how in zip(starts, hows, strict=True)]
    losses = [loss_by_classes(m, ids, local_batch(labels, m)) for m in many]
    for loss in reversed(losses):
        loss.backward()
    for model, one, loss, wanted in zip(many, ones, losses, expected, strict=True):
        check(model, one, loss, wanted)


@on_ranks(2)
def test_bad_calls_are_errors():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("cp", "tp"))
    with pytest.raises(ValueError, match="mesh of one axis"):
        shard_sequence(llama(), mesh)
    with pytest.raises(ValueError, match="groups of 3"):
        shard_sequence(llama(), mesh["cp"], ulysses_degree=3)
    with pytest.raises(ValueError, match="'p2p'"):
        shard_sequence(llama(), mesh["cp"], method="p2p")
    with pytest.raises(ValueError, match="at least 0"):
        shard_sequence(llama(), mesh["cp"], seq_dim=-1)
    many = shard_sequence(llama(), mesh["cp"])
    with pytest.raises(RuntimeError, match="in the middle"):
        many.blocks[1].register_forward_hook(fail)
        many(batch()[0])
    assert not MODES.overrides


def fail(*_):
    raise RuntimeError("in the middle")


# --- controls


def without_sum(monkeypatch):
    """Gradients of parameters are those of this rank's part."""
    monkeypatch.setattr(routes, "reduce_later", lambda local, *_: local.view_as(local))


def with_wrong_offset(monkeypatch):
    """Every rank takes its queries for one position later."""
    right = Visibility.blocks
    monkeypatch.setattr(
        Visibility,
        "blocks",
        lambda self, queries, keys: right(
            self, tuple((start + 1, size) for start, size in queries), keys
        ),
    )


def with_scale(monkeypatch):
    """What attention gives back is divided by the number of ranks."""
    right = kernel.Gradients.add

    def scaled(self, operands, blocks):
        of_key, of_value = right(self, operands, blocks)
        return of_key / 2, of_value / 2

    monkeypatch.setattr(kernel.Gradients, "add", scaled)


def with_restarting_positions(monkeypatch):
    """Rotary tables of every rank begin at position 0."""
    right = Rotary.forward

    def forward(self, x):
        if not isinstance(x, DTensor):
            return right(self, x)
        tables = SimpleNamespace(cos=local(self.cos), sin=local(self.sin))
        turned = right(tables, x.to_local())
        return DTensor.from_local(turned, x.device_mesh, x.placements, shape=x.shape)

    monkeypatch.setattr(Rotary, "forward", forward)


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def verified(mesh, ids, labels):
    """What `verify` says of the same step."""

    def loss(model, ids, labels):
        with loss_parallel():
            return loss_by_classes(model, ids, labels)

    def put(model, mesh):
        spread(model, mesh, method="ring")

    return verify(llama, put, mesh, (ids, labels), loss=loss)


FIRST = {  # what `verify` names
    "without_sum": "the gradient of 'head.weight', the first in backward",
    "with_wrong_offset": "'blocks.0.attention': what its own code hands to",
    "with_scale": "the gradient of 'blocks.1.attention.wv.weight', the first",
    "with_restarting_positions": "module 'rotary': its output",
}


@on_ranks(2)
@pytest.mark.parametrize(
    "fault",
    [without_sum, with_wrong_offset, with_scale, with_restarting_positions, None],
)
def test_control_a_fault_is_found(fault):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    ids, labels = batch(12)
    one = llama()
    expected = loss_by_classes(one, ids, labels)
    expected.backward()
    with pytest.MonkeyPatch.context() as monkeypatch:
        many = spread(llama(), mesh, method="ring")
        if fault is not None:
            fault(monkeypatch)
        loss = loss_by_classes(many, ids, local_batch(labels, many))
        loss.backward()
        report = verified(mesh, ids, labels)
    if fault is None:
        check(many, one, loss, expected)
        assert report.ok, str(report)
        return
    assert not report.ok
    assert FIRST[fault.__name__] in str(report)
    with pytest.raises(AssertionError):
        check(many, one, loss, expected)
