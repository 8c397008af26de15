# SPDX-License-Identifier: Apache-2.0
"""A plan for a model on a mesh, as a value: it is printed, saved, edited, loaded and applied.

plan = auto_plan(model, mesh)
print(plan)                                   pattern, style, source, bytes per rank
plan.save("plan.yaml")                        as the keys of a recipe, which may name it: plan: {styles: ...}
ParallelPlan.load("plan.yaml").apply(model, mesh)
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyper_parallel.core.expert_parallel import BaseExpertParallel
from hyper_parallel.core.modules.style import ParallelStyle
from hyper_parallel.core.shard.sharding_plan import matching, no_match
from hyper_parallel.planning.dry_run import Cost
from hyper_parallel.planning.roles import Placing, format_axes, put_on_mesh
from hyper_parallel.planning.words import to_style, to_words
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


@dataclass(frozen=True)
class Entry:
    """How the modules that a pattern names lie.

    ``source``: "model's own", "derived", or why they are replicated. ``style``: None for those that are. ``whole``,
    ``held``: the bytes of their parameters on one device, and on each rank.
    """

    pattern: str
    style: ParallelStyle | None
    source: str
    whole: int = 0
    held: int = 0


@dataclass(frozen=True)
class ParallelPlan:
    """How a model lies on a mesh.

    ``axes``: the sizes of the mesh by name. ``entries``: for tensor and expert parallelism. ``units``: patterns of the
    modules that ``fully_shard`` gathers one at a time. ``begin``: the blocks that begin a stage after the first;
    ``last``: modules that run behind the blocks, although they are registered in front of them.
    ``costs``: of the blocks that are alike, by pattern. ``notes``: what of the model's own plan was not used, and why.
    """

    axes: Mapping[str, int]
    entries: tuple[Entry, ...] = ()
    units: tuple[str, ...] = ()
    begin: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    costs: Mapping[str, Cost] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    context: Mapping[str, Any] = field(default_factory=dict)

    @property
    def styles(self) -> dict[str, ParallelStyle]:
        """The styles by pattern, as ``parallelize_module`` takes them; all else is replicated."""
        return {
            entry.pattern: entry.style
            for entry in self.entries
            if entry.style is not None
        }

    @property
    def sources(self) -> tuple[str, ...]:
        """Where the styles come from, without those that are replicated."""
        found = [entry.source for entry in self.entries if entry.style is not None]
        return tuple(dict.fromkeys(found))

    def has_experts(self, block: str) -> bool:
        """Whether a block has experts on several ranks, whose collectives are not among its costs."""
        return any(
            isinstance(entry.style, BaseExpertParallel)
            and entry.pattern.startswith(f"{block}.")
            for entry in self.entries
        )

    def apply(self, model: Any, mesh: Any) -> Any:
        """Puts a model onto all axes of a mesh and returns it.

        A mesh with an axis ``pp`` is for a recipe, or for ``plan_stages``, which takes ``begin`` and ``last``.
        """
        names = mesh.mesh_dim_names or ()
        if "pp" in names:
            raise coded(
                ValueError,
                "HP904",
                "plan.apply: a model in stages is not one module; divide it by plan_stages(model, stages, "
                f"begin={list(self.begin)}) and apply the plan on the other axes of the mesh, or say plan: auto in a "
                "recipe",
            )
        self.check(model)
        modules = dict(platform.get_cells_and_names(model))
        units = [
            modules[name]
            for pattern in self.units
            for name in matching(pattern, modules)
        ]
        put_on_mesh(model, mesh, Placing(self.styles, units, context=self.context))
        return model

    def check(self, model: Any) -> None:
        """Raises if a pattern names no module of the model."""
        names = [name for name, _ in platform.get_cells_and_names(model)]
        for pattern in (*self.styles, *self.units, *self.begin, *self.last):
            if not matching(pattern, names):
                raise coded(
                    ValueError, "HP902", f"plan: {no_match('module', pattern, names)}"
                )

    # --- as text

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"plan for {format_axes(self.axes)}"
        width = max([len(entry.pattern) for entry in self.entries] + [7]) + 2
        yield f"  {'pattern':<{width}}{'style':<26}{'bytes per rank':>16}  source"
        for entry in self.entries:
            style = "replicated" if entry.style is None else _short(entry.style)
            size = _format_bytes(entry.held)
            yield f"  {entry.pattern:<{width}}{style:<26}{size:>16}  {entry.source}"
        whole = sum(entry.whole for entry in self.entries)
        held = sum(entry.held for entry in self.entries)
        saved = (
            f"{100 * (whole - held) / whole:.0f}% less" if whole else "no parameters"
        )
        yield (
            f"parameters per rank: {_format_bytes(held)} of {_format_bytes(whole)}, "
            f"{saved}"
        )
        for pattern, cost in self.costs.items():
            more = ", and those of its experts" if self.has_experts(pattern) else ""
            yield f"collectives of {pattern}: {format_cost(cost)}{more}"
        if self.units:
            yield f"units of dp_shard: {', '.join(self.units)}"
        if self.begin:
            yield f"stages begin at: {', '.join(self.begin)}"
        yield from (f"note: {note}" for note in self.notes)

    # --- as a file

    def save(self, path: str | Path) -> None:
        """Writes the plan as YAML, with the keys that a recipe has for it."""
        import yaml  # type: ignore[import-untyped]

        styles = {pattern: to_words(style) for pattern, style in self.styles.items()}
        content: dict[str, Any] = {"mesh": dict(self.axes), "plan": {"styles": styles}}
        if self.units:
            content["sharding"] = {"units": list(self.units)}
        if self.begin:
            content["pipeline"] = {"split": list(self.begin), "last": list(self.last)}
        text = yaml.safe_dump(content, sort_keys=False)
        comments = "".join(f"# {line}\n" for line in str(self).splitlines())
        # Ranks that share a folder write the same, and none reads a half of it.
        temporary = Path(f"{path}.{platform.get_rank()}.{os.getpid()}")
        temporary.write_text(comments + text, "utf-8")
        temporary.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> ParallelPlan:
        """Reads a plan that ``save`` or an editor has written."""
        import yaml

        try:
            content = yaml.safe_load(Path(path).read_text("utf-8")) or {}
            styles = content["plan"]["styles"]
            entries = tuple(
                Entry(pattern, to_style(words), "file")
                for pattern, words in styles.items()
            )
            return cls(
                axes=content.get("mesh", {}),
                entries=entries,
                units=tuple(content.get("sharding", {}).get("units", ())),
                begin=tuple(content.get("pipeline", {}).get("split", ())),
                last=tuple(content.get("pipeline", {}).get("last", ())),
            )
        except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
            raise coded(
                ValueError,
                "HP902",
                f"plan: {path} cannot be read as a plan: {type(error).__name__}: {error}",
            ) from error


def _short(style: ParallelStyle) -> str:
    words = to_words(style)
    if isinstance(words, str):
        return words
    options = [f"{name}={value}" for name, value in words.items() if name != "style"]
    return f"{words['style']} {' '.join(options)}"


def format_cost(cost: Cost) -> str:
    """Collectives as people read them: "2 all_reduce forward, 2 all_reduce backward"."""
    passes = (("forward", cost.forward), ("backward", cost.backward))
    parts = [
        f"{count} {name} {way}"
        for way, counts in passes
        for name, count in counts.items()
    ]
    return ", ".join(parts) or "none"


def _format_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
