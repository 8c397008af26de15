# SPDX-License-Identifier: Apache-2.0
"""State dicts by parameters' names, under the names that torch.distributed.checkpoint.state_dict has for them.

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)     whole, on rank 0 alone
    set_model_state_dict(model, model_state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))

An optimizer that has made no step has no state here; torch makes some by a step with zeros.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.metadata import dtype_name
from hyper_parallel.core.distributed_checkpoint.training_state import OptimizerState
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

_STATE, _GROUPS = "state.", "param_groups."


@dataclass(frozen=True)
class StateDictOptions:
    """What a state dict holds and how it is set.

    ``full_state_dict``: tensors are whole; with ``cpu_offload`` on rank 0 alone, and others get an empty dict.
    ``ignore_frozen_params``: leaves out parameters that need no gradient. ``keep_submodule_prefixes``: whether names of
    ``submodules`` begin as in the model. ``strict``: missing and unexpected names are an error.
    ``broadcast_from_rank0``: only rank 0 has the state dict, which must be full. ``flatten_optimizer_state_dict``: one
    level, "state.<parameter>.<key>" and "param_groups.<parameter>.<option>".
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    keep_submodule_prefixes: bool = True
    strict: bool = True
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False

    def __post_init__(self) -> None:
        if self.broadcast_from_rank0 and not self.full_state_dict:
            raise coded(
                ValueError,
                "HP512",
                "StateDictOptions: broadcast_from_rank0 needs full_state_dict=True: shards are not sent",
            )


class IncompatibleKeys(NamedTuple):
    """The names that only the model has, and that only the state dict has."""

    missing_keys: list[str]
    unexpected_keys: list[str]


# --- reading


