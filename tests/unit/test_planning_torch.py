# SPDX-License-Identifier: Apache-2.0
"""Plans that are found for models, as values: where they come from, what they cost, and what has none."""

import itertools
import json

import pytest
import torch
from llama import plan as by_hand
from llama.model import Config, Llama
from torch import nn
from typer.testing import CliRunner

import hyper_parallel.cli.plan  # noqa: F401 - it adds its command
from hyper_parallel import (
    ColwiseParallel,
    DeviceMesh,
    ExpertParallel,
    ExpertTensorParallel,
    FusedColwiseParallel,
    ParallelPlan,
    RowwiseParallel,
    Shard,
    auto_plan,
    get_platform,
)
from hyper_parallel.cli.checkpoints import application
from hyper_parallel.core.shard.sharding_plan import matching
from hyper_parallel.planning import auto as planning
from hyper_parallel.planning import search
from hyper_parallel.planning.own import read_own_plan
from hyper_parallel.planning.trace import find_experts
from hyper_parallel.planning.units import to_patterns
from hyper_parallel.platform.axes import axis_of
from hyper_parallel.platform.error_codes import code_of
from hyper_parallel.recipe import RecipeError, read_recipe
from tools import architectures
from tools.architecture_models import ARCHITECTURES, make_config, make_model

TP = ["llama", "qwen3", "gemma3", "phi", "gpt_neox", "phi3", "cohere", "starcoder2", "olmo2", "glm"]  # fmt: skip


def mesh_of(**axes):
    sizes = list(axes.values())
    ranks = torch.arange(torch.tensor(sizes).prod()).reshape(sizes).tolist()
    return DeviceMesh("cpu", ranks, mesh_dim_names=tuple(axes))


def llama(**sizes):
    return Llama(Config(dim=32, layers=2, heads=8, kv_heads=4, hidden=48, **sizes))


def style_of(styles, name):
    found = [style for pattern, style in styles.items() if matching(pattern, [name])]
    assert len(found) < 2, name
    return found[0] if found else None


# --- what is found


def hand_written(model, mesh, monkeypatch):
    """The plan of the example, which applies it at once."""
    plans = []
    monkeypatch.setattr(
        by_hand, "parallelize_module", lambda *args: plans.append(args[2])
    )
    by_hand.put_on_mesh(model, mesh)
    return plans[0]


@pytest.mark.parametrize("tied", [False, True])
def test_the_plan_of_the_example_is_the_one_written_by_hand(tied, monkeypatch):
    model, mesh = llama(tied=tied), mesh_of(tp=4)
    expected = hand_written(model, mesh, monkeypatch)
    found = auto_plan(model, mesh)
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            mine, theirs = style_of(found.styles, name), style_of(expected, name)
            assert mine.layouts(module, mesh) == theirs.layouts(module, mesh), name
            assert getattr(mine, "heads", 0) == getattr(theirs, "heads", 0), name
    assert found.costs["blocks.*"].forward == {"all_reduce": 2}
    assert found.costs["blocks.*"].backward == {"all_reduce": 2}


@pytest.mark.parametrize("name", TP)
def test_a_derived_plan_communicates_no_more_than_the_models_own(name):
    model, mesh = make_model(name), mesh_of(tp=2)
    own, derived = (auto_plan(model, mesh, use_own=use) for use in (True, False))
    assert own.costs.keys() == derived.costs.keys()
    for block, cost in own.costs.items():
        assert derived.costs[block].nbytes <= cost.nbytes, block
        assert derived.costs[block].count <= cost.count, block
    assert read_own_plan(model).kinds
    assert "model's own" not in derived.sources


def test_what_the_models_own_plan_gathers_is_derived():
    """Phi-3 gathers q, k and v, and gate and up, since it cannot say how they are fused."""
    plan = auto_plan(make_model("phi3"), mesh_of(tp=2))
    styles = plan.styles
    assert styles["model.layers.*.mlp.gate_up_proj"] == FusedColwiseParallel(sections=2)
    qkv = FusedColwiseParallel(sections=(32, 16, 16), heads=8)
    assert styles["model.layers.*.self_attn.qkv_proj"] == qkv
    assert plan.costs["model.layers.*"].forward == {"all_reduce": 2}


