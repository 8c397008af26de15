# SPDX-License-Identifier: Apache-2.0
"""Ranks that issue different collectives are told so, each with what all of them issued; and what waits says where."""

import functools
import os
import re
import sys
import time
from pathlib import Path

import pytest
import torch

from hyper_parallel import CommunicationError, get_platform, init_device_mesh
from hyper_parallel.platform.torch import faults, order
from hyper_parallel.testing import RankError, on_ranks, run_ranks


def diverge(platform, group, rank, how):
    """Collective 3 of the group is another one on the last rank."""
    last = rank == 2
    if how == "collective":
        return (
            platform.barrier(group)
            if last
            else platform.all_reduce(torch.ones(4), group)
        )
    if how == "shape":
        return platform.all_reduce(torch.ones(5 if last else 4), group)
    if how == "dtype":
        dtype = torch.float64 if last else torch.float32
        return platform.all_gather_into_tensor(torch.ones(1 << 15, dtype=dtype), group)
    if how == "op":
        return platform.reduce_scatter_tensor(
            torch.ones(3), group, op="max" if last else "sum"
        )
    if how == "objects":
        return (
            platform.all_reduce(torch.ones(4), group)
            if last
            else platform.all_gather_object([0] * 3, 1, group)
        )
    calls = [
        lambda: platform.barrier(group),
        lambda: platform.all_reduce(torch.ones(4), group),
    ]
    for call in reversed(calls) if last else calls:
        call()
    return None


ISSUED = {
    "collective": ("all_reduce(sum, float32, (4,))", "barrier()"),
    "shape": ("all_reduce(sum, float32, (4,))", "all_reduce(sum, float32, (5,))"),
    "dtype": (
        "all_gather_into_tensor(float32, (32768,))",
        "all_gather_into_tensor(float64, (32768,))",
    ),
    "op": (
        "reduce_scatter_tensor(sum, float32, (3,))",
        "reduce_scatter_tensor(max, float32, (3,))",
    ),
    "objects": ("all_gather_object()", "all_reduce(sum, float32, (4,))"),
    "order": ("barrier()", "all_reduce(sum, float32, (4,))"),
}


def failure_of(call):
    """(text, number, axis, missing) of the error, which itself would keep the group, on which others wait, alive."""
    try:
        call()
    except CommunicationError as error:
        return str(error), error.number, error.axis, error.missing
    pytest.fail("no error")
    return None


@pytest.mark.parametrize(
    "first", [0, 2], ids=["rank 0 comes first", "rank 2 comes first"]
)
@pytest.mark.parametrize("how", ISSUED)
@on_ranks(3, timeout=30)
def test_every_rank_is_told_what_each_issued_and_where(how, first):
    platform = get_platform()
    rank = platform.get_rank()
    group = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",)).get_group()
    platform.barrier()
    with platform.checked_order():
        platform.all_reduce(torch.ones(1), group)
        platform.all_reduce(torch.ones(1), group)
        if rank != first:
            time.sleep(0.3)
        start = time.monotonic()
        told, number, axis, missing = failure_of(
            lambda: diverge(platform, group, rank, how)
        )
    assert time.monotonic() - start < 5  # not the 30 seconds that a collective may take
    assert "the ranks part at collective 3 of axis 'tp', ranks [0, 1, 2]" in told
    for r in range(3):
        issued = re.escape(ISSUED[how][r == 2])
        assert re.search(
            rf"rank {r} issued {issued} at test_order_check.py:\d+", told
        ), told
    assert (number, axis, missing) == (3, "tp", ())
    platform.barrier()  # the other groups are as good as before