def get_model_state_dict(
    model: Any,
    *,
    submodules: Iterable[Any] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """The model's parameters and buffers by name; of ``submodules`` alone, where they are given."""
    options = options or StateDictOptions()
    chosen = StateDictOptions(ignore_frozen_params=options.ignore_frozen_params)
    state = get_platform().get_model_state_dict(model, options=chosen)
    if submodules is not None:
        state = _of_submodules(
            model, state, set(map(id, submodules)), options.keep_submodule_prefixes
        )
    return _delivered(state, options)


def _collect_optimizers(
    model: Any, optimizers: Iterable[Any], left_out: Collection[str]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(state by parameter, groups) of several optimizers, without the parameters of these names."""
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for optimizer in optimizers:
        own = OptimizerState(model, optimizer).state_dict()
        state.update(own["state"])
        for group in own["groups"]:
            names = [name for name in group["params"] if name not in left_out]
            groups.append({**group, "params": names})
    kept = {name: values for name, values in state.items() if name not in left_out}
    return kept, groups


def get_optimizer_state_dict(
    model: Any, optimizers: Any, *, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """State and groups of one optimizer or several by the names of the model's parameters."""
    options = options or StateDictOptions()
    frozen = _frozen(model) if options.ignore_frozen_params else ()
    state, groups = _collect_optimizers(model, _several(optimizers), frozen)
    flat = {
        f"{_STATE}{name}.{key}": value
        for name, values in state.items()
        for key, value in values.items()
    }
    flat = _delivered(flat, options)
    is_left_out = (
        options.full_state_dict
        and options.cpu_offload
        and get_platform().get_rank() != 0
    )
    if is_left_out:
        return {}
    if options.flatten_optimizer_state_dict:
        return flat | _flat_groups(groups)
    nested = {
        name: {key: flat[f"{_STATE}{name}.{key}"] for key in values}
        for name, values in state.items()
    }
    return {"state": nested, "param_groups": groups}


def get_state_dict(
    model: Any,
    optimizers: Any,
    *,
    submodules: Iterable[Any] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state of the model and that of its optimizers."""
    of_model = get_model_state_dict(model, submodules=submodules, options=options)
    return of_model, get_optimizer_state_dict(model, optimizers, options=options)


# --- setting


def set_model_state_dict(
    model: Any,
    model_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> IncompatibleKeys:
    """Fills the model's parameters and buffers where they are, from whole tensors or distributed ones on any mesh."""
    options = options or StateDictOptions()
    platform = get_platform()
    given = (
        _received(model_state_dict)
        if options.broadcast_from_rank0
        else dict(model_state_dict)
    )
    chosen = StateDictOptions(ignore_frozen_params=options.ignore_frozen_params)
    mine = platform.get_model_state_dict(model, options=chosen)
    found = IncompatibleKeys(
        sorted(mine.keys() - given.keys()), sorted(given.keys() - mine.keys())
    )
    if options.strict and (found.missing_keys or found.unexpected_keys):
        first = (*found.missing_keys, *found.unexpected_keys)[0]
        raise coded(
            CheckpointError,
            "HP512",
            f"set_model_state_dict: {len(found.missing_keys)} names of the model are not in the state dict and "
            f"{len(found.unexpected_keys)} of the state dict are not in the model; strict=False takes the others",
            field=first,
        )
    for name in [name for name in mine if name in given]:
        if platform.is_tensor(mine[name]):
            _check_shape(given[name], mine[name], name)
            platform.load_into_param(mine[name], given[name])
    objects = {
        name: given[name]
        for name in given
        if name in mine and not platform.is_tensor(mine[name])
    }
    if objects:  # what modules add to their state themselves
        model.load_state_dict(objects, strict=False)
    return found


def set_optimizer_state_dict(
    model: Any,
    optimizers: Any,
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Gives optimizers their state and options, nested or flat, from whole tensors or distributed ones on any mesh."""
    options = options or StateDictOptions()
    if options.broadcast_from_rank0:
        optim_state_dict = _received(_as_flat(optim_state_dict))
    names = list(get_platform().parameters_dict(model))
    state, groups = _nested(optim_state_dict, names)
    for optimizer in _several(optimizers):
        OptimizerState(model, optimizer).load_state_dict(
            {"state": state, "groups": groups}
        )


def set_state_dict(
    model: Any,
    optimizers: Any,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> IncompatibleKeys:
    """Both; an empty dict leaves its part as it is."""
    broadcast = options is not None and options.broadcast_from_rank0
    found = IncompatibleKeys([], [])
    if model_state_dict or broadcast:
        found = set_model_state_dict(model, model_state_dict, options=options)
    if optim_state_dict or broadcast:
        set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return found


# --- tensors


def _delivered(state: dict[str, Any], options: StateDictOptions) -> dict[str, Any]:
    """The tensors as the options ask for them; every rank takes part in gathering."""
    platform = get_platform()
    is_for_rank_0 = options.full_state_dict and options.cpu_offload
    made = {}
    for name, value in state.items():
        taken = value
        if options.full_state_dict and isinstance(value, platform.DTensorBase):
            taken = platform.detach(value.full_tensor())
        if is_for_rank_0 and platform.get_rank() != 0:
            continue
        if options.cpu_offload and platform.is_tensor(taken):
            taken = _on_host(taken)
        made[name] = taken
    return made


def _on_host(tensor: Any) -> Any:
    platform = get_platform()
    if not isinstance(tensor, platform.DTensorBase):
        return platform.host_tensor(tensor)
    return tensor.layout.tensor(
        platform.host_tensor(tensor.to_local()), tuple(tensor.shape)
    )


def _check_shape(value: Any, target: Any, name: str) -> None:
    """An error where a value is not that of the whole: a plain shard would be taken for what it is not."""
    if tuple(value.shape) != tuple(target.shape):
        raise coded(
            CheckpointError,
            "HP512",
            f"set_model_state_dict: expected the shape of the whole, {tuple(target.shape)}, got "
            f"{tuple(value.shape)}",
            field=name,
        )


def _received(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict of rank 0, on every rank, in host memory: a device holds one tensor at a time."""
    platform = get_platform()
    device = platform.device()
    own = dict(state) if platform.get_rank() == 0 else {}
    described = {
        name: (tuple(value.shape), dtype_name(value.dtype))
        if platform.is_tensor(value)
        else None
        for name, value in own.items()
    }
    objects = {
        name: value for name, value in own.items() if not platform.is_tensor(value)
    }
    everyone: list[Any] = [None] * platform.get_world_size()
    platform.all_gather_object(everyone, (described, objects))
    described, received = everyone[0][0], dict(everyone[0][1])
    for name, about in described.items():
        if about is not None:
            shape, dtype = about[0], platform.str_to_dtype(about[1])
            buffer = (
                platform.clone(own[name]).to(device)
                if own
                else platform.empty(shape, dtype=dtype, device=device)
            )
            received[name] = platform.host_tensor(platform.broadcast(buffer, 0, None))
    return received


# --- names


def _several(optimizers: Any) -> list[Any]:
    return (
        list(optimizers) if isinstance(optimizers, (list, tuple, set)) else [optimizers]
    )


def _frozen(model: Any) -> set[str]:
    platform = get_platform()
    parameters = platform.parameters_dict(model).items()
    return {
        name for name, parameter in parameters if not platform.requires_grad(parameter)
    }


def _of_submodules(
    model: Any, state: dict[str, Any], chosen: set[int], keep_prefixes: bool
) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for path, module in get_platform().get_cells_and_names(model):
        if id(module) in chosen:
            prefix = f"{path}." if path else ""
            for name in [name for name in state if name.startswith(prefix)]:
                made[name if keep_prefixes else name.removeprefix(prefix)] = state[name]
    return made


def _flat_groups(groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        f"{_GROUPS}{name}.{option}": value
        for group in groups
        for name in group["params"]
        for option, value in group.items()
        if option != "params"
    }


def _as_flat(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    if "state" not in state_dict:
        return dict(state_dict)
    state = state_dict["state"].items()
    flat = {
        f"{_STATE}{name}.{key}": value
        for name, values in state
        for key, value in values.items()
    }
    return flat | _flat_groups(state_dict["param_groups"])


def _nested(
    state_dict: Mapping[str, Any], names: list[str]
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """State by parameter and key, and the groups: one for each parameter, where they came flat."""
    if "state" in state_dict:
        state = {name: dict(values) for name, values in state_dict["state"].items()}
        return state, [dict(group) for group in state_dict["param_groups"]]
    known = set(names)
    options: dict[str, dict[str, Any]] = {}
    state = {}
    for entry, value in state_dict.items():
        for prefix, kind in ((_STATE, state), (_GROUPS, options)):
            if entry.startswith(prefix):
                owner, _, key = entry.removeprefix(prefix).rpartition(".")
                if owner not in known:
                    raise coded(
                        CheckpointError,
                        "HP512",
                        f"set_optimizer_state_dict: the model has no parameter {owner!r}",
                        field=entry,
                    )
                kind.setdefault(owner, {})[key] = value
    return state, [{"params": (name,), **values} for name, values in options.items()]
