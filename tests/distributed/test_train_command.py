# SPDX-License-Identifier: Apache-2.0
"""Training from recipes: the examples, exact resume on any mesh, signals, and ranks that die."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from hyper_parallel.cli.train import run as run_command
from hyper_parallel.core.distributed_checkpoint import read_objects
from hyper_parallel.core.distributed_checkpoint.inspection import compare_checkpoints
from hyper_parallel.ranks.environment import build_environment
from hyper_parallel.recipe import RecipeError, read_recipe, training
from hyper_parallel.recipe.training import train
from hyper_parallel.testing import run_ranks

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "examples" / "recipes"
SIZES = {"dim": 32, "layers": 2, "hidden": 48, "context": 16}
MODEL = [f"model.arguments.{name}={size}" for name, size in SIZES.items()]
SMALL = [
    *MODEL,
    "data.length=16",
    "data.batch=4",
    "schedule.warmup=4",
    "optimizer.lr=3e-3",
    "evaluation.batches=2",
]


def log_of(folder):
    return {
        facts["step"]: facts
        for facts in map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    }


def losses_of(folder):
    return {step: facts["loss"] for step, facts in log_of(folder).items()}


def train_here(name, folder, *overrides, nproc=1, resume=None):
    """In this process, or on every rank of a pool."""
    recipe = read_recipe(
        RECIPES / f"{name}.yaml", [*overrides, f"folder={folder}"], nproc
    )
    outcome = train(recipe, resume)
    return outcome.step, outcome.stopped


def on_mesh(name, ranks, folder, *overrides, resume=None):
    return run_ranks(
        train_here,
        ranks,
        name,
        folder,
        *overrides,
        nproc=ranks,
        resume=resume,
        timeout=200,
    )


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """More would wait for each other beside the rank processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The demo in twelve steps, by one process, in float64."""
    folder = tmp_path_factory.mktemp("alone")
    train_here(
        "demo",
        folder,
        *SMALL,
        "steps=12",
        "precision=float64",
        "checkpoints.every=4",
        "checkpoints.keep=null",
    )
    return folder


MESHES = {
    "2x2": ("mesh.tp=2", "plan.arguments.sequence_parallel=true"),
    "4x1": ("plan={}",),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_the_demo_on_meshes_has_the_losses_of_one_process_and_goes_on_from_them(
    tmp_path, alone, mesh
):
    """From the start, and from a checkpoint that another mesh has written."""
    common = [*SMALL, "steps=12", "precision=float64", *MESHES[mesh]]
    on_mesh("demo", 4, tmp_path / "whole", *common, "checkpoints.every=6")
    true, mine = log_of(alone), log_of(tmp_path / "whole")
    assert list(mine) == list(range(1, 13))
    for step, facts in true.items():
        for name in facts.keys() - {
            "tokens_per_second",
            "memory",
        }:  # loss, rate, norm, at the end held_out
            assert mine[step][name] == pytest.approx(facts[name], rel=1e-9), (
                step,
                name,
            )
    assert "held_out" in mine[12]
    on_mesh(
        "demo", 4, tmp_path / "further", *common, resume=str(alone / "step-00000008")
    )
    assert losses_of(tmp_path / "further") == pytest.approx(
        {n: true[n]["loss"] for n in range(9, 13)}, rel=1e-9
    )
    found = compare_checkpoints(
        tmp_path / "whole/step-00000012",
        alone / "step-00000012",
        prefixes=("model.", "model."),
    )
    assert not found.only_in_first
    assert max((told.largest for told in found.values.values()), default=0) < 1e-9


def test_resuming_on_the_same_mesh_is_exact_to_the_last_bit(tmp_path):
    common = [*SMALL, "mesh.tp=2", "checkpoints.every=4", "checkpoints.keep=2"]
    on_mesh("demo", 2, tmp_path / "whole", *common, "steps=12")
    assert sorted(path.name for path in (tmp_path / "whole").glob("step-*")) == [
        "step-00000008",
        "step-00000012",
    ]
    on_mesh(
        "demo", 2, tmp_path / "parts", *common, "steps=8", "schedule.decay_steps=12"
    )
    assert (
        on_mesh("demo", 2, tmp_path / "parts", *common, "steps=12", resume="auto")
        == [(12, False)] * 2
    )
    assert losses_of(tmp_path / "parts") == losses_of(
        tmp_path / "whole"
    )  # one log, of all steps
    found = compare_checkpoints(
        *(tmp_path / run / "step-00000012" for run in ("parts", "whole")),
        prefixes=("model.",) * 2,
    )
    assert found.is_equal
    assert found.compared > 20


def test_what_cannot_be_gone_on_from_is_named(tmp_path, alone):
    def refused(told, *overrides, folder, resume):
        with pytest.raises(RecipeError, match=told):
            train_here(
                "demo", folder, *SMALL, "precision=float64", *overrides, resume=resume
            )

    refused(
        r"has a checkpoint, step-00000012; go on with --resume auto",
        "steps=20",
        folder=alone,
        resume=None,
    )
    refused(
        r"has done 12 steps already; say more", "steps=12", folder=alone, resume="auto"
    )
    refused(r"there is no whole checkpoint in", folder=tmp_path, resume=str(tmp_path))
    other_size = r"--resume: .*step-00000012 does not fit: .*blocks\.0\.mlp\.\w+\.weight.*(40|48)"
    refused(
        other_size,
        "model.arguments.hidden=40",
        "steps=20",
        folder=tmp_path,
        resume=str(alone),
    )
    (tmp_path / "text.txt").write_text("abcdefghijklmnopqrstuvwxyz " * 100)
    refused(r"the text is not the one that", f"data.text={tmp_path}", "data.corpus=null", "steps=20",
            folder=tmp_path / "other", resume=str(alone))  # fmt: skip


def test_auto_begins_where_there_is_nothing_and_tells_what_is_not_as_before(
    tmp_path, capsys
):
    common = [*SMALL, "logging.every=1", "evaluation.every=0"]
    train_here("demo", tmp_path, *common, "steps=5", resume="auto")
    train_here("demo", tmp_path, *common, "steps=6", "optimizer.lr=1e-3", resume="auto")
    out = capsys.readouterr().out
    assert f"going on from {tmp_path / 'step-00000005'}, after step 5" in out
    assert "not as before: optimizer.lr was 0.003 and is 0.001" in out
    assert "not as before: schedule.decay_steps was 5 and is 6" in out
    assert re.search(
        r"^step 6/6: loss \d\.\d{4}, [\d,]+ tokens/s, [\d,]+ MiB, 00:00:00 left$",
        out,
        re.MULTILINE,
    )
    assert "\x1b" not in out  # no colour where there is no terminal


# --- the other recipes


def test_text_files_by_a_plan_in_the_recipe(tmp_path):
    """With TensorBoard's log and the ledger of a step."""
    sizes = [
        *SMALL,
        "steps=6",
        "evaluation.every=3",
        "precision=float64",
        "logging.collectives=true",
    ]
    train_here("text", tmp_path / "one", *sizes)
    on_mesh("text", 2, tmp_path / "two", *sizes, "mesh.tp=2")
    assert losses_of(tmp_path / "two") == pytest.approx(
        losses_of(tmp_path / "one"), rel=1e-9
    )
    assert [
        step for step, facts in log_of(tmp_path / "two").items() if "held_out" in facts
    ] == [3, 6]
    entries = json.loads((tmp_path / "two/collectives.json").read_text())
    moved = [
        entry
        for entry in entries
        if entry["axis"] == "tp" and entry["nbytes"] > 64 and not entry["backward"]
    ]
    # Two exchanges a layer, one for the embedding and one for the loss.
    assert [entry["collective"] for entry in moved].count("all_reduce") == 5
    assert scalars(tmp_path / "two/tensorboard", "loss") == pytest.approx(
        losses_of(tmp_path / "two"), rel=1e-6
    )


