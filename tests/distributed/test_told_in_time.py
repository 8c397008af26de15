# SPDX-License-Identifier: Apache-2.0
"""Nobody waits in silence: ranks that wait are told in time, whatever they wait in, and ranks that part by default."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from hyper_parallel import (
    CommunicationError,
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    get_platform,
    init_device_mesh,
)
from hyper_parallel.core.distributed_checkpoint import (
    CheckpointError,
    CheckpointManager,
)
from hyper_parallel.core.distributed_checkpoint.saving import Prepared
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.testing import on_ranks, run_ranks

LARGE = 1 << 16  # elements of float32: gathered by messages between two ranks each


# --- ranks that never come


def wait_in_redistribute(shape, names):
    platform = get_platform()
    before = platform._compared_first
    platform._compared_first = 0  # as after the first collectives of a job
    try:
        torch.distributed.barrier()
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        placements = [Replicate()] * (len(shape) - 1)
        distribute_tensor(
            torch.ones(LARGE), mesh, [*placements, Shard(0)]
        ).full_tensor()  # the group is made
        x = distribute_tensor(torch.ones(LARGE), mesh, [*placements, Shard(0)])
        if platform.get_rank() == 1:
            time.sleep(4.5)  # it raised, and lives
            return None
        if platform.get_rank() > 1:
            x.full_tensor()
            return None
        start = time.monotonic()
        with pytest.raises(
            CommunicationError, match=r"ranks that never came: \[1\]"
        ) as raised:
            x.full_tensor()
        return time.monotonic() - start, raised.value.missing
    finally:
        platform._compared_first = before


def on_groups_of_torch(shape, names):
    """The job is joined by torch's own function: its timeout holds for our groups too."""
    rank, size = get_platform().get_rank(), get_platform().get_world_size()
    store = torch.distributed.distributed_c10d._get_default_store()
    get_platform().destroy_process_group()
    own = torch.distributed.PrefixStore("again", store)
    torch.distributed.init_process_group(
        "gloo", store=own, rank=rank, world_size=size, timeout=timedelta(seconds=2)
    )
    return wait_in_redistribute(shape, names)


@pytest.mark.parametrize(("shape", "names"), [((2,), ("tp",)), ((2, 2), ("dp", "tp"))])
def test_a_gather_by_messages_ends_in_the_time_that_torch_was_told(shape, names):
    waited, missing = run_ranks(
        on_groups_of_torch, 2 * len(shape), shape, names, timeout=30
    )[0]
    assert missing == (1,)
    assert waited < 2 + 2  # the timeout, and a second for what the others have to say


# --- a host that stands still stands for a link that is cut

