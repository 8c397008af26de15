# SPDX-License-Identifier: Apache-2.0
"""What a framework can do here, found out in a process of its own: ``python -m hyper_parallel.cli.round_trip torch``.

It prints lines of JSON: the device, and then, once two processes have talked to each other, the backend and how long it
took. Untested on hardware other than CPUs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def exchange() -> tuple[str, list[float]]:
    """The backend, and what two ranks know of each other after a sum and a gather."""
    from hyper_parallel.platform import get_platform

    platform = get_platform()
    mine = platform.full((2,), float(platform.get_rank() + 1), device=platform.device())
    gathered = platform.all_gather_into_tensor(platform.clone(mine), None)
    total = platform.all_reduce(platform.clone(mine), None)
    both = [
        *platform.tensor_to_numpy(gathered).tolist(),
        *platform.tensor_to_numpy(total).tolist(),
    ]
    return platform.get_backend(), both


def main(framework: str) -> None:
    """Tells what a framework can do, step by step."""
    os.environ["HYPER_PARALLEL_PLATFORM"] = framework
    from hyper_parallel.platform import get_platform

    platform = get_platform()
    _tell(device=str(platform.device()), kind=platform.device_type())
    from hyper_parallel.ranks import close_ranks, run_ranks

    start = time.monotonic()
    found = run_ranks(exchange, 2, timeout=60.0)
    close_ranks()
    expected = [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    wrong = {
        rank: values for rank, (_, values) in enumerate(found) if values != expected
    }
    if wrong:
        raise SystemExit(f"expected {expected} of the two ranks, got {wrong}")
    _tell(backend=found[0][0], seconds=time.monotonic() - start)


def _tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)  # noqa: T201 - the parent reads it


if __name__ == "__main__":
    main(sys.argv[1])
