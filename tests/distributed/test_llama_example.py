# SPDX-License-Identifier: Apache-2.0
"""The example trains on meshes as one process does: losses, parameters, collectives and checkpoints."""

import itertools
import json
import re
from collections import Counter
from pathlib import Path

import demo
import pytest
import torch
from thorough import THOROUGH

import data
import model as example
import plan
import train
from hyper_parallel import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from hyper_parallel.core.distributed_checkpoint.convert import checkpoint_to_state_dict
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.core.dtensor.modes import strict
from hyper_parallel.testing import run_ranks

EXAMPLE = Path(train.__file__).parent
SMALL = "--layers 2 --dim 32 --hidden 48 --context 16 --batch 4 --warmup 4 --rate 3e-3 --dtype float64"
SIZES = {
    "even": "",
    "uneven": "--vocab 259 --hidden 37 --context 13 --dim 48",  # none of which two or four ranks share evenly, but dim
    "tied": "--tied",
}


def options_of(out, text):
    sizes = "" if "--resume" in text else SMALL  # a checkpoint knows them
    return train.read_options(f"{sizes} --evaluate-every 10 {text} --out {out}".split())


def train_on_mesh(out, text, shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    with strict():
        model = train.train(options_of(out, text), mesh)
    for (
        parameter
    ) in model.parameters():  # copies are equal on all ranks, to the last bit
        layout, whole = parameter.layout, parameter.shape
        DTensor.from_local(
            parameter.to_local().detach(), None, layout, shape=whole, run_check=True
        )


def train_alone(out, text):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more would wait for each other beside the rank processes
    try:
        train.train(options_of(out, text))
    finally:
        torch.set_num_threads(threads)
    return out


def tensors_of(run):
    """What the last checkpoint holds of the model and the optimizer."""
    state = checkpoint_to_state_dict(train.latest(run))
    moments = {
        f"{name}.{key}": value
        for name, of in state["optimizer"]["state"].items()
        for key, value in of.items()
    }
    return {**state["model"], **moments}


def compare(one, many, tolerance=1e-8):
    """All that two runs logged, and all that their last checkpoints hold."""
    logs = [
        [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        for run in (one, many)
    ]
    last = len(logs[1])  # a run that was resumed in a folder of its own logs the rest
    for true, mine in zip(logs[0][-last:], logs[1], strict=True):
        assert mine == pytest.approx(true, rel=tolerance, abs=tolerance)
    true, mine = (tensors_of(run) for run in (one, many))
    assert true.keys() == mine.keys()
    for name in true:
        torch.testing.assert_close(
            mine[name],
            true[name],
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Twenty steps as one process, for each of the sizes."""
    folder = tmp_path_factory.mktemp("alone")
    return {
        name: train_alone(folder / name, f"{text} --steps 20")
        for name, text in SIZES.items()
    }


MESHES = [(1, 2), (1, 4), (2, 2)]
SEQUENCES = ["", "--sequence-parallel"]
SEQUENCE = pytest.mark.parametrize(
    "sequence", SEQUENCES, ids=["whole", "sequence parallel"]
)


RUNS = [
    *itertools.product(("even", "uneven"), MESHES, SEQUENCES),
    *itertools.product(["tied"], [(2, 2)], SEQUENCES),
]
SOME = [
    ("even", (2, 2), SEQUENCES[0]),
    ("uneven", (1, 4), SEQUENCES[0]),
    ("uneven", (2, 2), SEQUENCES[1]),
    ("tied", (2, 2), SEQUENCES[1]),
    ("even", (1, 2), SEQUENCES[1]),
]


@pytest.mark.parametrize(
    ("sizes", "shape", "sequence"), RUNS if THOROUGH else SOME, ids=str
)
def test_twenty_steps_equal_one_process(tmp_path, alone, sizes, shape, sequence):
    text = f"{SIZES[sizes]} {sequence} --steps 20"
    run_ranks(train_on_mesh, shape[0] * shape[1], tmp_path, text, shape, timeout=300)
    compare(alone[sizes], tmp_path)
    losses = list(demo.read_losses(tmp_path).values())
    assert losses[-1] < losses[0] - 0.5  # it learns


def refuse(sizes, told):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model = example.Llama(example.Config(dim=48, **sizes))
    with pytest.raises(ValueError, match=told):
        plan.put_on_mesh(model, mesh)


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        (
            {"heads": 6, "kv_heads": 6},
            r"blocks\.0\.attention\.wq: .* 6 heads cannot be shared evenly by the 4 ranks",
        ),
        (
            {"heads": 8, "kv_heads": 2},
            r"blocks\.0\.attention\.wk: .* 2 heads cannot be shared evenly by the 4 ranks",
        ),
    ],
    ids=["queries", "keys"],
)
def test_heads_that_the_ranks_cannot_share_are_refused(sizes, told):
    run_ranks(refuse, 4, sizes, told)


# --- collectives


def count_a_block(sequence_parallel):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model = example.Llama(example.Config(layers=1, dim=32, hidden=48, context=16))
    plan.put_on_mesh(model, mesh, sequence_parallel=sequence_parallel)
    stream = [Shard(1) if sequence_parallel else Replicate()]
    x = distribute_tensor(torch.randn(2, 16, 32).requires_grad_(), mesh, stream)
    with CommunicationLedger(mesh) as ledger:
        y = model.blocks[0](x, model.rotary)
        assert list(y.placements) == stream
        y.sum().backward()
    assert list(x.grad.placements) == stream
    return [(entry.collective, entry.backward) for entry in ledger.entries]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_block_costs_what_megatrons_costs(sequence_parallel):
    names = (
        ["all_gather_into_tensor", "reduce_scatter_tensor"]
        if sequence_parallel
        else ["all_reduce"]
    )
    expected = {(name, backward): 2 for name in names for backward in (False, True)}
    if sequence_parallel:
        expected["all_reduce", True] = (
            1  # the gradients of both norms, to which every rank has a part
        )
    for found in run_ranks(count_a_block, 4, sequence_parallel):
        assert Counter(found) == expected


TWO_LAYERS = {  # two exchanges a layer, one for the embedding and one for the head
    "": {("tp", "forward", "all-reduce"): 5, ("tp", "backward", "all-reduce"): 5},
    "--sequence-parallel": {
        **{
            ("tp", way, name): 5
            for way in ("forward", "backward")
            for name in ("all-gather", "reduce-scatter")
        },
        ("all axes", "backward", "all-reduce"): 1,  # the gradients of the norms
    },
}
EVERY_STEP = {
    ("dp", "backward", "all-reduce"): 1,  # all other gradients
    (
        "dp",
        "numbers",
        "all-reduce",
    ): 2,  # how many targets there are, and the loss to report it
    ("tp", "numbers", "all-gather"): 1,  # the norm of all gradients
}


@SEQUENCE
def test_a_step_costs_what_megatrons_costs(tmp_path, sequence):
    run_ranks(train_on_mesh, 4, tmp_path, f"{sequence} --steps 2", (2, 2))
    found = {
        kind: count
        for kind, (count, _) in demo.counted(tmp_path / "collectives.json").items()
    }
    expected = Counter(TWO_LAYERS[sequence]) + Counter(EVERY_STEP)
    expected["tp", "forward", "all-gather"] += (
        1  # the loss: of all ranks the largest logit, the sum and the target's
    )
    assert found == expected
    options = options_of(tmp_path, "")
    recipe = {
        "precision": {"parameters": options.dtype},
        "data": {"batch": options.batch, "length": options.context},
        "plan": {"arguments": {"sequence_parallel": bool(sequence)}},
    }
    theirs = demo.megatron(recipe, example.Llama(train.config_of(options)))
    assert sum(found.values()) <= sum(count for count, _ in theirs.values())


# --- data and checkpoints


def test_going_on_from_a_checkpoint_equals_one_go(tmp_path):
    """Also on another mesh: one process goes on with what a mesh began, and meshes with what one process began."""
    one = train_alone(tmp_path / "one", "--steps 10")
    half = "--steps 5 --decay-steps 10"
    run_ranks(train_on_mesh, 4, tmp_path / "mesh", half, (2, 2))
    train_alone(tmp_path / "half", half)
    train_alone(tmp_path / "mesh_to_one", f"--steps 10 --resume {tmp_path / 'mesh'}")
    compare(one, tmp_path / "mesh_to_one")
    for shape, sequence in ((2, 2), ""), ((1, 4), "--sequence-parallel"):
        out = tmp_path / f"one_to_{shape[0]}x{shape[1]}"
        run_ranks(
            train_on_mesh,
            4,
            out,
            f"--steps 10 --resume {tmp_path / 'half'} {sequence}",
            shape,
        )
        compare(one, out)


def test_a_checkpoint_that_is_being_written_is_not_taken(tmp_path):
    train_alone(tmp_path, "--steps 4 --save-every 2")
    (tmp_path / "step-00000006").mkdir()
    (tmp_path / "step-00000006" / "data-0123456789abcdef-00000.safetensors.tmp").touch()
    assert [folder.name for folder in sorted(tmp_path.glob("step*"))] == [
        f"step-0000000{n}" for n in (2, 4, 6)
    ]
    assert train.latest(tmp_path) == tmp_path / "step-00000004"
    assert train.latest(tmp_path / "step-00000002") == tmp_path / "step-00000002"
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        train.latest(tmp_path / "elsewhere")


def test_random_numbers_go_on_too(tmp_path):
    train_alone(tmp_path, "--steps 1")
    drawn = torch.rand(3)
    options = options_of(tmp_path, f"--steps 1 --resume {tmp_path}")
    train.train(options)
    torch.testing.assert_close(torch.rand(3), drawn, rtol=0, atol=0)


def test_ranks_share_the_rows_of_one_batch():
    whole, parts = (
        data.Corpus(6, 10, seed=3),
        [data.Corpus(6, 10, seed=3, part=part, parts=3) for part in range(3)],
    )
    for draw in ("training", "held_out"):
        rows = [getattr(part, draw)(7) for part in parts]
        for mine, true in zip(
            zip(*rows, strict=True), getattr(whole, draw)(7), strict=True
        ):
            assert torch.equal(torch.cat(mine), true)
    ids, targets = whole.training(7)
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    assert not torch.equal(ids, whole.training(8)[0])
    assert not torch.equal(ids, data.Corpus(6, 10, seed=4).training(7)[0])
    with pytest.raises(
        ValueError, match="a batch of 6 sequences cannot be shared evenly by 4"
    ):
        data.Corpus(6, 10, seed=3, part=0, parts=4)


def test_the_model_knows_nothing_of_parallelism():
    text = (EXAMPLE / "model.py").read_text()
    assert not re.search(
        r"parallel|distribut|mesh|shard|dtensor|\branks?\b|collective",
        text,
        re.IGNORECASE,
    )


def test_a_mesh_needs_processes(tmp_path):
    with pytest.raises(SystemExit, match="start this with torchrun"):
        train.join("2x2")
