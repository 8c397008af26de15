# SPDX-License-Identifier: Apache-2.0
"""fully_shard: parameters, gradients and optimizer state divided between data ranks, gathered while they are used.

Example::

    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)           before the optimizer is created
    loss = model(part_of_the_batch)         gradients are averaged over the ranks
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh, init_device_mesh
from hyper_parallel.core.fully_shard.loading import fit_state, keep_replaced
from hyper_parallel.core.fully_shard.running import (
    Runner,
    runner_of,
    runners_below,
)
from hyper_parallel.core.fully_shard.sharding import (
    check_modules,
    data_mesh,
    shard_parameters,
    split_shard_group,
)
from hyper_parallel.core.fully_shard.unit import DataMesh, Unit
from hyper_parallel.core.fully_shard.utils import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from hyper_parallel.core.modules.batches import divide_batches
from hyper_parallel.core.modules.boundary import attach
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[Any], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[Any] | None = None,
    batch_dim: int | None = None,
) -> Any:
    """Makes a module, or a list of modules, one unit whose parameters are sharded along a data mesh; returns it.

    A unit manages every parameter below it that no unit inside manages, so call it from the inside out, and create
    optimizers after it. ``mesh``: one axis, over which parameters are sharded, or two, (replicate, shard); by default
    all ranks. ``reshard_after_forward``: whether parameters are freed between forward and backward; None means all
    but the outermost unit, and a number n that each n neighbours keep one copy among them.
    ``shard_placement_fn(parameter)`` may return ``Shard(dim)``; the default is dim 0.

    Plain inputs are this rank's own batch, and gradients are averaged over the ranks. With ``batch_dim``, in the call
    for the whole model, they are its part of one batch, divided at that dim: outputs are distributed tensors, and
    the loss and its gradients are those of the whole batch, as with ``replicate``.
    """
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    check_modules(modules)
    mesh = _mesh_of_all_ranks() if mesh is None else mesh
    data = data_mesh(mesh)
    group_size = _check_reshard(reshard_after_forward, data.shard.ranks)
    policy = mp_policy or MixedPrecisionPolicy()
    offload = offload_policy or OffloadPolicy()
    managed = shard_parameters(
        modules, mesh, shard_placement_fn, list(ignored_params or ()), offload
    )
    name = " and ".join(type(one).__name__ for one in modules)
    subgroup = None if group_size is None else split_shard_group(mesh, group_size)
    number = _next_number(data)
    keeps_on_host = isinstance(offload, CPUOffloadPolicy)
    unit = Unit(name, number, managed, data, policy, subgroup, keeps_on_host)
    if isinstance(reshard_after_forward, bool):
        unit.settings.reshard_after_forward = reshard_after_forward
    elif reshard_after_forward is not None:
        unit.settings.reshard_after_forward = reshard_after_forward > 1
    _attach(Runner(unit, modules), mesh)
    if batch_dim is not None:
        for one in modules:
            divide_batches(one, mesh, batch_dim)
    return module


def _mesh_of_all_ranks() -> DeviceMesh:
    ranks = platform.get_world_size()
    kind = platform.device_type()
    return init_device_mesh(kind, (ranks,), mesh_dim_names=("dp_shard",))


def _attach(runner: Runner, mesh: DeviceMesh) -> None:
    """Has the modules of a unit gather and free its parameters."""
    for module in runner.modules:
        _become_unit(module)
        attach(
            module,
            "gather parameters",
            enter=runner.enter,
            leave=runner.leave,
            on_error=runner.undo,
            source=_Source(runner.unit, _describe_axes(mesh)),
        )


@dataclass(frozen=True, eq=False)
class _Source:
    """A unit as ``parallel_table`` prints it, with the memory that postponed reductions take."""

    unit: Unit
    axes: str

    def __str__(self) -> str:
        waiting = self.unit.unreduced_bytes
        more = f", {waiting} bytes of gradients waiting" if waiting else ""
        return f"fully_shard({self.axes}){more}"


def _describe_axes(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or ("data",)
    pairs = zip(names, mesh.mesh_shape, strict=True)
    return ", ".join(f"{name}={size}" for name, size in pairs)


_UNITS: Counter[tuple[int, ...]] = Counter()  # by the ranks of their mesh


def _next_number(mesh: DataMesh) -> int:
    _UNITS[mesh.ranks] += 1
    return _UNITS[mesh.ranks] - 1


def _check_reshard(setting: bool | int | None, ranks: int) -> int | None:
    """The size of the groups that keep a copy between forward and backward; None for all ranks or one."""
    if setting is None or isinstance(setting, bool):
        return None
    if not isinstance(setting, int) or setting < 1 or ranks % setting:
        raise coded(
            ValueError,
            "HP429",
            f"fully_shard: reshard_after_forward must be None, a bool, or a divisor of the {ranks} shard ranks, got "
            f"{setting!r}",
        )
    if setting == 1:
        warnings.warn(
            "fully_shard: reshard_after_forward=1 keeps whole parameters; use False",
            stacklevel=3,
        )
    return setting if 1 < setting < ranks else None


@functools.cache
def _unit_class(kind: Any) -> type[Any]:
    return type(f"HSDP{kind.__name__}", (HSDPModule, kind), {})


def _become_unit(module: Any) -> None:
    kind: Any = type(module)
    module.__class__ = _unit_class(kind)


class UnshardHandle:
    """A gather that was started by ``unshard(async_op=True)``."""

    def __init__(self, runner: Runner | None) -> None:
        self._runner = runner

    def wait(self) -> None:
        """Waits until the parameters are whole; does nothing the second time."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.show()


