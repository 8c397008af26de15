# SPDX-License-Identifier: Apache-2.0
"""A newcomer's walk: a Hugging Face folder in, a text, a mesh; trained, resumed elsewhere, and a folder out."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import hyper_parallel.cli.train  # noqa: F401 - it adds its command
from hyper_parallel import init_device_mesh
from hyper_parallel.cli.checkpoints import application
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.recipe import RecipeError, read_recipe
from hyper_parallel.recipe import build as building
from hyper_parallel.testing import run_ranks

LONG = 300  # seconds: the first job on a rank imports transformers
SIZES = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
KEYS = ["steps=2", "data.length=16", "data.batch=4", "data.tokens=bytes", "schedule.warmup=0"]  # fmt: skip
TEXT = "the quick brown fox jumps over the lazy dog. " * 200


def write_tokenizer(folder):
    """One token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"</s>": 0, **{letter: i for i, letter in enumerate(alphabet, 1)}}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    fast.save_pretrained(folder)


@pytest.fixture(scope="module", params=["llama", "mixtral"])
def folder(request, tmp_path_factory):
    """Weights are drawn at random; those of each Mixtral expert are stored by themselves."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    root = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    if request.param == "llama":
        config = transformers.LlamaConfig(**SIZES)
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.MixtralConfig(**SIZES, num_local_experts=4)
        model = transformers.MixtralForCausalLM(config)
    model.save_pretrained(root / "model")
    (root / "text.txt").write_text(TEXT)
    return root / "model"


def keys_of(folder, mesh):
    text = f"data.text={Path(folder).parent / 'text.txt'}"
    return [*KEYS, text, f"mesh={mesh}", f"folder={Path(folder).parent / 'run'}"]


def losses_of(folder, mesh_keys):
    """The losses of two steps, and the largest difference of the weights on the mesh from those of the files."""
    recipe = read_recipe(folder, keys_of(folder, mesh_keys))
    mesh = None
    if recipe.ranks > 1:
        mesh = init_device_mesh(
            "cpu", recipe.mesh_shape, mesh_dim_names=tuple(recipe.axes)
        )
    job = building.build(recipe, mesh)
    different = []
    if mesh is not None and "pp" not in recipe.axes:
        stored = load_file(Path(folder) / "model.safetensors")
        for name, parameter in job.model.named_parameters():
            whole = parameter.detach()
            whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
            if name in stored and not torch.equal(whole, stored[name]):
                different.append(name)
    trained = [one for one in job.model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-2)
    losses = [job.train(step, optimizer, 1.0)["loss"] for step in range(2)]
    return losses, different


def test_losses_are_those_of_one_process_on_every_mesh(folder):
    is_mixture = "Mixtral" in (folder / "config.json").read_text()
    [(expected, _)] = run_ranks(losses_of, 1, folder, "{tp: 1}", timeout=LONG)
    meshes = ["{tp: 2}", "{ep: 2}"] if is_mixture else ["{tp: 2}", "{dp_shard: 2}", "{pp: 2}"]  # fmt: skip
    for mesh in meshes:
        for losses, different in run_ranks(losses_of, 2, folder, mesh, timeout=LONG):
            torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
            assert different == [], mesh


def whole_read(*_):
    raise AssertionError("the folder was read as a whole on every rank")


def read_straight(folder):
    """The bytes that a rank has of parameters, where a read of the whole model raises."""
    plain = building.huggingface.model_of

    def model_of(*args, weights):
        return whole_read() if weights else plain(*args, weights=weights)

    building.huggingface.model_of = model_of
    try:
        recipe = read_recipe(folder, keys_of(folder, "{tp: 2}"))
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        model = building.build(recipe, mesh).model
    finally:
        building.huggingface.model_of = plain
    local = sum(one.to_local().nbytes for one in model.parameters())
    return local, sum(one.nbytes for one in model.parameters())


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_weights_are_read_straight_to_their_shards(folder):
    for local, whole in run_ranks(read_straight, 2, folder, timeout=LONG):
        assert whole / 2 <= local < 0.51 * whole


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_the_walk(folder, monkeypatch):
    """Train with a folder, a text and mesh.tp=2; resume on one rank; export; load in transformers."""
    from transformers import LlamaForCausalLM

    monkeypatch.chdir(folder.parent)
    write_tokenizer(folder)
    small = ["data.length=16", "data.batch=4", "schedule.warmup=0"]

    def call(*arguments):
        run = CliRunner().invoke(application, list(map(str, arguments)))
        assert run.exit_code == 0, run.output
        return run.output

    call("train", "model", "data.text=text.txt", "mesh.tp=2", "steps=2", *small)
    assert "q_proj" in Path("runs/model/plan.yaml").read_text()
    arguments = ["model", "data.text=text.txt", "steps=3", *small]
    call("train", *arguments, "--resume", "auto")
    call("ckpt", "convert", "runs/model/step-00000003", "out", "--to", "huggingface")
    Path("out/config.json").write_text(Path("model/config.json").read_text())
    _, told = LlamaForCausalLM.from_pretrained("out", output_loading_info=True)
    assert not any(told.values()), told
    lines = Path("runs/model/log.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert [one["step"] for one in steps if "loss" in one] == [1, 2, 3]


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_weights_that_do_not_fit_the_config_are_told_before_any_rank_starts(
    folder, tmp_path
):
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] = torch.zeros(299, 16)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(RecipeError, match=r"has the shape \[299, 16\], but config"):
        read_recipe(tmp_path, keys_of(folder, "{tp: 2}"))
