# SPDX-License-Identifier: Apache-2.0
"""The styles for attention modules, the context for plain models, and the helpers that shard a batch."""

import copy
import itertools
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from torch import nn
from torch.distributed import all_reduce

from hyper_parallel import (
    AsyncContextParallel,
    CommunicationLedger,
    ContextParallel,
    PipelineStage,
    Schedule1F1B,
    fully_shard,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.activation_checkpoint import checkpoint_wrapper
from hyper_parallel.core.context_parallel import (
    context_parallel,
    context_parallel_unshard,
    local_positions,
    set_rotate_method,
    shard_buffers,
    shift_labels,
    unshard_buffers,
)
from hyper_parallel.core.dtensor.modes import MODES
from hyper_parallel.testing import on_ranks

HEADS, KEYS, DIM, VOCAB, SIZE = 4, 2, 4, 16, 16
WIDTH = HEADS * DIM


class Core(nn.Module):
    """Attention of (batch, sequence, heads, head_dim)."""

    def forward(self, q, k, v, mask=None):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        how = {"is_causal": True} if mask is None else {"attn_mask": mask}
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **how)
        return y.transpose(1, 2)


class Block(nn.Module):
    def __init__(self, keys=KEYS):
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, keys * DIM), nn.Linear(WIDTH, keys * DIM)
        self.core, self.out = Core(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask=None):
        q, k, v = (w(x).unflatten(-1, (-1, DIM)) for w in (self.q, self.k, self.v))
        return x + self.out(self.core(q, k, v, mask).flatten(2))


class Model(nn.Module):
    """Whose positions are given: with ``arange`` of its part it would be wrong."""

    def __init__(self, keys=KEYS):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SIZE, WIDTH)
        self.blocks = nn.ModuleList(Block(keys) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, positions, mask=None):
        x = self.tokens(ids) + self.places(positions)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def new(keys=KEYS):
    torch.manual_seed(0)
    return Model(keys).double()


def batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (2, SIZE), generator=generator)
    labels = shift_labels(ids)
    labels[0, SIZE // 2 :] = -100  # more on the last ranks
    return {"ids": ids, "labels": labels}


def summed_loss(logits, labels, valid):
    """This rank's terms of the mean over all valid tokens."""
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return losses / valid


def alone(model, mask=None):
    given = batch()
    logits = model(given["ids"], torch.arange(SIZE), mask)
    loss = summed_loss(logits, given["labels"], (given["labels"] >= 0).sum())
    loss.backward()
    return loss.detach()


def compare(model, one, loss, expected):
    """What ranks have is a part of the loss and of each gradient."""
    total = loss.detach().clone()
    all_reduce(total)
    torch.testing.assert_close(total, expected)
    for (name, p), q in zip(model.named_parameters(), one.parameters(), strict=True):
        grad = p.grad.clone()
        all_reduce(grad)
        torch.testing.assert_close(grad, q.grad, msg=name)


def part_of_loss(model, mesh, load_balance, mask=None):
    parts = shard_buffers(batch(), mesh, load_balance=load_balance)
    positions = local_positions(SIZE, mesh, load_balance=load_balance)
    valid = (batch()["labels"] >= 0).sum()
    logits = model(parts["ids"], positions, mask)
    return summed_loss(logits, parts["labels"], valid)


STYLES = [
    {},
    {"ulysses_degree": 1},
    {"ulysses_degree": 1, "rotate_method": "alltoall"},
    {"ulysses_degree": 2},
    {"ulysses_degree": 2, "rotate_method": "alltoall"},
]


@on_ranks(4)
@pytest.mark.parametrize("style", STYLES, ids=str)
def test_attention_modules_of_a_plain_model(style):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    window = torch.ones(SIZE, SIZE).tril().triu(-5).bool()
    for load_balance, mask in itertools.product((False, True), (None, window)):
        one = new()
        expected = alone(one, mask)
        many = new()
        how = ContextParallel(**style, load_balance=load_balance)
        parallelize_module(many, mesh, {"blocks.*.core": how})
        loss = part_of_loss(many, mesh, load_balance, mask)
        loss.backward()
        compare(many, one, loss, expected)
    assert not MODES.overrides


@on_ranks(4)
@pytest.mark.parametrize("keys", [4, 2])
def test_exchanges_that_begin_with_the_projections(keys):
    """All four exchanges of a layer, three of which begin before attention; not where heads of keys do not divide."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    for load_balance in (False, True):
        one, many = new(keys), new(keys)
        expected = alone(one)
        for block in many.blocks:
            style = AsyncContextParallel(load_balance=load_balance)
            style.apply(block.core, mesh, block.q, block.k, block.v)
        ledgers, begun = [CommunicationLedger(mesh) for _ in range(2)], []

        def count(*_, ledgers=ledgers, begun=begun):
            begun.append(len(ledgers[-1 if ledgers[-1].entries else 0].entries))

        many.blocks[1].core.register_forward_pre_hook(count, prepend=True)
        for ledger in ledgers:
            many.zero_grad()
            with ledger:
                if keys == 2 and not begun:
                    with pytest.warns(UserWarning, match="exchanges begin when"):
                        loss = part_of_loss(many, mesh, load_balance)
                else:
                    loss = part_of_loss(many, mesh, load_balance)
                loss.backward()
            compare(many, one, loss, expected)
        assert ledger.counts() == {"all_to_all_single": 16}
        assert begun[-1] == (7 if keys == 4 else 4)


@on_ranks(2)
def test_early_exchanges_in_a_recomputed_block():
    """Some recomputations end before attention, when all that is needed is known."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    one, many = new(), new()
    expected = alone(one)
    for number, block in enumerate(many.blocks):
        style = AsyncContextParallel()
        style.apply(block.core, mesh, block.q, block.k, block.v)
        many.blocks[number] = checkpoint_wrapper(block)
    for _ in range(2):
        many.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss = part_of_loss(many, mesh, load_balance=False)
            loss.backward()
    many_grads = [p.grad.clone() for p in many.parameters()]
    for grad, q in zip(many_grads, one.parameters(), strict=True):
        all_reduce(grad)
        torch.testing.assert_close(grad, q.grad)
    total = loss.detach().clone()
    all_reduce(total)
    torch.testing.assert_close(total, expected)


@on_ranks(2)
def test_other_orders_of_dims_and_keywords():
    """Heads before the sequence, arguments by name, and distributed tensors out."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))

    class ByName(nn.Module):
        def forward(self, *, query, key, value):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(3, 1, 2, 8, 4, generator=generator, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(*whole, is_causal=True)
    names = ("query", "key", "value")
    for local in (None, False):
        style = ContextParallel(
            2, 1, None, (), names, load_balance=True, use_local_output=local
        )
        module = style.apply(ByName(), mesh)
        given = dict(zip(names, whole, strict=True))
        parts = shard_buffers(given, mesh, 2, load_balance=True)
        output = module(**parts)
        if local is None:
            output = unshard_buffers({"y": output}, mesh, 2, load_balance=True)["y"]
        else:
            output = output.full_tensor()
        torch.testing.assert_close(output, expected)
    assert repr(style).startswith("ContextParallel(seq_dim=2, head_dim=1, ")


@on_ranks(4)
def test_sharded_data_parallel_over_the_same_ranks():
    """Parameters are sharded over dp x cp, and gradients summed there."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    one, many = new(), new()
    expected = alone(one)
    for number, block in enumerate(many.blocks):
        ContextParallel(load_balance=True).apply(block.core, mesh["cp"])
        many.blocks[number] = checkpoint_wrapper(block)
    flat = mesh["dp", "cp"].flatten("dp_cp")
    for block in many.blocks:
        fully_shard(block, mesh=flat)
    fully_shard(many, mesh=flat)
    given = {name: x[mesh.get_local_rank("dp")][None] for name, x in batch().items()}
    parts = shard_buffers(given, mesh["cp"], load_balance=True)
    positions = local_positions(SIZE, mesh["cp"], load_balance=True)
    valid = (batch()["labels"] >= 0).sum()
    loss = summed_loss(many(parts["ids"], positions), parts["labels"], valid)
    (4 * loss).backward()  # gradients are averaged over the ranks
    total = loss.detach().clone()
    all_reduce(total)
    torch.testing.assert_close(total, expected)
    for p, q in zip(many.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


@on_ranks(4)
def test_a_mesh_of_two_axes():
    """Heads are exchanged along the last axis, keys and values travel along the first."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("co", "ds"))
    one, many = new(), new()
    expected = alone(one)
    for block in many.blocks:
        ContextParallel(ulysses_degree=2, load_balance=True).apply(block.core, mesh)
    with CommunicationLedger(mesh) as ledger:
        loss = part_of_loss(many, mesh.flatten(), load_balance=True)
    loss.backward()
    compare(many, one, loss, expected)
    axes = {(entry.collective, entry.axis) for entry in ledger.entries}
    assert axes == {("all_to_all_single", "ds"), ("all_gather_into_tensor", "co")}


class First(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.tokens, self.places = model.tokens, model.places
        self.blocks = model.blocks[:1]

    def forward(self, ids, positions):
        return self.blocks[0](self.tokens(ids) + self.places(positions))


class Last(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.blocks, self.head = model.blocks[1:], model.head

    def forward(self, x):
        return self.head(self.blocks[0](x))


@on_ranks(4)
def test_pipelines_of_sharded_sequences():
    """What stages send has the shape of a part."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))
    one, many = new(), new()
    expected = alone(one)
    stage = mesh.get_local_rank("pp")
    part = (First, Last)[stage](many)
    ContextParallel(load_balance=True).apply(part.blocks[0].core, mesh["cp"])
    parts = shard_buffers(batch(), mesh["cp"], load_balance=True)
    positions = local_positions(SIZE, mesh["cp"], load_balance=True)
    valid = (batch()["labels"] >= 0).sum()

    def loss_fn(logits, labels):
        return 2 * summed_loss(logits, labels, valid)  # of the mean over micro batches

    stages = PipelineStage(part, stage, 2, group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stages, 2, loss_fn=loss_fn)
    losses = []
    where = positions.expand(2, -1)
    given = (parts["ids"], where) if stage == 0 else ()
    schedule.step(*given, target=parts["labels"], losses=losses)
    group = mesh.get_group("cp")
    if losses:
        total = sum(losses).detach() / 2
        all_reduce(total, group=group)
        torch.testing.assert_close(total, expected)
    truth = dict((First, Last)[stage](one).named_parameters())
    for name, parameter in part.named_parameters():
        grad = parameter.grad.clone()
        all_reduce(grad, group=group)
        torch.testing.assert_close(grad, truth[name].grad)


@on_ranks(2)
def test_styles_refuse_what_they_cannot_do():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    for wrong in ({"seq_dim": 2}, {"seq_dim": "1"}, {"ulysses_degree": 0}):
        with pytest.raises(ValueError, match="must be"):
            ContextParallel(**wrong)
    with pytest.raises(ValueError, match="groups of 3"):
        ContextParallel(ulysses_degree=3).apply(Core(), mesh)
    with pytest.raises(ValueError, match="'p2p'"):
        ContextParallel(rotate_method="p2p")
    q = torch.zeros(1, 3, 2, 4)
    core = ContextParallel(load_balance=True).apply(Core(), mesh)
    with pytest.raises(ValueError, match="3 positions .* multiple of 4"):
        core(q, q, q)
    core = ContextParallel(qkv_indices=(5,)).apply(Core(), mesh)
    with pytest.raises(ValueError, match="got no tensor"):
        core(q, q, q)
    core = ContextParallel().apply(Core(), mesh)
    with pytest.raises(ValueError, match="has no dim 2"):
        core(q[0, 0], q[0, 0], q[0, 0])
    with pytest.raises(ValueError, match="3 heads"):
        core(*[torch.zeros(1, 3, 3, 4)] * 3)
    assert not MODES.overrides


# --- the context


@on_ranks(4)
@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
def test_plain_models_in_the_context(rotate):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    window = torch.ones(SIZE, SIZE).tril().triu(-5).bool()
    set_rotate_method(rotate)
    try:
        for mask in (None, window):
            one, many = new(), new()
            expected = alone(one, mask)
            given, positions = batch(), torch.arange(SIZE)
            ids, labels = given["ids"], given["labels"]
            rows = None if mask is None else mask.clone()
            buffers = [x for x in (ids, labels, positions, rows) if x is not None]
            dims = [1, 1, 0, 0][: len(buffers)]
            valid, before = (labels >= 0).sum(), [x.clone() for x in buffers]
            with context_parallel(
                mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers={ids}
            ):
                assert ids.shape == (2, SIZE // 4)
                logits = many(ids, positions, rows)
                loss = summed_loss(logits, labels, valid)
                loss.backward()
            compare(many, one, loss, expected)
            assert ids.shape == (2, SIZE // 4)
            for found, other in zip(buffers[1:], before[1:], strict=True):
                assert torch.equal(found, other)
            whole, back = context_parallel_unshard(mesh, [logits, ids], [1, 1])
            assert torch.equal(back, before[0])
            with torch.no_grad():
                torch.testing.assert_close(whole, one(before[0], positions, mask))
    finally:
        set_rotate_method("allgather")


@on_ranks(2)
def test_attention_without_causality_and_of_other_lengths():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 8, 4, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, 12, 4, generator=generator, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(q, k, v)
    buffers = [x.clone() for x in (q, k, v)]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]):
        part = F.scaled_dot_product_attention(*buffers)
        with pytest.raises(ValueError, match="4 queries and 6 keys"):
            F.scaled_dot_product_attention(*buffers, is_causal=True)
    [found] = context_parallel_unshard(mesh, [part], [2])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), expected)


