# SPDX-License-Identifier: Apache-2.0
"""Saving and loading 1 GiB of distributed tensors over 2 ranks, beside torch's own, safetensors, and the raw calls.

make bench

*Raw* is write and fsync, read, and a copy in memory of the same bytes on the same two ranks, without anything else:
no names, no checksums. Ours writes and compares checksums. Reading comes from the page cache on both sides. Seconds,
medians of rounds in which all take turns; a step takes as long as its slower rank. *More memory* is what a rank's
process grew by at most, in any round: each has 512 MiB of the state.
"""

import gc
import os
import shutil
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as native_checkpoint
import torch.distributed.tensor as native
from safetensors.torch import load_file, save_file
from timing import median, ratio

from hyper_parallel import DTensor, Shard, init_device_mesh
from hyper_parallel.core.distributed_checkpoint import async_save, load, save
from hyper_parallel.testing import close_ranks, run_ranks

TENSORS, SIDE = 16, 4096  # 64 MiB of float32 each
ROUNDS = int(os.environ.get("ROUNDS", "5"))
MADE = {
    "raw_write": "raw-*", "safetensors_save": "one.safetensors", "save": "ours", "async_save": "ours",
    "torch_save": "torch", "torch_async_save": "torch",
}  # fmt: skip
WRITE, STEP = (
    1 << 18,
    1 << 22,
)  # what raw code writes and reads at a time; 4 MiB at a time would be written slower


class Bench:
    """The state on one rank, and each way as a method."""

    def __init__(self, folder):
        self.folder, self.rank, ranks = (
            Path(folder),
            dist.get_rank(),
            dist.get_world_size(),
        )
        mesh = init_device_mesh("cpu", (ranks,))
        rows, columns = (SIDE // ranks, SIDE), (SIDE, SIDE // ranks)
        whole = (SIDE, SIDE)
        generator = torch.Generator().manual_seed(self.rank)
        self.rows = {
            str(n): torch.randn(rows, generator=generator) for n in range(TENSORS)
        }
        self.columns = {str(n): torch.zeros(columns) for n in range(TENSORS)}
        self.ours = {
            n: DTensor.from_local(t, mesh, [Shard(0)], shape=whole)
            for n, t in self.rows.items()
        }
        self.ours_columns = {
            n: DTensor.from_local(t, mesh, [Shard(1)], shape=whole)
            for n, t in self.columns.items()
        }
        theirs = native.init_device_mesh("cpu", (ranks,))
        self.theirs = {
            n: native.DTensor.from_local(t, theirs, [native.Shard(0)])
            for n, t in self.rows.items()
        }
        placed = [native.Shard(1)]
        self.theirs_columns = {
            n: native.DTensor.from_local(t, theirs, placed)
            for n, t in self.columns.items()
        }
        self.whole = (
            {n: torch.zeros(whole) for n in self.rows} if self.rank == 0 else {}
        )
        self.copies = {n: torch.zeros_like(t) for n, t in self.rows.items()}

    def raw_write(self):
        fd = os.open(
            self.folder / f"raw-{self.rank}",
            os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
            0o666,
        )
        for tensor in self.rows.values():
            data = memoryview(tensor.numpy().reshape(-1).view(np.uint8))
            for at in range(0, len(data), WRITE):
                os.write(fd, data[at : at + WRITE])
        os.fsync(fd)
        os.close(fd)

    def raw_read(self):
        fd, place = os.open(self.folder / f"raw-{self.rank}", os.O_RDONLY), 0
        for tensor in self.rows.values():
            data = memoryview(tensor.numpy().reshape(-1).view(np.uint8))
            for at in range(0, len(data), STEP):
                place += os.preadv(fd, [data[at : at + STEP]], place)
        os.close(fd)

    def copy(self):
        for name, tensor in self.rows.items():
            self.copies[name].copy_(tensor)

    def save(self):
        save(self.ours, checkpoint_id=self.folder / "ours")

    def load(self):
        load(self.ours, checkpoint_id=self.folder / "ours")

    def load_columns(self):
        load(self.ours_columns, checkpoint_id=self.folder / "ours")

    def async_save(self):
        self.response = async_save(self.ours, checkpoint_id=self.folder / "ours")

    def torch_save(self):
        native_checkpoint.save(self.theirs, checkpoint_id=self.folder / "torch")

    def torch_load(self):
        native_checkpoint.load(self.theirs, checkpoint_id=self.folder / "torch")

    def torch_load_columns(self):
        native_checkpoint.load(self.theirs_columns, checkpoint_id=self.folder / "torch")

    def torch_async_save(self):
        self.response = native_checkpoint.async_save(
            self.theirs, checkpoint_id=self.folder / "torch"
        )

    def safetensors_save(self):
        if self.rank == 0:
            path = self.folder / "one.safetensors"
            save_file(self.whole, path)
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def safetensors_load(self):
        if self.rank == 0:
            for name, tensor in load_file(self.folder / "one.safetensors").items():
                self.whole[name].copy_(tensor)

    def forget(self, way):
        """Removes what a save would otherwise write over."""
        if self.rank == 0 and way in MADE:
            for path in self.folder.glob(MADE[way]):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def measure(self, way):
        """(seconds on the slower rank, MiB of memory beyond what there was)."""
        self.forget(way)
        gc.collect()
        os.sync()
        dist.barrier()
        before, start = reset_peak(), time.perf_counter()
        getattr(self, way)()
        seconds = time.perf_counter() - start
        if way.endswith("async_save"):
            self.response.result()
        found = torch.tensor([seconds, peak() - before], dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()


WAYS = (
    "raw_write", "save", "torch_save", "safetensors_save", "raw_read", "load", "torch_load", "safetensors_load",
    "load_columns", "torch_load_columns", "copy", "async_save", "torch_async_save",
)  # fmt: skip


def reset_peak():
    """MiB of this process now; its highest mark starts again from there."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def peak():
    return memory("VmHWM")


def memory(field):
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(field)
    )
    return int(line.split()[1]) / 1024


def on_rank(folder):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    bench = Bench(folder)
    seconds, most = {way: [] for way in WAYS}, dict.fromkeys(WAYS, 0.0)
    for number in range(ROUNDS + 1):
        for way in WAYS:
            took, grew = bench.measure(way)
            most[way] = max(most[way], grew)
            if number:  # the first round also gets memory for the first time
                seconds[way].append(took)
    return seconds, most


LINES = [
    (
        "save", "raw write + fsync", "raw_write",
        [("ours", "save"), ("torch", "torch_save"), ("safetensors", "safetensors_save")],
    ),
    ("load", "raw read", "raw_read", [("ours", "load"), ("torch", "torch_load"), ("safetensors", "safetensors_load")]),
    ("load, rows to columns", "raw read", "raw_read", [("ours", "load_columns"), ("torch", "torch_load_columns")]),
    ("async save, blocked", "copy in memory", "copy", [("ours", "async_save"), ("torch", "torch_async_save")]),
]  # fmt: skip


def main():
    folder = Path("build/bench-checkpoints")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        seconds, most = run_ranks(on_rank, 2, str(folder), timeout=3600)[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        close_ranks()
    for title, base_title, base, ways in LINES:
        print(f"\n{title}: {base_title} {median(seconds, base):.3f} s")
        for name, way in ways:
            told = f"  {name:12} {median(seconds, way):7.3f} s  {ratio(seconds, way, base):6.2f}x"
            print(f"{told}   {most[way]:6.0f} MiB more memory at most")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
