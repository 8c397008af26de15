# SPDX-License-Identifier: Apache-2.0
"""Messages between stages: one tensor of bytes each, with a header that says whether the sender has failed.

    mailbox.send(message, parcel.known, parcel.tensors)     starts
    mailbox.post(message)                                   starts to receive
    received = mailbox.receive(message)                     waits

What the first message of a boundary describes holds for all that follow, so later ones carry only a header and the
tensors. The header also says which of them need gradients, which may change; gradients of other tensors are another
boundary. With ``dynamic`` shapes every message describes itself. A rank that has failed sends headers that say so in
place of what others wait for: they fail too, and nothing is left under way.
"""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hyper_parallel.core.pipeline_parallel.action import Message
from hyper_parallel.core.pipeline_parallel.wire import (
    Known,
    Spec,
    find_trained,
    rebuild,
    shard_of,
)
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.contract.memory import round_up
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.messages import HEADER_BYTES, Messages

platform = get_platform()

# status, which tensors are None, the bytes of the body, the bytes of the description in it; of a message that is not
# described, the third word says which tensors need gradients
_HEADER = struct.Struct("<qqqq")
assert _HEADER.size == HEADER_BYTES
_FINE, _FAILED, _CHANGED = range(3)
_MOST_TENSORS = 62  # bits of a header's word


class PeerFailedError(RuntimeError):
    """Another rank of the pipeline has failed."""


class Received(NamedTuple):
    """What has arrived: the description, and the tensors of which some may be None."""

    known: Known
    tensors: list[Any]

    def tree(self, tensors: Sequence[Any]) -> Any:
        """The structure with these tensors."""
        return rebuild(self.known.text, tensors)


class _Route(NamedTuple):
    """Where a message goes."""

    peer: int
    tag: int


# What messages of all micro batches have in common: the direction, both stages, and of which tensors they bring
# gradients.
_Boundary = tuple[bool, int, int, tuple[int, ...] | None]


