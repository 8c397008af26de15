# SPDX-License-Identifier: Apache-2.0
"""Names of experts in files of Hugging Face, where each expert has tensors of its own, and in models that stack them.

reader = HuggingFaceReader("mixtral-8x7b", rename=MIXTRAL.rename)
save_hugging_face(MIXTRAL.separate(model.state_dict()), "exported")
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.distributed_checkpoint.stacking import SliceOf
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import (
    Placement,
    RaggedShard,
    Replicate,
    Shard,
)
from hyper_parallel.platform import get_platform

_SEPARATE = re.compile(r"(.*\.)?experts\.(\d+)\.(\w+)\.weight")
_STACKED = re.compile(r"(.*\.)?experts\.(\w+)")


@dataclass(frozen=True)
class ExpertNames:
    """How one family of models names its experts.

    ``parts``: by the name of a stacked weight [experts, out, in], what the files call its parts along ``out``.
    ``in_files``, ``in_model``: what the modules with experts are called, where that differs.
    """

    parts: tuple[tuple[str, tuple[str, ...]], ...]
    in_files: str = ""
    in_model: str = ""

    def rename(self, name: str) -> str | SliceOf:
        """What a tensor of the files is in the model."""
        found = _SEPARATE.fullmatch(name)
        for stacked, names in self.parts:
            if found is not None and found[3] in names:
                target = f"{self._to_model(found[1] or '')}experts.{stacked}"
                return SliceOf(target, int(found[2]), names.index(found[3]))
        return self._to_model(name)

    def separate(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of a state dict as files have them: those of each expert by themselves.

        An expert of a distributed tensor is on the ranks that have it; along all other axes than the one that shards
        the experts, tensors are gathered.
        """
        made: dict[str, Any] = {}
        parts = dict(self.parts)
        for name, tensor in state.items():
            found = _STACKED.fullmatch(name)
            if found is None or found[2] not in parts:
                made[self._to_files(name)] = tensor
                continue
            prefix = f"{self._to_files(found[1] or '')}experts"
            names = parts[found[2]]
            for number, expert in enumerate(_take_experts(tensor)):
                for part, own in zip(names, _split(expert, len(names)), strict=True):
                    made[f"{prefix}.{number}.{part}.weight"] = own
        return made

    def _to_model(self, name: str) -> str:
        return _replace(name, self.in_files, self.in_model)

    def _to_files(self, name: str) -> str:
        return _replace(name, self.in_model, self.in_files)


MIXTRAL = ExpertNames(
    (("gate_up_proj", ("w1", "w3")), ("down_proj", ("w2",))),
    in_files="block_sparse_moe",
    in_model="mlp",
)
# Qwen2-MoE, Qwen3-MoE and DeepSeek-V3.
GATE_UP_DOWN = ExpertNames(
    (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",)))
)
# The library's own GroupedExperts.
GROUPED = ExpertNames((("w1", ("w1",)), ("w2", ("w2",)), ("w3", ("w3",))))


def _replace(name: str, before: str, after: str) -> str:
    if not before:
        return name
    return ".".join(after if part == before else part for part in name.split("."))


def _take_experts(tensor: Any) -> list[Any]:
    """The weights [out, in] of each expert."""
    platform = get_platform()
    count = int(tensor.shape[0])
    if not isinstance(tensor, DTensor):
        return [tensor[number] for number in range(count)]
    layout = tensor.layout
    axes = [axis for axis, one in enumerate(layout.placements) if one.is_shard(0)]
    placements: list[Placement] = [Replicate()] * layout.mesh.ndim
    if axes:
        placements[axes[-1]] = Shard(0)
    joint = Layout.from_device_mesh(layout.mesh)(placements).bind(3)
    local = platform.detach(tensor.redistribute(None, joint).to_local())
    [span] = joint.spans_of(tuple(tensor.shape))[0] or ((0, 0),)
    experts = []
    for number in range(count):
        is_here = span[0] <= number < span[0] + span[1]
        own = (
            local[number - span[0]]
            if is_here
            else local.reshape((-1, local.shape[2]))[:0]
        )
        where = _place_of(joint, axes, number, tuple(tensor.shape))
        experts.append(DTensor(platform.clone(own), where, tuple(tensor.shape[1:])))
    return experts


def _place_of(joint: Layout, axes: list[int], number: int, shape: Any) -> Layout:
    """The layout of one expert: all of it is on the ranks that have it."""
    placements: list[Placement] = [Replicate()] * joint.mesh.ndim
    if axes:
        axis = axes[-1]
        ranks = joint.mesh.size(axis)
        spans = [Shard(0).spans(shape[0], ranks, index) for index in range(ranks)]
        sizes = [
            shape[1] * sum(start <= number < start + size for start, size in own)
            for own in spans
        ]
        placements[axis] = RaggedShard(0, tuple(sizes))
    return Layout.from_device_mesh(joint.mesh)(placements).bind(2)


def _split(expert: Any, parts: int) -> list[Any]:
    """The parts of an expert's weight along its outputs, each of one size."""
    if parts == 1:
        return [expert]
    rows = int(expert.shape[0]) // parts
    if not isinstance(expert, DTensor):
        return [expert[part * rows : (part + 1) * rows] for part in range(parts)]
    placements = [
        RaggedShard(0, tuple(size // parts for size in one.sizes))
        if isinstance(one, RaggedShard)
        else one
        for one in expert.placements
    ]
    layout = Layout.from_device_mesh(expert.device_mesh)(placements).bind(2)
    local = expert.to_local()
    own = int(local.shape[0]) // parts
    platform = get_platform()
    return [
        DTensor(
            platform.clone(local[part * own : (part + 1) * own]),
            layout,
            (rows, int(expert.shape[1])),
        )
        for part in range(parts)
    ]
