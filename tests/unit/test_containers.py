# SPDX-License-Identifier: Apache-2.0
"""Mapping over nested containers keeps their structure and types."""

import collections
import dataclasses

from hyper_parallel import get_platform
from hyper_parallel.platform.containers import leaves, tree_map

Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Batch:
    inputs: list
    name: str


def test_tree_map_keeps_structure_and_types():
    counts = collections.defaultdict(int, a=1)
    tree = {
        "x": [1, (2, 3)],
        "y": Pair(4, {5}),
        "z": Batch([6], 7),
        "o": collections.OrderedDict(b=8),
        "d": counts,
    }
    mapped = tree_map(lambda leaf: leaf * 10, tree)
    assert mapped == {
        "x": [10, (20, 30)],
        "y": Pair(40, {50}),
        "z": Batch([60], 70),
        "o": collections.OrderedDict(b=80),
        "d": {"a": 10},
    }
    assert type(mapped["y"]) is Pair
    assert type(mapped["o"]) is collections.OrderedDict
    assert mapped["d"]["missing"] == 0
    assert tree["z"].inputs == [6]  # the original is left alone
    assert leaves(tree) == [1, 2, 3, 4, 5, 6, 7, 8, 1]


def test_platform_maps_over_leaves_and_over_tensors():
    platform = get_platform()
    tree = {"t": platform.ones((2,)), "s": "text", "n": [1, platform.zeros((1,))]}
    mapped = platform.apply_to_tensors(lambda t: t + 1, tree)
    assert mapped["t"].tolist() == [2, 2]
    assert mapped["n"][1].tolist() == [1]
    assert (mapped["s"], mapped["n"][0]) == ("text", 1)
    assert platform.tree_map(str, [1, (2,)]) == ["1", ("2",)]
