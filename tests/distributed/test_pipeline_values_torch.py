# SPDX-License-Identifier: Apache-2.0
"""What stages hand to each other and have in common, and backward in two parts, compared with one process."""

import copy

import pytest
import torch
from pipeline_models import (
    DIM,
    Embed,
    Head,
    Layer,
    Pair,
    batch,
    close,
    layers,
    new,
    tied,
)
from torch import nn

from hyper_parallel.core.activation_checkpoint import checkpoint
from hyper_parallel.core.pipeline_parallel import PipelineStage, SharedParameterInfo
from hyper_parallel.testing import on_ranks

# The splits of backward, and both ways to have two stages on a rank.
SCHEDULES = [
    ("GPipe", 2),
    ("1F1B", 2),
    ("ZB-H1", 2),
    ("Interleaved1F1B", 4),
    ("ZBV", 4),
]


def pairs(builders, **options):
    """A pair for each schedule; the functions are those of the first stages."""
    for name, count in SCHEDULES:
        parts = new(*builders, *[Layer] * (count - len(builders)))
        yield Pair(parts, name, **options)


class Many(nn.Module):
    """Sends all kinds of values."""

    def __init__(self):
        super().__init__()
        self.layer = Layer()

    def forward(self, x):
        y = self.layer(x)
        ids = torch.arange(x.shape[0])
        return {
            "y": [y, None, 3],
            "mask": y > 0,
            "ids": ids,
            "name": "a",
            "share": 0.5,
            "both": (True, {"half": (y / 2).to(torch.bfloat16), "no": x.detach()}),
        }


