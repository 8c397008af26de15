# SPDX-License-Identifier: Apache-2.0
"""Saving and loading on real ranks: who writes what, what is asked for and what is there, objects, stages, planners."""

import json
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from hyper_parallel import (
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    get_platform,
    init_device_mesh,
)
from hyper_parallel.core.distributed_checkpoint import (
    CheckpointError,
    FileSystemReader,
    PerRank,
    StandardLoadPlanner,
    StandardSavePlanner,
    StorageReader,
    StorageWriter,
    WriteResult,
    async_save,
    load,
    read_metadata,
    save,
)
from hyper_parallel.core.distributed_checkpoint.standard_planner import _PLANS
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.testing import run_ranks

platform = get_platform()


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def files(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def keys(folder):
    """What each rank has written."""
    found = {}
    for name in files(folder):
        if name.startswith("data-"):
            with safe_open(Path(folder) / name, "np") as file:
                found[int(name.split("-")[2].split(".")[0])] = {
                    key
                    for key in file.keys()  # noqa: SIM118
                    if key != "@xxh3"
                }
    return found


# --- who writes


def save_copies(folder, planner, count):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    state = {
        f"r{n}": distribute_tensor(numbers(64, 8 + n), mesh, [Replicate(), Replicate()])
        for n in range(count)
    }
    state |= {
        f"t{n}": distribute_tensor(numbers(64, 8 + n), mesh, [Replicate(), Shard(0)])
        for n in range(count)
    }
    save({**state, "plain": numbers(9)}, checkpoint_id=folder, planner=planner)


def test_copies_are_written_once_and_spread_by_bytes(tmp_path):
    run_ranks(save_copies, 4, str(tmp_path), StandardSavePlanner(), 16)
    written = keys(tmp_path)
    everything = [key for found in written.values() for key in found]
    assert len(everything) == len(set(everything)) == 16 + 2 * 16 + 1
    sizes = [path.stat().st_size for path in tmp_path.glob("data-*")]
    assert len(sizes) == 4
    assert max(sizes) < 1.1 * min(sizes)


def test_copies_can_all_be_written_by_the_lowest_rank(tmp_path):
    run_ranks(
        save_copies, 4, str(tmp_path), StandardSavePlanner(save_to_minimum_rank=True), 3
    )
    assert keys(tmp_path) == {
        0: {"plain", "r0", "r1", "r2", "t0@0,0", "t1@0,0", "t2@0,0"},
        1: {"t0@32,0", "t1@32,0", "t2@32,0"},
    }


def test_copies_can_be_written_by_all(tmp_path):
    run_ranks(
        save_copies, 4, str(tmp_path), StandardSavePlanner(remove_redundancy=False), 2
    )
    assert [len(found) for found in keys(tmp_path).values()] == [5] * 4
    state = {"t1": torch.zeros(64, 9), "r1": torch.zeros(64, 9)}
    load(state, checkpoint_id=tmp_path, strict=False)
    assert torch.equal(state["t1"], numbers(64, 9))
    assert torch.equal(state["r1"], numbers(64, 9))


def save_counted(folder):
    mesh = init_device_mesh("cpu", (4,))
    state = {
        str(n): distribute_tensor(numbers(8, 3), mesh, [Shard(0)]) for n in range(50)
    }
    with CommunicationLedger(mesh) as ledger:
        save(state, checkpoint_id=folder)
    plan = next(reversed(_PLANS.values()))
    save(state, checkpoint_id=folder)
    assert next(reversed(_PLANS.values())) is plan  # the second one found it
    save(
        state,
        checkpoint_id=folder,
        planner=StandardSavePlanner(enable_plan_caching=False),
    )
    assert (
        next(reversed(_PLANS.values())) is plan
    )  # which the third one neither looked for nor replaced
    return [(entry.collective, entry.nbytes) for entry in ledger.entries]


def test_ranks_that_have_the_same_exchange_a_few_numbers(tmp_path):
    [traffic, *_] = run_ranks(save_counted, 4, str(tmp_path))
    assert {name for name, _ in traffic} == {"all_reduce"}
    assert sum(received for _, received in traffic) < 1000


# --- ranks that have different things


def save_stages(folder):
    """Two stages of two ranks, each with its own names, one name on one rank, and a plain tensor on three."""
    rank = platform.get_rank()
    stage = rank // 2
    mesh = init_device_mesh("cpu", (2,), rank_list=(2 * stage, 2 * stage + 1))
    state = {
        f"stage{stage}": {
            "w": distribute_tensor(numbers(7, 3, seed=stage), mesh, [Shard(0)])
        }
    }
    state["common"] = distribute_tensor(
        numbers(6), init_device_mesh("cpu", (4,)), [Shard(0)]
    )
    if rank == 3:
        state["last"] = {"only": numbers(5), "told": "by rank 3"}
    if rank:
        state["plain"] = numbers(4)
    save({**state, "step": 7, "own": PerRank(f"of {rank}")}, checkpoint_id=folder)


def test_stages_have_names_of_their_own(tmp_path):
    run_ranks(save_stages, 4, str(tmp_path))
    state = {
        "stage0": {"w": torch.zeros(7, 3)}, "stage1": {"w": torch.zeros(7, 3)}, "common": torch.zeros(6),
        "last": {"only": torch.zeros(5), "told": ""}, "plain": torch.zeros(4), "step": 0, "own": PerRank(""),
    }  # fmt: skip
    load(state, checkpoint_id=tmp_path)
    assert torch.equal(state["stage0"]["w"], numbers(7, 3, seed=0))
    assert torch.equal(state["stage1"]["w"], numbers(7, 3, seed=1))
    assert torch.equal(state["common"], numbers(6))
    assert torch.equal(state["last"]["only"], numbers(5))
    assert torch.equal(state["plain"], numbers(4))
    assert (state["last"]["told"], state["step"], state["own"]) == (
        "by rank 3",
        7,
        PerRank("of 0"),
    )


def save_on_lines(folder, differ):
    """The same name on two meshes of two ranks, which hold the same, or not."""
    line = platform.get_rank() // 2
    mesh = init_device_mesh("cpu", (2,), rank_list=(2 * line, 2 * line + 1))
    save(
        {"w": distribute_tensor(numbers(8, 3, seed=line * differ), mesh, [Shard(0)])},
        checkpoint_id=folder,
    )


def test_one_name_on_several_meshes(tmp_path):
    run_ranks(save_on_lines, 4, str(tmp_path), 0)
    state = {"w": torch.zeros(8, 3)}
    load(state, checkpoint_id=tmp_path)
    assert torch.equal(state["w"], numbers(8, 3))
    with pytest.raises(
        AssertionError, match=r"w: ranks 0 and 2 have different values.*PerRank"
    ):
        run_ranks(save_on_lines, 4, str(tmp_path), 1)


# --- what is asked for


@pytest.fixture
def saved(tmp_path):
    save(
        {"model": {"a": numbers(3), "b": numbers(4)}, "extra": {"n": 1}, "flag": True},
        checkpoint_id=tmp_path,
    )
    return tmp_path


def test_a_part_that_is_not_asked_for_is_skipped(saved):
    state = {"model": {"a": torch.zeros(3), "b": torch.zeros(4)}, "flag": None}
    report = load(state, checkpoint_id=saved)
    assert report.skipped == ("extra.n",)
    assert sorted(report.loaded) == ["flag", "model.a", "model.b"]
    assert (report.bytes, report.missing, report.unexpected) == (28, (), ())


def test_names_beside_those_asked_for(saved):
    state = {"model": {"a": torch.zeros(3)}, "flag": None}
    with pytest.raises(
        CheckpointError,
        match=r"1 names of the checkpoint were not asked for: model.b; strict=False",
    ):
        load(state, checkpoint_id=saved)
    assert torch.equal(state["model"]["a"], torch.zeros(3))
    assert load(state, checkpoint_id=saved, strict=False).unexpected == ("model.b",)
    assert torch.equal(state["model"]["a"], numbers(3))


def test_names_that_are_not_there(saved):
    state = {
        "model": {"a": torch.zeros(3), "b": torch.zeros(4), "c": torch.ones(2)},
        "flag": None,
    }
    with pytest.raises(
        CheckpointError,
        match=r"1 names are not in the checkpoint: model.c.*allow_partial_load=True",
    ):
        load(state, checkpoint_id=saved)
    report = load(
        state, checkpoint_id=saved, planner=StandardLoadPlanner(allow_partial_load=True)
    )
    assert report.missing == ("model.c",)
    assert torch.equal(state["model"]["c"], torch.ones(2))
    assert torch.equal(state["model"]["b"], numbers(4))


def test_no_file_stays_open(saved):
    def opened():
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return sum(saved in link.readlink().parents for link in links)

    reader = FileSystemReader(saved)
    state = {"model": {"a": torch.zeros(3), "b": torch.zeros(4)}, "flag": None}
    load(state, storage_reader=reader)
    assert opened() == 0
    reader.execute_read = lambda plan, planner: 1 / 0
    with pytest.raises(ZeroDivisionError):
        load(state, storage_reader=reader)
    assert opened() == 0
    reader.entry = lambda *args: 1 / 0
    with pytest.raises(ZeroDivisionError):
        load(state, storage_reader=reader)
    assert opened() == 0


def test_a_dry_run_only_reports(saved):
    state = {
        "model": {"a": torch.zeros(3, dtype=torch.float64), "c": torch.ones(2)},
        "flag": None,
    }
    report = load(state, checkpoint_id=saved, dry_run=True)
    assert (report.cast, report.missing, report.unexpected) == (
        ("model.a",),
        ("model.c",),
        ("model.b",),
    )
    assert report.bytes_read == 0
    assert (state["flag"], state["model"]["a"].sum()) == (None, 0)
    assert str(report).splitlines() == [
        "loaded 2 names, 12 bytes on this rank", "missing 1: model.c", "unexpected 1: model.b", "skipped 1: extra.n",
        "cast 1: model.a",
    ]  # fmt: skip


def test_neither_folder_nor_storage():
    with pytest.raises(ValueError, match="checkpoint_id"):
        save({})
    with pytest.raises(ValueError, match="checkpoint_id"):
        async_save({})
    with pytest.raises(ValueError, match="checkpoint_id"):
        load({})


# --- values


def test_values_come_back_nested(tmp_path):
    state = {
        "a": {"b": [numbers(2), {"c": 1.5}], "d.e": (1, "x"), 3: b"bytes"}, "empty": {}, "none": None, "list": [1, 2],
        "nan": float("inf"), "text": "ü\n",
    }  # fmt: skip
    save(state, checkpoint_id=tmp_path)
    assert set(read_metadata(tmp_path).state_dict_metadata) == {
        "a.b.0", "a.b.1.c", "a.d.e", "a.3", "empty", "none", "list", "nan", "text",
    }  # fmt: skip
    blank = {
        "a": {"b": [torch.zeros(2), {"c": 0}], "d.e": (), 3: b""}, "empty": {}, "none": 0, "list": [], "nan": 0.0,
        "text": "",
    }  # fmt: skip
    load(blank, checkpoint_id=tmp_path)
    assert torch.equal(blank["a"]["b"].pop(0), state["a"]["b"].pop(0))
    assert blank == state


def test_what_cannot_be_stored_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"model.hook.*function"):
        save({"model": {"hook": lambda: 0}}, checkpoint_id=tmp_path / "a")
    with pytest.raises(
        CheckpointError, match=r"model.s: sparse tensors cannot be stored"
    ):
        save({"model": {"s": numbers(2, 2).to_sparse()}}, checkpoint_id=tmp_path / "a")
    with pytest.raises(CheckpointError, match="two values have this name"):
        save({"a": {"b": 1}, "a.b": 2}, checkpoint_id=tmp_path / "a")
    with pytest.raises(CheckpointError, match="a tuple cannot be filled in place"):
        save({"a": (numbers(2),)}, checkpoint_id=tmp_path / "a")
    save(
        {"model": {"path": Path("x")}},
        checkpoint_id=tmp_path / "b",
        planner=StandardSavePlanner(allow_pickle=True),
    )
    with pytest.raises(CheckpointError, match="allow_pickle"):
        load({"model": {"path": None}}, checkpoint_id=tmp_path / "b")
    state = {"model": {"path": None}}
    load(state, storage_reader=FileSystemReader(tmp_path / "b", allow_pickle=True))
    assert state["model"]["path"] == Path("x")


