# SPDX-License-Identifier: Apache-2.0
"""The framework-neutral core: platform, numpy and the standard library only."""
