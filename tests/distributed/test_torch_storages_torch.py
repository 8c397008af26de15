# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint as others write it: its storages and their arguments, planners, groups, conversions."""

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed import tensor
from torch.distributed.checkpoint import format_utils, staging

from hyper_parallel import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    get_platform,
    init_device_mesh,
)
from hyper_parallel.testing import run_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
LAYOUTS = {2: ([S0], [S1], [R]), 4: ([S0, S0], [R, S1], [S1, R])}


def whole(seed):
    draw = torch.Generator().manual_seed(seed)
    return {
        str(shape): torch.randn(shape, generator=draw)
        for shape in ((8, 6), (5, 3), (1, 4))
    }


def state_of(seed):
    ranks = get_platform().get_world_size()
    mesh = init_device_mesh("cpu", (2,) * (ranks // 2))
    made = {
        f"{name}.{number}": distribute_tensor(value, mesh, lies)
        for name, value in whole(seed).items()
        for number, lies in enumerate(LAYOUTS[ranks])
    }
    return made | {"plain": torch.arange(3.0) + seed}


def is_first(state):
    """Whether these are the values of the first state, on this rank and with nothing left out."""
    expected = {
        f"{name}.{number}": value
        for name, value in whole(0).items()
        for number in range(3)
    }
    expected["plain"] = torch.arange(3.0)
    assert state.keys() == expected.keys()
    for name, value in state.items():
        found = value.full_tensor() if isinstance(value, DTensor) else value
        torch.testing.assert_close(found, expected[name], rtol=0, atol=0, msg=name)


def loaded(**more):
    state = state_of(1)
    dcp.load(state, **more)
    is_first(state)


def raised(call):
    try:
        call()
    except BaseException as error:  # as that of torch.distributed.checkpoint
        return str(error)
    return "nothing"


def hugging_face(folder):
    names = {name: 1 + number % 2 for number, name in enumerate(state_of(0))}
    for kind, options in (
        ("shards", {}),
        ("whole", {"enable_consolidation": True, "fqn_to_index_mapping": names}),
    ):
        place = f"{folder}/{kind}"
        dcp.save(
            state_of(0),
            storage_writer=dcp.HuggingFaceStorageWriter(
                place, save_distributed=True, **options
            ),
        )
        loaded(storage_reader=dcp.HuggingFaceStorageReader(place))
    files = sorted(Path(place).glob("*.safetensors"))
    assert len(files) == 2
    is_first({name: value for file in files for name, value in load_file(file).items()})
    told = raised(
        lambda: dcp.save(
            state_of(0), storage_writer=dcp.HuggingFaceStorageWriter(f"{folder}/lost")
        )
    )
    assert "every rank would write to the same file; pass save_distributed=True" in told
    assert not list(Path(folder).glob("lost/*.safetensors"))
    copies = {
        "a": distribute_tensor(
            torch.arange(6.0), init_device_mesh("cpu", (dist.get_world_size(),)), [R]
        )
    }
    assert (
        raised(
            lambda: dcp.save(
                copies, storage_writer=dcp.HuggingFaceStorageWriter(f"{folder}/copies")
            )
        )
        == "nothing"
    )


def files_and_planners(folder):
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
    warnings.filterwarnings(
        "ignore", message="`_get_pg_default_device`|Multiple backends"
    )  # torch's own call
    for number, options in enumerate(
        (
            {"thread_count": 2, "single_file_per_rank": False},
            {
                "sync_files": False,
                "per_thread_copy_ahead": 0,
                "cache_staged_state_dict": True,
            },
        )
    ):
        place = f"{folder}/{number}"
        for _ in range(2):  # the second one overwrites
            dcp.save(state_of(0), storage_writer=dcp.FileSystemWriter(place, **options))
        loaded(storage_reader=dcp.FileSystemReader(place))
    again = dcp.FileSystemWriter(place, overwrite=False)
    assert "overwrite" in raised(lambda: dcp.save(state_of(1), storage_writer=again))
    group = dist.new_group(list(range(dist.get_world_size())))
    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    dcp.save(
        state_of(0),
        checkpoint_id=f"{folder}/group",
        process_group=group,
        planner=planner,
    )
    loaded(
        checkpoint_id=f"{folder}/group",
        process_group=group,
        planner=dcp.DefaultLoadPlanner(allow_partial_load=True),
    )
    meta = {name: like_on_meta(value) for name, value in state_of(1).items()}
    dcp.load(meta, checkpoint_id=f"{folder}/group")
    is_first(meta)


def refusals(folder):
    """async_save, no_dist and broadcasts: an error of ours on every rank, before anything is lost or waits."""
    warnings.filterwarnings(
        "ignore",
        message="torch.distributed is disabled|`_get_pg_default_device`|Multiple backends",
    )
    options = staging.StagingOptions(
        False, False, False, False
    )  # those that need no accelerator
    for more in (
        {"checkpoint_id": f"{folder}/a"},
        {"storage_writer": dcp.FileSystemWriter(f"{folder}/b")},
        {
            "checkpoint_id": f"{folder}/c",
            "async_stager": staging.DefaultStager(options),
        },
        {"checkpoint_id": f"{folder}/d", "async_stager": staging.BlockingAsyncStager()},
    ):
        told = raised(lambda more=more: dcp.async_save(state_of(0), **more))
        assert all(
            part in told
            for part in ("async_save copies a tensor by its storage", "HP230")
        ), told
    own = f"{folder}/{dist.get_rank()}"
    for alone in ({"no_dist": True}, {"use_collectives": False}):
        told = raised(
            lambda alone=alone: dcp.save(state_of(0), checkpoint_id=own, **alone)
        )
        assert all(
            part in told
            for part in (
                "a checkpoint of this rank alone would miss the others",
                "HP230",
            )
        ), told
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    copies = {
        "a": distribute_tensor(torch.arange(6.0), mesh, [R]),
        "plain": torch.ones(2),
    }
    dcp.save(copies, checkpoint_id=own, no_dist=True)
    found = {
        "a": distribute_tensor(torch.zeros(6), mesh, [S0]),
        "plain": torch.zeros(2),
    }
    dcp.load(found, checkpoint_id=own, no_dist=True)
    assert found["a"].full_tensor().equal(torch.arange(6.0))
    assert found["plain"].equal(torch.ones(2))
    file = f"{folder}/whole.pt"
    if dist.get_rank() == 0:
        torch.save({"a": torch.arange(6.0), "plain": torch.ones(2)}, file)
        format_utils.torch_save_to_dcp(file, f"{folder}/converted")
    dist.barrier()
    read = {
        "storage_reader": format_utils.BroadcastingTorchSaveReader(),
        "checkpoint_id": file,
    }
    for state in (found, copies):
        planner = format_utils.DynamicMetaLoadPlanner()
        told = raised(
            lambda state=state, planner=planner: dcp.load(
                state, planner=planner, **read
            )
        )
        assert all(
            part in told
            for part in (
                "BroadcastingTorchSaveReader: a is a distributed tensor",
                "HP144",
            )
        ), told
    found = {
        "a": distribute_tensor(torch.zeros(6), mesh, [S0]),
        "plain": torch.zeros(2),
    }
    dcp.load(found, checkpoint_id=f"{folder}/converted")
    assert found["a"].full_tensor().equal(torch.arange(6.0))


def torchs_own(folder):
    """Each library loads what the other saved, in other layouts and uneven shards."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    mesh, theirs = (
        init_device_mesh("cpu", (2,)),
        torch.distributed.init_device_mesh("cpu", (2,)),
    )
    value = torch.arange(20.0).view(5, 4)
    layouts = (
        (S0, tensor.Shard(1)),
        (S1, tensor.Replicate()),
        (R, tensor.Shard(0)),
        (S0, tensor.Shard(0)),
    )
    for number, (ours, other) in enumerate(layouts):
        places = [f"{folder}/{name}{number}" for name in ("ours", "theirs")]
        saved = [
            distribute_tensor(value, mesh, [ours]),
            tensor.distribute_tensor(value, theirs, [other]),
        ]
        empty = [
            tensor.distribute_tensor(value * 0, theirs, [other]),
            distribute_tensor(value * 0, mesh, [ours]),
        ]
        for place, source, target in zip(places, saved, empty, strict=True):
            dcp.save({"a": source}, checkpoint_id=place)
            dcp.load({"a": target}, checkpoint_id=place)
            assert target.full_tensor().equal(value), (ours, other)
    alone = f"{folder}/alone"
    if dist.get_rank() == 0:  # torch's own tensors are not refused when saved like that
        dcp.save(
            {
                "a": tensor.distribute_tensor(
                    value, theirs, [tensor.Shard(0)], src_data_rank=None
                )
            },
            checkpoint_id=alone,
            no_dist=True,
        )
    dist.barrier()
    told = raised(
        lambda: dcp.load(
            {"a": distribute_tensor(value * 0, mesh, [S0])}, checkpoint_id=alone
        )
    )
    assert all(
        part in told
        for part in ("the checkpoint has only 0 of the 8 elements of a", "HP144")
    ), told


def like_on_meta(value):
    if not isinstance(value, DTensor):
        return torch.empty_like(value)
    local = torch.empty(value.local_shape, device="meta")
    return DTensor.from_local(
        local, value.device_mesh, value.placements, shape=value.shape
    )


def test_what_would_lose_shards_or_hang_is_refused(tmp_path):
    run_ranks(refusals, 2, str(tmp_path), timeout=240)


def test_resharding_between_libraries(tmp_path):
    run_ranks(torchs_own, 2, str(tmp_path), timeout=240)


def test_files_of_hugging_face(tmp_path):
    for ranks in (2, 4):
        run_ranks(hugging_face, ranks, str(tmp_path / str(ranks)), timeout=240)


def test_arguments_of_files_planners_groups_and_conversion(tmp_path):
    for ranks in (2, 4):
        run_ranks(files_and_planners, ranks, str(tmp_path / str(ranks)), timeout=240)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        format_utils.dcp_to_torch_save(tmp_path / "4" / "group", tmp_path / "one.pt")
    is_first(torch.load(tmp_path / "one.pt"))
