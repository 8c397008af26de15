# SPDX-License-Identifier: Apache-2.0
"""Which modules of an unchanged model belong to which stage.

    plan = plan_stages(model, 4)                                    balanced by the sizes of matrices
    plan = plan_stages(model, 4, costs=measure_costs(model, x))     or by time
    plan = plan_stages(model, 2, begin=["blocks.3"])                or by the names of blocks that begin a stage
    print(plan)
    plan.keep(model, [1])                                           without the parameters of all other stages

What is registered before the blocks belongs to the first stage, and what is behind them to the last one, unless
``first`` and ``last`` say otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from hyper_parallel.core.modules.absent import remove_tensors, set_first_names
from hyper_parallel.core.modules.blocks import find_blocks, name_members
from hyper_parallel.core.pipeline_parallel.balance import balance
from hyper_parallel.core.pipeline_parallel.costs import count_costs, is_within
from hyper_parallel.core.shard.sharding_plan import no_match
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


@dataclass(frozen=True)
class StagePlan:
    """The stage of every piece of a model, by the name of the module; blocks are pieces too.

    ``ends``: the last block of each stage. ``shared``: the names of a parameter that several stages have, by stage.
    """

    stages: int
    stage_of: Mapping[str, int]
    ends: tuple[str, ...]
    shared: tuple[Mapping[int, str], ...]

    def pieces_of(self, stage: int) -> list[str]:
        """The names of the modules that a stage has."""
        return [name for name, owner in self.stage_of.items() if owner == stage]

    def keep(self, model: Any, stages: Collection[int]) -> None:
        """Takes the tensors of all other stages away from the model; names stay those of the whole model."""
        modules = dict(platform.get_cells_and_names(model))
        kept = {
            id(inner)
            for name, stage in self.stage_of.items()
            if stage in stages
            for _, inner in platform.get_cells_and_names(modules[name])
        }
        for name, stage in self.stage_of.items():
            if stage not in stages:
                remove_tensors(modules[name], kept)
        set_first_names(
            model,
            {
                name: name_on[min(name_on)]
                for name_on in self.shared
                for name in name_on.values()
            },
        )

    def __str__(self) -> str:
        lines = []
        for stage in range(self.stages):
            names = _shorten(self.pieces_of(stage))
            lines.append(f"stage {stage}: {', '.join(names)}")
        for name_on in self.shared:
            words = dict.fromkeys(name_on.values())
            lines.append(f"shared by stages {sorted(name_on)}: {' and '.join(words)}")
        return "\n".join(lines)


def plan_stages(
    model: Any,
    stages: int,
    *,
    begin: Sequence[str] | None = None,
    costs: Mapping[str, float] | None = None,
    first: Sequence[str] = (),
    last: Sequence[str] = (),
) -> StagePlan:
    """Divides a model between its repeated blocks.

    ``begin``: the names of the blocks that begin the second stage and those after it. ``costs``: of modules by name;
    without it, what `count_costs` says. ``first``, ``last``: patterns of modules that the first and the last stage run.
    The names of the blocks are those of the plan that `transformers` models carry, or the largest list of modules.
    """
    blocks = choose_blocks(model, begin)
    if not isinstance(stages, int) or not 1 <= stages <= len(blocks):
        raise coded(
            ValueError,
            "HP493",
            f"plan_stages: {len(blocks)} blocks ({_range_of(blocks)}) can be 1 to {len(blocks)} stages, got {stages!r}",
        )
    sides = _choose_sides(model, blocks, first, last)
    before = [name for name, is_first in sides.items() if is_first]
    after = [name for name, is_first in sides.items() if not is_first]
    if begin is None:
        costs = count_costs(model) if costs is None else costs
        sizes = balance(_weigh(blocks, before, after, costs), stages)
    else:
        sizes = _sizes_between(blocks, begin, stages)
    stage_of = dict.fromkeys(before, 0)
    ends = []
    start = 0
    for stage, size in enumerate(sizes):
        stage_of |= dict.fromkeys(blocks[start : start + size], stage)
        start += size
        ends.append(blocks[start - 1])
    stage_of |= dict.fromkeys(after, stages - 1)
    shared = tuple(_find_shared(model, stage_of, stages))
    return StagePlan(stages, stage_of, tuple(ends), shared)


# --- blocks, and what is beside them


def choose_blocks(model: Any, begin: Sequence[str] | None = None) -> list[str]:
    """The names of the blocks between which a model is divided."""
    modules = dict(platform.get_cells_and_names(model))
    if begin:
        unknown = [name for name in begin if name not in modules]
        if unknown:
            reason = no_match("module", unknown[0], modules)
            raise coded(ValueError, "HP493", f"plan_stages: begin: {reason}")
        parent = begin[0].rpartition(".")[0]
        return name_members(modules[parent], parent)
    for name in getattr(model, "_pp_plan", None) or ():
        if name in modules and platform.is_module_list(modules[name]):
            return name_members(modules[name], name)
    blocks = find_blocks(model)
    if not blocks:
        raise coded(
            ValueError,
            "HP493",
            "plan_stages: the model has no list of modules to divide; name the modules that begin a stage, as "
            "begin=['layer3']",
        )
    return blocks


def _sizes_between(
    blocks: Sequence[str], begin: Sequence[str], stages: int
) -> list[int]:
    places = [blocks.index(name) if name in blocks else -1 for name in begin]
    in_order = places == sorted(set(places)) and min(places, default=1) > 0
    if not in_order or len(begin) != stages - 1:
        raise coded(
            ValueError,
            "HP493",
            f"plan_stages: begin must name the {stages - 1} blocks of {_range_of(blocks)} that begin a stage after the "
            f"first one, in order, got {list(begin)}",
        )
    edges = [0, *places, len(blocks)]
    return [end - start for start, end in itertools.pairwise(edges)]


def _choose_sides(
    model: Any, blocks: Sequence[str], first: Sequence[str], last: Sequence[str]
) -> dict[str, bool]:
    """Whether each module beside the blocks that has parameters belongs to the first stage, else to the last one."""
    around = _ancestors(blocks[0])
    names = list(_find_beside(model, around, set(blocks)))
    for patterns in (first, last):
        _check_patterns(patterns, names)
    registered = [name for name, _ in platform.get_cells_and_names(model)]
    start = registered.index(blocks[0])
    sides = {name: registered.index(name) < start for name in names}
    for patterns, is_first in ((first, True), (last, False)):
        sides |= dict.fromkeys(_matching(patterns, names), is_first)
    return sides


def _ancestors(name: str) -> set[str]:
    """The names of the modules that a module is in; the model itself is \"\"."""
    parts = name.split(".")
    return {".".join(parts[:length]) for length in range(len(parts))}


