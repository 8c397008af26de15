# SPDX-License-Identifier: Apache-2.0
"""What authors of operators outside this repository need to test on real ranks.

def square_of_rank(power):
    return get_platform().get_rank() ** power

assert run_ranks(square_of_rank, 4, 2) == [0, 1, 4, 9]
"""

from hyper_parallel.testing.pool import RankError, close_ranks, on_ranks, run_ranks

__all__ = ["RankError", "close_ranks", "on_ranks", "run_ranks"]
