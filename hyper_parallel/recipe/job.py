# SPDX-License-Identifier: Apache-2.0
"""What a recipe trains, and on what: a model on its mesh, its batches and its loss.

loss = job.loss(job.model, *job.batch(0))     the mean over the tokens of the whole batch
facts = job.train(0, optimizer, clip=1.0)     {"loss": 4.2, "norm": 0.7}
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.placement_types import Placement, Replicate, Shard
from hyper_parallel.core.expert_parallel.losses import collect_aux_losses
from hyper_parallel.core.tensor_parallel.loss import loss_parallel
from hyper_parallel.core.training import training_step
from hyper_parallel.core.training.evaluation import evaluating
from hyper_parallel.planning.roles import ROLES
from hyper_parallel.platform import PlatformType, get_platform
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.recipe.data import Corpus

platform = get_platform()


@dataclasses.dataclass(frozen=True)
class Job:
    """A model on all axes of a mesh, or in one process if there is none."""

    model: Any
    mesh: DeviceMesh | None
    corpus: Corpus

    def batch(self, step: int, *, whole: bool = False) -> tuple[Any, Any]:
        """Tokens and those that follow them, for a step: this rank's rows, or all of them."""
        return _as_tensors(self.corpus.training(step, whole=whole))

    def held_out(self, number: int) -> tuple[Any, Any]:
        """This rank's rows of a batch of text that is never trained on."""
        return _as_tensors(self.corpus.held_out(number))

    def loss(self, model: Any, ids: Any, targets: Any) -> Any:
        """The mean loss over the tokens of the whole batch, of which this rank has these rows.

        With what modules add to balance their experts.
        """
        with collect_aux_losses() as aux:
            output = model(place_rows(self.mesh, ids))
        return compute_loss(self.mesh, output, targets, aux.total())

    def loss_by_micro_batches(
        self, parts: int, count: int
    ) -> Callable[[Any, Any, Any], Any]:
        """The same loss, of ``count`` micro batches one after the other, each with rows of all ``parts`` of a batch."""

        def divide(rows: Any) -> Iterator[Any]:
            length = rows.shape[-1]
            parted = rows.reshape(parts, count, -1, length)
            for micro in range(count):
                yield parted[:, micro].reshape(-1, length)

        def loss(model: Any, ids: Any, targets: Any) -> Any:
            pairs = zip(divide(ids), divide(targets), strict=True)
            return sum(self.loss(model, *pair) for pair in pairs) / count

        return loss

    def train(self, step: int, optimizer: Any, clip: float | None) -> dict[str, Any]:
        """Does a step; returns what is told of it."""
        loss_of = functools.partial(self.loss, self.model, *self.batch(step))
        loss, norm = training_step(self.model, optimizer, loss_of, clip)
        return {"loss": loss, "norm": norm}

    def evaluate(self, batches: int) -> float:
        """The mean loss on text that is never trained on."""
        with evaluating(self.model):
            losses = [
                self.loss(self.model, *self.held_out(number)).item()
                for number in range(batches)
            ]
        return float(sum(losses) / batches)


def compute_loss(
    mesh: DeviceMesh | None, output: Any, targets: Any, aux: Any = 0.0
) -> Any:
    """The mean loss over the tokens of all ranks, of which this one has these targets; ``aux`` is added."""
    logits = getattr(output, "logits", output)
    if mesh is not None and not isinstance(logits, DTensor):
        raise coded(
            TypeError,
            "HP704",
            f"the model's output on {mesh} is a plain {type(logits).__name__} without a layout; set "
            "use_local_output=False for the styles of the plan, and end it with '': Replicated()",
        )
    if platform.get_element_size(logits) < 4:
        logits = platform.tensor_type_cast(logits, "float32")
    targets = place_rows(mesh, targets)
    if mesh is not None and "cp" in (mesh.mesh_dim_names or ()):
        logits = logits.transpose(1, 2)  # merging sequences in parts would move them
    else:
        logits, targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    with loss_parallel():
        loss = platform.operator("cross_entropy")(logits, targets)
    if platform.is_tensor(aux):
        loss = loss + aux
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def place_rows(mesh: DeviceMesh | None, rows: Any) -> Any:
    """This rank's rows as a part of the batch of all."""
    if mesh is None or isinstance(rows, DTensor):
        return rows
    placements: list[Placement] = []
    for name in mesh.mesh_dim_names or ():
        dim = ROLES[name].batch_dim
        placements.append(Replicate() if dim is None else Shard(dim))
    return DTensor.from_local(rows, mesh, placements)


def _as_tensors(rows: tuple[Any, ...]) -> tuple[Any, Any]:
    """Tokens on this process's device; those of MindSpore are int32."""
    kind = "int32" if platform.platform_type is PlatformType.MINDSPORE else "int64"
    arrays = [array.astype(kind) for array in rows]
    ids, targets = (
        platform.tensor_from_bytes(array.view("uint8").reshape(-1), kind, array.shape)
        for array in arrays
    )
    if platform.device_type() == "cpu":
        return ids, targets
    return ids.to(platform.device()), targets.to(platform.device())
