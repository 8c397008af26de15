# SPDX-License-Identifier: Apache-2.0
"""Recompute that decides by operator: what to keep, what to keep in host memory, what to compute again.

contexts = selective_contexts(["matmul"], allow_mutation=False)      # (forward's, recompute's)

MindSpore tells subclasses of Tensor alone, by ``__fallback__``, which operators run. So the tensors that come in are
given such a class, and so are results. An operator of which nobody is told (none of its operands comes from what came
in, from a parameter or from a distributed tensor) runs again without being asked about.

Backward gets the tensors that the recompute saves by their place in the order in which forward saved them. An operator
that does not run again must keep its places, so it hands over the same tensors: its operands as they were computed
again, its results as they were kept.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mindspore
from mindspore import Tensor, mint, ops

from hyper_parallel.platform.containers import leaves, tree_map
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.mindspore import private
from hyper_parallel.platform.mindspore.dtensor_base import DTensorBase, plain_fallback
from hyper_parallel.platform.mindspore.operators import NAMES, Operation, op_name_of
from hyper_parallel.platform.mindspore.swap import HostCopy, mark_of, memory_address
from hyper_parallel.platform.platform import CheckpointPolicy
from hyper_parallel.platform.swap_storage import SwapStorage

_CALL = "create_selective_checkpoint_contexts"
# What a policy may return, and what is done: there is no one to overrule a preference.
_VERDICTS: dict[Any, CheckpointPolicy] = {
    True: CheckpointPolicy.MUST_SAVE,
    False: CheckpointPolicy.MUST_RECOMPUTE,
    **{policy: policy for policy in CheckpointPolicy},
    CheckpointPolicy.PREFER_SAVE: CheckpointPolicy.MUST_SAVE,
    CheckpointPolicy.PREFER_RECOMPUTE: CheckpointPolicy.MUST_RECOMPUTE,
}
_LAYERS = {
    "MatMul": "matmul",
    "BatchMatMul": "matmul",
}  # the products that layers of nn run
_KNOWN = {*NAMES, *(name for name, _ in NAMES.values()), *_LAYERS, "getitem"}


class PolicyContext(NamedTuple):
    """What a policy gets besides the operator and its arguments."""

    is_recompute: bool
    op_output: Any


def selective_contexts(
    policy_fn_or_list: Any, allow_mutation: bool, storage: SwapStorage | None = None
) -> tuple[Any, Any]:
    """The contexts of a forward that asks the policy and of a recompute that does what it said."""
    policy_fn = _as_policy(policy_fn_or_list)
    entries: list[_Entry] = []
    deciding = _Deciding(policy_fn, entries, allow_mutation, storage)
    return deciding, _Recomputing(entries)


def _as_policy(policy_fn_or_list: Any) -> Callable[..., Any]:
    if isinstance(policy_fn_or_list, (list, tuple, set, frozenset)):
        saved = frozenset(map(_listed, policy_fn_or_list))
        return lambda _ctx, op, *_args, **_kwargs: not saved.isdisjoint(_names(op))
    is_operator = isinstance(policy_fn_or_list, (str, Operation, ops.Primitive))
    if is_operator or not callable(policy_fn_or_list):
        raise coded(
            ValueError,
            "HP136",
            f"{_CALL}: expected a policy function (ctx, op, *args, **kwargs) or a list of operators to save, got "
            f"{policy_fn_or_list!r}" + ("; put it in a list" if is_operator else ""),
        )
    return policy_fn_or_list


def _listed(op: Any) -> str:
    if isinstance(op, ops.Primitive):
        return str(op.name)
    name = op if isinstance(op, str) else op_name_of(op).name if callable(op) else None
    if name is None or not (
        name in _KNOWN or any(hasattr(room, name) for room in (mint, ops, Tensor))
    ):
        raise coded(
            ValueError,
            "HP136",
            f"{_CALL}: {op!r} in the list is no operator; expected a function such as mindspore.mint.matmul, or a "
            "name as a policy sees it: 'MatMulExt', or 'matmul' for all its forms",
        )
    return name


def _names(op: Operation) -> set[str]:
    """The operator's own name, and what it is called whatever its form."""
    return {op.name, op_name_of(op).name, _LAYERS.get(op.name, op.name)}


@functools.cache
def _operator(name: str) -> Operation:
    """What stands for an operator before a policy: one for each name."""
    return Operation(name, functools.partial(getattr, ops, name), {})


