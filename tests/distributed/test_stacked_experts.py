# SPDX-License-Identifier: Apache-2.0
"""Folders in which each expert has its own tensors, loaded straight into parameters that have all experts."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hyper_parallel import (
    Replicate,
    Shard,
    distribute_tensor,
    get_platform,
    init_device_mesh,
)
from hyper_parallel.core.distributed_checkpoint import CheckpointError, load
from hyper_parallel.core.distributed_checkpoint.hugging_face import (
    HuggingFaceReader,
    SliceOf,
)
from hyper_parallel.testing import run_ranks

EXPERTS, HIDDEN, INNER = 5, 6, 3  # none of which two ranks divide, but HIDDEN
PLACES = {"w1": ("gate_up_proj", 0), "w3": ("gate_up_proj", 1), "w2": ("down_proj", 0)}
R, S = Replicate(), Shard


def rename(name):
    matched = re.fullmatch(
        r"(.*)\.block_sparse_moe\.experts\.(\d+)\.(w\d)\.weight", name
    )
    if matched is None:
        return name
    target, part = PLACES[matched[3]]
    return SliceOf(f"{matched[1]}.mlp.experts.{target}", int(matched[2]), part)


def mixtral(folder):
    """Writes such a folder in two files; returns what the stacked parameters should be."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"w1": (INNER, HIDDEN), "w2": (HIDDEN, INNER), "w3": (INNER, HIDDEN)}
    weights = {
        f"layers.0.block_sparse_moe.experts.{expert}.{kind}.weight": torch.randn(
            shape, generator=draw
        )
        for kind, shape in shapes.items()
        for expert in reversed(range(EXPERTS))
    }

    def stack(kind):
        return torch.stack(
            [
                weights[f"layers.0.block_sparse_moe.experts.{n}.{kind}.weight"]
                for n in range(EXPERTS)
            ]
        )

    expected = {
        "layers.0.mlp.experts.gate_up_proj": torch.cat([stack("w1"), stack("w3")], 1),
        "layers.0.mlp.experts.down_proj": stack("w2"),
        "norm.weight": torch.arange(4.0),
    }
    weights["norm.weight"] = expected["norm.weight"].clone()
    names = list(weights)
    files = {"1.safetensors": names[::2], "2.safetensors": names[1::2]}
    folder.mkdir(parents=True, exist_ok=True)
    for file, own in files.items():
        save_file({name: weights[name] for name in own}, folder / file)
    places = ", ".join(
        f'"{name}": "{file}"' for file, own in files.items() for name in own
    )
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {' + places + "}}"
    )
    return expected


def check_layouts(folder):
    expected = mixtral(Path(folder) / str(get_platform().get_rank()))
    ranks = get_platform().get_world_size()
    mesh = init_device_mesh("cpu", (2,) * (ranks // 2))
    one = [[S(0)], [S(1)], [S(2)], [R]]
    two = [[S(0), S(1)], [S(2), S(0)], [R, S(0)], [S(0), S(0)], [S(1), S(1)]]
    for placements in one if ranks == 2 else two:
        state = {
            name: distribute_tensor(
                torch.zeros_like(value),
                mesh,
                placements if value.dim() == 3 else [R] * mesh.ndim,
            )
            for name, value in expected.items()
        }
        reader = HuggingFaceReader(
            Path(folder) / str(get_platform().get_rank()), rename=rename
        )
        load(state, storage_reader=reader)
        for name, value in expected.items():
            assert state[name].full_tensor().equal(value), (name, placements)
        if S(2) in placements:
            continue  # the gaps within a row are shorter than it pays to leave out
        needed = sum(value.to_local().nbytes for value in state.values())
        assert reader.bytes_read <= needed, (placements, reader.bytes_read, needed)


def test_experts_are_stacked_on_any_mesh(tmp_path):
    for ranks in (2, 4):
        run_ranks(check_layouts, ranks, str(tmp_path / str(ranks)), timeout=240)


def metadata_of(folder, weights, renamed):
    save_file(weights, folder / "model.safetensors")
    return HuggingFaceReader(folder, rename=renamed).load_metadata()


@pytest.mark.parametrize(
    ("shapes", "renamed", "message"),
    [
        (
            [(2,)] * 2,
            {"0": SliceOf("a", 0), "1": SliceOf("a", 2)},
            'no tensor of the files is slice 1, part 0 of "a"',
        ),
        (
            [(2,)] * 2,
            {"0": SliceOf("a", 0), "1": SliceOf("a", 1, 1)},
            'slice 0, part 1 of "a"',
        ),
        (
            [(2,)] * 2,
            {"0": SliceOf("a", 0), "1": SliceOf("a", 0)},
            'both become slice 0, part 0 of "a"',
        ),
        (
            [(2,)] * 2,
            {"0": SliceOf("a", 0), "1": "a"},
            'it becomes "a", of which other tensors',
        ),
        (
            [(2,), (3,)],
            {"0": SliceOf("a", 0), "1": SliceOf("a", 1)},
            r"of shape \(3,\) along dim 0, expected .*\(2,\)",
        ),
        (
            [(2, 3), (2, 4)],
            {"0": SliceOf("a", 0), "1": SliceOf("a", 0, 1)},
            r"expected float32 of shape \(2, 3\)",
        ),
        (
            [(2, 3), (2,)],
            {"0": SliceOf("a", 0), "1": SliceOf("a", 0, 1)},
            'slice 0, part 1 of "a" is float32',
        ),
        (
            [(2,), (2,)],
            {"0": SliceOf("a", 0), "1": SliceOf("a", 0, 1, dim=1)},
            "dim 1 is not one of its 1 dims",
        ),
        (
            [()],
            {"0": SliceOf("a", 0, 1)},
            "dim 0 is not one of its 0 dims|slice 0, part 0",
        ),
        ([(2,)], {"0": SliceOf("a", -1)}, "count from 0"),
        ([(2,)], {"0": 3}, "expected a str or a SliceOf"),
    ],
)
def test_slices_that_make_no_tensor_are_refused(shapes, renamed, message, tmp_path):
    weights = {str(number): torch.zeros(shape) for number, shape in enumerate(shapes)}
    with pytest.raises((CheckpointError, ValueError), match=message):
        metadata_of(tmp_path, weights, renamed)


def test_sizes_of_stacked_tensors(tmp_path):
    weights = {"0": torch.zeros(2, 3), "1": torch.zeros(2, 5), "s": torch.zeros(())}
    renamed = {
        "0": SliceOf("a", 0, 0, dim=-1),
        "1": SliceOf("a", 0, 1, dim=1),
        "s": SliceOf("b", 0),
    }
    known = metadata_of(tmp_path, weights, renamed).state_dict_metadata
    assert tuple(known["a"].size) == (1, 2, 8)
    assert tuple(known["b"].size) == (1,)
    found = {"a": torch.ones(1, 2, 8), "b": torch.ones(1)}
    load(found, storage_reader=HuggingFaceReader(tmp_path, rename=renamed))
    assert not any(value.any() for value in found.values())
