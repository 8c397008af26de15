# SPDX-License-Identifier: Apache-2.0
"""A tape of what a model's constructor did: recorded on the meta device, played back with real numbers.

The tape speaks of storages, not of tensors: a tensor on it is a storage's number and a geometry. So views, ``.data``,
``detach`` and a parameter made from another tensor need no care: they lie in a storage that is known. Playing back
happens on the CPU, one storage at a time in the order of ``playback``: the numbers are the same on every device.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.torch.playback import ordered
from hyper_parallel.platform.torch.swap import is_dense

META = torch.device("meta")
# In-place operators that read nothing of what they write.
_FILLS = frozenset(
    {"copy_", "fill_", "zero_", "bernoulli_", "cauchy_", "exponential_", "geometric_"}
)
_FILLS |= {"log_normal_", "normal_", "random_", "uniform_"}
# Operators that hand values to Python.
_READING_OPS = frozenset(
    {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}
)


@dataclass(frozen=True)
class _Ref:
    """A tensor on the tape: the number of its storage, and where in it the elements lie."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class _Op:
    func: Any
    args: Any
    kwargs: Any
    reads: frozenset[int]
    writes: frozenset[int]  # outputs included
    fresh: frozenset[int]  # of those, the ones of which nothing older remains
    outputs: tuple[
        tuple[int, _Ref], ...
    ]  # (position, tensor) of outputs with a storage of their own
    streams: tuple[_Stream, ...]  # the generators that it draws from

    @property
    def draws(self) -> bool:
        return bool(self.streams)


@dataclass(frozen=True)
class _Turn:
    """Somebody set a generator: to where it stood after draw number ``to``, or to a state never seen before."""

    stream: _Stream
    to: int | torch.Tensor
    reads = writes = fresh = frozenset[int]()
    draws = True