class Counter:
    """Something stateful that makes room for what was saved."""

    def __init__(self, count):
        self.count, self.history, self.expected = count, [], None

    def expect(self, saved):
        self.expected = sorted(saved)
        self.history = [
            torch.zeros(entry.size)
            for name, entry in saved.items()
            if name.startswith("history")
        ]

    def state_dict(self):
        return {"count": self.count, "history": list(self.history)}

    def load_state_dict(self, state):
        self.count, self.history = state["count"], state["history"]


def test_what_is_stateful_gives_its_state_and_takes_it_back(tmp_path):
    source, target = Counter(4), Counter(0)
    source.history = [numbers(2), numbers(3)]
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    save({"counters": {"c": source}, "model": model}, checkpoint_id=tmp_path)
    load({"counters": {"c": target}, "model": other}, checkpoint_id=tmp_path)
    assert target.expected == ["count", "history.0", "history.1"]
    assert (target.count, [t.tolist() for t in target.history]) == (
        4,
        [numbers(2).tolist(), numbers(3).tolist()],
    )
    assert torch.equal(model.weight, other.weight)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def tied_on_ranks(folder):
    torch.manual_seed(0)
    model, mesh = Tied(), init_device_mesh("cpu", (2,))

    def cut(name, module, mesh):
        if name == "embed":
            module.weight = nn.Parameter(
                distribute_tensor(module.weight, mesh, [Shard(0)])
            )

    distribute_module(model, mesh, cut)
    model.head.weight = model.embed.weight
    expected = model.embed.weight.full_tensor().clone()
    save({"model": model}, checkpoint_id=folder)
    with torch.no_grad():
        model.embed.weight.zero_()
    load({"model": model}, checkpoint_id=folder)
    assert torch.equal(model.head.weight.full_tensor(), expected)
    return expected


