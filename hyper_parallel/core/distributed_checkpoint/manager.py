# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of one run: one folder per step; keeps the newest and the best, and finds the newest complete one.

    checkpoints = CheckpointManager("runs/a", keep_last=3, keep_best=1, metric="loss")
    checkpoints.load(state)                            the newest, or None: one script starts and resumes
    checkpoints.save(step, state, {"loss": loss})      and removes old checkpoints

Every method is called on all ranks: the first rank lists and removes, and broadcasts the result.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from hyper_parallel.core.distributed_checkpoint.api import (
    async_save,
    load,
    read_metadata,
    save,
)
from hyper_parallel.core.distributed_checkpoint.data_file import sync_folder
from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.filesystem import remove_leftovers
from hyper_parallel.core.distributed_checkpoint.format import METADATA_FILE
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

_T = TypeVar("_T")

_STEP = re.compile(r"step-(\d{8,})")
_OWN_KEY = "checkpoint"  # where the step and the metrics are in a checkpoint


class CheckpointManager:
    """Saves, finds, loads and removes the checkpoints in a folder.

    Keeps the last ``keep_last`` (all if None) and the ``keep_best`` by ``metric``, the smallest or, with
    ``mode="max"``, the largest. The step that was just saved is kept too. With ``asynchronous`` a save runs in the
    background; the next save, `load`, `clean` and `wait` wait for it, raise its error, and after ``timeout`` seconds
    (None: no timeout) name the ranks that have not written their part.
    Other folders, and files in a step's folder that do not belong to a checkpoint, are never touched.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep_last: int | None = 3,
        keep_best: int = 0,
        metric: str | None = None,
        mode: str = "min",
        asynchronous: bool = False,
        timeout: float | None = 1800.0,
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise coded(
                ValueError,
                "HP513",
                f"CheckpointManager: keep_last must be at least 1, or None for all, got {keep_last}",
            )
        if keep_best < 0 or (keep_best and metric is None):
            raise coded(
                ValueError,
                "HP513",
                f"CheckpointManager: keep_best={keep_best} needs a metric, got {metric!r}",
            )
        if mode not in ("min", "max"):
            raise coded(
                ValueError,
                "HP513",
                f"CheckpointManager: mode must be 'min' or 'max', got {mode!r}",
            )
        self.folder = Path(folder)
        self.keep_last, self.keep_best = keep_last, keep_best
        self.metric, self.mode = metric, mode
        if timeout is not None and not timeout > 0:
            raise coded(
                ValueError,
                "HP513",
                f"CheckpointManager: timeout must be a positive number of seconds, or None to wait for ever, got "
                f"{timeout!r}",
            )
        self.asynchronous = asynchronous
        self.timeout = timeout
        self._running: tuple[int, Any] | None = (
            None  # the step that is being saved, and the response to wait for
        )
        self._scores: dict[
            int, float | None
        ] = {}  # of the metric; on the first rank alone

    # --- saving

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, Any] | None = None,
    ) -> Path:
        """Saves a step and removes old checkpoints; returns the step's folder.

        The metrics of the first rank are stored.
        """
        if _OWN_KEY in state:
            raise coded(
                ValueError,
                "HP513",
                f"CheckpointManager.save: {_OWN_KEY!r} is where the step is kept; rename that of the state",
            )
        if step < 0:
            raise coded(
                ValueError,
                "HP513",
                f"CheckpointManager.save: step must not be negative, got {step}",
            )
        self.clean()
        numbers = _on_first_rank(
            lambda: {name: float(value) for name, value in (metrics or {}).items()}
        )
        whole = {**state, _OWN_KEY: {"step": step, "metrics": numbers}}
        target = self._path(step)
        if self.asynchronous:
            self._running = step, async_save(whole, checkpoint_id=target)
        else:
            save(whole, checkpoint_id=target)
            _on_first_rank(lambda: self._remove_surplus(step))
        return target

    def wait(self) -> None:
        """Waits for the save in progress, if there is one, and raises its error."""
        if self._running is not None:
            (step, response), self._running = self._running, None
            is_done = response.is_done_within(self.timeout)
            if is_done:
                response.result()
            _, late = _on_ranks(lambda: self._remove_surplus(step), is_late=not is_done)
            if late:
                raise coded(
                    CheckpointError,
                    "HP519",
                    f"not whole after {self.timeout:g} s: ranks {late} are still writing their part",
                    file=self._path(step),
                )

    def clean(self) -> None:
        """Removes the remains of failed saves; waits for the save in progress first."""
        self.wait()
        _on_first_rank(self._clean)

    # --- finding

    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, in order."""
        return _on_first_rank(self._whole)

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        found = self.steps()
        return self._path(found[-1]) if found else None

    def best(self) -> list[Path]:
        """The ``keep_best`` best checkpoints by the metric, the best first."""
        return [self._path(step) for step in _on_first_rank(self._best)]

    def load(self, state: dict[str, Any], step: int | None = None) -> Any:
        """Fills the state from a step, or from the newest checkpoint; returns the report, or None if there is none.

        Without a step, checkpoints with corrupted metadata are reported and skipped.
        """
        self.wait()
        chosen = _on_first_rank(
            lambda: self._readable() if step is None else self._existing(step)
        )
        return None if chosen is None else load(state, checkpoint_id=chosen)

    # --- on the first rank

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _folders(self) -> dict[int, Path]:
        """All step folders, complete or not, by step."""
        if not self.folder.is_dir():
            return {}
        named = [(_STEP.fullmatch(path.name), path) for path in self.folder.iterdir()]
        found = {
            int(match[1]): path
            for match, path in named
            if match and path.is_dir() and not path.is_symlink()
        }
        return {
            step: path
            for step, path in sorted(found.items())
            if path == self._path(step)
        }

    def _whole(self) -> list[int]:
        return [step for step, path in self._folders().items() if _is_whole(path)]

    def _readable(self) -> Path | None:
        """The newest checkpoint with readable metadata."""
        steps = self._whole()
        for step in reversed(steps):
            try:
                read_metadata(self._path(step))
            except CheckpointError as error:
                warnings.warn(
                    f"CheckpointManager.load: step {step} is passed over: {error}",
                    stacklevel=2,
                )
            else:
                return self._path(step)
        if steps:
            raise coded(
                CheckpointError,
                "HP501",
                f"none of the checkpoints of steps {steps} can be read",
                file=self.folder,
            )
        return None

    def _existing(self, step: int) -> Path:
        path, steps = self._path(step), self._whole()
        if step not in steps:
            raise coded(
                CheckpointError,
                "HP501",
                f"there is no whole checkpoint of step {step}; there are those of {steps}",
                file=path,
            )
        return path

    def _best(self) -> list[int]:
        scores = (
            {step: self._score(step) for step in self._whole()}
            if self.metric is not None
            else {}
        )
        ranked = [
            (score if self.mode == "min" else -score, -step)
            for step, score in scores.items()
            if score is not None
        ]
        return [
            -step for _, step in sorted(ranked)[: self.keep_best]
        ]  # of equal ones the newer

    def _score(self, step: int) -> float | None:
        """The metric of a checkpoint; None if it has none or is not a number."""
        if step not in self._scores:
            self._scores[step] = None
            with suppress(CheckpointError):
                objects = read_metadata(self._path(step)).storage_data.objects
                score = objects.get(f"{_OWN_KEY}.metrics.{self.metric}")
                self._scores[step] = (
                    None if score is None or math.isnan(score) else score
                )
        return self._scores[step]

    def _clean(self) -> None:
        for path in self._folders().values():
            _clean(path)

    def _remove_surplus(self, saved: int) -> None:
        self._scores.pop(saved, None)  # it may be a step that was saved before
        for step in self._surplus(saved):
            _remove(self._path(step))

    def _surplus(self, saved: int) -> list[int]:
        steps = self._whole()
        if saved not in steps or self.keep_last is None:
            return []
        keep = {saved, *steps[-self.keep_last :], *self._best()}
        return [step for step in steps if step not in keep]


