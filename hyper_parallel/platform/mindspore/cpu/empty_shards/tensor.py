# SPDX-License-Identifier: Apache-2.0
"""Functions on plain tensors some of which have no elements: every operator that they run is given what is right then.

MindSpore's kernels leave results of empty tensors unset, and so do those of backward. A function that is written for
any framework does not know; so the tensors that it gets are of a class that is told of every operator, by
``__fallback__``, and each of them runs as ``kernels`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mindspore import Tensor

from hyper_parallel.platform.containers import tree_map
from hyper_parallel.platform.mindspore import private
from hyper_parallel.platform.mindspore.operators import function, operation


class Guarded(Tensor):
    """A plain tensor whose operators are guarded; it has the plain one's memory, and its place in the graph."""

    _plain: Any
    answers_for_plain = (
        True  # is asked for an operator even where a plain tensor is the first operand
    )

    def __new__(cls, plain: Any) -> Guarded:
        made = Tensor._make_subclass(cls, plain)
        made._plain = plain
        return made

    def __init__(self, *_: Any) -> None:
        """Nothing is left to do: the framework's own would copy."""

    def __fallback__(
        self,
        func: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        run, given, named = operation(func, args, kwargs)
        given, named = tree_map(unguarded, (tuple(given), dict(named)))
        with private.no_fallback()():
            return tree_map(guarded, run(*given, **named))

    def __getitem__(self, index: Any) -> Any:
        return guarded(function("getitem")(self._plain, tree_map(unguarded, index)))

    def __setitem__(self, index: Any, value: Any) -> Any:
        function("setitem")(self._plain, tree_map(unguarded, index), unguarded(value))
        private.base_tensor().data.__set__(
            self, self._plain
        )  # which may have got other memory
        return self

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def contiguous(self) -> Any:
        """The same elements without gaps between them."""
        return guarded(self._plain.contiguous())


def guarded(value: Any) -> Any:
    """A plain tensor in the class whose operators are guarded; anything else as it is."""
    return Guarded(value) if type(value) is Tensor else value


def unguarded(value: Any) -> Any:
    """The plain tensor again."""
    return value._plain if isinstance(value, Guarded) else value


def call(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """``func(*args, **kwargs)``, where operands and results may have no elements."""
    args, kwargs = tree_map(guarded, (tuple(args), dict(kwargs)))
    return tree_map(unguarded, func(*args, **kwargs))
