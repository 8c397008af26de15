# SPDX-License-Identifier: Apache-2.0
"""Trains as a recipe says, on this rank: from the start or from a checkpoint, to the end or until it is asked to stop.

outcome = train(recipe)                         on every rank; the job is joined if that has not been done
outcome = train(recipe, resume="auto")          from the newest whole checkpoint in the recipe's folder, if there is one
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.core.distributed_checkpoint import (
    CheckpointError,
    CheckpointManager,
    ModelState,
    OptimizerState,
    RandomState,
    load,
    read_objects,
)
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh, init_device_mesh
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.core.expert_parallel import watch_experts
from hyper_parallel.planning.roles import format_axes
from hyper_parallel.platform import CommunicationError, get_platform
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.recipe.build import build
from hyper_parallel.recipe.errors import Problem, RecipeError, ResumeError
from hyper_parallel.recipe.experts import describe_load, has_experts, update_biases
from hyper_parallel.recipe.job import Job
from hyper_parallel.recipe.reporting import Reporter
from hyper_parallel.recipe.schema import Optimizer, Precision, Recipe
from hyper_parallel.recipe.stopping import StopSignal

platform = get_platform()
_DECIDES_LOSSES = (
    "seed",
    "precision",
    "model",
    "data",
    "optimizer",
    "schedule",
)  # keys that a resumed run should share


@dataclass(frozen=True)
class Outcome:
    """How a training ended: at which step, whether it was asked to stop before the last, and what was saved last."""

    step: int
    stopped: bool
    saved: Path | None

    def __str__(self) -> str:
        told = (
            f"stopped after step {self.step}"
            if self.stopped
            else f"done: {self.step} steps"
        )
        return f"{told}{f'; saved in {self.saved}' if self.saved is not None else ''}"


class TrainingError(RuntimeError):
    """A training that cannot go on."""


def train(
    recipe: Recipe,
    resume: str | Path | None = None,
    on_stuck: Callable[[CommunicationError], None] | None = None,
) -> Outcome:
    """Trains until the recipe's steps are done or a signal asks to stop; every rank of the job calls it.

    ``on_stuck``: ends this process where it was asked to stop and cannot; without one, the error is printed before.
    """
    mesh = _join_mesh(recipe)
    origin = _origin(recipe, resume)
    job = build(recipe, mesh)
    optimizer = make_optimizer(job.model, recipe.optimizer)
    state = {
        "model": ModelState(job.model),
        "optimizer": OptimizerState(job.model, optimizer),
    }
    done, changes = (0, []) if origin is None else _resumed(recipe, job, origin, state)
    checkpoints = None
    if recipe.folder is not None:
        options = recipe.checkpoints
        checkpoints = CheckpointManager(
            recipe.folder, keep_last=options.keep, asynchronous=options.asynchronous
        )
    whole = {
        **state,
        "random": RandomState(),
        "run": {"recipe": recipe.values(), "corpus": job.corpus.digest},
    }
    stop_signal = StopSignal(recipe.communication.grace, on_stuck)
    with (
        Reporter(recipe, done, is_first=platform.get_rank() == 0) as report,
        stop_signal as stop,
    ):
        _tell_start(recipe, report, origin, done, changes)
        return _steps(recipe, job, optimizer, whole, done, checkpoints, report, stop)


def _steps(
    recipe: Recipe,
    job: Job,
    optimizer: Any,
    state: dict[str, Any],
    done: int,
    checkpoints: CheckpointManager | None,
    report: Reporter,
    stop: StopSignal,
) -> Outcome:
    saved: Path | None = None
    step, last, is_asked = done, recipe.steps, False
    tokens = recipe.data.batch * recipe.data.length
    while step < last and not is_asked:
        began = time.perf_counter()
        rate = learning_rate(recipe, step)
        platform.set_learning_rate(optimizer, rate)
        # The first step sets up things as well, so the second one is told.
        with _recorded(recipe, job.mesh) if step == done + 1 else ExitStack():
            facts = _train(recipe, job, optimizer, step)
        step += 1
        loss = facts["loss"]
        if not math.isfinite(loss):
            raise coded(
                TrainingError,
                "HP703",
                f"the loss of step {step} is {loss}; a smaller optimizer.lr, a longer schedule.warmup, "
                "optimizer.clip or precision: float32 may help",
            )
        facts = {"step": step, "rate": rate, **facts}
        facts["tokens_per_second"] = tokens / (time.perf_counter() - began)
        facts["memory"] = platform.peak_memory()
        if _is_due(step, recipe.evaluation.every, last):
            facts["held_out"] = job.evaluate(recipe.evaluation.batches)
        report.step(facts)
        is_asked = stop.is_asked()
        if checkpoints is not None and (
            is_asked or step == last or _is_due(step, recipe.checkpoints.every, last)
        ):
            saved = checkpoints.save(step, state, {"loss": loss})
    if checkpoints is not None:
        checkpoints.wait()
    outcome = Outcome(step, step < last, saved)
    report.tell(str(outcome))
    return outcome


def _train(recipe: Recipe, job: Job, optimizer: Any, step: int) -> dict[str, Any]:
    """Does a step; returns what is told of it, and of its experts."""
    clip = recipe.optimizer.clip
    if not has_experts(recipe):
        return job.train(step, optimizer, clip)
    with watch_experts() as load:
        facts = job.train(step, optimizer, clip)
    if recipe.experts.bias_rate:
        update_biases(job.model, job.mesh, recipe.experts.bias_rate)
    return {**facts, **describe_load(load, job.mesh)}


def learning_rate(recipe: Recipe, step: int) -> float:
    """The rate of a step, counted from 0: up during warm-up, then down to the floor, where it stays."""
    schedule, highest = recipe.schedule, recipe.optimizer.lr
    length = schedule.decay_steps or recipe.steps
    progress = min(
        1.0, max(0.0, (step - schedule.warmup) / max(1, length - schedule.warmup))
    )
    shape = {
        "cosine": 0.5 + 0.5 * math.cos(math.pi * progress),
        "linear": 1 - progress,
        "constant": 1.0,
    }[schedule.kind]
    rise = min(1.0, (step + 1) / max(1, schedule.warmup))
    return highest * rise * (schedule.floor + (1 - schedule.floor) * shape)


def _is_due(step: int, every: int, last: int) -> bool:
    return bool(every) and (step % every == 0 or step == last)


def make_optimizer(model: Any, wanted: Optimizer) -> Any:
    """Only matrices decay."""
    parameters = [
        p for p in platform.parameters_dict(model).values() if platform.requires_grad(p)
    ]
    decays = {True: wanted.weight_decay, False: 0.0}
    cut = {
        flag: [p for p in parameters if (len(p.shape) > 1) == flag] for flag in decays
    }
    groups = [
        {"params": cut[flag], "weight_decay": decay}
        for flag, decay in decays.items()
        if cut[flag]
    ]
    options = (
        {"momentum": wanted.momentum}
        if wanted.kind == "sgd"
        else {"betas": wanted.betas, "eps": wanted.eps}
    )
    return platform.new_optimizer(wanted.kind, groups, lr=wanted.lr, **options)


def _join_mesh(recipe: Recipe) -> DeviceMesh | None:
    """The mesh of the job that this process joins, or None for one process alone."""
    if recipe.ranks == 1:
        return None
    platform.init_process_group(timeout=recipe.communication.timeout)
    size = platform.get_world_size()
    if size != recipe.ranks:
        mesh = format_axes(recipe.axes)
        message = f"{mesh} needs {recipe.ranks} ranks, but the job has {size}"
        raise RecipeError(recipe.path, [Problem("mesh", message)])
    return init_device_mesh(
        platform.device_type(), recipe.mesh_shape, mesh_dim_names=tuple(recipe.axes)
    )


@contextmanager
def _recorded(recipe: Recipe, mesh: DeviceMesh | None) -> Iterator[None]:
    """Writes what is communicated in the context to a file, if the recipe wants it."""
    if not recipe.logging.collectives or recipe.folder is None:
        yield
        return
    with CommunicationLedger(mesh) as ledger:
        yield
    if platform.get_rank() == 0:
        entries = [asdict(entry) for entry in ledger.entries]
        (recipe.folder / "collectives.json").write_text(json.dumps(entries))


# --- going on from a checkpoint


def _origin(recipe: Recipe, resume: str | Path | None) -> Path | None:
    """The checkpoint to go on from; None to begin."""
    if resume is None:
        there = (
            CheckpointManager(recipe.folder).latest()
            if recipe.folder is not None
            else None
        )
        if there is not None:
            told = f"{recipe.folder} has a checkpoint, {there.name}; go on with --resume auto, or take another folder"
            raise ResumeError(recipe.path, [Problem("folder", told)])
        return None
    if str(resume) == "auto":
        if recipe.folder is None:
            told = "--resume auto looks for checkpoints in folder:, which is not there"
            raise ResumeError(recipe.path, [Problem("folder", told)])
        return CheckpointManager(recipe.folder).latest()
    folder = Path(resume)
    found = (
        folder
        if (folder / "checkpoint.json").is_file()
        else CheckpointManager(folder).latest()
    )
    if found is None:
        raise ResumeError(
            recipe.path,
            [Problem("--resume", f"there is no whole checkpoint in {folder}")],
        )
    return found


def _resumed(
    recipe: Recipe, job: Job, origin: Path, state: dict[str, Any]
) -> tuple[int, list[str]]:
    """Loads a checkpoint; the steps that were done, and what is not as it was."""
    objects = read_objects(origin)
    try:
        step, run = objects["checkpoint"]["step"], objects["run"]
    except KeyError:
        told = f"{origin} is no checkpoint of a recipe; model.start begins with the weights of any checkpoint"
        raise ResumeError(recipe.path, [Problem("--resume", told)]) from None
    if run["corpus"] != job.corpus.digest:
        told = f"the text is not the one that {origin} was trained on, so that the batches would be others"
        raise ResumeError(recipe.path, [Problem("data", told)])
    if step >= recipe.steps:
        told = f"{origin} has done {step} steps already; say more, such as steps={2 * step}"
        raise ResumeError(recipe.path, [Problem("steps", told)])
    # Generators are those of one framework.
    randomness = (
        {"random": RandomState()}
        if run["recipe"]["framework"] == recipe.framework
        else {}
    )
    try:
        load({**state, **randomness}, checkpoint_id=origin)
    except CheckpointError as error:
        raise ResumeError(
            recipe.path, [Problem("--resume", f"{origin} does not fit: {error}")]
        ) from error
    before, now = _resolved(run["recipe"]), _resolved(recipe.values())
    changes = [
        change
        for key in _DECIDES_LOSSES
        for change in _changes(key, before.get(key), now[key])
    ]
    return step, changes


def _resolved(values: dict[str, Any]) -> dict[str, Any]:
    """The values with the length of the schedule, which ``steps`` says where nothing else does."""
    length = values["schedule"]["decay_steps"] or values["steps"]
    if isinstance(
        values["precision"], str
    ):  # before there were others than that of the parameters
        values = {**values, "precision": {"parameters": values["precision"]}}
    values["precision"] = {**Precision().model_dump(), **values["precision"]}
    return {**values, "schedule": {**values["schedule"], "decay_steps": length}}


def _changes(key: str, before: Any, now: Any) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted(before.keys() | now.keys()):
            yield from _changes(f"{key}.{name}", before.get(name), now.get(name))
    elif (
        list(before) if isinstance(before, tuple) else before
    ) != now and not key.startswith(_ONLY_PLACES):
        yield f"{key} was {before!r} and is {now!r}"


_ONLY_PLACES = (
    "model.file",
    "model.class",
    "model.huggingface",
    "model.start",
    "data.text",
)  # what they hold is compared


def _tell_start(
    recipe: Recipe, report: Reporter, origin: Path | None, done: int, changes: list[str]
) -> None:
    if origin is not None:
        report.tell(f"going on from {origin}, after step {done}")
        for change in changes:
            report.tell(f"not as before: {change}")
    if recipe.folder is not None:
        processes: list[Any] = [None] * platform.get_world_size()
        if recipe.ranks > 1:
            platform.all_gather_object(processes, os.getpid())
        else:
            processes = [os.getpid()]
        if platform.get_rank() == 0:
            facts = {
                "processes": processes,
                "recipe": recipe.values(),
                "from_step": done,
            }
            (recipe.folder / "run.json").write_text(json.dumps(facts, indent=1))
