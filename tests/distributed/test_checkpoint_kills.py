# SPDX-License-Identifier: Apache-2.0
"""Ranks that are killed while they save leave the old checkpoint or the new one; tools/kill_saves.py does many more."""

import random

import pytest

from tools.kill_saves import NEW, NONE, OLD, PHASES, WRONG, Kill, any_moments, run


def test_a_kill_at_every_phase_and_at_some_moments(tmp_path):
    kills = [
        Kill(
            phase,
            number % 2,
            overwrites=phase == "leftover removed" or number % 3 > 0,
            in_background=number % 4 > 1,
        )
        for number, phase in enumerate(PHASES)
    ]
    kills += [
        Kill("data", 2, 3, skips=2),
        Kill("metadata written", 0),
        Kill("metadata renamed", 2, 3, in_background=True),
    ]
    results = run([*kills, *any_moments(4, random.Random(5))], tmp_path)
    assert [result for result in results if result.violations] == []
    assert len(results) == len(PHASES) + 7
    assert {result.outcome for result in results} == {OLD, NEW, NONE}


@pytest.mark.parametrize(
    ("broken", "kill", "found"),
    [
        ("one tag", Kill("sums", 1), "mixture"),
        ("one tag", Kill("renamed", 0), "mixture"),
        ("metadata first", Kill("data", 1, overwrites=False), "No such file"),
        ("metadata first", Kill("metadata synced", 0), "No such file"),
    ],
)
def test_a_save_in_the_wrong_order_is_seen(tmp_path, broken, kill, found):
    [result] = run([kill], tmp_path, broken=broken)
    assert result.outcome == WRONG
    assert found in " ".join(result.violations)