def scalars(folder, tag):
    """What TensorBoard itself reads."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    found = events.Tensors(tag)
    return {event.step: event.tensor_proto.float_val[0] for event in found}


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory):
    """A folder as save_pretrained() makes it: a small Llama and a tokenizer of bytes."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("huggingface")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(
            vocab={mark: n for n, mark in enumerate(["<end>", *alphabet])}, merges=[]
        )
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>"
    ).save_pretrained(folder)
    torch.manual_seed(5)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=257, eos_token_id=0)
    )
    model.save_pretrained(folder)
    return folder


def test_a_folder_of_hugging_face(tmp_path, hugging_face):
    """The first loss is that of the model itself, by transformers."""
    (tmp_path / "a.txt").write_text("We have the best of text. " * 40)
    options = [
        f"model.huggingface={hugging_face}",
        f"data.text={tmp_path}",
        "data.files=*.txt",
        "data.length=16",
    ]
    options += ["steps=3", "schedule.warmup=1", "data.held_out=0.1"]
    train_here("huggingface", tmp_path / "one", *options, "mesh.tp=1")
    on_mesh("huggingface", 2, tmp_path / "two", *options)
    assert losses_of(tmp_path / "two") == pytest.approx(
        losses_of(tmp_path / "one"), rel=1e-5
    )

    from transformers import AutoModelForCausalLM

    from hyper_parallel.recipe.build import build

    recipe = read_recipe(RECIPES / "huggingface.yaml", [*options, "mesh.tp=1"])
    ids, targets = build(recipe, None).batch(0)
    model = AutoModelForCausalLM.from_pretrained(hugging_face)
    whole = torch.cat([ids, targets[:, -1:]], dim=1)
    assert losses_of(tmp_path / "one")[1] == pytest.approx(
        model(whole, labels=whole).loss.item(), rel=1e-6
    )
    with pytest.raises(
        RecipeError, match=r"plan\.function: 'transformer\.wte' matches no module"
    ):
        run_ranks_error(
            "huggingface", tmp_path / "three", *options, "plan.function=gpt2"
        )


