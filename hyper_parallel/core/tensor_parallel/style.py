# SPDX-License-Identifier: Apache-2.0
"""Styles: how a module is laid out along an axis of devices, and what goes in and comes out.

ColwiseParallel()        a Linear's outputs are sharded, its inputs are replicated
RowwiseParallel()        a Linear's inputs are sharded, its outputs are summed; an Embedding's rows are sharded
SequenceParallel()       parameters are replicated, activations are sharded along the sequence
Replicated()             parameters are replicated, and so is everything that the module makes of them

A plain tensor that goes in has the placement ``input_layouts``; a distributed one has its own. With
``use_local_output=True`` plain shards come out, with False distributed tensors, with which code that was written for
one device goes on as it is. None, the default, gives plain shards, as torch does, but distributed tensors inside a
module that ``Replicated`` or ``replicate`` was applied to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.placement_types import (
    FusedShard,
    Placement,
    Replicate,
    Shard,
)
from hyper_parallel.core.modules.layouts import Crossing, ModuleLayouts
from hyper_parallel.core.modules.style import ParallelStyle
from hyper_parallel.core.tensor_parallel.base import (
    LayoutStyle,
    check_placement,
    own_tensor,
)
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
]

platform = get_platform()


@dataclass(frozen=True, repr=False, kw_only=True)
class _Projected(LayoutStyle):
    """A style for modules with one weight: Linear, Embedding, convolution."""

    input_layouts: Placement | None = None
    output_layouts: Placement | None = None
    use_local_output: bool | None = None

    def __post_init__(self) -> None:
        check_placement("input_layouts", self.input_layouts)
        check_placement("output_layouts", self.output_layouts)

    def _options(self) -> dict[str, Any]:
        options = {
            "input_layouts": self.input_layouts,
            "output_layouts": self.output_layouts,
            "use_local_output": self.use_local_output,
        }
        return {name: value for name, value in options.items() if value is not None}

    def _projection(self, module: Any) -> Projection:
        projection = platform.projection(module)
        if projection is None:
            raise coded(
                TypeError,
                "HP403",
                f"{type(self).__name__}: expected a linear layer, an embedding or a convolution, got "
                f"{type(module).__name__}; apply it to the layers inside, or use another style",
            )
        return projection

    def _layouts(
        self, module: Any, *, weight: Placement, bias: Placement, **placements: Any
    ) -> ModuleLayouts:
        """Of the placements that the input has if it is plain, that forward wants, and that the output has."""
        projection = self._projection(module)
        plain, wanted, leaving = (
            placements[name] for name in ("plain", "wanted", "leaving")
        )
        features = projection.features
        size = None
        if plain == wanted:
            size = features, own_tensor(module, "weight").shape[projection.into]
        # Only the feature size is known to the next layer; other sizes on other ranks are not.
        return ModuleLayouts(
            parameters=(("weight", weight), ("bias", bias)),
            first_input=Crossing(plain, wanted, size=size),
            output=Crossing(
                wanted=leaving,
                to_local=self.use_local_output,
                may_be_uneven=leaving == Shard(features),
            ),
        )


@dataclass(frozen=True, repr=False, kw_only=True)
class ColwiseParallel(_Projected):
    """Shards the module's outputs: a Linear's weight and bias by rows, an Embedding's weight by columns.

    ``heads``: the number of attention heads in its outputs; the ranks must share them evenly.
    """

    heads: int | None = None

    def _options(self) -> dict[str, Any]:
        heads = {} if self.heads is None else {"heads": self.heads}
        return {**super()._options(), **heads}

    def layouts(self, module: Any, device_mesh: DeviceMesh) -> ModuleLayouts:
        """The layouts of the module's parameters, input and output."""
        projection = self._projection(module)
        outputs = own_tensor(module, "weight").shape[projection.out]
        self._check_heads(outputs, device_mesh)
        return self._layouts(
            module,
            weight=self._shard(projection.out, outputs),
            bias=self._shard(0, outputs),
            plain=self.input_layouts or Replicate(),
            wanted=Replicate(),
            leaving=self.output_layouts or self._shard(projection.features, outputs),
        )

    def _shard(self, dim: int, outputs: int) -> Placement:  # noqa: ARG002 - fused sections need the size
        return Shard(dim)

    def _check_heads(self, outputs: int, mesh: DeviceMesh) -> None:
        if self.heads is None:
            return
        if outputs % self.heads:
            raise coded(
                ValueError,
                "HP404",
                f"{type(self).__name__}: {outputs} outputs are not those of {self.heads} heads",
            )
        if self.heads % mesh.size():
            raise coded(
                ValueError,
                "HP404",
                f"{type(self).__name__}: {self.heads} heads cannot be shared evenly by the {mesh.size()} ranks of "
                f"{mesh}; take a mesh whose size divides the number of heads",
            )


