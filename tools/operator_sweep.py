# SPDX-License-Identifier: Apache-2.0
"""Sweeps over torch's own operator database: every operator, its samples, every placement of every tensor argument.

    python -m tools.operators --samples 2 add nn.functional.conv2d

Two ranks call each operator on distributed tensors, forward and, with a randomly weighted sum as the loss, backward,
and backward again from a randomly weighted sum of the gradients; results, gradients, gradients of gradients and changed
arguments are compared with the plain call. The same sweep runs on
torch.distributed.tensor, to tell how common what it finds is. tools/operators.py is the command.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_map

from hyper_parallel.testing import RankError, run_ranks

OUTCOMES = ("sharded", "replicated", "refused", "wrong", "crashed", "hung")
GROUP = 24  # operators for each job; one by one those of a library whose ranks may lose each other
MOST_PLACEMENTS = (
    24  # of all arguments of a sample together, drawn by chance where there are more
)
SECONDS = 6  # samples of each operator whose gradients are differentiated
LARGE = 100_000  # elements, above which a sample is called without combinations of placements
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
CLOSE_IN_DOUBLE = {"rtol": 1e-8, "atol": 1e-8}
CLOSE_OF_SECOND = {
    "rtol": 1e-6,
    "atol": 1e-6,
}  # in float64 too; powers of large numbers round more

Placed = (
    int | str | None
)  # a dim that is cut, "partial", or None for a copy on every rank


@dataclass
class Found:
    """What the sweep saw of one operator."""

    outcomes: Counter[str] = field(default_factory=Counter)
    second: Counter[str] = field(
        default_factory=Counter
    )  # of gradients of gradients: right, refused, wrong, crashed
    notes: list[str] = field(
        default_factory=list
    )  # what went wrong, and why something was refused
    rules: list[tuple[str, str]] = field(
        default_factory=list
    )  # (operator of the table, its way) in order of appearance
    samples: int = 0
    no_samples: str = ""  # why nothing was run

    def note(self, outcome: str, told: str) -> None:
        """Counts an outcome, and remembers the first few that ask for a look."""
        self.outcomes[outcome] += 1
        if outcome not in ("sharded", "replicated") and len(self.notes) < 4:
            self.notes.append(f"{outcome}: {told}")

    def note_second(self, outcome: str, told: str) -> None:
        """Counts an outcome of the gradients of gradients."""
        self.second[outcome] += 1
        if outcome != "right" and len(self.notes) < 4:
            self.notes.append(f"second order {outcome}: {told}")


# --- the two libraries


class Ours:
    """hyper_parallel."""

    def __init__(self) -> None:
        from hyper_parallel import (
            DTensor,
            Partial,
            Replicate,
            Shard,
            distribute_tensor,
            init_device_mesh,
        )
        from hyper_parallel.core.shard import OperatorError
        from hyper_parallel.core.shard._op_dispatch import _OP_DISPATCHER

        self.mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        self.kind, self._error = DTensor, OperatorError
        self._distribute, self._partial, self._replicate, self._shard = (
            distribute_tensor,
            Partial,
            Replicate,
            Shard,
        )
        self._dispatcher = _OP_DISPATCHER

    def put(self, tensor: torch.Tensor, placed: Placed, rank: int) -> Any:
        """A distributed tensor with these values."""
        if placed == "partial":
            return self.kind.from_local(
                part_of(tensor, rank), self.mesh, [self._partial()]
            )
        return self._distribute(
            tensor,
            self.mesh,
            [self._replicate() if placed is None else self._shard(placed)],
        )

    def call(self, run: Callable[[], None]) -> str:
        """ "sharded" if every operator in it has a rule, else "replicated"."""
        from hyper_parallel.core.dtensor.modes import strict

        try:
            with strict():
                run()
        except self._error as error:
            if "strict mode does not run it on whole tensors" not in str(error):
                raise
        else:
            return "sharded"
        run()
        return "replicated"

    def refuses(self, error: Exception) -> bool:
        """Whether an error says that this is not for distributed tensors.

        Sparse tensors cannot be cut; torch.masked looks for ``x.layout`` among torch's formats, and finds a Layout.
        """
        told = ("got a sparse one", "expects strided", "expect strided")
        return isinstance(error, self._error) or any(
            words in str(error) for words in told
        )

    @contextmanager
    def watched(self, found: Found) -> Iterator[None]:
        """Notes the rules of all operators that are planned meanwhile."""

        def note(decision: Any) -> None:
            entry = (decision.name.name, decision.text)
            is_last = decision.way.name not in ("OUT", "REDUCE_FIRST")
            if is_last and entry not in found.rules:
                found.rules.append(entry)

        self._dispatcher.forget()
        self._dispatcher.on_decision = note
        try:
            yield
        finally:
            self._dispatcher.on_decision = None


class Torchs:
    """torch.distributed.tensor, for comparison."""

    def __init__(self) -> None:
        import torch.distributed.tensor as native

        self.mesh = native.init_device_mesh("cpu", (2,))
        self.kind, self._native = native.DTensor, native

    def put(self, tensor: torch.Tensor, placed: Placed, rank: int) -> Any:
        """A distributed tensor with these values."""
        native = self._native
        if placed == "partial":
            return native.DTensor.from_local(
                part_of(tensor, rank), self.mesh, [native.Partial()], run_check=False
            )
        place = native.Replicate() if placed is None else native.Shard(placed)
        return native.distribute_tensor(tensor, self.mesh, [place], src_data_rank=None)

    def call(self, run: Callable[[], None]) -> str:
        """It has no replicated path: what runs, runs by a rule."""
        run()
        return "sharded"

    def refuses(self, error: Exception) -> bool:
        """Whether an error says that there is no rule."""
        return isinstance(error, NotImplementedError)

    @contextmanager
    def watched(self, found: Found) -> Iterator[None]:  # noqa: ARG002 - as ours
        """Nothing is noted."""
        yield


LIBRARIES = {"ours": Ours, "torch": Torchs}


def part_of(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """A rank's part of a pending sum: 2x - x, which is exact, and of what is infinite x + 0."""
    if rank == 0:
        return tensor * 2
    return torch.where(torch.isfinite(tensor), -tensor, torch.zeros_like(tensor))


