# SPDX-License-Identifier: Apache-2.0
"""How much is tried of what there is too much of: in CI every case once, by ``make thorough`` each combination."""

import os
from contextlib import contextmanager

from hyper_parallel.platform import get_platform

THOROUGH = os.environ.get("HYPER_PARALLEL_THOROUGH", "") not in ("", "0")
FEW = 10  # collectives of each group


@contextmanager
def compare_few_collectives():
    """For sweeps over operators: in CI their ranks compare only the first collectives of each group with each other.

    By default the ranks of a job compare a hundred, which is all that a small job has and costs as much as the
    collectives themselves. Other tests keep the default, and tests/distributed/test_order_check.py is about it.
    """
    platform = get_platform()
    before = platform._compared_first
    if not THOROUGH:
        platform._compared_first = min(before, FEW)
    try:
        yield
    finally:
        platform._compared_first = before