class Mailbox:
    """The messages of ``rank`` in a step. ``rank_of(stage, micro)`` is a global rank."""

    def __init__(
        self,
        messages: Messages,
        rank: int,
        rank_of: Callable[[int, int], int],
        *,
        dynamic: bool,
    ) -> None:
        self._messages, self._dynamic = messages, dynamic
        self._rank, self._rank_of = rank, rank_of
        self._known: dict[_Boundary, Known] = {}  # agreed on in a step
        self._new: dict[_Boundary, Known] = {}  # in the running step
        self._trained: dict[Message, tuple[int, ...]] = {}  # in the running step
        self._posted: set[Message] = set()
        self._routes: dict[Message, _Route] = {}

    def _route(self, message: Message) -> _Route:
        route = self._routes.get(message)
        if route is None:
            source = self._rank_of(message.source, message.micro)
            target = self._rank_of(message.target, message.micro)
            peer = target if source == self._rank else source
            route = self._routes[message] = _Route(peer, _tag(message))
        return route

    def expect_gradients(self, message: Message, forward: Known) -> None:
        """Says for what a message brings gradients, before it is sent or received, on both sides."""
        self._trained[message] = find_trained(forward.specs)

    def _boundary(self, message: Message) -> _Boundary:
        return (*message[:3], self._trained.get(message))

    # --- a step

    def end_step(self) -> None:
        """Waits for what was sent; what the step has described holds from now on."""
        self.wait_for_sends()
        self._known.update(self._new)
        self._new, self._trained = {}, {}

    def forget_step(self) -> None:
        """Forgets what a failed step has described."""
        self._new, self._trained = {}, {}
        self._posted = set()

    def wait_for_sends(self) -> None:
        """Waits until everything that was sent has left."""
        self._messages.flush()

    def drop_finished(self) -> None:
        """Frees the memory of sends that are complete."""
        self._messages.drop_finished()

    # --- sending

    def send(self, message: Message, given: Known, tensors: Sequence[Any]) -> None:
        """Starts to send tensors, some of which may be None, as what they are described as."""
        if len(tensors) > _MOST_TENSORS:
            raise coded(
                ValueError,
                "HP481",
                f"pipeline: {len(tensors)} tensors between two stages; the most are {_MOST_TENSORS}",
            )
        route = self._route(message)
        boundary = self._boundary(message)
        known = self._known.get(boundary)
        if not self._fits_earlier(boundary, given):
            self.fail(message, _CHANGED)
            raise self._explain_change(message, given)
        present = [shard_of(one) for one in tensors if one is not None]
        mask = 0
        if len(present) < len(tensors):
            mask = sum(1 << place for place, one in enumerate(tensors) if one is None)
        if known is None:
            self._send_described(route, given, mask, present)
            return
        if mask:  # as many bytes as all of them
            present = [
                _zeros_like(spec) if one is None else shard_of(one)
                for spec, one in zip(known.specs, tensors, strict=True)
            ]
        header = _pack(_FINE, mask, _mark_trained(given.specs))
        self._messages.send(route.peer, route.tag, header, present)

    def _send_described(
        self, route: _Route, given: Known, mask: int, present: list[Any]
    ) -> None:
        description = encode(given)
        body = [platform.pack_bytes(description, []), *present]
        length = sum(round_up(int(one.nbytes)) for one in body)
        header = _pack(_FINE, mask, length, len(description))
        self._messages.send(route.peer, route.tag, header, [])
        self._messages.send(route.peer, route.tag, header, body)

    def _fits_earlier(self, boundary: _Boundary, given: Known) -> bool:
        """Whether a message is like the first one of its boundary, which it may be itself."""
        if self._dynamic:
            return True
        known = self._known.get(boundary)
        if known is None:
            known = self._new.setdefault(boundary, given)
        return given == known or _train(given, 0) == _train(known, 0)

    def _explain_change(self, message: Message, given: Known) -> Exception:
        boundary = self._boundary(message)
        known = self._known.get(boundary) or self._new[boundary]
        return _explain_change(message, known, given)

    def fail(self, message: Message, status: int = _FAILED) -> None:
        """Tells the other side that what it waits for does not come."""
        route = self._route(message)
        known = self._known.get(self._boundary(message))
        filling = [] if known is None else [_new_bytes(_count_bytes(known.specs))]
        self._messages.send(route.peer, route.tag, _pack(status), filling)

    # --- receiving

    def post(self, message: Message) -> None:
        """Starts to receive: the message, or the header of one that describes itself."""
        route = self._route(message)
        known = self._known.get(self._boundary(message))
        nbytes = 0 if known is None else _count_bytes(known.specs)
        self._messages.expect(route.peer, route.tag, nbytes)
        self._posted.add(message)

    def is_posted(self, message: Message) -> bool:
        """Whether a message is being received."""
        return message in self._posted

    def receive(self, message: Message) -> Received:
        """Waits for a message that was posted; raises if its sender has failed."""
        received = self._finish(message)
        if not self._fits_earlier(self._boundary(message), received.known):
            raise self._explain_change(message, received.known)
        return received

    def _finish(self, message: Message) -> Received:
        self._posted.remove(message)
        route = self._route(message)
        header, body = self._messages.receive(route.peer, route.tag)
        status, mask, length, described = _HEADER.unpack(header)
        if status != _FINE:
            raise _explain_status(message, status)
        known = self._known.get(self._boundary(message))
        if known is not None:
            if length != _mark_trained(known.specs):
                known = _train(known, length)
            return Received(known, _take(body, 0, known.specs, mask, packed=True))
        self._messages.expect(route.peer, route.tag, length)
        _, body = self._messages.receive(route.peer, route.tag)
        known = decode(body, described)
        tensors = _take(body, described, known.specs, mask, packed=False)
        return Received(known, tensors)

    def discard(self, message: Message) -> Known | None:
        """Waits for a message that nobody needs any more; returns its description, None if its sender has failed."""
        try:
            return self._finish(message).known
        except PeerFailedError:
            return None

    def discard_posted(self) -> None:
        """Waits for all messages that nobody needs any more."""
        for message in list(self._posted):
            self.discard(message)