def _find_beside(model: Any, around: set[str], blocks: set[str]) -> Iterator[str]:
    for name, module in platform.get_cells_and_names(model):
        if name in around or name in blocks or name.rpartition(".")[0] not in around:
            continue
        if platform.parameters_dict(module):
            yield name


def _check_patterns(patterns: Sequence[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if not _matching([pattern], names):
            reason = no_match("module", pattern, names)
            raise coded(ValueError, "HP493", f"plan_stages: {reason}")


def _matching(patterns: Iterable[str], names: Sequence[str]) -> list[str]:
    return [name for name in names if any(fnmatchcase(name, one) for one in patterns)]


def _weigh(
    blocks: Sequence[str],
    before: Sequence[str],
    after: Sequence[str],
    costs: Mapping[str, float],
) -> list[float]:
    """The costs of blocks; the first and the last one with what is beside them."""
    row = [float(costs.get(name, 0)) for name in blocks]
    row[0] += sum(costs.get(name, 0) for name in before)
    row[-1] += sum(costs.get(name, 0) for name in after)
    return row


# --- parameters that several stages have


def _find_shared(
    model: Any, stage_of: Mapping[str, int], stages: int
) -> Iterator[dict[int, str]]:
    """Tied parameters, and those of modules around the blocks, which all stages may use."""
    found: dict[int, dict[int, str]] = {}
    for path, module in platform.get_cells_and_names(model):
        owner = next((one for one in stage_of if is_within(path, one)), None)
        owners = range(stages) if owner is None else [stage_of[owner]]
        parameters = platform.parameters_dict(module)
        for own, _ in platform.own_tensors(module):
            if own in parameters:
                names = found.setdefault(id(parameters[own]), {})
                for stage in owners:
                    names.setdefault(stage, f"{path}.{own}" if path else own)
    yield from (names for names in found.values() if len(names) > 1)


# --- words


def _range_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _shorten(names: Sequence[str]) -> list[str]:
    """Names, with runs of numbered ones in one word."""
    words: list[str] = []
    run: list[str] = []
    for name in [*names, ""]:
        parent, _, number = name.rpartition(".")
        if run and (not number.isdigit() or parent != run[0].rpartition(".")[0]):
            words.append(_range_of(run))
            run = []
        if number.isdigit():
            run.append(name)
        elif name:
            words.append(name)
    return words
