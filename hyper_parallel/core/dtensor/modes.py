# SPDX-License-Identifier: Apache-2.0
"""Contexts that change how operators treat implicit redistribution, missing rules and plain tensors, per thread.

with explicit():                  an implicit redistribution raises
with strict():                    an operator without a rule raises (HYPER_PARALLEL_STRICT=1 for the whole process)
with implicit_replication():      a plain tensor mixed with distributed ones counts as replicated
with SkipDTensorDispatch():       operators run on the shards
with loss_parallel():             cross_entropy takes plain targets and moves no scores (in core.tensor_parallel)
with attention_method("ring"):    attention on a sharded sequence passes keys on (in core.context_parallel)
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from hyper_parallel.platform import get_platform

HYPER_PARALLEL_STRICT = "HYPER_PARALLEL_STRICT"


class Override(NamedTuple):
    """What holds for one operator inside a context such as ``loss_parallel()``.

    ``place_plain``: of the arguments by name, the plain tensors among them, by their ids, as distributed ones.
    ``keeps_layouts``: an operand that would have to be redistributed is an error.
    ``call``: of the arguments by name, the result, in place of what the rule gives; NotImplemented leaves it to the
    rule. Only operators that say so can be called in another way.
    """

    place_plain: Callable[..., Mapping[int, Any]] | None = None
    keeps_layouts: bool = False
    call: Callable[..., Any] | None = None


class Modes(threading.local):
    """What holds in this thread."""

    def __init__(self) -> None:
        self.strict = os.environ.get(HYPER_PARALLEL_STRICT, "").lower() not in (
            "",
            "0",
            "false",
            "no",
        )
        self.explicit = False
        self.replicate_plain = False
        self.skip: frozenset[str] | None = (
            None  # the operators that are not skipped; None where nothing is
        )
        self.overrides: Mapping[
            str, Override
        ] = {}  # by operator; the innermost context wins


MODES = Modes()


@contextmanager
def _set(name: str, value: Any) -> Iterator[None]:
    before = getattr(MODES, name)
    setattr(MODES, name, value)
    try:
        yield
    finally:
        setattr(MODES, name, before)


def capture_modes() -> Callable[[], Any]:
    """Makes contexts in which holds, on any thread, what holds here now."""
    captured = dict(vars(MODES))

    @contextmanager
    def restored() -> Iterator[None]:
        before = dict(vars(MODES))
        vars(MODES).update(captured)
        try:
            yield
        finally:
            vars(MODES).update(before)

    return restored


def override(name: str, how: Override) -> Any:
    """A context in which one operator is treated differently."""
    return _set("overrides", {**MODES.overrides, name: how})


def strict(on: bool = True) -> Any:
    """A context in which an operator without a rule raises instead of running on full tensors."""
    return _set("strict", on)


def explicit(on: bool = True) -> Any:
    """A context in which an operator that needs another layout of an operand raises instead of redistributing it."""
    return _set("explicit", on)


def implicit_replication(on: bool = True) -> Any:
    """A context in which a plain tensor mixed with distributed ones counts as replicated."""
    return _set("replicate_plain", on)


class SkipDTensorDispatch:
    """A context in which operators run on the shards and return plain tensors, except those in ``no_skip``.

    ``no_skip``: names of operators, or functions of the framework.
    """

    def __init__(self, no_skip: Iterable[Any] | None = None) -> None:
        platform = get_platform()
        names = (
            name if isinstance(name, str) else platform.op_name_of(name).name
            for name in no_skip or ()
        )
        self._no_skip = frozenset(names)
        self._stack: list[frozenset[str] | None] = []

    def __enter__(self) -> SkipDTensorDispatch:
        self._stack.append(MODES.skip)
        MODES.skip = self._no_skip
        return self

    def __exit__(self, *exc: object) -> None:
        MODES.skip = self._stack.pop()
