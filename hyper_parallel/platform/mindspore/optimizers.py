# SPDX-License-Identifier: Apache-2.0
"""The groups and the state of MindSpore's optimizers in the form that torch's have, which checkpoints store.

    groups, state = parts(optimizer)
    state[layer.weight]["exp_avg"]

MindSpore keeps a tuple of tensors for each kind of state, in the order of the parameters, and makes all of them when
the optimizer is made. Names that mean what torch's mean are given torch's, so that either can load the other's.

A step of any optimizer updates its parameters or is refused (``patches``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, ParameterTuple, nn
from mindspore.experimental import optim

from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.mindspore import private, versions

_TORCHS = {
    "accum": "momentum_buffer",
    "mean_grad": "grad_avg",
    "mean_square": "square_avg",
    "moment": "momentum_buffer",
    "moment1": "exp_avg",
    "moment2": "exp_avg_sq",
    "moments": "momentum_buffer",
    "moments1": "exp_avg",
    "moments2": "exp_avg_sq",
    "state_step": "step",
    "step_t": "step",
}
_ADAGRADS = {"accum": "sum"}
_NO_STATE = frozenset(
    {
        "parameters",
        "_parameters",
        "params",
        "learning_rate",
        "lrs",
        "group_lr",
        "group_params",
    }
)
_OPTIONS = (
    "learning_rate",
    "momentum",
)  # single parameters of nn's optimizers that are options, not state
_FIRST_STEP = "stat"  # of SGD: 1 until the first step has filled the momentum


def parts(
    optimizer: Any, copy_into: Callable[[Any, Any], None]
) -> tuple[Sequence[dict[str, Any]], MutableMapping[Any, dict[str, Any]]]:
    """(groups, state of each parameter) of an optimizer that works on this device."""
    refuse_idle(optimizer)
    if isinstance(optimizer, optim.Optimizer):
        groups = optimizer.param_groups
    elif isinstance(optimizer, nn.Optimizer):
        groups = _groups(optimizer)
    else:
        raise coded(
            TypeError,
            "HP140",
            "optimizer_parts: expected an optimizer of mindspore.experimental.optim or mindspore.nn, got "
            f"{type(optimizer).__name__}",
        )
    return groups, State(optimizer, groups, copy_into)


def refuse_idle(optimizer: Any) -> None:
    """A RuntimeError for an optimizer that has no kernel on a CPU, or, worse, runs there and changes nothing."""
    is_mint = any(
        kind.__module__.startswith("mindspore.mint.optim")
        for kind in type(optimizer).__mro__
    )
    if is_mint and mindspore.get_context("device_target") == "CPU":
        name = type(optimizer).__name__
        raise coded(
            RuntimeError,
            "HP140",
            f"mindspore.mint.optim.{name} does not change any weight on a CPU; use "
            f"mindspore.experimental.optim.{name.removeprefix('Fused')}, which does",
        )


def unrecorded_step(usual: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an optimizer's step so that it is not recorded: while recording, some optimizers update a copy."""

    @functools.wraps(usual)
    def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_idle(optimizer)
        executor = private.executor()
        was_on = executor.grad_flag()
        executor.set_grad_flag(False)
        try:
            return usual(optimizer, *args, **kwargs)
        finally:
            versions.note()
            executor.set_grad_flag(was_on)

    return step


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    """The groups of an optimizer of ``nn``, which keeps a rate for each parameter if they differ.

    A rate that follows a schedule is no option: the schedule is code, and the ``global_step`` says where it is.
    """
    single = {
        name: value
        for name in _OPTIONS
        if isinstance(value := getattr(optimizer, name, None), Parameter)
    }
    options = {
        {"learning_rate": "lr"}.get(name, name): value for name, value in single.items()
    }
    parameters = list(optimizer.parameters)
    if not optimizer.is_group_lr or optimizer.dynamic_lr:
        return [{"params": parameters, **options}]
    return [
        {"params": [p], **options, "lr": lr}
        for p, lr in zip(parameters, optimizer.learning_rate, strict=True)
    ]


