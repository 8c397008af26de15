# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints of a run are kept, found, cleaned and loaded, on one process and on several."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from hyper_parallel import (
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    get_platform,
    init_device_mesh,
)
from hyper_parallel.core.distributed_checkpoint import manager as module
from hyper_parallel.core.distributed_checkpoint.api import read_metadata
from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.manager import CheckpointManager
from hyper_parallel.core.distributed_checkpoint.training_state import (
    ModelState,
    OptimizerState,
    RandomState,
)
from hyper_parallel.testing import on_ranks, run_ranks


def state_at(step):
    return {"x": torch.full((3,), float(step)), "step": step}


def saved(folder, steps, **options):
    """A manager that has saved these steps, or step: loss."""
    manager = CheckpointManager(folder, **options)
    for step in steps:
        metrics = {"loss": steps[step]} if isinstance(steps, dict) else None
        assert (
            manager.save(step, state_at(step), metrics) == folder / f"step-{step:08d}"
        )
    return manager


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def damage(folder):
    text = folder / "checkpoint.json"
    text.write_bytes(text.read_bytes()[:-30])


def test_a_run_starts_and_goes_on(tmp_path):
    manager = CheckpointManager(tmp_path / "runs" / "a")
    state = state_at(0)
    assert manager.load(state) is None
    assert (manager.steps(), manager.latest(), manager.best()) == ([], None, [])
    saved(manager.folder, [5, 7])
    assert manager.latest() == manager.folder / "step-00000007"
    report = manager.load(state)
    assert set(report.loaded) == {"x", "step"}
    assert state["step"] == 7
    assert state["x"].eq(7).all()
    manager.load(state, step=5)
    assert state["step"] == 5
    with pytest.raises(
        CheckpointError,
        match=r"step-00000006: there is no whole checkpoint of step 6; .* \[5, 7\]",
    ):
        manager.load(state, step=6)
    objects = read_metadata(manager.latest()).storage_data.objects
    assert objects["checkpoint.step"] == 7


def test_the_last_and_the_best_are_kept(tmp_path):
    losses = {1: 0.9, 2: 0.1, 3: float("nan"), 4: 0.5, 5: 0.1, 6: 0.7, 7: 0.8}
    manager = saved(tmp_path / "min", losses, keep_last=2, keep_best=2, metric="loss")
    assert manager.steps() == [2, 5, 6, 7]
    assert [path.name for path in manager.best()] == ["step-00000005", "step-00000002"]
    other = CheckpointManager(
        manager.folder, keep_best=3, metric="loss", mode="max"
    )  # which has to read the metrics
    assert [path.name for path in other.best()] == [
        "step-00000007",
        "step-00000006",
        "step-00000005",
    ]
    assert saved(
        tmp_path / "max", losses, keep_last=1, keep_best=1, metric="loss", mode="max"
    ).steps() == [1, 7]
    assert saved(
        tmp_path / "other", losses, keep_last=1, keep_best=1, metric="accuracy"
    ).steps() == [7]
    assert saved(tmp_path / "all", losses, keep_last=None).steps() == list(losses)


def test_a_step_that_is_saved_again(tmp_path):
    """After going back: it counts with its new metric, and is not removed for being old."""
    manager = saved(
        tmp_path, {1: 0.1, 2: 0.2, 3: 0.3}, keep_last=1, keep_best=1, metric="loss"
    )
    assert manager.steps() == [1, 3]
    manager.save(1, state_at(1), {"loss": 5.0})
    assert manager.steps() == [1, 3]
    assert [path.name for path in manager.best()] == ["step-00000003"]
    assert (
        len(
            [
                name
                for name in names(tmp_path / "step-00000001")
                if name.startswith("data-")
            ]
        )
        <= 2
    )
    manager.clean()
    assert (
        len(
            [
                name
                for name in names(tmp_path / "step-00000001")
                if name.startswith("data-")
            ]
        )
        == 1
    )
    manager.save(4, state_at(4), {"loss": 6.0})
    assert manager.steps() == [3, 4]


