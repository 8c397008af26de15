# SPDX-License-Identifier: Apache-2.0
"""Swap groups: which saved tensors move together, and when.

manager = SwapManager()
manager.set_current_group_name("layer 3")       what is swapped from now on belongs to this group
y = swap(layer, x)
manager.launch_offload("layer 3")               the copies to host memory start
manager.wait_offload("layer 3")                 the device memory is free
manager.launch_load("layer 3")                  before backward gets there

Outside of a group, tensors move on their own: out when they are saved, back shortly before backward needs them.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.core.modules.boundary import attach
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.swap_storage import SwappedTensor

platform = get_platform()

_LINK = "_hyper_parallel_swap_link"
_STORAGE_METHODS = ("launch_offload", "wait_offload", "launch_load", "wait_load")


class Storage:
    """The tensors that one call swaps; the graph owns them, and they keep the storage alive."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[SwappedTensor]] = []

    def add(self, tensor: SwappedTensor) -> None:
        """Takes over a saved tensor, which stays on the device for now."""
        _warn_on_cpu()
        self._references.append(weakref.ref(tensor))

    def launch_offload(self, copy_stream: Any = None) -> None:
        """Starts the copies to host memory."""
        for tensor in self._tensors():
            tensor.offload(copy_stream)

    def wait_offload(self) -> None:
        """Frees the device memory of what was copied."""
        for tensor in self._tensors():
            tensor.release()

    def launch_load(self, copy_stream: Any = None) -> None:
        """Starts the copies back to the device."""
        for tensor in self._tensors():
            tensor.start(copy_stream)

    def wait_load(self) -> None:
        """Makes the current stream wait for the copies back."""
        for tensor in self._tensors():
            tensor.wait()

    def _tensors(self) -> Iterator[SwappedTensor]:
        for reference in list(self._references):
            tensor = reference()
            if tensor is not None:
                yield tensor


class _OwnTime(Storage):
    """The default group of a call: each tensor leaves as soon as it is saved."""

    def add(self, tensor: SwappedTensor) -> None:
        _warn_on_cpu()
        tensor.offload()
        tensor.release()


def new_storage() -> Storage:
    """Returns the storage for what one call swaps: in the current group, or one that moves on its own."""
    manager = SwapManager()
    name = manager.get_current_group_name()
    if not name:
        return _OwnTime()
    storage = Storage()
    manager.add_storage(name, storage)
    return storage


@functools.cache
def _warn_on_cpu() -> None:
    if platform.device_type() == "cpu":
        warnings.warn(
            "swapping activations on a CPU saves no memory: host memory is where they are already. The results are "
            "the same",
            stacklevel=2,
        )


class _Current(threading.local):
    """The name of the group that this thread swaps into, and those of the layers around the running one."""

    def __init__(self) -> None:
        self.name = ""
        self.outer: list[str] = []


