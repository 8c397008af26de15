# SPDX-License-Identifier: Apache-2.0
"""A context in which plain attention is computed by several ranks, each with its part of the sequence, as in torch.

with context_parallel(mesh["cp"], buffers=[ids, labels, rotary], buffer_seq_dims=[1, 1, 0]):
    loss = model(ids, labels)          the buffers are this rank's parts; attention sees all of the sequence
    loss.backward()

Parts are those of ``ZigzagShard``, so that causal attention is the same work for all ranks. Parameters are left alone:
gradients are this rank's part, which data parallelism over the same ranks sums.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hyper_parallel.core.context_parallel.attention import (
    OPERATOR,
    Method,
    overrides_with,
)
from hyper_parallel.core.context_parallel.buffers import shard_buffer, unshard_buffer
from hyper_parallel.core.context_parallel.rotate import rotates
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.modes import Override, override
from hyper_parallel.core.dtensor.placement_types import ZigzagShard
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()
_ACTIVE = threading.Lock()  # one context at a time: it changes tensors that all see
_BALANCERS = {None: True, "headtail": True, "none": False}


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[Any] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[Any] | None = None,
) -> Iterator[None]:
    """Attention on plain tensors is that of the whole sequence, (batch, heads, sequence, head_dim), within the context.

    ``buffers``: become this rank's parts, in place, along ``buffer_seq_dims``, and what they were before at the end,
    but for those in ``no_restore_buffers``. Run backward within the context if it recomputes anything.
    """
    given = _pair(buffers, buffer_seq_dims)
    kept = _check_kept(no_restore_buffers, [one for one, _ in given])
    for number, (buffer, _) in enumerate(given):
        _check_buffer(number, buffer)
    parts = [
        shard_buffer(f"buffer {number}", buffer, mesh, dim, load_balance=True)
        for number, (buffer, dim) in enumerate(given)
    ]
    if not _ACTIVE.acquire(blocking=False):
        raise coded(
            RuntimeError,
            "HP807",
            "context_parallel: another context is active in this process; contexts cannot be nested, nor be entered on "
            "several threads",
        )
    try:
        saved = [platform.clone(buffer) for buffer, _ in given]
        try:
            for (buffer, _), part in zip(given, parts, strict=True):
                platform.replace_contents(buffer, part)
            with platform.intercept_attention(_Attention(mesh)):
                yield
        finally:
            for (buffer, _), before in zip(given, saved, strict=True):
                if not any(buffer is one for one in kept):
                    platform.replace_contents(buffer, before)
    finally:
        _ACTIVE.release()


def context_parallel_unshard(
    mesh: DeviceMesh,
    buffers: Sequence[Any],
    seq_dims: Sequence[int],
    load_balancer: Any = None,
) -> list[Any]:
    """The whole tensors of the parts that ``context_parallel`` works with, on every rank.

    ``load_balancer``: None or "headtail" for those, "none" for parts one after the other.
    """
    if not isinstance(load_balancer, str | None) or load_balancer not in _BALANCERS:
        names = ", ".join(map(repr, _BALANCERS))
        raise coded(
            ValueError,
            "HP802",
            f"context_parallel_unshard: unknown load_balancer {load_balancer!r}; expected one of {names}",
        )
    is_balanced = _BALANCERS[load_balancer]
    return [
        unshard_buffer(f"buffer {number}", buffer, mesh, dim, is_balanced)
        for number, (buffer, dim) in enumerate(_pair(buffers, seq_dims))
    ]


def _pair(
    buffers: Sequence[Any] | None, seq_dims: Sequence[int] | None
) -> list[tuple[Any, int]]:
    tensors, dims = list(buffers or ()), list(seq_dims or ())
    if len(tensors) != len(dims):
        raise coded(
            ValueError,
            "HP807",
            f"context_parallel: {len(tensors)} buffers were given, but {len(dims)} sequence dims; say for each buffer "
            "which of its dims is the sequence",
        )
    return list(zip(tensors, dims, strict=True))


def _check_kept(kept: set[Any] | None, buffers: list[Any]) -> list[Any]:
    unknown = [
        one for one in kept or () if not any(one is buffer for buffer in buffers)
    ]
    if unknown:
        raise coded(
            ValueError,
            "HP807",
            "context_parallel: no_restore_buffers holds a tensor that is not among the buffers",
        )
    return list(kept or ())


def _check_buffer(number: int, buffer: Any) -> None:
    """Raises a ValueError for a tensor that cannot become its part in place."""
    if not platform.is_tensor(buffer) or isinstance(buffer, DTensor):
        problem = "is no plain tensor; distributed tensors need no context"
    elif platform.requires_grad(buffer):
        problem = (
            "requires a gradient, which would be lost when its size changes; pass what the gradient does not flow "
            "through, such as token ids, and compute it from them within the context"
        )
    elif not platform.owns_memory(buffer):
        problem = "is a view, or shares its memory; pass a contiguous tensor of its own: .clone()"
    else:
        return
    raise coded(ValueError, "HP807", f"context_parallel: buffer {number} {problem}")


class _Attention:
    """The framework's attention function, for plain parts of a sequence."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh, self._placement = mesh, ZigzagShard(2)
        self._method = Method("ring" if rotates(None) else "allgather")

    def __call__(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        how = overrides_with(self._method)[OPERATOR]
        with override(OPERATOR, Override()):  # calls inside are the framework's own
            shards = [self._distribute(one) for one in (query, key, value)]
            if is_causal and query.shape[2] != key.shape[2]:
                raise coded(
                    ValueError,
                    "HP803",
                    f"context_parallel: is_causal with {query.shape[2]} queries and {key.shape[2]} keys per rank; "
                    "which keys a query sees would depend on the alignment: give a mask",
                )
            call, place = how.call, how.place_plain
            assert call is not None
            assert place is not None
            if attn_mask is not None:
                attn_mask = place(shards[0], shards[1], attn_mask)[id(attn_mask)]
            result = call(*shards, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            if result is NotImplemented:
                result = platform.operator(OPERATOR)(
                    *shards,
                    attn_mask=attn_mask,
                    dropout_p=dropout_p,
                    is_causal=is_causal,
                    scale=scale,
                    enable_gqa=enable_gqa,
                ).redistribute(self._mesh, [self._placement])
            return result.to_local()

    def _distribute(self, shard: Any) -> DTensor:
        is_paired = len(shard.shape) == 4 and not shard.shape[2] % 2
        if not is_paired and (len(shard.shape) != 4 or self._mesh.size() > 1):
            raise coded(
                ValueError,
                "HP803",
                f"context_parallel: attention got a tensor of shape {tuple(shard.shape)}; expected (batch, heads, "
                "positions of this rank, head_dim), with as many positions in the early part as in the late one",
            )
        return DTensor.from_local(shard, self._mesh, [self._placement])
