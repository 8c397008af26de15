# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002 - operands have the names that torch gives them
"""Fourier transforms: linear, and whole along the dims that they transform.

fft_rfft   "d0 d1! -> d0 o1!"  of dim=-1          stft   "b t!, w! -> b f! n!"          istft   "b f! n!, w! -> b t!"
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.shard.ops.operator import RuleForCall, operator
from hyper_parallel.core.shard.ops.views import ints, moved, positions
from hyper_parallel.core.shard.ops.windows import changed, of_some, shapes_of
from hyper_parallel.core.shard.rule import Rule

# --- transforms along dims


def _transform(name: str) -> Callable[..., RuleForCall]:
    def rule(**arguments: Any) -> RuleForCall:
        (shape,) = shapes_of(name, arguments)
        along = _transformed(len(shape), arguments["dim"], arguments.get("s"))
        before, after, sizes = changed(shape, along)
        return RuleForCall(
            Rule(f"{before} -> {after}", linear=((0,),), broadcast="none"), sizes
        )

    return rule


def _transformed(ndim: int, dim: Any, sizes: Any) -> tuple[int, ...]:
    """The dims of a transform: those given, else the last ones for which there are sizes, else all."""
    if dim is not None:
        return positions(dim, ndim)
    return tuple(range(ndim - len(ints(sizes)) if sizes is not None else 0, ndim))


for _kind in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
    for _suffix, _parameters in (
        ("", "n=None, dim=-1"),
        ("2", "s=None, dim=(-2, -1)"),
        ("n", "s=None, dim=None"),
    ):
        _name = f"fft_{_kind}{_suffix}"
        operator(
            _name, f"input, {_parameters}, norm=None", _transform(_name), local=of_some
        )


def _shift(input: Any, dim: Any) -> RuleForCall:
    along = _transformed(len(input.shape), dim, None)
    names = [f"d{i}{'!' if i in along else ''}" for i in range(len(input.shape))]
    return moved(names, names)


operator("fft_fftshift fft_ifftshift", "input, dim=None", _shift)

# --- transforms of short times


def _stft(input: Any, window: Any, **more: Any) -> RuleForCall:
    (shape,) = shapes_of("stft", {"input": input, "window": window, **more})
    batch = "b " * (len(input.shape) == 2)
    names = ["f", "n", "two"][
        : len(shape) - len(input.shape) + 1
    ]  # two: the real and the imaginary part
    text = f"{batch}t!, w! -> {batch}{' '.join(f'{name}!' for name in names)}"
    sizes = dict(zip(names, shape[len(input.shape) - 1 :], strict=True))
    return RuleForCall(
        Rule(text, linear=((0,), (1,)), broadcast="none"), sizes, [input, window]
    )


def _istft(input: Any, window: Any, length: int | None, **more: Any) -> RuleForCall:
    batch = "b " * (len(input.shape) == 3)
    size = _duration(input.shape[-1], **more) if length is None else length
    return RuleForCall(
        Rule(f"{batch}f! n!, w! -> {batch}t!", linear=((0,),), broadcast="none"),
        {"t": size},
        [input, window],
    )


def _duration(
    frames: int, n_fft: int, hop_length: int | None, center: bool, **_: Any
) -> int:
    """The numbers that so many frames stand for; of the first and the last only half, where they are centered."""
    hop = n_fft // 4 if hop_length is None else hop_length
    return n_fft + hop * (frames - 1) - (n_fft // 2 * 2 if center else 0)


FRAMES = "input, n_fft, hop_length=None, win_length=None, window=None, center=True"
operator(
    "stft",
    f"{FRAMES}, pad_mode='reflect', normalized=False, onesided=None, return_complex=None, align_to_window=None",
    _stft,
    local=of_some,
)
operator(
    "istft",
    f"{FRAMES}, normalized=False, onesided=None, length=None, return_complex=False",
    _istft,
    local=of_some,
)