@on_ranks(2)
def test_buffers_come_back_after_an_error():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    x = torch.arange(8)
    with (
        pytest.raises(RuntimeError, match="in the middle"),
        context_parallel(mesh, buffers=[x], buffer_seq_dims=[0]),
    ):
        assert x.tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]][mesh.get_local_rank()]
        raise RuntimeError("in the middle")
    assert torch.equal(x, torch.arange(8))
    with context_parallel(mesh):  # and there need be none
        pass


@on_ranks(2)
def test_the_context_refuses_what_would_go_wrong():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))

    def enter(*buffers, dims=None, **how):
        dims = [0] * len(buffers) if dims is None else dims
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims, **how):
            pass

    x = torch.zeros(8)
    for match, buffers, dims in (
        ("requires a gradient", [torch.zeros(8, requires_grad=True)], [0]),
        ("is a view", [torch.zeros(2, 8)[0]], [0]),
        ("is a view", [torch.zeros(8, 2).t()], [1]),
        ("multiple of 4.*pad it to 8", [torch.zeros(6)], [0]),
        ("no dim 1", [x], [1]),
        ("1 buffers .* 0 sequence dims", [x], []),
    ):
        with pytest.raises(ValueError, match=match):
            enter(*buffers, dims=dims)
    with pytest.raises(ValueError, match="not among the buffers"):
        enter(x, no_restore_buffers={torch.zeros(8)})
    with pytest.raises(RuntimeError, match="another context"), context_parallel(mesh):
        enter(x)
    problems = []

    def elsewhere():
        try:
            enter(x)
        except RuntimeError as error:
            problems.append(str(error))

    with context_parallel(mesh):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert "several threads" in problems[0]
    enter(x)
    with pytest.raises(ValueError, match="'p2p'"):
        set_rotate_method("p2p")
    with pytest.raises(ValueError, match="'ptrr'"):
        context_parallel_unshard(mesh, [x], [0], "ptrr")


