# SPDX-License-Identifier: Apache-2.0
"""Files of Hugging Face against the libraries that define them, safetensors and transformers, in both directions."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.recipes import transformers_plans as plans
from hyper_parallel import (
    Replicate,
    Shard,
    distribute_tensor,
    get_platform,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.distributed_checkpoint import hugging_face
from hyper_parallel.core.distributed_checkpoint.api import load, save
from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.hugging_face import (
    HuggingFaceReader,
    export_hugging_face,
    save_hugging_face,
)
from hyper_parallel.core.distributed_checkpoint.inspection import compare_checkpoints
from hyper_parallel.core.distributed_checkpoint.state_dict import PerRank
from hyper_parallel.testing import run_ranks

LONG = 300  # seconds: the first job on a rank imports transformers


def model_of(kind):
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.manual_seed(0)
    if kind == "gpt2":
        from transformers.models.gpt2 import modeling_gpt2 as home

        sizes = {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 32,
            "bos_token_id": 1,
            "eos_token_id": 1,
        }
        return home.GPT2LMHeadModel(home.GPT2Config(vocab_size=61, **sizes))
    from transformers.models.llama import modeling_llama as home

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return home.LlamaForCausalLM(
        home.LlamaConfig(vocab_size=61, tie_word_embeddings=True, **sizes)
    )


def index_of(folder):
    return json.loads((Path(folder) / "model.safetensors.index.json").read_text())


def through_a_mesh(kind, folder):
    """From their folder into a model on a mesh, from there to a folder of ours, and from that to a model of theirs."""
    theirs, ours, is_first = (
        folder / "theirs",
        folder / "ours",
        get_platform().get_rank() == 0,
    )
    one, model = model_of(kind), model_of(kind)
    expected = one.state_dict()
    if is_first:
        one.save_pretrained(theirs, max_shard_size="10KB")
    get_platform().barrier()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, getattr(plans, kind)(model.config))
    state = model.state_dict()
    report = load(state, checkpoint_id=theirs)
    assert set(report.loaded) == set(expected)
    assert report.resharded  # it was no load of whole tensors
    for name, tensor in expected.items():
        assert torch.equal(state[name].full_tensor(), tensor), name
    files = save_hugging_face(state, ours, max_shard_bytes=10_000)
    assert {*files.values(), "model.safetensors.index.json"} == {
        path.name for path in ours.iterdir()
    }
    get_platform().barrier()
    if is_first:
        one.config.save_pretrained(ours)
        found, told = type(one).from_pretrained(ours, output_loading_info=True)
        assert not any(told.values()), told
        for name, tensor in expected.items():
            assert torch.equal(found.state_dict()[name], tensor), name
    return files


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_models_of_transformers_go_through_a_mesh_bit_by_bit(kind, tmp_path):
    files, again = run_ranks(through_a_mesh, 2, kind, tmp_path, timeout=LONG)
    theirs, ours = index_of(tmp_path / "theirs"), index_of(tmp_path / "ours")
    assert "lm_head.weight" not in theirs["weight_map"]  # it is tied
    assert files == again == ours["weight_map"]
    assert files.keys() == theirs["weight_map"].keys()
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    for name in set(files.values()):
        tensors = load_file(tmp_path / "ours" / name)
        assert tensors.keys() == {key for key, file in files.items() if file == name}
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 10_000


def bytes_read(folder):
    mesh = init_device_mesh("cpu", (2,))
    counts = []
    for placement in (Shard(0), Shard(1)):
        state = {
            name: distribute_tensor(torch.zeros(256, 4096), mesh, [placement])
            for name in ("a", "b")
        }
        reader = HuggingFaceReader(folder)
        report = load(state, storage_reader=reader)
        expected = load_file(f"{folder}/1.safetensors") | load_file(
            f"{folder}/2.safetensors"
        )
        assert all(
            torch.equal(state[name].full_tensor(), expected[name]) for name in state
        )
        counts.append((report.bytes, report.bytes_read))
    return counts


def sharded(folder, **changes):
    """A folder of two files, and what is to be different in its index."""
    torch.manual_seed(1)
    shape = changes.pop("shape", (4, 3))
    folder.mkdir()
    save_file({"a": torch.randn(shape)}, folder / "1.safetensors")
    save_file({"b": torch.randn(shape)}, folder / "2.safetensors")
    places = {"a": "1.safetensors", "b": "2.safetensors"} | changes
    places = {name: place for name, place in places.items() if place is not None}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places})
    )
    return folder


def test_each_rank_reads_its_share(tmp_path):
    folder = sharded(tmp_path / "hf", shape=(256, 4096))
    share = 256 * 4096 * 4
    assert run_ranks(bytes_read, 2, str(folder)) == [[(share, share)] * 2] * 2


def job_of_one_error(folder):
    """One rank cannot write its shard; nothing is left, and all know."""
    mesh = init_device_mesh("cpu", (2,))
    state = {
        name: distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)]) for name in "abcd"
    }
    write = hugging_face.write_plain_file

    def fails(path, *rest):
        if "00002" in path.name:
            raise CheckpointError("no room", file=path)
        write(path, *rest)

    hugging_face.write_plain_file = fails
    try:
        save_hugging_face(state, folder, max_shard_bytes=256)
    except CheckpointError as error:
        get_platform().barrier()
        return str(error), list(Path(folder).iterdir())
    finally:
        hugging_face.write_plain_file = write


def test_an_error_of_one_rank_is_an_error_of_all_and_leaves_nothing(tmp_path):
    for told, left in run_ranks(job_of_one_error, 2, str(tmp_path / "hf")):
        assert "00002-of-00004.safetensors.tmp: no room [rank 1]" in told
        assert left == []


def job_of_layouts(folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(2)
    w, odd = torch.randn(6, 10), torch.randn(7, 5).to(torch.bfloat16)
    lies = {
        "model": {
            "w": distribute_tensor(w, mesh, [Shard(1), Shard(0)]),
            "odd": distribute_tensor(odd, mesh, [Shard(0), Shard(0)]),
            "copied": distribute_tensor(w, mesh, [Replicate(), Replicate()]),
            "number": torch.tensor(7),
        },
        "step": 3,
        "own": PerRank(get_platform().get_rank()),
    }
    lies["model"]["tied"] = lies["model"]["w"].detach()
    save(lies, checkpoint_id=f"{folder}/four")
    plain = {
        "w": w,
        "odd": odd,
        "copied": w.clone(),
        "number": torch.tensor(7),
        "tied": w,
    }
    if get_platform().get_rank() == 0:
        save({"model": plain, "step": 3}, checkpoint_id=f"{folder}/one", no_dist=True)
    return export_hugging_face(
        f"{folder}/four", f"{folder}/hf", max_shard_bytes=100, dtype=torch.float64
    )


def test_a_checkpoint_of_four_ranks_is_compared_and_exported(tmp_path):
    files = run_ranks(job_of_layouts, 4, str(tmp_path))[3]
    found = compare_checkpoints(tmp_path / "four", tmp_path / "one")
    assert (found.only_in_first, found.only_in_second) == (("own",), ())
    assert not found.kinds
    assert not found.values
    assert not found.objects
    assert sorted(files) == ["copied", "number", "odd", "tied"]  # w is the same as tied
    torch.manual_seed(2)
    w, odd = torch.randn(6, 10), torch.randn(7, 5).to(torch.bfloat16)
    expected = {
        "copied": w.double(),
        "tied": w.double(),
        "odd": odd.double(),
        "number": torch.tensor(7),
    }
    for name, file in files.items():
        tensor = load_file(tmp_path / "hf" / file)[name]
        assert tensor.dtype is expected[name].dtype
        assert torch.equal(tensor, expected[name])


# --- one process


def test_names_are_changed_on_the_way(tmp_path):
    folder = sharded(tmp_path / "hf")
    state = {"model": {"a": torch.zeros(4, 3), "c": torch.zeros(4, 3)}}
    names = {"a": "model.a", "b": "model.c"}
    load(state, storage_reader=HuggingFaceReader(folder, rename=names))
    assert torch.equal(state["model"]["c"], load_file(folder / "2.safetensors")["b"])
    state["model"]["a"].zero_()
    load(state, storage_reader=HuggingFaceReader(folder, rename=names.__getitem__))
    assert torch.equal(state["model"]["a"], load_file(folder / "1.safetensors")["a"])
    with pytest.raises(CheckpointError, match='"a" and "b" both become "x"'):
        HuggingFaceReader(folder, rename=lambda name: "x").load_metadata()
    save_hugging_face(
        {"a": torch.ones(2)}, tmp_path / "out", names=lambda name: f"net.{name}"
    )
    assert list(load_file(tmp_path / "out" / "model.safetensors")) == ["net.a"]


def test_links_are_followed_when_asked(tmp_path):
    folder = sharded(tmp_path / "hf")
    for name in ("2.safetensors", "model.safetensors.index.json"):
        (folder / name).rename(tmp_path / f"blob-{name}")
        (folder / name).symlink_to(tmp_path / f"blob-{name}")
        state = {"a": torch.zeros(4, 3), "b": torch.zeros(4, 3)}
        with pytest.raises(
            CheckpointError, match=f"{name}: a link, .*follow_links=True"
        ) as told:
            load(state, checkpoint_id=folder)
        assert Path(told.value.file).name == name
        load(state, storage_reader=HuggingFaceReader(folder, follow_links=True))
        assert torch.equal(state["b"], load_file(tmp_path / "blob-2.safetensors")["b"])


@pytest.mark.parametrize(
    "place",
    [
        "../2.safetensors", "/2.safetensors", "x/2.safetensors", "x\\2.safetensors", "2.bin", "", "2.safetensors\0",
        "\0.safetensors", 3, ["2.safetensors"], "\ud800.safetensors", "2" * 300 + ".safetensors",
    ],
)  # fmt: skip
def test_a_place_outside_of_the_folder_is_refused(place, tmp_path):
    folder = sharded(tmp_path / "hf", b=place)
    with pytest.raises(
        CheckpointError, match=r"index\.json: weight_map\.b: expected"
    ) as told:
        HuggingFaceReader(folder).load_metadata()
    assert told.value.field == "weight_map.b"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": "3.safetensors"}, "3.safetensors: cannot be opened: No such file"),
        ({"b": "1.safetensors"}, '1.safetensors: "b": is not in the file'),
        ({"c": "2.safetensors"}, '2.safetensors: "c": is not in the file'),
        (
            {"b": "1.safetensors", "a": "2.safetensors"},
            '2.safetensors: "a": is not in the file',
        ),
        ({"a": None, "c": "1.safetensors"}, '1.safetensors: "c": is not in the file'),
    ],
)
def test_an_index_of_other_files_is_refused(change, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        HuggingFaceReader(sharded(tmp_path / "hf", **change)).load_metadata()


def test_a_tensor_that_the_index_does_not_name_is_refused(tmp_path):
    folder = sharded(tmp_path / "hf")
    save_file({"b": torch.ones(1), "more": torch.ones(1)}, folder / "2.safetensors")
    with pytest.raises(
        CheckpointError,
        match='2.safetensors: "more": is in the file, but was not expected',
    ):
        HuggingFaceReader(folder).load_metadata()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested 100000 levels deep"),
        ('{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}', "twice"),
        ('{"weight_map": []}', "weight_map: expected an object"),
        ("{}", "weight_map"),
        ("[]", "expected an object"),
        ("{", "cannot be read as JSON"),
    ],
)
def test_a_damaged_index_is_refused(text, message, tmp_path):
    folder = sharded(tmp_path / "hf")
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        HuggingFaceReader(folder).load_metadata()


def test_a_large_index_and_a_short_file_are_refused(tmp_path, monkeypatch):
    folder = sharded(tmp_path / "hf")
    whole = (folder / "2.safetensors").read_bytes()
    (folder / "2.safetensors").write_bytes(whole[:-1])
    with pytest.raises(
        CheckpointError, match="2.safetensors: the header tells of .* it was cut short"
    ):
        HuggingFaceReader(folder).load_metadata()
    (folder / "2.safetensors").write_bytes(whole)
    HuggingFaceReader(folder).load_metadata()
    monkeypatch.setattr(hugging_face, "MOST_INDEX_BYTES", 10)
    with pytest.raises(CheckpointError, match="at most 10 bytes were expected"):
        HuggingFaceReader(folder).load_metadata()


def test_what_is_there_is_written_over_when_asked(tmp_path):
    folder = tmp_path / "hf"
    state = {name: torch.full((8,), float(n)) for n, name in enumerate("abc")}
    save_hugging_face(state, folder, max_shard_bytes=32)
    (folder / "config.json").write_text("{}")
    with pytest.raises(
        CheckpointError,
        match="there are weights already: model-00001-of-00003.* overwrite=True",
    ):
        save_hugging_face({"a": torch.ones(2)}, folder)
    assert len(load_file(folder / "model-00003-of-00003.safetensors")) == 1
    save_hugging_face({"a": torch.ones(2)}, folder, overwrite=True)
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
    }
    save_hugging_face(state, folder, max_shard_bytes=64, overwrite=True)
    assert len({path.name for path in folder.iterdir()}) == 4
    found = {name: torch.zeros(8) for name in state}
    load(found, checkpoint_id=folder)
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_only_tensors_are_taken(tmp_path):
    for value, kind in ((3, "int"), (PerRank(torch.ones(2)), "PerRank")):
        with pytest.raises(CheckpointError, match=f"step: only tensors .* got {kind}"):
            save_hugging_face({"a": torch.ones(2), "step": value}, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_an_export_says_what_prefixes_there_are(tmp_path):
    save(
        {"net": {"a": torch.ones(2)}, "ema": {"a": torch.ones(2)}},
        checkpoint_id=tmp_path / "c",
        no_dist=True,
    )
    with pytest.raises(
        CheckpointError, match="begins with 'model.'; there are ema, net"
    ):
        export_hugging_face(tmp_path / "c", tmp_path / "hf")
    with pytest.raises(ValueError, match="ends with a dot"):
        export_hugging_face(tmp_path / "c", tmp_path / "hf", prefix="net")
    assert export_hugging_face(tmp_path / "c", tmp_path / "hf", prefix="net.") == {
        "a": "model.safetensors"
    }
