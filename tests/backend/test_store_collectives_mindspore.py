# SPDX-License-Identifier: Apache-2.0
"""What ranks of MindSpore meet by: large data, ranks that leave early, other hosts, MindSpore's own communication."""

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import frame
import numpy as np
import pytest

from hyper_parallel import get_platform
from hyper_parallel.testing import close_ranks, on_ranks, run_ranks

COUNT = 1 << 16  # of float64: more than goes into a note


def large(rank):
    return frame.tensor(np.arange(COUNT, dtype=np.float64) + rank)


@pytest.mark.parametrize("one_host", [True, False])
@on_ranks(4)
def test_large_data_in_any_order_of_waiting(one_host):
    platform = get_platform()
    rank = platform.get_rank()
    platform._job.one_host = one_host
    started = [
        platform.all_gather_into_tensor(large(10 * i + rank), None, async_op=True)
        for i in range(3)
    ]
    for i in (0, 2, 1) if rank % 2 else (1, 0, 2):
        started[i][1].wait()
    for i, (gathered, _) in enumerate(started):
        rows = frame.array(gathered).reshape(4, COUNT)
        assert rows[:, 0].tolist() == [10 * i + r for r in range(4)]
        assert (rows == rows[:, :1] + np.arange(COUNT)).all()
    for _ in range(3):
        sent = platform.isend(large(rank), (rank + 1) % 4)
        buffer = large(0)
        platform.irecv(buffer, (rank - 1) % 4).wait()
        sent.wait()
        frame.equal(buffer, np.arange(COUNT) + (rank - 1) % 4)


@on_ranks(2)
def test_notes_are_removed_when_all_have_read_them():
    platform = get_platform()
    for _ in range(20):
        platform.all_reduce(large(0), None)
    assert platform._world.progress.cleaned == platform._world.progress.finished - 1
    assert len(platform._job._mailboxes) <= 2


def leave_at_once():
    platform = get_platform()
    if platform.get_rank() == 0:
        platform.isend(large(5), 1)
        return None  # and leave the job, with the data unread
    buffer = large(0)
    time.sleep(0.5)
    platform.irecv(buffer, 0).wait()
    return frame.array(buffer)[0]


def test_a_rank_that_leaves_lets_its_data_be_read():
    assert run_ranks(leave_at_once, 2) == [None, 5.0]


def send_another_size():
    platform = get_platform()
    rank = platform.get_rank()
    platform.isend(frame.tensor(np.ones(2 + rank)), 1 - rank)
    with pytest.raises(
        ValueError,
        match=rf"rank {1 - rank} sent {3 - rank} elements of float64, but the tensor has 9",
    ):
        platform.irecv(frame.tensor(np.ones(9)), 1 - rank).wait()


def test_what_does_not_fit_the_receiver_is_an_error():
    run_ranks(send_another_size, 2)


def join_mccl():
    import mindspore.mint.distributed as dist

    platform = get_platform()
    rank, store = platform.get_rank(), platform._job.store
    platform.destroy_process_group()
    platform.init_process_group(
        "mccl", store=store, rank=rank, world_size=2, timeout=60
    )
    group = platform.create_group([0, 1])
    theirs = frame.tensor(np.array([rank + 1.0], np.float32))
    dist.all_reduce(theirs, group=group)  # MindSpore's own function takes our group
    platform.destroy_process_group()
    with pytest.raises(
        RuntimeError, match="this process was rank .* of 2 and would be rank 0 of 1"
    ):
        platform.init_process_group(
            "mccl", store=store.under("alone"), rank=0, world_size=1
        )
    return frame.array(theirs).item(), platform.get_world_size()


def test_mccl_is_joined_where_it_is_asked_for():
    try:
        assert run_ranks(join_mccl, 2, timeout=60) == [(3.0, 1)] * 2
    finally:
        close_ranks()  # a process cannot leave it again


SCRIPT = """
    import mindspore
    import mindspore.mint.distributed as dist
    import numpy as np

    from hyper_parallel import get_platform

    platform = get_platform()
    platform.init_process_group()
    rank = platform.get_rank()
    assert platform.get_world_size() == 2


    def mine():
        return mindspore.Tensor(np.array([rank + 1.0], np.float32))


    assert platform.all_reduce(mine(), None).asnumpy().tolist() == [3.0]
    made = dist.new_group([0, 1], backend="mccl")  # by MindSpore, for us
    platform.mark_created_groups(made)
    assert platform.create_group([0, 1]) is made
    assert platform.get_process_group_ranks(made) == [0, 1]
    assert platform.all_reduce(mine(), made).asnumpy().tolist() == [3.0]
    ours = platform.split_group(None, [[0, 1]], timeout=30)  # by us, for MindSpore
    theirs = mine()
    dist.all_reduce(theirs, group=ours)
    assert theirs.asnumpy().tolist() == [3.0]
    print("rank", rank, "is content")
    platform.destroy_process_group()
"""


def test_a_program_under_msrun(tmp_path):
    (tmp_path / "program.py").write_text(textwrap.dedent(SCRIPT))
    binaries = Path(sys.executable).parent
    command = [
        binaries / "msrun",
        "--worker_num=2",
        "--local_worker_num=2",
        "--join=True",
        "program.py",
    ]
    environment = {
        "PATH": f"{binaries}:/usr/bin:/bin",
        "GLOG_v": "3",
        "OMP_NUM_THREADS": "1",
    }
    run = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    logs = "\n".join(log.read_text() for log in tmp_path.rglob("worker_*.log"))
    assert run.returncode == 0, run.stdout + run.stderr + logs
    assert all(f"rank {rank} is content" in logs for rank in range(2)), logs