@on_ranks(1)
def test_one_rank():
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    one, many = new(), new()
    expected = alone(one)
    with CommunicationLedger() as ledger, context_parallel(mesh):
        loss = part_of_loss(many, mesh, load_balance=True)
        loss.backward()
    assert not ledger.entries
    assert torch.equal(loss.detach(), expected)
    odd = torch.arange(7.0).reshape(1, 1, 7, 1).clone()
    with context_parallel(mesh, buffers=[odd], buffer_seq_dims=[2]):
        found = F.scaled_dot_product_attention(odd, odd, odd, is_causal=True)
    whole = F.scaled_dot_product_attention(odd, odd, odd, is_causal=True)
    torch.testing.assert_close(found, whole)
    with pytest.raises(ValueError, match="'ptrr'"):
        context_parallel_unshard(mesh, [expected], [0], "ptrr")


# --- helpers


@on_ranks(4)
def test_buffers_positions_and_labels_follow_the_balance():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    whole = {"ids": torch.arange(32).reshape(2, 16), "rotary": torch.randn(16, 3)}
    dims = {"ids": 1, "rotary": 0}
    for load_balance in (False, True):
        parts = shard_buffers(whole, mesh, dims, load_balance=load_balance)
        positions = local_positions(16, mesh, load_balance=load_balance)
        assert torch.equal(parts["ids"][0], positions)
        back = unshard_buffers(parts, mesh, dims, load_balance=load_balance)
        assert all(torch.equal(back[name], whole[name]) for name in whole)
    # The last token of a part has the first of the next as its label.
    labels = shift_labels(torch.arange(16)[None])
    part = shard_buffers({"labels": labels}, mesh, load_balance=True)["labels"]
    expected = positions + 1
    assert torch.equal(part[0], torch.where(expected < 16, expected, -100))
    with pytest.raises(ValueError, match="ids has 9 positions.* pad it to 16"):
        shard_buffers({"ids": torch.zeros(1, 9)}, mesh, load_balance=True)