@on_ranks(3, timeout=30)
def test_a_rank_that_was_served_already_is_told_at_its_next_collective():
    platform = get_platform()
    rank = platform.get_rank()
    with platform.checked_order():
        if rank == 2:
            time.sleep(0.3)
        told, number, _, _ = failure_of(
            lambda: (
                platform.broadcast(torch.ones(3), 2 if rank == 2 else 0, None),
                platform.barrier(),
            )
        )
    assert number == 2, told  # run_ranks has issued one
    assert (
        f"rank {rank} issued broadcast(src {2 if rank == 2 else 0}, float32, (3,)) at"
        in told
    )


@on_ranks(4, timeout=30)
def test_ranks_that_wait_for_each_other_in_different_groups_are_told_so():
    platform = get_platform()
    rank = platform.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_all_groups()
    calls = [
        lambda: platform.all_reduce(torch.ones(2), dp),
        lambda: platform.barrier(tp),
    ]
    start = time.monotonic()
    with platform.checked_order():
        platform.barrier()
        if rank == 3:
            time.sleep(
                1.0
            )  # ranks that are slow are waited for: nobody is told of a circle that is none
        for call in calls:
            call()
        # 0 waits for 2 on dp, 2 for 3 on tp, 3 for 1 on dp, 1 for 0 on tp.
        told, number, axis, _ = failure_of(
            lambda: [call() for call in (calls if rank in (0, 3) else reversed(calls))]
        )
    assert time.monotonic() - start < 8
    assert "the ranks wait for each other" in told
    assert (number, axis) == ((2, "dp") if rank in (0, 3) else (2, "tp"))
    for r in range(4):
        assert (
            f"rank {r} waits in collective 2 of axis {'dp' if r in (0, 3) else 'tp'!r}"
            in told
        )
        assert re.search(
            r"all_reduce\(sum, float32, \(2,\)\) at test_order_check.py:\d+", told
        )


@on_ranks(4, timeout=20)
def test_a_collective_that_waits_too_long_says_axis_and_number_and_who_is_missing():
    platform = get_platform()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = mesh.get_rank_list_along_axis("tp")
    platform.mark_created_groups(
        platform.split_group(None, [[0, 1], [2, 3]], timeout=1)
    )
    group = mesh.get_group("tp")
    for _ in range(2):
        platform.all_reduce(torch.ones(1), group)
    if platform.get_rank() != 3:  # its neighbour is rank 2
        handle = platform.all_gather_into_tensor(torch.ones(1), group, async_op=True)[1]
    if platform.get_rank() == 2:
        told, number, axis, missing = failure_of(handle.wait)
        assert (number, axis, missing) == (3, "tp", (3,))
        assert (
            f"of ranks {line} did not complete; it is collective 3 of axis 'tp'; ranks that never came: [3]"
            in told
        )
    elif platform.get_rank() < 2:
        handle.wait()
    platform.barrier()


def leave_early(how):
    platform = get_platform()
    with platform.checked_order():
        platform.all_reduce(torch.ones(1), None)
        if platform.get_rank() == 1:
            if how == "raises":
                raise KeyError("an error of the model")
            if how == "dies":
                os._exit(3)
            return None
        start = time.monotonic()
        told, number, _, missing = failure_of(
            lambda: platform.all_reduce(torch.ones(1 << 16), None)
        )
        return told, number, missing, time.monotonic() - start


def part_on(platform, group, rank):
    """Rank 1 comes first, and waits."""
    if rank == 0:
        time.sleep(0.5)
    return (
        platform.all_reduce(torch.ones(4), group) if rank else platform.barrier(group)
    )


@on_ranks(2)
def test_a_group_that_was_given_up_is_never_freed():
    """gloo still waits in it, and to free it, whenever Python does, would be to wait too."""
    platform = get_platform()
    rank, group = platform.get_rank(), platform.create_group([0, 1])
    kept = []
    with pytest.MonkeyPatch.context() as patched, platform.checked_order():
        patched.setattr(faults, "_keep_for_ever", kept.append)
        failure_of(functools.partial(part_on, platform, group, rank))
    assert kept == [group] * rank  # rank 0 has raised before it sent anything
    before = sys.getrefcount(group)
    faults._keep_for_ever(group)
    assert sys.getrefcount(group) == before + 1


