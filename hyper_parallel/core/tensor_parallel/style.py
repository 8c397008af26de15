# SPDX-License-Identifier: Apache-2.0
"""How a module is put on an axis of devices: where its parameters lie, and what goes in and comes out.

ColwiseParallel()        a Linear's outputs are cut, its inputs are whole
RowwiseParallel()        a Linear's inputs are cut, its outputs are summed; an Embedding's rows are cut
SequenceParallel()       parameters are copies, activations are cut along the sequence
Replicated()             parameters are copies, and so is all that the module makes of them

A plain tensor that goes in lies as ``input_layouts`` says; a distributed one says so itself. With ``use_local_output``
plain shards come out, else distributed tensors, with which code that was written for one device goes on as it is.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import DTensor, distribute_tensor, layout_of, replicate_rest
from hyper_parallel.core.dtensor.modes import MODES
from hyper_parallel.core.dtensor.placement_types import FusedShard, Placement, Replicate, Shard
from hyper_parallel.core.tensor_parallel.line import Line, is_even
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import Projection

platform = get_platform()
Placements = Placement | Sequence[Placement | None] | None


class ParallelStyle(ABC):
    """What ``parallelize_module`` does to a module. ``src_data_rank``: whose parameters count; None: all are equal."""

    src_data_rank: int | None = 0

    @abstractmethod
    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Puts the module on a mesh of one axis and returns it."""

    def __repr__(self) -> str:
        told = ", ".join(f"{name}={value}" for name, value in self.told().items())
        return f"{type(self).__name__}({told})"

    def told(self) -> dict[str, Any]:
        """What the style was told beyond its defaults."""
        return {}

    def _distribute(self, module: Any, name: str, mesh: DeviceMesh, placement: Placement) -> None:
        """Puts one of the module's own parameters on the mesh."""
        tensor = dict(platform.own_tensors(module)).get(name)
        if tensor is None:
            return
        if isinstance(tensor, DTensor):
            if tensor.layout is not layout_of(mesh, [placement], len(tensor.shape)):
                raise ValueError(
                    f"{type(self).__name__}: {name} of {type(module).__name__} already lies in {tensor.layout} and "
                    f"cannot lie as {placement} on {mesh}; a module takes one style, and where two share a parameter "
                    "their styles must agree, as RowwiseParallel for an embedding and ColwiseParallel for a Linear do"
                )
            return
        source = None if self.src_data_rank is None or platform.is_meta(tensor) else mesh.rank_list[self.src_data_rank]
        made = distribute_tensor(tensor, mesh, [placement], src_data_rank=source)
        platform.set_own_tensor(module, name, made)


class _Projected(ParallelStyle):
    """A style for modules with one weight: Linear, Embedding, convolution."""

    def __init__(self, input_layouts: Any, output_layouts: Any, use_local_output: bool) -> None:
        self.input_layouts = _placement("input_layouts", input_layouts)
        self.output_layouts = _placement("output_layouts", output_layouts)
        self.use_local_output = use_local_output

    def told(self) -> dict[str, Any]:
        """What the style was told beyond its defaults."""
        given = {"input_layouts": self.input_layouts, "output_layouts": self.output_layouts}
        return {name: value for name, value in given.items() if value is not None}

    def _projection(self, module: Any) -> Projection:
        found = platform.projection(module)
        if found is None:
            raise TypeError(
                f"{type(self).__name__}: expected a linear layer, an embedding or a convolution, got "
                f"{type(module).__name__}; apply it to the layers inside, or use another style"
            )
        return found

    def _enclose(self, module: Any, line: Line, plain: Placement, wanted: Placement, leaving: Placement) -> None:
        """Has inputs come in as ``wanted`` and outputs leave as ``leaving``; plain inputs lie as ``plain``."""
        projection = self._projection(module)
        sizes = {projection.features: _own(module, "weight").shape[projection.into]} if plain == wanted else None
        take, move_in, move_out = line.taker(plain, sizes), line.mover(wanted), line.mover(leaving)
        local = self.use_local_output
        by_feature = leaving == Shard(projection.features)

        def enter(owner: Any, args: tuple[Any, ...]) -> Any:
            return move_in(take(owner, _first(owner, args))), *args[1:]

        def leave(owner: Any, _: Any, output: Any) -> Any:
            output = move_out(output) if isinstance(output, DTensor) else output
            # The next layer knows how many features there are, but of nothing else how much others have.
            return _handed_out(owner, output, unless=by_feature) if local else output

        platform.register_forward_pre_hook(module, enter)
        platform.register_forward_hook(module, leave)


