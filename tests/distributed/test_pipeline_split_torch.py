# SPDX-License-Identifier: Apache-2.0
"""Unchanged models divided into stages: the numbers of one process, its names, and its first weights."""

import time

import pytest
import torch
from llama.model import Config, Llama
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    Replicated,
    RowwiseParallel,
    checkpoint_wrapper,
    fully_shard,
    get_platform,
    init_device_mesh,
    parallelize_module,
    replicate,
)
from hyper_parallel.core.pipeline_parallel import (
    build_schedule,
    build_stages,
    count_costs,
    get_schedule_class,
    measure_costs,
    plan_stages,
)
from hyper_parallel.testing import on_ranks

SIZES = {"vocab": 16, "dim": 8, "heads": 4, "kv_heads": 2, "hidden": 12, "context": 12}
platform = get_platform()


def llama(layers=4, tied=False):
    torch.manual_seed(3)
    return Llama(Config(layers=layers, tied=tied, **SIZES)).double()


def cross_entropy(output, target):
    logits = getattr(output, "logits", output)
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def tokens(rows=4, length=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(16, (rows, length), generator=generator) for _ in range(2)]


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Divided:
    """A model in one process, and the same built without memory, of which this rank draws only its stages."""

    def __init__(
        self, build, schedule="1F1B", micros=4, chunks=None, *, prepare=None,
        loss=cross_entropy, group=None, forward=None, **options,
    ):  # fmt: skip
        self.micros, self.loss, self.alone = micros, loss, build()
        self.group = group
        ranks = torch.distributed.get_world_size(group)
        order = build_schedule(schedule, ranks, micros, chunks)
        self.own = order.mapping.stages_of(torch.distributed.get_rank(group))
        with platform.init_on_device(platform.meta_device):
            self.model = build()
        self.plan = plan_stages(self.model, order.stages, **options)
        self.plan.keep(self.model, self.own)
        if prepare is not None:
            prepare(self.model)
        platform.init_parameters(self.model, 0)
        stages = build_stages(
            self.model, self.plan, self.own, group=group, forward=forward
        )
        self.schedule = get_schedule_class(schedule)(stages, micros, loss_fn=loss)

    def step(self, x, y):
        """One step of both; compares losses and every gradient."""
        expected = torch.zeros((), dtype=torch.double)
        for one, target in zip(x.chunk(self.micros), y.chunk(self.micros), strict=True):
            loss = self.loss(self.alone(one), target)
            (loss / self.micros).backward()
            expected += loss.detach()
        losses = []
        self.schedule.step(x, target=y, losses=losses, return_outputs=False)
        total = sum(map(full, losses), torch.zeros((), dtype=torch.double))
        torch.distributed.all_reduce(total, group=self.group)
        torch.testing.assert_close(total, expected)
        self.check_gradients()

    def check_gradients(self):
        whole = dict(self.alone.named_parameters(remove_duplicate=False))
        own = dict(self.model.named_parameters(remove_duplicate=False))
        assert own
        for name, parameter in own.items():
            expected = whole[name].grad
            if expected is None:
                assert parameter.grad is None, name
            else:
                torch.testing.assert_close(full(parameter.grad), expected, msg=name)


def names_of_all(divided):
    """The names of parameters on every rank."""
    names = [name for name, _ in divided.model.named_parameters(remove_duplicate=False)]
    everyone = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, names)
    return everyone


@on_ranks(2)
@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2), ("ZB-H1", 1), ("ZBV", 2), ("DualPipe", 1), ("DualPipeV", 2)],
)  # fmt: skip
def test_an_unchanged_model_trains_as_on_one_device(schedule, chunks):
    for tied in (False, True):
        divided = Divided(lambda: llama(tied=tied), schedule, chunks=chunks)  # noqa: B023
        for name, parameter in divided.model.named_parameters():
            expected = divided.alone.get_parameter(name)
            assert torch.equal(parameter, expected), name
        divided.step(*tokens())
        divided.step(*tokens(seed=1))


@on_ranks(2)
def test_each_rank_has_the_names_of_its_stages():
    divided = Divided(llama)
    first, second = names_of_all(divided)
    assert not set(first) & set(second)
    assert {*first, *second} == {name for name, _ in llama().named_parameters()}
    assert "embed.weight" in first
    assert "head.weight" in second
    assert str(divided.plan) == (
        "stage 0: embed, blocks.0 to blocks.1\n"
        "stage 1: blocks.2 to blocks.3, norm, head"
    )


