# SPDX-License-Identifier: Apache-2.0
"""Errors with a code, which ``hyper-parallel explain`` and docs/errors.md explain.

    raise coded(ValueError, "HP203", f"no axis {name!r} in {names}")

The type is the one that the contract asks for; ``error.code`` is "HP203", and the message
ends with the command that explains it. ``hyper_parallel/cli/explanations.txt`` has the
explanations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)


def coded(
    kind: Callable[..., E], code: str, message: str, *args: Any, **kwargs: Any
) -> E:
    """An error of this type with its code; further arguments go to the type."""
    error = kind(message + hint(code), *args, **kwargs)
    error.code = code  # type: ignore[attr-defined]
    return error


def prefixed(prefix: str, error: E, kind: Callable[..., E] | None = None) -> E:
    """The error again, of this type if one is given, with a prefix to its message."""
    again = (kind or type(error))(f"{prefix}: {error}")
    code = code_of(error)
    if code is not None:
        again.code = code  # type: ignore[attr-defined]
    return again


def hint(code: str) -> str:
    """What a message with this code ends with."""
    return f" [hyper-parallel explain {code}]"


def code_of(error: BaseException) -> str | None:
    """The code of one of our errors; None for any other error."""
    code = getattr(error, "code", None)
    return code if isinstance(code, str) and code.startswith("HP") else None


def without_hint(error: BaseException, message: str | None = None) -> str:
    """The error's message, or the given part of it, without the hint at its code."""
    text = str(error) if message is None else message
    code = code_of(error)
    return text if code is None else text.replace(hint(code), "")
