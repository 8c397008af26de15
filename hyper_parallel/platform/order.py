# SPDX-License-Identifier: Apache-2.0
"""Whether the ranks of a group issue the same collectives in the same order, and what each issued where they part.

HYPER_PARALLEL_CHECK_ORDER=first:100 torchrun ...

CommunicationError: rank 0: the ranks part at collective 3 of axis 'tp', ranks [0, 1]: rank 0 issued
all_reduce(sum, float32, (4,)) at train.py:31; rank 1 issued barrier() at train.py:35. ...
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hyper_parallel.platform.axes import axis_of
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.errors import CommunicationError

HYPER_PARALLEL_CHECK_ORDER = "HYPER_PARALLEL_CHECK_ORDER"

# Which unit of fully_shard a collective is for.
_UNIT = r", number \d+"

# More collectives than any program issues.
ALL = 1 << 62

# As many of each group are compared unless the environment asks for something else, where a backend ends the process
# of ranks that part: ranks mostly part in the first steps, and it costs some milliseconds in the life of a job.
FIRST = 100


def first_compared(
    asked: str | None, default: int = 0, variable: str = HYPER_PARALLEL_CHECK_ORDER
) -> int:
    """How many of each kind are compared, as a variable of the environment asks."""
    if asked is None:
        return default
    if asked in ("", "0"):
        return 0
    if asked == "1":
        return ALL
    word, _, count = asked.partition(":")
    if word != "first" or not count.isdecimal():
        raise coded(
            ValueError,
            "HP116",
            f"{variable} must be 0, 1 or first:N as in first:100, got {asked!r}",
        )
    return int(count)


def parted(
    rank: int, number: int, ranks: Sequence[int], issued: Mapping[int, str]
) -> CommunicationError:
    """The error of a rank whose group parts at its collective of that number; ``issued``: what is known of each."""
    axis = axis_of(ranks)
    told = "; ".join(
        f"rank {r} {f'issued {issued[r]}' if r in issued else 'has not said'}"
        for r in ranks
    )
    return coded(
        CommunicationError,
        "HP115",
        f"rank {rank}: the ranks part at collective {number} of {_place(ranks, axis)}: {told}. Every rank of a "
        f"group must issue the same collectives in the same order: {_remedy(issued)}.",
        collective=issued.get(rank, "").partition("(")[0],
        ranks=tuple(ranks),
        missing=tuple(r for r in ranks if r not in issued),
        number=number,
        axis=axis,
    )


def _remedy(issued: Mapping[int, str]) -> str:
    calls = {one.partition(" at ")[0] for one in issued.values()}
    if len({re.sub(_UNIT, "", call) for call in calls}) < len(calls):
        return (
            "here the numbers differ, which are those of fully_shard units. Wrap and run the same units in the same "
            "order on all ranks; with set_reduce_scatter_unused_params(True), ranks whose loss does not depend on a "
            "unit add zeros"
        )
    if len({one.partition("(")[0] for one in issued.values()}) == 1:
        return (
            "here the sizes differ. If the ranks have pieces of different sizes, say the shape of the whole, "
            "DTensor.from_local(..., shape=); else look for data that not all ranks have alike"
        )
    return "look for a branch that not all ranks take"


def in_a_circle(
    rank: int, circle: Sequence[tuple[int, Mapping[str, Any]]]
) -> CommunicationError:
    """The error of ranks that wait for each other; of each: number, what was ``issued``, the group's ranks and axis."""
    told = "; ".join(
        f"rank {r} waits in collective {one['number']} of {_place(one['ranks'], one['axis'])}, {one['issued']}"
        for r, one in circle
    )
    own = dict(circle).get(rank) or circle[0][1]
    return coded(
        CommunicationError,
        "HP119",
        f"rank {rank}: the ranks wait for each other: {told}. Each waits for the next and the last for the first: "
        "all ranks must issue the collectives of different groups in one order.",
        collective=own["issued"].partition("(")[0],
        ranks=tuple(own["ranks"]),
        missing=(),
        number=own["number"],
        axis=own["axis"],
    )


def _place(ranks: Sequence[int], axis: str) -> str:
    return f"axis {axis!r}, ranks {list(ranks)}" if axis else f"ranks {list(ranks)}"