class _Stream:
    """A generator and how often it was drawn from. Operators on meta draw nothing, so each moves it by one number:
    states then differ from draw to draw, and a generator that was set (seeded, forked) is noticed."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.entry = self._expected = generator.get_state()
        self._count = 0
        self._seen = {_digest(self.entry): 0}

    def turned(self) -> int | torch.Tensor | None:
        """Where the generator was set to since the last draw; None if nobody did."""
        state = self.generator.get_state()
        return (
            None
            if torch.equal(state, self._expected)
            else self._seen.get(_digest(state), state)
        )

    def drawn(self, before: torch.Tensor) -> None:
        if torch.equal(self.generator.get_state(), before):
            torch.rand(1, generator=self.generator)
        self._expected = self.generator.get_state()
        self._count += 1
        self._seen[_digest(self._expected)] = self._count


class Tape:
    """What the constructors in one context did, in order."""

    def __init__(self) -> None:
        self._steps: list[_Op | _Turn] = []
        self._storages: dict[
            int, tuple[StorageWeakRef, int, torch.device]
        ] = {}  # by address, which the weak ref pins
        self._nbytes: list[int] = []  # by number
        self._given: dict[
            int, torch.Tensor
        ] = {}  # bytes that came from outside the context
        self._deferred: set[int] = (
            set()
        )  # numbers whose real bytes, if any, are not those of one device
        self._streams = [_Stream(torch.default_generator)]
        self._stale: list[tuple[StorageWeakRef, int, bytes]] = []

    # recording

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operator and notes it, unless it only makes a view."""
        inputs = _tensors((args, kwargs))
        if func in _READING_OPS:
            for tensor in inputs:
                self.refuse_reading(func, tensor)
            return func(*args, **kwargs)
        streams = (
            (self._stream(kwargs.get("generator")),)
            if torch.Tag.nondeterministic_seeded in func.tags
            else ()
        )
        written = list(_written(func, args, kwargs))
        if not written and not streams and _makes_views(func):
            return func(*args, **kwargs)
        run = functools.partial(_run_mixed, func, args, kwargs, written)
        return self._record(
            func, args, kwargs, written, self._filled(func, args, written), streams, run
        )

    def _filled(
        self, func: Any, args: Any, written: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Of what an operator writes, the tensors in whose storages nothing older remains."""
        if (
            getattr(func.overloadpacket, "__name__", "") not in _FILLS
            or len(written) != 1
        ):
            return []
        (tensor,) = written
        number = self.ref(tensor).storage
        is_source = any(
            isinstance(arg, torch.Tensor) and self.ref(arg).storage == number
            for arg in args[1:]
        )
        return [tensor] if _is_whole(tensor) and not is_source else []

    def call(self, func: Any, kwargs: Any) -> None:
        """Notes a function that gives the tensors it gets new content, and does not run it."""
        streams = {self._stream(None), self._stream(kwargs.get("generator"))}
        written = _tensors(kwargs)
        filled = [tensor for tensor in written if _is_whole(tensor)]
        self._record(func, (), kwargs, written, filled, tuple(streams), lambda: None)

    def _record(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        written: Sequence[torch.Tensor],
        filled: Sequence[torch.Tensor],  # those of which nothing older remains
        streams: tuple[_Stream, ...],
        run: Callable[[], Any],
    ) -> Any:
        inputs = _tensors((args, kwargs))
        # The references come first: what an operator changes must be kept as it was before.
        taped_args, taped_kwargs = pytree.tree_map_only(
            torch.Tensor, self.ref, (args, kwargs)
        )
        self._steps += [
            _Turn(stream, to)
            for stream in streams
            if (to := stream.turned()) is not None
        ]
        before = [stream.generator.get_state() for stream in streams]
        out = run()
        for stream, state in zip(streams, before, strict=True):
            stream.drawn(state)
        outputs = self._outputs(out)
        writes = {self.ref(t).storage for t in written}
        if outputs or writes or streams:
            sets = self._note_storages(inputs, filled, writes, outputs, streams)
            if kwargs.get("device") is not None:
                taped_kwargs["device"] = torch.device("cpu")
            # A factory's dtype may have come from a default that has changed by then.
            if outputs and not inputs:
                taped_kwargs["dtype"] = outputs[0][1].dtype
            self._steps.append(
                _Op(func, taped_args, taped_kwargs, *sets, outputs, streams)
            )
        return out

    def _note_storages(
        self,
        inputs: Sequence[torch.Tensor],
        filled: Sequence[torch.Tensor],
        writes: set[int],
        outputs: Any,
        streams: tuple[_Stream, ...],
    ) -> tuple[frozenset[int], frozenset[int], frozenset[int]]:
        """The storages that an operator reads, writes and renews; notes which of them have no data yet."""
        renewed = {self.ref(t).storage for t in filled}
        reads = {self.ref(t).storage for t in inputs} - renewed
        made = {ref.storage for _, ref in outputs}
        is_deferred = (
            streams
            or any(t.is_meta for t in inputs)
            or not reads.isdisjoint(self._deferred)
        )
        if is_deferred:
            self._deferred = self._deferred | writes | made
        else:
            self._deferred = self._deferred - renewed
        return frozenset(reads), frozenset(writes | made), frozenset(renewed | made)

    def _outputs(self, out: Any) -> tuple[tuple[int, _Ref], ...]:
        """(position, reference) of the tensors that lie in a storage of their own."""
        leaves = pytree.tree_leaves(out)
        new = [
            i
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and self._number(leaf) is None
        ]
        return tuple((i, self.ref(leaves[i], is_output=True)) for i in new)

    def _stream(self, generator: torch.Generator | None) -> _Stream:
        generator = generator or torch.default_generator
        for stream in self._streams:
            if stream.generator is generator:
                return stream
        self._streams.append(_Stream(generator))
        return self._streams[-1]

    def _number(self, tensor: torch.Tensor) -> int | None:
        found = self._storages.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[1]

    def ref(self, tensor: torch.Tensor, is_output: bool = False) -> _Ref:
        number = self._number(tensor)
        if number is None:
            number = len(self._nbytes)
            self._nbytes.append(tensor.untyped_storage().nbytes())
            self._bind(tensor, number)
            if not is_output and not tensor.is_meta:
                self._given[number] = as_bytes(tensor.untyped_storage()).to(
                    "cpu", copy=True
                )
        return _Ref(
            number,
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
        )

    def _bind(self, tensor: torch.Tensor, number: int) -> None:
        weak = StorageWeakRef(tensor.untyped_storage())
        self._storages[weak.cdata] = (weak, number, tensor.device)

    def meta_twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on meta that stands for the same storage on the tape."""
        ref = self.ref(tensor)
        twin = ref.on(torch.UntypedStorage(self._nbytes[ref.storage], device=META))
        self._bind(twin, ref.storage)
        return twin

    def refuse_reading(self, func: Any, tensor: torch.Tensor) -> None:
        if not tensor.is_meta and self._number(tensor) in self._deferred:
            raise coded(
                RuntimeError,
                "HP131",
                f"init_on_device('meta'): {getattr(func, '__name__', func)} reads a tensor of shape "
                f"{tuple(tensor.shape)}, but its random numbers are drawn in init_parameters. Compute it without "
                "tensors (math, random), or before the context.",
            )

    def close(self) -> None:
        """Ends the recording: puts the generators back and keeps only the storages that are still alive."""
        for stream in self._streams:
            stream.generator.set_state(stream.entry)
        self._storages = {
            at: entry for at, entry in self._storages.items() if not entry[0].expired()
        }
        for weak, number, device in self._storages.values():
            if device != META and number in self._deferred:
                self._stale.append((weak, number, _digest(as_bytes(_revived(weak)))))

    # playing back

    def is_needed(self) -> bool:
        return any(
            device == META and not weak.expired()
            for weak, _, device in self._storages.values()
        )

    def knows(self, tensor: torch.Tensor) -> bool:
        return self._number(tensor) is not None

    def play(self, receivers: dict[int, list[_Receiver]]) -> None:
        """Runs every draw and what the wanted storages need; hands each storage over as soon as it is done.

        Real tensors that were drawn in the context (a random buffer, say) get the numbers of one device too.
        """
        stale, self._stale = self._stale, []
        for weak, number, digest in stale:
            receivers.setdefault(number, []).append(
                functools.partial(_refresh, weak, digest)
            )
        states = [stream.generator.get_state() for stream in self._streams]
        for stream in self._streams:
            stream.generator.set_state(stream.entry)
        try:
            with torch.no_grad():
                self._play(receivers)
        finally:
            for stream, state in zip(self._streams, states, strict=True):
                if not torch.equal(state, stream.entry):
                    stream.generator.set_state(state)

    def _play(self, receivers: dict[int, list[_Receiver]]) -> None:
        memory: dict[int, torch.UntypedStorage] = {}
        marks = {(stream, 0): stream.entry for stream in self._streams}
        sought = {
            (step.stream, step.to) for step in self._steps if isinstance(step, _Turn)
        }
        counts = dict.fromkeys(self._streams, 0)
        for move in ordered(self._steps, set(receivers)):
            step = self._steps[move.step]
            if isinstance(step, _Turn):
                step.stream.generator.set_state(
                    marks[step.stream, step.to] if isinstance(step.to, int) else step.to
                )
                continue
            self._play_op(step, memory)
            for stream in step.streams:
                counts[stream] += 1
                if (at := (stream, counts[stream])) in sought:
                    marks[at] = stream.generator.get_state()
            for number in move.done:
                _hand_over(memory[number], receivers.pop(number))
            for number in move.dropped:
                memory.pop(number, None)
        for number, waiting in receivers.items():  # no operator touches these
            _hand_over(self._allocate(number), waiting)

    def _play_op(self, op: _Op, memory: dict[int, torch.UntypedStorage]) -> None:
        def tensor(ref: _Ref) -> torch.Tensor:
            if ref.storage not in memory:
                memory[ref.storage] = self._allocate(ref.storage)
            return ref.on(memory[ref.storage])

        args, kwargs = pytree.tree_map_only(_Ref, tensor, (op.args, op.kwargs))
        leaves = pytree.tree_leaves(op.func(*args, **kwargs))
        for position, ref in op.outputs:
            out = leaves[position]
            if (out.dtype, out.shape) != (ref.dtype, ref.size):
                raise coded(
                    RuntimeError,
                    "HP131",
                    f"init_parameters: {op.func} gave {out.dtype} {tuple(out.shape)}, but {ref.dtype} "
                    f"{tuple(ref.size)} when the module was built; a shape must not depend on random values",
                )
            if (out.stride(), out.storage_offset()) == (ref.stride, ref.offset):
                memory[ref.storage] = out.untyped_storage()
            else:  # the kernel for meta lays its output out differently
                tensor(ref).copy_(out)

    def _allocate(self, number: int) -> torch.UntypedStorage:
        storage = torch.UntypedStorage(self._nbytes[number])
        if number in self._given:
            as_bytes(storage).copy_(self._given[number])
        return storage


_Receiver = Callable[[torch.UntypedStorage], None]


def _hand_over(storage: torch.UntypedStorage, receivers: list[_Receiver]) -> None:
    for receive in receivers:
        receive(storage)


def _refresh(
    weak: StorageWeakRef, digest: bytes, storage: torch.UntypedStorage
) -> None:
    held = _revived(weak)
    if (
        held is not None and _digest(as_bytes(held)) == digest
    ):  # what the user has changed since is the user's
        as_bytes(held).copy_(as_bytes(storage))


def _revived(weak: StorageWeakRef) -> Any:
    return torch.UntypedStorage._new_with_weak_ptr(weak.cdata)  # None if it is gone


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _makes_views(func: Any) -> bool:
    return bool(func._schema.returns) and all(
        value.alias_info is not None for value in func._schema.returns
    )


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from _tensors(value)


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether the tensor covers all of its storage."""
    return tensor.nbytes == tensor.untyped_storage().nbytes() and is_dense(tensor)


def _run_mixed(
    func: Any, args: Any, kwargs: Any, written: Sequence[torch.Tensor]
) -> Any:
    """Runs the operator, on meta alone if it does not take real tensors (a drawn table, say) beside those on meta."""
    try:
        return func(*args, **kwargs)
    except (RuntimeError, NotImplementedError):
        if not any(t.is_meta for t in _tensors((args, kwargs))) or not all(
            t.is_meta for t in written
        ):
            raise
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda t: t if t.is_meta else t.to(META), (args, kwargs)
        )
        return func(*args, **kwargs)


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _digest(data: torch.Tensor) -> bytes:
    return hashlib.sha256(data.cpu().numpy().tobytes()).digest()