def run_ranks_error(name, folder, *overrides):
    """The error of the ranks, as itself."""
    from hyper_parallel.testing import RankError

    try:
        on_mesh(name, 2, folder, *overrides)
    except RankError as error:
        raise error.__cause__ or error from None


# --- signals and failures


STOPPING = """
import os, signal
import model

class Llama(model.Llama):
    calls = 0

    def __init__(self, config: model.Config):
        super().__init__(config)

    def forward(self, ids):
        Llama.calls += 1
        if Llama.calls == 5 and os.environ.get("RANK", "1") == "1":
            {what}
        return super().forward(ids)
"""


def own_model(folder, what):
    """The example's model with something that happens in its fifth step on one rank."""
    folder.mkdir(exist_ok=True)
    (folder / "stopping.py").write_text(STOPPING.format(what=what))
    return [f"model.file={folder / 'stopping.py'}"]


def stop_on_one_rank(folder, options):
    sys.path.insert(0, str(ROOT / "examples" / "llama"))
    from hyper_parallel.platform import get_platform

    os.environ["RANK"], os.environ["WORLD_SIZE"] = (
        str(get_platform().get_rank()),
        "2",
    )  # as a launcher's ranks have it
    return run_command(
        RECIPES / "demo.yaml", [*options, f"folder={folder}"], None, None
    )


def test_a_signal_to_one_rank_stops_all_and_a_job_of_a_launcher_is_joined(tmp_path):
    stopping = own_model(tmp_path, "os.kill(os.getpid(), signal.SIGTERM)")
    options = [*SMALL, *stopping, "mesh.tp=2", "steps=8", "evaluation.every=0"]
    assert run_ranks(stop_on_one_rank, 2, tmp_path / "run", options, timeout=100) == [
        3,
        3,
    ]
    assert list(losses_of(tmp_path / "run")) == [1, 2, 3, 4, 5]
    assert read_objects(tmp_path / "run/step-00000005")["checkpoint"]["step"] == 5


def start(*arguments):
    command = [
        sys.executable,
        "-c",
        "from hyper_parallel.cli import main; main()",
        "train",
        str(RECIPES / "demo.yaml"),
    ]
    paths = {"PYTHONPATH": str(ROOT / "examples" / "llama"), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [*command, *arguments], env={**os.environ, **paths}, **pipes
    )


def ended(process):
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, out, err


def wait_for_step(process, folder, step):
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if (folder / "log.jsonl").exists() and (folder / "log.jsonl").read_text().count(
            "\n"
        ) >= step:
            return
        time.sleep(0.02)
    pytest.fail(f"it did not come to step {step}: {ended(process)}")