class OfMany(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Layer()

    def forward(self, given):
        (y, nothing, three), (yes, last) = given["y"], given["both"]
        assert (nothing, three, yes, given["name"]) == (None, 3, True, "a")
        assert given["ids"].dtype is torch.int64
        assert not last["no"].requires_grad
        assert last["half"].dtype is torch.bfloat16
        chosen = torch.where(given["mask"], y, y * given["share"])
        return self.layer(chosen[given["ids"]]) + last["half"].double() * last["no"]


@on_ranks(2)
def test_stages_hand_over_structures():
    for pair in pairs([Many, OfMany]):
        pair.step(*batch())
        pair.step(*batch())


@on_ranks(2)
def test_stages_hand_over_tuples_and_numbers():
    def first(layer, x):
        return layer(x), 2, x.sum(-1).long(), None

    def second(layer, x, factor, numbers, nothing):
        assert nothing is None
        assert factor == 2
        return layer(x) * factor + numbers[:, None]

    for pair in pairs([first, second]):
        pair.step(*batch())


@on_ranks(2)
def test_a_tensor_passes_through_twice_and_as_a_view():
    """The same tensor twice, an input that is returned, and views of it."""

    def first(layer, x):
        y = layer(x)
        return y, y

    def second(layer, a, b):
        return b, a.view(-1, DIM)[:, :3], layer(a), b

    def third(layer, b, part, c, again):
        return b.t(), torch.nn.functional.pad(part, (0, 2)) + layer(c) * again

    def fourth(layer, turned, sum_):
        return layer(turned.t()) * sum_

    for name in ("Interleaved1F1B", "ZBV", "LoopedBFS", "InterleavedZeroBubble"):
        pair = Pair(new(first, second, third, fourth), name, micros=4)
        pair.step(*batch(8))
        pair.step(*batch(8))


@on_ranks(2)
def test_an_output_that_no_later_stage_uses():
    def first(layer, x):
        y = layer(x)
        return y, y * 2

    def second(layer, y, unused):
        return layer(y)

    def neither(layer, y, z):
        return layer(torch.zeros_like(y))

    for pair in pairs([first, second]):
        pair.step(*batch())
        pair.step(*batch())
    for pair in pairs([first, neither]):
        pair.step(*batch())
        pair.step(*batch())


@on_ranks(2)
def test_what_cannot_be_sent_is_refused_on_all_ranks():
    pair = Pair(new(lambda layer, x: {layer(x)}, Layer))
    x, y = batch()
    with pytest.raises(RuntimeError, match=r"0SEND_F0.*stage returned set.*HP481"):
        pair.schedule.step(x, target=y)
    pair = Pair(new(lambda layer, x: [layer(x)] * 63, Layer))
    with pytest.raises(
        RuntimeError, match="63 tensors between two stages; the most are 62"
    ):
        pair.schedule.step(x, target=y)
    pair = Pair(new(lambda layer, x: [layer(x)] * 62, lambda layer, x: layer(sum(x))))
    pair.step(x, y)


@on_ranks(2)
def test_skip_connection__works_or_refused_at_build():
    def last(layer, x, early):
        return layer(x) * early

    for name in ("Interleaved1F1B", "ZBV", "LoopedBFS"):
        for skips in ([(0, 3)], [(0, 2), (1, 3)]):
            parts = new(
                *(last if any(to == n for _, to in skips) else Layer for n in range(4))
            )
            pair = Pair(parts, name, micros=4, skips=skips)
            pair.step(*batch(8))
            pair.step(*batch(8))
    for beyond in (
        {"dst_stage": 5},
        {"dst_stage": 0},
        {"src_stage": 3},
        {"src_stage": -1},
    ):
        with pytest.raises(ValueError, match="must name stages of.*HP483"):
            PipelineStage(Layer(), 2, 4, **beyond)


def double_in_place(layer, x):
    return layer(x.mul_(2))


def add_mask(layer, x):
    y = layer(x)
    return y, y > 0


def change_mask(layer, x, mask):
    y = layer(x)
    return torch.where(mask.logical_not_(), y, x * x)


@on_ranks(2)
def test_stages_may_change_inputs_in_place():
    for name, count in SCHEDULES:
        first = [Layer] * (count - 2)
        for last in ([Layer, double_in_place], [add_mask, change_mask]):
            Pair(new(*first, *last), name).step(*batch())


# --- shared parameters


TIED = [("1F1B", 2), ("ZB-H1", 2), ("Interleaved1F1B", 4), ("ZBV", 4), ("DualPipe", 2)]


@on_ranks(2)
@pytest.mark.parametrize(("name", "count"), TIED)
def test_tied_embedding__grads(name, count):
    pair = tied(name, count)
    for seed in range(3):  # gradients add up over steps
        x, y = batch(8, seed)
        pair.run_alone(x, y)
        pair.schedule.step(x, target=y)
        pair.check_gradients()


@on_ranks(2)
@pytest.mark.parametrize(("name", "count"), TIED)
def test_tied_embedding__values(name, count):
    pair = tied(name, count)
    optimizers = [
        torch.optim.SGD(
            {id(p): p for part in parts for p in part.parameters()}.values(), 0.1
        )
        for parts in (pair.alone, [pair.piped[stage] for stage in pair.own])
    ]
    for seed in range(20):
        x, y = batch(8, seed)
        pair.run_alone(x, y)
        pair.schedule.step(x, target=y)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for stage in pair.own:
        for own, other in zip(
            pair.piped[stage].parameters(), pair.alone[stage].parameters(), strict=True
        ):
            close(own.detach(), other.detach())
    everyone = [None] * 2
    own = [pair.piped[n].weight.detach() for n in pair.own if n in (0, count - 1)]
    torch.distributed.all_gather_object(everyone, own)
    copies = [one for of_rank in everyone for one in of_rank]
    assert len(copies) >= 2
    assert all(torch.equal(one, copies[0]) for one in copies)


@on_ranks(2)
def test_one_parameter_that_two_stages_of_a_rank_have():
    """The same object in both, whose gradient is added up once."""
    parts = new(Embed, Layer, Layer, Head)
    parts[-1].weight = parts[0].weight
    pair = Pair(parts, "ZBV", 4, options=share_one(parts))
    for seed in range(2):
        x, y = batch(8, seed)
        pair.run_alone(x, y)
        pair.schedule.step(x, target=y)
        pair.check_gradients()


def share_one(parts):
    one = copy.deepcopy(parts[0].weight)

    def share(stage, part):
        if stage not in (0, 3):
            return {}
        part.weight = one
        return {"shared_parameters": [SharedParameterInfo(one, [0, 3])]}

    return share


@on_ranks(2)
def test_a_frozen_tied_embedding_gets_no_gradient():
    pair = tied("1F1B", 2)
    for part in [*pair.alone, *pair.piped]:
        part.requires_grad_(False)
    pair.alone[1].other = pair.piped[1].other = None
    x, y = batch(8)
    x.requires_grad_()
    pair.schedule.step(x, target=y)
    assert all(pair.piped[stage].weight.grad is None for stage in pair.own)


@on_ranks(2)
def test_a_shared_parameter_of_a_stage_that_is_not_there():
    def share(stage, part):
        info = SharedParameterInfo(part.linear.weight, [0, 7])
        return {"shared_parameters": [info]}

    with pytest.raises(
        ValueError, match="names stage 7, but there are 2 stages.*HP483"
    ):
        Pair(layers(2), options=share)


# --- what is not trained


@on_ranks(2)
@pytest.mark.parametrize("frozen", [[0], [1], [0, 1], [3], [1, 2]])
def test_frozen_stages(frozen):
    for name, count in SCHEDULES:
        parts = layers(count)
        for stage in frozen:
            if stage < count:
                parts[stage].requires_grad_(False)
        pair = Pair(parts, name)
        x, y = batch()
        if any(p.requires_grad for part in parts for p in part.parameters()):
            pair.step(x, y)
            pair.step(x, y)
        else:
            pair.schedule.step(x, target=y)


@on_ranks(2)
def test_no_gradient_is_sent_to_what_needs_none():
    from hyper_parallel.core.dtensor.ledger import CommunicationLedger

    counts = []
    for is_trained in (False, True):
        parts = layers(2)
        parts[0].requires_grad_(is_trained)
        pair = Pair(parts)
        pair.step(*batch())
        with CommunicationLedger() as ledger:
            pair.step(*batch())
        counts.append(
            sum(one.collective in ("isend", "irecv") for one in ledger.entries)
        )
    assert counts == [3, 6]


@on_ranks(2)
def test_stages_without_parameters():
    class Bare(nn.Module):
        def forward(self, x):
            return x.sin()

    for name, count in SCHEDULES:
        for place in range(count):
            kinds = [Layer] * count
            kinds[place] = Bare
            Pair(new(*kinds), name).step(*batch())


# --- backward in two parts


class Custom(torch.autograd.Function):
    """The product with a matrix, with both gradients by hand."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


class Rich(nn.Module):
    """Everything that makes the parts of a backward hard to tell apart."""

    def __init__(self):
        super().__init__()
        self.layer, self.shared = Layer(), nn.Linear(DIM, DIM)
        self.embedding = nn.Embedding(4, DIM)
        self.custom = nn.Parameter(torch.randn(DIM, DIM))
        self.scale = nn.Parameter(torch.randn(()))
        self.unused = nn.Parameter(torch.randn(2))
        self.alone = nn.Parameter(torch.randn(DIM))

    def forward(self, given):
        x, ids = given["x"], given["ids"]
        x = self.shared(torch.tanh(self.shared(self.layer(x))))  # used twice in a chain
        x = x + self.embedding(ids) * self.scale
        x = Custom.apply(x, self.custom * self.scale)
        x = checkpoint(lambda x: torch.tanh(self.layer(x) @ self.custom), x)
        parts = x.split([2, DIM - 2], -1)
        x = torch.cat([parts[1], parts[0]], -1) / 4
        return {"x": x, "ids": ids, "more": self.alone.sin() * self.scale, "same": x}


def enter(layer, x):
    return {"x": layer(x), "ids": (x.sum(-1).abs() * 2).long() % 4}


def leave(layer, given):
    return layer(given["x"] + given["more"]) * given["same"].sin()


@on_ranks(2)
@pytest.mark.parametrize(
    "name", ["InterleavedZeroBubble", "ZBV", "V-Half", "Interleaved1F1B"]
)
def test_split_backward__all_kinds_of_parameters(name):
    pair = Pair(new(enter, Rich, Rich, leave), name, micros=4)
    pair.step(*batch(8))
    pair.step(*batch(8))


@on_ranks(2)
def test_split_backward_defers_gradients_of_parameters():
    """Between I and W parameters whose operators lead to an input have none, and inputs have theirs."""
    pair = Pair(layers(2), "ZB-H1")
    seen = []
    if pair.rank == 1:
        stage, layer = pair.stages[0], pair.piped[1]
        run = stage.run_backward_weights

        def look(micro):
            seen.append([p.grad is not None for p in layer.parameters()])
            run(micro)

        stage.run_backward_weights = look
    pair.step(*batch())
    if pair.rank == 1:
        assert seen[0] == [False] * 4
        assert len(seen) == 3


@on_ranks(2)
def test_split_backward_recomputes_once():
    """What a checkpoint recomputes for the first part is not recomputed for the second."""
    calls = []

    def first(layer, x):
        def inner(x):
            calls.append(1)
            return layer(x)

        return checkpoint(inner, x)

    pair = Pair(new(first, first), "ZB-H1")
    x, y = batch()
    pair.schedule.step(x, target=y)
    forwards = 3
    assert len(calls) == 2 * forwards
    pair.run_alone(x, y)
    pair.check_gradients()


class HalfRecomputed(nn.Module):
    """Two layers and a weight that is scaled; the first layer and the scaling are recomputed."""

    def __init__(self):
        super().__init__()
        self.recomputed, self.kept = Layer(), Layer()
        self.weight = nn.Parameter(torch.randn(5, 5))

    def forward(self, x):
        def run(x):
            return self.recomputed(x) + x @ self.weight.sin()

        return self.kept(checkpoint(run, x))


@on_ranks(2)
def test_split_backward_defers_what_is_not_recomputed():
    pair = Pair(new(HalfRecomputed, HalfRecomputed), "ZB-H1")
    waiting = []
    if pair.rank == 1:
        stage, module = pair.stages[0], pair.piped[1]
        run = stage.run_backward_weights

        def look(micro):
            waiting.append(
                {name for name, p in module.named_parameters() if p.grad is None}
            )
            run(micro)

        stage.run_backward_weights = look
    pair.step(*batch())
    if pair.rank == 1:
        kept = {name for name, _ in module.named_parameters() if "kept" in name}
        assert waiting[0] == kept


class Hooked(nn.Module):
    """Layers with hooks on their outputs, and outputs that keep their gradients."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.kept = []

    def forward(self, x):
        y = self.first(x)
        y.register_hook(lambda gradient: 3 * gradient)
        y.retain_grad()
        self.kept.append(y)
        return torch.tanh(self.second(y))


@on_ranks(2)
def test_split_backward_applies_hooks_once():
    for pair in pairs([Hooked, Hooked]):
        pair.step(*batch())
        for stage in pair.own:
            if stage < 2:
                found, expected = pair.piped[stage].kept, pair.alone[stage].kept
                close([one.grad for one in found], [one.grad for one in expected])


# --- randomness


@on_ranks(2)
def test_dropout_is_the_same_in_every_schedule():
    def drop(layer, x):
        return nn.functional.dropout(
            checkpoint(lambda x: nn.functional.dropout(layer(x), 0.3), x), 0.5
        )

    found = {}
    for name in (
        "Interleaved1F1B",
        "LoopedBFS",
        "InterleavedZeroBubble",
        "GPipe",
        "1F1B",
        "ZB-H1",
        "ZB-H2",
    ):
        count = 2 if name in ("GPipe", "1F1B", "ZB-H1", "ZB-H2") else 4
        torch.manual_seed(3)
        pair = Pair(new(*[drop] * count), name, micros=4)
        x, y = batch(8)
        state = torch.get_rng_state()
        outputs = [pair.schedule.step(x, target=y) for _ in range(2)]
        assert torch.equal(torch.get_rng_state(), state)
        gradients = [p.grad for n in pair.own for p in pair.piped[n].parameters()]
        if pair.has_last:
            assert (outputs[0] != outputs[1]).any()  # another step has other numbers
        same = found.setdefault(count, (outputs, gradients))
        if pair.has_last:
            for output, other in zip(outputs, same[0], strict=True):
                assert torch.equal(output, other)
        for gradient, other in zip(gradients, same[1], strict=True):
            close(gradient, other)
    micros = found[2][0][0]
    if micros is not None:  # the micro batches differ as well
        zeros = (micros == 0).chunk(4)
        assert any((zeros[0] != other).any() for other in zeros[1:])