def _on_first_rank(function: Callable[[], _T]) -> _T:
    """What the function gives on the first rank, on all ranks; they go on when it is done, or all raise its error."""
    result, _ = _on_ranks(function)
    return result


def _on_ranks(
    function: Callable[[], _T], *, is_late: bool = False
) -> tuple[_T, list[int]]:
    """The same, and the ranks that are late."""
    platform = get_platform()
    if platform.get_world_size() == 1:
        return function(), [0] if is_late else []
    told: tuple[Any, Exception | None] = None, None
    if platform.get_rank() == 0:
        try:
            told = function(), None
        except Exception as failure:  # noqa: BLE001 - the others wait for it
            told = None, failure
    everyone: list[Any] = [None] * platform.get_world_size()
    platform.all_gather_object(everyone, (told, is_late))
    (result, error), _ = everyone[0]
    if error is not None:
        raise error
    return result, [rank for rank, (_, late) in enumerate(everyone) if late]


def _is_whole(path: Path) -> bool:
    file = path / METADATA_FILE
    return file.is_file() and not file.is_symlink()


def _remove(path: Path) -> None:
    """Removes a checkpoint, its metadata first, so that a partly removed one is never loaded. Other files stay."""
    (path / METADATA_FILE).unlink(missing_ok=True)
    sync_folder(path)
    remove_leftovers(path, tag="")
    with suppress(OSError):
        path.rmdir()  # unless something of others is in it


def _clean(path: Path) -> None:
    """Removes what does not belong to a complete checkpoint: all of it, temporary files, data of an earlier save."""
    if not _is_whole(path):
        _remove(path)
        return
    with suppress(
        CheckpointError
    ):  # where the metadata cannot be read, nobody knows whose data it is
        remove_leftovers(path, read_metadata(path).storage_data.tag)
