# SPDX-License-Identifier: Apache-2.0
"""Messages between stages: one tensor of bytes each, with a header that says whether the sender has failed.

    mailbox.send_parcel(message, parcel, parcel.tensors)    starts
    mailbox.post(message)                                   starts to receive
    received = mailbox.receive(message)                     waits

What the first message of a boundary describes holds for all that follow, so later ones carry only a header and the
tensors. With ``dynamic`` shapes every message describes itself. A rank that has failed sends headers that say so in
place of what others wait for: they fail too, and nothing is left under way.
"""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from hyper_parallel.core.pipeline_parallel.action import Message
from hyper_parallel.core.pipeline_parallel.wire import (
    Parcel,
    Spec,
    rebuild,
    shard_of,
)
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.contract.memory import round_up
from hyper_parallel.platform.error_codes import coded

platform = get_platform()

# status, which tensors are None, the bytes of the body, the bytes of the description in it
_HEADER = struct.Struct("<qqqq")
_FINE, _FAILED, _CHANGED = range(3)
_MOST_TENSORS = 62  # bits of a header's word


class PeerFailedError(RuntimeError):
    """Another rank of the pipeline has failed."""


class Known(NamedTuple):
    """What both sides of a boundary know of its messages."""

    text: str
    specs: tuple[Spec, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of a message with all tensors."""
        return round_up(_HEADER.size) + sum(map(_packed_size, self.specs))


class Received(NamedTuple):
    """What has arrived: the description, and the tensors of which some may be None."""

    known: Known
    tensors: list[Any]

    def tree(self, tensors: Sequence[Any]) -> Any:
        """The structure with these tensors."""
        return rebuild(self.known.text, tensors)


class Mailbox:
    """The messages of one rank in a step. ``rank_of(stage, micro)`` is a global rank."""

    def __init__(self, group: Any, rank_of: Any, *, dynamic: bool) -> None:
        self._group, self._rank_of, self._dynamic = group, rank_of, dynamic
        self._known: dict[tuple[bool, int, int], Known] = {}  # agreed on in a step
        self._new: dict[tuple[bool, int, int], Known] = {}  # in the running step
        self._sends: list[tuple[Any, Any]] = []
        self._posted: dict[Message, tuple[Any, Any]] = {}

    # --- a step

    def end_step(self) -> None:
        """Waits for what was sent; what the step has described holds from now on."""
        self.wait_for_sends()
        self._known.update(self._new)
        self._new = {}

    def forget_step(self) -> None:
        """Forgets what a failed step has described."""
        self._new = {}
        self._posted = {}

    def wait_for_sends(self) -> None:
        """Waits until everything that was sent has left."""
        sends, self._sends = self._sends, []
        for handle, _ in sends:
            handle.wait()

    def drop_finished(self) -> None:
        """Frees the memory of sends that are complete."""
        self._sends = [one for one in self._sends if not one[0].is_completed()]

    # --- sending

    def send_parcel(
        self, message: Message, parcel: Parcel | Known, tensors: Sequence[Any]
    ) -> None:
        """Starts to send tensors, some of which may be None, as what they are described as."""
        if len(tensors) > _MOST_TENSORS:
            raise coded(
                ValueError,
                "HP481",
                f"pipeline: {len(tensors)} tensors between two stages; the most are {_MOST_TENSORS}",
            )
        mask = sum(1 << place for place, one in enumerate(tensors) if one is None)
        present = [shard_of(one) for one in tensors if one is not None]
        known = self._known.get(_boundary(message))
        if not self._fits_earlier(message, parcel):
            self.fail(message, _CHANGED)
            raise self._explain_change(message, parcel)
        if known is None:
            self._send_described(message, parcel, mask, present)
            return
        if mask:  # as many bytes as all of them
            present = [
                _zeros_like(spec) if one is None else shard_of(one)
                for spec, one in zip(known.specs, tensors, strict=True)
            ]
        self._start(message, platform.pack_bytes(_pack(_FINE, mask), present))

    def _send_described(
        self, message: Message, parcel: Parcel | Known, mask: int, present: list[Any]
    ) -> None:
        description = encode(parcel)
        body = platform.pack_bytes(description, present)
        header = _pack(_FINE, mask, int(body.shape[0]), len(description))
        self._start(message, platform.pack_bytes(header, []))
        self._start(message, body)

    def _fits_earlier(self, message: Message, parcel: Parcel | Known) -> bool:
        """Whether a message is like the first one of its boundary, which it may be itself."""
        if self._dynamic:
            return True
        boundary = _boundary(message)
        given = Known(parcel.text, parcel.specs)
        known = self._known.get(boundary)
        if known is None:
            known = self._new.setdefault(boundary, given)
        return given == known

    def _explain_change(self, message: Message, parcel: Parcel | Known) -> Exception:
        boundary = _boundary(message)
        known = self._known.get(boundary) or self._new[boundary]
        return _explain_change(message, known, parcel)

    def fail(self, message: Message, status: int = _FAILED) -> None:
        """Tells the other side that what it waits for does not come."""
        known = self._known.get(_boundary(message))
        filling = [] if known is None else [_new_bytes(known.nbytes - _HEADER.size)]
        self._start(message, platform.pack_bytes(_pack(status), filling))

    def _start(self, message: Message, packed: Any) -> None:
        target = self._rank_of(message.target, message.micro)
        tag = _tag(message)
        self._sends.append((platform.isend(packed, target, self._group, tag), packed))

    # --- receiving

    def post(self, message: Message) -> None:
        """Starts to receive: the message, or the header of one that describes itself."""
        known = self._known.get(_boundary(message))
        buffer = _new_bytes(_HEADER.size if known is None else known.nbytes)
        self._posted[message] = (self._receive_into(message, buffer), buffer)

    def is_posted(self, message: Message) -> bool:
        """Whether a message is being received."""
        return message in self._posted

    def _receive_into(self, message: Message, buffer: Any) -> Any:
        source = self._rank_of(message.source, message.micro)
        return platform.irecv(buffer, source, self._group, _tag(message))

    def receive(self, message: Message) -> Received:
        """Waits for a message that was posted; raises if its sender has failed."""
        received = self._finish(message)
        if not self._fits_earlier(message, received.known):
            raise self._explain_change(message, received.known)
        return received

    def _finish(self, message: Message) -> Received:
        handle, buffer = self._posted.pop(message)
        handle.wait()
        status, mask, length, described = _unpack(buffer)
        if status != _FINE:
            raise _explain_status(message, status)
        known = self._known.get(_boundary(message))
        start = _HEADER.size
        if known is None:
            buffer = _new_bytes(length)
            self._receive_into(message, buffer).wait()
            known, start = decode(buffer, described), described
            return Received(
                known, _take(buffer, start, known.specs, mask, packed=False)
            )
        return Received(known, _take(buffer, start, known.specs, mask, packed=True))

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
    buffer: Any, start: int, specs: Sequence[Spec], mask: int, *, packed: bool
) -> list[Any]:
    """The tensors of a message; those that are None have no bytes unless all are ``packed``."""
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


def _boundary(message: Message) -> tuple[bool, int, int]:
    return message.is_forward, message.source, message.target


def _tag(message: Message) -> int:
    """A number that no other message under way between two ranks has."""
    place = (message.micro << 16) | (message.source << 8) | message.target
    return (place << 1 | message.is_forward) % (1 << 31)


def _pack(status: int, mask: int = 0, length: int = 0, described: int = 0) -> bytes:
    return _HEADER.pack(status, mask, length, described)


def _unpack(buffer: Any) -> tuple[int, int, int, int]:
    status, mask, length, described = _HEADER.unpack(_read(buffer, _HEADER.size))
    return status, mask, length, described


def _read(buffer: Any, size: int) -> bytes:
    data: bytes = platform.tensor_to_numpy(buffer[:size]).tobytes()
    return data


def _new_bytes(size: int) -> Any:
    dtype = platform.str_to_dtype("uint8")
    return platform.empty((round_up(size),), dtype, platform.device())


@functools.lru_cache(maxsize=4096)
def _packed_size(spec: Spec) -> int:
    empty = platform.empty((0,), platform.str_to_dtype(spec.dtype))
    return round_up(math.prod(spec.shape) * platform.get_element_size(empty))


def _zeros_like(spec: Spec) -> Any:
    dtype = platform.str_to_dtype(spec.dtype)
    return platform.zeros(spec.shape, dtype, platform.device())


def encode(parcel: Parcel | Known) -> bytes:
    """The description of a message."""
    return json.dumps([parcel.text, parcel.specs]).encode()


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


def _explain_change(
    message: Message, known: Known, parcel: Parcel | Known
) -> Exception:
    return coded(
        ValueError,
        "HP482",
        f"pipeline: stage {message.source} sends {_show(parcel)} to stage {message.target} for micro batch "
        f"{message.micro}, but sent {_show(known)} before; pass dyn_shape=True to the stages if shapes change",
    )


def _show(known: Parcel | Known) -> str:
    tensors = [f"{spec.dtype}{list(spec.shape)}" for spec in known.specs]
    return ", ".join(tensors) or "no tensors"


def _explain_status(message: Message, status: int) -> Exception:
    what = "has other shapes than before" if status == _CHANGED else "has failed"
    return PeerFailedError(
        f"pipeline: stage {message.source}, from which stage {message.target} waits for micro batch {message.micro}, "
        f"{what}"
    )
