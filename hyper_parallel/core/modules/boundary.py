# SPDX-License-Identifier: Apache-2.0
"""Module boundaries: what happens when a module is entered and left, in one fixed order of phases.

Example::

    handle = attach(module, "style", enter=shard_inputs, leave=gather_outputs)
    print(*attachments(module), sep="\n")
    handle.remove()

Entering a module runs its phases in the order of ``PHASES`` and leaving it in reverse, whatever the order of the
calls of ``attach``. The same holds for backward, where a module is entered at its outputs. Attachments of one phase
run in the order in which they were attached, both ways: a later one sees what an earlier one returned.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

PHASES = ("trace", "data axis", "gather parameters", "style", "user")

platform = get_platform()
_BOUNDARY = "_hyper_parallel_boundary"

Enter = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
Leave = Callable[[Any, Any], Any]
BeforeBackward = Callable[[Any, Any], Any]
AfterBackward = Callable[[Any, Any, Any], Any]
OnError = Callable[[Any], None]


class EndedEarly(Exception):  # noqa: N818 - no error: a call that has all that it was made for
    """Ends the calls of all modules that run, up to whoever catches it, with an output in place of theirs.

    Attachments with ``on_error``, which have something to end, run ``leave`` with this output.
    """

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


@dataclass(frozen=True, eq=False)
class Attachment:
    """What one phase does at a module's boundary; ``source`` is printed and says on whose behalf.

    ``wraps``: the arguments, by position or name, that ``enter`` turns into distributed tensors itself.
    """

    phase: str
    source: Any = ""
    enter: Enter | None = None
    leave: Leave | None = None
    before_backward: BeforeBackward | None = None
    after_backward: AfterBackward | None = None
    on_error: OnError | None = None
    wraps: frozenset[int | str] = frozenset()

    @property
    def events(self) -> list[str]:
        """The names of the events that it handles."""
        names = ("enter", "leave", "before_backward", "after_backward", "on_error")
        return [name for name in names if getattr(self, name) is not None]

    def __str__(self) -> str:
        source = f" {self.source}" if self.source else ""
        return f"{self.phase}:{source} ({', '.join(self.events)})"


@dataclass(frozen=True)
class AttachmentHandle:
    """Removes an attachment from its module; copies of the module keep theirs."""

    module: Any
    attachment: Attachment

    def remove(self) -> None:
        """Removes the attachment; does nothing if it is removed already."""
        boundary = _boundary_of(self.module)
        if boundary is not None:
            boundary.remove(self.module, self.attachment)


def attach(
    module: Any,
    phase: str,
    *,
    enter: Enter | None = None,
    leave: Leave | None = None,
    before_backward: BeforeBackward | None = None,
    after_backward: AfterBackward | None = None,
    on_error: OnError | None = None,
    source: Any = "",
    wraps: Collection[int | str] = (),
) -> AttachmentHandle:
    """Adds to what happens at a module's boundary, in one of the ``PHASES``; returns a handle with ``remove()``.

    ``enter(module, args, kwargs)`` returns None or new (args, kwargs); ``leave(module, output)`` None or a new output.
    ``before_backward(module, grad_outputs)`` and ``after_backward(module, grad_inputs, grad_outputs)`` return None or
    new gradients of the outputs and inputs. ``on_error(module)`` runs instead of ``leave`` if anything raises between
    them. If no input requires a gradient, ``after_backward`` runs as soon as those of the outputs are known.
    """
    if phase not in PHASES:
        raise coded(
            ValueError,
            "HP415",
            f"attach: unknown phase {phase!r}; expected one of {', '.join(map(repr, PHASES))}",
        )
    if phase == "trace" and on_error is not None:
        # It would have to run after the hooks of users, of which an error skips some.
        raise coded(
            ValueError,
            "HP415",
            "attach: the phase 'trace' only observes and has no on_error; use another phase",
        )
    attachment = Attachment(
        phase,
        source,
        enter,
        leave,
        before_backward,
        after_backward,
        on_error,
        frozenset(wraps),
    )
    boundary = _boundary_of(module)
    if boundary is None:
        boundary = _Boundary()
        # Not by setattr: a wrapper passes what it sets on to the module inside, which has a boundary of its own.
        vars(module)[_BOUNDARY] = boundary
    boundary.add(module, attachment)
    return AttachmentHandle(module, attachment)


def attachments(module: Any) -> tuple[Attachment, ...]:
    """Everything attached to the module itself, in the order in which entering it runs them."""
    boundary = _boundary_of(module)
    return () if boundary is None else boundary.attached


def call_being_entered() -> object | None:
    """A token of the call whose attachments are being entered now; None while forward runs, and outside of calls.

    Only calls of modules with an attachment that has ``on_error`` have one.
    """
    return _CALLS.entering


def arguments_wrapped_after(module: Any, phase: str) -> set[int | str]:
    """The arguments, by position or name, that attachments of later phases wrap themselves."""
    later = PHASES[PHASES.index(phase) + 1 :]
    return {
        argument
        for attachment in attachments(module)
        if attachment.phase in later
        for argument in attachment.wraps
    }


def _boundary_of(module: Any) -> _Boundary | None:
    boundary: _Boundary | None = vars(module).get(_BOUNDARY)
    return boundary


class _Boundary:
    """The attachments of one module, sorted once so that a call only walks tuples.

    The hooks of the framework find it through the module that they are called with. A copy of a module, which has
    the same hooks, therefore runs its own boundary.
    """

    def __init__(self) -> None:
        self.attached: tuple[Attachment, ...] = ()
        self.inner = _Order(())
        self.trace = _Order(())
        self._hooks: dict[str, tuple[Any, ...]] = {}
        self._is_copy = False

    def __deepcopy__(self, memo: Any) -> _Boundary:
        copied = _Boundary()
        copied._sort(self.attached)
        # The copied module has these hooks already, but there is no handle to remove them with.
        copied._hooks = dict.fromkeys(self._hooks, ())
        copied._is_copy = True
        return copied

    def add(self, module: Any, attachment: Attachment) -> None:
        """Adds an attachment, and hooks for the events that nothing has handled so far."""
        self._sort((*self.attached, attachment))
        self._hook(module)

    def remove(self, module: Any, attachment: Attachment) -> None:
        """Removes an attachment, and the hooks if it was the last one."""
        self._sort(tuple(one for one in self.attached if one is not attachment))
        if self.attached or self._is_copy:
            self._hook_trace(module)
            return
        for hooks in self._hooks.values():
            for hook in hooks:
                hook.remove()
        delattr(module, _BOUNDARY)

    def _sort(self, attached: tuple[Attachment, ...]) -> None:
        self.attached = tuple(sorted(attached, key=lambda one: PHASES.index(one.phase)))
        self.inner = _Order([one for one in self.attached if one.phase != "trace"])
        self.trace = _Order([one for one in self.attached if one.phase == "trace"])

    def _hook(self, module: Any) -> None:
        if self.inner.attached and "inner" not in self._hooks:
            self._hooks["inner"] = (
                platform.register_forward_pre_hook(
                    module, _enter_inner, with_kwargs=True
                ),
                platform.register_forward_hook(module, _leave_inner),
            )
        if self.inner.unwinds and "unwind" not in self._hooks:
            hook = platform.register_forward_hook(module, _unwind, always_call=True)
            self._hooks["unwind"] = (hook,)
        handles_before = any(one.before_backward for one in self.attached)
        if handles_before and "before_backward" not in self._hooks:
            hook = platform.register_full_backward_pre_hook(module, _before_backward)
            self._hooks["before_backward"] = (hook,)
        handles_after = any(one.after_backward for one in self.attached)
        if handles_after and "after_backward" not in self._hooks:
            hook = platform.register_full_backward_hook(module, _after_backward)
            self._hooks["after_backward"] = (hook,)
        self._hook_trace(module)

    def _hook_trace(self, module: Any) -> None:
        # A trace records what the caller passes and gets, outside of hooks that users registered themselves.
        if self._hooks.get("trace") == ():  # the hooks of a copy stay where they are
            return
        for hook in self._hooks.pop("trace", ()):
            hook.remove()
        if not self.trace.attached:
            return
        self._hooks["trace"] = (
            platform.register_forward_pre_hook(
                module, _enter_trace, prepend=True, with_kwargs=True
            ),
            platform.register_forward_hook(module, _leave_trace),
        )


class _Order:
    """Attachments by event, each in the order in which that event runs them."""

    def __init__(self, attached: Collection[Attachment]) -> None:
        self.attached = tuple(attached)
        outwards = sorted(attached, key=lambda one: -PHASES.index(one.phase))
        self.enter = [(one, one.enter) for one in attached if one.enter]
        self.leave = [(one, one.leave) for one in outwards if one.leave]
        self.before_backward = [
            one.before_backward for one in attached if one.before_backward
        ]
        self.after_backward = [
            one.after_backward for one in outwards if one.after_backward
        ]
        self.unwinds = any(one.on_error for one in attached)


class _Calls(threading.local):
    """The calls under way of modules with ``on_error``: which attachments were entered and not yet left."""

    def __init__(self) -> None:
        self.stack: list[tuple[Any, list[Attachment]]] = []
        self.entering: list[Attachment] | None = None


_CALLS = _Calls()


# --- hooks of the framework


def _enter_inner(module: Any, args: Any, kwargs: Any) -> Any:
    boundary = _boundary_of(module)
    if boundary is None:
        return None
    if not boundary.inner.unwinds:
        return _enter(boundary.inner, module, args, kwargs)
    entered: list[Attachment] = []
    _CALLS.stack.append((module, entered))
    _CALLS.entering = entered
    try:
        return _enter(boundary.inner, module, args, kwargs, entered)
    finally:
        _CALLS.entering = None


def _enter_trace(module: Any, args: Any, kwargs: Any) -> Any:
    boundary = _boundary_of(module)
    return None if boundary is None else _enter(boundary.trace, module, args, kwargs)


def _enter(
    order: _Order,
    module: Any,
    args: Any,
    kwargs: Any,
    entered: list[Attachment] | None = None,
) -> Any:
    for attachment, call in order.enter:
        changed = call(module, args, kwargs)
        if entered is not None:
            entered.append(attachment)
        if changed is not None:
            args, kwargs = changed
    return args, kwargs


def _leave_inner(module: Any, _: Any, output: Any) -> Any:
    boundary = _boundary_of(module)
    if boundary is None:
        return None
    entered = _find_call(module) if boundary.inner.unwinds else None
    return _leave(boundary.inner, module, output, entered)


def _leave_trace(module: Any, _: Any, output: Any) -> Any:
    boundary = _boundary_of(module)
    return None if boundary is None else _leave(boundary.trace, module, output)


def _leave(
    order: _Order,
    module: Any,
    output: Any,
    entered: list[Attachment] | None = None,
) -> Any:
    for attachment, call in order.leave:
        if entered is not None and attachment in entered:
            entered.remove(attachment)
        changed = call(module, output)
        if changed is not None:
            output = changed
    return output


def _unwind(module: Any, *_: Any) -> None:
    """Ends the call; after an error, undoes what was entered and not left."""
    entered = _find_call(module)
    if entered is None:
        return
    early = sys.exc_info()[1]
    if isinstance(early, EndedEarly):
        order = _Order([one for one in entered if one.on_error is not None])
        early.output = _leave(order, module, early.output, entered)
    _CALLS.stack.pop()
    _undo(module, entered)


def _find_call(module: Any) -> list[Attachment] | None:
    """The attachments entered by the current call of the module, which becomes the innermost call."""
    stack = _CALLS.stack
    if not any(running is module for running, _ in stack):
        return None
    while stack[-1][0] is not module:  # ended by what no hook sees: KeyboardInterrupt
        _undo(*stack.pop())
    return stack[-1][1]


def _undo(module: Any, entered: list[Attachment]) -> None:
    for attachment in reversed(entered):
        if attachment.on_error is not None:
            attachment.on_error(module)


def _before_backward(module: Any, gradients: Any) -> Any:
    boundary = _boundary_of(module)
    if boundary is None:
        return None
    changed = None
    for order in (boundary.trace, boundary.inner):
        for call in order.before_backward:
            new = call(module, gradients)
            if new is not None:
                changed = gradients = new
    return changed


def _after_backward(module: Any, into: Any, out: Any) -> Any:
    boundary = _boundary_of(module)
    if boundary is None:
        return None
    changed = None
    for order in (boundary.inner, boundary.trace):
        for call in order.after_backward:
            new = call(module, into, out)
            if new is not None:
                changed = into = new
    return changed