@on_ranks(2)
def test_stages_begin_where_they_are_told():
    divided = Divided(llama, begin=["blocks.1"])
    assert divided.plan.ends == ("blocks.0", "blocks.3")
    divided.step(*tokens())


@on_ranks(2)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_transformers_models_are_divided(kind):
    divided = Divided(lambda: transformer(kind))
    divided.step(*tokens())
    divided.step(*tokens(seed=1))


def transformer(kind):
    import transformers

    torch.manual_seed(0)
    common = {"vocab_size": 16, "use_cache": False}
    if kind == "llama":
        config = transformers.LlamaConfig(
            hidden_size=8, intermediate_size=12, num_hidden_layers=3,
            num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
            **common,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config).double()
    config = transformers.GPT2Config(
        n_embd=8, n_layer=3, n_head=2, n_positions=12,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **common,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).double()


class Pieces(nn.Module):
    """A model with a parameter of its own, a sequential of pairs, and modules in an odd order."""

    def __init__(self, head_first=True):
        super().__init__()
        torch.manual_seed(0)
        self.place = nn.Parameter(torch.randn(6, 8))
        if head_first:
            self.head = nn.Linear(8, 16)
        self.embed = nn.Embedding(16, 8)
        self.body = nn.Sequential(*[Twin() for _ in range(4)])
        if not head_first:
            self.head = nn.Linear(8, 16)

    def forward(self, ids):
        x = self.embed(ids) + self.place
        x, total = self.body((x, x * 0))
        return self.head(x + total)


class Twin(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, given):
        x, total = given
        y = torch.tanh(self.linear(x))
        return y, total + y


@on_ranks(2)
def test_blocks_hand_over_tuples_and_parameters_of_the_model_are_shared():
    def build():
        return Pieces().double()

    divided = Divided(build, begin=["body.2"], last=["head"])
    assert divided.plan.shared == ({0: "place", 1: "place"},)
    divided.step(*tokens())
    divided.step(*tokens(seed=1))


# --- with the other parallelisms


def styles(model, mesh):
    parallelize_module(
        model,
        mesh["tp"],
        {
            "embed": RowwiseParallel(use_local_output=False),
            "blocks.*.attention.wq": ColwiseParallel(heads=4),
            "blocks.*.attention.w[kv]": ColwiseParallel(heads=2),
            "blocks.*.attention.wo": RowwiseParallel(use_local_output=False),
            "blocks.*.mlp.gate": ColwiseParallel(),
            "blocks.*.mlp.up": ColwiseParallel(),
            "blocks.*.mlp.down": RowwiseParallel(use_local_output=False),
            "head": ColwiseParallel(use_local_output=False),
            "": Replicated(use_local_output=False),
        },
    )


@on_ranks(4)
def test_stages_under_tensor_parallel():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))

    def loss(output, target):
        return cross_entropy(full(output), target)

    divided = Divided(
        llama,
        prepare=lambda model: styles(model, mesh),
        group=mesh["pp"].get_group(),
        loss=loss,
    )
    divided.step(*tokens())
    divided.step(*tokens(seed=1))


@on_ranks(4)
@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1F1B", 1), ("Interleaved1F1B", 2), ("ZBV", 2)]
)
def test_stages_under_fully_shard(schedule, chunks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))

    def shard(model):
        names = ["embed", *(f"blocks.{one}" for one in range(4)), "norm", "head"]
        for name in names:
            module = model.get_submodule(name)
            if any(True for _ in module.parameters()):
                fully_shard(module, mesh=mesh["dp"])

    divided = Divided(
        llama, schedule, 2, chunks, prepare=shard, group=mesh["pp"].get_group()
    )
    divided.step(*tokens())
    divided.step(*tokens(seed=1))


@on_ranks(2)
def test_blocks_that_recompute():
    calls = []

    def wrap(model):
        for name, block in list(model.blocks.named_children()):
            block.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
            setattr(model.blocks, name, checkpoint_wrapper(block))

    divided = Divided(llama, "1F1B", prepare=wrap)
    divided.step(*tokens())
    assert len(calls) == 2 * 2 * divided.micros, len(
        calls
    )  # two blocks, forward and again
    divided = Divided(llama, "ZB-H1", prepare=wrap)
    divided.step(*tokens())
    divided.step(*tokens(seed=1))


