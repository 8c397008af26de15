# SPDX-License-Identifier: Apache-2.0
"""Finds a plan for a model that comes without one.

    plan = auto_plan(model, mesh)
    print(plan)
    plan.apply(model, mesh)

The model's own plan comes first, where it has one and it fits; blocks that it leaves out, or in which it gathers what
it need not, are planned by a forward on tensors without data. Blocks that are alike are planned once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.placement_types import Shard
from hyper_parallel.core.modules.style import ParallelStyle
from hyper_parallel.core.shard.arguments import OperatorError
from hyper_parallel.core.tensor_parallel.style import RowwiseParallel
from hyper_parallel.planning.around import plan_around
from hyper_parallel.planning.dry_run import Cost
from hyper_parallel.planning.expert_plans import plan_experts
from hyper_parallel.planning.own import Kind, OwnPlan, read_own_plan
from hyper_parallel.planning.plan import Entry, ParallelPlan
from hyper_parallel.planning.refusals import check_model
from hyper_parallel.planning.samples import find_samples
from hyper_parallel.planning.search import Block, Choice, NotMeasuredError, derive
from hyper_parallel.planning.sizes import count_bytes
from hyper_parallel.planning.trace import (
    Link,
    Trace,
    trace_forward,
    without_experts,
)
from hyper_parallel.planning.units import find_units, group_units, to_patterns
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded, without_hint

platform = get_platform()
_OWN, _DERIVED = "model's own", "derived"


def auto_plan(
    model: Any,
    mesh: DeviceMesh,
    *,
    sequence_parallel: bool = False,
    inputs: Mapping[str, Any] | None = None,
    use_own: bool = True,
) -> ParallelPlan:
    """The plan of a model for the axes tp, pp, dp_shard, cp and ep of a mesh; nothing is communicated or changed.

    ``sequence_parallel``: what is between the blocks is sharded along the sequence on ``tp``. ``inputs``: keyword
    arguments of forward, whose values do not matter; without it they are made from the model's config. ``use_own``:
    whether the plan that the model carries is used; without it everything is derived.
    """
    names = mesh.mesh_dim_names or ()
    axes = dict(zip(names, mesh.mesh_shape, strict=True))
    check_model(model, axes)
    finder = _Finder(model, axes, inputs, use_own=use_own)
    with platform.simulate_ranks():
        entries, costs = finder.find(sequence_parallel)
    begin, last = _find_stages(model, axes.get("pp", 1), finder.order)
    return ParallelPlan(
        axes=axes,
        entries=entries,
        units=finder.find_units_of_state(),
        begin=begin,
        last=last,
        costs=costs,
        notes=tuple(finder.notes),
    )


def _find_stages(
    model: Any, stages: int, order: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The blocks that begin a stage after the first, for stages of equal cost, and what runs behind all blocks."""
    from hyper_parallel.core.pipeline_parallel.stage_plan import (
        choose_blocks,
        plan_stages,
    )

    if stages == 1:
        return (), ()
    blocks = choose_blocks(model)
    plan = plan_stages(model, stages)
    behind = order[order.index(blocks[-1]) :] if blocks[-1] in order else []
    last = tuple(name for name in plan.pieces_of(0) if name in behind)
    ends = plan_stages(model, stages, last=last).ends
    return tuple(blocks[blocks.index(end) + 1] for end in ends[:-1]), last


@dataclass
class _Found:
    """What is found: styles and sources by the names of modules, and the costs of blocks by pattern."""

    styles: dict[str, ParallelStyle] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    costs: dict[str, Cost] = field(default_factory=dict)

    def add(self, name: str, style: ParallelStyle | None, source: str) -> None:
        """Notes how a module lies; None: it is replicated."""
        self.sources[name] = source
        if style is not None:
            self.styles[name] = style


