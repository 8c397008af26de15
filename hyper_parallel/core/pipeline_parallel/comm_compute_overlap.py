# SPDX-License-Identifier: Apache-2.0
"""Runs a forward and a backward together: while one communicates, the other computes.

overlap = CommComputeOverlap()
dispatch, combine = overlap.wrap_dispatch(dispatch), overlap.wrap_combine(combine)      of every layer of experts
schedule = ScheduleDualPipeV(stages, 8, loss_fn=loss_fn, overlap=overlap)

    backward   combine, |                     | experts, dispatch, |                   | attention, combine, |
    forward             | attention, dispatch |                    | experts, combine  |                     | ...

A bar is a change of turns. It stands behind a communication, so that what was launched is under way while the other
side launches computations. Only one side runs at a time, and where the turns change is decided by the wrapped calls
alone: random numbers, collectives outside of the wrapped calls and the messages of a pipeline come in an order that is
the same in every run and on every rank with the same layers.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.modes import MODES
from hyper_parallel.core.pipeline_parallel.hook_coordinator import HookRole
from hyper_parallel.core.pipeline_parallel.micro_batches import tensors_of
from hyper_parallel.core.pipeline_parallel.wire import shard_of
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()

_SIDES = _FORWARD, _BACKWARD = "forward", "backward"


class CommComputeOverlap:
    """Runs a forward and a backward that take turns at the calls wrapped by it.

    All ranks of a group in which the wrapped calls communicate must run the same layers in the same pairs; numbers of
    layers may differ between the two sides. Without ``enabled``, ``run`` runs the forward, then the backward. A
    wrapped call that waits for its own communication, as collectives on a CPU do, leaves nothing to overlap.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._turns: _Turns | None = None
        self._hooks = _Hooks(self)

    def run(
        self, fwd_fn: Callable[[], Any], bwd_fn: Callable[[], Any]
    ) -> tuple[Any, Any]:
        """Runs both and returns what they return.

        The backward runs in a thread of its own. If one side raises, the other ends at its next wrapped call, and the
        error is raised here once both have ended.
        """
        if not self.enabled:
            return fwd_fn(), bwd_fn()
        if self._turns is not None:
            raise coded(
                RuntimeError,
                "HP495",
                "CommComputeOverlap.run: another run() of this overlap has not ended; give each its own overlap",
            )
        self._turns = _Turns()
        try:
            return self._turns.run(fwd_fn, bwd_fn)
        finally:
            self._turns = None

    def wrap_dispatch(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The function that sends tokens to their experts, between a layer's router and its experts."""
        return self._wrap(fn, "A", "B")

    def wrap_combine(
        self, fn: Callable[..., Any], is_last_layer: bool = False
    ) -> Callable[..., Any]:
        """The function that brings tokens back from their experts.

        With ``is_last_layer`` the turns do not change behind it: nothing follows that the other side could overlap.
        """
        return self._wrap(fn, "C", "" if is_last_layer else "D")

    def _wrap(
        self, fn: Callable[..., Any], before: str, behind: str
    ) -> Callable[..., Any]:
        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not self.enabled:
                return fn(*args, **kwargs)
            args, kwargs = self._pass_hook(before, (args, kwargs), "its arguments")
            output = fn(*args, **kwargs)
            return self._pass_hook(behind, output, "what it returns")

        return wrapped

    def _pass_hook(self, name: str, tree: Any, what: str) -> Any:
        """The structure, one tensor of which meets the other side, here and in backward."""
        if not name:
            return tree
        chosen = _choose_tensor(tree)
        if chosen is None:
            raise coded(
                TypeError,
                "HP495",
                f"CommComputeOverlap: expected a tensor in {what}, found none; wrap a function that takes and returns "
                "the tokens",
            )
        shard = platform.differentiable_sync_hook(shard_of(chosen), name, self._hooks)
        passed = shard
        if isinstance(chosen, DTensor):
            passed = DTensor(shard, chosen.layout, tuple(chosen.shape))
        return platform.apply_to_tensors(
            lambda tensor: passed if tensor is chosen else tensor, tree
        )


def _choose_tensor(tree: Any) -> Any:
    """The first tensor that backward comes to, else the first one."""
    tensors = tensors_of(tree)
    recorded = (one for one in tensors if platform.is_recorded(shard_of(one)))
    return next(recorded, tensors[0] if tensors else None)


class _Hooks:
    """A coordinator of the platform's hooks, which changes turns behind a communication."""

    COMM, COMPUTE = HookRole.COMM, HookRole.COMPUTE

    def __init__(self, overlap: CommComputeOverlap) -> None:
        self._overlap = overlap

    def is_enabled(self) -> bool:
        """Whether two sides run."""
        return self._overlap._turns is not None

    def notify_dispatched(self, role: str) -> None:
        """Changes nothing: the other side goes on at the next hook."""

    def rendezvous(self, role: str) -> None:
        """Before a communication a side keeps its turn; where it is to compute, the other side has its turn first."""
        turns = self._overlap._turns
        if turns is not None and role == self.COMPUTE:
            turns.change()


class _Turns:
    """Two sides, one of which runs at a time. The backward begins, with the adjoint of the last combine."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: str = _BACKWARD
        self._left = set(_SIDES)
        self._results: dict[str, Any] = {}
        self._error: BaseException | None = None  # the first one, which ends both sides
        self._random_start = platform.get_rng_states()
        self._random = dict.fromkeys(_SIDES, self._random_start)

    def run(
        self, fwd_fn: Callable[[], Any], bwd_fn: Callable[[], Any]
    ) -> tuple[Any, Any]:
        """Both sides; the forward stays in the caller's thread, with all that holds there."""
        is_recording = not platform.is_recording_disabled()
        prepared = functools.partial(
            _run_in_modes, is_recording, dict(vars(MODES)), bwd_fn
        )
        worker = threading.Thread(
            target=self._run_side, args=(_BACKWARD, prepared), daemon=True
        )
        worker.start()
        self._run_side(_FORWARD, fwd_fn)
        if self._error is None or isinstance(self._error, Exception):
            worker.join()  # after an interrupt nobody waits
        if self._error is not None:
            raise self._error
        self._restore_random()
        return self._results[_FORWARD], self._results[_BACKWARD]

    def change(self) -> None:
        """Lets the other side run until it changes turns, or has ended."""
        with self._changed:
            own = self._running
            if self._error is None and len(self._left) == 2:
                self._pass_turn(own)
                self._wait_for_turn(own)
            if self._error is not None:
                raise _make_ended(own, self._error) from self._error

    def _run_side(self, side: str, function: Callable[[], Any]) -> None:
        try:
            with self._changed:
                self._wait_for_turn(side)
            if self._error is None:
                self._results[side] = function()
        except BaseException as error:  # noqa: BLE001 - run() raises it
            self._error = self._error or error
        with self._changed:
            if self._running == side:  # unless it was interrupted while it waited
                self._pass_turn(side)
            self._left.discard(side)

    def _wait_for_turn(self, side: str) -> None:
        self._changed.wait_for(lambda: self._running == side)

    def _pass_turn(self, own: str) -> None:
        """Gives the turn to the other side, which goes on with its own random numbers."""
        (other,) = set(_SIDES) - {own}
        self._random[own] = platform.get_rng_states()
        if other in self._left:
            platform.set_rng_states(self._random[other])
            self._running = other
            self._changed.notify_all()

    def _restore_random(self) -> None:
        """Goes on as if the sides had run in turn, if only one of them has drawn random numbers."""
        has_drawn = _differ(self._random[_FORWARD], self._random_start)
        side = _FORWARD if has_drawn else _BACKWARD
        platform.set_rng_states(self._random[side])


def _run_in_modes(
    is_recording: bool, modes: Mapping[str, Any], function: Callable[[], Any]
) -> Any:
    """Runs in this thread what would have run in one with these modes."""
    vars(MODES).update(modes)
    with platform.tape() if is_recording else platform.no_grad():
        return function()


def _differ(states: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    arrays = platform.tensor_to_numpy
    return any((arrays(states[k]) != arrays(others[k])).any() for k in others)


def _make_ended(side: str, error: BaseException) -> RuntimeError:
    return coded(
        RuntimeError,
        "HP495",
        f"CommComputeOverlap: the {side} ends because the other side failed: {type(error).__name__}: {error}",
    )
