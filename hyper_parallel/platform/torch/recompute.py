# SPDX-License-Identifier: Apache-2.0
"""Less memory for activations: compute them again in backward, or keep them in host memory until then.

block = platform.ckpt_wrapper(block, context_fn=lambda: platform.create_selective_checkpoint_contexts([aten.mm]))
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.platform import Platform

if TYPE_CHECKING:
    from hyper_parallel.platform.swap_storage import SwapStorage
    from hyper_parallel.platform.torch.swap import SwapToHost

INNER = "_wrapped_module"


class Recompute(Platform):
    """The part of the contract that is about recompute and swap."""

    @property
    def checkpoint(self) -> Callable[..., Any]:
        return torch_checkpoint.checkpoint

    @property
    def noop_context_fn(self) -> Callable[[], tuple[Any, Any]]:
        return torch_checkpoint.noop_context_fn

    def ckpt_wrapper(
        self,
        module: Any,
        checkpoint_fn: Callable[..., Any] | None = None,
        **checkpoint_fn_kwargs: Any,
    ) -> CheckpointWrapper:
        return CheckpointWrapper(module, checkpoint_fn, **checkpoint_fn_kwargs)

    def swap_wrapper(
        self,
        module: Any,
        policy_fn: Callable[[Any], bool] | None = None,
        swap_fn: Callable[..., Any] | None = None,
    ) -> SwapWrapper:
        """Untested on hardware: copies on a side stream, into pinned memory."""
        return SwapWrapper(module, policy_fn, swap_fn)

    def create_selective_checkpoint_contexts(
        self,
        policy_fn_or_list: Any,
        allow_cache_entry_mutation: bool = False,
        storage: SwapStorage | None = None,
    ) -> tuple[Any, Any]:
        """As torch's, with MUST_SWAP; in-place operators always run again, and saved draws keep their place.

        Untested on hardware: MUST_SWAP's copies on a side stream, and the generator of an accelerator.
        """
        from hyper_parallel.platform.torch.selective import selective_contexts

        return selective_contexts(
            policy_fn_or_list, allow_cache_entry_mutation, storage
        )

    def async_save_on_cpu(
        self,
        policy_fn: Callable[[Any], bool] | None = None,
        spared: Iterable[Any] = (),
        storage: SwapStorage | None = None,
    ) -> SwapToHost:
        """Untested on hardware: copies on a side stream, into pinned memory."""
        return _swap_to_host(policy_fn, spared, storage)


class Wrapper(nn.Module):
    """A module that runs another one differently and otherwise passes for it: names, attributes, indexing, state."""

    def __init__(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise coded(
                ValueError,
                "HP136",
                f"{type(self).__name__}: expected a torch.nn.Module to wrap, got {type(module).__name__}",
            )
        super().__init__()
        self.add_module(INNER, module)
        self.train(module.training)
        self.register_load_state_dict_post_hook(_restore_names)

    @property
    def inner(self) -> Any:
        return self.__dict__["_modules"][INNER]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if INNER not in self.__dict__.get("_modules", {}):
                raise  # half built, as while unpickling
            return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What the wrapped module owns is set there, so that ``wrapper.weight = p`` does not hide the real one."""
        inner = self.__dict__.get("_modules", {}).get(INNER)
        if (
            inner is not None
            and name not in self.__dict__
            and not hasattr(type(self), name)
            and _owns(inner, name)
        ):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)

    def _keep(self, **fields: Any) -> None:
        """Sets what is the wrapper's own, also where a wrapper inside has fields of the same names."""
        vars(self).update(fields)

    def __getitem__(self, key: Any) -> Any:
        return self.inner[key]

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)

    def __bool__(self) -> bool:
        return bool(
            self.inner
        )  # else a module without a length could not be tested for truth

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """The wrapper and the wrapped module share one name; torch derives all names of parameters from this."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        yield from self.inner.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.state_dict(*args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        # Torch goes on to load the child under "<prefix>_wrapped_module."; the reports are put right in the post hook.
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}{INNER}.{key[len(prefix) :]}"] = state_dict.pop(key)
        self.__dict__["_load_errors"] = error_msgs
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )


def _restore_names(module: nn.Module, incompatible_keys: Any) -> None:
    errors = module.__dict__.pop("_load_errors", [])
    for names in (
        incompatible_keys.missing_keys,
        incompatible_keys.unexpected_keys,
        errors,
    ):
        names[:] = [name.replace(f"{INNER}.", "") for name in names]


def _owns(module: nn.Module, name: str) -> bool:
    own = any(
        name in names
        for names in (
            vars(module),
            module._parameters,
            module._buffers,
            module._modules,
        )
    )
    return own or (isinstance(module, Wrapper) and _owns(module.inner, name))


class CheckpointWrapper(Wrapper):
    """Runs the module under ``checkpoint_fn(module, *args, **kwargs)``; by default torch's, without reentrance."""

    def __init__(
        self,
        module: nn.Module,
        checkpoint_fn: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(module)
        if checkpoint_fn is not None and not callable(checkpoint_fn):
            raise coded(
                ValueError,
                "HP136",
                f"ckpt_wrapper: checkpoint_fn must be a function or None, got {checkpoint_fn!r}",
            )
        function = checkpoint_fn or torch_checkpoint.checkpoint
        is_torchs = function is torch_checkpoint.checkpoint
        if is_torchs:
            options.setdefault("use_reentrant", False)
        self._keep(_is_torchs=is_torchs, _run=functools.partial(function, **options))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs or not self._is_torchs:
            return self._run(self.inner, *args, **kwargs)
        # As positions: torch's own keywords cannot clash with the module's, and reentrance sees every tensor.
        names = tuple(kwargs)
        call = functools.partial(_call_by_position, self.inner, names)
        return self._run(call, *args, *kwargs.values())


def _call_by_position(module: nn.Module, names: tuple[str, ...], *values: Any) -> Any:
    count = len(values) - len(names)
    return module(*values[:count], **dict(zip(names, values[count:], strict=True)))


class SwapWrapper(Wrapper):
    """Runs the module with its saved activations in host memory; its parameters and buffers stay on the device."""

    def __init__(
        self,
        module: nn.Module,
        policy_fn: Callable[[Any], bool] | None = None,
        swap_fn: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(module)
        # A bad policy is refused here, not in the first forward.
        _swap_to_host(policy_fn)
        self._keep(_policy_fn=policy_fn, _swap_fn=swap_fn)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._swap_fn is not None:
            return self._swap_fn(self.inner, *args, **kwargs)
        with self._context():
            return self.inner(*args, **kwargs)

    def _context(self) -> AbstractContextManager[Any]:
        kept = itertools.chain(self.inner.parameters(), self.inner.buffers())
        return _swap_to_host(self._policy_fn, kept)


def _swap_to_host(
    policy_fn: Callable[[Any], bool] | None,
    kept: Iterable[Any] = (),
    storage: SwapStorage | None = None,
) -> SwapToHost:
    # Imported here, so that choosing the platform stays light.
    from hyper_parallel.platform.torch.swap import SwapToHost

    return SwapToHost(policy_fn, kept, storage=storage)