class State(MutableMapping[Any, dict[str, Any]]):
    """The state of each parameter. All have some from the beginning: what is taken out stays until it is replaced."""

    def __init__(
        self,
        optimizer: Any,
        groups: Sequence[dict[str, Any]],
        copy_into: Callable[[Any, Any], None],
    ) -> None:
        self._name = type(optimizer).__name__
        self._copy_into = copy_into
        self._parameters = list(optimizer.parameters)
        self._at = {id(parameter): i for i, parameter in enumerate(self._parameters)}
        self._kinds = self._find_kinds(optimizer)
        if not any(group.get("amsgrad") for group in groups):
            self._kinds.pop("max_exp_avg_sq", None)  # made, but not used
        self._given: dict[
            str, tuple[Any, Any]
        ] = {}  # to numbers of all parameters: the value, and by which parameter

    def _find_kinds(self, optimizer: Any) -> dict[str, Sequence[Any]]:
        """The optimizer's state by torch's names: one tensor per parameter for each."""
        kinds: dict[str, Sequence[Any]] = {}
        names = _TORCHS | (_ADAGRADS if "Adagrad" in self._name else {})
        for name, value in vars(optimizer).items():
            if (
                isinstance(value, ParameterTuple)
                and len(value) == len(self)
                and name not in _NO_STATE
            ):
                kinds[names.get(name, name)] = value
        known = {
            *self._at,
            *(id(tensor) for kind in kinds.values() for tensor in kind),
        }
        for name, value in optimizer.parameters_and_names(expand=False):
            if (
                "." not in name
                and id(value) not in known
                and not name.startswith(_OPTIONS)
            ):
                # A number for all parameters.
                kinds[names.get(name, name)] = [value] * len(self)
        return kinds

    def __getitem__(self, parameter: Any) -> dict[str, Any]:
        own = self._own(parameter)
        if (
            "step" in own and own["step"].dtype == mindspore.int32
        ):  # torch counts in float32
            own["step"] = mindspore.Tensor(own["step"].asnumpy().astype(np.float32))
        return own

    def _own(self, parameter: Any) -> dict[str, Any]:
        """The optimizer's tensors themselves."""
        at = self._at.get(id(parameter))
        if at is None:
            raise KeyError(parameter)
        return {name: kind[at] for name, kind in self._kinds.items()}

    def __setitem__(self, parameter: Any, values: dict[str, Any]) -> None:
        own = self._own(parameter)
        if unknown := sorted(values.keys() - own.keys()):
            raise coded(
                ValueError,
                "HP140",
                f"{self._name} of MindSpore keeps no {unknown[0]!r} of a parameter; it has {sorted(own)}",
            )
        if (
            "momentum_buffer" in values
            and _FIRST_STEP in own
            and _FIRST_STEP not in values
        ):
            values = {**values, _FIRST_STEP: mindspore.ops.zeros_like(own[_FIRST_STEP])}
        for name, value in values.items():
            if value is not own[name]:
                self._check_alike(name, value, parameter)
                self._copy_into(own[name], value)

    def _check_alike(self, name: str, value: Any, parameter: Any) -> None:
        """A ValueError if a number that all parameters share would be one for this and another for those before."""
        if len({id(tensor) for tensor in self._kinds[name]}) == 1 < len(self):
            number = value.asnumpy().tolist()
            before, first = self._given.setdefault(name, (number, parameter))
            if before != number:
                raise coded(
                    ValueError,
                    "HP140",
                    f"{self._name} of MindSpore keeps one {name!r} for all parameters, got {before} for "
                    f"{first.name} and {number} for {parameter.name}; load what was saved when both had the same",
                )

    def __delitem__(self, parameter: Any) -> None:
        self[parameter]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)
