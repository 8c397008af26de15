# SPDX-License-Identifier: Apache-2.0
"""Kills ranks while they save, and looks at what a reader then finds: the old checkpoint or the new, never a mixture.

    python tools/kill_saves.py --kills 240 --seed 0

Two or three rank processes save a state whose every value tells its generation. One rank is killed (SIGKILL) when a
save is at a certain phase, on its own rank or, for what only the first rank does, there; or at a random moment. Then
one process reads the folder with all checksums: it must find the generation before or the new one, all of it, and in a
new folder the new one or that there is none. The ranks that are left must say who is missing and end. New ranks then
save into the same folder, which must work, and leave nothing of the saves that were broken.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hyper_parallel import (
    Replicate,
    Shard,
    distribute_tensor,
    get_platform,
    init_device_mesh,
)
from hyper_parallel.core.distributed_checkpoint import (
    CheckpointError,
    PerRank,
    async_save,
    data_file,
    load,
    save,
    saving,
)
from hyper_parallel.core.distributed_checkpoint.storage import WriteResult
from hyper_parallel.platform import CommunicationError

ON_EVERY_RANK = (
    "created",
    "header",
    "data",
    "sums",
    "synced",
    "renamed",
    "folder synced",
)
ON_THE_FIRST = (
    "metadata written",
    "metadata renamed",
    "metadata synced",
    "leftover removed",
)
PHASES = (*ON_EVERY_RANK, *ON_THE_FIRST)
ANY_MOMENT = "any moment"
TIMEOUT = 20.0  # seconds that a rank waits for another one before it gives up
DEADLINE = TIMEOUT + 10.0  # seconds after which a rank has hung
OLD, NEW, NONE, WRONG = "old", "new", "none", "WRONG"


@dataclass(frozen=True)
class Kill:
    """One rank's death: when, whose, and in what kind of save."""

    phase: str
    rank: int
    ranks: int = 2
    overwrites: bool = True
    in_background: bool = False
    skips: int = 0  # how often the phase is passed before
    moment: float = 0.0  # of ANY_MOMENT: a share of the time that a save takes

    def __str__(self) -> str:
        kind = f"{'async_save' if self.in_background else 'save'} {'over an old one' if self.overwrites else 'as new'}"
        when = (
            f"at {self.moment:.2f} of it"
            if self.phase == ANY_MOMENT
            else f"{self.phase!r} after {self.skips}"
        )
        return f"rank {self.rank} of {self.ranks}, {when}, {kind}"


@dataclass
class Result:
    """What came of a kill."""

    kill: Kill
    outcome: str = WRONG
    violations: list[str] = field(default_factory=list)


# --- the state: every value is a function of the generation


def _values(generation: int, ranks: int) -> dict[str, Any]:
    """What a checkpoint of this generation holds, as one process sees it."""

    def numbers(dtype: str, *shape: int) -> torch.Tensor:
        return torch.from_numpy(
            (
                np.arange(np.prod(shape)).reshape(shape) % 1009 + 1009 * generation
            ).astype(dtype)
        )

    return {
        "model": {
            "cut": numbers("float32", 601, 1024),
            "columns": numbers("int32", 3, 70_001),
            "copied": numbers("float64", 300, 400),
            "plain": numbers("int64", 50_000),
        },
        "step": generation,
        "note": {"text": f"generation {generation}", "pair": (generation, None)},
        "own": {
            rank: {"rank": rank, "generation": generation} for rank in range(ranks)
        },
        "rows": torch.arange(ranks)[:, None] * 1000
        + generation
        + torch.zeros(1, 5, dtype=torch.int64),
    }


