# SPDX-License-Identifier: Apache-2.0
"""``verify``: whether a plan gives the loss and the gradients of one process, and if not, where they part.

verify(make_model, {"up": ColwiseParallel(), "down": RowwiseParallel()}, {"dp": 2, "tp": 2}, (x, y), loss=loss).check()
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh, init_device_mesh
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.core.shard.sharding_plan import matching
from hyper_parallel.core.tensor_parallel import (
    ParallelStyle,
    parallelize_module,
    replicate,
)
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.caller import raising_line, users_line
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.ranks import run_ranks
from hyper_parallel.ranks.job import Target
from hyper_parallel.verification.judge import judge
from hyper_parallel.verification.one_device import dropout_of_one_device
from hyper_parallel.verification.report import Report
from hyper_parallel.verification.step import Task, generators_kept, run, seed_all
from hyper_parallel.verification.typed_in import TypedIn, is_typed_in

platform = get_platform()

Plan = (
    Mapping[str, ParallelStyle]
    | ParallelStyle
    | Callable[[Any, DeviceMesh], Any]
    | None
)


def verify(
    make_model: Callable[[], Any],
    plan: Plan,
    mesh: DeviceMesh | Mapping[str, int] | str,
    batch: Any,
    *,
    loss: Callable[..., Any] | None = None,
    data_axis: str | None = "dp",
    batch_dim: int = 0,
    seed: int = 0,
    tolerance: float | None = None,
    timeout: float = 600.0,
) -> Report:
    """Does one step on one process and one on the mesh, and compares the loss, every gradient and every buffer.

    ``make_model()``: the plain model, made twice from one seed. ``plan``: styles by the names of modules, or a
    function of the model and the mesh that puts the one on the other. ``mesh``: a mesh of the job that runs, or its
    axes, {"dp": 2, "tp": 2} or "dp=2,tp=2"; where no job runs, that many rank processes are started, and all arguments
    must be picklable, functions by their names in a file or in a notebook. ``batch``: the whole batch, a tuple of what
    ``loss`` takes after the model, or a function that makes it; arrays become tensors, and along ``data_axis`` each
    rank gets its part at ``batch_dim``. ``loss(model, *batch)``: one number, the mean over the whole batch; else the
    model gives it itself. ``tolerance``: the allowed difference in units of the largest element, else by dtype.
    ``timeout``: in seconds, for rank processes.
    """
    arguments = (make_model, plan, batch, loss, data_axis, batch_dim, seed, tolerance)
    if isinstance(mesh, DeviceMesh):
        return _on_mesh(mesh, *arguments)
    axes = axes_of(mesh)
    if joined(math.prod(axes.values())):
        return _on_mesh(mesh_of(axes), *arguments)
    return on_new_ranks(_on_axes, axes, tuple(map(_sent, arguments)), timeout)


def compare(
    plain: Callable[[], Task],
    parallel: Callable[[], Task],
    mesh: DeviceMesh,
    seed: int,
    tolerance: float | None,
) -> Report:
    """Does the steps of both tasks on this rank, all of whose mesh call this together."""
    with generators_kept():
        seed_all(seed)
        truth = run(plain(), seed)
        if truth.error is not None:
            raise _of_plain_model(
                truth.error, truth.trace.running[-1][0] if truth.trace.running else ""
            )
        seed_all(seed)
        task = parallel()
        done: list[int] = []  # how many collectives there were when forward ended

        def marked(*arguments: Any) -> Any:
            loss = task.loss(*arguments)
            done.append(len(ledger.entries))
            return loss

        with CommunicationLedger(mesh) as ledger, dropout_of_one_device():
            mine = run(task._replace(loss=marked), seed)
    # Not every framework tells that backward runs; and the line that called this says nothing of a collective.
    start, here = done[0] if done else len(ledger.entries), users_line()
    is_piped = mine.part is not None  # forwards and backwards take turns
    ledger.entries[:] = [
        replace(
            entry,
            backward=entry.backward if is_piped else number >= start,
            line="" if entry.line == here else entry.line,
        )
        for number, entry in enumerate(ledger.entries)
    ]
    return judge(truth, mine, mesh, ledger, tolerance, task.gap)


def _of_plain_model(error: Exception, module: str) -> RuntimeError:
    where = repr(module) if module else "its own code"
    line = raising_line(error)
    if line:
        where += f", at {line}"
    kind = type(error).__name__
    found = coded(
        RuntimeError,
        "HP712",
        f"verify: the plain model, on one process, raised {kind} in {where}: {error}",
    )
    found.__cause__ = error
    return found


# --- the ranks


def axes_of(mesh: Mapping[str, int] | str) -> dict[str, int]:
    """The axes that "dp=2,tp=2" or a mapping names."""
    pairs = (
        [part.split("=") for part in mesh.split(",")]
        if isinstance(mesh, str)
        else list(mesh.items())
    )
    try:
        axes = {str(name).strip(): int(size) for name, size in pairs}
    except ValueError:
        axes = {}
    if (
        not axes
        or len(axes) != len(pairs)
        or any(not name or size < 1 for name, size in axes.items())
    ):
        raise coded(
            ValueError,
            "HP710",
            f"verify: expected a mesh like 'dp=2,tp=2', each axis once, got {mesh!r}",
        )
    return axes


def joined(count: int) -> bool:
    """Whether this process is a rank of a job, which must have so many; joins the one whose launcher started it."""
    launched = int(os.environ.get("WORLD_SIZE") or os.environ.get("MS_WORKER_NUM") or 1)
    if platform.get_world_size() == 1 and launched > 1:
        platform.init_process_group()
    size = platform.get_world_size()
    if size not in (1, count):
        raise coded(
            ValueError,
            "HP710",
            f"verify: the mesh has {count} ranks, but the job that runs has {size}",
        )
    return size > 1


def on_new_ranks(
    function: Callable[..., Report],
    axes: Mapping[str, int],
    arguments: Any,
    timeout: float,
) -> Report:
    """What the ranks of a job of its own report: the one that is to blame, else the first."""
    reports = run_ranks(
        function, math.prod(axes.values()), axes, arguments, timeout=timeout
    )
    found: Report = min(
        reports, key=lambda report: (not report.error, report.is_consequence)
    )
    return found


def mesh_of(axes: Mapping[str, int]) -> DeviceMesh:
    """The mesh of all ranks of the job that runs."""
    return init_device_mesh(
        platform.device_type(), tuple(axes.values()), mesh_dim_names=tuple(axes)
    )


def _on_axes(axes: Mapping[str, int], arguments: Sequence[Any]) -> Report:
    loaded: list[Any] = [
        one.load() if isinstance(one, (Target, TypedIn)) else one for one in arguments
    ]
    return _on_mesh(mesh_of(axes), *loaded)


def _sent(argument: Any) -> Any:
    """A function or a class as another process finds it, also in a file that it cannot import by name, or a cell."""
    if not inspect.isfunction(argument) and not inspect.isclass(argument):
        return argument
    if is_typed_in(argument):
        return TypedIn.of(argument)
    try:
        if inspect.isfunction(argument):
            return Target.of(argument)
        return Target(
            argument.__module__,
            str(Path(inspect.getfile(argument)).resolve()),
            argument.__qualname__,
        )
    except (OSError, TypeError, ValueError) as error:  # what was typed in is in no file
        raise coded(
            ValueError,
            "HP711",
            f"verify: {argument.__qualname__} must stand at module level in a file, so that the ranks can import "
            "it; or call verify() on every rank of a job",
        ) from error


# --- a model and a plan


def _on_mesh(
    mesh: DeviceMesh,
    make_model: Callable[[], Any],
    plan: Plan,
    batch: Any,
    loss: Callable[..., Any] | None,
    data_axis: str | None,
    batch_dim: int,
    seed: int,
    tolerance: float | None,
) -> Report:
    names = mesh.mesh_dim_names or ()
    data = data_axis if data_axis in names else None
    loss = loss if loss is not None else _models_own

    def whole() -> tuple[Any, ...]:
        made = batch() if callable(batch) else batch
        tensors = platform.tree_map(
            lambda x: platform.tensor(x) if hasattr(x, "__array_interface__") else x,
            made,
        )
        return tensors if isinstance(tensors, tuple) else (tensors,)

    def plain() -> Task:
        return Task(_with_data(make_model()), whole(), loss)

    def parallel() -> Task:
        made = make_model()
        gap = _unmatched(made, plan)
        model = _with_data(_put(made, plan, mesh, data, batch_dim))
        return Task(
            model,
            whole() if data is None else _part(whole(), mesh, data, batch_dim),
            loss,
            gap,
        )

    return compare(plain, parallel, mesh, seed, tolerance)


def _models_own(model: Any, *batch: Any) -> Any:
    return model(*batch)


def _unmatched(model: Any, plan: Plan) -> str:
    """Says so if there are patterns and none of them names a module."""
    if not isinstance(plan, Mapping) or not plan:
        return ""
    names = [name for name, _ in platform.get_cells_and_names(model)]
    if any(matching(pattern, names) for pattern in plan):
        return ""
    return f"the plan does nothing: no module of the model has a name that {', '.join(map(repr, plan))} matches"


def _with_data(model: Any) -> Any:
    """The model itself, drawn if it was made without memory."""
    if any(platform.is_meta(one) for one in platform.parameters_dict(model).values()):
        platform.init_parameters(model, 0)
    return model


def _put(
    model: Any, plan: Plan, mesh: DeviceMesh, data: str | None, batch_dim: int
) -> Any:
    if plan is not None and not isinstance(plan, (Mapping, ParallelStyle)):
        made = plan(model, mesh)
        return model if made is None else made
    others = _model_axes(mesh, data)
    if plan is not None and (others or mesh.mesh_dim_names is None):
        parallelize_module(model, mesh[others[0]] if others else mesh, plan)
    return model if data is None else replicate(model, mesh[data], batch_dim=batch_dim)


def _model_axes(mesh: DeviceMesh, data: str | None) -> list[str]:
    """The names of the axes that do not shard the batch; at most one."""
    others = [name for name in mesh.mesh_dim_names or () if name != data]
    if len(others) > 1 or (mesh.ndim > 1 and not mesh.mesh_dim_names):
        raise coded(
            ValueError,
            "HP710",
            f"verify: styles put a model on one axis, and {mesh} has {mesh.ndim}; name the one that cuts the batch "
            "(data_axis=), or give a function plan(model, mesh)",
        )
    return others


def _part(
    batch: tuple[Any, ...], mesh: DeviceMesh, data: str, dim: int
) -> tuple[Any, ...]:
    """This rank's part of a batch."""
    ranks, place = mesh.size(data), mesh.get_local_rank(data)

    def part(x: Any) -> Any:
        if len(x.shape) <= dim:
            return x
        if x.shape[dim] % ranks:
            raise coded(
                ValueError,
                "HP711",
                f"verify: a batch of {x.shape[dim]} (dim {dim} of a tensor of shape {tuple(x.shape)}) cannot be "
                f"shared evenly by the {ranks} ranks of axis {data!r}",
            )
        return platform.chunk(x, dim, ranks, place)

    made: tuple[Any, ...] = platform.apply_to_tensors(part, batch)
    return made
