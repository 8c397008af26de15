# SPDX-License-Identifier: Apache-2.0
"""One forward of a model on tensors without data: how its blocks are called, and what becomes of each projection.

trace = trace_forward(model, units, inputs)
trace.calls["model.layers.0"]                             the arguments of the block
trace.links["model.layers.0.mlp.down_proj"].before        {"model.layers.0.mlp.gate_proj", ...}
trace.links["transformer.h.0.attn.c_attn"].sections       3: its output is split
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from hyper_parallel.core.expert_parallel.placed import count_experts
from hyper_parallel.core.modules.boundary import AttachmentHandle, attach
from hyper_parallel.core.shard.arguments import tensors_in
from hyper_parallel.platform import get_platform

platform = get_platform()
_VIEWS = frozenset({"view", "reshape", "unflatten"})
_SPLITS = frozenset({"split", "chunk", "tensor_split", "split_with_sizes"})
_MOVES = frozenset({"transpose", "permute", "swapaxes"})
# What modules with experts call their second argument: top_k_index, router_indices, tokens_per_expert, ...
_CHOICE = re.compile("expert|top_k|rout|count|ind")
_MOST_SECTIONS = 4


@dataclass
class Link:
    """What a projection's input comes from, and how its output is taken apart.

    ``before``: the projections in the same block whose outputs it is computed from, without others in between.
    ``heads``: into how many heads its outputs are viewed. ``sections``: into how many parts they are split, or the size
    of each.
    """

    before: frozenset[str] = frozenset()
    heads: int | None = None
    sections: int | tuple[int, ...] | None = None
    edges: set[int] = field(default_factory=set)


@dataclass
class Trace:
    """What one forward has shown."""

    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]]
    links: dict[str, Link]
    order: list[str] = field(default_factory=list)  # of modules with parameters


@dataclass(frozen=True)
class _Fresh:
    """The output of a projection, a view or a section of it.

    ``dim``: where its features begin; ``sizes``: those of the dims. ``features``: of the whole output.
    """

    name: str
    dim: int
    sizes: tuple[int, ...]
    features: int


class _Recorder:
    """Follows tensors from projection to projection."""

    def __init__(self) -> None:
        self.trace = Trace({}, {})
        self._sources: dict[int, tuple[Any, frozenset[str]]] = {}
        self._fresh: dict[int, tuple[Any, _Fresh]] = {}

    def enter_unit(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.trace.calls.setdefault(name, (args, kwargs))
        self._sources.clear()
        self._fresh.clear()

    def enter_projection(self, name: str, args: tuple[Any, ...]) -> None:
        before = self._sources_of(args)
        if name not in self.trace.links:
            self.trace.links[name] = Link(before)

    def leave_projection(self, name: str, output: Any) -> None:
        if not platform.is_tensor(output):
            return
        self._sources[id(output)] = output, frozenset({name})
        last = len(output.shape) - 1
        features = int(output.shape[-1])
        fresh = _Fresh(name, last, (features,), features)
        self._fresh[id(output)] = output, fresh

    def follow(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Notes what a function of the framework has done."""
        sources = self._sources_of(args)
        results = list(tensors_in(result))
        if sources:
            for one in results:
                self._sources[id(one)] = one, sources
        known = self._fresh.get(id(args[0])) if args else None
        if known is not None and results:
            self._follow_fresh(name, known[1], args, results)

    def _sources_of(self, values: Any) -> frozenset[str]:
        found = (self._sources.get(id(one)) for one in tensors_in(values))
        return frozenset().union(*(one[1] for one in found if one is not None))

    def _follow_fresh(
        self, name: str, fresh: _Fresh, args: tuple[Any, ...], results: list[Any]
    ) -> None:
        """Notes what becomes of the features of a projection's output."""
        link = self.trace.links[fresh.name]
        if name in _VIEWS:
            self._follow_view(fresh, link, results[0])
        elif name in _SPLITS:
            self._follow_split(fresh, link, results)
        elif name == "__getitem__":
            self._follow_index(fresh, link, args, results[0])
        elif name in _MOVES:
            self._follow_move(name, fresh, args, results[0])
        elif name == "unbind":
            dim = args[1] if len(args) > 1 else 0
            if dim % len(args[0].shape) == fresh.dim and len(fresh.sizes) > 1:
                _set_sections(link, fresh)

    def _follow_split(self, fresh: _Fresh, link: Link, results: list[Any]) -> None:
        sizes = tuple(int(one.shape[fresh.dim]) for one in results)
        is_whole = len(fresh.sizes) == 1 and sum(sizes) == fresh.features
        if not is_whole or len(sizes) < 2:
            return
        link.sections = len(sizes) if len(set(sizes)) == 1 else sizes
        for one, size in zip(results, sizes, strict=True):
            self._fresh[id(one)] = one, replace(fresh, sizes=(size,))

    def _follow_move(
        self, name: str, fresh: _Fresh, args: tuple[Any, ...], result: Any
    ) -> None:
        order = _order_of(name, args, len(result.shape))
        if order is not None and len(fresh.sizes) > 1:
            moved = replace(fresh, dim=order.index(fresh.dim))
            self._fresh[id(result)] = result, moved

    def _follow_index(
        self, fresh: _Fresh, link: Link, args: tuple[Any, ...], result: Any
    ) -> None:
        """A number takes a section of several; a slice takes what may be one."""
        index = _find_index(fresh, args)
        is_whole = len(fresh.sizes) == 1
        if isinstance(index, int) and not is_whole:
            _set_sections(link, fresh)
        if isinstance(index, slice) and is_whole and index.step in (None, 1):
            start, stop, _ = index.indices(fresh.sizes[0])
            link.edges |= {start, stop, fresh.sizes[0], 0}
            self._fresh[id(result)] = result, replace(fresh, sizes=(stop - start,))

    def _follow_view(self, fresh: _Fresh, link: Link, result: Any) -> None:
        features = math.prod(fresh.sizes)
        shape = [int(size) for size in result.shape]
        for dim in range(len(shape)):
            if math.prod(shape[dim:]) != features:
                continue
            while shape[dim] == 1 and dim < len(shape) - 1:
                dim += 1  # noqa: PLW2901 - dims of one element hold no features
            viewed = replace(fresh, dim=dim, sizes=tuple(shape[dim:]))
            self._fresh[id(result)] = result, viewed
            is_section = features != fresh.features
            if len(viewed.sizes) > 1 and link.heads is None:
                size = features // viewed.sizes[0]
                if is_section or not link.sections:
                    link.heads = fresh.features // size
            return


