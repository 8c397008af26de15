# SPDX-License-Identifier: Apache-2.0
"""Takes a step of every architecture on meshes by `auto_plan` and compares it with one process.

    python -m tools.architectures --page                 writes docs/architectures.md
    python -m tools.architectures llama bert             some of them, told in lines

Loss and every gradient, in float64, against the same model on one process. *Refused*: an error of this library with a
code, before or in the first step, the same on all ranks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hyper_parallel.testing import close_ranks
from tools.architecture_models import ARCHITECTURES
from tools.architecture_steps import run

PAGE = Path(__file__).resolve().parents[1] / "docs/architectures.md"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--mesh", default="tp=2")
    parser.add_argument("--sequence-parallel", action="store_true")
    options = parser.parse_args(arguments)
    axes = {
        name: int(size)
        for name, _, size in (one.partition("=") for one in options.mesh.split(","))
    }
    bad = 0
    for name in options.names:
        outcome = run(name, axes, options.sequence_parallel)
        bad += outcome.verdict in ("wrong", "crashed")
        print(f"{name:<18}{outcome.verdict:<9}{outcome.text}", flush=True)
    close_ranks()
    return bad


if __name__ == "__main__":
    sys.exit(main())