class ColwiseParallel(_Projected):
    """Cuts what the module makes: a Linear's weight and bias by rows, an Embedding's by columns.

    ``heads``: how many heads its outputs are, for attention; they must be shared evenly.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        heads: int | None = None,
    ) -> None:
        super().__init__(input_layouts, output_layouts, use_local_output)
        self.heads = heads

    def told(self) -> dict[str, Any]:
        """What the style was told beyond its defaults."""
        return {**super().told(), **({"heads": self.heads} if self.heads is not None else {})}

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Puts the module on a mesh of one axis and returns it."""
        projection, line = self._projection(module), Line(device_mesh)
        self._check_heads(_own(module, "weight").shape[projection.out], device_mesh)
        self._distribute(module, "weight", device_mesh, self._cut(projection.out))
        self._distribute(module, "bias", device_mesh, self._cut(0))
        leaving = self.output_layouts or self._cut(projection.features)
        self._enclose(module, line, self.input_layouts or Replicate(), Replicate(), leaving)
        return module

    def _cut(self, dim: int) -> Placement:
        return Shard(dim)

    def _check_heads(self, outputs: int, mesh: DeviceMesh) -> None:
        if self.heads is not None and outputs % self.heads:
            raise ValueError(f"{type(self).__name__}: {outputs} outputs are not those of {self.heads} heads")
        if self.heads is not None and self.heads % mesh.size():
            raise ValueError(
                f"{type(self).__name__}: {self.heads} heads cannot be shared evenly by the {mesh.size()} ranks of "
                f"{mesh}; take a mesh whose size divides the number of heads"
            )


class FusedColwiseParallel(ColwiseParallel):
    """ColwiseParallel for several projections in one module: q, k and v, or gate and up.

    ``sections``: how many of one size, or the size of each. Each is cut by itself, so that taking the output apart
    leaves every rank with its part of each.
    """

    def __init__(
        self,
        *,
        sections: int | Sequence[int],
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        heads: int | None = None,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output, heads=heads
        )
        self.sections = sections if isinstance(sections, int) else tuple(sections)
        self._sizes: tuple[int, ...] = ()

    def told(self) -> dict[str, Any]:
        """What the style was told beyond its defaults."""
        return {"sections": self.sections, **super().told()}

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Puts the module on a mesh of one axis and returns it."""
        outputs = _own(module, "weight").shape[self._projection(module).out]
        if isinstance(self.sections, int):
            if outputs % self.sections:
                raise ValueError(f"FusedColwiseParallel: {outputs} outputs are not {self.sections} sections of a size")
            self._sizes = (outputs // self.sections,) * self.sections
        else:
            if sum(self.sections) != outputs:
                raise ValueError(f"FusedColwiseParallel: sections {self.sections} do not add up to {outputs} outputs")
            self._sizes = self.sections
        return super().apply(module, device_mesh)

    def _cut(self, dim: int) -> Placement:
        return FusedShard(dim, self._sizes)

    def _check_heads(self, outputs: int, mesh: DeviceMesh) -> None:
        """``heads`` are those of all sections together; each section must have an even share of them."""
        if self.heads is None:
            return
        size, left = divmod(outputs, self.heads)
        if left or any(section % (size * mesh.size()) for section in self._sizes):
            raise ValueError(
                f"FusedColwiseParallel: {self.heads} heads in sections of {self._sizes} cannot be shared evenly by the "
                f"{mesh.size()} ranks of {mesh}; take a mesh whose size divides the number of heads of every section"
            )


class RowwiseParallel(_Projected):
    """Cuts what the module takes: a Linear's weight by columns, an Embedding's by rows. The outputs are sums."""

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(input_layouts, output_layouts, use_local_output)

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Puts the module on a mesh of one axis and returns it."""
        projection, line = self._projection(module), Line(device_mesh)
        self._distribute(module, "weight", device_mesh, Shard(projection.into))
        self._distribute(module, "bias", device_mesh, Replicate())
        wanted = Replicate() if projection.kind == "embedding" else Shard(projection.features)
        self._enclose(module, line, self.input_layouts or wanted, wanted, self.output_layouts or Replicate())
        return module