class SwapManager:
    """The swap groups of this process; ``SwapManager()`` always returns the same object.

    A wait without a launch does nothing, and launches and waits may come in any order: a tensor that backward needs
    and that is not there is loaded at once.
    """

    _instance: SwapManager | None = None
    _groups: dict[str, list[weakref.ref[Any]]]
    _current: _Current

    def __new__(cls) -> SwapManager:
        if cls._instance is None:
            cls._instance = super().__new__(cls)
            cls._instance._groups = {}
            cls._instance._current = _Current()
        return cls._instance

    def add_storage(self, group_name: str, storage: Any) -> None:
        """Adds a storage to a group, which is created if it is new; the group does not keep it alive."""
        lacking = [name for name in _STORAGE_METHODS if not hasattr(storage, name)]
        if lacking:
            raise coded(
                ValueError,
                "HP443",
                f"SwapManager.add_storage: a {type(storage).__name__} has no {', '.join(lacking)}",
            )
        self._check_name("add_storage", group_name)
        references = self._groups.setdefault(group_name, [])
        references[:] = [one for one in references if one() is not None]
        references.append(weakref.ref(storage))

    def launch_offload(self, group_name: str, copy_stream: Any = None) -> None:
        """Starts to copy a group's tensors to host memory, on the given stream or on one of the library's own."""
        for storage in self._storages("launch_offload", group_name):
            storage.launch_offload(copy_stream)

    def wait_offload(self, group_name: str) -> None:
        """Frees the device memory of a group's tensors once their copies are complete."""
        for storage in self._storages("wait_offload", group_name):
            storage.wait_offload()

    def launch_load(self, group_name: str, copy_stream: Any = None) -> None:
        """Starts to copy a group's tensors back to the device."""
        for storage in self._storages("launch_load", group_name):
            storage.launch_load(copy_stream)

    def wait_load(self, group_name: str) -> None:
        """Makes the current stream wait until a group's tensors are back."""
        for storage in self._storages("wait_load", group_name):
            storage.wait_load()

    def get_current_group_name(self) -> str:
        """Returns the name of the group that this thread swaps into; "" for none."""
        return self._current.name

    def set_current_group_name(self, group_name: str) -> None:
        """Makes what this thread swaps from now on belong to a group; "" for none."""
        if group_name:
            self._check_name("set_current_group_name", group_name)
            self._groups.setdefault(group_name, [])
        self._current.name = group_name

    def set_forward_prefetch_layer(self, first_layer: Any, second_layer: Any) -> None:
        """Moves what two consecutive layers swap while the other one computes.

        Each layer becomes a group. What ``first_layer`` swaps is copied out during the forward of ``second_layer``,
        and copied back when the backward of ``second_layer`` starts. The last layer of a chain keeps its activations:
        its backward comes first. Call it for each pair of neighbours; a second call for one pair changes nothing.
        """
        if first_layer is second_layer:
            raise coded(
                ValueError,
                "HP444",
                "SwapManager.set_forward_prefetch_layer: both layers are the same; expected two consecutive ones",
            )
        first, second = self._link(first_layer), self._link(second_layer)
        if second.name not in first.after:
            first.after.append(second.name)
            second.before.append(first.name)

    # --- layers

    def _link(self, layer: Any) -> _Link:
        """The place of a layer in its chain; hooks make its calls a group."""
        link: _Link | None = vars(layer).get(_LINK)
        if link is not None:
            return link
        link = _Link(f"layer {len(self._groups)}")
        vars(layer)[_LINK] = link
        self._groups.setdefault(link.name, [])
        attach(
            layer,
            "user",
            enter=self._enter,
            leave=self._leave,
            before_backward=self._before_backward,
            on_error=self._restore,
            source=f"swap group {link.name!r}",
        )
        return link

    def _enter(self, layer: Any, _: Any, __: Any) -> None:
        self._current.outer.append(self._current.name)
        self._current.name = vars(layer)[_LINK].name

    def _restore(self, _: Any) -> None:
        self._current.name = self._current.outer.pop()

    def _leave(self, layer: Any, _: Any) -> None:
        self._restore(layer)
        link = vars(layer)[_LINK]
        if link.after:
            self.launch_offload(link.name)
        for name in link.before:
            self.wait_offload(name)

    def _before_backward(self, layer: Any, _: Any) -> None:
        link = vars(layer)[_LINK]
        self.launch_load(link.name)
        self.wait_load(link.name)
        for name in (*link.before, *link.after):
            self.launch_load(name)

    # --- groups

    def _storages(self, call: str, group_name: str) -> Iterator[Any]:
        """The storages of a group that are still alive; raises at once if there is no such group."""
        self._check_name(call, group_name)
        if group_name not in self._groups:
            known = ", ".join(map(repr, self._groups)) or "none"
            raise coded(
                ValueError,
                "HP443",
                f"SwapManager.{call}: there is no swap group {group_name!r}; there are {known}",
            )
        storages = [reference() for reference in self._groups[group_name]]
        return (storage for storage in storages if storage is not None)

    @staticmethod
    def _check_name(call: str, group_name: str) -> None:
        if not isinstance(group_name, str) or not group_name:
            raise coded(
                ValueError,
                "HP443",
                f"SwapManager.{call}: expected the name of a group, got {group_name!r}",
            )


@dataclass
class _Link:
    """A layer's group, and those of its neighbours in forward."""

    name: str
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
