# SPDX-License-Identifier: Apache-2.0
"""Errors that say where to read on: each cause has a code, and each code a place in docs/errors.md.

    raise ValueError(coded("HP203", f"no axis {name!r} in {names}"))

The type stays what the contract says. What the codes mean is in ``hyper_parallel/cli/explanations.py``.
"""

from __future__ import annotations

import re

_SUFFIX = r" \[(HP\d{3}): docs/errors\.md#hp\d{3}\]"  # compiled when it is needed, to keep the import light


def coded(code: str, message: str) -> str:
    """The message with its code, and with where to read about it."""
    return f"{message} [{code}: docs/errors.md#{code.lower()}]"


def without_code(message: str) -> str:
    """The message as it was before it got a code."""
    return re.sub(_SUFFIX, "", message)


def code_of(error: BaseException) -> str | None:
    """The code of one of our errors; None for those of others."""
    found = re.findall(_SUFFIX, str(error))
    return found[-1] if found else None
