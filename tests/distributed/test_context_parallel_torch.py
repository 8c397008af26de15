# SPDX-License-Identifier: Apache-2.0
"""Attention of distributed tensors whose sequence is sharded, in every method, against one device."""

import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from torch.nn.attention import SDPBackend, sdpa_kernel

from hyper_parallel import (
    CommunicationLedger,
    DTensor,
    Replicate,
    Shard,
    ZigzagShard,
    distribute_tensor,
    init_device_mesh,
    strict,
)
from hyper_parallel.core.context_parallel import (
    attention_method,
    document_ids_of,
    kernel,
)
from hyper_parallel.testing import on_ranks

R = Replicate()
METHODS = [
    {"method": "allgather"},
    {"method": "ring"},
    {"method": "ulysses"},
    {"method": "ring", "ulysses_degree": 2},
    {"method": "allgather", "ulysses_degree": 2},
]
PLACEMENTS = [Shard(2), ZigzagShard(2)]
BYTES = []  # that forward received, call by call


def drawn(*shapes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, dtype=dtype, generator=generator) for s in shapes]


def qkv(heads=4, of_keys=2, size=12, keys=None, batch=2):
    keys = size if keys is None else keys
    return drawn(
        (batch, heads, size, 4), (batch, of_keys, keys, 4), (batch, of_keys, keys, 4)
    )


def alone(operands, **how):
    """Output and gradients on one device; the weights of the loss are drawn."""
    leaves = [x.clone().requires_grad_() for x in operands]
    output = F.scaled_dot_product_attention(*leaves, enable_gqa=True, **how)
    (output * weights_like(output)).sum().backward()
    return [output.detach(), *(x.grad for x in leaves)]


def weights_like(output):
    return drawn((1,), tuple(output.shape))[1].to(output.dtype)


def together(operands, mesh, placements, method, mask=None, **how):
    """The same on the mesh: (whole output and gradients, the collectives of forward, of backward)."""
    leaves = [
        distribute_tensor(x, mesh, placements).detach().requires_grad_()
        for x in operands
    ]
    with attention_method(**method), CommunicationLedger(mesh) as ledger, strict():
        output = F.scaled_dot_product_attention(
            *leaves, attn_mask=mask, enable_gqa=True, **how
        )
        (output.to_local() * part(output)).sum().backward()
    assert output.placements == leaves[0].placements
    for leaf in leaves:
        assert leaf.grad.placements == leaf.placements
    found = [output, *(leaf.grad for leaf in leaves)]
    counts = ledger.counts(backward=False), ledger.counts(backward=True)
    BYTES.append(ledger.nbytes(backward=False))
    return [x.detach().full_tensor() for x in found], *counts


def part(output):
    return distribute_tensor(
        weights_like(output), output.device_mesh, output.placements
    ).to_local()


def close(found, expected, tolerance=1e-12):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@on_ranks(4)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_output_and_gradients_are_those_of_one_device(method):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    for placement, is_causal, size in itertools.product(
        PLACEMENTS, (True, False), (12, 7)
    ):
        operands = qkv(size=size)
        found, *_ = together(operands, mesh, [placement], method, is_causal=is_causal)
        close(found, alone(operands, is_causal=is_causal))


@on_ranks(4)
def test_communication_is_counted():
    """Of the four ways to move keys, what each costs and no more."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    p2p = {"isend": 3, "irecv": 3}
    expected = [
        ({"all_gather_into_tensor": 2}, {"reduce_scatter_tensor": 2}),
        (p2p, {"isend": 3 + 4, "irecv": 3 + 4}),
        ({"all_to_all_single": 4}, {"all_to_all_single": 4}),
    ]
    for method, counts in zip(METHODS, expected, strict=False):
        for placement in PLACEMENTS:
            operands = qkv(of_keys=4, size=16)
            _, *found = together(operands, mesh, [placement], method, is_causal=True)
            assert found == list(counts), method
    # Gathering and passing on move the same: the keys and values of all other ranks.
    assert BYTES[-6:-2] == [2 * operands[1].nbytes * 3 // 4] * 4
    both = {"all_to_all_single": 4, "isend": 1, "irecv": 1}
    _, forward, backward = together(operands, mesh, PLACEMENTS[:1], METHODS[3])
    assert forward == both
    assert backward == {"all_to_all_single": 4, "isend": 3, "irecv": 3}


@on_ranks(4)
def test_beside_tensor_and_data_parallel():
    for shape, names, others in (
        ((2, 2), ("cp", "tp"), [Shard(1)]),
        ((2, 2), ("dp", "cp"), [Shard(0)]),
    ):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for placement, method in itertools.product(PLACEMENTS, METHODS[:3]):
            where = [placement, *others] if names[0] == "cp" else [*others, placement]
            operands = qkv(heads=8, of_keys=4, size=9)
            found, *_ = together(operands, mesh, where, method, is_causal=True)
            close(found, alone(operands, is_causal=True))


@on_ranks(4)
def test_heads_of_which_some_ranks_have_fewer_or_none():
    """Where these cannot be exchanged, all ranks are told, also those whose own heads could be."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    where = [Shard(2), Shard(1)]
    for heads in (1, 3):
        operands = qkv(heads=heads, of_keys=heads, size=7)
        for method in METHODS[:2]:
            found, *_ = together(operands, mesh, where, method, is_causal=True)
            close(found, alone(operands, is_causal=True))
        with pytest.raises(ValueError, match="1 heads of queries cannot be divided"):
            together(operands, mesh, where, {"method": "ulysses"})


