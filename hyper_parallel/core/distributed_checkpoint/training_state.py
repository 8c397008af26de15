# SPDX-License-Identifier: Apache-2.0
"""What a training run is, apart from the step it has reached, as values that give their state and take it back.

    state = {"model": ModelState(model), "optimizer": OptimizerState(model, optimizer), "random": RandomState()}
    save(state, checkpoint_id="runs/a/step-100")

Everything goes by the names of the parameters: another mesh, another order of parameters or groups, another framework
can take it. What is about to be filled is made by `expect`, which `load` calls with what the checkpoint holds.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.metadata import (
    BytesStorageMetadata,
    TensorStorageMetadata,
    dtype_name,
)
from hyper_parallel.core.distributed_checkpoint.state_dict import PerRank
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Replicate
from hyper_parallel.core.modules.absent import named_as_whole
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

Saved = Mapping[
    str, "TensorStorageMetadata | BytesStorageMetadata"
]  # by the names below the value that expects it

# Options that say how an optimizer computes, not what: those of the run stand, whatever the checkpoint's were.
_HOW = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})

# What optimizers keep as one number of a parameter. The shape says so, unless the parameter itself has no dims.
_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})


class ModelState:
    """A model's parameters and buffers, of any framework; loading fills them where they are."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._handed_out: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """The model's tensors, not copies, by name; tied ones under each of their names."""
        self._handed_out = get_platform().get_model_state_dict(self.model)
        return dict(self._handed_out)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copies what does not lie in the model yet; names that the model does not have are a CheckpointError."""
        platform = get_platform()
        mine, self._handed_out = (
            self._handed_out or platform.get_model_state_dict(self.model),
            {},
        )
        wrong = sorted(mine.keys() ^ state_dict.keys())
        if wrong:
            there = (
                "is not in the state dict"
                if wrong[0] in mine
                else "is not in the model"
            )
            raise coded(
                CheckpointError,
                "HP512",
                f"{wrong[0]} {there}, nor are {len(wrong) - 1} others in both",
                field=wrong[0],
            )
        for name, value in state_dict.items():
            if platform.is_tensor(mine[name]) and value is not mine[name]:
                platform.load_into_param(mine[name], value)
        objects = {
            name: value
            for name, value in state_dict.items()
            if not platform.is_tensor(mine[name])
        }
        if objects:  # what modules add to their state themselves
            self.model.load_state_dict(objects, strict=False)


class _Groups(tuple[dict[str, Any], ...]):
    """An optimizer's groups by name; stages of a pipeline have the parameters of each stage in theirs."""

    __slots__ = ()

    @staticmethod
    def merge_ranks(
        everyone: Sequence[tuple[dict[str, Any], ...]],
    ) -> tuple[dict[str, Any], ...]:
        """The groups of all ranks in one; those of one number must have the same options."""
        made: list[dict[str, Any]] = []
        for groups in everyone:
            for number, group in enumerate(groups):
                if number == len(made):
                    made.append({**group, "params": ()})
                _check_same_options(number, made[number], group)
                names = (*made[number]["params"], *group["params"])
                made[number]["params"] = tuple(dict.fromkeys(names))
        return tuple(made)


