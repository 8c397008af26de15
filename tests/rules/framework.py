# SPDX-License-Identifier: Apache-2.0
"""The framework in use under PyTorch's names: the calls of the cases are written once, for PyTorch and for MindSpore.

On MindSpore a function is what the platform calls an operator of that name, a dtype is MindSpore's, and a name that
MindSpore does not have can be mentioned, but not called. Methods are MindSpore's own; where it has none of that name,
or one with other arguments, ``its(x).flip(0, 1)`` is the platform's function.
"""

import functools
import warnings
from contextlib import contextmanager, nullcontext

from hyper_parallel import DTensor
from hyper_parallel.core.dtensor.collectives import gradient_layout
from hyper_parallel.core.dtensor.modes import strict
from hyper_parallel.platform import PlatformType, get_platform

IS_TORCH = get_platform().platform_type is PlatformType.PYTORCH


@contextmanager
def unruled_is_an_error():
    """No warnings, and rules for everything; of MindSpore's operators some run on whole tensors."""
    with warnings.catch_warnings(), strict() if IS_TORCH else nullcontext():
        warnings.simplefilter("error" if IS_TORCH else "ignore")
        yield


class AbsentOperatorError(Exception):
    """MindSpore has no operator of this name."""


if IS_TORCH:
    import torch
    import torch.nn.functional as F  # noqa: N812 - everyone's name for it

    torch.set_num_threads(
        1
    )  # tensors so small are not worth more, and convolutions wait for cores that others use

    def function_called(name):
        """The function of PyTorch that arrives at a distributed tensor under that name."""
        found = [
            getattr(room, name, None)
            for room in (F, torch, torch.special, torch.Tensor)
        ]
        return next(
            one
            for one in found
            if callable(one) and get_platform().op_name_of(one).name == name
        )

    def has_operator(name):
        """Whether this version of PyTorch has the operator; of a removed one a function that raises may be left."""
        return hasattr(torch.ops.aten, name)

    def its(x):
        """What has the methods of a tensor."""
        return x

    def detached(x):
        """The tensor without its history."""
        return x.detach()

    def real(x):
        """The real part."""
        return x.real

    def gradients(function, leaves):
        """Those of a function's result, by the leaves; None where there is none."""
        total = function(*leaves)
        if isinstance(total, torch.Tensor):
            total.backward()
        return [leaf.grad for leaf in leaves]

    def weight_of(result, rng):
        """Random weights for the sum that is differentiated; None where nothing is."""
        if not result.requires_grad:
            return None
        return torch.tensor(rng.standard_normal(result.shape)) * (
            2 - 1j if result.is_complex() else 1
        )

    def weighted(found, weights):
        """The sum of the results by their weights."""
        return sum(
            (y * weight).sum().real
            for y, weight in zip(found, weights, strict=True)
            if weight is not None
        )

    def same(mine, true, told, equal_nan=True):
        """Asserts that two plain tensors are."""
        if mine.dtype != true.dtype or not torch.equal(
            mine, true
        ):  # most are, and assert_close costs ten times as much
            how = {"rtol": 1e-9, "atol": 1e-9, "equal_nan": equal_nan}
            torch.testing.assert_close(mine, true, msg=lambda m: f"{told}: {m}", **how)