@on_ranks(4)
def test_a_sequence_on_two_axes():
    """Heads are exchanged along the last axis, keys travel along the first."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("co", "ds"))
    for method in METHODS:
        operands = qkv(size=10)
        found, *_ = together(
            operands, mesh, [Shard(2), Shard(2)], method, is_causal=True
        )
        close(found, alone(operands, is_causal=True))


@on_ranks(4)
def test_masks_are_never_replaced_by_causal():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    operands = qkv(size=10)
    generator = torch.Generator().manual_seed(3)
    drawn_mask = torch.randn(2, 4, 10, 10, generator=generator, dtype=torch.float64)
    window = torch.ones(10, 10).tril().triu(-3).bool()
    padding = torch.arange(10) < torch.tensor([7, 10])[:, None, None, None]
    masks = window, drawn_mask, drawn_mask[:, :1] > 0, padding, drawn_mask[0]
    for mask, method in itertools.product(masks, METHODS[1:4]):
        expected = alone(operands, attn_mask=mask)
        given = [distribute_tensor(mask, mesh, [R])]
        if mask.shape[-2] > 1:
            dim = mask.ndim - 2
            given += [
                distribute_tensor(mask, mesh, [kind(dim)])
                for kind in (Shard, ZigzagShard)
            ]
            given.append(given[-1].to_local())  # this rank's rows, as the queries lie
        for one in (*given, mask):
            found, *_ = together(operands, mesh, [ZigzagShard(2)], method, mask=one)
            close(found, expected)
    wrong = torch.ones(7, 7, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"plain mask of shape \(7, 7\)"):
        together(operands, mesh, [Shard(2)], METHODS[0], mask=wrong)


@on_ranks(2)
def test_rows_that_see_nothing_give_zeros():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    operands = qkv(size=6)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    mask[0], mask[4] = False, False
    for method in METHODS[:3]:
        (output, of_query, *others), *_ = together(
            operands, mesh, [Shard(2)], method, mask=distribute_tensor(mask, mesh, [R])
        )
        assert not output[:, :, [0, 4]].any()
        assert not of_query[:, :, [0, 4]].any()
        assert all(x.isfinite().all() for x in others)


@on_ranks(4)
def test_windows_and_documents():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    operands, position = qkv(size=11), torch.arange(11)
    distance = position[None] - position[:, None]
    ids = torch.tensor([[0] * 5 + [1] * 6, [2, 2, -1, 4, 4, 4, -1, 4, 4, 3, -1]])
    same = (ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, :, None]
    borders = [0, 0, 1, 6, 9]
    of_borders = torch.bucketize(position, torch.tensor(borders[1:]), right=True)
    of_borders[9:] = -1
    packed = (of_borders[:, None] == of_borders) & (of_borders >= 0)[:, None]
    cases = [
        ({"window": 2}, True, (distance <= 0) & (distance >= -2)),
        ({"window": (1, 3)}, False, (distance <= 3) & (distance >= -1)),
        ({"document_ids": ids}, True, (same & (distance <= 0))[:, None]),
        ({"cu_seqlens": borders}, False, packed),
        (
            {"cu_seqlens": torch.tensor(borders), "window": 2},
            True,
            packed & (distance <= 0) & (distance >= -2),
        ),
    ]
    for (how, is_causal, mask), method, placement in itertools.product(
        cases, METHODS[:4], PLACEMENTS
    ):
        expected = alone(operands, attn_mask=mask)
        expected = [x.nan_to_num(0.0) for x in expected]
        found, *_ = together(
            operands, mesh, [placement], {**method, **how}, is_causal=is_causal
        )
        close(found, expected)


@on_ranks(4)
def test_documents_beside_a_mask_and_from_positions():
    """What is hidden by either is hidden; documents of positions that begin again."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    operands = qkv(size=9)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0], [0, 0, 1, 2, 3, 4, 5, 6, 7]])
    ids = document_ids_of(positions)
    assert ids.tolist() == [[0, 0, 0, 1, 1, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1, 1, 1, 1]]
    given = torch.randn(9, 9, generator=torch.Generator().manual_seed(5)) > -0.5
    given |= torch.eye(9, dtype=torch.bool)
    mask = (ids[:, :, None] == ids[:, None]) & given & torch.ones(9, 9).triu(-4).bool()
    expected = alone(operands, attn_mask=mask[:, None])
    how = {"document_ids": ids, "window": (4, None)}
    for method in METHODS[:4]:
        spread = distribute_tensor(given, mesh, [R])
        found, *_ = together(
            operands, mesh, [ZigzagShard(2)], {**method, **how}, mask=spread
        )
        close(found, expected)