@pytest.mark.parametrize("how", ["returns", "raises", "dies"])
def test_a_rank_that_leaves_is_named_at_once(how):
    if how == "returns":
        told = run_ranks(leave_early, 3, how, timeout=30)
        for text, number, missing, seconds in (told[0], told[2]):
            assert (number, missing) == (3, (1,))
            assert "ranks that never came: [1]" in text
            assert "ranks [1] have left the job" in text
            assert seconds < 5
    else:
        with pytest.raises(RankError) as raised:
            run_ranks(leave_early, 3, how, timeout=30)
        assert list(raised.value.failures) == [
            1
        ]  # the others have had the error that they expect


@on_ranks(2)
def test_what_fits_goes_on_and_leaves_little_behind():
    platform = get_platform()
    rank = platform.get_rank()
    store = torch.distributed.distributed_c10d._get_default_store()
    group = platform.create_group([0, 1])
    with platform.checked_order():
        for size in range(order.RECENT + 5):
            platform.all_reduce(torch.ones(size % 7), group)
        platform.barrier()
        standing = order._standings[group]
        assert len(standing.issued) == order.RECENT
        assert not any(standing.store.check([str(number)]) for number in range(1, 6))
        assert standing.store.check(["6"])
        platform.barrier()
        # Splits may differ, if they fit.
        splits = [[1, 2], [0, 1]]
        mine = torch.full((sum(splits[rank]),), float(rank))
        comes = [splits[0][rank], splits[1][rank]]
        received = platform.differentiable_all_to_all_single(
            mine, splits[rank], comes, group
        )
        assert received.tolist() == [[0.0], [0.0, 0.0, 1.0]][rank]
        large = platform.all_gather_into_tensor(
            torch.full((1 << 15,), float(rank)), group
        )
        assert large.view(2, -1)[:, 0].tolist() == [0.0, 1.0]
        everyone = [None, None]
        platform.all_gather_object(everyone, rank, group)
        assert everyone == [0, 1]
    keys = store.num_keys()
    platform.barrier(group)
    assert (
        store.num_keys() <= keys + 2
    )  # nothing is compared any more; a barrier of gloo may leave its own


@on_ranks(2, timeout=20)
def test_the_environment_asks_for_the_first_collectives():
    for value, first in (("", 0), ("0", 0), ("first:7", 7), ("1", 1 << 62)):
        os.environ["HYPER_PARALLEL_CHECK_ORDER"] = value
        assert type(get_platform())()._compared_first == first
    os.environ["HYPER_PARALLEL_CHECK_ORDER"] = "first:few"
    with pytest.raises(
        ValueError, match="must be 0, 1 or first:N as in first:100, got 'first:few'"
    ):
        type(get_platform())()
    os.environ["HYPER_PARALLEL_CHECK_ORDER"] = "first:2"
    platform = type(get_platform())()  # another one on the same groups
    group = platform.create_group([0, 1])
    for compared in (True, True, False, False):
        platform.all_reduce(torch.ones(3), group)
        assert order.last(group)[1] is compared


def test_the_lines_are_those_of_the_callers():
    """The numbers that the errors give are those of the calls above, not of the library."""
    text = Path(__file__).read_text().splitlines()
    told = run_ranks(first_difference, 2, timeout=30)
    for r, call in enumerate(
        ["platform.barrier()", "platform.all_reduce(torch.ones(2), None)"]
    ):
        [line] = re.findall(
            rf"rank {r} issued \S.*? at test_order_check.py:(\d+)", told[0]
        )
        assert call in text[int(line) - 1]


def first_difference():
    platform = get_platform()
    with platform.checked_order():
        try:
            if platform.get_rank() == 0:
                platform.barrier()
            else:
                platform.all_reduce(torch.ones(2), None)
        except CommunicationError as error:
            return str(error)
    return ""