# --- who is told


class _Here(threading.local):
    watch: Callable[..., Any] | None = None


_here = _Here()


@contextmanager
def told(watch: Callable[..., Any] | None) -> Iterator[None]:
    """A context in which ``watch(name, args, kwargs, run)`` is called for each operator instead of it; None: nobody."""
    before, _here.watch = _here.watch, watch
    try:
        yield
    finally:
        _here.watch = before


class Watched(Tensor):
    """A plain tensor of which the operators are told: its memory and its place in the graph are the plain one's."""

    _plain: Any

    def __new__(cls, plain: Any) -> Watched:
        made = Tensor._make_subclass(cls, plain)
        made._plain = plain
        return made

    def __init__(self, *_: Any) -> None:
        """Nothing is left to do: the framework's own would copy."""

    def __getitem__(self, index: Any) -> Any:
        plain, index = self._plain, tree_map(unwatched, index)
        if _here.watch is None:
            return plain[index]
        return _here.watch("getitem", (plain, index), {}, lambda: plain[index])

    def __setitem__(self, index: Any, value: Any) -> Any:
        self._plain[tree_map(unwatched, index)] = unwatched(value)
        private.base_tensor().data.__set__(
            self, self._plain
        )  # which may have got other memory
        return self

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def contiguous(self) -> Any:
        """The same elements without gaps between them."""
        return watched(self._plain.contiguous())


def watched(value: Any) -> Any:
    """A plain tensor in the class of which operators are told; anything else as it is."""
    return Watched(value) if type(value) is Tensor else value


def unwatched(value: Any) -> Any:
    """The plain tensor again."""
    return value._plain if isinstance(value, Watched) else value


