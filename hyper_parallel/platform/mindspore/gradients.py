# SPDX-License-Identifier: Apache-2.0
"""Gradients on MindSpore: running backward, what it does with leaves, and the norms that clipping needs.

Where the tape runs backward, a leaf's gradient is its ``_grad``; ``value_and_grad`` returns gradients instead.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import mindspore
from mindspore import Parameter, Tensor, mint

from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.mindspore import private
from hyper_parallel.platform.mindspore.cpu.accumulation import contiguous_gradients
from hyper_parallel.platform.mindspore.cpu.empty_shards import kernels
from hyper_parallel.platform.mindspore.cpu.empty_shards.tensor import (
    call as call_guarded,
)
from hyper_parallel.platform.platform import Platform


class _Deferred:
    """A gradient that is filled in when backward ends."""

    def __init__(self, value: Any, sum_now: Callable[[], Any]) -> None:
        self.value = value
        self.sum_now = sum_now


class _TakeDeferred:
    """A hook on a leaf: if its gradient has been added to others, which cannot be filled in later, it is summed now."""

    def __call__(self, gradient: Any) -> Any:
        deferred = _current_backward().deferred.pop(self, [])
        pointers = [one.value.data_ptr() for one in deferred]
        if not deferred or pointers == [gradient.data_ptr()]:
            return None
        before = [one.value.copy() for one in deferred]  # a sum may be written there
        for one, part in zip(deferred, before, strict=True):
            gradient = gradient + (one.sum_now() - part)
        return gradient


class _Backward:
    """What waits in one backward: calls for its end, and gradients for the hooks of their leaves."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self.deferred: dict[_TakeDeferred, list[_Deferred]] = {}


class _Backwards(threading.local):
    """The backwards of this thread by number: those that run, one within another, and those that failed."""

    def __init__(self) -> None:
        self.by_number: dict[int, _Backward] = {}


_BACKWARDS = _Backwards()


def _backward_number() -> int:
    return int(private.executor().get_current_autodiff_engine_id())


def _current_backward() -> _Backward:
    number = _backward_number()
    backward = _BACKWARDS.by_number.get(number)
    if backward is None:
        backward = _BACKWARDS.by_number[number] = _Backward()
        # MindSpore drops the callbacks of a failed backward when the next one begins, and does not hold the GIL then.
        # The process would abort if that freed anything, so it gets a function that lives on.
        private.executor().queue_backward_final_callback(_end_backward)
    return backward


def _end_backward() -> None:
    for call in _BACKWARDS.by_number.pop(_backward_number()).calls:
        call()