def _set_sections(link: Link, fresh: _Fresh) -> None:
    if 1 < fresh.sizes[0] <= _MOST_SECTIONS:
        link.sections = fresh.sizes[0]
        link.heads = fresh.sizes[0] * fresh.sizes[1] if len(fresh.sizes) > 2 else None


def _find_index(fresh: _Fresh, args: tuple[Any, ...]) -> Any:
    """What an index says of the dim where features begin; None if that cannot be told."""
    given = args[1] if isinstance(args[1], tuple) else (args[1],)
    ndim = len(args[0].shape)
    if Ellipsis in [one for one in given if not platform.is_tensor(one)]:
        at = next(i for i, one in enumerate(given) if one is Ellipsis)
        missing = ndim - (len(given) - 1)
        given = (*given[:at], *[slice(None)] * missing, *given[at + 1 :])
    if len(given) <= fresh.dim or None in given[: fresh.dim + 1]:
        return None
    return given[fresh.dim]


def _order_of(name: str, args: tuple[Any, ...], ndim: int) -> list[int] | None:
    """For each dim of the result the one that it was."""
    order = list(range(ndim))
    if name == "permute":
        dims = args[1] if isinstance(args[1], (list, tuple)) else args[1:]
        return [int(dim) % ndim for dim in dims]
    if len(args) < 3:
        return None
    one, other = int(args[1]) % ndim, int(args[2]) % ndim
    order[one], order[other] = order[other], order[one]
    return order


def trace_forward(model: Any, units: Sequence[str], inputs: Mapping[str, Any]) -> Trace:
    """Runs the model once; call it where tensors have no data, with a model that has none."""
    recorder = _Recorder()
    modules = dict(platform.get_cells_and_names(model))
    with ExitStack() as stack:
        for name, module in modules.items():
            for watching in _watch(recorder, name, module, name in units):
                stack.callback(watching.remove)
        stack.enter_context(platform.listen_to_functions(recorder.follow))
        model(**inputs)
    for link in recorder.trace.links.values():
        _use_edges(link)
    return recorder.trace


def _watch(
    recorder: _Recorder, name: str, module: Any, is_unit: bool
) -> Iterator[AttachmentHandle]:
    if platform.parameters_dict(module):

        def note(*_: Any) -> None:
            recorder.trace.order.append(name)

        yield attach(module, "trace", enter=note, source="plan")
    if is_unit:

        def enter_unit(_: Any, args: Any, kwargs: Any) -> None:
            recorder.enter_unit(name, args, kwargs)

        yield attach(module, "trace", enter=enter_unit, source="plan")
    projection = platform.projection(module)
    if projection is not None and projection.kind == "linear":

        def enter(_: Any, args: Any, kwargs: Any) -> None:
            recorder.enter_projection(name, (args, kwargs))

        def leave(_: Any, output: Any) -> None:
            recorder.leave_projection(name, output)

        yield attach(module, "trace", enter=enter, leave=leave, source="plan")


def _use_edges(link: Link) -> None:
    """Slices that cover all features, one after the other, are sections."""
    edges = sorted(link.edges)
    if len(edges) > 2 and link.sections is None:
        sizes = tuple(stop - start for start, stop in itertools.pairwise(edges))
        link.sections = len(sizes) if len(set(sizes)) == 1 else sizes


# --- experts, whose tokens choose them by values that are not there


def find_experts(model: Any) -> dict[str, Any]:
    """The modules that hold the weights of all experts in one tensor, by name."""
    return {
        name: module
        for name, module in platform.get_cells_and_names(model)
        if count_experts(module) > 1 and _takes_tokens(module)
    }


def _takes_tokens(module: Any) -> bool:
    """Whether its weights are those of the same experts, and it is told which of them each token has chosen."""
    weights = [one for _, one in platform.own_tensors(module) if len(one.shape) == 3]
    is_alike = len({int(one.shape[0]) for one in weights}) == 1
    arguments = list(inspect.signature(platform.get_cell_construct(module)).parameters)
    is_told = len(arguments) > 1 and _CHOICE.search(arguments[1]) is not None
    return len(weights) > 1 and is_alike and is_told


def without_experts(model: Any) -> Any:
    """The model with modules in place of its experts that return their tokens."""
    modules = dict(platform.get_cells_and_names(model))
    for name in find_experts(model):
        owner, _, own = name.rpartition(".")
        platform.replace_submodule(modules[owner], own, _new_stand_in())
    return model


def _new_stand_in() -> Any:
    def forward(_: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        return hidden_states * 1

    return type("StandIn", (platform.Module,), {"forward": forward})()
