# SPDX-License-Identifier: Apache-2.0
"""Chooses how the projections of a block lie along an axis: the least communication with as much sharded as can be.

The first choice follows the data: what gets whole inputs is sharded by columns, what gets sharded ones by rows. If
that communicates more than the sums of its rows, other choices for one projection after the other are tried, each by a
dry run of the block, until none is better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.placement_types import Replicate
from hyper_parallel.core.modules.style import ParallelStyle
from hyper_parallel.core.shard.arguments import tensors_in
from hyper_parallel.core.tensor_parallel.style import (
    ColwiseParallel,
    FusedColwiseParallel,
    RowwiseParallel,
)
from hyper_parallel.planning.dry_run import Call, Cost, dry_run
from hyper_parallel.planning.own import Kind
from hyper_parallel.planning.trace import Link
from hyper_parallel.platform import get_platform

platform = get_platform()

# What a block costs is counted in times that its input is sent. A projection that is not sharded costs its share of
# the block's weights times the first number: more than any block communicates to shard all. The second is for the
# latency of a collective, however small.
_WHOLE_WEIGHTS, _LATENCY = 32.0, 0.5
_MOST_ROUNDS = 3


@dataclass(frozen=True)
class Choice:
    """How the projections of a block lie, what that costs, and for those that are replicated the reason."""

    kinds: Mapping[str, Kind]
    cost: Cost
    share: float  # of the weights of its projections that every rank has
    reasons: Mapping[str, str]


class NotMeasuredError(Exception):
    """A block that cannot be run on tensors without data."""


class Block:
    """A block to plan: its projections by their names in it, in the order of their calls."""

    def __init__(
        self, module: Any, links: Mapping[str, Link], call: Call, mesh: DeviceMesh
    ) -> None:
        self.module, self.links, self.call, self.mesh = module, links, call, mesh
        self.projections = {
            name: inner
            for name, inner in platform.get_cells_and_names(module)
            if name in links
        }
        self._costs: dict[Any, Cost] = {}
        floats = [one for one in tensors_in(call) if platform.is_floating_point(one)]
        self._unit = max((one.nbytes for one in floats[:1]), default=1)

    @property
    def ranks(self) -> int:
        """The size of the axis."""
        return self.mesh.size()

    def styles(self, kinds: Mapping[str, Kind]) -> dict[str, ParallelStyle]:
        """The styles of the projections that are not replicated."""
        styles = {name: self._style(name, kind) for name, kind in kinds.items()}
        return {name: style for name, style in styles.items() if style is not None}

    def _style(self, name: str, kind: Kind) -> ParallelStyle | None:
        link = self.links[name]
        if kind is Kind.ROWS:
            return RowwiseParallel()
        if kind is Kind.SECTIONS:
            return FusedColwiseParallel(sections=link.sections or 2, heads=link.heads)
        if kind is Kind.WHOLE:
            return None
        gathered = Replicate() if kind is Kind.GATHERED else None
        return ColwiseParallel(heads=link.heads, output_layouts=gathered)

    def find_obstacle(self, name: str, kind: Kind) -> str:
        """Why a projection cannot lie so; empty if it can."""
        link, size = self.links[name], self._sizes(name)
        if kind is Kind.ROWS or kind is Kind.WHOLE:
            return "" if size[1] >= self.ranks else f"only {size[1]} inputs"
        if link.heads is not None and link.heads % self.ranks:
            return f"{link.heads} heads cannot be shared by {self.ranks} ranks"
        if kind is Kind.SECTIONS:
            return self._find_uneven_section(link, size[0])
        return "" if size[0] >= self.ranks else f"only {size[0]} outputs"

    def _find_uneven_section(self, link: Link, outputs: int) -> str:
        sections = link.sections or 2
        whole = isinstance(sections, int)
        sizes = [outputs // sections] * sections if whole else list(sections)  # type: ignore[operator, arg-type]
        if sum(sizes) != outputs or any(size % self.ranks for size in sizes):
            return f"sections of {sizes} cannot be shared by {self.ranks} ranks"
        head = outputs // link.heads if link.heads else 1
        if any(size % (head * self.ranks) for size in sizes):
            return (
                f"heads in sections of {sizes} cannot be shared by {self.ranks} ranks"
            )
        return ""

    def _sizes(self, name: str) -> tuple[int, int]:
        module = self.projections[name]
        projection = platform.projection(module)
        assert projection is not None
        shape = dict(platform.own_tensors(module))["weight"].shape
        return int(shape[projection.out]), int(shape[projection.into])

    def share(self, kinds: Mapping[str, Kind]) -> float:
        """The share of the weights of projections that every rank has."""
        sizes = {name: math.prod(self._sizes(name)) for name in self.projections}
        whole = sum(
            size
            for name, size in sizes.items()
            if kinds.get(name, Kind.WHOLE) is Kind.WHOLE
        )
        return whole / max(sum(sizes.values()), 1)

    def cost(self, kinds: Mapping[str, Kind]) -> Cost:
        """What the block communicates."""
        key = tuple(sorted((name, kind.name) for name, kind in kinds.items()))
        if key not in self._costs:
            styles = self.styles(kinds)
            try:
                self._costs[key] = dry_run(self.module, self.call, styles, self.mesh)
            except Exception as error:  # a model's code may raise anything
                first = (str(error).splitlines() or [""])[0]
                text = f"{type(error).__name__}: {first}"
                raise NotMeasuredError(text) from error
        return self._costs[key]

    def score(self, kinds: Mapping[str, Kind]) -> float:
        """One number, smaller for better choices."""
        cost = self.cost(kinds)
        sent = cost.nbytes / self._unit + _LATENCY * cost.count
        return sent + _WHOLE_WEIGHTS * self.share(kinds)

    def guess(self, kinds: Mapping[str, Kind] | None) -> Choice:
        """A choice that could not be measured: the given one, or what follows from the flow of data alone."""
        reasons: dict[str, str] = {}
        if kinds is None:
            kinds, reasons = follow_data(self)
        return Choice(dict(kinds), Cost(), self.share(kinds), reasons)

    def choice(self, kinds: Mapping[str, Kind], reasons: Mapping[str, str]) -> Choice:
        """The choice as a value."""
        return Choice(dict(kinds), self.cost(kinds), self.share(kinds), dict(reasons))


def derive(block: Block) -> Choice:
    """The best choice that is found for a block."""
    kinds, reasons = follow_data(block)
    if _is_least(block, kinds):
        return block.choice(kinds, reasons)
    best = block.score(kinds)
    for _ in range(_MOST_ROUNDS):
        before = best
        for name in kinds:
            best = _improve(block, kinds, name, best)
        if best >= before:
            break
    for name, kind in kinds.items():
        if kind is Kind.WHOLE:
            reasons.setdefault(name, "sharding it would communicate more")
    return block.choice(kinds, reasons)


def _improve(block: Block, kinds: dict[str, Kind], name: str, best: float) -> float:
    """Changes one projection if that is better; returns the score."""
    for kind in Kind:
        was = kinds[name]
        is_fused = block.links[name].sections is not None
        if kind is was or (kind is Kind.SECTIONS and not is_fused):
            continue
        if kind is Kind.GATHERED or block.find_obstacle(name, kind):
            continue
        kinds[name] = kind
        score = block.score(kinds)
        if score < best:
            best = score
        else:
            kinds[name] = was
    return best


def follow_data(block: Block) -> tuple[dict[str, Kind], dict[str, str]]:
    """Columns for what gets whole inputs, rows for what gets sharded ones."""
    kinds: dict[str, Kind] = {}
    reasons: dict[str, str] = {}
    sharded = (Kind.COLUMNS, Kind.SECTIONS)
    for name, link in block.links.items():
        follows = any(kinds.get(one) in sharded for one in link.before)
        kind = Kind.COLUMNS if link.sections is None else Kind.SECTIONS
        kind = Kind.ROWS if follows else kind
        obstacle = block.find_obstacle(name, kind)
        if obstacle:
            reasons[name] = obstacle
        kinds[name] = Kind.WHOLE if obstacle else kind
    return kinds, reasons


def _is_least(block: Block, kinds: Mapping[str, Kind]) -> bool:
    """Whether nothing is communicated but the sum of each row-wise output, and of one gradient for each."""
    if Kind.WHOLE in kinds.values():
        return False
    rows = sum(kind is Kind.ROWS for kind in kinds.values())
    cost = block.cost(kinds)
    forward, backward = sum(cost.forward.values()), sum(cost.backward.values())
    return not cost.unasked and forward == rows and backward <= rows