class OptimizerState:
    """The state and the options of an optimizer by the names that a model gives its parameters.

    ``{"state": {parameter: {key: tensor or value}}, "groups": ({"params": (names), "lr": ...}, ...)}``
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model = model
        self.optimizer = optimizer
        self._expected: dict[str, dict[str, Any]] | None = (
            None  # for the next state_dict() alone
        )
        self._handed_out: dict[str, dict[str, Any]] = {}

    def expect(self, saved: Saved) -> None:
        """Makes the next state_dict() one of what was saved: in memory that the optimizer has, or in new memory.

        The optimizer gets the new memory by load_state_dict(), so that a load that fails leaves it as it is.
        """
        parameters = {
            name: (parameter, group) for name, parameter, group in self._named()
        }
        state = get_platform().optimizer_parts(self.optimizer)[1]
        expected: dict[str, dict[str, Any]] = {}
        for name, stored in saved.items():
            owner, key = _split(name, parameters)
            if (
                owner is not None
            ):  # else strict loading says that there is no such parameter
                parameter, group = parameters[owner]
                now = state.get(parameter, {}).get(key)
                expected.setdefault(owner, {})[key] = _memory_for(
                    stored, now, parameter, key, group
                )
        self._expected = expected

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's tensors, not copies; a parameter that has had no gradient has no state."""
        expected, self._expected = self._expected, None
        self._handed_out = expected or {}
        state = self._running() if expected is None else expected
        return {
            "state": {name: dict(values) for name, values in state.items()},
            "groups": _Groups(self._groups()),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes the state, in place where there is some, and the options.

        A group of the optimizer takes its options from the groups that its parameters were in.
        """
        platform = get_platform()
        groups, state = platform.optimizer_parts(self.optimizer)
        handed_out, self._handed_out = self._handed_out, {}
        options = self._matched(
            state_dict["groups"]
        )  # may refuse, before anything is changed
        for name, parameter, group in list(self._named()):
            before, ours = state.get(parameter, {}), handed_out.get(name, {})
            taken = {
                key: _taken(
                    value, before.get(key), ours.get(key), parameter, key, group
                )
                for key, value in state_dict["state"].get(name, {}).items()
            }
            state.pop(parameter, None)
            if taken:
                state[parameter] = taken
        for group, saved in zip(groups, options, strict=True):
            group.update(
                {key: _restored(group.get(key), value) for key, value in saved.items()}
            )

    def _named(self) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """(name, parameter, its group) of all that the optimizer has."""
        groups, state = get_platform().optimizer_parts(self.optimizer)
        names = {
            id(parameter): name
            for name, parameter in named_as_whole(self.model).items()
        }
        known = {id(parameter) for group in groups for parameter in group["params"]}
        strangers = [key for key in state if id(key) not in known]
        if strangers:
            what = getattr(strangers[0], "shape", strangers[0])
            raise coded(
                CheckpointError,
                "HP512",
                f"{type(self.optimizer).__name__} keeps state for {what!r}, which is no parameter of its groups; "
                "only state of parameters can be stored",
            )
        for number, group in enumerate(groups):
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise coded(
                        CheckpointError,
                        "HP512",
                        f"group {number} of {type(self.optimizer).__name__} has a parameter of shape "
                        f"{tuple(parameter.shape)} that the model has no name for; make the optimizer from the "
                        "parameters of this model, after they were put on the mesh",
                    )
                yield names[id(parameter)], parameter, group

    def _running(self) -> dict[str, dict[str, Any]]:
        state = get_platform().optimizer_parts(self.optimizer)[1]
        running = {
            name: state[parameter]
            for name, parameter, _ in self._named()
            if state.get(parameter)
        }
        for name, values in running.items():
            for key, value in values.items():
                if isinstance(value, (list, dict)):
                    raise coded(
                        CheckpointError,
                        "HP512",
                        f"{type(self.optimizer).__name__} keeps a {type(value).__name__} here; only tensors and "
                        "plain values can be laid out anew for other ranks. Save the optimizer's own state_dict() "
                        "instead",
                        field=f"state.{name}.{key}",
                    )
        return running

    def _groups(self) -> tuple[dict[str, Any], ...]:
        groups, _ = get_platform().optimizer_parts(self.optimizer)
        names = {id(parameter): name for name, parameter, _ in self._named()}
        return tuple(
            {"params": tuple(names[id(parameter)] for parameter in group["params"])}
            | {key: _plain(value) for key, value in group.items() if key != "params"}
            for group in groups
        )

    def _matched(self, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The options that each group takes."""
        home = {
            name: number
            for number, group in enumerate(saved)
            for name in group["params"]
        }
        options = []
        for number, group in enumerate(self._groups()):
            missing = [name for name in group["params"] if name not in home]
            if missing:
                raise coded(
                    CheckpointError,
                    "HP512",
                    f"{missing[0]} and {len(missing) - 1} others of group {number} are in no group of the "
                    "checkpoint; load the model without the optimizer, or make the optimizer from the parameters "
                    "that it had",
                    field="groups",
                )
            _check_alike(number, group["params"], home, saved)
            first = saved[home[group["params"][0]]] if group["params"] else {}
            options.append(_what(first))
        return options


class RandomState:
    """The generators of this process: the framework's on host and device, Python's and numpy's. Each rank has its own.

    A generator that the checkpoint does not have stays as it is; one that only the checkpoint has is told and left.
    """

    def __init__(self) -> None:
        self._expected: dict[str, int] | None = (
            None  # bytes of each state, for the next state_dict() alone
        )

    def expect(self, saved: Saved) -> None:
        """Makes the next state_dict() one of the generators that were saved."""
        tensors = {
            name: stored
            for name, stored in saved.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self._expected = {
            name: stored.size[-1] for name, stored in tensors.items()
        }  # the first dim is the ranks

    def state_dict(self) -> dict[str, PerRank]:
        """One uint8 tensor a generator, as long on every rank."""
        platform = get_platform()
        states = _generators()
        expected, self._expected = self._expected, None
        if expected is not None:
            fits = {
                name: state
                for name, state in states.items()
                if expected.get(name) == len(state)
            }
            empty = {
                name: np.zeros(length, np.uint8)
                for name, length in expected.items()
                if name not in fits
            }
            states = fits | empty
        return {
            name: PerRank(platform.tensor_from_bytes(s, "uint8", s.shape))
            for name, s in states.items()
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Puts every generator where it was: what is drawn next is what would have come."""
        platform = get_platform()
        here = _generators()
        for name, value in state_dict.items():
            state = platform.tensor_to_numpy(
                value.value if isinstance(value, PerRank) else value
            )
            if name not in here or state.shape != here[name].shape:
                warnings.warn(
                    f"RandomState: the checkpoint has a generator {name!r} of {state.size} bytes, this process has "
                    f"{[f'{key} of {len(own)}' for key, own in here.items()]}; it is left out",
                    stacklevel=2,
                )
            elif name == "python":
                words, kept = _unpacked(state)
                random.setstate((3, tuple(words.tolist()), kept))
            elif name == "numpy":
                words, kept = _unpacked(state)
                np.random.set_state(
                    (
                        "MT19937",
                        words[:-1],
                        int(words[-1]),
                        int(kept is not None),
                        kept or 0.0,
                    )
                )
            else:
                platform.set_rng_states(
                    {
                        name: platform.tensor_from_bytes(
                            state.copy(), "uint8", state.shape
                        )
                    }
                )


# --- optimizers


def _split(name: str, parameters: Mapping[str, Any]) -> tuple[str | None, str]:
    """(parameter, key) of "state.<parameter>.<key>"; the longest parameter that fits, None if there is none."""
    if not name.startswith("state."):
        return None, ""
    owner, _, key = name.removeprefix("state.").rpartition(".")
    while owner and owner not in parameters:
        owner, _, inner = owner.rpartition(".")
        key = f"{inner}.{key}"
    return owner or None, key


def _memory_for(
    stored: Any, now: Any, parameter: Any, key: str, group: Mapping[str, Any]
) -> Any:
    """The tensor that the optimizer has now, or a new one; None for an object."""
    if not isinstance(stored, TensorStorageMetadata):
        return None
    if get_platform().is_tensor(now):
        return now
    return _new(
        parameter, key, group, tuple(stored.size), dtype_name(stored.properties.dtype)
    )


def _new(
    parameter: Any,
    key: str,
    group: Mapping[str, Any],
    size: tuple[int, ...],
    dtype: str,
) -> Any:
    """A tensor of an optimizer's state as the optimizer would have made it.

    Of the parameter's shape: laid out like it. A number: plain, in host memory if it is the step, unless the optimizer
    computes on the device alone. All else, such as Adafactor's factors: whole on every rank of the parameter's mesh.
    """
    platform = get_platform()
    kind, shape = platform.str_to_dtype(dtype), tuple(parameter.shape)
    is_number = size == () and (shape != () or key in _NUMBERS)
    if size == shape and not is_number:
        return platform.full_like(parameter, 0, dtype=kind)
    on_host = (
        is_number
        and key == "step"
        and not (group.get("capturable") or group.get("fused"))
    )
    device = "cpu" if on_host else platform.get_param_local_data(parameter).device
    plain = platform.zeros(size, dtype=kind, device=device)
    if is_number or not isinstance(parameter, platform.DTensorBase):
        return plain
    mesh = parameter.layout.mesh
    return Layout.from_device_mesh(mesh)([Replicate()] * mesh.ndim).tensor(plain, size)


def _taken(
    value: Any,
    before: Any,
    handed_out: Any,
    parameter: Any,
    key: str,
    group: Mapping[str, Any],
) -> Any:
    """What the optimizer keeps of a loaded value: its own tensor where it has one, else one that `expect` made."""
    platform = get_platform()
    if platform.is_tensor(before):
        target = before
    elif value is handed_out or not platform.is_tensor(value):
        return value
    else:
        target = _new(
            parameter, key, group, tuple(value.shape), dtype_name(value.dtype)
        )
    if value is not target:
        platform.load_into_param(target, value)
    return target


def _check_same_options(
    number: int, one: Mapping[str, Any], other: Mapping[str, Any]
) -> None:
    """A CheckpointError if two ranks have different options in their group of one number."""
    if _what(one) != _what(other):
        raise coded(
            CheckpointError,
            "HP512",
            f"group {number} has the options {_what(one)} on one rank and {_what(other)} on another; give the groups "
            "of all stages the same options in the same order",
            field="groups",
        )


def _what(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _HOW}


def _check_alike(
    number: int,
    names: Sequence[str],
    home: Mapping[str, int],
    saved: Sequence[Mapping[str, Any]],
) -> None:
    """A CheckpointError if parameters of one group come from groups with different options."""
    sources = {
        home[name]: name for name in reversed(names)
    }  # a parameter from each group
    for (here, mine), (there, other) in itertools.combinations(sources.items(), 2):
        first, second = _what(saved[here]), _what(saved[there])
        for option in sorted(first.keys() | second.keys()):
            if not _equal(first.get(option), second.get(option)):
                raise coded(
                    CheckpointError,
                    "HP512",
                    f"group {number} has {mine} and {other}, but the checkpoint has them in groups {here} and "
                    f"{there}, with {option} {first.get(option)!r} and {second.get(option)!r}; cut the groups as "
                    "they were",
                    field="groups",
                )


def _equal(first: Any, other: Any) -> bool:
    return type(first) is type(other) and bool(
        np.array_equal(first, other) if _is_array(first) else first == other
    )


def _is_array(value: Any) -> bool:
    return isinstance(value, (np.ndarray, np.generic))


def _plain(value: Any) -> Any:
    """An option without the framework's tensors: a learning rate may be one."""
    if type(value) in (tuple, list):
        return type(value)(_plain(item) for item in value)
    return (
        get_platform().tensor_to_numpy(value).copy()
        if get_platform().is_tensor(value)
        else value
    )


def _restored(now: Any, value: Any) -> Any:
    """An option as the optimizer holds it: a tensor is filled in place."""
    if get_platform().is_tensor(now):
        get_platform().load_into_param(now, value)
        return now
    if (
        type(now) in (tuple, list)
        and type(value) in (tuple, list)
        and len(now) == len(value)
    ):
        return type(now)(_restored(*pair) for pair in zip(now, value, strict=True))
    return value.tolist() if _is_array(value) else value


# --- generators


def _generators() -> dict[str, NDArray[np.uint8]]:
    """The bytes of each generator's state."""
    states = {
        name: get_platform().tensor_to_numpy(s)
        for name, s in get_platform().get_rng_states().items()
    }
    _, words, kept = random.getstate()
    states["python"] = _packed(words, kept)
    found = np.random.get_state(legacy=False)
    assert isinstance(found, dict)
    if found["bit_generator"] != "MT19937":
        raise coded(
            CheckpointError,
            "HP512",
            f"numpy's global generator must be MT19937 to be stored, got {found['bit_generator']}",
        )
    words = (*found["state"]["key"].tolist(), found["state"]["pos"])
    states["numpy"] = _packed(words, found["gauss"] if found["has_gauss"] else None)
    return states


def _packed(words: Sequence[int], kept: float | None) -> NDArray[np.uint8]:
    """A Mersenne twister: 624 words and a position, whether a normal number is kept for the next draw, that number."""
    head = np.array([*words, kept is not None], "<u4")
    return np.concatenate(
        [head.view(np.uint8), np.array([kept or 0.0], "<f8").view(np.uint8)]
    )


def _unpacked(state: NDArray[np.uint8]) -> tuple[NDArray[np.uint32], float | None]:
    head = state[:-8].view("<u4")
    return head[:-1], float(state[-8:].view("<f8")[0]) if head[-1] else None
