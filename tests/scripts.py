# SPDX-License-Identifier: Apache-2.0
"""Runs a script on several processes as torchrun does, forked where the framework is imported already."""

import multiprocessing
import os
import runpy
import sys
import warnings

from hyper_parallel.ranks.environment import find_port


def run_script(script, count, folder, timeout=300):
    """Each process's exit code, and what each wrote."""
    port = find_port()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["hyper_parallel.ranks.worker", "hyper_parallel.platform.torch"]
    )  # as for ranks
    logs = [folder / f"rank{rank}.log" for rank in range(count)]
    started = [
        context.Process(target=_run, args=(str(script), r, count, port, str(logs[r])))
        for r in range(count)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(timeout)
    codes = [process.exitcode for process in started]
    for process in started:
        process.kill()
        process.join()
        process.close()
    return codes, [log.read_text() for log in logs]


def _run(script, rank, count, port, log):
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "OMP_NUM_THREADS": "1",
    }
    os.environ |= {
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    sys.argv = [script]
    sys.path[0] = os.path.dirname(script)  # noqa: PTH120 - as the interpreter does it
    warnings.simplefilter("error")
    runpy.run_path(script, run_name="__main__")