STOPPED = """
    import os, signal, sys, time
    import torch
    from hyper_parallel import Shard, distribute_tensor, get_platform, init_device_mesh

    platform = get_platform()
    platform.init_process_group(timeout=60)
    platform.mark_created_groups(platform.split_group(None, [[0, 1]], timeout=2))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = distribute_tensor(torch.ones(1 << 16), mesh, [Shard(0)])
    platform.all_reduce(torch.ones(1), mesh.get_group())
    platform.barrier()
    if platform.get_rank() == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.3)
    start = time.monotonic()
    try:
        x.full_tensor()
    except RuntimeError as error:
        print(f"{time.monotonic() - start:.1f} {type(error).__name__} {error}", flush=True)
        os._exit(0)
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("check", ["0", "first:100"])
@pytest.mark.parametrize("stopped", [0, 1], ids=["the store's host", "another"])
def test_a_host_that_does_not_answer_is_told_in_time(tmp_path, stopped, check):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(STOPPED))
    job = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    job["HYPER_PARALLEL_CHECK_ORDER"] = check
    command = [sys.executable, str(script), str(stopped)]
    options = {"stdout": subprocess.PIPE, "text": True}
    ranks = [
        subprocess.Popen(command, env={**os.environ, **job, "RANK": str(r)}, **options)
        for r in range(2)
    ]
    try:
        out, _ = ranks[1 - stopped].communicate(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    seconds, kind, told = out.split(" ", 2)
    assert kind == "CommunicationError", out
    assert float(seconds) < 2 + 4, out
    assert (
        "the job's store does not answer"
        if stopped == 0
        else "ranks that never came: [1]"
    ) in told


# --- ranks that part are told without being asked


@on_ranks(2, timeout=30)
def test_ranks_that_part_are_told_by_default():
    platform = get_platform()
    rank = platform.get_rank()
    group = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)).get_group()
    for _ in range(3):
        platform.all_reduce(torch.ones(1), group)
    with pytest.raises(
        CommunicationError, match="the ranks part at collective 4 of axis 'tp'"
    ) as raised:
        platform.all_gather_into_tensor(
            torch.ones(1000), group
        ) if rank else platform.all_reduce(torch.ones(2), group)
    assert (
        "rank 0 issued all_reduce(sum, float32, (2,)) at test_told_in_time.py:"
        in str(raised.value)
    )
    assert "look for a branch that not all ranks take" in str(raised.value)


@on_ranks(2)
def test_the_default_check_is_not_counted_and_ends():
    platform = get_platform()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    group = mesh.get_group()
    with CommunicationLedger(mesh) as ledger:
        for _ in range(3):
            platform.all_reduce(torch.ones(1), group)
    assert ledger.counts() == {"all_reduce": 3}
    store = torch.distributed.distributed_c10d._get_default_store()
    before = store.num_keys()
    for _ in range(97):
        platform.all_reduce(torch.ones(1), group)
    platform.barrier()
    compared = store.num_keys()
    assert compared - before >= 97
    for _ in range(50):
        platform.all_reduce(torch.ones(1), group)
    platform.barrier()
    assert store.num_keys() - compared <= 4  # the barriers, in another group


@on_ranks(2, timeout=30)
def test_splits_that_do_not_fit_are_told():
    platform = get_platform()
    rank = platform.get_rank()
    sends = [[1, 2], [3, 4]][rank]
    right, wrong = [[1, 3], [2, 4]][rank], [[1, 3], [3, 4]][rank]
    made = platform.differentiable_all_to_all_single(
        torch.ones(sum(sends)), sends, right, None
    )
    assert made.shape == (sum(right),)
    with pytest.raises(CommunicationError, match=r"sends \[1, 2\], receives \[1, 3\]"):
        platform.differentiable_all_to_all_single(
            torch.ones(sum(sends)), sends, wrong, None
        )


# --- from_local


@pytest.mark.parametrize("how", ["full_tensor", "other dim"])
@on_ranks(2, timeout=30)
def test_pieces_of_other_sizes_without_the_shape_of_the_whole(how):
    rank = get_platform().get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    piece = torch.full((3 - rank, 5), float(rank))
    x = DTensor.from_local(piece, mesh, [Shard(0)])
    with pytest.raises(
        CommunicationError, match=r"DTensor\.from_local\(\.\.\., shape=\)"
    ) as raised:
        x.full_tensor() if how == "full_tensor" else x.redistribute(mesh, [Shard(1)])
    assert "rank 0 issued" in str(raised.value)
    assert "rank 1 issued" in str(raised.value)


@on_ranks(2)
def test_pieces_of_other_sizes_are_told_at_once_where_that_is_asked_for():
    rank = get_platform().get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    piece = torch.full((3 - rank,), float(rank))
    with pytest.raises(
        ValueError, match=r"another shape than rank 0.*from_local\(\.\.\., shape=\)"
    ):
        DTensor.from_local(piece, mesh, [Shard(0)], run_check=True)
    whole = DTensor.from_local(
        piece, mesh, [Shard(0)], shape=(5,), run_check=True
    ).full_tensor()
    assert whole.tolist() == [0, 0, 0, 1, 1]


# --- saves


@on_ranks(2)
def test_a_save_that_does_not_end_names_the_ranks(tmp_path):
    rank = get_platform().get_rank()
    manager = CheckpointManager(tmp_path, asynchronous=True, timeout=0.5)
    usual = Prepared.write
    release = time.monotonic() + 2.5

    def slow(self, ranks):
        if rank == 1:
            time.sleep(max(0.0, release - time.monotonic()))
        return usual(self, ranks)

    Prepared.write = slow
    try:
        manager.save(1, {"w": torch.ones(4)})
        with pytest.raises(
            CheckpointError,
            match=r"not whole after 0\.5 s: ranks \[0, 1\]|ranks \[1\] are still writing",
        ):
            manager.wait()
    finally:
        Prepared.write = usual
    with pytest.raises(ValueError, match="timeout must be a positive number"):
        CheckpointManager(tmp_path, timeout=0)


# --- SIGTERM, and a launcher that is killed


def test_a_process_ends_with_the_one_that_started_it(tmp_path):
    child = tmp_path / "child.py"
    child.write_text(
        "import os, time\nfrom hyper_parallel.ranks.parent import end_with_parent\n"
        "end_with_parent(os.getppid())\nprint('up', flush=True)\ntime.sleep(60)\n"
    )
    parent = "import subprocess, sys\n"
    parent += f"child = subprocess.Popen([sys.executable, {str(child)!r}])\nprint(child.pid, flush=True)\nchild.wait()"
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True
    ) as process:
        pid = int(process.stdout.readline())
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert _ends(pid)


def _ends(pid):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False
