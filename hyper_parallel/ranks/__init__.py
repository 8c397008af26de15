# SPDX-License-Identifier: Apache-2.0
"""Rank processes: how they start, how they are watched, and how they end, for jobs and for tests.

One process per rank and job, as a training needs it:      processes.py
Processes that stay and run one function after another:    pool.py, worker.py, job.py

Both share the environment of a rank (environment.py), its end with its parent (parent.py), the wait for exits with a
grace period (watch.py), log files (logs.py) and the order of failures, causes before echoes (failures.py).
"""

from hyper_parallel.ranks.pool import RankError, close_ranks, preload, run_ranks

__all__ = ["RankError", "close_ranks", "preload", "run_ranks"]