def test_tied_weights_are_stored_once(tmp_path):
    expected = run_ranks(tied_on_ranks, 2, str(tmp_path))[0]
    assert [len(found) for found in keys(tmp_path).values()] == [1, 1]
    state = {
        "model": {"embed.weight": torch.zeros(6, 4), "head.weight": torch.zeros(6, 4)}
    }
    load(state, checkpoint_id=tmp_path)
    assert torch.equal(state["model"]["embed.weight"], expected)
    assert torch.equal(state["model"]["head.weight"], expected)


def test_names_that_are_not_there_but_tied_to_one_that_is(tmp_path):
    whole = numbers(6, 4)
    save({"model": {"embed.weight": whole}}, checkpoint_id=tmp_path)
    model = Tied()
    report = load({"model": model}, checkpoint_id=tmp_path)
    assert sorted(report.loaded) == ["model.embed.weight", "model.head.weight"]
    assert torch.equal(model.head.weight, whole)


def save_own(folder):
    rank = platform.get_rank()
    save(
        {"t": PerRank(torch.tensor([rank, -rank])), "o": PerRank({"at": rank})},
        checkpoint_id=folder,
    )


def load_own(folder):
    state = {"t": PerRank(torch.tensor([9, 9])), "o": PerRank("kept")}
    report = load(state, checkpoint_id=folder)
    return state["t"].value.tolist(), state["o"].value, sorted(report.kept)