def _state(generation: int, ranks: int, rank: int) -> dict[str, Any]:
    """The same as the ranks have it: cut, copied, and each its own."""
    state = _values(generation, ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    model = state["model"]
    for name, placement in (
        ("cut", Shard(0)),
        ("columns", Shard(1)),
        ("copied", Replicate()),
    ):
        model[name] = distribute_tensor(model[name], mesh, [placement])
    return {
        **state,
        "own": PerRank(state["own"][rank]),
        "rows": PerRank(state["rows"][rank].contiguous()),
    }


def _emptied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _emptied(inner) for key, inner in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(_is_same(one[k], other[k]) for k in one)
        )
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def _has(folder: Path, generation: int, ranks: int) -> bool:
    """Whether a folder has this generation, all of it. An error of reading is the caller's."""
    wanted = _values(generation, ranks)
    found = _emptied(wanted) | {"own": None}
    load(found, checkpoint_id=folder, no_dist=True)
    return _is_same(found, wanted)


# --- a rank


@dataclass(frozen=True)
class Order:
    """A save for a rank to do."""

    folder: Path
    generation: int
    in_background: bool = False
    kill: Kill | None = None


@dataclass(frozen=True)
class Answer:
    """How a save ended on a rank."""

    seconds: float
    error: str = ""
    is_expected_kind: bool = False
    missing: tuple[int, ...] = ()


def _store_host(connection: Any) -> None:
    """Where the ranks meet, in a process that nobody kills."""
    store = get_platform().new_store(is_master=True)
    connection.send(store.port)
    connection.recv()


def _rank(
    connection: Any, port: int, name: str, rank: int, ranks: int, broken: str
) -> None:
    torch.set_num_threads(1)
    BROKEN[broken]()
    platform = get_platform()
    store = platform.prefix_store(name, platform.new_store(port, is_master=False))
    platform.init_process_group(
        store=store, rank=rank, world_size=ranks, timeout=TIMEOUT
    )
    pids: list[Any] = [None] * ranks
    platform.all_gather_object(pids, os.getpid())
    while (order := connection.recv()) is not None:
        state = _state(order.generation, ranks, rank)
        data_file.phase = _killer(order.kill, rank, pids)
        platform.barrier()
        connection.send("begun")
        connection.send(_answer(order, state))
    # No destroy_process_group: after a kill it may be unable to, and the end of the process is what is tested.


def _answer(order: Order, state: dict[str, Any]) -> Answer:
    start = time.monotonic()
    try:
        if order.in_background:
            async_save(state, checkpoint_id=order.folder).result()
        else:
            save(state, checkpoint_id=order.folder)
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent judges
        is_expected = isinstance(error, (CheckpointError, CommunicationError))
        text = f"{type(error).__name__}: {error}"
        return Answer(
            time.monotonic() - start,
            text,
            is_expected,
            getattr(error, "missing", None) or (),
        )
    return Answer(time.monotonic() - start)


def _killer(kill: Kill | None, rank: int, pids: Sequence[int]) -> Callable[[str], None]:
    """What is told the phases of a save on this rank, and kills when it is time."""
    if kill is None or rank != (0 if kill.phase in ON_THE_FIRST else kill.rank):
        return lambda _: None
    passed = itertools.count()

    def told(phase: str) -> None:
        if phase == kill.phase and next(passed) == kill.skips:
            os.kill(pids[kill.rank], signal.SIGKILL)

    return told


# --- the ranks of one trial

_PROCESSES = (
    threading.Lock()
)  # multiprocessing looks at all children whenever it starts one


