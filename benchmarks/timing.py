# SPDX-License-Identifier: Apache-2.0
"""Measures several ways of doing one thing in turns, so that the machine's moods meet all of them."""

import statistics
import time


def in_turns(
    ways, calls, rounds, clock=time.perf_counter, before=lambda: None, warm_up=3
):
    """Microseconds a call of each way, one number a round. ``before`` is called before each measurement."""
    found = {name: [] for name in ways}
    for number in range(rounds + warm_up):
        for name, way in ways.items():
            before()
            start = clock()
            for _ in range(calls):
                way()
            if number >= warm_up:
                found[name].append((clock() - start) / calls * 1e6)
    return found


def slowest(reports):
    """Of every way and round the time of the rank that took longest."""
    return {
        way: [max(times) for times in zip(*(one[way] for one in reports), strict=True)]
        for way in reports[0]
    }


def median(found, name):
    """The median of one way."""
    return statistics.median(found[name])


def ratio(found, one, other, beyond=None):
    """The median over the rounds of one way over another; of what they take ``beyond`` a third, where one is named."""
    base = found[beyond] if beyond is not None else [0.0] * len(found[one])
    return statistics.median(
        (a - c) / (b - c)
        for a, b, c in zip(found[one], found[other], base, strict=True)
    )