class HSDPModule:
    """What a module that is a unit can do beside its own methods."""

    # --- parameters

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the unit's parameters, so that modules show them whole until ``reshard``.

        ``async_op``: returns once the gather has started, with a handle whose ``wait()`` completes it.
        """
        runner = _runner(self)
        if not async_op:
            runner.show()
            return None
        runner.unit.start_gather()
        return UnshardHandle(runner)

    def reshard(self) -> None:
        """Frees the unit's whole parameters."""
        _runner(self).unit.release()

    def unshard_all(self) -> None:
        """Gathers the parameters of this unit and of all units below it."""
        for runner in runners_below(self):
            runner.unit.start_gather()
        for runner in runners_below(self):
            runner.unit.gather()

    def reshard_all(self) -> None:
        """Frees the whole parameters of this unit and of all units below it."""
        for runner in runners_below(self):
            runner.unit.release()

    def reset_iter_state(self) -> None:
        """Clears away what a failed step has left in all units below; the next forward does that by itself."""
        for runner in runners_below(self):
            runner.reset()
            if runner.root is not None:
                runner.root.reset()

    # --- gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, including those that wait for a reduction."""
        _recover(self)
        for runner in runners_below(self):
            runner.unit.unreduced.clear()
            runner.unit.unsummed.clear()
        clear = getattr(super(), "zero_grad", None)
        if clear is not None:
            clear(set_to_none)
            return
        for parameter in platform.parameters_dict(self).values():
            platform.forget_gradient(parameter)

    def reduce_gradients(self) -> None:
        """Reduces the gradients that backwards without ``set_requires_gradient_sync`` have added up in all units."""
        roots = []
        for runner in reversed(runners_below(self)):
            if runner.root is not None:
                runner.reduce_waiting(runner.root)
                roots.append(runner.root)
        for root in dict.fromkeys(roots):
            root.finish_reductions()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the end of the next backward frees parameters that are still whole."""
        _check_flag("set_is_last_backward", is_last_backward)
        for runner in runners_below(self):
            runner.frees_after_backward = is_last_backward

    def set_requires_gradient_sync(
        self,
        requires_gradient_sync: bool | None = None,
        *,
        recurse: bool = True,
        requires_grad_sync: bool | None = None,
    ) -> None:
        """Whether backward reduces gradients; else they are added up whole until a backward that does."""
        given = (
            requires_grad_sync
            if requires_gradient_sync is None
            else requires_gradient_sync
        )
        self._set("syncs_gradients", given, recurse, "set_requires_gradient_sync")

    def unreduced_gradient_bytes(self, *, recurse: bool = True) -> int:
        """The bytes that this rank holds of whole gradients that no backward has reduced yet."""
        runners = runners_below(self) if recurse else [_runner(self)]
        return sum(runner.unit.unreduced_bytes for runner in runners)

    def set_requires_all_reduce(
        self, requires_all_reduce: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward sums gradients over replicas; else shards are added up until a backward that does."""
        self._set(
            "all_reduces", requires_all_reduce, recurse, "set_requires_all_reduce"
        )

    def set_reshard_after_forward(
        self, reshard_after_forward: bool, recurse: bool = True
    ) -> None:
        """Whether parameters are freed between forward and backward."""
        name = "set_reshard_after_forward"
        self._set("reshard_after_forward", reshard_after_forward, recurse, name)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, recurse: bool = True
    ) -> None:
        """Whether parameters are freed after backward."""
        name = "set_reshard_after_backward"
        self._set("reshard_after_backward", reshard_after_backward, recurse, name)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Whether a unit takes part in the reduction on ranks that use none of its parameters."""
        name = "set_reduce_scatter_unused_params"
        self._set("reduces_unused", reduce_scatter_unused_params, recurse, name)

    def set_reduce_op_type(self, reduce_op_type: str) -> None:
        """Whether gradients are averaged over the data ranks ("avg") or added up ("sum")."""
        if reduce_op_type not in ("avg", "sum"):
            raise coded(
                ValueError,
                "HP429",
                f"set_reduce_op_type: expected 'avg' or 'sum', got {reduce_op_type!r}",
            )
        self.set_gradient_divide_factor(1.0 if reduce_op_type == "sum" else None)

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Divides sums of gradients by this instead of the number of data ranks."""
        if factor is not None and not factor > 0:
            raise coded(
                ValueError,
                "HP429",
                f"set_gradient_divide_factor: expected a positive number, got {factor!r}",
            )
        for runner in runners_below(self):
            runner.unit.settings.divide_factor = factor

    # --- prefetching

    def set_modules_to_forward_prefetch(self, modules: Sequence[Any]) -> None:
        """The units that start to gather when this one runs forward."""
        _runner(self).forward_prefetch = _runners(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[Any]) -> None:
        """The units that start to gather when this one runs backward."""
        _runner(self).backward_prefetch = _runners(modules)

    # --- state

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state dict with sharded parameters, also while they are whole."""
        _recover(self)
        shown = [one for one in runners_below(self) if one.unit.is_installed]
        for runner in shown:
            runner.unit.uninstall()
        try:
            return super().state_dict(*args, **kwargs)  # type: ignore[misc]
        finally:
            for runner in shown:
                runner.show()

    def load_state_dict(
        self, state_dict: Any, strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads distributed tensors, full ones, or this rank's shards; parameters that are whole are freed first.

        ``assign``: parameters become what is given, with its dtype, so create optimizers afterwards.
        """
        _recover(self)
        units = [runner.unit for runner in runners_below(self)]
        for unit in units:
            unit.release()
        before = [[one.parameter for one in unit.managed] for unit in units]
        fitted = fit_state(self.state_dict(), state_dict)
        options = {"assign": True} if assign else {}
        loaded = super().load_state_dict(fitted, strict, **options)  # type: ignore[misc]
        for unit, parameters in zip(units, before, strict=True):
            keep_replaced(unit, parameters)
        return loaded

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """What load_state_dict of a module around this one calls; whole parameters would lose what is loaded."""
        _runner(self).unit.release()
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]

    def _set(self, setting: str, value: Any, recurse: bool, call: str) -> None:
        _check_flag(call, value)
        for runner in runners_below(self) if recurse else [_runner(self)]:
            setattr(runner.unit.settings, setting, value)