@on_ranks(4)
def test_stages_of_replicated_batches():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))

    def loss(output, target):
        if isinstance(output, DTensor):
            target = DTensor.from_local(target, output.device_mesh, output.placements)
            return full(cross_entropy(output, target))
        return cross_entropy(output, target)

    divided = Divided(
        llama,
        micros=2,
        prepare=lambda model: replicate(model, mesh["dp"], src_data_rank=None),
        group=mesh["pp"].get_group(),
        loss=loss,
    )
    x, y = tokens(rows=8)
    rows = [micro.chunk(2)[mesh["dp"].get_local_rank()] for micro in x.chunk(2)]
    targets = [micro.chunk(2)[mesh["dp"].get_local_rank()] for micro in y.chunk(2)]
    for one, target in zip(x.chunk(2), y.chunk(2), strict=True):
        (cross_entropy(divided.alone(one), target) / 2).backward()
    divided.schedule.step(
        torch.cat(rows), target=torch.cat(targets), return_outputs=False
    )
    divided.check_gradients()


# --- what cannot be divided


class Skips(nn.Module):
    """A model whose last block needs what the first one has computed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 16)

    def forward(self, ids):
        x = start = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x + start)


class ByArgument(Skips):
    """The same, as an argument of a block."""

    def forward(self, ids):
        x = start = self.embed(ids)
        for number, block in enumerate(self.blocks):
            x = block(x + start) if number == 3 else block(x)
        return self.head(x)


@on_ranks(2)
@pytest.mark.parametrize("kind", [Skips, ByArgument])
def test_a_value_that_passes_by_the_blocks_is_found(kind):
    divided = Divided(kind)
    with pytest.raises(RuntimeError, match="because it is computed from modules of"):
        divided.schedule.step(*tokens()[:1], target=tokens()[1])


@on_ranks(2)
def test_modules_on_the_wrong_side_are_named():
    divided = Divided(lambda: Pieces().double(), begin=["body.2"])  # head is in front
    with pytest.raises(RuntimeError, match=r"head belongs to stage 0.*last="):
        divided.schedule.step(*tokens()[:1], target=tokens()[1])
    divided = Divided(llama, last=["embed"])
    with pytest.raises(RuntimeError, match=r"embed belongs to stage 1.*last="):
        divided.schedule.step(*tokens()[:1], target=tokens()[1])


@on_ranks(2)
def test_every_rank_needs_the_inputs_of_the_model():
    divided = Divided(llama)
    x, y = tokens()
    inputs = [x] if 0 in divided.own else []
    with pytest.raises(RuntimeError, match="stage 1 was given no inputs"):
        divided.schedule.step(*inputs, target=y)


@on_ranks(2)
def test_a_part_of_a_model_is_not_called_by_hand():
    divided = Divided(llama)
    with pytest.raises(RuntimeError, match="run the model by a schedule"):
        divided.model(tokens()[0])


def test_numbers_of_stages_and_names_are_checked():
    with pytest.raises(ValueError, match=r"4 blocks \(blocks.0 to blocks.3\)"):
        plan_stages(llama(), 5)
    for begin in (["blocks.2", "blocks.1"], ["blocks.0", "blocks.2"], ["blocks.1"]):
        with pytest.raises(ValueError, match="begin must name the 2 blocks"):
            plan_stages(llama(), 3, begin=begin)
    with pytest.raises(ValueError, match="blocs"):
        plan_stages(llama(), 2, begin=["blocs.1"])
    with pytest.raises(ValueError, match="hed"):
        plan_stages(llama(), 2, last=["hed"])
    with pytest.raises(ValueError, match="no list of modules"):
        plan_stages(nn.Linear(2, 2), 2)


class Sleeps(nn.Module):
    """A block of known time."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.linear = seconds, nn.Linear(2, 2)

    def forward(self, x):
        time.sleep(self.seconds)
        return self.linear(x)


class Row(nn.Module):
    def __init__(self, *seconds):
        super().__init__()
        self.blocks = nn.ModuleList(map(Sleeps, seconds))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_costs_are_measured_or_counted():
    model = Row(0.04, 0.0, 0.0, 0.0)
    counted = count_costs(model)
    assert [counted[name] for name in ("blocks.0", "blocks.1", "")] == [4, 4, 16]
    measured = measure_costs(model, torch.ones(1, 2), repeats=1)
    assert measured["blocks.0"] > measured["blocks.1"]
    assert plan_stages(model, 2).ends == ("blocks.1", "blocks.3")
    assert plan_stages(model, 2, costs=measured).ends == ("blocks.0", "blocks.3")
