# SPDX-License-Identifier: Apache-2.0
"""Gradients as a whole: what backward does with leaves, and clipping by the total norm.

Where the tape runs backward, a leaf's gradient is its ``_grad``; ``value_and_grad`` returns gradients instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import mindspore
from mindspore import Parameter, Tensor, mint, nn

from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.mindspore import empty, guarded, private
from hyper_parallel.platform.mindspore.dtensor_base import DTensorBase
from hyper_parallel.platform.platform import Platform


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

    def is_recorded(self, tensor: Any) -> bool:
        # Integers have no gradient, though MindSpore would send one through them, where they have elements.
        is_wanted = private.requires_grad(tensor) and bool(
            private.executor().requires_grad()
        )
        return is_wanted and empty.has_gradient(tensor)

    def call_where_empty(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return guarded.call(func, args, kwargs or {})

    def tied(self, result: Any, operands: Sequence[Any]) -> Any:
        return empty.tied(result, [x for x in operands if self.is_recorded(x)])

    def accumulates_gradient(self, leaf: Any) -> bool:  # noqa: ARG002 - the framework does not tell who asks
        return False

    def accumulate_gradient(self, leaf: Any, gradient: Any) -> None:
        leaf._grad = gradient if leaf._grad is None else leaf._grad + gradient

    def backward_number(self) -> int:
        return 0

    def after_backward(self, call: Callable[[], None]) -> None:
        private.executor().queue_backward_final_callback(call)

    def clip_grad_norm_(
        self,
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,  # noqa: ARG002 - there is one way
    ) -> Any:
        """Scales gradients down to ``max_norm`` in place and returns the total norm before that.

        Gradients that ``value_and_grad`` returned come with their parameters, which say how they lie on the mesh:
        ``clip_grad_norm_(zip(parameters, gradients), max_norm)``.
        """
        max_norm, norm_type = float(max_norm), float(norm_type)
        if math.isnan(max_norm) or max_norm < 0:
            raise coded(
                ValueError,
                "HP135",
                f"clip_grad_norm_: max_norm must be a number of at least 0, got {max_norm}",
            )
        if math.isnan(norm_type) or norm_type <= 0:
            raise coded(
                ValueError,
                "HP135",
                f"clip_grad_norm_: norm_type must be positive or inf, got {norm_type}",
            )
        # A parameter without a gradient takes part as well: another rank may have one for its shard.
        spread: dict[tuple[int, ...], list[_Held]] = {}
        for held in _all_held(parameters):
            if held.grad is not None or private.requires_grad(held.param):
                spread.setdefault(held.ranks, []).append(held)
        norms = {ranks: _norm(pieces, norm_type) for ranks, pieces in spread.items()}
        # Sorted by ranks, so that groups with common members never wait for each other.
        for ranks in sorted(ranks for ranks in norms if ranks):
            gathered = self.all_gather_into_tensor(
                norms[ranks].reshape(1), self.create_group(ranks)
            )
            norms[ranks] = _norm_of([gathered], norm_type, gathered.dtype)
        total = _norm_of(
            [norm.reshape(1) for norm in norms.values()],
            norm_type,
            _widest(norms.values()),
        )
        if error_if_nonfinite and not math.isfinite(total.item()):
            raise coded(
                RuntimeError,
                "HP135",
                f"clip_grad_norm_: the norm of order {norm_type} is non-finite ({total.item()}), so the gradients "
                "cannot be clipped by it; with error_if_nonfinite=False they are scaled nevertheless",
            )
        factor = mint.clamp(max_norm / (total + 1e-6), max=1.0)
        gradients = [
            held.grad
            for pieces in spread.values()
            for held in pieces
            if held.grad is not None
        ]
        # Two parameters may have got one and the same gradient, which must not be scaled twice.
        for gradient in {
            self.memory_key(gradient): gradient for gradient in gradients
        }.values():
            self.copy_into(gradient, gradient * factor.astype(gradient.dtype))
        return total


class _Held(NamedTuple):
    """What this rank has of a parameter and its gradient, and the ranks that together have all of the gradient."""

    param: Any
    grad: Any
    ranks: tuple[int, ...]  # none if each has all of it


def _all_held(parameters: Any) -> list[_Held]:
    """What is meant by a module, a tensor or an iterable of tensors or of (tensor, its gradient), each tensor once."""
    if isinstance(parameters, nn.Cell):
        found: Iterable[Any] = parameters.get_parameters()
    else:
        found = [parameters] if isinstance(parameters, Tensor) else parameters
    unique: dict[int, _Held] = {}
    for item in found:
        held = (
            _held(*item)
            if isinstance(item, tuple) and len(item) == 2
            else _held(item, None)
        )
        unique.setdefault(id(held.param), held)
    return list(unique.values())


def _held(param: Any, grad: Any) -> _Held:
    for value in (param, *(() if grad is None else (grad,))):
        if not isinstance(value, Tensor):
            raise coded(
                TypeError,
                "HP135",
                "clip_grad_norm_: expected a module, a tensor, or an iterable of tensors or of pairs (parameter, "
                f"gradient), found {type(value).__name__} in it",
            )
    grad = param._grad if grad is None else grad
    if (
        grad is None
        and not isinstance(param, Parameter)
        and not private.requires_grad(param)
    ):
        raise coded(
            ValueError,
            "HP135",
            f"clip_grad_norm_: a tensor of shape {tuple(param.shape)} is no parameter and gets no gradient; for "
            "gradients themselves, say to which parameters they belong: zip(parameters, gradients)",
        )
    layout = next(
        (tensor.layout for tensor in (grad, param) if isinstance(tensor, DTensorBase)),
        None,
    )
    local, own = (
        x.to_local() if isinstance(x, DTensorBase) else x for x in (grad, param)
    )
    if isinstance(grad, DTensorBase) and grad.layout.is_partial():
        raise coded(
            ValueError,
            "HP135",
            f"clip_grad_norm_: the gradient of a parameter of shape {tuple(param.shape)} waits for a reduction, "
            f"{layout}; a norm needs the values: call reduce_partial() on it first",
        )
    if (
        local is not None
        and not isinstance(grad, DTensorBase)
        and local.shape != own.shape
    ):
        raise coded(
            ValueError,
            "HP135",
            f"clip_grad_norm_: a gradient of shape {tuple(local.shape)} is not that of a parameter of which this "
            f"rank has {tuple(own.shape)}",
        )
    ranks = (
        ()
        if layout is None
        else layout.mesh.ranks_along(axis for axes in layout.dim_axes for axis in axes)
    )
    return _Held(param, local, tuple(ranks) if len(ranks) > 1 else ())


def _norm(pieces: Sequence[_Held], norm_type: float) -> Any:
    """The norm of what this rank has; the parameters tell the dtype, so that the ranks agree on it."""
    gradients = [held.grad for held in pieces if held.grad is not None]
    return _norm_of(gradients, norm_type, _widest(held.param for held in pieces))


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