def test_what_each_rank_has_its_own_of(tmp_path):
    run_ranks(save_own, 2, str(tmp_path))
    here = [([0, 0], {"at": 0}, []), ([1, -1], {"at": 1}, [])]
    assert run_ranks(load_own, 2, str(tmp_path)) == here
    assert run_ranks(load_own, 1, str(tmp_path)) == here[:1]
    assert run_ranks(load_own, 4, str(tmp_path)) == [
        *here,
        *[([9, 9], "kept", ["o", "t"])] * 2,
    ]


def test_a_row_of_what_has_no_rows_is_refused(tmp_path):
    save({"t": torch.tensor(5)}, checkpoint_id=tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"t: the checkpoint has shape \(\), the state dict \(0,\)",
    ):
        load({"t": PerRank(torch.tensor(0))}, checkpoint_id=tmp_path)


def read_columns(folder):
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": distribute_tensor(torch.zeros(64, 4096), mesh, [Shard(1)])}
    before = state["w"].full_tensor().sum().item()
    report = load(state, checkpoint_id=folder)
    assert before == 0
    assert torch.equal(
        state["w"].full_tensor(), numbers(64, 4096)
    )  # not what was gathered before
    exact = load(state, storage_reader=FileSystemReader(folder, verify=False))
    return report.bytes, report.bytes_read, exact.bytes_read, report.resharded


def save_rows(folder):
    save(
        {
            "w": distribute_tensor(
                numbers(64, 4096), init_device_mesh("cpu", (4,)), [Shard(0)]
            )
        },
        checkpoint_id=folder,
    )


def test_only_what_overlaps_is_read(tmp_path):
    run_ranks(save_rows, 4, str(tmp_path))
    share = 64 * 4096 * 4 // 2
    for needed, verified, exact, resharded in run_ranks(read_columns, 2, str(tmp_path)):
        assert (needed, exact, resharded) == (share, share, ("w",))
        assert share < verified < 1.01 * share  # and the checksums of these blocks


def native_both_ways(folder):
    from torch.distributed.tensor import DeviceMesh
    from torch.distributed.tensor import Shard as NativeShard
    from torch.distributed.tensor import distribute_tensor as distribute

    mesh = DeviceMesh("cpu", [0, 1])
    save({"w": distribute(numbers(5, 4), mesh, [NativeShard(0)])}, checkpoint_id=folder)
    theirs = distribute(torch.zeros(5, 4), mesh, [NativeShard(1)])
    load({"w": theirs}, checkpoint_id=folder)
    assert torch.equal(theirs.full_tensor(), numbers(5, 4))


