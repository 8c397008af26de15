# SPDX-License-Identifier: Apache-2.0
"""Products of rows that are sorted by expert, each group with the weight of its expert.

y = grouped_linear(rows, weight, counts)        weight [experts, out, in]; counts: how many rows each expert has
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.platform import get_platform

platform = get_platform()


def grouped_linear(
    rows: Any,
    weight: Any,
    counts: Sequence[int],
    *,
    bias: Any = None,
    use_grouped_mm: bool = False,
) -> Any:
    """``rows @ weight[expert].T`` for each row; rows beyond the counts are not read, and give zeros.

    ``bias``: [experts, out], that of a row's expert is added. ``use_grouped_mm``: takes the framework's grouped product
    where it has one for this dtype. An expert without rows has a gradient of zeros.
    """
    used, total = sum(counts), int(rows.shape[0])
    valid = rows if used == total else rows[:used]
    if not used:
        shape = (0, weight.shape[1])
        result = platform.zeros(shape, dtype=rows.dtype, device=rows.device)
    elif use_grouped_mm and _has_grouped_mm(rows, weight):
        result = _multiply_at_once(valid, weight, counts)
    else:
        result = _multiply_each(valid, weight, counts)
    if bias is not None and used:
        result = result + _repeat_rows(bias, counts)
    if used < total:
        shape = (total - used, weight.shape[1])
        padding = platform.zeros(shape, dtype=rows.dtype, device=rows.device)
        result = platform.cat([result, padding], 0) if used else padding
    operands = [rows, weight] if bias is None else [rows, weight, bias]
    return result if used else platform.keep_in_graph(result, operands)


def _has_grouped_mm(rows: Any, weight: Any) -> bool:
    dtypes = [platform.str_to_dtype(name) for name in ("float32", "bfloat16")]
    if rows.dtype not in dtypes or weight.dtype != rows.dtype:
        return False
    # Its kernels read rows of multiples of 16 bytes.
    size = platform.get_element_size(rows)
    if any(int(dim) * size % 16 for dim in weight.shape[1:]):
        return False
    try:
        platform.operator("grouped_mm")
    except AttributeError:
        return False
    return True


def _multiply_at_once(rows: Any, weight: Any, counts: Sequence[int]) -> Any:
    ends, end = [], 0
    for count in counts:
        end += count
        ends.append(end)
    offsets = platform.tensor(ends).to(platform.str_to_dtype("int32")).to(rows.device)
    turned = platform.operator("transpose")(weight, 1, 2)
    return platform.operator("grouped_mm")(rows.contiguous(), turned, offs=offsets)


def _multiply_each(rows: Any, weight: Any, counts: Sequence[int]) -> Any:
    return run_each(platform.operator("linear"), rows, [weight], counts)


def run_each(
    compute: Callable[..., Any],
    rows: Any,
    weights: Sequence[Any],
    counts: Sequence[int],
) -> Any:
    """``compute(rows, *weights)`` of one expert after the other, each with its own; some must have rows."""
    sizes = [count for count in counts if count]
    # Not slices: the gradient of each would be as large as all rows.
    parts = iter(platform.operator("split")(rows, sizes, 0))
    unbind = platform.operator("unbind")
    of_experts = zip(counts, *(unbind(weight, 0) for weight in weights), strict=True)
    results = [compute(next(parts), *own) for count, *own in of_experts if count]
    return results[0] if len(results) == 1 else platform.cat(results, 0)


def _repeat_rows(values: Any, counts: Sequence[int]) -> Any:
    """Of every expert's row as many copies as it has rows."""
    expand = platform.operator("expand")
    pairs = zip(platform.operator("unbind")(values, 0), counts, strict=True)
    parts = [
        expand(one.reshape((1, -1)), (count, values.shape[1]))
        for one, count in pairs
        if count
    ]
    return parts[0] if len(parts) == 1 else platform.cat(parts, 0)
