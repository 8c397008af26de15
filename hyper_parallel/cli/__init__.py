# SPDX-License-Identifier: Apache-2.0
"""The command ``hyper-parallel``. Nothing heavy is imported before a command needs it."""

from hyper_parallel.cli.main import main

__all__ = ["main"]