@on_ranks(4)
def test_other_ranks_and_dims():
    """Cross attention with keys of another length, one head, no batch, and head dims of 1."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    operands = qkv(size=6, keys=9)
    for method in METHODS:
        found, *_ = together(operands, mesh, [Shard(2)], method)
        close(found, alone(operands))
    flat = [x[0] for x in qkv(size=6)]
    for method in METHODS[:2]:
        found, *_ = together(flat, mesh, [Shard(1)], method, is_causal=True)
        close(found, alone(flat, is_causal=True))
    small = [x[..., :1] for x in qkv(size=6)]
    found, *_ = together(small, mesh, [Shard(2)], METHODS[1], is_causal=True)
    close(found, alone(small, is_causal=True))


@on_ranks(4)
def test_low_precision_is_as_exact_as_on_one_device():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    operands = [x.bfloat16() for x in qkv(size=64)]
    exact = alone([x.double() for x in operands], is_causal=True)

    def errors(found):
        return [(a - b).abs() for a, b in zip(found, exact, strict=True)]

    of_one = errors(alone(operands, is_causal=True))
    for method, placement in itertools.product(METHODS, PLACEMENTS):
        found, *_ = together(operands, mesh, [placement], method, is_causal=True)
        assert all(x.dtype is torch.bfloat16 for x in found)
        for error, own in zip(errors(found), of_one, strict=True):
            assert error.mean() < 1.25 * own.mean()
            assert error.max() < 4 * own.max()  # the last digit of a large number


@on_ranks(2)
def test_where_the_user_asks_for_plain_math():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    operands = qkv(size=7)
    for method in METHODS[:3]:
        with sdpa_kernel(SDPBackend.MATH):
            found, *_ = together(operands, mesh, [Shard(2)], method, is_causal=True)
            close(found, alone(operands, is_causal=True))


@on_ranks(2)
def test_what_a_method_cannot_do_is_an_error():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    operands = qkv(heads=3, of_keys=3, size=4)
    with pytest.raises(ValueError, match="3 heads of queries .* 2 ranks"):
        together(operands, mesh, [Shard(2)], {"method": "ulysses"})
    with pytest.raises(NotImplementedError, match=r"dropout_p=0\.1"):
        together(operands, mesh, [Shard(2)], METHODS[0], dropout_p=0.1)
    with pytest.raises(ValueError, match="'p2p'"):
        attention_method("p2p")
    with pytest.raises(ValueError, match="2 ranks .* groups of 3"):
        together(operands, mesh, [Shard(2)], {"method": "ring", "ulysses_degree": 3})
    with pytest.raises(NotImplementedError, match="window"):
        together(operands, mesh, [R], {"window": 2})
    with pytest.raises(ValueError, match="documents of 3 positions"):
        together(operands, mesh, [Shard(2)], {"document_ids": [[0, 0, 1]]})
    with pytest.raises(ValueError, match="cumulative"):
        attention_method(cu_seqlens=[3, 1])
    leaf = distribute_tensor(operands[0], mesh, [Shard(2)]).requires_grad_()
    with attention_method("ring"):
        output = F.scaled_dot_product_attention(leaf, leaf, leaf)
    with pytest.raises(NotImplementedError, match="gradients of gradients"):
        torch.autograd.grad(output.sum(), leaf, create_graph=True)


@on_ranks(2)
def test_calls_that_the_rule_does_as_well_are_left_to_it():
    """A whole sequence, keys that every rank or every row has, batches of several dims, and masks that are trained."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    operands = qkv(size=6)
    expected = alone(operands)
    for placements in ([R], [Shard(1)]):
        found, forward, _ = together(operands, mesh, placements, METHODS[1])
        close(found, expected)
        assert not forward
    query, key, value = operands
    leaves = [
        distribute_tensor(x, mesh, [p]).requires_grad_()
        for x, p in ((query, Shard(2)), (key, R), (value, R))
    ]
    with attention_method("ring"), CommunicationLedger(mesh) as ledger:
        output = F.scaled_dot_product_attention(*leaves, enable_gqa=True)
        (output.to_local() * part(output)).sum().backward()
    close(
        [x.full_tensor() for x in (output.detach(), *(x.grad for x in leaves))],
        expected,
    )
    assert not ledger.counts(backward=False)
    one_batch = [query, key[:1], value[:1]]
    shards = [distribute_tensor(x, mesh, [Shard(2)]) for x in one_batch]
    with attention_method("ring"):
        output = F.scaled_dot_product_attention(*shards, enable_gqa=True)
    close([output.full_tensor()], alone(one_batch)[:1])
    many_dims = drawn(*[(2, 3, 2, 6, 4)] * 3)
    mask = drawn((2, 1, 2, 6, 6))[0]
    shards = [distribute_tensor(x, mesh, [Shard(3)]) for x in many_dims]
    with attention_method("ring"):
        output = F.scaled_dot_product_attention(*shards, attn_mask=mask)
    close([output.full_tensor()], alone(many_dims, attn_mask=mask)[:1])
    with pytest.raises(NotImplementedError, match="up to 4 dims"):
        together(many_dims, mesh, [Shard(3)], {"document_ids": [[0] * 6] * 2})
    bias = drawn((6, 6))[0]
    trained = bias.clone().requires_grad_()
    output = F.scaled_dot_product_attention(
        *operands, attn_mask=trained, enable_gqa=True
    )
    (output * weights_like(output)).sum().backward()
    spread = distribute_tensor(bias, mesh, [R]).requires_grad_()
    shards = [distribute_tensor(x, mesh, [ZigzagShard(2)]) for x in operands]
    with attention_method("ring"):
        output = F.scaled_dot_product_attention(
            *shards, attn_mask=spread, enable_gqa=True
        )
    (output.to_local() * part(output)).sum().backward()
    close([spread.grad.full_tensor()], [trained.grad])


