# SPDX-License-Identifier: Apache-2.0
"""Which rank runs which stage of a pipeline.

StageMapping("loop", ranks=4, stages=8).rank_of(5)    1: stage s is on rank s % 4
StageMapping("v", ranks=4, stages=8).rank_of(5)       2: the first and last stage are on rank 0
StageMapping("bidirectional", 4, 4, 8).rank_of(1, micro=6)
                                                      2: the later half enters at the last rank
"""

from __future__ import annotations

from dataclasses import dataclass

from hyper_parallel.platform.error_codes import coded

STYLES = ("loop", "v", "bidirectional")


@dataclass(frozen=True)
class StageMapping:
    """The ranks of all stages.

    "loop"            stage s is on rank s % ranks
    "v"               two stages per rank: s and 2 * ranks - 1 - s
    "bidirectional"   every stage is on two ranks: s for the first half of the micro batches, and
                      ranks - 1 - s for the second half
    """

    style: str
    ranks: int
    stages: int
    micro_batches: int = 0

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise coded(
                ValueError,
                "HP468",
                f"the placement of stages must be one of {', '.join(STYLES)}, got {self.style!r}",
            )

    def rank_of(self, stage: int, micro: int = 0) -> int:
        """The rank that runs a stage for a micro batch."""
        if self.style == "loop":
            return stage % self.ranks
        if self.style == "v":
            return stage if stage < self.ranks else 2 * self.ranks - 1 - stage
        is_in_first_half = 2 * micro < self.micro_batches
        return stage if is_in_first_half else self.ranks - 1 - stage

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in ascending order."""
        if self.style == "bidirectional":
            return tuple(sorted({rank, self.ranks - 1 - rank}))
        owned = range(self.stages)
        return tuple(stage for stage in owned if self.rank_of(stage) == rank)

    @property
    def chunks(self) -> int:
        """How many parts a rank's share of the layers has."""
        return max(1, self.stages // self.ranks)
