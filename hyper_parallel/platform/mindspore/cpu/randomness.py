# SPDX-License-Identifier: Apache-2.0
"""Random numbers on MindSpore's CPU that can be saved, put back and drawn again.

    randomness.reseed(5)
    state = randomness.state()
    x = randomness.draw().standard_normal(3)
    randomness.put_back(state)  # the next draw is x again

Two generators are one here. What the platform draws comes from numpy's Philox by (seed, number of the draw).
MindSpore's functional operators (``ops.rand``, ``ops.dropout``) seed each call with a global seed and a counter for
each kernel; both are kept in Python, so they are part of the state. What is not: initialisers, which draw from
``numpy.random``, and dropouts whose kernel has numbers of its own, such as ``nn.Dropout``. Those draw from the platform
inside ``replayable()``.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mindspore
import numpy as np
from mindspore import ops
from numpy.typing import NDArray

from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.mindspore import private

# Fixed, so that the states of all ranks are of one length whatever they have drawn.
STATE_BYTES = 4096

_DEFAULT_SEED = (
    67280421310721  # torch's: programs that never seed draw the same on every rank
)
_LARGEST_SEED = 2**31 - 1  # MindSpore's kernels take the global seed modulo this


class _Ours:
    seed = _DEFAULT_SEED
    drawn = 0


def draw() -> np.random.Generator:
    """A generator for one draw; every call gives another."""
    counter = np.array(
        [0, _Ours.drawn, 0, 0], np.uint64
    )  # each draw has 2**64 blocks for itself
    _Ours.drawn += 1
    return np.random.Generator(np.random.Philox(key=_Ours.seed, counter=counter))


def reseed(seed: int) -> None:
    """Starts both generators anew."""
    _Ours.seed, _Ours.drawn = seed % 2**64, 0
    seeds = private.seeds()
    seeds._KERNEL_SEED.clear()
    seeds._GLOBAL_SEED = framework_seed(seed)


def framework_seed(seed: int) -> int:
    """A seed that MindSpore takes, the same one where it can."""
    return (
        seed
        if 0 <= seed < _LARGEST_SEED
        else int(np.random.SeedSequence(seed % 2**64).generate_state(1)[0] >> 1)
    )


def state() -> NDArray[np.uint8]:
    """Where both generators stand, as bytes."""
    seeds = private.seeds()
    if (
        seeds._GLOBAL_SEED is None
    ):  # each process would draw numbers of its own, which no state could bring back
        seeds._GLOBAL_SEED = framework_seed(_Ours.seed)
    kernels = [
        [*key, count] for key, count in sorted(seeds._KERNEL_SEED.items(), key=str)
    ]
    text = json.dumps([_Ours.seed, _Ours.drawn, seeds._GLOBAL_SEED, kernels]).encode()
    if len(text) > STATE_BYTES:
        raise coded(
            RuntimeError,
            "HP139",
            f"the state of MindSpore's generators takes {len(text)} bytes, more than the {STATE_BYTES} that are "
            f"kept: {len(kernels)} random operators with seeds of their own are in use; let them follow the "
            "global seed",
        )
    return np.frombuffer(text.ljust(STATE_BYTES), np.uint8).copy()


def put_back(found: NDArray[np.uint8]) -> None:
    """Puts a state back."""
    try:
        seed, drawn, global_seed, kernels = json.loads(found.tobytes())
        counts = {(name, op_seed): count for name, op_seed, count in kernels}
    except (ValueError, TypeError) as error:
        raise coded(
            ValueError,
            "HP139",
            f"set_rng_state: {found.size} bytes that are no state of these generators: {error}",
        ) from error
    _Ours.seed, _Ours.drawn = seed, drawn
    seeds = private.seeds()
    seeds._KERNEL_SEED.clear()
    seeds._KERNEL_SEED.update(counts)
    seeds._GLOBAL_SEED = global_seed


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A context with another seed, ``numpy.random`` included, after which all go on as if nothing had been drawn."""
    before, initialisers = state(), np.random.get_state()
    reseed(seed)
    np.random.seed(framework_seed(seed))
    try:
        yield
    finally:
        put_back(before)
        np.random.set_state(initialisers)


# --- dropouts with numbers of their own


class _Here(threading.local):
    is_replayable = False


_here = _Here()


@contextmanager
def replayable() -> Iterator[None]:
    """A context in which every dropout on a CPU draws from what ``put_back`` turns back."""
    before, _here.is_replayable = _here.is_replayable, True
    try:
        yield
    finally:
        _here.is_replayable = before


def draw_again(
    instead: Callable[[Any, Any], Any], usual: Callable[..., Any]
) -> Callable[..., Any]:
    """Wraps a dropout so that it draws from what ``put_back`` restores, within ``replayable``."""

    @functools.wraps(usual)
    def call(primitive: Any, x: Any) -> Any:
        is_functional = (
            primitive.attrs.get("random_cache") is False
        )  # seeded at each call
        if (
            is_functional
            or not _here.is_replayable
            or mindspore.get_context("device_target") != "CPU"
        ):
            return usual(primitive, x)
        return instead(primitive, x)

    return call


def drop(primitive: Any, x: Any) -> Any:
    """(what is left, mask), by a kernel that begins with a seed of ours: one that has run would go on with its own."""
    fresh = ops.Dropout(
        primitive.keep_prob, *draw().integers(1, _LARGEST_SEED, 2).tolist()
    )
    return fresh.add_prim_attr("random_cache", False)(x)


def drop_channels(primitive: Any, x: Any) -> Any:
    """(what is left, mask) where the whole of a channel is kept or not; these kernels take no seed."""
    channels = ops.ones((*x.shape[:2], *(1,) * (len(x.shape) - 2)), mindspore.float32)
    scale = (
        ops.zeros_like(channels)
        if primitive.keep_prob == 0
        else drop(primitive, channels)[0]
    )
    return x * scale.astype(x.dtype), ops.broadcast_to(scale != 0, tuple(x.shape))
