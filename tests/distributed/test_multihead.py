# SPDX-License-Identifier: Apache-2.0
"""nn.MultiheadAttention and the layers of transformers on meshes: results and all gradients against one process."""

import warnings

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from against_plain import check_gradients, check_results
from torch import nn

from hyper_parallel import (
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.core.dtensor.modes import strict
from hyper_parallel.testing import on_ranks

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
WIDTH, HEADS, BATCH, LENGTH, KEYS = 12, 4, 5, 3, 6


def drawn(*shape, seed=1):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def booleans(*shape):
    """Forbids some, but never the first key, so that none is without any."""
    mask = drawn(*shape, seed=9) > 0.3
    mask[..., 0] = False
    return mask


def cut_by(placements):
    """A function for distribute_module that cuts parameters by the ends of their names."""

    def cut(name, module, mesh):
        for key, parameter in list(module.named_parameters(recurse=False)):
            path = f"{name}.{key}"
            wanted = next(
                (p for end, p in placements.items() if path.endswith(end)),
                [R] * mesh.ndim,
            )
            setattr(
                module, key, nn.Parameter(distribute_tensor(parameter, mesh, wanted))
            )

    return cut


def compare(mesh, make, inputs, keywords, placements, inputs_placements):
    """A module on the mesh and in one process: results and the gradients of parameters and inputs."""
    torch.manual_seed(0)
    plain = make().double()
    torch.manual_seed(0)
    mine = distribute_module(make().double(), mesh, cut_by(placements))
    grads = plain.training and torch.is_grad_enabled()
    sources = [x.clone().requires_grad_(grads) for x in inputs]
    tensors = [
        distribute_tensor(x.clone(), mesh, p).requires_grad_(grads)
        for x, p in zip(inputs, inputs_placements, strict=True)
    ]
    masks = {
        key: distribute_tensor(value, mesh, [R] * mesh.ndim)
        if isinstance(value, torch.Tensor)
        else value
        for key, value in keywords.items()
    }
    with warnings.catch_warnings(), strict():
        warnings.simplefilter("error")
        found = mine(*of(plain, tensors), **masks)
    expected = plain(*of(plain, sources), **keywords)
    weights = [
        drawn(*true.shape, seed=20 + number)
        for number, true in enumerate(flat(expected))
    ]
    losses = check_results(flat(found), flat(expected), weights)
    if grads:
        pairs = [
            *zip(mine.parameters(), plain.parameters(), strict=True),
            *zip(tensors, sources, strict=True),
        ]
        check_gradients(losses, pairs)
    return found


def of(module, tensors):
    """Self-attention gets one tensor three times."""
    return (
        tensors * 3
        if isinstance(module, nn.MultiheadAttention) and len(tensors) == 1
        else tensors
    )


def flat(results):
    return [
        x
        for x in (results if isinstance(results, tuple) else (results,))
        if x is not None
    ]


HEADS_CUT = {"in_proj_weight": [S0], "in_proj_bias": [S0], "out_proj.weight": [S1]}
SEPARATE_CUT = {
    **{f"{x}_proj_weight": [S0] for x in "qkv"},
    "in_proj_bias": [S0],
    "out_proj.weight": [S1],
    "bias_k": [S2],
    "bias_v": [S2],
}
SELF = [(LENGTH, BATCH, WIDTH)]
CROSS = [(LENGTH, BATCH, WIDTH), (KEYS, BATCH, WIDTH), (KEYS, BATCH, WIDTH)]
SIDES = [(LENGTH, BATCH, WIDTH), (KEYS, BATCH, 7), (KEYS, BATCH, 9)]
MODULES = {  # the module's arguments, the shapes of its inputs, the other arguments of the call
    "self": ({}, SELF, {}),
    "without weights": ({}, SELF, {"need_weights": False}),
    "every head": ({"bias": False}, CROSS, {"average_attn_weights": False}),
    "masked": ({}, CROSS, {"attn_mask": drawn(LENGTH, KEYS)}),
    "masked by booleans": (
        {},
        CROSS,
        {"attn_mask": booleans(LENGTH, KEYS), "need_weights": False},
    ),
    "masked by heads": ({}, CROSS, {"attn_mask": drawn(BATCH * HEADS, LENGTH, KEYS)}),
    "padded": ({}, CROSS, {"key_padding_mask": booleans(BATCH, KEYS)}),
    "padded and masked": (
        {},
        CROSS,
        {
            "key_padding_mask": booleans(BATCH, KEYS),
            "attn_mask": booleans(BATCH * HEADS, LENGTH, KEYS),
            "need_weights": False,
        },
    ),
    "causal": (
        {},
        SELF,
        {
            "attn_mask": torch.ones(LENGTH, LENGTH).triu(1).bool(),
            "is_causal": True,
            "need_weights": False,
        },
    ),
    "causal, with weights": (
        {},
        SELF,
        {"attn_mask": torch.ones(LENGTH, LENGTH).triu(1).bool(), "is_causal": True},
    ),
    "more keys": (
        {"add_bias_kv": True, "add_zero_attn": True},
        CROSS,
        {
            "key_padding_mask": booleans(BATCH, KEYS),
            "attn_mask": booleans(LENGTH, KEYS),
        },
    ),
    "more keys, without weights": (
        {"add_bias_kv": True, "add_zero_attn": True},
        SELF,
        {"need_weights": False},
    ),
    "separate": ({"kdim": 7, "vdim": 9, "add_bias_kv": True}, SIDES, {}),
    "separate, without weights": (
        {"kdim": 7, "vdim": 9},
        SIDES,
        {"need_weights": False},
    ),
    "unbatched": ({}, [(LENGTH, WIDTH)], {}),
    "unbatched and padded": (
        {},
        [(LENGTH, WIDTH), (KEYS, WIDTH), (KEYS, WIDTH)],
        {"key_padding_mask": booleans(KEYS), "need_weights": False},
    ),
}


@pytest.mark.parametrize("name", MODULES)
@on_ranks(4)
def test_attention_of_batches_of_heads_and_of_both(name):
    arguments, shapes, keywords = MODULES[name]

    def make():
        return nn.MultiheadAttention(WIDTH, HEADS, **arguments)

    inputs = [drawn(*shape, seed=i) for i, shape in enumerate(shapes)]
    heads = SEPARATE_CUT if "kdim" in arguments else HEADS_CUT
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    batch = [S1] if len(shapes[0]) == 3 else [R]
    for placements, cut in [({}, batch), (heads, [R]), (heads, batch), ({}, [S0])]:
        compare(mesh, make, inputs, keywords, placements, [cut] * len(inputs))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    both = {key: [R, *value] for key, value in heads.items()}
    compare(square, make, inputs, keywords, both, [[*batch, R]] * len(inputs))


@on_ranks(4)
def test_batches_stay_where_they_are_and_heads_are_summed_once():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    x = drawn(LENGTH, 8, WIDTH)

    def attention(placements):
        torch.manual_seed(0)
        return distribute_module(
            nn.MultiheadAttention(WIDTH, HEADS).double(), mesh, cut_by(placements)
        )

    module = attention({})
    batch = distribute_tensor(x, mesh, [S1])
    with CommunicationLedger() as ledger:
        found, weights = module(batch, batch, batch)
    assert found.placements == (S1,)
    assert weights.placements == (S0,)
    assert not ledger.entries
    module = attention(SEPARATE_CUT | {"in_proj_weight": [S0]})
    whole = distribute_tensor(x, mesh, [R])
    found, _ = module(whole, whole, whole, need_weights=False)
    assert found.placements[0].is_partial()


LAYERS = {
    "encoder": (nn.TransformerEncoderLayer, {}, 1),
    "encoder, norm first": (
        nn.TransformerEncoderLayer,
        {"norm_first": True, "activation": "gelu"},
        1,
    ),
    "decoder": (nn.TransformerDecoderLayer, {}, 2),
}


@pytest.mark.parametrize("name", LAYERS)
@on_ranks(4)
def test_layers_of_transformers(name):
    kind, arguments, count = LAYERS[name]
    cut = {
        **HEADS_CUT,
        "linear1.weight": [S0],
        "linear1.bias": [S0],
        "linear2.weight": [S1],
    }
    inputs = [drawn(BATCH, LENGTH, WIDTH, seed=i) for i in range(count)]
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    for training in (True, False):

        def make(training=training):
            return kind(
                WIDTH, HEADS, 10, dropout=0.0, batch_first=True, **arguments
            ).train(training)

        masks = {"src_key_padding_mask": booleans(BATCH, LENGTH)} if count == 1 else {}
        for placements, where in [({}, [S0]), (cut, [R]), (cut, [S0])]:
            compare(mesh, make, inputs, masks, placements, [where] * count)
        with torch.no_grad():  # where torch would have one kernel for the layer
            compare(mesh, make, inputs, {}, {}, [[S0]] * count)


@on_ranks(4)
def test_a_whole_transformer():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    inputs = [drawn(BATCH, LENGTH, WIDTH, seed=i) for i in range(2)]

    def make():
        return nn.Transformer(WIDTH, HEADS, 1, 1, 10, dropout=0.0, batch_first=True)

    compare(mesh, make, inputs, {}, {}, [[S0]] * 2)


@on_ranks(4)
def test_dropout_is_the_same_on_copies_and_other_on_pieces():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    x = torch.ones(8, 8, WIDTH, dtype=torch.float64)
    for need_weights in (True, False):
        torch.manual_seed(5)
        plain = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.5).double()
        module = distribute_module(plain, mesh)
        torch.manual_seed(6)
        batch = distribute_tensor(x, mesh, [S1, R])
        found, _ = module(batch, batch, batch, need_weights=need_weights)
        everyone = [None] * 4
        torch.distributed.all_gather_object(everyone, found.to_local().detach())
        assert torch.equal(everyone[0], everyone[1])
        assert torch.equal(everyone[2], everyone[3])
        assert not torch.equal(everyone[0], everyone[2])
        module.eval()
        still, _ = module(batch, batch, batch, need_weights=need_weights)
        torch.testing.assert_close(still.full_tensor()[0, 0], still.full_tensor()[3, 5])


