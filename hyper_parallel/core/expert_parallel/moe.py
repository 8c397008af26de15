# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts, and the bias that balances it without a loss.

moe = MoE(dim, hidden_dim, num_experts=8, top_k=2, router_kwargs={"score_func": "softmax"})
ExpertParallel().apply(moe.experts, mesh["ep"])
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Partial, Replicate
from hyper_parallel.core.expert_parallel.capacity import Capacity
from hyper_parallel.core.expert_parallel.losses import (
    load_balance_loss,
    note_loss,
)
from hyper_parallel.core.expert_parallel.modules import GroupedExperts
from hyper_parallel.core.expert_parallel.order import count_tokens
from hyper_parallel.core.expert_parallel.router import TokenChoiceTopKRouter, widen
from hyper_parallel.core.expert_parallel.telemetry import is_recomputing
from hyper_parallel.platform import get_platform

platform = get_platform()
_COUNTING = threading.Lock()  # micro batches on several threads count into one buffer


class MoE(platform.Module):  # type: ignore[name-defined, misc]
    """Sends each token to ``top_k`` experts and adds their outputs by weight; no token is dropped by default.

    ``score_before_experts`` multiplies inputs by the weights, else outputs: another function, since experts are not
    linear. ``load_balance_coeff``: that of the switch loss, which ``collect_aux_losses`` collects. ``shared_expert``: a
    module that every token passes, while rows travel to the other experts. ``router_kwargs``: further options of
    ``TokenChoiceTopKRouter``. ``capacity``: drops tokens of busy experts.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        top_k: int = 1,
        score_before_experts: bool = True,
        load_balance_coeff: float | None = None,
        shared_expert: Any = None,
        router_kwargs: Mapping[str, Any] | None = None,
        use_grouped_mm: bool = False,
        *,
        capacity: Capacity | None = None,
    ) -> None:
        super().__init__()
        options = dict(router_kwargs or {})
        self.router = TokenChoiceTopKRouter(dim, num_experts, top_k, **options)
        self.experts = GroupedExperts(dim, hidden_dim, num_experts, use_grouped_mm)
        self.shared_expert = shared_expert
        self.num_experts, self.score_before_experts = num_experts, score_before_experts
        self.load_balance_coeff, self.capacity = load_balance_coeff, capacity
        float32, int64 = map(platform.str_to_dtype, ("float32", "int64"))
        bias = platform.zeros((num_experts,), dtype=float32)
        counts = platform.zeros((num_experts,), dtype=int64)
        self.register_buffer("expert_bias", bias)
        self.register_buffer("tokens_per_expert", counts, persistent=False)

    def forward(self, x: Any) -> Any:
        """The outputs for tokens [..., dim]."""
        tokens = x.reshape((-1, x.shape[-1]))
        logits, weights, index = self.router.choose(tokens, self.expert_bias)
        if self.training and not is_recomputing():
            self._count(index)
        if self.load_balance_coeff is not None:
            # Computed whether or not it is collected: recomputation must save the same tensors.
            loss = load_balance_loss(self.router.probabilities(logits), index)
            note_loss("load balance", self.load_balance_coeff * loss)
        shared = _Beside(self.shared_expert, tokens)
        output = self.experts(
            tokens,
            top_k_index=index,
            top_k_weights=weights,
            weighs_inputs=self.score_before_experts,
            capacity=self.capacity,
            meanwhile=None if self.shared_expert is None else shared.run,
        )
        if self.shared_expert is not None:
            output = output + shared.take()
        return output.reshape(tuple(x.shape))

    construct = forward

    def _count(self, index: Any) -> None:
        """Adds the tokens of these choices to those counted since the last update of the bias."""
        counts = count_tokens(_local(index), self.num_experts)
        with _COUNTING:
            if isinstance(index, DTensor):
                self._count_in_parts(index.layout)
            own = _local(self.tokens_per_expert)
            platform.copy_into(own, own + counts)

    def _count_in_parts(self, tokens: Layout) -> None:
        """Has each rank count its own tokens, where these are distributed: the buffer is then a sum of parts."""
        placements = [
            Partial() if one.is_shard() else Replicate() for one in tokens.placements
        ]
        layout = Layout.from_device_mesh(tokens.mesh)(placements).bind(1)
        buffer = self.tokens_per_expert
        if not isinstance(buffer, DTensor) or buffer.layout is not layout:
            zeros = platform.full_like(_local(buffer), 0)
            counts = DTensor(zeros, layout, (self.num_experts,))
            platform.set_own_tensor(self, "tokens_per_expert", counts)


class _Beside:
    """What a module makes of tokens, computed while these travel to their experts."""

    def __init__(self, module: Any, tokens: Any) -> None:
        self._module, self._tokens = module, tokens
        self._outputs: list[Any] = []
        self._records = not platform.is_recording_disabled()
        self._is_early: bool | None = None

    def run(self) -> None:
        """Computes it, unless recording was switched off on the way, as where a call is recomputed as a whole."""
        if self._is_early is None:
            self._is_early = self._records != platform.is_recording_disabled()
        # Recomputation has to repeat all that was recorded, though nobody takes it then.
        if self._is_early:
            self._outputs.append(self._module(self._tokens))

    def take(self) -> Any:
        """The output."""
        return self._outputs.pop() if self._outputs else self._module(self._tokens)


def _local(tensor: Any) -> Any:
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return platform.detach(tensor)


def update_expert_bias(
    moe: Any,
    lr: float = 1e-3,
    num_recomputations: int = 1,  # noqa: ARG001 - recomputations are not counted
    *,
    mesh: DeviceMesh | None = None,
    centers: bool = False,
) -> None:
    """Raises the bias of experts with fewer tokens than the average by ``lr``, lowers the others', and counts anew.

    A collective call over all ranks of ``mesh``, which have different tokens; by default over those that have experts,
    or, where tokens are distributed, those that had tokens. Call it once per optimizer step. ``centers`` keeps the mean
    of the bias at zero. Recomputations are not counted, so ``num_recomputations`` changes nothing; it is accepted for
    the sake of callers elsewhere.
    """
    counted = moe.tokens_per_expert
    counts = _sum_counts(counted, mesh or _mesh_of(moe.experts))
    bias = widen(_local(moe.expert_bias))
    wide = counts.to(bias.dtype)
    bias = bias + platform.operator("sign")(wide.mean() - wide) * lr
    if centers:
        bias = bias - bias.mean()
    _set_bias(moe, bias)
    own = _local(counted)
    platform.copy_into(own, platform.full_like(own, 0))


def _set_bias(moe: Any, bias: Any) -> None:
    """Keeps the bias in float32 or wider, even if the module was cast: small steps would be lost."""
    before = moe.expert_bias
    if before.dtype == bias.dtype:
        platform.copy_into(_local(before), bias)
        return
    if isinstance(before, DTensor):
        bias = DTensor(bias, before.layout, before.shape)
    platform.set_own_tensor(moe, "expert_bias", bias)


def _mesh_of(experts: Any) -> DeviceMesh | None:
    for weight in platform.parameters_dict(experts).values():
        if isinstance(weight, DTensor):
            return weight.device_mesh
    return None


def _sum_counts(counts: Any, mesh: DeviceMesh | None) -> Any:
    if isinstance(counts, DTensor):
        return counts.full_tensor()
    if mesh is None or mesh.size() == 1:
        return counts
    group = platform.create_group(list(mesh.rank_list))
    return platform.all_reduce(platform.clone(counts), group)