@on_ranks(1)
def test_one_rank_communicates_nothing():
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    operands = qkv(size=5)
    for placement, method in itertools.product(PLACEMENTS, METHODS[:3]):
        found, *counts = together(operands, mesh, [placement], method, is_causal=True)
        close(found, alone(operands, is_causal=True))
        assert counts == [{}, {}]


@on_ranks(2)
def test_the_context_ends_with_an_error():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    query, key, value = (
        distribute_tensor(x, mesh, [Shard(2)]) for x in qkv(of_keys=4, size=4)
    )
    with pytest.raises(RuntimeError, match="anything"), attention_method("ring"):
        raise RuntimeError("anything")
    with CommunicationLedger(mesh) as ledger:
        result = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert isinstance(result, DTensor)
    assert "isend" not in ledger.counts()


@on_ranks(2)
@pytest.mark.parametrize("part", [kernel.Merged, kernel.Gradients])
def test_after_an_error_within_attention_the_next_call_is_right(part):
    """What was on its way from rank to rank has arrived, and is not taken for something else."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    operands = qkv(size=300)
    expected = alone(operands, is_causal=True)

    def fail(*_):
        raise RuntimeError("in the middle")

    for method in METHODS[:3]:
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(part, "add", fail)
            with pytest.raises(RuntimeError, match="in the middle"):
                together(operands, mesh, [Shard(2)], method, is_causal=True)
        found, *_ = together(operands, mesh, [Shard(2)], method, is_causal=True)
        close(found, expected)