def watching(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does the same; where somebody watches, it is told of the operators on what the function gets."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if _here.watch is None:
            return function(*args, **kwargs)
        args, kwargs = tree_map(watched, (args, kwargs))
        return tree_map(unwatched, function(*args, **kwargs))

    return run


def report_fallback(usual: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``__fallback__`` so that it reports operators to whoever watches."""

    @functools.wraps(usual)
    def fallback(
        self: Any,
        func: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        watch = _here.watch
        if watch is None:
            return usual(self, func, args, kwargs)
        args, kwargs = tree_map(unwatched, (tuple(args), dict(kwargs or {})))
        is_primitive = len(args) == 3 and isinstance(args[0], ops.Primitive)
        name, given = (args[1], args[2]) if is_primitive else (func.name, args)
        # By the rules if a distributed tensor is among the operands.
        run = functools.partial(plain_fallback, self, func, args, kwargs)
        return watch(name, given, kwargs, run)

    return fallback


# Our own class; ``patches`` does the same to the framework's.
DTensorBase.__fallback__ = report_fallback(DTensorBase.__fallback__)  # type: ignore[method-assign]


def report_call(usual: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a primitive that does not ask ``__fallback__`` so that it is reported."""

    @functools.wraps(usual)
    def call(primitive: Any, *args: Any) -> Any:
        watch = _here.watch
        if watch is None or not any(isinstance(leaf, Watched) for leaf in leaves(args)):
            return usual(primitive, *args)
        args = tree_map(unwatched, args)
        return watch(primitive.name, args, {}, lambda: usual(primitive, *args))

    return call


# --- the first run


class _Deciding:
    """Forward: asks the policy after every operator and keeps what it says."""

    def __init__(
        self,
        policy_fn: Callable[..., Any],
        entries: list[_Entry],
        allow_mutation: bool,
        storage: SwapStorage | None,
    ) -> None:
        self._policy_fn, self._entries = policy_fn, entries
        self._allow_mutation, self._storage = allow_mutation, storage
        self._inside: Any = None

    def __enter__(self) -> _Deciding:
        if self._inside is not None:
            raise coded(
                RuntimeError,
                "HP136",
                f"the contexts of one {_CALL} serve one call of the recompute; make new ones for each",
            )
        self._inside = told(self._on_operator)
        self._inside.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._inside.__exit__(*error)

    def _on_operator(
        self, name: str, args: Any, kwargs: Any, run: Callable[[], Any]
    ) -> Any:
        saved: list[_Saved] = []
        with told(None):
            with mindspore.saved_tensors_hooks(
                lambda tensor: _noted(saved, tensor), _Saved.take
            ):
                out = run()
            op = _operator(name)
            returned = self._policy_fn(
                PolicyContext(is_recompute=False, op_output=out), op, *args, **kwargs
            )
            verdict = self._verdict(op, returned)
            operands, results = _tensors((args, kwargs)), _tensors(out)
            # What shares memory with an operand is a view, which costs nothing, or has changed it, which must be done
            # again: what was kept would leave the operand as it was.
            kept: list[Any] | None
            if verdict is CheckpointPolicy.MUST_RECOMPUTE or _share_memory(
                results, operands
            ):
                kept = None
            elif verdict is CheckpointPolicy.MUST_SWAP:
                kept = [_InHostMemory(result, self._storage) for result in results]
            else:
                kept = [_Kept(name, result, self._allow_mutation) for result in results]
            for tensor in saved:
                tensor.settle(operands, results, kept)
            self._entries.append(
                _Entry(name, out, kept, [tensor.place for tensor in saved])
            )
        return tree_map(watched, out)

    @staticmethod
    def _verdict(op: Operation, returned: Any) -> CheckpointPolicy:
        if not isinstance(returned, (bool, CheckpointPolicy)):
            raise coded(
                ValueError,
                "HP136",
                f"the checkpoint policy returned {returned!r} for {op}; expected one of "
                f"{', '.join(f'CheckpointPolicy.{policy.name}' for policy in CheckpointPolicy)}, or a bool (True: "
                "save)",
            )
        return _VERDICTS[returned]


class _Kept:
    """A result in the memory where it is. MindSpore does not count all changes to a tensor, so its bytes are compared.

    Untested on hardware: an accelerator's own count of changes.
    """

    def __init__(self, name: str, result: Any, allow_mutation: bool) -> None:
        self._name, self._tensor = name, ops.stop_gradient(result)
        self._mark = None if allow_mutation else mark_of(self._tensor)

    def take(self) -> Any:
        if self._mark is not None and self._mark != mark_of(self._tensor):
            raise coded(
                RuntimeError,
                "HP136",
                f"the output of {self._name} that a selective checkpoint keeps was modified by an in-place "
                "operation; compute it again (MUST_RECOMPUTE), or allow_cache_entry_mutation=True to take it as "
                "it is",
            )
        return ops.stop_gradient(self._tensor)


class _InHostMemory:
    """A result in host memory."""

    def __init__(self, result: Any, storage: SwapStorage | None) -> None:
        has_data = result.numel() and not result.is_meta
        self._copy = HostCopy(result, None, storage) if has_data else None
        self._tensor = ops.stop_gradient(result) if self._copy is None else None

    def take(self) -> Any:
        return self._tensor if self._copy is None else self._copy.take()


class _Saver(private.function()):  # type: ignore[misc]
    """Saves one tensor where operators of the framework save theirs, so that it takes the next place in the order."""

    @staticmethod
    def forward(ctx: Any, recorded: Any, tensor: Any) -> Any:
        ctx.save_for_backward(tensor)
        return ops.stop_gradient(recorded)

    @staticmethod
    def backward(*_: Any) -> Any:
        raise AssertionError("nothing is computed from what a saver returns")


def _save(tensor: Any) -> Any:
    """What has the tensor among what its node saved."""
    return _Saver.apply(_recorded(), tensor)


class _Computed(private.function()):  # type: ignore[misc]
    """A tensor as if it had been computed: what comes after it is recorded, and it may be changed, unlike a leaf."""

    @staticmethod
    def forward(_: Any, recorded: Any, tensor: Any) -> Any:  # noqa: ARG004
        return tensor

    @staticmethod
    def backward(*_: Any) -> Any:
        raise AssertionError("no gradient goes back through a recompute's own graph")


def _recorded() -> Any:
    """An operand that gets a gradient, without which a function is not recorded."""
    tensor = ops.zeros((0,))
    tensor.requires_grad_()
    return tensor


class _Place(NamedTuple):
    """Where the recompute finds a tensor that an operator saves: among its operands or results, or here."""

    room: str
    at: int = 0
    tensor: Any = None


class _Saved:
    """One tensor that an operator saved for backward."""

    place = _Place("operand")

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self._get: Callable[[], Any] = lambda: tensor

    def settle(
        self, operands: list[Any], results: list[Any], kept: list[Any] | None
    ) -> None:
        """Says where it is to be had from, and lets go of it."""
        tensor, self._tensor = self._tensor, None
        saver = _save(tensor)  # takes its place in the recompute's order
        key = _key(tensor)
        if kept is None or key in (found := [_key(operand) for operand in operands]):
            self._get = lambda: private.node(saver).saved_tensors[
                0
            ]  # without its result a node would be gone
            self.place = _Place("operand", found.index(key) if kept is not None else 0)
        elif key in (found := [_key(result) for result in results]):
            held = kept[found.index(key)]
            self._get = held.take
            self.place = _Place("result", found.index(key))
        else:
            plain = ops.stop_gradient(tensor)
            self._get = lambda: plain
            self.place = _Place("itself", 0, plain)

    def take(self) -> Any:
        return self._get()


def _noted(saved: list[_Saved], tensor: Any) -> _Saved:
    saved.append(_Saved(tensor))
    return saved[-1]


# --- the second run


class _Entry:
    """What an operator did in forward: the shape of its results, those that were kept, and what it saved."""

    def __init__(
        self, name: str, out: Any, kept: list[Any] | None, places: list[_Place]
    ) -> None:
        self.name, self.runs_again = name, kept is None
        if kept is None:
            return
        self._kept, self._places = kept, places
        self._are_in_graph = [private.requires_grad(tensor) for tensor in _tensors(out)]
        numbers = iter(range(len(kept)))
        self._tree = tree_map(
            lambda leaf: (
                _Made.like(leaf, numbers) if isinstance(leaf, Tensor) else leaf
            ),
            out,
        )

    def hand_out(self, operands: list[Any]) -> Any:
        """The results, after what the operator saved has been saved again."""
        results = [held.take() for held in self._kept]
        for place in self._places:
            found = {"operand": operands, "result": results}.get(place.room)
            _save(place.tensor if found is None else found[place.at])
        pairs = zip(results, self._are_in_graph, strict=True)
        results = [
            _Computed.apply(_recorded(), result) if is_in_graph else result
            for result, is_in_graph in pairs
        ]
        return tree_map(
            lambda leaf: leaf.of(results) if isinstance(leaf, _Made) else leaf,
            self._tree,
        )


class _Made:
    """How a result is made of its kept tensor: as it is, or laid out as a distributed tensor."""

    def __init__(self, number: int, layout: Any, shape: tuple[int, ...]) -> None:
        self._number, self._layout, self._shape = number, layout, shape

    @classmethod
    def like(cls, tensor: Any, numbers: Iterator[int]) -> _Made:
        layout = tensor.layout if isinstance(tensor, DTensorBase) else None
        return cls(next(numbers), layout, tuple(tensor.shape))

    def of(self, results: list[Any]) -> Any:
        found = results[self._number]
        return (
            found if self._layout is None else self._layout.tensor(found, self._shape)
        )


class _Recomputing:
    """Backward: hands out what was kept and runs the rest again, in every backward."""

    def __init__(self, entries: list[_Entry]) -> None:
        self._entries = entries
        self._inside: list[Any] = []

    def __enter__(self) -> _Recomputing:
        remaining = iter(self._entries)
        inside = told(
            lambda name, args, kwargs, run: self._on_operator(
                remaining, name, args, kwargs, run
            )
        )
        inside.__enter__()
        self._inside.append(inside)
        return self

    def __exit__(self, *error: Any) -> None:
        self._inside.pop().__exit__(*error)

    def _on_operator(
        self,
        remaining: Iterator[_Entry],
        name: str,
        args: Any,
        kwargs: Any,
        run: Callable[[], Any],
    ) -> Any:
        entry = next(remaining, None)
        if entry is None or entry.name != name:
            raise coded(
                RuntimeError,
                "HP136",
                f"{name} runs in the recompute where forward ran {entry.name if entry else 'nothing more'}: the "
                "function under checkpoint must do the same both times",
            )
        with told(None):
            out = (
                run() if entry.runs_again else entry.hand_out(_tensors((args, kwargs)))
            )
        return tree_map(watched, out)


# --- tensors by their memory


def _tensors(tree: Any) -> list[Any]:
    """The plain tensors in containers, this rank's shards of distributed ones."""
    found = [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]
    return [
        tensor.to_local() if isinstance(tensor, DTensorBase) else tensor
        for tensor in found
    ]


def _key(tensor: Any) -> Any:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())


def _share_memory(left: list[Any], right: list[Any]) -> bool:
    addresses = [
        {memory_address(tensor) for tensor in tensors} - {0}
        for tensors in (left, right)
    ]
    return not addresses[0].isdisjoint(addresses[1])
