# SPDX-License-Identifier: Apache-2.0
"""What an operator would do with operands of given shapes and placements: ``hyper-parallel ops NAME --operands``."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.cli.failures import BadInputError
from hyper_parallel.platform.error_codes import without_hint

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Layout
    from hyper_parallel.core.dtensor.placement_types import Placement


def describe_decision(
    name: str, operands: str, mesh: str, given: Sequence[str]
) -> list[str]:
    """The decision, line by line. ``operands``: '8,16:S(1) 16,4:R', a placement per axis; ``mesh``: 'dp=2,tp=4'."""
    from hyper_parallel.core.dtensor.dtensor import DTensor
    from hyper_parallel.core.shard.decision import decide
    from hyper_parallel.platform import get_platform

    platform, axes = get_platform(), _parse_mesh(mesh)
    tensors = []
    for operand in operands.split(" "):
        shape, layout = _parse_operand(operand, axes)
        local = platform.empty(layout.local_shape(shape, (0,) * layout.mesh.ndim))
        tensors.append(DTensor(local, layout, platform.list_to_size(list(shape))))
    try:
        named = dict(entry.split("=", 1) for entry in given)
        arguments = {key: ast.literal_eval(value) for key, value in named.items()}
        decision = decide(platform.operator(name), *tensors, **arguments)
    except (ValueError, TypeError, IndexError, SyntaxError) as error:
        raise BadInputError(f"{name}: {without_hint(error)}") from error
    return str(decision).splitlines()


def _parse_mesh(mesh: str) -> Layout:
    from hyper_parallel.core.dtensor.layout import Layout

    pairs = [entry.partition("=") for entry in mesh.split(",")]
    if not all(size.isdecimal() and int(size) > 0 for _, _, size in pairs):
        raise BadInputError(f"--mesh: expected sizes by name, as tp=2, got {mesh!r}")
    sizes = [int(size) for _, _, size in pairs]
    return Layout(sizes, [name for name, _, _ in pairs])


def _parse_operand(text: str, axes: Layout) -> tuple[tuple[int, ...], Any]:
    sizes, _, placed = text.partition(":")
    try:
        shape = tuple(int(size) for size in sizes.split(",") if size)
        names = [part for part in re.split(r",(?![^(]*\))", placed) if part]
        placements = [_parse_placement(name) for name in names]
        return shape, axes(placements).bind(len(shape))
    except ValueError as error:
        message = f"--operands: {text!r} is not a shape and its placements, as 8,16:S(0): {without_hint(error)}"
        raise BadInputError(message) from error


def _parse_placement(text: str) -> Placement:
    from hyper_parallel.core.dtensor.placement_types import (
        Partial,
        Replicate,
        Shard,
        parse_irregular,
    )

    if text == "R":
        return Replicate()
    if match := re.fullmatch(r"P(?:\((\w+)\))?", text):
        return Partial(match[1] or "sum")
    if match := re.fullmatch(r"S\((-?\d+)\)", text):
        return Shard(int(match[1]))
    return parse_irregular(text)