# --- the samples and their placements


def entries() -> dict[str, Any]:
    """The operators of torch's database by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return {".".join(filter(None, (op.name, op.variant_test_name))): op for op in op_db}


def dtype_of(op: Any) -> torch.dtype | None:
    """float32, or one of the operator's own where it has none."""
    dtypes = op.supported_dtypes("cpu")
    preferred = [
        dtype
        for dtype in (torch.float32, torch.complex64, torch.int64)
        if dtype in dtypes
    ]
    return preferred[0] if preferred else min(dtypes, key=str, default=None)


def samples_of(op: Any, most: int | None) -> list[Any]:
    """The samples with tensors in them; some of them, spread over all, where there are more than ``most``."""
    samples = (sample for sample in _drawn(op) if tensors_in(sample))
    if most == 1:  # the others need not be made
        return list(itertools.islice(samples, 1))
    found = list(samples)
    if most is None or len(found) <= most:
        return found
    return [found[i * len(found) // most] for i in range(most)]


def _drawn(op: Any) -> Iterator[Any]:
    """The samples of an operator in its preferred dtype, as (input, args, kwargs)."""
    dtype = dtype_of(op)
    assert dtype is not None
    records = dtype.is_floating_point and op.supports_autograd
    for sample in draw_samples(op, dtype, requires_grad=records):
        yield sample.input, sample.args, sample.kwargs


def draw_samples(op: Any, dtype: torch.dtype, *, requires_grad: bool) -> Iterator[Any]:
    """What ``op.sample_inputs`` gives, which looks for a unittest on the stack and costs more than the operator."""
    _seed(0)
    samples = iter(op.sample_inputs_func(op, "cpu", dtype, requires_grad))
    while True:
        _seed(1234)  # as the database does it, for each sample
        sample = next(samples, None)
        if sample is None:
            return
        yield sample


def _seed(seed: int) -> None:
    """Seeds all generators of this process; torch.manual_seed also writes down the stack for every other device."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def tensors_in(tree: Any) -> list[Any]:
    """All tensors, in order."""
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def placements_of(
    tensors: Sequence[torch.Tensor], draws: random.Random, most: int
) -> list[tuple[Placed, ...]]:
    """All placements of each argument beside copies of the others, and combinations of them."""
    options = [
        [None, *range(t.dim()), *(["partial"] if adds_up(t) else [])] for t in tensors
    ]
    found = [tuple(None for _ in tensors)]
    for i, choices in enumerate(options):
        found += [
            tuple(choice if j == i else None for j in range(len(tensors)))
            for choice in choices[1:]
        ]
    if len(tensors) > 1 and sum(tensor.numel() for tensor in tensors) < LARGE:
        everything = itertools.islice(itertools.product(*options), 1000)
        combined = [
            places
            for places in everything
            if sum(place is not None for place in places) > 1
        ]
        found += draws.sample(combined, min(len(combined), max(4, most - len(found))))
    return found


def adds_up(tensor: torch.Tensor) -> bool:
    """Whether torch adds such tensors: neither booleans, nor floats of a byte, nor sparse ones."""
    dtype = tensor.dtype
    return tensor.layout == torch.strided and (
        dtype.itemsize > 1 or dtype in (torch.int8, torch.uint8)
    )


# --- one call


@dataclass
class Run:
    """A call of an operator: its arguments, results and gradients, all of them plain and whole."""

    arguments: list[Any]
    results: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    seconds: list[torch.Tensor | None] = field(
        default_factory=list
    )  # gradients of the gradients' weighted sum


def called(
    op: Any,
    sample: Any,
    put: Callable[[torch.Tensor], Any] = lambda tensor: tensor,
    whole: Callable[[Any], Any] = lambda tensor: tensor,
    seed: int = 0,
    backward: bool = True,
    second: bool = False,
) -> Run:
    """The operator on the sample's arguments, put somewhere; with gradients where there are any."""
    made: list[Any] = []

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        made.append(put(leaf.detach().clone()).requires_grad_(leaf.requires_grad))
        return made[-1]

    target, args, kwargs = tree_map(copy, sample)
    torch.default_generator.manual_seed(seed)
    # The database gives some operators a seed, which hides that they draw.
    with mock.patch.object(torch, "manual_seed", _ignore_seed):
        given = op(target, *args, **kwargs)
    results = [dense(whole(result)) for result in tensors_in(given)]
    loss = weighted_sum(results) if backward else None
    seconds = (
        gradients_of_gradients(loss, made, whole) if second and loss is not None else []
    )
    if loss is not None:
        loss.backward()
    with torch.no_grad():
        gradients = [None if t.grad is None else dense(whole(t.grad)) for t in made]
        arguments = [dense(whole(t.detach())) for t in made]
        return Run(
            arguments, [result.detach() for result in results], gradients, seconds
        )


def _ignore_seed(seed: int) -> None:
    """In place of torch.manual_seed; a new mock for every call would cost as much as the operator."""


def gradients_of_gradients(
    loss: torch.Tensor, made: Sequence[Any], whole: Callable[[Any], Any]
) -> list[Any]:
    """The gradients of a weighted sum of the gradients of a loss; none where those are constant."""
    leaves = [t for t in made if t.requires_grad and t.is_leaf]
    firsts = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
    loss = weighted_sum([dense(whole(g)) for g in firsts if g is not None])
    if loss is None:
        return []
    seconds = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
    with torch.no_grad():
        return [None if g is None else dense(whole(g)) for g in seconds]


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as one that can be compared."""
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def weighted_sum(results: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """A loss to which every finite element of every result adds its share."""
    loss, generator = None, torch.Generator().manual_seed(0)
    for result in results:
        if result.requires_grad:
            wide = result.to(torch.complex128 if result.is_complex() else torch.float64)
            weights = torch.randn(
                result.shape, generator=generator, dtype=torch.float64
            )
            total = (
                torch.where(torch.isfinite(wide.detach()), wide, torch.zeros_like(wide))
                * weights
            ).sum()
            total = total.real + total.imag if total.is_complex() else total
            loss = total if loss is None else loss + total
    return loss


def difference(
    found: Run, expected: Run, close: dict[str, float], random_values: bool
) -> str:
    """What differs between two runs; nothing if nothing does."""
    if len(found.results) != len(expected.results):
        return f"{len(found.results)} results, expected {len(expected.results)}"
    pairs = [
        (f"result {i}", *pair)
        for i, pair in enumerate(zip(found.results, expected.results, strict=True))
    ]
    for name, mine, true in pairs:
        if (mine.shape, mine.dtype) != (true.shape, true.dtype):
            return f"{name} is {mine.dtype} {tuple(mine.shape)}, expected {true.dtype} {tuple(true.shape)}"
    if random_values:
        return ""
    pairs += [
        (f"argument {i}", *pair)
        for i, pair in enumerate(zip(found.arguments, expected.arguments, strict=True))
    ]
    pairs += pairs_of("gradient", found.gradients, expected.gradients)
    return first_difference(pairs, close)


def difference_of_seconds(found: Run, expected: Run, close: dict[str, float]) -> str:
    """What differs between the gradients of gradients of two runs."""
    if (
        not found.seconds or not expected.seconds
    ):  # a gradient that is constant has none, or zeros
        found, expected = (
            Run([], [], [], one.seconds or [None] * len(other.seconds))
            for one, other in ((found, expected), (expected, found))
        )
    return first_difference(
        pairs_of("gradient of the gradient", found.seconds, expected.seconds), close
    )


def pairs_of(
    name: str, found: Sequence[Any], expected: Sequence[Any]
) -> list[tuple[str, Any, Any]]:
    """Gradients to be compared; none is zero."""
    pairs = []
    for i, (mine, true) in enumerate(zip(found, expected, strict=True)):
        if mine is not None or true is not None:
            zero = torch.zeros_like(mine if true is None else true)
            pairs.append(
                (
                    f"{name} {i}",
                    zero if mine is None else mine,
                    zero if true is None else true,
                )
            )
    return pairs


def first_difference(
    pairs: Iterable[tuple[str, Any, Any]], close: dict[str, float]
) -> str:
    """What is said of the first pair that differs."""
    for name, mine, true in pairs:
        if not near(mine, true, close):
            return f"{name} differs by {far(mine, true):.3g}"
    return ""


def near(mine: torch.Tensor, true: torch.Tensor, close: dict[str, float]) -> bool:
    """Whether two tensors have the same values, up to rounding at the scale of the largest."""
    if mine.shape != true.shape:
        return False
    if true.dtype is not torch.complex32 and torch.equal(
        mine, true
    ):  # which torch cannot compare
        return True
    if not (true.is_floating_point() or true.is_complex()):
        return torch.equal(mine, true)
    mine, true = mine.to(torch.complex128), true.to(torch.complex128)
    finite = true[torch.isfinite(true)].abs()
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    return torch.allclose(
        mine, true, rtol=close["rtol"], atol=close["atol"] * scale, equal_nan=True
    )


def far(mine: torch.Tensor, true: torch.Tensor) -> float:
    """The largest difference."""
    if mine.shape != true.shape or not mine.numel():
        return float("nan")
    return float((mine.to(torch.complex128) - true.to(torch.complex128)).abs().max())


def in_double(sample: Any) -> Any:
    """The sample in float64."""

    def double(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf.detach().double().requires_grad_(leaf.requires_grad)
        return leaf

    return tree_map(double, sample)


# --- the sweep


class Sweep:
    """The sweep of some operators on one rank."""

    def __init__(self, library: str, placements: int, second_every: int) -> None:
        self._library, self._placements = LIBRARIES[library](), placements
        self._second_every = second_every
        self._rank = torch.distributed.get_rank()

    def over(self, name: str, op: Any, most: int | None) -> Found:
        """One operator."""
        found = Found()
        if dtype_of(op) is None:
            found.no_samples = "no dtype on this device"
            return found
        samples = samples_of(op, most)
        if not samples:
            found.no_samples = "no tensor arguments"
        with self._library.watched(found):
            for number, sample in enumerate(samples):
                self._sample(name, number, op, sample, found)
        return found

    def _sample(
        self, name: str, number: int, op: Any, sample: Any, found: Found
    ) -> None:
        try:
            expected, backward = self._plain(op, sample)
            again = called(op, sample, seed=1, backward=backward)
        except Exception as error:  # noqa: BLE001 - torch cannot do it either
            found.no_samples = found.no_samples or f"plain torch: {first_line(error)}"
            return
        found.samples += 1
        is_random = "empty" in name or bool(
            difference(again, expected, CLOSE, random_values=False)
        )
        wants_second = number < SECONDS and backward and not is_random
        second = self._plain_second(op, sample) if wants_second else None
        tensors = tensors_in(sample)
        draws = random.Random(number)
        every = placements_of(tensors, draws, self._placements)
        for turn, places in enumerate(every, start=len(name)):
            where = f"sample {number}, {[tuple(t.shape) for t in tensors]} {self._shown(places)}"
            outcome, told = self._compare(
                op, sample, places, expected, is_random, backward
            )
            found.note(outcome, f"{where}: {told}")
            if second is None or turn % self._second_every:
                continue
            if outcome in ("sharded", "replicated"):
                outcome, told = self._compare_second(op, sample, places, second)
                found.note_second(outcome, f"{where}: {told}")

    @staticmethod
    def _plain(op: Any, sample: Any) -> tuple[Run, bool]:
        """The plain call, and whether it can go backward: some losses of some operators torch refuses."""
        try:
            return called(op, sample), True
        except RuntimeError:
            return called(op, sample, backward=False), False

    @staticmethod
    def _plain_second(op: Any, sample: Any) -> Run | None:
        """The plain call with gradients of gradients; None where torch has none, or they are constant."""
        try:
            run = called(op, in_double(sample), second=True)
        except Exception:  # noqa: BLE001 - some have no float64, some no second derivative
            return None
        return run if run.seconds else None

    def _compare(
        self,
        op: Any,
        sample: Any,
        places: Sequence[Placed],
        expected: Run,
        is_random: bool,
        backward: bool,
    ) -> tuple[str, str]:
        try:
            outcome, run = self._distributed(op, sample, places, backward)
            told = difference(run, expected, CLOSE, is_random)
            if told and not is_random:  # rounding is gone in float64; a mistake stays
                wide = in_double(sample)
                plain, (_, run) = (
                    called(op, wide, backward=backward),
                    self._distributed(op, wide, places, backward),
                )
                told = difference(run, plain, CLOSE_IN_DOUBLE, random_values=False)
        except Exception as error:  # noqa: BLE001 - that is what the sweep is to find
            return self._judge(error)
        return ("wrong", told) if told else (outcome, "")

    def _compare_second(
        self, op: Any, sample: Any, places: Sequence[Placed], expected: Run
    ) -> tuple[str, str]:
        """In float64, where rounding does not hide a mistake."""
        wide = in_double(sample)
        try:
            _, run = self._distributed(op, wide, places, backward=True, second=True)
        except Exception as error:  # noqa: BLE001 - that is what the sweep is to find
            return self._judge(error)
        told = difference_of_seconds(run, expected, CLOSE_OF_SECOND)
        return ("wrong", told) if told else ("right", "")

    def _judge(self, error: Exception) -> tuple[str, str]:
        if self._library.refuses(error):
            return "refused", first_line(error)
        return "crashed", f"{type(error).__name__}: {first_line(error)}"

    def _distributed(
        self,
        op: Any,
        sample: Any,
        places: Sequence[Placed],
        backward: bool,
        second: bool = False,
    ) -> tuple[str, Run]:
        runs: list[Run] = []

        def run() -> None:
            following = iter(places)
            put = lambda tensor: self._library.put(tensor, next(following), self._rank)  # noqa: E731
            runs.append(
                called(op, sample, put, self._whole, backward=backward, second=second)
            )

        return self._library.call(run), runs[-1]

    def _whole(self, result: Any) -> torch.Tensor:
        return (
            result.full_tensor() if isinstance(result, self._library.kind) else result
        )

    @staticmethod
    def _shown(places: Sequence[Placed]) -> str:
        return ", ".join(
            "R" if p is None else "P" if p == "partial" else f"S({p})" for p in places
        )


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def sweep_on_rank(
    library: str,
    names: Sequence[str],
    most: int | None,
    placements: int = MOST_PLACEMENTS,
    second_every: int = 1,
) -> dict[str, Found]:
    """The sweep of these operators on this rank."""
    torch.set_num_threads(1)
    known = entries()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sweep = Sweep(library, placements, second_every)
        return {name: sweep.over(name, known[name], most) for name in names}


def sweep(
    library: str,
    names: Sequence[str],
    most: int | None = None,
    placements: int = MOST_PLACEMENTS,
    second_every: int = 1,
) -> dict[str, Found]:
    """The sweep of these operators, between two ranks; one that takes the ranks with it is found by itself.

    ``most``: samples of each operator; ``placements``: of a sample's arguments together, where there are more;
    ``second_every``: the gradients of one in this many placements are differentiated.
    """
    together = GROUP if library == "ours" else 1
    found: dict[str, Found] = {}
    for start in range(0, len(names), together):
        group = list(names[start : start + together])
        try:
            found |= _both(library, group, most, placements, second_every)
        except RankError as error:
            if len(group) == 1:
                found[group[0]] = _lost(error)
            else:
                for name in group:
                    found |= sweep(library, [name], most, placements, second_every)
    return found


def _lost(error: RankError) -> Found:
    lost = Found()
    lost.note("hung", first_line(error))
    return lost


def _both(
    library: str,
    names: Sequence[str],
    most: int | None,
    placements: int,
    second_every: int,
) -> dict[str, Found]:
    """What both ranks saw; what is wrong on one is wrong."""
    # Alone, ranks that do nothing for some seconds are lost; many together may have to wait for a core.
    timeout = 60 * len(names) if len(names) > 1 else None
    first, second = run_ranks(
        sweep_on_rank,
        2,
        library,
        names,
        most,
        placements,
        second_every,
        timeout=timeout,
    )
    for name, other in second.items():
        for outcome in ("wrong", "crashed"):
            found = [
                (one.outcomes[outcome], one.second[outcome])
                for one in (other, first[name])
            ]
            if any(more > fewer for more, fewer in zip(*found, strict=True)):
                first[name].outcomes, first[name].second = other.outcomes, other.second
                first[name].notes = [f"rank 1: {note}" for note in other.notes]
    return first
