# SPDX-License-Identifier: Apache-2.0
"""Parameters without data, and the same numbers later: what their initialisers would have drawn.

with platform.init_on_device(platform.meta_device):
    model = Model()  # shapes only
platform.init_parameters(model.layers[0], stage_index=0)  # the numbers that Model() would have drawn there

A parameter may be distributed before: every rank draws the whole as one device would, and keeps its shard.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import mindspore
import numpy as np
from mindspore import Parameter, nn
from mindspore.common import initializer as initializers
from mindspore.nn.cell import register_cell_buffer_registration_hook
from mindspore.nn.utils import no_init_parameters

from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.mindspore import deferred_tensor
from hyper_parallel.platform.mindspore.dtensor_base import DTensorBase
from hyper_parallel.platform.mindspore.tensors import device_name
from hyper_parallel.platform.platform import Platform

META = "meta"

# Those that take as much from numpy.random for a small array as for a large one.
_ALIKE_FOR_ALL_SIZES = (
    initializers.Constant,
    initializers.HeNormal,
    initializers.HeUniform,
    initializers.Normal,
    initializers.One,
    initializers.TruncatedNormal,
    initializers.Uniform,
    initializers.XavierNormal,
    initializers.XavierUniform,
    initializers.Zero,
)


class DeferredInit(Platform):
    """The part of the contract that is about parameters that get their data later."""

    @property
    def meta_device(self) -> str:
        return META

    def init_on_device(
        self, device: Any, include_buffers: bool = False
    ) -> AbstractContextManager[None]:
        """A context in which new parameters, and buffers if asked, land on ``device``.

        On the meta device those that are made by an initialiser get no data, and ``numpy.random``, from which it would
        draw, goes on as if it had. A parameter that is made from data (a tensor, an array) keeps it. A buffer has its
        data before a Cell gets it: in the Cell it is on meta, and what it was is kept until ``init_parameters``.
        """
        where = device_name(device)
        if where not in (META, self.device()):
            raise coded(
                ValueError,
                "HP131",
                f"init_on_device: this process makes tensors on {self.device()} or on meta, not {device}",
            )
        return _deferring(include_buffers) if where == META else nullcontext()

    def copy_without_data(self, module: Any) -> Any:
        _refuse_planning(module)

    def simulate_ranks(self) -> AbstractContextManager[None]:
        _refuse_planning()

    def listen_to_functions(self, listener: Any) -> AbstractContextManager[None]:
        _refuse_planning(listener)

    def init_parameters(self, module: Any, stage_index: int) -> None:
        """Gives data to parameters (and buffers) that were created without, each as one device would have drawn it.

        Those built under ``init_on_device`` get exactly their numbers, in whatever part of the model ``module`` is, and
        no more than one whole parameter is held at a time. Others are a ValueError: nobody knows their initialiser.
        """
        if not isinstance(module, nn.Cell):
            raise coded(
                ValueError,
                "HP131",
                f"init_parameters: expected a mindspore.nn.Cell, got {module!r}",
            )
        if (
            not isinstance(stage_index, int)
            or isinstance(stage_index, bool)
            or stage_index < 0
        ):
            raise coded(
                ValueError,
                "HP131",
                f"init_parameters: stage_index must be an int of at least 0, got {stage_index!r}",
            )
        tensors = [*module.parameters_and_names(), *module.named_buffers()]
        empty = {
            name: tensor
            for name, tensor in tensors
            if self.is_meta(self._shard(tensor))
        }
        if lost := [
            name for name, tensor in empty.items() if self._draw_of(tensor) is None
        ]:
            raise coded(
                ValueError,
                "HP131",
                f"init_parameters: nobody knows how to initialise {', '.join(lost)}: they have no data and no "
                "initialiser. Build the Cell under init_on_device(meta_device), or load them.",
            )
        for tensor in empty.values():
            draw = self._draw_of(tensor)
            assert draw is not None  # checked before anything was begun
            self.update_param_data(tensor, draw())

    def _draw_of(self, parameter: Any) -> deferred_tensor.Draw | None:
        return deferred_tensor.draw_of(self._shard(parameter))

    def _shard(self, parameter: Any) -> Any:
        return (
            parameter.to_local()
            if isinstance(parameter, self.DTensorBase)
            else parameter
        )


@contextmanager
def _deferring(include_buffers: bool) -> Iterator[None]:
    made = Parameter.__init__

    @functools.wraps(made)
    def without_data(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        if self.has_init and self.init_mode is not None:
            _defer(self)

    hook = (
        register_cell_buffer_registration_hook(_buffer_on_meta)
        if include_buffers
        else None
    )
    with no_init_parameters():
        Parameter.__init__ = without_data
        try:
            yield
        finally:
            Parameter.__init__ = made
            if hook is not None:
                hook.remove()


def _buffer_on_meta(_cell: Any, _name: str, buffer: Any) -> Any:
    is_real = (
        buffer is not None
        and not isinstance(buffer, DTensorBase)
        and not buffer.is_meta
    )
    return (
        deferred_tensor.tensor(buffer.shape, buffer.dtype, lambda: buffer)
        if is_real
        else None
    )


def _defer(parameter: Any) -> None:
    source, parameter.init_mode = parameter.init_mode, None
    state = np.random.get_state()
    _pass_by(source)
    parameter.set_data(deferred_tensor.tensor(source.shape, source.dtype, None))
    deferred_tensor.remember(parameter, lambda: _drawn(source, state))


def _pass_by(source: Any) -> None:
    """Leaves ``numpy.random`` where the initialiser of a tensor would."""
    if isinstance(source.init, _ALIKE_FOR_ALL_SIZES):
        source.init(np.zeros([min(size, 2) for size in source.shape], np.float32))
    else:
        mindspore.Tensor(None, source.dtype, source.shape, source.init).init_data()


def _drawn(source: Any, state: Any) -> Any:
    """What the initialiser of a tensor draws, from ``numpy.random`` as it was then."""
    now = np.random.get_state()
    np.random.set_state(state)
    try:
        return mindspore.Tensor(
            None, source.dtype, source.shape, source.init
        ).init_data()
    finally:
        np.random.set_state(now)


def _refuse_planning(*_: Any) -> NoReturn:
    raise coded(
        NotImplementedError,
        "HP903",
        "auto_plan: MindSpore has no tensors without data, on which a model is planned; plan it on PyTorch, save the "
        "plan, and load it here: the styles are the same",
    )
