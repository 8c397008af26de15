# SPDX-License-Identifier: Apache-2.0
"""Recompute that decides by operator: what to keep, what to keep in host memory, what to compute again.

contexts = selective_contexts([torch.ops.aten.mm], allow_mutation=False)      # (forward's, recompute's)
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.platform import CheckpointPolicy
from hyper_parallel.platform.torch.swap import HostCopy, Kept, Swapped, flat_elements

if TYPE_CHECKING:
    from hyper_parallel.platform.swap_storage import SwapStorage

_OURS, _TORCHS = CheckpointPolicy, torch_checkpoint.CheckpointPolicy
# What a policy may return, and what is done: eager mode has no one to overrule a preference.
_VERDICTS: dict[Any, CheckpointPolicy] = {
    True: _OURS.MUST_SAVE,
    False: _OURS.MUST_RECOMPUTE,
    _OURS.MUST_SAVE: _OURS.MUST_SAVE,
    _OURS.PREFER_SAVE: _OURS.MUST_SAVE,
    _OURS.MUST_RECOMPUTE: _OURS.MUST_RECOMPUTE,
    _OURS.PREFER_RECOMPUTE: _OURS.MUST_RECOMPUTE,
    _OURS.MUST_SWAP: _OURS.MUST_SWAP,
    _TORCHS.MUST_SAVE: _OURS.MUST_SAVE,
    _TORCHS.PREFER_SAVE: _OURS.MUST_SAVE,
    _TORCHS.MUST_RECOMPUTE: _OURS.MUST_RECOMPUTE,
    _TORCHS.PREFER_RECOMPUTE: _OURS.MUST_RECOMPUTE,
    _TORCHS.MUST_CPU_OFFLOAD: _OURS.MUST_SWAP,
    _TORCHS.PREFER_CPU_OFFLOAD: _OURS.MUST_SWAP,
}

_AGAIN = object()  # the operator runs again in backward
_TAKEN = object()  # its output has been handed out


def selective_contexts(
    policy_fn_or_list: Any, allow_mutation: bool, storage: SwapStorage | None = None
) -> tuple[Any, Any]:
    """The contexts of a forward that asks the policy and of a recompute that does what it said."""
    policy_fn = _as_policy(policy_fn_or_list)
    entries: dict[Any, list[Any]] = defaultdict(list)
    return _Deciding(policy_fn, entries, storage), _Recomputing(entries, allow_mutation)


def _as_policy(policy_fn_or_list: Any) -> Callable[..., Any]:
    if isinstance(policy_fn_or_list, (list, tuple, set, frozenset)):
        saved = frozenset(
            itertools.chain.from_iterable(_overloads(op) for op in policy_fn_or_list)
        )
        return lambda _ctx, op, *_args, **_kwargs: op in saved
    is_operator = isinstance(
        policy_fn_or_list, (torch._ops.OperatorBase, torch._ops.OpOverloadPacket)
    )
    if is_operator or not callable(policy_fn_or_list):
        raise coded(
            ValueError,
            "HP136",
            "create_selective_checkpoint_contexts: expected a policy function (ctx, op, *args, **kwargs) or a list "
            "of "
            f"operators to save, got {policy_fn_or_list!r}"
            + ("; put it in a list" if is_operator else ""),
        )
    return policy_fn_or_list


def _overloads(op: Any) -> list[Any]:
    if isinstance(op, torch._ops.OpOverloadPacket):
        return [getattr(op, name) for name in op.overloads()]
    if isinstance(op, torch._ops.OperatorBase):
        return [op]
    raise coded(
        ValueError,
        "HP136",
        f"create_selective_checkpoint_contexts: {op!r} in the list is no operator; expected one such as "
        "torch.ops.aten.mm.default, or torch.ops.aten.mm for all its overloads",
    )


def _verdict(func: Any, returned: Any) -> CheckpointPolicy:
    if not isinstance(returned, (bool, _OURS, _TORCHS)):
        raise coded(
            ValueError,
            "HP136",
            f"the checkpoint policy returned {returned!r} for {func}; expected one of "
            f"{', '.join(f'CheckpointPolicy.{policy.name}' for policy in _OURS)}, or a bool (True: save)",
        )
    return _VERDICTS[returned]


class _Entry:
    """An operator's output, kept or swapped, and the jump that the operator made in the random numbers, if it drew."""

    def __init__(
        self, out: Any, hold: Callable[[torch.Tensor], Kept | Swapped], jump: Any
    ) -> None:
        self._tree = pytree.tree_map_only(torch.Tensor, hold, out)
        self._jump = jump

    def take(self, allow_mutation: bool) -> Any:
        if self._jump is not None:
            self._jump()
        return pytree.tree_map_only(
            (Kept, Swapped),
            lambda held: (
                held.tensor
                if allow_mutation and isinstance(held, Kept)
                else held.take()
            ),
            self._tree,
        )