class Team:
    """Rank processes that live until one of them is killed."""

    def __init__(
        self, context: Any, port: int, name: str, ranks: int, broken: str
    ) -> None:
        self.connections, self.processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank,
                args=(theirs, port, name, rank, ranks, broken),
                daemon=True,
            )
            with _PROCESSES:
                process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def save(self, order: Order) -> None:
        """Has all ranks begin."""
        for connection in self.connections:
            connection.send(order)
        for rank in range(len(self.connections)):
            if self._heard(rank) != "begun":
                raise RuntimeError(f"rank {rank} did not begin to save")

    def answers(self) -> dict[int, Answer]:
        """How the save ended, of those that lived."""
        heard = {rank: self._heard(rank) for rank in range(len(self.connections))}
        return {rank: answer for rank, answer in heard.items() if answer is not None}

    def kill(self, rank: int) -> None:
        """Now."""
        self.processes[rank].kill()

    def end(self) -> list[int]:
        """Lets the ranks end; those that did not by themselves, after which they are killed."""
        hung = []
        for connection, process in zip(self.connections, self.processes, strict=True):
            if process.is_alive():
                _try(connection.send, None)
            connection.close()
        for rank, process in enumerate(self.processes):
            process.join(DEADLINE)
            if process.exitcode is None:
                hung.append(rank)
                process.kill()
                process.join()
            with _PROCESSES:
                process.close()
        return hung

    def _heard(self, rank: int) -> Any:
        try:
            return (
                self.connections[rank].recv()
                if self.connections[rank].poll(DEADLINE)
                else None
            )
        except (EOFError, ConnectionResetError):
            return None


def _try(function: Callable[..., object], *args: Any) -> None:
    try:
        function(*args)
    except OSError:  # the rank is gone
        return


# --- trials


class Trials:
    """Kills one after the other; the ranks of the next trial also show that the folder of the last one is in order."""

    def __init__(self, folder: Path, *, broken: str = "") -> None:
        self.results: list[Result] = []
        self._root, self._broken = folder, broken
        self._context = multiprocessing.get_context("forkserver")
        self._folder = folder / "0"
        self._generation, self._ranks = 0, 0  # of what the folder has
        self._seconds = 0.0  # that a save took last

    def run(self, kills: Iterable[Kill]) -> list[Result]:
        """The results, with all violations."""
        with self._store() as port:
            for kill in kills:
                result = Result(kill)
                team = Team(
                    self._context,
                    port,
                    f"trial{self._generation}",
                    kill.ranks,
                    self._broken,
                )
                self._save_again(
                    team, kill, self.results[-1] if self.results else result
                )
                self._kill(team, result)
                self.results.append(result)
            last = Team(self._context, port, "last", 2, self._broken)
            self._save_again(last, Kill("", 0), self.results[-1])
            last.end()
        return self.results

    @contextmanager
    def _store(self) -> Iterator[int]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_store_host, args=(theirs,), daemon=True)
        with _PROCESSES:
            process.start()
        try:
            yield ours.recv()
        finally:
            process.kill()
            process.join()

    def _save_again(self, team: Team, kill: Kill, before: Result) -> None:
        """A save into the folder of the last trial must work and leave nothing else behind."""
        self._generation += 1
        self._ranks = kill.ranks
        team.save(Order(self._folder, self._generation, kill.in_background))
        answers = team.answers()
        failed = {
            rank: answer.error for rank, answer in answers.items() if answer.error
        }
        if failed or len(answers) < kill.ranks:
            before.violations.append(
                f"the next save failed: {failed}, {len(answers)} of {kill.ranks} answered"
            )
            return
        self._seconds = max(answer.seconds for answer in answers.values())
        try:
            if not _has(self._folder, self._generation, kill.ranks):
                before.violations.append("the next save does not load as it was saved")
        except Exception as error:  # noqa: BLE001 - any is a violation
            before.violations.append(
                f"the next save does not load: {type(error).__name__}: {error}"
            )
        before.violations += [
            f"left behind: {name}" for name in _leftovers(self._folder)
        ]

    def _kill(self, team: Team, result: Result) -> None:
        kill = result.kill
        if not kill.overwrites:
            shutil.rmtree(self._folder)
            self._folder = self._root / str(self._generation)
        self._generation += 1
        team.save(Order(self._folder, self._generation, kill.in_background, kill))
        if kill.phase == ANY_MOMENT:
            time.sleep(kill.moment * self._seconds)
            team.kill(kill.rank)
        answers = team.answers()
        hung = team.end()
        result.outcome = self._found(result)
        result.violations += _judged(kill, answers, hung, result.outcome)
        if (
            result.violations
        ):  # what is broken is kept to be looked at, and not found again
            self._folder = self._root / f"{self._generation}-after"

    def _found(self, result: Result) -> str:
        """What a reader finds."""
        kill = result.kill
        before = (OLD, self._generation - 1, self._ranks)
        try:
            for name, generation, ranks in [
                (NEW, self._generation, kill.ranks),
                *([before] if kill.overwrites else []),
            ]:
                if _has(self._folder, generation, ranks):
                    return name
        except CheckpointError as error:
            if not kill.overwrites and "no whole checkpoint" in str(error):
                return NONE
            result.violations.append(f"the reader got {error}")
        except Exception as error:  # noqa: BLE001 - any other is a violation
            result.violations.append(f"the reader got {type(error).__name__}: {error}")
        else:
            result.violations.append("the reader found a mixture of generations")
        return WRONG