# --- controls


def fault_restarting_positions(mesh):
    """Positions that begin at 0 on every rank."""
    many = new()
    parallelize_module(many, mesh, {"blocks.*.core": ContextParallel()})
    parts = shard_buffers(batch(), mesh)
    valid = (batch()["labels"] >= 0).sum()
    logits = many(parts["ids"], torch.arange(parts["ids"].shape[1]))
    return many, summed_loss(logits, parts["labels"], valid)


def fault_no_exchange(mesh):
    """Every rank attends to its own part."""
    many = new()
    return many, part_of_loss(many, mesh, load_balance=False)


def fault_mean_of_part(mesh):
    """A mean over the tokens of a part, where parts have other numbers of labels."""
    many = new()
    parallelize_module(many, mesh, {"blocks.*.core": ContextParallel()})
    parts = shard_buffers(batch(), mesh)
    logits = many(parts["ids"], local_positions(SIZE, mesh))
    labels = parts["labels"].flatten()
    return many, F.cross_entropy(logits.flatten(0, 1), labels) / mesh.size()


def fault_labels_shifted_in_parts(mesh):
    """The last token of each part has no label."""
    many = new()
    parallelize_module(many, mesh, {"blocks.*.core": ContextParallel()})
    parts = shard_buffers(batch(), mesh)
    labels = shift_labels(parts["ids"])
    logits = many(parts["ids"], local_positions(SIZE, mesh))
    return many, summed_loss(logits, labels, (batch()["labels"] >= 0).sum())


@on_ranks(2)
@pytest.mark.parametrize(
    "fault",
    [
        fault_restarting_positions,
        fault_no_exchange,
        fault_mean_of_part,
        fault_labels_shifted_in_parts,
    ],
)
def test_control_a_wrong_program_is_found(fault):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    one = new()
    expected = alone(one)
    many, loss = fault(mesh)
    loss.backward()
    with pytest.raises(AssertionError):
        compare(many, copy.copy(one), loss, expected)