FSDPModule = HSDPModule


def _recover(module: Any) -> None:
    """Clears away what a failed backward has left."""
    for runner in runners_below(module):
        if runner.root is not None:
            runner.root.recover()


def _check_flag(call: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise coded(ValueError, "HP429", f"{call}: expected a bool, got {value!r}")


def _runner(module: Any) -> Runner:
    runner = runner_of(module)
    assert runner is not None
    return runner


def _runners(modules: Sequence[Any]) -> list[Runner]:
    found = [runner_of(module) for module in modules]
    for module, runner in zip(modules, found, strict=True):
        if runner is None:
            raise coded(
                ValueError,
                "HP427",
                f"prefetch: {type(module).__name__} is not a unit; call fully_shard for it first",
            )
    return [one for one in found if one is not None]


def register_fsdp_forward_method(module: Any, method_name: str) -> None:
    """Makes a method of a unit gather and free parameters as forward does; does nothing for other modules."""
    runner = runner_of(module)
    if runner is None:
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise coded(
            ValueError,
            "HP427",
            f"register_fsdp_forward_method: {type(module).__name__} has no method {method_name!r}",
        )

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        entered = runner.enter(module, args, kwargs)
        if entered is not None:
            args, kwargs = entered
        try:
            output = method(*args, **kwargs)
        except BaseException:
            runner.undo(module)
            raise
        left = runner.leave(module, output)
        return output if left is None else left

    setattr(module, method_name, run)


def get_model_state_dict(model: Any, *, options: Any = None) -> dict[str, Any]:
    """The model's state dict; options: full_state_dict, cpu_offload, ignore_frozen_params."""
    is_sent = getattr(options, "broadcast_from_rank0", False)
    if is_sent and not getattr(options, "full_state_dict", False):
        raise coded(
            ValueError,
            "HP429",
            "get_model_state_dict: broadcast_from_rank0 needs full_state_dict=True: shards are not sent",
        )
    return platform.get_model_state_dict(model, options=options)


def hsdp_sync_stream() -> None:
    """Waits for gathers and reductions on other streams; they end with backward, so there is nothing to wait for."""