def run(
    kills: Sequence[Kill], folder: Path, *, broken: str = "", lanes: int = 4
) -> list[Result]:
    """All kills, in several folders at once: most of the time is spent waiting for those that are left."""
    # The ranks are forked from a server that has imported what they and the ranks of other tests need.
    preload = [
        __name__,
        "hyper_parallel.ranks.worker",
        "hyper_parallel.platform.torch",
    ]
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    lanes = min(lanes, len(kills))
    with ThreadPoolExecutor(lanes) as pool:
        trials = [
            Trials(folder / f"lane{lane}", broken=broken) for lane in range(lanes)
        ]
        done = pool.map(lambda lane: trials[lane].run(kills[lane::lanes]), range(lanes))
        return [result for results in done for result in results]


def due(kill: Kill) -> str | None:
    """What must be found, where the phase says it: the new one from the moment when the metadata has its name."""
    if kill.phase == ANY_MOMENT:
        return None
    is_before = kill.phase in ON_EVERY_RANK or (
        kill.phase == "metadata written" and kill.rank == 0
    )
    return (OLD if kill.overwrites else NONE) if is_before else NEW


def _judged(
    kill: Kill, answers: dict[int, Answer], hung: Sequence[int], outcome: str
) -> Iterator[str]:
    """What the ranks should have done and did not."""
    if outcome not in (WRONG, due(kill) or outcome):
        yield f"the {outcome} one was found, the {due(kill)} one was due"
    if kill.rank in answers and kill.phase != ANY_MOMENT:
        yield f"rank {kill.rank} was not killed, it answered {answers[kill.rank]}"
    for rank in set(range(kill.ranks)) - {kill.rank}:
        answer = answers.get(rank)
        if answer is None or rank in hung:
            yield f"rank {rank} hung, or ended without a word"
        elif not answer.error and outcome != NEW:
            yield f"rank {rank} was told that the save succeeded"
        elif answer.error and not (
            answer.is_expected_kind and kill.rank in answer.missing
        ):
            yield f"rank {rank} did not say that rank {kill.rank} is missing, but {answer.error}"


def _leftovers(folder: Path) -> list[str]:
    tags = {path.name.split("-")[1] for path in folder.glob("data-*")}
    names = sorted(path.name for path in folder.iterdir())
    return [name for name in names if name.endswith(".tmp")] + (
        [f"files of {len(tags)} saves"] if len(tags) > 1 else []
    )


# --- saves that are broken on purpose, to see that this would be seen


def _one_tag() -> None:
    """All saves give their files the same names."""
    saving.new_tag = lambda: "0" * 16


def _metadata_first() -> None:
    """The metadata is in place before the data."""

    def write(self: Any, ranks: Any) -> Any:
        objects = [item for item in self.plan.items if item.tensor_data is None]
        self.writer._run = self.plan.storage_data
        if ranks.is_coordinator:
            found = [
                WriteResult(item.index, 0, self.planner.get_data(item))
                for item in objects
            ]
            self.writer.finalize_checkpoint(self.metadata, [found])
        ranks.together(lambda: self.writer.execute_write(self.plan, self.planner))
        return self.metadata

    saving.Prepared.write = write  # type: ignore[method-assign]


