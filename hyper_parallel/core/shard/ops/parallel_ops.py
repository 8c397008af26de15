# SPDX-License-Identifier: Apache-2.0
"""Operators that users add: a rule in one line, or methods that say what happens to layouts.

class Swiglu(DistributedOp):
    rule = pointwise(2)

Swiglu("swiglu")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard.local_call import call_on_shards
from hyper_parallel.core.shard.ops.operator import operator
from hyper_parallel.core.shard.rule import Rule
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


class DistributedOp:
    """What an operator does to distributed tensors, registered under its name when it is made.

    Give ``rule``: a Rule, or its text (then nothing is linear); ``parameters`` names the arguments where the rule
    refers to some. Or override ``infer_layout`` and, where a shard needs another function, ``get_expand_impl``. Or, to
    take the arguments apart yourself, ``preprocess(args, kwargs)`` -> (local_args, local_kwargs, cache_values), and
    then ``infer_layout(cache_values)`` and ``get_expand_impl(func, infer_result, cache_values)``.
    """

    rule: Rule | str | None = None
    parameters: str | None = None
    preprocess: Callable[..., Any] | None = None

    def __init__(self, op_name: str) -> None:
        self.op_name = op_name
        if self.rule is None:
            operator(op_name, "*args", direct=self._run)
            return
        rule = Rule(self.rule) if isinstance(self.rule, str) else self.rule
        count = len(rule.notation.operands)
        names = self.parameters or ", ".join(
            [*(f"operand{i}" for i in range(count)), "*others"]
        )
        operator(op_name, names, rule)

    def infer_layout(self, layouts: Any, extra_args: Any = None) -> Any:  # noqa: ARG002
        """The layout of the result, or of every result.

        ``layouts``: for each positional argument its layout, None for what is no distributed tensor; ``extra_args``:
        the arguments that are no distributed tensors.
        """
        raise coded(
            NotImplementedError,
            "HP318",
            f"{self.op_name}: {type(self).__name__} must give a rule or define infer_layout()",
        )

    def get_expand_impl(
        self,
        func: Any,  # noqa: ARG002
        output_layout: Any,  # noqa: ARG002
        layouts: Any,  # noqa: ARG002
        extra_args: Any = None,  # noqa: ARG002
    ) -> Any:
        """What to call on the shards instead of ``func``; None to call it."""
        return None

    def _run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.preprocess is not None:
            return self._run_preprocessed(func, args, kwargs)
        layouts = tuple(
            arg.layout if isinstance(arg, DTensor) else None for arg in args
        )
        extra = [arg for arg in args if not isinstance(arg, DTensor)]
        results = self.infer_layout(layouts, extra)
        function = self.get_expand_impl(func, results, layouts, extra) or func
        taken = [layout for layout in layouts if layout is not None]
        taken += [
            value.layout for value in kwargs.values() if isinstance(value, DTensor)
        ]
        return call_on_shards(self.op_name, function, args, kwargs, taken, results)

    def _run_preprocessed(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        assert self.preprocess is not None
        local_args, local_kwargs, cache_values = self.preprocess(args, kwargs)
        results = self.infer_layout(cache_values)
        function = self.get_expand_impl(func, results, cache_values) or func
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, DTensor)]

        def call(*shards: Any) -> Any:
            # A shard that preprocess() took is replaced by the one whose gradient comes back right.
            routed = {
                id(t.to_local()): shard
                for t, shard in zip(tensors, shards, strict=True)
            }
            taken = platform.apply_to_tensors(
                lambda x: routed.get(id(x), x), (tuple(local_args), dict(local_kwargs))
            )
            return function(*taken[0], **taken[1])

        return call_on_shards(
            self.op_name, call, tensors, {}, [t.layout for t in tensors], results
        )
