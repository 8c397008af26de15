# SPDX-License-Identifier: Apache-2.0
"""What the page on activation checkpointing begins with: its warning about a CPU comes once in a process."""

import warnings

from hyper_parallel.core.activation_checkpoint import groups

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    groups._warn_on_cpu()