@dataclass(frozen=True, repr=False, kw_only=True)
class FusedColwiseParallel(ColwiseParallel):
    """ColwiseParallel for several projections in one module: q, k and v, or gate and up.

    ``sections``: the number of sections of one size, or the size of each. Each is sharded by itself, so that splitting
    the output leaves every rank with its part of each.
    """

    sections: int | Sequence[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.sections, int):
            object.__setattr__(self, "sections", tuple(self.sections))

    def _options(self) -> dict[str, Any]:
        return {"sections": self.sections, **super()._options()}

    def _shard(self, dim: int, outputs: int) -> Placement:
        return FusedShard(dim, self._sizes(outputs))

    def _sizes(self, outputs: int) -> tuple[int, ...]:
        """The size of each section."""
        if isinstance(self.sections, int):
            if outputs % self.sections:
                raise coded(
                    ValueError,
                    "HP404",
                    f"FusedColwiseParallel: {outputs} outputs are not {self.sections} sections of a size",
                )
            return (outputs // self.sections,) * self.sections
        if sum(self.sections) != outputs:
            raise coded(
                ValueError,
                "HP404",
                f"FusedColwiseParallel: sections {self.sections} do not add up to {outputs} outputs",
            )
        return tuple(self.sections)

    def _check_heads(self, outputs: int, mesh: DeviceMesh) -> None:
        """``heads`` are those of all sections together; each section must have an even share of them."""
        sizes = self._sizes(outputs)
        if self.heads is None:
            return
        size, left = divmod(outputs, self.heads)
        if left or any(section % (size * mesh.size()) for section in sizes):
            raise coded(
                ValueError,
                "HP404",
                f"FusedColwiseParallel: {self.heads} heads in sections of {sizes} cannot be shared evenly by "
                f"the {mesh.size()} ranks of {mesh}; take a mesh whose size divides the number of heads of every "
                "section",
            )


@dataclass(frozen=True, repr=False, kw_only=True)
class RowwiseParallel(_Projected):
    """Shards the module's inputs: a Linear's weight by columns, an Embedding's by rows. The outputs are summed."""

    def layouts(self, module: Any, device_mesh: DeviceMesh) -> ModuleLayouts:  # noqa: ARG002 - the same for all
        """The layouts of the module's parameters, input and output."""
        projection = self._projection(module)
        is_embedding = projection.kind == "embedding"
        wanted = Replicate() if is_embedding else Shard(projection.features)
        return self._layouts(
            module,
            weight=Shard(projection.into),
            bias=Replicate(),
            plain=self.input_layouts or wanted,
            wanted=wanted,
            leaving=self.output_layouts or Replicate(),
        )


@dataclass(frozen=True, repr=False, kw_only=True)
class SequenceParallel(LayoutStyle):
    """For norms and dropout: parameters are replicated, activations are sharded at ``sequence_dim``."""

    sequence_dim: int = 1
    use_local_output: bool = False

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.sequence_dim != 1:
            options["sequence_dim"] = self.sequence_dim
        if self.use_local_output:
            options["use_local_output"] = True
        return options

    def layouts(self, module: Any, device_mesh: DeviceMesh) -> ModuleLayouts:  # noqa: ARG002 - the same for all
        """The layouts of the module's parameters, input and output."""
        names = [name for name, _ in platform.own_tensors(module)]
        sharded = Shard(self.sequence_dim)
        return ModuleLayouts(
            parameters=tuple((name, Replicate()) for name in names),
            first_input=Crossing(sharded, sharded),
            output=Crossing(to_local=self.use_local_output),
        )


@dataclass(frozen=True, repr=False, kw_only=True)
class Replicated(LayoutStyle):
    """Replicates the parameters and buffers that no other style has placed, the inputs, and everything in between.

    Plain tensors that go into the module become distributed ones. Inside, a plain tensor (a mask, a table, positions)
    counts as the same on every rank: with global shapes, all ranks make the same one. Styles inside return distributed
    tensors unless they say otherwise.
    """

    use_local_output: bool = False

    def _options(self) -> dict[str, Any]:
        return {"use_local_output": True} if self.use_local_output else {}

    def layouts(self, module: Any, device_mesh: DeviceMesh) -> ModuleLayouts:  # noqa: ARG002 - the same for all
        """The layouts of everything in the module."""
        output = Crossing(to_local=True) if self.use_local_output else None
        return ModuleLayouts(output=output, replicates_rest=True)
