"""One training in two frameworks: PyTorch begins on four ranks, MindSpore goes on with two, PyTorch ends with one.

python examples/shared_checkpoint/run.py
"""

import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from tempfile import mkdtemp

from hyper_parallel.core.distributed_checkpoint import read_objects
from hyper_parallel.core.distributed_checkpoint.inspection import compare_checkpoints

HERE = Path(__file__).resolve().parent
STEPS = 3  # of each of the three
LARGEST = 2e-6  # the relative difference that float32 comes to in a few steps


def main() -> None:
    """The training in three parts, the same training in one go, and what there is to compare."""
    out = Path(
        sys.argv[1] if len(sys.argv) > 1 else mkdtemp(prefix="shared_checkpoint_")
    )
    first, copied, second, third, whole = (
        out / name for name in ("first", "copied", "second", "third", "whole")
    )
    start("in_pytorch.py", 4, "--mesh", "2x2", "--steps", STEPS, "--save", first)
    going_on = [
        "--load",
        first,
        "--copy",
        copied,
        "--steps",
        2 * STEPS,
        "--save",
        second,
    ]
    start("in_mindspore.py", 2, "--mesh", "2", *going_on)
    start("in_pytorch.py", 1, "--load", second, "--steps", 3 * STEPS, "--save", third)
    start("in_pytorch.py", 1, "--steps", 3 * STEPS, "--save", whole)

    print("\nLoaded by MindSpore and saved again:")
    for part in ("model.", "optimizer.state.", "reference."):
        check_bits(part, first, copied)
    print(
        "The copy in bfloat16, after both frameworks, and where it never left PyTorch:"
    )
    check_bits("reference.", whole, third)
    check_losses(read_objects(third)["losses"], read_objects(whole)["losses"])


def check_bits(part: str, one: Path, other: Path) -> None:
    """Fails unless the tensors whose names begin with ``part`` are the same in both, to the last bit."""
    found = compare_checkpoints(one, other, prefixes=(part, part))
    if not found.is_equal or not found.compared:
        raise SystemExit(f"{part[:-1]} is not the same in {one} and {other}: {found}")
    print(f"{part[:-1]:15} {found.compared} tensors, every bit as PyTorch wrote it")


def check_losses(shared: list[float], alone: list[float]) -> None:
    """Fails unless the training in three parts had the losses of the one in one go."""
    print("\nstep  by                 loss   in one go, by PyTorch")
    for step, (mine, true) in enumerate(zip(shared, alone, strict=True), 1):
        by = ("PyTorch, 2x2", "MindSpore, 2", "PyTorch, 1")[(step - 1) // STEPS]
        print(f"{step:4}  {by:12} {mine:10.7f}   {true:.7f}")
        if not math.isclose(mine, true, rel_tol=LARGEST):
            raise SystemExit(f"step {step}: the losses differ by more than {LARGEST}")


def start(script: str, ranks: int, *options: object) -> None:
    """Runs a script on so many processes of this machine, as a launcher does; ends all of them if one fails."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    job = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    paths = {
        "PYTHONPATH": os.pathsep.join(
            [str(HERE.parent / "llama"), os.environ.get("PYTHONPATH", "")]
        )
    }
    calm = {
        "OMP_NUM_THREADS": "1",
        "GLOG_v": "3",
    }  # one thread a rank, and MindSpore tells errors alone
    command = [sys.executable, str(HERE / script), *map(str, options)]
    processes = [
        subprocess.Popen(  # noqa: S603 - ours
            command, env={**os.environ, **job, **paths, **calm, "RANK": str(rank)}
        )
        for rank in range(ranks)
    ]
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            for process in processes:
                process.kill()
        time.sleep(0.05)
    if any(process.returncode for process in processes):
        raise SystemExit(f"{script} failed: {' '.join(command)}")


if __name__ == "__main__":
    main()