else:
    import at_once  # noqa: F401 - for what it does
    import mindspore
    import numpy as np
    from mindspore import mint

    # What the operators of functions are called that have another name than they.
    SPELLED = {"nn.functional.unfold": "im2col", "nn.functional.fold": "col2im"}

    class _Absent:
        """Something that PyTorch has and MindSpore does not."""

        def __init__(self, path):
            self.path = path

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return _Absent(f"{self.path}.{name}")

        def __call__(self, *args, **kwargs):
            raise AbsentOperatorError(self.path)

    class _Room:
        """A module of PyTorch, with what MindSpore has of it."""

        def __init__(self, path, **own):
            self._path = path
            vars(self).update(own)

        def __getattr__(self, name):
            if isinstance(dtype := getattr(mindspore, name, None), mindspore.Type):
                return dtype
            room = self._path.removeprefix("torch").removeprefix(".")
            for spelled in (f"{room}_{name}", SPELLED.get(f"{room}.{name}", name)):
                try:
                    return get_platform().operator(spelled)
                except AttributeError:
                    continue
            return _Absent(f"{self._path}.{name}")

    def function_called(name):
        return getattr(torch, name)

    def has_operator(name):
        """What MindSpore does not have is on a page of its own: outcomes.py."""
        return True

    class its:  # noqa: N801 - it is called like a function
        """A tensor with PyTorch's methods, each of them the platform's function of that name."""

        def __init__(self, x):
            self.x = x

        def __getattr__(self, name):
            return functools.partial(getattr(torch, name), self.x)

    def detached(x):
        """The tensor without its history."""
        return mindspore.ops.stop_gradient(x)

    def real(x):
        """The real part."""
        return get_platform().operator("real")(x)

    def gradients(function, leaves):
        """Those of a function's result, by the leaves; None where there is none."""
        wanted = [
            i
            for i, leaf in enumerate(leaves)
            if leaf.is_floating_point() or leaf.is_complex()
        ]
        is_constant = False

        def total(*given):
            nonlocal is_constant
            of = dict(zip(wanted, given, strict=True))
            found = function(*(of.get(i, leaf) for i, leaf in enumerate(leaves)))
            is_constant = not isinstance(found, mindspore.Tensor)
            # MindSpore wants to see every leaf.
            return sum(mint.real(t).sum() * 0 for t in given) if is_constant else found

        made = [None] * len(leaves)
        if not wanted:
            function(*leaves)
            return made
        for i, gradient in zip(
            wanted,
            get_platform().gradients(total, [leaves[i] for i in wanted]),
            strict=True,
        ):
            made[i] = None if is_constant else like_its_leaf(gradient, leaves[i])
        return made

    def like_its_leaf(gradient, leaf):
        """Distributed as its leaf is; MindSpore gives this rank's shard."""
        if not isinstance(leaf, DTensor):
            return gradient
        return DTensor(gradient, gradient_layout(leaf.layout), leaf.shape)

    def weight_of(result, rng):
        """Random weights for the sum that is differentiated; None where nothing is."""
        if not (result.is_floating_point() or result.is_complex()):
            return None
        drawn = mindspore.Tensor(rng.standard_normal(result.shape))
        return drawn if result.is_complex() else drawn.astype(result.dtype)

    def weighted(found, weights):
        """The sum of the results by their weights; MindSpore has no gradient of a complex product."""
        pairs = [
            (y, weight)
            for y, weight in zip(found, weights, strict=True)
            if weight is not None
        ]
        return sum(
            (
                (2 * mint.real(y) + mint.imag(y)).astype(w.dtype) * w
                if y.is_complex()
                else y * w
            ).sum()
            for y, w in pairs
        )

    def same(mine, true, told, equal_nan=True):
        """Asserts that two plain tensors are."""
        assert mine.dtype == true.dtype, told
        accuracy = 1e-5 if mine.dtype == mindspore.float64 else 1e-4
        how = {
            "rtol": accuracy,
            "atol": accuracy,
            "equal_nan": equal_nan,
            "err_msg": told,
        }
        np.testing.assert_allclose(mine.asnumpy(), true.asnumpy(), **how)

    F = _Room("torch.nn.functional")
    torch = _Room(
        "torch",
        nn=_Room("torch.nn", functional=F),
        linalg=_Room("torch.linalg"),
        special=_Room("torch.special"),
        fft=_Room("torch.fft"),
        ops=_Absent("torch.ops"),
        embedding=_Absent("torch.embedding"),  # which has the table first
        Tensor=mindspore.Tensor,
        manual_seed=get_platform().manual_seed,
    )

__all__ = [
    "IS_TORCH",
    "AbsentOperatorError",
    "F",
    "detached",
    "function_called",
    "gradients",
    "has_operator",
    "its",
    "real",
    "same",
    "torch",
    "unruled_is_an_error",
    "weight_of",
    "weighted",
]