class Gradients(Platform):
    """The part of the contract that is about gradients as a whole."""

    def no_grad(self) -> Any:
        return private.no_grad()()

    def recording(self, on: bool) -> Any:
        """There is no way to record inside ``no_grad()``: it is as outside."""
        return nullcontext() if on else self.no_grad()

    @contextmanager
    def tape(self) -> Iterator[None]:
        executor = private.executor()
        was_on = executor.grad_flag()
        executor.set_grad_flag(True)
        try:
            yield
        finally:
            executor.set_grad_flag(was_on)

    def _run_backward(
        self, tensors: Sequence[Any], gradients: Sequence[Any], keep_graph: bool
    ) -> None:
        with contiguous_gradients(tensors):
            private.run_backward()(
                tuple(tensors), tuple(gradients), keep_graph, False, (), True
            )

    def saved_tensors(
        self, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]
    ) -> AbstractContextManager[Any]:
        return mindspore.saved_tensors_hooks(pack, unpack)

    def gradients(
        self, function: Callable[..., Any], inputs: Sequence[Any]
    ) -> list[Any]:
        executor = private.executor()
        was_on = executor.grad_flag()
        leaves = [
            self.detach(x) for x in inputs
        ]  # which the framework marks, as those that got a gradient
        raised: list[BaseException] = []

        def closed(*given: Any) -> Any:
            """An error would leave the graph open: it would be a part of the next one, in which x[i] fails."""
            try:
                return function(*given)
            except BaseException as error:  # noqa: BLE001 - it is raised below
                raised.append(error)
                return given[0] * 1

        try:
            found = mindspore.grad(closed, grad_position=tuple(range(len(inputs))))(
                *leaves
            )
        except BaseException:
            executor.clear_res()  # the same for an error in backward; what tapes have recorded stays
            if not raised:  # else the graph may be gone already
                raise
        finally:
            executor.set_grad_flag(was_on)  # which grad() turns off
        if raised:
            raise raised[0]
        return list(found) if isinstance(found, (list, tuple)) else [found]

    def use_leaf(self, leaf: Any) -> Any:
        # A gradient that two leaves get is copied for the second, for which there is no kernel on a CPU.
        return leaf * 1 if self.is_recorded(leaf) else leaf

    def is_recording_disabled(self) -> bool:
        return not private.executor().enable_grad()

    def is_recorded(self, tensor: Any) -> bool:
        # Integers have no gradient, though MindSpore would send one through them, where they have elements.
        is_wanted = private.requires_grad(tensor) and bool(
            private.executor().requires_grad()
        )
        return is_wanted and kernels.has_gradient(tensor)

    def call_where_empty(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return call_guarded(func, args, kwargs or {})

    def keep_in_graph(self, result: Any, operands: Sequence[Any]) -> Any:
        return kernels.keep_in_graph(
            result, [x for x in operands if self.is_recorded(x)]
        )

    def can_defer_gradient(self, leaf: Any) -> bool:
        # What is added to an earlier gradient is read at once.
        return leaf._grad is None and all(
            isinstance(hook, _TakeDeferred) for hook in leaf.hooks()
        )

    def defer_gradient(
        self, leaf: Any, part: Any, sum_now: Callable[[], Any]
    ) -> tuple[Any, Callable[[Any], None]]:
        # MindSpore hands a gradient on as it is, so its memory may be filled later.
        value = self.full_like(leaf, 0) if part is None else self.clone(part)
        deferred = _Deferred(value, sum_now)
        hook = next(iter(leaf.hooks()), None)
        if hook is None:
            hook = _TakeDeferred()
            leaf.register_hook(hook)
        _current_backward().deferred.setdefault(hook, []).append(deferred)
        return deferred.value, functools.partial(self._complete, deferred)

    def _complete(self, deferred: _Deferred, gradient: Any) -> None:
        self.copy_into(deferred.value, gradient)

    def forget_gradient(self, leaf: Any) -> None:
        leaf._grad = None

    def accumulate_gradient(self, leaf: Any, gradient: Any) -> None:
        leaf._grad = gradient if leaf._grad is None else leaf._grad + gradient

    def backward_number(self) -> int:
        return _backward_number()

    def forget_failed_backwards(self) -> None:
        if _BACKWARDS.by_number and _backward_number() < 0:  # outside of all
            _BACKWARDS.by_number.clear()

    def after_backward(self, call: Callable[[], None]) -> None:
        def call_in_backward() -> None:
            with self.in_backward():
                call()

        _current_backward().calls.append(call_in_backward)

    def before_backward_of(
        self, outputs: Sequence[Any], call: Callable[[], None]
    ) -> None:
        def run(_: Any) -> None:
            with self.in_backward():
                call()

        for output in outputs:
            output.register_hook(run)

    def after_backward_to(self, tensor: Any, call: Callable[[], None]) -> Any:
        def run(_: Any) -> None:
            with self.in_backward():
                call()

        alias = tensor * 1
        alias.register_hook(run)
        return alias

    def gradient_of(self, leaf: Any) -> Any:
        return leaf._grad

    def _gradient_norm(
        self,
        gradients: Sequence[Any],
        parameters: Sequence[Any],
        norm_type: float,
        foreach: bool | None,  # noqa: ARG002 - there is one way
    ) -> Any:
        return _norm_of(gradients, norm_type, _widest(parameters))

    def _norm_of_norms(self, norms: Sequence[Any], norm_type: float) -> Any:
        return _norm_of(norms, norm_type, _widest(norms))

    def _scale_gradients(
        self,
        gradients: Sequence[Any],
        max_norm: float,
        total: Any,
        foreach: bool | None,  # noqa: ARG002 - there is one way
    ) -> None:
        factor = mint.clamp(max_norm / (total + 1e-6), max=1.0)
        # Two parameters may have got one and the same gradient, which must not be scaled twice.
        distinct = {self.memory_key(gradient): gradient for gradient in gradients}
        for gradient in distinct.values():
            self.copy_into(gradient, gradient * factor.astype(gradient.dtype))

    def _check_clippable(self, param: Any) -> None:
        if not isinstance(param, Parameter) and not private.requires_grad(param):
            raise coded(
                ValueError,
                "HP135",
                f"clip_grad_norm_: a tensor of shape {tuple(param.shape)} is no parameter and gets no gradient; for "
                "gradients themselves, say to which parameters they belong: zip(parameters, gradients)",
            )


def _widest(tensors: Iterable[Any]) -> Any:
    is_wide = any(tensor.dtype == mindspore.float64 for tensor in tensors)
    return mindspore.float64 if is_wide else mindspore.float32


def _norm_of(tensors: Sequence[Any], norm_type: float, dtype: Any) -> Any:
    """The norm of all elements."""
    parts = [
        mint.abs(tensor.astype(dtype)) for tensor in tensors if 0 not in tensor.shape
    ]
    if not parts:
        return Tensor(0.0, dtype)
    if math.isinf(norm_type):
        return mint.max(mint.cat([mint.max(part).reshape(1) for part in parts]))
    powers = [mint.sum(mint.pow(part, norm_type)).reshape(1) for part in parts]
    return mint.pow(mint.sum(mint.cat(powers)), 1 / norm_type)
