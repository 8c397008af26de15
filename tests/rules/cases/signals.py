# SPDX-License-Identifier: Apache-2.0
"""Calls of Fourier transforms."""

from rules.framework import its, torch
from rules.operators import OpCase


def op(name, call, shapes, shards, carries=2, sizes=("uneven", "empty"), **more):
    return OpCase(name, call, shapes, shards, carries, sizes=sizes, **more)


def by_name(name, **how):
    return lambda x: getattr(torch.fft, name)(x, **how)


def short(x, window, steps=(), **how):
    return torch.stft(x, 4, *steps, window=window, return_complex=True, **how)


def long(x, window, **how):
    return torch.istft(x, 4, window=window, **how)


COMPLEX = {"complexes": (0,)}
CASES = [
    op("fft", torch.fft.fft, "ab", "d0", sizes=("even", "uneven", "empty")),
    op(
        "fft of complexes",
        lambda x: torch.fft.fft(x, 5, 0, "ortho"),
        "ab",
        "d1",
        **COMPLEX,
    ),
    op("ifft", by_name("ifft", dim=1), "abc", "d0 d2", **COMPLEX),
    op("rfft", lambda x: torch.fft.rfft(x, n=3), "abc", "d0 d1"),
    op("irfft", by_name("irfft", n=6, norm="forward"), "a4", "d0", **COMPLEX),
    op("hfft", by_name("hfft", dim=0), "4a", "d1", **COMPLEX),
    op("ihfft", torch.fft.ihfft, "a4", "d0"),
    op("fft2", torch.fft.fft2, "abc", "d0"),
    op("ifft2", by_name("ifft2", s=(2, 3), dim=(0, 2)), "abc", "d1", **COMPLEX),
    op("rfft2", by_name("rfft2", dim=(-1, -3)), "4a3", "d1"),
    op("irfft2", torch.fft.irfft2, "a44", "d0", **COMPLEX),
    op("hfft2", torch.fft.hfft2, "a33", "d0", **COMPLEX),
    op("ihfft2", torch.fft.ihfft2, "a33", "d0"),
    op("fftn of some", by_name("fftn", dim=[1]), "abc", "d0 d2"),
    op("fftn of all", torch.fft.fftn, "ab", ""),
    op("ifftn", by_name("ifftn", s=(2, 5)), "abc", "d0", **COMPLEX),
    op("rfftn", by_name("rfftn", s=[3]), "ab", "d0"),
    op("irfftn", by_name("irfftn", dim=(1, 2)), "a33", "d0", **COMPLEX),
    op("hfftn", by_name("hfftn", dim=(1,)), "a33", "d0 d2", **COMPLEX),
    op("ihfftn", by_name("ihfftn", dim=(1,)), "a33", "d0 d2"),
    op("fftshift", by_name("fftshift", dim=1), "abc", "d0 d2", 5),
    op("fftshift of all", torch.fft.fftshift, "ab", "", 5),
    op("ifftshift", by_name("ifftshift", dim=(0, -1)), "abc", "d1", 5),
    op("stft", short, "a9 4", "b", 4),
    op(
        "stft unbatched",
        lambda x, w: short(x, w, steps=(2, 3), center=False, onesided=False),
        "9 3",
        "",
        4,
    ),
    op(
        "stft by method",
        lambda x, w: its(x).stft(
            4, 3, window=w, return_complex=True, pad_mode="constant"
        ),
        "a9 4",
        "b",
        4,
    ),
    op("istft", long, "a35 4", "b", complexes=(0,), positive=(1,)),
    op(
        "istft unbatched",
        lambda x, w: long(x, w, hop_length=2, length=7),
        "35 4",
        "",
        complexes=(0,),
        positive=(1,),
    ),
    op(
        "istft, not centered",
        lambda x, w: long(x, w, center=False),
        "a35 4",
        "b",
        complexes=(0,),
        positive=(1,),
    ),
]

COMPOSITES = [
    op(
        "filter",
        lambda x, y: torch.fft.irfft(
            torch.fft.rfft(x, dim=1) * torch.fft.rfft(y, dim=0), dim=1
        ),
        "a4 4",
        None,
    ),
    op("spectrum", lambda x: torch.fft.fft(x, dim=0).abs(), "ab", None),
]
