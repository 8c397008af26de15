# SPDX-License-Identifier: Apache-2.0
"""Clips gradients by their norm over all stages: each rank computes that of its stages, and they exchange one number.

norm = clip_over_stages(pipeline, parameters, 1.0, 2.0, is_counted=lambda parameter: True)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hyper_parallel.core.pipeline_parallel.agreement import PipelineError
from hyper_parallel.core.pipeline_parallel.pipeline import Pipeline
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.clipping import clip_grad_norm
from hyper_parallel.platform.error_codes import coded

platform = get_platform()

_FAILED = -1.0  # no norm
_SINGLE = 4  # bytes


def clip_over_stages(
    pipeline: Pipeline,
    parameters: Iterable[Any],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    is_counted: Callable[[Any], bool],
) -> Any:
    """Scales the gradients of this rank's parameters; returns the norm over all ranks before scaling.

    ``is_counted``: whether a parameter adds to this rank's norm, as all do but those that another one counts already.
    """
    has_told = False

    def combine(norm: Any) -> Any:
        nonlocal has_told
        has_told = True
        return _combine(pipeline, norm, norm_type)

    try:
        return clip_grad_norm(
            platform,
            list(parameters),
            max_norm,
            norm_type,
            error_if_nonfinite,
            None,
            is_counted=is_counted,
            combine=combine,
        )
    except Exception:
        if not has_told:  # nobody is to wait for this rank
            _gather(pipeline, platform.full((), _FAILED))
        raise


def _combine(pipeline: Pipeline, norm: Any, norm_type: float) -> Any:
    rows = _gather(pipeline, norm)
    norms, sizes = rows[:, 0], rows[:, 1]
    pairs = zip(pipeline.ranks, norms.tolist(), strict=True)
    failed = [rank for rank, one in pairs if one == _FAILED]
    if failed:
        raise coded(
            PipelineError,
            "HP496",
            f"pipeline: clip_grad_norm_ failed on rank {failed[0]}, whose error says why; no rank has scaled gradients",
        )
    total = platform._norm_of_norms([norms], norm_type)
    # Every rank scales by the same number: that of the widest norm.
    return total if max(sizes.tolist()) > _SINGLE else total.to(norm.dtype)


def _gather(pipeline: Pipeline, norm: Any) -> Any:
    """The norm of every rank, and the bytes that it has there."""
    own = norm.reshape(1).to(platform.str_to_dtype("float64"))
    size = platform.full_like(own, float(platform.get_element_size(norm)))
    row = platform.cat([own, size], 0)
    if pipeline.size > 1:
        row = row.to(platform.device())
        row = platform.all_gather_into_tensor(row, pipeline.group)
    return row.reshape((-1, 2))