BROKEN: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "one tag": _one_tag,
    "metadata first": _metadata_first,
}


# --- which kills


def every_phase(
    chance: random.Random, victims: Iterable[int] = (0, 1, 2)
) -> list[Kill]:
    """Every phase, on every rank, over an old checkpoint and as a new one, with save and with async_save."""
    kills = []
    for phase, rank, overwrites, in_background in itertools.product(
        PHASES, victims, (True, False), (False, True)
    ):
        if phase == "leftover removed" and not overwrites:
            continue  # there is nothing to remove
        skips = chance.randrange({"data": 3, "leftover removed": 2}.get(phase, 1))
        kills.append(
            Kill(
                phase, rank, _ranks_with(rank, chance), overwrites, in_background, skips
            )
        )
    return kills


def any_moments(count: int, chance: random.Random) -> list[Kill]:
    """So many at random moments of a save, and a little after it."""
    kills = []
    for number in range(count):
        rank = chance.randrange(3)
        kind = {
            "overwrites": number % 2 == 0,
            "in_background": number % 4 >= 2,
            "moment": chance.uniform(0, 1.1),
        }
        kills.append(Kill(ANY_MOMENT, rank, _ranks_with(rank, chance), **kind))
    return kills


def _ranks_with(rank: int, chance: random.Random) -> int:
    return max(rank + 1, chance.choice((2, 3)))


def table(results: Sequence[Result]) -> str:
    """Phase by rank: how many kills, and how often the reader found the old, the new, none."""
    cells = {(r.kill.phase, r.kill.rank): Counter[str]() for r in results}
    for result in results:
        cells[result.kill.phase, result.kill.rank][result.outcome] += 1
    ranks = sorted({rank for _, rank in cells})
    lines = [
        f"{'killed at':18}"
        + "".join(f"{f'rank {rank}: old/new/none':>26}" for rank in ranks)
    ]
    for phase in (*PHASES, ANY_MOMENT):
        row = [cells.get((phase, rank), Counter()) for rank in ranks]
        lines.append(f"{phase:18}" + "".join(f"{_cell(found):>26}" for found in row))
    total = sum(cells.values(), Counter())
    lines.append(
        f"{len(results)} kills: "
        + ", ".join(f"{total[name]} {name}" for name in (OLD, NEW, NONE, WRONG))
    )
    return "\n".join(lines)


def _cell(found: Counter[str]) -> str:
    wrong = f" WRONG {found[WRONG]}" if found[WRONG] else ""
    return (
        f"{found.total()}: {found[OLD]}/{found[NEW]}/{found[NONE]}{wrong}"
        if found
        else "-"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 1 if anything was found that must not be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("build/kills"))
    parser.add_argument(
        "--broken",
        choices=[name for name in BROKEN if name],
        default="",
        help="save wrongly: must fail",
    )
    chosen = parser.parse_args(argv)
    chance = random.Random(chosen.seed)
    systematic = every_phase(chance)
    kills = systematic + any_moments(max(0, chosen.kills - len(systematic)), chance)
    chance.shuffle(kills)
    shutil.rmtree(chosen.folder, ignore_errors=True)
    start = time.monotonic()
    results = run(kills[: chosen.kills], chosen.folder, broken=chosen.broken)
    for result in (r for r in results if r.violations):
        print(f"{result.kill}: {'; '.join(result.violations)}")
    print(table(results))
    violated = sum(bool(result.violations) for result in results)
    print(
        f"{violated} kills after which something was wrong; {time.monotonic() - start:.0f} s"
    )
    return int(violated > 0)


if __name__ == "__main__":
    sys.exit(main())
