# SPDX-License-Identifier: Apache-2.0
"""Replacing attributes of a framework: ``platform/<framework>/patches.py`` lists what is replaced and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

# (owner, attribute) -> what has been replaced in this process.
INSTALLED: dict[tuple[Any, str], Patch] = {}


class Patch(NamedTuple):
    """One replaced attribute of a module or class; ``replace`` maps the original, or None, to its replacement."""

    owner: Any
    attribute: str
    why: str
    replace: Callable[[Any], Any]

    def install(self) -> None:
        """Replaces the attribute, once per process."""
        key = (self.owner, self.attribute)
        if key not in INSTALLED:
            original = getattr(self.owner, self.attribute, None)
            setattr(self.owner, self.attribute, self.replace(original))
            INSTALLED[key] = self
