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

from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import DTensor, replicate_rest
from hyper_parallel.core.dtensor.modes import MODES
from hyper_parallel.core.dtensor.placement_types import (
    FusedShard,
    Placement,
    Replicate,
    Shard,
)
from hyper_parallel.core.tensor_parallel.base import (
    ParallelStyle,
    checked_placement,
    first_tensor,
    handed_out,
    own_tensor,
)
from hyper_parallel.core.tensor_parallel.line import RUNNING, Line
from hyper_parallel.core.tensor_parallel.prepare import (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
)
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.platform import Projection

__all__ = [
    "ColwiseParallel",
    "FusedColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "Replicated",
    "RowwiseParallel",
    "SequenceParallel",
    "see_whole_tensors",
]

platform = get_platform()


class _Projected(ParallelStyle):
    """A style for modules with one weight: Linear, Embedding, convolution."""

    def __init__(
        self, input_layouts: Any, output_layouts: Any, use_local_output: bool
    ) -> None:
        self.input_layouts = checked_placement("input_layouts", input_layouts)
        self.output_layouts = checked_placement("output_layouts", output_layouts)
        self.use_local_output = use_local_output

    def told(self) -> dict[str, Any]:
        """What the style was told beyond its defaults."""
        given = {
            "input_layouts": self.input_layouts,
            "output_layouts": self.output_layouts,
        }
        return {name: value for name, value in given.items() if value is not None}

    def _projection(self, module: Any) -> Projection:
        found = platform.projection(module)
        if found is None:
            raise coded(
                TypeError,
                "HP403",
                f"{type(self).__name__}: expected a linear layer, an embedding or a convolution, got "
                f"{type(module).__name__}; apply it to the layers inside, or use another style",
            )
        return found

    def _enclose(
        self,
        module: Any,
        line: Line,
        plain: Placement,
        wanted: Placement,
        leaving: Placement,
    ) -> None:
        """Has inputs come in as ``wanted`` and outputs leave as ``leaving``; plain inputs lie as ``plain``."""
        projection = self._projection(module)
        sizes = (
            {projection.features: own_tensor(module, "weight").shape[projection.into]}
            if plain == wanted
            else None
        )
        take, move_in, move_out = (
            line.taker(plain, sizes),
            line.mover(wanted),
            line.mover(leaving),
        )
        local = self.use_local_output
        by_feature = leaving == Shard(projection.features)

        def enter(owner: Any, args: tuple[Any, ...]) -> Any:
            return move_in(take(owner, first_tensor(owner, args))), *args[1:]

        def leave(owner: Any, _: Any, output: Any) -> Any:
            output = move_out(output) if isinstance(output, DTensor) else output
            # The next layer knows how many features there are, but of nothing else how much others have.
            return (
                handed_out(owner, output, may_be_uneven=by_feature) if local else output
            )

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
        return {
            **super().told(),
            **({"heads": self.heads} if self.heads is not None else {}),
        }

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Puts the module on a mesh of one axis and returns it."""
        projection, line = self._projection(module), Line(device_mesh)
        self._check_heads(
            own_tensor(module, "weight").shape[projection.out], device_mesh
        )
        self._distribute(module, "weight", device_mesh, self._cut(projection.out))
        self._distribute(module, "bias", device_mesh, self._cut(0))
        leaving = self.output_layouts or self._cut(projection.features)
        self._enclose(
            module, line, self.input_layouts or Replicate(), Replicate(), leaving
        )
        return module

    def _cut(self, dim: int) -> Placement:
        return Shard(dim)

    def _check_heads(self, outputs: int, mesh: DeviceMesh) -> None:
        if self.heads is not None and outputs % self.heads:
            raise coded(
                ValueError,
                "HP404",
                f"{type(self).__name__}: {outputs} outputs are not those of {self.heads} heads",
            )
        if self.heads is not None and self.heads % mesh.size():
            raise coded(
                ValueError,
                "HP404",
                f"{type(self).__name__}: {self.heads} heads cannot be shared evenly by the {mesh.size()} ranks of "
                f"{mesh}; take a mesh whose size divides the number of heads",
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
            input_layouts=input_layouts,
            output_layouts=output_layouts,
            use_local_output=use_local_output,
            heads=heads,
        )
        self.sections = sections if isinstance(sections, int) else tuple(sections)
        self._sizes: tuple[int, ...] = ()

    def told(self) -> dict[str, Any]:
        """What the style was told beyond its defaults."""
        return {"sections": self.sections, **super().told()}

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Puts the module on a mesh of one axis and returns it."""
        outputs = own_tensor(module, "weight").shape[self._projection(module).out]
        if isinstance(self.sections, int):
            if outputs % self.sections:
                raise coded(
                    ValueError,
                    "HP404",
                    f"FusedColwiseParallel: {outputs} outputs are not {self.sections} sections of a size",
                )
            self._sizes = (outputs // self.sections,) * self.sections
        else:
            if sum(self.sections) != outputs:
                raise coded(
                    ValueError,
                    "HP404",
                    f"FusedColwiseParallel: sections {self.sections} do not add up to {outputs} outputs",
                )
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
            raise coded(
                ValueError,
                "HP404",
                f"FusedColwiseParallel: {self.heads} heads in sections of {self._sizes} cannot be shared evenly by "
                f"the {mesh.size()} ranks of {mesh}; take a mesh whose size divides the number of heads of every "
                "section",
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
        wanted = (
            Replicate()
            if projection.kind == "embedding"
            else Shard(projection.features)
        )
        self._enclose(
            module,
            line,
            self.input_layouts or wanted,
            wanted,
            self.output_layouts or Replicate(),
        )
        return module


class SequenceParallel(ParallelStyle):
    """For norms and dropout: parameters are copies, activations are cut at ``sequence_dim``."""

    def __init__(
        self, *, sequence_dim: int = 1, use_local_output: bool = False
    ) -> None:
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
            return move(take(owner, first_tensor(owner, args))), *args[1:]

        platform.register_forward_pre_hook(module, enter)
        if self.use_local_output:
            platform.register_forward_hook(
                module, lambda owner, _, output: handed_out(owner, output)
            )
        return module


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
                module,
                lambda owner, _, output: platform.apply_to_tensors(
                    lambda x: handed_out(owner, x), output
                ),
            )
        return module


def see_whole_tensors(module: Any, line: Line) -> None:
    """Has a module get distributed tensors for plain ones, and take plain tensors that it makes for copies."""

    take = line.taker()

    def enter(owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = platform.apply_to_tensors(
            lambda x: take(owner, x), (args, kwargs)
        )
        RUNNING.stack.append((owner, MODES.replicate_plain))
        MODES.replicate_plain = True
        return args, kwargs

    def leave(owner: Any, *_: Any) -> None:
        if (
            RUNNING.stack and RUNNING.stack[-1][0] is owner
        ):  # not where an input was refused
            _, MODES.replicate_plain = RUNNING.stack.pop()

    platform.register_forward_pre_hook(module, enter, with_kwargs=True)
    platform.register_forward_hook(module, leave, always_call=True)