class Fused(nn.Module):
    """A block with q, k and v in one layer, which is taken apart in one way or another."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.take_apart(self.qkv(x))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).flatten(2))

    def take_apart(self, x):
        rows, length, _ = x.shape
        if self.way == "unbind":
            return x.view(rows, length, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        if self.way == "index":
            parts = x.view(rows, length, 3, 4, 4)
            return [parts[:, :, i].transpose(1, 2) for i in range(3)]
        if self.way == "heads":  # each head has its q, k and v
            return x.view(rows, length, 4, 12).transpose(1, 2).chunk(3, dim=-1)
        parts = {
            "split": lambda: x.split(16, dim=-1),
            "chunk": lambda: x.chunk(3, dim=-1),
            "slices": lambda: (x[..., :16], x[..., 16:32], x[..., 32:]),
        }[self.way]()
        return [one.view(rows, length, 4, 4).transpose(1, 2) for one in parts]


class Stack(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    "way", ["split", "chunk", "slices", "unbind", "index", "heads"]
)
def test_fused_projections_are_recognised_by_how_their_output_is_split(way):
    x = torch.zeros(2, 8, 16)
    plan = auto_plan(Stack(Fused(way), Fused(way)), mesh_of(tp=2), inputs={"x": x})
    style = plan.styles["blocks.*.qkv"]
    if way == "heads":
        assert style == ColwiseParallel(heads=4)
    else:
        assert style == FusedColwiseParallel(sections=3, heads=12)
    assert plan.styles["blocks.*.out"] == RowwiseParallel()
    assert plan.costs["blocks.*"].forward == {"all_reduce": 1}
    assert plan.costs["blocks.*"].backward == {"all_reduce": 1}


def test_sequence_parallel_sends_the_same_bytes_and_scatters_sums():
    plan = auto_plan(llama(), mesh_of(tp=2), sequence_parallel=True)
    rows = RowwiseParallel(output_layouts=Shard(1))
    assert plan.styles["blocks.*.mlp.down"] == rows
    assert plan.styles["embed"] == rows


def test_experts_are_shared_whole_on_ep_and_in_parts_on_tp():
    model = make_model("mixtral")
    experts = "model.layers.*.mlp.experts"
    for axes, kind in (
        ({"ep": 2}, ExpertParallel),
        ({"tp": 2}, ExpertTensorParallel),
        ({"ep": 2, "tp": 2}, ExpertTensorParallel),
    ):
        assert type(auto_plan(model, mesh_of(**axes)).styles[experts]) is kind
    with pytest.raises(ValueError, match="4 experts"):
        auto_plan(model, mesh_of(ep=3))


class Attention(nn.Module):
    """Weights with three dims, but those of heads."""

    def __init__(self):
        super().__init__()
        self.q, self.k = (nn.Parameter(torch.zeros(16, 4, 4)) for _ in range(2))

    def forward(self, x, mask=None):
        del mask
        return torch.einsum("bsd,dhe,tdf->bsd", x, self.q, self.k.view(4, 16, 4))


def test_weights_with_three_dims_are_not_always_those_of_experts():
    model = Stack(Attention(), Attention())
    assert find_experts(model) == {}
    x = torch.zeros(2, 8, 16)
    [entry] = auto_plan(model, mesh_of(tp=2), inputs={"x": x}).entries
    assert entry.source == "replicated: its weights are not those of a linear layer"
    assert entry.held == entry.whole == 4 * 16 * 16 * 4
    assert len(find_experts(make_model("mixtral"))) == 2
    assert len(find_experts(make_model("gpt_oss"))) == 2


def test_a_model_without_blocks_is_told():
    plan = auto_plan(Fused("split"), mesh_of(tp=2), inputs={"x": torch.zeros(2, 8, 16)})
    assert plan.notes == ("the model has no list of blocks, in which layers are planned",)  # fmt: skip
    assert plan.styles == {}


def test_stages_units_and_bytes():
    model = llama()
    plan = auto_plan(model, mesh_of(pp=2, dp_shard=2, tp=2))
    assert plan.begin == ("blocks.1",)
    assert plan.units == ("blocks.*",)
    whole = sum(
        one.weight.nbytes
        for one in model.modules()
        if isinstance(one, (nn.Linear, nn.Embedding))
    )
    assert sum(entry.whole for entry in plan.entries) == whole
    assert sum(entry.held for entry in plan.entries) == whole // 4


def test_tied_weights_lie_together():
    model = make_model("gpt2")
    assert model.lm_head.weight is model.transformer.wte.weight
    styles = auto_plan(model, mesh_of(tp=2)).styles
    assert styles["transformer.wte"] == RowwiseParallel()
    assert styles["lm_head"] == ColwiseParallel()


def test_the_effort_grows_with_distinct_layers(monkeypatch):
    runs = []
    plain = search.dry_run
    monkeypatch.setattr(
        search, "dry_run", lambda *args: runs.append(args) or plain(*args)
    )
    counts = []
    for layers in (2, 16):
        runs.clear()
        plan = auto_plan(make_model("llama", num_hidden_layers=layers), mesh_of(tp=2))
        counts.append((len(runs), len(plan.entries)))
    assert counts[0] == counts[1]


def test_nothing_of_the_model_or_the_platform_changes():
    model, platform = make_model("gpt2"), get_platform()
    before = {name: id(one) for name, one in model.named_parameters()}
    kind, hooks = type(platform), list(model._forward_hooks)
    state = torch.get_rng_state()
    auto_plan(model, mesh_of(tp=2))
    with pytest.raises(ValueError, match="heads"):
        auto_plan(model, mesh_of(tp=3))
    assert {name: id(one) for name, one in model.named_parameters()} == before
    assert type(platform) is kind
    assert list(model._forward_hooks) == hooks
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.zeros(1).device.type == "cpu"


def test_meshes_of_simulated_ranks_name_no_axes():
    """An error of these ranks would else speak of an axis that they never were."""
    ranks = [0, 9]
    with get_platform().simulate_ranks():
        DeviceMesh("cpu", ranks, mesh_dim_names=("simulated",)).get_group()
        assert axis_of(ranks) == "simulated"
    assert axis_of(ranks) == ""


def test_patterns_match_their_names_and_no_others():
    known = [f"blocks.{i}.{name}" for i in range(3) for name in ("up", "down")]
    assert to_patterns(known[::2], known) == ["blocks.*.up"]
    assert to_patterns(known[:1], known) == ["blocks.0.up"]
    for names in itertools.combinations(known, 2):
        patterns = to_patterns(list(names), known)
        found = [name for pattern in patterns for name in matching(pattern, known)]
        assert sorted(found) == sorted(names)


# --- as a file


def test_a_plan_is_saved_edited_and_loaded(tmp_path):
    plan = auto_plan(make_model("phi3"), mesh_of(dp_shard=2, tp=2))
    path = tmp_path / "plan.yaml"
    plan.save(path)
    loaded = ParallelPlan.load(path)
    assert loaded.styles == plan.styles
    assert (loaded.units, loaded.axes) == (plan.units, plan.axes)
    path.write_text(path.read_text().replace("  lm_head: colwise\n", ""))
    assert plan.styles.keys() - ParallelPlan.load(path).styles.keys() == {"lm_head"}


def test_a_saved_plan_is_that_of_a_recipe_of_either_framework(tmp_path):
    path = tmp_path / "recipe.yaml"
    plan = auto_plan(llama(), mesh_of(tp=2))
    plan.save(path)
    (tmp_path / "model.py").write_text("class Net: ...")
    more = "steps: 1\nmodel: {file: model.py, class: Net}\ndata: {corpus: python}\n"
    path.write_text(path.read_text() + more)
    for framework in ("torch", "mindspore"):
        recipe = read_recipe(path, [f"framework={framework}"])
        assert recipe.plan.styles.keys() == plan.styles.keys()


@pytest.mark.parametrize("text", ["plan: [", "plan: 3", "other: {}", "- 1"])
def test_a_file_that_is_no_plan_is_refused(text, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match="cannot be read as a plan") as caught:
        ParallelPlan.load(path)
    assert code_of(caught.value) == "HP902"


def test_a_plan_that_names_missing_modules_is_refused(tmp_path):
    path = tmp_path / "plan.yaml"
    auto_plan(make_model("llama"), mesh_of(tp=2)).save(path)
    path.write_text(path.read_text().replace("self_attn.q_proj:", "self_attn.p_proj:"))
    with pytest.raises(ValueError, match=r"p_proj' matches no module; did you") as e:
        ParallelPlan.load(path).check(make_model("llama"))
    assert code_of(e.value) == "HP902"


# --- what has no plan


def refuse(model, code, match, **axes):
    with pytest.raises(ValueError, match=match) as caught:
        auto_plan(model, mesh_of(**axes))
    assert code_of(caught.value) == code


def test_meshes_and_models_without_a_plan_are_refused_at_once():
    model = make_model("llama")
    refuse(model, "HP901", "4 attention heads cannot be shared by tp=8", tp=8)
    refuse(model, "HP904", "axis 'x' has no role", x=2)
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    refuse(model, "HP903", "quantised", tp=2)


def test_a_function_through_which_no_gradient_would_flow_is_refused_at_once():
    match = r"transformer.h.1 cannot be trained on several ranks: .* autograd function"
    refuse(make_model("bloom"), "HP903", match, tp=2)


def test_fewer_heads_of_keys_than_ranks_are_replicated():
    plan = auto_plan(make_model("llama"), mesh_of(tp=4))
    reasons = {entry.pattern: entry.source for entry in plan.entries}
    for name in "kv":
        reason = reasons[f"model.layers.*.self_attn.{name}_proj"]
        assert reason == "replicated: 2 heads cannot be shared by 4 ranks"


def test_the_models_own_plan_serves_where_nothing_can_be_traced(monkeypatch):
    monkeypatch.setattr(planning, "find_samples", lambda _: [])
    plan = auto_plan(make_model("llama"), mesh_of(tp=2))
    assert plan.styles["model.layers.*.self_attn.q_proj"] == ColwiseParallel()
    assert plan.costs == {}
    [note] = plan.notes
    assert "no inputs are known for it; give inputs=" in note
    plan = auto_plan(make_model("gpt2"), mesh_of(tp=2))
    reasons = {entry.pattern: entry.source for entry in plan.entries}
    reason = "replicated: forward does not reach it"
    assert reasons["transformer.h.*.attn.c_attn"] == reason


def test_what_is_unknown_in_the_models_own_plan_is_told():
    model = make_model("llama")
    model._tp_plan = {
        "model.layers.*.self_attn.q_proj": "sideways",
        "model.layers.*.mlp.up": "colwise",
    }
    plan = auto_plan(model, mesh_of(tp=2))
    assert any("'sideways' of the model's plan is unknown" in one for one in plan.notes)
    assert any("mlp.up is in the model's plan, but not" in one for one in plan.notes)
    assert plan.styles["model.layers.*.self_attn.q_proj"] == ColwiseParallel(heads=4)


# --- folders


@pytest.fixture
def folder(tmp_path):
    """A Hugging Face folder without weights."""
    make_config("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "model/tokenizer.json").write_text("{}")
    (tmp_path / "model/model.safetensors").write_bytes(b"")
    (tmp_path / "text.txt").write_text("words " * 100)
    return tmp_path / "model"


def change(folder, **keys):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def test_the_command_prints_and_saves_a_plan_without_weights(folder):
    saved = folder / "plan.yaml"
    run = CliRunner().invoke(
        application, ["plan", str(folder), "--mesh", "tp=2", "--save", str(saved)]
    )
    assert run.exit_code == 0, run.output
    assert "colwise heads=4" in run.output
    assert "50% less" in run.output
    run = CliRunner().invoke(
        application, ["plan", str(folder), "--mesh", "tp=2", "--load", str(saved)]
    )
    assert run.exit_code == 0, run.output
    for mesh, text in (("tp=3", "HP901"), ("tp=x", "HP720"), ("z=2", "HP720")):
        run = CliRunner().invoke(application, ["plan", str(folder), "--mesh", mesh])
        assert run.exit_code == 2
        assert text in run.output


def problems(folder, *overrides):
    text = f"data.text={folder.parent / 'text.txt'}"
    with pytest.raises(RecipeError) as caught:
        read_recipe(folder, [text, *overrides])
    return str(caught.value)


def test_a_folder_is_a_recipe(folder):
    recipe = read_recipe(folder, [f"data.text={folder.parent / 'text.txt'}"], nproc=2)
    assert recipe.finds_plan
    assert recipe.ranks == 2
    assert recipe.input_path(recipe.model.huggingface) == folder


def test_what_a_folder_forbids_is_told_before_any_rank_starts(folder):
    assert "4 attention heads cannot be shared by 3 ranks" in problems(
        folder, "mesh.tp=3"
    )
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer" in problems(folder)
    change(folder, auto_map={"AutoModel": "modeling.Mine"})
    assert "needs code of the folder" in problems(folder, "data.tokens=bytes")
    change(folder, quantization_config={"bits": 4})
    assert "quantised" in problems(folder, "data.tokens=bytes")


def test_the_page_of_architectures_has_all_of_them():
    lines = architectures.PAGE.read_text().splitlines()
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in lines}
    assert ARCHITECTURES.keys() <= rows.keys()
    assert not any("**" in rows[name] for name in ARCHITECTURES), "wrong or crashed"
    assert set(architectures.TRAINED) <= ARCHITECTURES.keys()


def test_control_a_wrong_architecture_is_shown():
    wrong = {"verdict": "wrong", "text": "gradient of x: 3 is not 4"}
    page = architectures.write_page({"bert": {"tp=2": wrong}})
    assert "| **wrong** |" in page
    assert "- `bert` on tp=2: gradient of x: 3 is not 4" in page
