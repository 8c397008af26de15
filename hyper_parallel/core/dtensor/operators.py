# SPDX-License-Identifier: Apache-2.0
"""Where operators on distributed tensors come from: a layer above this one, which the package names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_sources: list[Callable[[], Any]] = []


def operators_come_from(source: Callable[[], Any]) -> None:
    """``source()`` gives the dispatcher; it is asked when the first operator is called."""
    _sources.append(source)


@functools.cache
def dispatcher() -> Any:
    """What runs operators."""
    return _sources[-1]()
