# SPDX-License-Identifier: Apache-2.0
"""Joining the job, making groups, finding ranks."""

from types import SimpleNamespace

import frame
import pytest

from hyper_parallel import CommunicationError, get_platform
from hyper_parallel.platform.platform import EXISTING_COMM_GROUPS
from hyper_parallel.testing import on_ranks, run_ranks

if frame.IS_TORCH:
    import torch


def total(platform, group):
    return frame.array(
        platform.all_reduce(frame.tensor([platform.get_rank() + 1.0]), group)
    ).item()


def test_one_process_without_a_group():
    platform = get_platform()
    assert (platform.get_rank(), platform.get_world_size()) == (0, 1)
    with pytest.raises(
        RuntimeError,
        match=r"all_reduce: there is no process group; call init_process_group\(\) first",
    ):
        platform.all_reduce(frame.tensor([1.0]), None)
    platform.destroy_process_group()  # nothing to leave


def test_a_program_that_was_not_launched_is_told_how(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    if frame.IS_TORCH:
        monkeypatch.setenv(
            "WORLD_SIZE", "2"
        )  # without any of them it is a job of this process alone
    with pytest.raises(
        ValueError,
        match="RANK expected, but not set.* Start the program with (torchrun|msrun)",
    ):
        get_platform().init_process_group()


@on_ranks(4)
def test_ranks_of_the_default_group():
    platform = get_platform()
    rank = platform.get_rank()
    assert platform.get_world_size() == 4
    assert platform.get_process_group_ranks() == [0, 1, 2, 3]
    assert platform.get_group_local_rank() == rank
    backend = "gloo" if frame.IS_TORCH else "mccl"
    assert platform.get_backend() == backend
    platform.init_process_group("nccl")  # there is one: nothing happens
    assert platform.get_backend() == backend


@on_ranks(4)
def test_members_alone_make_groups_and_only_once():
    platform = get_platform()
    rank = platform.get_rank()
    if rank == 3:
        # This rank takes no part, and makes other numbers of groups than the others.
        assert platform.create_group([0, 1]) is None
        alone = platform.create_group([3])
        assert total(platform, alone) == 4
    # Every pair among ranks 0 to 2 crosses another, and each rank has made another number of groups before it.
    sums = {}
    for pair in ([0, 1], [1, 2], [0, 2]):
        if rank in pair:
            group = platform.create_group(pair)
            assert platform.create_group(reversed(pair)) is group
            assert platform.get_created_group(tuple(pair)) is group
            assert EXISTING_COMM_GROUPS[str(tuple(pair))] is group
            assert platform.get_process_group_ranks(group) == pair
            assert platform.get_group_local_rank(group) == pair.index(rank)
            assert platform.get_global_rank(group, 1) == pair[1]
            sums[tuple(pair)] = total(platform, group)
        else:
            assert platform.get_created_group(pair) is None
    assert sums == {
        pair: sum(pair) + 2 for pair in [(0, 1), (1, 2), (0, 2)] if rank in pair
    }


@on_ranks(4)
def test_split_group():
    platform = get_platform()
    rank = platform.get_rank()
    mine = platform.split_group(split_ranks=[[0, 2], [1]])
    if rank == 3:
        assert mine is None
    else:
        assert platform.get_process_group_ranks(mine) == ([0, 2] if rank != 1 else [1])
        assert mine is platform.get_created_group([0, 2] if rank != 1 else [1])
    if rank in (0, 2):
        inner = platform.split_group(mine, [[0], [1]], timeout=30)
        assert platform.get_process_group_ranks(inner) == [
            rank
        ]  # ranks in split_ranks are those of the parent


@on_ranks(2)
def test_groups_of_the_user_and_objects_that_have_a_group():
    platform = get_platform()
    # MindSpore's own groups exist under msrun alone, and are made by test_store_collectives_mindspore.py.
    group = (
        torch.distributed.new_group([0, 1])
        if frame.IS_TORCH
        else platform.split_group(None, [[0, 1]], timeout=30)
    )
    platform.mark_created_groups([group])
    assert platform.create_group([0, 1]) is group
    for holder in (
        SimpleNamespace(group=group),
        SimpleNamespace(process_group=group),
        SimpleNamespace(get_group=lambda: group),
    ):
        assert total(platform, holder) == 3


@on_ranks(2)
def test_a_destroyed_group_is_forgotten_and_can_be_made_again():
    platform = get_platform()
    for _ in range(3):
        group = platform.create_group([0, 1])
        assert total(platform, group) == 3
        platform.destroy_process_group(group)
        assert platform.get_created_group([0, 1]) is None


@on_ranks(2)
def test_leaving_the_job_forgets_everything():
    platform = get_platform()
    forgotten = []
    platform.forget_groups_with(lambda: forgotten.append(True))
    try:
        platform.create_group([0, 1])
        platform.set_grad_reduce_handle(
            None, lambda: pytest.fail("must not run after the job has ended")
        )
        platform.destroy_process_group()
        assert forgotten == [True]
        assert EXISTING_COMM_GROUPS == {}
        assert platform.get_world_size() == 1
        platform.wait_grad_handle()
    finally:
        platform._forgetters.clear()


@on_ranks(2)
def test_bad_ranks_and_groups():
    platform = get_platform()
    for call in (
        platform.create_group,
        lambda ranks: platform.split_group(None, [ranks]),
    ):
        for ranks in ([0, 5], [], [1, 1], ["0"]):
            with pytest.raises(ValueError, match=r"(create|split)_group: .*got "):
                call(ranks)
    for nothing in (None, []):
        with pytest.raises(
            ValueError, match="split_ranks must be a list of rank lists"
        ):
            platform.split_group(split_ranks=nothing)
    with pytest.raises(ValueError, match="none in two lists"):
        platform.split_group(split_ranks=[[0], [0, 1]])
    with pytest.raises(ValueError, match="group_rank must be 0 to 1"):
        platform.get_global_rank(None, 2)
    with pytest.raises(TypeError, match="get_backend: expected a process group"):
        platform.get_backend(17)
    with pytest.raises(ValueError, match="rank .* is not a member of that group"):
        # What the frameworks give to a rank that is not in a new group.
        platform.barrier(
            torch.distributed.GroupMember.NON_GROUP_MEMBER if frame.IS_TORCH else ""
        )
    with pytest.raises(
        ValueError, match="timeout must be a positive number of seconds"
    ):
        platform.split_group(None, [[0, 1]], timeout=-1)


def join_alone(world_size):
    platform = get_platform()
    platform.destroy_process_group()
    store = platform.new_store(is_master=True)
    with pytest.raises(
        CommunicationError,
        match=f"init_process_group: rank 0 could not join the job of {world_size}",
    ):
        platform.init_process_group(
            store=store, rank=0, world_size=world_size, timeout=1
        )


def test_a_job_whose_ranks_are_not_all_there_is_an_error():
    run_ranks(join_alone, 1, 2, timeout=20)


def make_group_alone():
    platform = get_platform()
    if platform.get_rank() == 0:
        with pytest.raises(
            CommunicationError,
            match=r"the creation of the group on ranks \[0, 1\].*never came: \[1\]",
        ):
            platform.split_group(None, [[0, 1]], timeout=1)
    platform.barrier()


def test_a_group_whose_member_never_comes_is_an_error():
    run_ranks(make_group_alone, 2, timeout=20)


@on_ranks(2)
def test_one_store_serves_several_jobs():
    platform = get_platform()
    rank = platform.get_rank()
    ports = [None, None]
    store = platform.new_store(is_master=True) if rank == 0 else None
    platform.all_gather_object(ports, store.port if store else None)
    store = store or platform.new_store(ports[0], is_master=False)
    first, second = platform.prefix_store("a", store), platform.prefix_store("b", store)
    if rank == 0:
        first.set("key", "1")
        second.set("key", "2")
    assert (first.get("key"), second.get("key")) == (b"1", b"2")
    platform.barrier()