def test_what_is_not_known_stays(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "checkpoint.json").write_text("{}")
    folder = tmp_path / "run"
    for name in ("step-1", "step-000300", "best", "step-00000002x"):
        (folder / name).mkdir(parents=True)
        (folder / name / "x.tmp").touch()
    (folder / "step-00000007").symlink_to(outside)
    (folder / "log.jsonl").touch()
    manager = saved(folder, [1], keep_last=1)
    (folder / "step-00000001" / "notes.txt").touch()
    manager.save(2, state_at(2))
    assert manager.steps() == [2]
    assert names(folder / "step-00000001") == ["notes.txt"]
    manager.clean()
    assert names(folder / "step-1") == ["x.tmp"]
    assert names(outside) == ["checkpoint.json"]
    steps = [
        "step-00000001",
        "step-00000002",
        "step-00000002x",
        "step-00000007",
        "step-000300",
        "step-1",
    ]
    assert names(folder) == ["best", "log.jsonl", *steps]


def test_what_a_crash_left_is_cleaned(tmp_path):
    manager = saved(tmp_path, [1, 2, 3])
    (tmp_path / "step-00000002" / "checkpoint.json").unlink()
    whole = names(tmp_path / "step-00000003")
    for name in (
        "checkpoint.json.tmp",
        "data-0123456789abcdef-00000.safetensors",
        "data-0123456789abcdef-00001.safetensors.tmp",
    ):
        (tmp_path / "step-00000003" / name).touch()
    (tmp_path / "step-00000004").mkdir()
    (tmp_path / "step-00000004" / "data-0123456789abcdef-00000.safetensors").touch()
    assert manager.steps() == [1, 3]
    manager.clean()
    assert names(tmp_path) == ["step-00000001", "step-00000003"]
    assert names(tmp_path / "step-00000003") == whole
    (tmp_path / "step-00000004").mkdir()
    manager.save(5, state_at(5))
    assert names(tmp_path) == ["step-00000001", "step-00000003", "step-00000005"]


def test_a_removal_that_is_broken_off_leaves_nothing_that_looks_whole(
    tmp_path, monkeypatch
):
    manager = saved(tmp_path, [1], keep_last=1)
    removed, unlink = [], Path.unlink

    def unlink_one(path, **_):
        removed.append(path.name)
        if len(removed) == 2:
            raise KeyboardInterrupt
        unlink(path)

    monkeypatch.setattr(Path, "unlink", unlink_one)
    with pytest.raises(KeyboardInterrupt):
        module._remove(tmp_path / "step-00000001")
    assert removed[0] == "checkpoint.json"
    assert manager.steps() == []
    assert names(tmp_path / "step-00000001") != []


def test_damaged_checkpoints_are_passed_over(tmp_path):
    manager = saved(tmp_path, [1, 2, 3])
    damage(tmp_path / "step-00000003")
    state = state_at(0)
    with pytest.warns(
        UserWarning, match=r"step 3 is passed over: .*step-00000003.*checkpoint.json"
    ):
        manager.load(state)
    assert state["step"] == 2
    with pytest.raises(CheckpointError, match="step-00000003"):
        manager.load(state, step=3)
    for step in (1, 2):
        damage(tmp_path / f"step-0000000{step}")
    with (
        pytest.warns(UserWarning, match="is passed over"),
        pytest.raises(
            CheckpointError,
            match=r"none of the checkpoints of steps \[1, 2, 3\] can be read",
        ),
    ):
        manager.load(state)


def test_saving_beside_the_training(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=1, asynchronous=True)
    state = state_at(1)
    assert manager.save(1, state) == tmp_path / "step-00000001"
    state["x"].fill_(99)  # training goes on
    manager.save(2, state_at(2))
    manager.wait()
    assert manager.steps() == [2]
    manager.save(3, state)
    state["x"].zero_()
    manager.load(state)
    assert state["x"].eq(99).all()
    assert manager.steps() == [3]


