# SPDX-License-Identifier: Apache-2.0
"""The checks of orders under the names and with the results that programs of HyperParallel know.

    orders = {0: [MetaStep(0, MetaStepType.FWD, 0), ...], 1: [...]}
    orders = add_send_recv(orders, stage_num=2, real_stage_num=2)
    validate_pipeline_execution(orders, chunk_num=1)["error_messages"]     [] if they can run

``validate`` raises where something is wrong; these functions return what is wrong, and log it.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hyper_parallel.core.pipeline_parallel.action import (
    MESSAGES,
    MetaStep,
    message_of,
)
from hyper_parallel.core.pipeline_parallel.mapping import StageMapping
from hyper_parallel.core.pipeline_parallel.messages import add_messages
from hyper_parallel.core.pipeline_parallel.orders import Schedule
from hyper_parallel.core.pipeline_parallel.text import (
    collect_orders,
    parse_csv,
    parse_text,
)
from hyper_parallel.core.pipeline_parallel.validate import find_problems
from hyper_parallel.platform.error_codes import without_hint

_OPERATION = re.compile(r"Send_Receive_\((\d+)\)->\((\d+)\)_micro\d+_\d+th")
_LOGGER = logging.getLogger(__name__)

Orders = Mapping[int, Sequence[MetaStep | None]]


def add_send_recv(
    scheduler: Orders, stage_num: int, real_stage_num: int, style: str = "loop"
) -> dict[int, list[MetaStep]]:
    """The orders of all ranks with sends and receives.

    Args:
        scheduler: The computations of every rank; None is an idle slot and is left out.
        stage_num: The number of stages.
        real_stage_num: The number of ranks.
        style: ``"loop"``: stage s is on rank s % real_stage_num; ``"v"``: two stages per rank, the
            first and the last on rank 0.
    """
    orders = [scheduler[rank] for rank in range(real_stage_num)]
    schedule = collect_orders(orders, "add_send_recv", style, stage_num)
    return dict(enumerate(map(list, add_messages(schedule).orders)))


def validate_pipeline_execution(
    order_list: Orders, chunk_num: int, com_type: str = "loop"
) -> dict[str, Any]:
    """Checks orders, with or without messages, and returns everything that is wrong with them.

    Args:
        order_list: The actions of every rank.
        chunk_num: The number of stages per rank.
        com_type: The placement of stages, as in :func:`add_send_recv`.

    Returns:
        ``error_messages``: what is wrong, in words, and ``has_errors``; ``formatted_operations``:
        the messages, as by :func:`generate_operations`; ``cycle_path``, ``cycle_ranks`` and
        ``has_cycle``: as by :func:`detect_cycle_in_graph`.
    """
    operations = generate_operations(order_list, chunk_num, com_type)
    cycle_path, cycle_ranks = detect_cycle_in_graph(operations)
    problems = _find_order_list_problems(order_list, chunk_num, com_type)
    _log(problems)
    return {
        "formatted_operations": operations,
        "cycle_path": cycle_path,
        "cycle_ranks": cycle_ranks,
        "has_cycle": bool(cycle_path),
        "has_errors": bool(problems),
        "error_messages": problems,
    }


def _find_order_list_problems(
    order_list: Orders, chunk_num: int, com_type: str
) -> list[str]:
    stages = len(order_list) * chunk_num
    try:
        schedule = collect_orders(order_list, "order_list", com_type, stages)
    except ValueError as error:
        return [without_hint(error)]
    return find_problems(schedule)


def generate_operations(
    order_list: Orders, chunk_num: int, com_type: str = "loop"
) -> dict[str, list[str]]:
    """The messages of every rank in order, with one name at both ends.

    Returns:
        Rank, as a string, to names such as ``Send_Receive_(0)->(1)_micro3_1th``: the first message
        of micro batch 3 from rank 0 to rank 1.
    """
    ranks = len(order_list)
    mapping = StageMapping(com_type, ranks, ranks * chunk_num)
    operations: dict[str, list[str]] = {}
    for rank, order in order_list.items():
        steps = [step for step in order if step is not None and step.type in MESSAGES]
        if steps:
            operations[str(rank)] = list(_name_messages(steps, mapping))
    return operations


def _name_messages(steps: Iterable[MetaStep], mapping: StageMapping) -> Iterator[str]:
    counts: dict[tuple[int, int, int], int] = defaultdict(int)
    for step in steps:
        message = message_of(step)
        source, target = (
            mapping.rank_of(message.source),
            mapping.rank_of(message.target),
        )
        counts[source, target, message.micro] += 1
        number = counts[source, target, message.micro]
        yield f"Send_Receive_({source})->({target})_micro{message.micro}_{number}th"


def parse_and_validate(data: Any, all_rank: bool = True) -> list[str]:
    """Checks orders in any form, or the messages of :func:`generate_operations`.

    Args:
        data: A CSV or a text with one row per rank; a dict of orders by rank, of actions or of
            their texts; or a dict of names of messages by rank.
        all_rank: Whether names of messages must be there for all ranks; otherwise a message is
            compared only between ranks that are there.

    Returns:
        What is wrong, in words, which is logged too; empty if the data is right.
    """
    problems = list(_find_data_problems(data, is_complete=all_rank))
    _log(problems)
    return problems


def _find_data_problems(data: Any, *, is_complete: bool) -> Iterator[str]:
    if isinstance(data, str):
        parse = parse_csv if "," in data else parse_text
        yield from _find_schedule_problems(lambda: parse(data))
    elif not isinstance(data, Mapping):
        yield f"expected a CSV, a text or a dict by rank, got {type(data).__name__}"
    elif all(isinstance(rank, int) for rank in data):
        yield from _find_schedule_problems(lambda: collect_orders(_parse_steps(data)))
    else:
        yield from _find_unmatched(data, is_complete=is_complete)


def _find_schedule_problems(parse: Any) -> list[str]:
    try:
        schedule: Schedule = parse()
    except ValueError as error:
        return [without_hint(error)]
    return find_problems(schedule)


def _parse_steps(data: Mapping[int, Sequence[Any]]) -> dict[int, list[MetaStep | None]]:
    return {
        rank: [MetaStep.parse(s) if isinstance(s, str) else s for s in order]
        for rank, order in data.items()
    }


def _find_unmatched(
    operations: Mapping[str, Any], *, is_complete: bool
) -> Iterator[str]:
    """Messages that are missing at the other end."""
    for rank, names in operations.items():
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            yield f"the messages of rank {rank} must be a list of strings, got {names!r}"
            continue
        for name in names:
            yield from _find_missing_end(operations, rank, name, is_complete)


def _find_missing_end(
    operations: Mapping[str, Any],
    rank: str,
    name: str,
    is_complete: bool,
) -> Iterator[str]:
    match = _OPERATION.fullmatch(name)
    if match is None:
        yield f"rank {rank}: {name!r} does not name a message"
        return
    for other in match.groups():
        if other not in operations:
            if is_complete:
                yield f"rank {rank}: {name} needs rank {other}, which is missing"
        elif name not in operations[other]:
            yield f"rank {rank}: {name} is missing on rank {other}"


def detect_cycle_in_graph(
    ranks_map: Mapping[str, Sequence[str]],
) -> tuple[list[str] | None, list[str] | None]:
    """A cycle in the graph in which every name has an edge to the next one of the same rank.

    Args:
        ranks_map: The names of every rank, in order, as by :func:`generate_operations`.

    Returns:
        The names along the cycle, of which the last is the first again, and for every edge the
        rank and both names; ``(None, None)`` if there is no cycle.
    """
    edges: dict[str, dict[str, str]] = defaultdict(dict)
    for rank, names in ranks_map.items():
        for name, following in itertools.pairwise(names):
            edges[name][following] = rank
    path = _find_cycle(edges)
    if path is None:
        return None, None
    steps = itertools.pairwise(path)
    return path, [f"{edges[a][b]} {a} -> {b}" for a, b in steps]


def _find_cycle(edges: Mapping[str, Mapping[str, str]]) -> list[str] | None:
    finished: set[str] = set()
    for start in list(edges):
        if start not in finished:
            cycle = _search(edges, start, finished)
            if cycle is not None:
                return cycle
    return None


def _search(
    edges: Mapping[str, Mapping[str, str]], start: str, finished: set[str]
) -> list[str] | None:
    """Follows edges as deep as they lead; a name that is on the path already closes a cycle."""
    path = {start: iter(edges.get(start, ()))}
    while path:
        node, following = next(reversed(path.items()))
        name = next(following, None)
        if name is None:
            finished.add(node)
            del path[node]
        elif name in path:
            nodes = list(path)
            return [*nodes[nodes.index(name) :], name]
        elif name not in finished:
            path[name] = iter(edges.get(name, ()))
    return None


def _log(problems: Iterable[str]) -> None:
    for problem in problems:
        _LOGGER.error("%s", problem)
