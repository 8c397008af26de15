# SPDX-License-Identifier: Apache-2.0
"""Replacements for kernels that MindSpore lacks, or has wrong, on a CPU."""