def _swapped(storage: SwapStorage | None, tensor: torch.Tensor) -> Swapped | Kept:
    if (
        type(tensor) is not torch.Tensor
        or tensor.layout != torch.strided
        or tensor.is_meta
        or not tensor.numel()
    ):
        return Kept.of(tensor)
    elements, stride, _ = flat_elements(tensor)
    original = None if storage is None else Kept.of(tensor)
    copy = HostCopy(elements, storage=storage, original=original)
    return Swapped(copy, tensor.size(), stride)


class _Deciding(TorchDispatchMode):
    """Forward: asks the policy after every operator and keeps what it says."""

    def __init__(
        self,
        policy_fn: Callable[..., Any],
        entries: dict[Any, list[Any]],
        storage: SwapStorage | None,
    ) -> None:
        super().__init__()
        self._policy_fn = policy_fn
        self._entries = entries
        self._swapped = functools.partial(_swapped, storage)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in torch_checkpoint.SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        draws = _Draws.of(func, args, kwargs)
        out = func(*args, **kwargs)
        ctx = torch_checkpoint.SelectiveCheckpointContext(
            is_recompute=False, op_output=out
        )
        verdict = _verdict(func, self._policy_fn(ctx, func, *args, **kwargs))
        self._entries[func].append(self._entry(func, verdict, args, kwargs, out, draws))
        return out

    def _entry(
        self,
        func: Any,
        verdict: CheckpointPolicy,
        args: Any,
        kwargs: Any,
        out: Any,
        draws: _Draws | None,
    ) -> Any:
        # An in-place operator must run again: its output alone would leave the recomputed input unchanged. A view
        # costs nothing to make again, and a copy of it would miss what happens to its base.
        if verdict is _OURS.MUST_RECOMPUTE or getattr(
            getattr(func, "_schema", None), "is_mutable", False
        ):
            return _AGAIN
        swap = verdict is _OURS.MUST_SWAP
        if swap and _share_memory(out, (args, kwargs)):
            return _AGAIN
        jump = None if draws is None else draws.jump()
        return _Entry(out, self._swapped if swap else Kept.of, jump)


def _share_memory(left: Any, right: Any) -> bool:
    addresses = [
        {
            t.untyped_storage()._cdata
            for t in pytree.tree_leaves(tree)
            if type(t) in (torch.Tensor, nn.Parameter)
        }
        for tree in (left, right)
    ]
    return not addresses[0].isdisjoint(addresses[1])


class _Recomputing(TorchDispatchMode):
    """Backward: hands out what was kept and runs the rest again. What was kept can be handed out once, as in torch."""

    def __init__(self, entries: dict[Any, list[Any]], allow_mutation: bool) -> None:
        super().__init__()
        self._entries = entries
        self._allow_mutation = allow_mutation
        self._seen: dict[Any, int] = defaultdict(int)

    def __enter__(self) -> Any:
        self._seen.clear()
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in torch_checkpoint.SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        index = self._seen[func]
        self._seen[func] += 1
        entries = self._entries.get(func, [])
        if index >= len(entries):
            raise coded(
                RuntimeError,
                "HP136",
                f"{func} runs for time {index + 1} in the recompute but ran {len(entries)} times in forward: "
                "the function under checkpoint must do the same both times",
            )
        if entries[index] is _AGAIN:
            return func(*args, **kwargs)
        if entries[index] is _TAKEN:
            raise coded(
                RuntimeError,
                "HP136",
                f"backward an extra time through a selective checkpoint: the output of {func} is gone. "
                "Backward once, or recompute everything (no policy).",
            )
        entry, entries[index] = entries[index], _TAKEN
        return entry.take(self._allow_mutation)


class _Draws:
    """The random numbers around one operator that draws some.

    An operator that is not run again must still take its numbers, or those after it get the wrong ones.
    """

    def __init__(
        self, get: Callable[[], torch.Tensor], put: Callable[[torch.Tensor], None]
    ) -> None:
        self._get, self._put = get, put
        self._before = get()

    @staticmethod
    def of(func: Any, args: Any, kwargs: Any) -> _Draws | None:
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return None
        generator = kwargs.get("generator")
        if generator is not None:
            return _Draws(generator.get_state, generator.set_state)
        tensors = (
            leaf
            for leaf in pytree.tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        )
        device = torch.device(
            kwargs.get("device") or next((t.device for t in tensors), "cpu")
        )
        if device.type == "cpu":
            return _Draws(torch.get_rng_state, torch.set_rng_state)
        module = torch.get_device_module(device.type)
        return _Draws(
            functools.partial(module.get_rng_state, device),
            lambda state: module.set_rng_state(state, device),
        )

    def jump(self) -> Callable[[], None] | None:
        """What takes the numbers that the operator took, or None if it took none."""
        after = self._get()
        if torch.equal(self._before, after):
            return None

        def take() -> None:
            # Where the state is another one, the caller did not ask for the same draws (preserve_rng_state=False).
            if torch.equal(self._get(), self._before):
                self._put(after)

        return take