class _Finder:
    """The search for one model."""

    def __init__(
        self,
        model: Any,
        axes: Mapping[str, int],
        inputs: Mapping[str, Any] | None,
        *,
        use_own: bool,
    ) -> None:
        self.notes: list[str] = []
        self.order: list[str] = []  # of the calls of modules, where they were traced
        self._axes, self._inputs = axes, inputs
        self._model = platform.copy_without_data(model)
        _quieten(self._model)
        self._units = find_units(self._model)
        self._own = read_own_plan(self._model) if use_own else OwnPlan()
        self.notes += self._own.notes
        self._modules = dict(platform.get_cells_and_names(self._model))

    def find_units_of_state(self) -> tuple[str, ...]:
        """Patterns of the blocks, where state is sharded."""
        if self._axes.get("dp_shard", 1) == 1:
            return ()
        return tuple(to_patterns(list(self._units), list(self._modules)))

    def find(
        self, sequence_parallel: bool
    ) -> tuple[tuple[Entry, ...], dict[str, Cost]]:
        """The entries of the plan, and the costs of its blocks."""
        found = _Found()
        for name, planned in plan_experts(self._model, self._axes).items():
            found.add(name, *planned)
        ranks = max(self._axes.get(name, 1) for name in ("tp", "pp"))
        model = without_experts(platform.copy_without_data(self._model))
        units = find_units(model)
        trace = self._trace(model, list(units)) if ranks > 1 else Trace({}, {})
        if self._axes.get("tp", 1) > 1:
            self._find_tensor_parallel(units, trace, found)
            if sequence_parallel:
                _shard_between(found.styles)
        return self._entries(found.styles, found.sources), found.costs

    def _find_tensor_parallel(
        self, units: Mapping[str, Any], trace: Trace, found: _Found
    ) -> None:
        if not units:
            self.notes.append(
                "the model has no list of blocks, in which layers are planned"
            )
        for names in group_units(units):
            self._plan_group(names, units, trace, found)
        for name, planned in plan_around(self._model, list(units)).items():
            found.add(name, *planned)

    def _trace(self, model: Any, units: Sequence[str]) -> Trace:
        """What the first inputs show for which the model runs."""
        samples = [self._inputs] if self._inputs is not None else find_samples(model)
        problems = []
        for sample in samples:
            given = platform.apply_to_tensors(_without_data, dict(sample or {}))
            try:
                trace = trace_forward(model, units, given)
            except Exception as error:  # noqa: BLE001 - a model may raise anything
                first = (str(error).splitlines() or [""])[0].split(". ")[0]
                problems.append(f"{type(error).__name__}: {first}")
            else:
                self.order = trace.order
                return trace
        reason = problems[0] if problems else "no inputs are known for it; give inputs="
        self.notes.append(f"forward cannot be traced without data: {reason}")
        return Trace({}, {})

    def _plan_group(
        self,
        names: Sequence[str],
        units: Mapping[str, Any],
        trace: Trace,
        found: _Found,
    ) -> None:
        """Plans one of several units that are alike, and gives the others the same styles."""
        traced = [name for name in names if name in trace.calls]
        # The last one: the input of the first may need no gradient, which others send.
        sample = traced[-1] if traced else names[0]
        links = self._find_links(trace, units[sample], sample, is_traced=bool(traced))
        for name, reason in _explain_others(units[sample], links):
            for unit in names:
                path = f"{unit}.{name}" if name else unit
                found.add(path, None, f"replicated: {reason}")
        if not links:
            return
        mesh = DeviceMesh("cpu", list(range(self._axes["tp"])), mesh_dim_names=("tp",))
        block = Block(units[sample], links, trace.calls.get(sample, ((), {})), mesh)
        if traced:
            choice, source = self._choose(block, sample)
            for pattern in to_patterns(list(names), list(self._modules)):
                found.costs[pattern] = choice.cost
        else:
            choice, source = block.guess(_own_choice(block, sample, self._own)[0]), _OWN
        styles = block.styles(choice.kinds)
        for name in choice.kinds:
            style = styles.get(name)
            reason = f"replicated: {choice.reasons.get(name, source)}"
            for unit in names:
                found.add(f"{unit}.{name}", style, reason if style is None else source)

    def _find_links(
        self, trace: Trace, unit: Any, sample: str, *, is_traced: bool
    ) -> dict[str, Link]:
        """The projections of a block by their names in it; without a trace those of the model's own plan."""
        prefix = f"{sample}."
        if not is_traced:
            return {
                name: Link()
                for name, _ in platform.get_cells_and_names(unit)
                if prefix + name in self._own.kinds
            }
        links = {
            name.removeprefix(prefix): link
            for name, link in trace.links.items()
            if name.startswith(prefix)
        }
        for link in links.values():
            link.before = frozenset(one.removeprefix(prefix) for one in link.before)
        return links

    def _choose(self, block: Block, unit: str) -> tuple[Choice, str]:
        """The model's own plan for a block if it communicates no more than need be, else the derived one."""
        own, reasons = _own_choice(block, unit, self._own)
        try:
            return self._measure(block, own, reasons)
        except NotMeasuredError as error:
            _refuse_if_never_run(block, unit)
            self.notes.append(f"{unit} cannot be measured without data: {error}")
            return block.guess(own), _OWN if own is not None else _DERIVED

    def _measure(
        self, block: Block, own: dict[str, Kind] | None, reasons: dict[str, str]
    ) -> tuple[Choice, str]:
        if own is None:
            return derive(block), _DERIVED
        kept = block.choice(own, reasons)
        if not kept.cost.unasked and Kind.GATHERED not in own.values():
            return kept, _OWN
        found = derive(block)
        is_better = found.share <= kept.share and found.cost.nbytes <= kept.cost.nbytes
        return (found, _DERIVED) if is_better else (kept, _OWN)

    def _entries(
        self, styles: Mapping[str, ParallelStyle], sources: Mapping[str, str]
    ) -> tuple[Entry, ...]:
        """Modules with one style and source together, by pattern, in the order of the model."""
        groups: dict[Any, list[str]] = {}
        in_order = [name for name in self._modules if name in sources]
        for name in in_order:
            key = str(styles.get(name)), sources[name]
            groups.setdefault(key, []).append(name)
        found: list[tuple[int, Entry]] = []
        known = list(self._modules)
        for members in groups.values():
            for pattern in to_patterns(members, known):
                matched = _members_of(pattern, members)
                style = styles.get(matched[0])
                modules = [self._modules[name] for name in matched]
                whole, held = count_bytes(modules, style, self._axes)
                entry = Entry(pattern, style, sources[matched[0]], whole, held)
                found.append((in_order.index(matched[0]), entry))
        return tuple(entry for _, entry in sorted(found, key=lambda pair: pair[0]))


