# SPDX-License-Identifier: Apache-2.0
"""Runs a benchmark on two hosts of one rank and one thread each, with a link of a given rate between them.

The hosts are network namespaces (tools/hosts.py). The script is called with ``--rank SIZES ROUNDS``, both as JSON, and
prints what it has measured as a line of JSON.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "llama")]

from tools.hosts import Hosts, why_unavailable  # noqa: E402 - found by the line above


def read_options(description, measure):
    """Whether to measure with small sizes; None if there is nothing to do, as in a rank, which measures here."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--tiny", action="store_true", help="small sizes, one round")
    parser.add_argument("--rank", nargs=2, metavar=("SIZES", "ROUNDS"))
    options = parser.parse_args()
    if options.rank is not None:
        sizes, rounds = map(json.loads, options.rank)
        print(json.dumps(measure(sizes, rounds)))
        return None
    reason = why_unavailable()
    if reason:
        print(f"\n{description}: not measured, {reason}")
        return None
    return options.tiny


def run_on_hosts(script, rate, sizes, rounds):
    """What both ranks report, with a link of a rate between them."""
    own = [sys.executable, str(Path(script).resolve())]
    command = [*own, "--rank", json.dumps(sizes), str(rounds)]
    with Hosts(2, rate=rate) as hosts:
        ranks = []
        for host in range(2):
            job = {
                "RANK": str(host),
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "2",
                "MASTER_ADDR": hosts.addresses[0],
                "MASTER_PORT": "29500",
                "OMP_NUM_THREADS": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # hosts have no names to warn about
                "HYPER_PARALLEL_CHECK_ORDER": "0",  # it ends after the first collectives
            }
            pipe = {"stdout": subprocess.PIPE, "text": True}
            ranks.append(hosts.start(host, command, env={**os.environ, **job}, **pipe))
        outputs = [rank.communicate()[0] for rank in ranks]
        for rank in ranks:
            if rank.returncode:
                raise SystemExit(f"a rank failed with exit code {rank.returncode}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]
