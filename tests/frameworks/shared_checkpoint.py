# SPDX-License-Identifier: Apache-2.0
"""Writes or reads checkpoints of random bits in every dtype that both frameworks have, in one framework on meshes.

python tests/frameworks/shared_checkpoint.py mindspore save,3,1,FOLDER      3 ranks, cut along dim 1
python tests/frameworks/shared_checkpoint.py torch load,2,0,FOLDER          fails unless every bit is as written
"""

import os
import sys

ITEM_SIZES = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
}  # fmt: skip
SHAPES = {"matrix": (7, 5), "even": (6, 4), "thin": (1, 9), "nothing": (0, 4)}


def bits():
    """The bytes of every tensor, by its name: its shape and its dtype."""
    import numpy as np

    rng = np.random.default_rng(3)
    return {
        (kind, dtype): rng.integers(
            0, 2 if dtype == "bool" else 256, int(np.prod(shape)) * size, dtype=np.uint8
        )
        for kind, shape in SHAPES.items()
        for dtype, size in ITEM_SIZES.items()
    }


def on_this_rank(what, ranks, dim, folder):
    """Saves, or loads and compares."""
    import numpy as np

    from hyper_parallel import Shard, distribute_tensor, get_platform, init_device_mesh
    from hyper_parallel.core.distributed_checkpoint import load, save

    platform, mesh = get_platform(), init_device_mesh("cpu", (ranks,))
    state = {}
    for (kind, dtype), data in bits().items():
        given = data if what == "save" else np.zeros_like(data)
        tensor = platform.tensor_from_bytes(given.copy(), dtype, SHAPES[kind])
        state[f"{kind}.{dtype}"] = distribute_tensor(tensor, mesh, [Shard(dim)])
    everything = {
        "state": state,
        "plain": platform.full((3,), 7.0 if what == "save" else 0.0),
        "step": 7,
    }
    if what == "save":
        save(everything, checkpoint_id=folder)
        return
    everything["step"] = 0
    report = load(everything, checkpoint_id=folder)
    assert len(report.loaded) == len(state) + 2
    assert everything["step"] == 7
    assert platform.tensor_to_numpy(everything["plain"]).tolist() == [7.0] * 3
    for (kind, dtype), data in bits().items():
        whole = state[f"{kind}.{dtype}"].full_tensor()
        found = (
            platform.tensor_memory(platform.host_tensor(whole))
            .reshape(-1)
            .view(np.uint8)
        )
        assert np.array_equal(found, data), f"{kind}.{dtype}"


def main():
    framework, *tasks = sys.argv[1:]
    os.environ["HYPER_PARALLEL_PLATFORM"] = framework
    from hyper_parallel.testing import close_ranks, run_ranks

    for task in tasks:
        what, ranks, dim, folder = task.split(",")
        run_ranks(
            on_this_rank, int(ranks), what, int(ranks), int(dim), folder, timeout=300
        )
        print(task)
    close_ranks()


if __name__ == "__main__":
    main()