def _explain_others(unit: Any, links: Mapping[str, Link]) -> Iterator[tuple[str, str]]:
    """The modules of a block that have matrices and are not planned, and why."""
    for name, module in platform.get_cells_and_names(unit):
        projection = platform.projection(module)
        own = [tensor for _, tensor in platform.own_tensors(module)]
        if name in links or not any(len(tensor.shape) > 1 for tensor in own):
            continue
        if projection is None:
            yield name, "its weights are not those of a linear layer"
        else:
            is_linear = projection.kind == "linear"
            yield name, "forward does not reach it" if is_linear else projection.kind


def _refuse_if_never_run(block: Block, unit: str) -> None:
    """Raises at once what the first training step would raise on every rank, however the block lies."""
    try:
        block.cost(dict.fromkeys(block.links, Kind.WHOLE))
    except NotMeasuredError as error:
        cause = error.__cause__
        if isinstance(cause, OperatorError):
            raise coded(
                ValueError,
                "HP903",
                f"auto_plan: {unit} cannot be trained on several ranks: {without_hint(cause)}",
            ) from cause


def _quieten(model: Any) -> None:
    """Without dropout, layers that are left out at random, and caches, which would grow from run to run."""
    for _, module in platform.get_cells_and_names(model):
        module.training = False
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None):
            config.use_cache = False


def _members_of(pattern: str, members: Sequence[str]) -> list[str]:
    from hyper_parallel.core.shard.sharding_plan import matching

    return matching(pattern, members)


def _own_choice(
    block: Block, unit: str, own: OwnPlan
) -> tuple[dict[str, Kind] | None, dict[str, str]]:
    """What the model's own plan says of a block; None if it says nothing."""
    named = {name: own.kinds.get(f"{unit}.{name}") for name in block.links}
    if not any(named.values()):
        return None, {}
    kinds, reasons = {}, {}
    for name, kind in named.items():
        obstacle = block.find_obstacle(name, kind or Kind.WHOLE)
        kinds[name] = Kind.WHOLE if obstacle or kind is None else kind
        reasons[name] = obstacle or "not in the model's own plan"
    return kinds, reasons


def _without_data(tensor: Any) -> Any:
    shape = tuple(tensor.shape)
    return platform.empty(shape, dtype=tensor.dtype, device=platform.meta_device)


def _shard_between(styles: dict[str, ParallelStyle]) -> None:
    """Has outputs of rows be sharded along the sequence, dim 1; norms and sums between them follow."""
    for name, style in styles.items():
        if isinstance(style, RowwiseParallel):
            styles[name] = RowwiseParallel(output_layouts=Shard(1))