@on_ranks(2)
def test_keys_and_values_that_are_given():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    shapes = [(LENGTH, BATCH, WIDTH)] * 3 + [(3 * WIDTH, WIDTH), (WIDTH, WIDTH)]
    shapes += [(BATCH * HEADS, KEYS, WIDTH // HEADS)] * 2
    plain = [drawn(*shape, seed=i) for i, shape in enumerate(shapes)]

    def call(q, k, v, w, out, static_k, static_v):
        return F.multi_head_attention_forward(
            *(q, k, v, WIDTH, HEADS, w, None, None, None, False, 0.0, out, None),
            static_k=static_k,
            static_v=static_v,
        )

    mine = [
        distribute_tensor(x, mesh, [S1 if i < 3 else R]) for i, x in enumerate(plain)
    ]
    for one, true in zip(call(*mine), call(*plain), strict=True):
        torch.testing.assert_close(one.full_tensor(), true)


@on_ranks(2)
def test_what_does_not_fit_is_refused():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    module = distribute_module(nn.MultiheadAttention(WIDTH, HEADS).double(), mesh)
    x = distribute_tensor(drawn(LENGTH, BATCH, WIDTH), mesh, [S1])
    mask = distribute_tensor(drawn(1, LENGTH), mesh, [R])
    with pytest.raises(ValueError, match="attn_mask of shape"):
        module(x, x, x, attn_mask=mask)
    with pytest.raises(ValueError, match="is_causal"):
        F.multi_head_attention_forward(
            *(
                x,
                x,
                x,
                WIDTH,
                HEADS,
                module.in_proj_weight,
                None,
                None,
                None,
                False,
                0.0,
                module.out_proj.weight,
                None,
            ),
            is_causal=True,
        )