def test_what_goes_wrong_beside_the_training_is_raised(tmp_path):
    manager = CheckpointManager(tmp_path / "file", asynchronous=True)
    manager.save(1, state_at(1))
    manager.wait()
    shutil.rmtree(tmp_path / "file")
    (tmp_path / "file").touch()  # where the folder should be
    with pytest.raises((CheckpointError, OSError)):
        manager.save(2, state_at(2))
        manager.wait()
    (tmp_path / "file").unlink()
    manager.save(3, state_at(3))
    manager.wait()
    assert manager.steps() == [3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_last": 0}, "keep_last must be at least 1"),
        ({"keep_best": 1}, "keep_best=1 needs a metric"),
        ({"mode": "least"}, "mode must be 'min' or 'max'"),
    ],
)
def test_bad_options(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        CheckpointManager(tmp_path, **options)


def test_bad_saves(tmp_path):
    manager = CheckpointManager(tmp_path)
    with pytest.raises(ValueError, match="'checkpoint' is where the step is kept"):
        manager.save(1, {"checkpoint": 1})
    with pytest.raises(ValueError, match="must not be negative"):
        manager.save(-1, {})
    assert names(tmp_path) == []


# --- on several ranks


def new_run(folder, ranks, *, asynchronous=False):
    """A model on a mesh of so many ranks, and all that its training has."""
    mesh = init_device_mesh("cpu", (ranks,))

    def partition(name, linear, mesh):
        if name == "0":
            linear.weight = nn.Parameter(
                distribute_tensor(linear.weight.detach(), mesh, [Shard(0)])
            )

    torch.manual_seed(0)
    model = distribute_module(
        nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double(),
        mesh,
        partition,
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    state = {
        "model": ModelState(model), "optimizer": OptimizerState(model, optimizer), "schedule": schedule,
        "random": RandomState(), "step": 0,
    }  # fmt: skip
    manager = CheckpointManager(
        folder, keep_last=2, keep_best=1, metric="loss", asynchronous=asynchronous
    )
    return model, optimizer, schedule, state, manager


def script(folder, ranks, until, asynchronous=False):
    """What a user writes: it starts or goes on. Returns the losses and the model."""
    model, optimizer, schedule, state, manager = new_run(
        folder, ranks, asynchronous=asynchronous
    )
    manager.load(state)
    mesh, losses = model[0].weight.device_mesh, {}
    for step in range(state["step"], until):
        batch = distribute_tensor(
            torch.randn(8, 4, dtype=torch.float64), mesh, [Replicate()]
        )
        loss = (model(batch) - batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        state["step"] = step + 1
        losses[step] = loss.item()
        manager.save(
            step + 1, state, {"loss": losses[step] + get_platform().get_rank()}
        )
    manager.wait()
    return (
        losses,
        {name: value.full_tensor() for name, value in model.state_dict().items()},
        manager.steps(),
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_script_that_is_started_again_ends_where_an_unbroken_one_does(
    tmp_path, asynchronous
):
    unbroken = run_ranks(script, 2, tmp_path / "a", 2, 6, asynchronous)
    first = run_ranks(script, 2, tmp_path / "b", 2, 3, asynchronous)
    (tmp_path / "b" / "step-00000004").mkdir()  # as a crash leaves it
    second = run_ranks(script, 2, tmp_path / "b", 2, 6, asynchronous)
    for whole, start, end in zip(unbroken, first, second, strict=True):
        assert whole[0] == start[0] | end[0]
        assert all(torch.equal(whole[1][name], end[1][name]) for name in whole[1])
        assert whole[2] == end[2]
        assert whole[2][-2:] == [5, 6]
    more = run_ranks(script, 4, tmp_path / "b", 4, 6)[3]
    assert more[0] == {}
    assert all(torch.equal(unbroken[0][1][name], more[1][name]) for name in more[1])


@on_ranks(2)
def test_all_ranks_pick_what_the_first_sees(tmp_path):
    manager = saved(tmp_path, [1, 2, 3], keep_best=1, metric="loss")
    if get_platform().get_rank() == 1:
        manager._folders = dict  # as on a file system that is behind
    assert manager.steps() == [1, 2, 3]
    assert manager.latest() == tmp_path / "step-00000003"
    state = state_at(0)
    manager.load(state)
    assert state["step"] == 3


@on_ranks(2)
def test_an_error_of_the_first_rank_is_one_of_all(tmp_path):
    manager = CheckpointManager(tmp_path)
    with pytest.raises(CheckpointError, match="no whole checkpoint of step 9"):
        manager.load({}, step=9)
    with pytest.raises(TypeError):
        manager.save(1, {}, {"loss": None} if get_platform().get_rank() == 0 else {})