def test_torchs_own_distributed_tensors(tmp_path):
    run_ranks(native_both_ways, 2, str(tmp_path))
    state = {"w": torch.zeros(5, 4)}
    load(state, checkpoint_id=tmp_path)
    assert torch.equal(state["w"], numbers(5, 4))


# --- without the others


def save_alone(folder):
    rank = platform.get_rank()
    save({"x": numbers(4, seed=rank)}, checkpoint_id=f"{folder}/{rank}", no_dist=True)


def test_each_rank_for_itself(tmp_path):
    run_ranks(save_alone, 2, str(tmp_path))
    for rank in range(2):
        state = {"x": torch.zeros(4)}
        load(state, checkpoint_id=tmp_path / str(rank))
        assert torch.equal(state["x"], numbers(4, seed=rank))


def save_in_silence(folder):
    mesh = init_device_mesh("cpu", (2,))
    state = {"x": distribute_tensor(numbers(6), mesh, [Shard(0)]), "n": 3}
    with CommunicationLedger(mesh) as ledger:
        if mesh.rank == 1:  # the other one is done before this one begins
            while not Path(folder, "checkpoint.json").exists():
                time.sleep(0.01)
        save(state, checkpoint_id=folder, use_collectives=False)
        platform.barrier()
        load(state, checkpoint_id=folder, use_collectives=False)
    assert [entry.collective for entry in ledger.entries] == ["barrier"]
    try:
        save(state, checkpoint_id=folder, use_collectives=False)
    except CheckpointError as error:
        return str(error)


def test_without_collectives(tmp_path):
    told = run_ranks(save_in_silence, 2, str(tmp_path))
    assert all("use_collectives=False needs a new folder" in error for error in told)
    state = {"x": torch.zeros(6), "n": 0}
    load(state, checkpoint_id=tmp_path)
    assert torch.equal(state["x"], numbers(6))


# --- planners and storages of one's own

STORE: dict = {}


class Memory(StorageWriter, StorageReader):
    """A storage in memory, as small as one can be."""

    def initialize_writer(self, checkpoint_id): ...

    def configure_writer(self, is_coordinator): ...

    def execute_write(self, plan, planner):
        return [
            WriteResult(item.index, 0, planner.get_data(item)) for item in plan.items
        ]

    def finalize_checkpoint(self, metadata, results):
        STORE["data"] = {
            result.index: result.storage_data for each in results for result in each
        }
        STORE["metadata"] = metadata
        return metadata

    def initialize_reader(self, checkpoint_id): ...

    def load_metadata(self):
        return STORE["metadata"]

    def execute_read(self, plan, planner):
        for item in plan.items:
            found = STORE["data"][item.storage_index]
            if not torch.is_tensor(found):
                planner.apply_bytes(item, found)
                continue
            box = tuple(
                slice(o, o + n)
                for o, n in zip(item.storage_offsets, item.lengths, strict=True)
            )
            tensor = planner.acquire_tensor(item)
            tensor.copy_(found[box])
            planner.apply_tensor(item, tensor)


def test_a_storage_of_ones_own():
    save({"x": numbers(3, 2), "n": 5}, storage_writer=Memory())
    state = {"x": torch.zeros(3, 2), "n": 0}
    load(state, storage_reader=Memory())
    assert torch.equal(state["x"], numbers(3, 2))
    assert state["n"] == 5


class Renaming(StandardSavePlanner):
    """Plans together, whatever the ranks have: what a planner of one's own may do."""

    def fingerprint(self):
        return os.urandom(16)


def save_together(folder):
    mesh = init_device_mesh("cpu", (2,))
    save(
        {"x": distribute_tensor(numbers(5), mesh, [Shard(0)]), "y": numbers(2)},
        checkpoint_id=folder,
        planner=Renaming(),
    )


def test_planning_together_gives_the_same(tmp_path):
    run_ranks(save_together, 2, str(tmp_path))
    state = {"x": torch.zeros(5), "y": torch.zeros(2)}
    load(state, checkpoint_id=tmp_path)
    assert torch.equal(state["x"], numbers(5))
    assert torch.equal(state["y"], numbers(2))
    text = json.loads((tmp_path / "checkpoint.json").read_text())
    assert "layout" in text["tensors"]["x"]  # known from the layout, not listed