class SequenceParallel(ParallelStyle):
    """For norms and dropout: parameters are copies, activations are cut at ``sequence_dim``."""

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_dim = sequence_dim
        self.use_local_output = use_local_output

    def told(self) -> dict[str, Any]:
        """What the style was told beyond its defaults."""
        return {"sequence_dim": self.sequence_dim} if self.sequence_dim != 1 else {}

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Puts the module on a mesh of one axis and returns it."""
        for name, _ in platform.own_tensors(module):
            self._distribute(module, name, device_mesh, Replicate())
        line, cut = Line(device_mesh), Shard(self.sequence_dim)
        take, move = line.taker(cut), line.mover(cut)

        def enter(owner: Any, args: tuple[Any, ...]) -> Any:
            return move(take(owner, _first(owner, args))), *args[1:]

        platform.register_forward_pre_hook(module, enter)
        if self.use_local_output:
            platform.register_forward_hook(module, lambda owner, _, output: _handed_out(owner, output))
        return module


# --- inputs and outputs alone


class PrepareModuleInput(ParallelStyle):
    """Brings a module's inputs from the layouts that they have to those that it wants; None leaves one alone."""

    def __init__(
        self,
        *,
        input_layouts: Placements = None,
        desired_input_layouts: Placements = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts = _several(input_layouts)
        self.desired_input_layouts = _several(desired_input_layouts)
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        self.use_local_output = use_local_output
        _assert_pairs("input_layouts", self.input_layouts, "desired_input_layouts", self.desired_input_layouts)
        _assert_pairs(
            "input_kwarg_layouts",
            sorted(self.input_kwarg_layouts),
            "desired_input_kwarg_layouts",
            sorted(self.desired_input_kwarg_layouts),
        )

    def told(self) -> dict[str, Any]:
        """What the style was told beyond its defaults."""
        named = {name: self.desired_input_kwarg_layouts[name] for name in self.input_kwarg_layouts}
        return {"desired": [str(p) for p in self.desired_input_layouts or ()], **named}

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Puts the module on a mesh of one axis and returns it."""
        line, local = Line(device_mesh), self.use_local_output
        by_name = {
            name: (have, self.desired_input_kwarg_layouts[name]) for name, have in self.input_kwarg_layouts.items()
        }

        def enter(owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self.input_layouts is not None:
                wanted = self.desired_input_layouts or ()
                args = _all_prepared(line, owner, "input", args, self.input_layouts, wanted, local)
            for name, (have, want) in by_name.items():
                if name in kwargs:
                    what = f"argument {name}"
                    kwargs = {**kwargs, name: _prepared(line, owner, what, kwargs[name], have, want, local)}
            return args, kwargs

        platform.register_forward_pre_hook(module, enter, with_kwargs=True)
        return module


class PrepareModuleOutput(ParallelStyle):
    """Brings a module's outputs from the layouts that they have to those that are wanted; None leaves one alone."""

    def __init__(
        self, *, output_layouts: Placements, desired_output_layouts: Placements, use_local_output: bool = True
    ) -> None:
        self.output_layouts = _several(output_layouts) or ()
        self.desired_output_layouts = _several(desired_output_layouts) or ()
        self.use_local_output = use_local_output
        _assert_pairs("output_layouts", self.output_layouts, "desired_output_layouts", self.desired_output_layouts)

    def told(self) -> dict[str, Any]:
        """What the style was told beyond its defaults."""
        return {"desired": [str(p) for p in self.desired_output_layouts]}

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Puts the module on a mesh of one axis and returns it."""
        line, local = Line(device_mesh), self.use_local_output

        def leave(owner: Any, _: Any, output: Any) -> Any:
            values = tuple(output) if isinstance(output, (list, tuple)) else (output,)
            have, want = self.output_layouts, self.desired_output_layouts
            made = _all_prepared(line, owner, "output", values, have, want, local)
            if not isinstance(output, (list, tuple)):
                return made[0]
            return type(output)(*made) if hasattr(output, "_fields") else type(output)(made)

        platform.register_forward_hook(module, leave)
        return module


class PrepareModuleInputOutput(ParallelStyle):
    """PrepareModuleInput and PrepareModuleOutput in one."""

    def __init__(
        self,
        *,
        input_layouts: Placements = None,
        desired_input_layouts: Placements = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Placements,
        desired_output_layouts: Placements,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def told(self) -> dict[str, Any]:
        """What the style was told beyond its defaults."""
        return {"input": self.prepare_module_input, "output": self.prepare_module_output}

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Puts the module on a mesh of one axis and returns it."""
        self.prepare_module_input.apply(module, device_mesh)
        return self.prepare_module_output.apply(module, device_mesh)


# --- a whole model


class Replicated(ParallelStyle):
    """Copies on every rank: the parameters and buffers that no other style has placed, inputs, and all between.

    Plain tensors that go into the module become distributed ones. Inside, a plain tensor (a mask, a table, positions)
    counts as the same on every rank: with global shapes, all ranks make the same one.
    """

    def __init__(self, *, use_local_output: bool = False) -> None:
        self.use_local_output = use_local_output

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Puts the module on a mesh of one axis and returns it."""
        replicate_rest(module, device_mesh, self.src_data_rank)
        see_whole_tensors(module, Line(device_mesh))
        if self.use_local_output:
            platform.register_forward_hook(
                module, lambda owner, _, output: platform.apply_to_tensors(lambda x: _handed_out(owner, x), output)
            )
        return module


class _Entered(threading.local):
    """The modules that are running now in which plain tensors count as copies, and what held before."""

    def __init__(self) -> None:
        self.stack: list[tuple[Any, bool]] = []


_ENTERED = _Entered()


def see_whole_tensors(module: Any, line: Line) -> None:
    """Has a module get distributed tensors for plain ones, and take plain tensors that it makes for copies."""

    take = line.taker()

    def enter(owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = platform.apply_to_tensors(lambda x: take(owner, x), (args, kwargs))
        _ENTERED.stack.append((owner, MODES.replicate_plain))
        MODES.replicate_plain = True
        return args, kwargs

    def leave(owner: Any, *_: Any) -> None:
        if _ENTERED.stack and _ENTERED.stack[-1][0] is owner:  # not where an input was refused
            _, MODES.replicate_plain = _ENTERED.stack.pop()

    platform.register_forward_pre_hook(module, enter, with_kwargs=True)
    platform.register_forward_hook(module, leave, always_call=True)


# --- helpers


def _first(module: Any, args: tuple[Any, ...]) -> Any:
    if not args or not platform.is_tensor(args[0]):
        raise ValueError(f"{type(module).__name__}: expected a tensor as its first positional argument")
    return args[0]


def _own(module: Any, name: str) -> Any:
    return dict(platform.own_tensors(module))[name]


def _placement(name: str, value: Any) -> Placement | None:
    if value is not None and not isinstance(value, Placement):
        raise TypeError(f"{name}: expected a placement such as Shard(1) or Replicate(), got {value!r}")
    return value


def _several(layouts: Any) -> tuple[Placement | None, ...] | None:
    if layouts is None:
        return None
    found = (layouts,) if isinstance(layouts, Placement) else tuple(layouts)
    return tuple(_placement("a layout", one) for one in found)


def _assert_pairs(name: str, have: Any, other: str, want: Any) -> None:
    if (have is None) != (want is None) or (have is not None and len(have) != len(want)):
        raise AssertionError(f"{name} and {other} must have one length, got {have} and {want}")
    if have is not None and have and isinstance(have[0], str) and list(have) != list(want):
        raise AssertionError(f"{name} and {other} must name the same arguments, got {have} and {want}")


def _all_prepared(
    line: Line, module: Any, what: str, values: tuple[Any, ...], have: Sequence[Any], want: Sequence[Any], local: bool
) -> tuple[Any, ...]:
    if len(values) != len(have):
        raise ValueError(
            f"{type(module).__name__}: {len(have)} {what} layouts were given, but it has {len(values)} {what}s"
        )
    numbered = enumerate(zip(values, have, want, strict=True))
    return tuple(_prepared(line, module, f"{what} {i}", *given, local) for i, given in numbered)


def _prepared(line: Line, module: Any, what: str, value: Any, have: Any, want: Any, local: bool) -> Any:
    if have is None:
        return value
    if not platform.is_tensor(value):
        raise ValueError(f"{type(module).__name__}: {what} has the layout {have}, but it is {type(value).__name__}")
    value = line.taker(have)(module, value)
    if want is not None:
        value = line.mover(want)(value)
    return _handed_out(module, value) if local else value


def _handed_out(module: Any, value: Any, unless: bool = False) -> Any:
    """The plain shard of a distributed tensor, from which the next module can tell the whole."""
    if not isinstance(value, DTensor):
        return value
    if MODES.replicate_plain and not all(placement.is_replicate() for placement in value.placements):
        raise ValueError(
            f"{type(module).__name__}: its output in {value.layout} would be handed out as a plain shard, but in this "
            "model plain tensors are taken for copies; say use_local_output=False for the styles in it"
        )
    if not unless and not is_even(value._layout, tuple(value.shape)):
        raise ValueError(
            f"{type(module).__name__}: its output of shape {tuple(value.shape)} in {value.layout} has shards of "
            "different sizes, from which the next module could not tell the whole; say use_local_output=False"
        )
    return value.to_local()