def _take(
    buffer: Any, start: int, specs: tuple[Spec, ...], mask: int, *, packed: bool
) -> list[Any]:
    """The tensors of a message; those that are None have no bytes unless all are ``packed``."""
    if not mask:
        return platform.unpack_bytes(buffer, start, _shapes_of(specs))
    is_none = [bool(mask >> place & 1) for place in range(len(specs))]
    present = [
        (spec.dtype, spec.shape)
        for spec, missing in zip(specs, is_none, strict=True)
        if packed or not missing
    ]
    tensors = iter(platform.unpack_bytes(buffer, start, present))
    taken = []
    for missing in is_none:
        tensor = next(tensors) if packed or not missing else None
        taken.append(None if missing else tensor)
    return taken


# --- bytes


def _tag(message: Message) -> int:
    """A number that no other message under way between two ranks has."""
    place = (message.micro << 16) | (message.source << 8) | message.target
    return (place << 1 | message.is_forward) % (1 << 31)


def _pack(status: int, mask: int = 0, length: int = 0, described: int = 0) -> bytes:
    return _HEADER.pack(status, mask, length, described)


def _read(buffer: Any, size: int) -> bytes:
    data: bytes = platform.tensor_to_numpy(buffer[:size]).tobytes()
    return data


def _new_bytes(size: int) -> Any:
    dtype = platform.str_to_dtype("uint8")
    return platform.empty((round_up(size),), dtype, platform.device())


@functools.lru_cache(maxsize=4096)
def _mark_trained(specs: tuple[Spec, ...]) -> int:
    """A word with the bits of the tensors that need gradients."""
    return sum(1 << place for place in find_trained(specs))


def _train(known: Known, marks: int) -> Known:
    """The same description, in which these tensors need gradients."""
    specs = (
        spec._replace(requires_grad=bool(marks >> place & 1))
        for place, spec in enumerate(known.specs)
    )
    return Known(known.text, tuple(specs))


@functools.lru_cache(maxsize=4096)
def _shapes_of(specs: tuple[Spec, ...]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The dtype and the shape of each tensor."""
    return tuple((spec.dtype, spec.shape) for spec in specs)


@functools.lru_cache(maxsize=4096)
def _count_bytes(specs: tuple[Spec, ...]) -> int:
    """The bytes of a message with all tensors."""
    return sum(map(_packed_size, specs))


def _packed_size(spec: Spec) -> int:
    empty = platform.empty((0,), platform.str_to_dtype(spec.dtype))
    return round_up(math.prod(spec.shape) * platform.get_element_size(empty))


def _zeros_like(spec: Spec) -> Any:
    dtype = platform.str_to_dtype(spec.dtype)
    return platform.zeros(spec.shape, dtype, platform.device())


def encode(given: Known) -> bytes:
    """The description of a message."""
    return json.dumps([given.text, given.specs]).encode()


def decode(buffer: Any, size: int) -> Known:
    """The description that a message begins with."""
    text, specs = json.loads(_read(buffer, size))
    return Known(
        text,
        tuple(
            Spec(dtype, tuple(shape), requires_grad, layout)
            for dtype, shape, requires_grad, layout in specs
        ),
    )


# --- errors


def _explain_change(message: Message, known: Known, given: Known) -> Exception:
    return coded(
        ValueError,
        "HP482",
        f"pipeline: stage {message.source} sends {_show(given)} to stage {message.target} for micro batch "
        f"{message.micro}, but sent {_show(known)} before{_show_structures(known, given)}; pass dyn_shape=True to the "
        "stages if shapes or other values change",
    )


def _show_structures(known: Known, given: Known) -> str:
    if known.text == given.text:
        return ""
    return f", and the structure {given.text} instead of {known.text}"


def _show(known: Known) -> str:
    tensors = [f"{spec.dtype}{list(spec.shape)}" for spec in known.specs]
    return ", ".join(tensors) or "no tensors"


def _explain_status(message: Message, status: int) -> Exception:
    what = "has other shapes than before" if status == _CHANGED else "has failed"
    return PeerFailedError(
        f"pipeline: stage {message.source}, from which stage {message.target} waits for micro batch {message.micro}, "
        f"{what}"
    )
