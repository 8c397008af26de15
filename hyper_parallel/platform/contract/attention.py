# SPDX-License-Identifier: Apache-2.0
"""Attention in parts: kernels that also return what merging their results needs.

Example::

    output, logsumexp = platform.fused_attention(query, key, value, None, True, scale)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from hyper_parallel.platform.error_codes import coded


class Attention:
    """Kernels of attention, calls of it that are caught, and tensors that hold a part of a sequence meanwhile."""

    def fused_attention(
        self,
        query: Any,  # noqa: ARG002 - for kernels
        key: Any,  # noqa: ARG002
        value: Any,  # noqa: ARG002
        mask: Any,  # noqa: ARG002
        is_causal: bool,  # noqa: ARG002
        scale: float,  # noqa: ARG002
    ) -> tuple[Any, Any] | None:
        """Returns attention and the logarithm of each query's sum, outside the graph; None if there is no kernel.

        All tensors are (batch, heads, sequence, head_dim); the keys may have fewer heads. ``mask`` is added to the
        scores and has their dtype.
        """
        return None

    def fused_attention_gradients(
        self,
        grad: Any,
        query: Any,
        key: Any,
        value: Any,
        output: Any,
        logsumexp: Any,
        mask: Any,
        is_causal: bool,
        scale: float,
    ) -> tuple[Any, Any, Any] | None:
        """Returns the gradients of query, key and value, outside the graph; None if there is no kernel.

        ``output`` and ``logsumexp`` may be those of attention to more keys than these.
        """
        del grad, query, key, value, output, logsumexp, mask, is_causal, scale
        return None

    def intercept_attention(
        self,
        function: Callable[..., Any],  # noqa: ARG002
    ) -> AbstractContextManager[Any]:
        """Calls ``function`` in place of the framework's attention on plain tensors, within a context."""
        raise coded(
            NotImplementedError,
            "HP142",
            "intercept_attention: this framework has no attention function that could be replaced; put the model on "
            "the mesh with shard_sequence",
        )

    def owns_memory(self, tensor: Any) -> bool:  # noqa: ARG002
        """Returns whether a plain tensor is no view, and nothing else is stored in its memory."""
        return False

    def replace_contents(self, tensor: Any, contents: Any) -> None:  # noqa: ARG002
        """Gives a plain tensor that owns its memory other contents and their shape, in place."""
        raise coded(
            NotImplementedError,
            "HP142",
            "replace_contents: this framework cannot change the shape of a tensor in place",
        )
