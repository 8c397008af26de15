# SPDX-License-Identifier: Apache-2.0
"""On MindSpore, too: ranks that part are told what each issued and where, and what waits says which axis and number."""

import re

import frame
import numpy as np
import pytest

from hyper_parallel import CommunicationError, get_platform, init_device_mesh
from hyper_parallel.platform.error_codes import code_of
from hyper_parallel.testing import on_ranks

CALLS = {
    "collective": (lambda p, g: p.all_reduce(ones(4), g), lambda p, g: p.barrier(g)),
    "shape": (
        lambda p, g: p.all_reduce(ones(4), g),
        lambda p, g: p.all_reduce(ones(5), g),
    ),
    "dtype": (
        lambda p, g: p.all_reduce(ones(4), g),
        lambda p, g: p.all_reduce(ones(4, "float64"), g),
    ),
}
TOLD = {
    "collective": ("all_reduce(sum, float32, (4,))", "barrier()"),
    "shape": ("all_reduce(sum, float32, (4,))", "all_reduce(sum, float32, (5,))"),
    "dtype": ("all_reduce(sum, float32, (4,))", "all_reduce(sum, float64, (4,))"),
}


def ones(count, dtype="float32"):
    return frame.tensor(np.ones(count, dtype))


@pytest.mark.parametrize("how", sorted(CALLS))
@on_ranks(2, timeout=20)
def test_every_rank_is_told_what_each_issued_and_where(how):
    platform = get_platform()
    group = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)).get_group()
    platform.barrier(group)
    with platform.checked_order():
        platform.barrier(group)
        with pytest.raises(
            CommunicationError, match="the ranks part at collective 3 of axis 'tp'"
        ) as raised:
            CALLS[how][platform.get_rank()](platform, group)
    for r in range(2):
        assert re.search(
            rf"rank {r} issued {re.escape(TOLD[how][r])} at test_order_mindspore.py:\d+",
            str(raised.value),
        )
    assert (code_of(raised.value), raised.value.number, raised.value.axis) == (
        "HP115",
        3,
        "tp",
    )
    assert (
        frame.array(platform.all_reduce(ones(1), group)).item() == 2
    )  # the group is as good as before
    with pytest.raises(
        ValueError, match="the ranks do not agree"
    ) as raised:  # as ever, outside of the check
        CALLS[how][platform.get_rank()](platform, group)
    assert code_of(raised.value) == "HP117"


@on_ranks(4, timeout=20)
def test_a_collective_that_waits_too_long_says_axis_and_number_and_who_is_missing():
    platform = get_platform()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    platform.mark_created_groups(
        platform.split_group(None, [[0, 1], [2, 3]], timeout=1)
    )
    group = mesh.get_group("tp")
    for _ in range(2):
        platform.all_reduce(ones(1), group)
    if platform.get_rank() == 2:
        with pytest.raises(CommunicationError) as raised:
            platform.all_reduce(ones(1), group)
        error = raised.value
        assert (error.number, error.axis, error.missing, code_of(error)) == (
            3,
            "tp",
            (3,),
            "HP111",
        )
        assert "it is collective 3 of axis 'tp'; ranks that never came: [3]" in str(
            error
        )
    platform.barrier()