def test_a_rank_that_raises_ends_the_job_with_its_traceback_first(tmp_path):
    raising = own_model(tmp_path, "raise RuntimeError('out of luck')")
    code, _, err = ended(
        start(
            *SMALL,
            *raising,
            "steps=100000",
            f"folder={tmp_path / 'run'}",
            "--nproc",
            "2",
            "plan={}",
        )
    )
    assert code == 1
    lines = err.splitlines()
    assert lines[0] == "rank 1 failed: [hyper-parallel explain HP706]"
    assert lines[1].startswith("Traceback")
    assert "stopping.py" in err
    place = lines.index("RuntimeError: out of luck")
    assert re.match(r"rank 0: .*(CommunicationError|did not end)", lines[place + 1])
    assert lines[place + 2 :] == [
        f"what the ranks wrote is in {tmp_path / 'run' / 'ranks'}"
    ]
    assert "out of luck" in (tmp_path / "run/ranks/rank-1.log").read_text()


def test_the_first_collectives_are_compared():
    """tests/distributed/test_order_check.py has what that does."""
    assert build_environment("torch", 2)["HYPER_PARALLEL_CHECK_ORDER"] == "first:100"


def test_sigterm_saves_and_does_not_change_what_comes_out(tmp_path):
    """Stopped, and gone on with one process: the losses are those of a run in one go. (test_demo kills a rank.)"""
    common = [
        *SMALL,
        "mesh.tp=2",
        "evaluation.every=0",
        "checkpoints.every=10",
        "steps=100000",
    ]
    process = start(*common, f"folder={tmp_path}")
    wait_for_step(process, tmp_path, 3)
    process.send_signal(signal.SIGTERM)
    code, out, err = ended(process)
    assert (code, err) == (3, "")
    [step] = re.findall(r"stopped after step (\d+); saved in ", out)
    assert list(losses_of(tmp_path)) == list(range(1, int(step) + 1))

    schedule = [f"steps={int(step) + 4}", "schedule.decay_steps=100000"]
    one = [option for option in common if not option.startswith("steps")]
    train_here("demo", tmp_path, *one, *schedule, "mesh.tp=1", resume="auto")
    train_here("demo", tmp_path / "whole", *one, *schedule, "mesh.tp=1")
    found, true = losses_of(tmp_path), losses_of(tmp_path / "whole")
    assert list(found) == list(true)
    np.testing.assert_allclose(
        list(found.values()), list(true.values()), rtol=2e-4
    )  # float32, over many steps


def is_running(process):
    try:
        return (
            Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
            not in "ZX"
        )
    except OSError:
        return False


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_ranks_that_are_stuck_end_with_a_signal_and_with_their_launcher(tmp_path, how):
    """One rank stands still, as a host that cannot be reached; the other waits for it in a collective."""
    standing = own_model(tmp_path, "os.kill(os.getpid(), signal.SIGSTOP)")
    folder = tmp_path / "run"
    options = [
        "mesh.tp=2",
        "evaluation.every=0",
        "steps=100000",
        "communication.grace=1",
        f"folder={folder}",
    ]
    process = start(*SMALL, *standing, *options)
    wait_for_step(process, folder, 4)
    ranks = json.loads((folder / "run.json").read_text())["processes"]
    time.sleep(1.0)  # now it waits
    process.send_signal(getattr(signal, how))
    code, _, err = ended(process)
    if how == "SIGTERM":
        assert code == 1
        assert re.search(
            r"rank 0: it was asked to stop, but has waited in \w+ for \d+ s and could not save",
            err,
        ), err
    deadline = time.monotonic() + 10
    while any(map(is_running, ranks)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, ranks))


def test_the_time_of_the_recipe_is_that_of_the_groups(monkeypatch):
    """tests/distributed/test_told_in_time.py has what happens when it is over."""
    given = []

    def join(**options):
        given.append(options)
        raise InterruptedError

    monkeypatch.setattr(training.platform, "init_process_group", join)
    for overrides, seconds in (([], 600), (["communication.timeout=90.5"], 90.5)):
        with pytest.raises(InterruptedError):
            train(read_recipe(RECIPES / "demo.yaml", [*SMALL, "mesh.tp=2", *overrides]))
        assert given.pop() == {"timeout": seconds}
    for wrong in ("0", "-1", "long", ".inf"):
        with pytest.raises(RecipeError, match=r"communication\.timeout"):
            read_recipe(RECIPES / "demo.yaml", [f"communication.timeout={wrong}"])
