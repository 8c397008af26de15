# SPDX-License-Identifier: Apache-2.0
"""Parameters without data, and the same numbers later: a constructor's operators are taped and played back.

with platform.init_on_device(platform.meta_device):
    model = Model()  # shapes only
platform.init_parameters(model.layers[0], stage_index=0)  # the numbers that Model() would have drawn there

A parameter may be distributed before: every rank draws the whole as one device would, and keeps its shard.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.platform import Platform
from hyper_parallel.platform.torch.dtensor_base import DTensorBase

if TYPE_CHECKING:
    from hyper_parallel.platform.torch.tape import (
        Tape,
    )  # which few need: it is imported where one begins

_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_GET_IS_META: Any = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
# Functions that hand values to Python without an operator.
_READERS = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__})


class DeferredInit(Platform):
    """The part of the contract that is about parameters that get their data later."""

    @property
    def meta_device(self) -> torch.device:
        return torch.device("meta")

    def init_on_device(
        self, device: Any, include_buffers: bool = False
    ) -> AbstractContextManager[None]:
        """A context in which new parameters, and buffers if asked, land on ``device``; other tensors are as ever.

        On the meta device nothing is drawn, and the generator is left as it was found: initialise a model before
        building the next one, or build both in one context. Casts and copies of the model (``to(dtype)``, deepcopy)
        belong inside too: a tensor on meta that was made outside has no tape.
        """
        try:
            target = _Target(torch.device(device), include_buffers)
        except (RuntimeError, TypeError) as error:
            raise type(error)(
                f"init_on_device: {device!r} is not a device: {error}"
            ) from error
        return _placing(target)

    # Few programs plan, and importing the platform is to stay light.
    def copy_without_data(self, module: Any) -> Any:
        from hyper_parallel.platform.torch import simulated

        return simulated.copy_without_data(module)

    def simulate_ranks(self) -> AbstractContextManager[None]:
        from hyper_parallel.platform.torch import simulated

        return simulated.simulate(self)

    def listen_to_functions(
        self, listener: Callable[[str, tuple[Any, ...], Any], None]
    ) -> AbstractContextManager[None]:
        from hyper_parallel.platform.torch import simulated

        return simulated.Listening(self, listener)

    def init_parameters(self, module: Any, stage_index: int) -> None:
        """Gives data to parameters (and buffers) that were created without, each as one device would have drawn it.

        Those built under ``init_on_device`` get exactly their numbers, in whatever part of the model ``module`` is. The
        global generator then stands where one device's would, if nobody has drawn since; else it is left alone.
        Beside what is kept, no more than one whole parameter is held at a time. For others the module convention
        holds: ``reset_parameters()`` after the children's, on whole parameters of one module at a time, drawn from the
        global generator on stage 0, and on stage n from a generator of its own, seeded with
        ``torch.initial_seed() + n``. Distributed parameters are cut from what is drawn; nothing is communicated.
        """
        if not isinstance(module, nn.Module):
            raise coded(
                ValueError,
                "HP131",
                f"init_parameters: expected a torch.nn.Module, got {module!r}",
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
        if _here.tape is not None:
            raise coded(
                RuntimeError,
                "HP131",
                "init_parameters: call it after the init_on_device context, not inside it",
            )
        _fill(module, self.device(), stage_index)
        _tapes[:] = [tape for tape in _tapes if tape.is_needed()]


# --- the context


class _Target:
    def __init__(self, device: torch.device, include_buffers: bool) -> None:
        self.device = device
        self.include_buffers = include_buffers
        self.placed = WeakTensorKeyDictionary()  # a tied tensor moves once

    def on_parameter(self, _module: nn.Module, _name: str, tensor: Any) -> Any:
        # Hooks are global to the process: this one serves its own thread, while it is the innermost context there.
        return (
            self._place(tensor) if _here.targets and _here.targets[-1] is self else None
        )

    def on_buffer(self, module: nn.Module, name: str, tensor: Any) -> Any:
        return self.on_parameter(module, name, tensor) if self.include_buffers else None

    def _place(self, tensor: Any) -> Any:
        if (
            tensor is None
            or tensor.device == self.device
            or nn.parameter.is_lazy(tensor)
            or hasattr(tensor, "to_local")
        ):
            return None
        if tensor not in self.placed:
            with _paused():
                tape = _here.tape if self.device.type == "meta" else None
                data = (
                    tensor.detach().to(self.device)
                    if tape is None
                    else tape.meta_twin(tensor)
                )
                self.placed[tensor] = _like(tensor, data)
        return self.placed[tensor]


class _Here(threading.local):
    def __init__(self) -> None:
        self.targets: list[_Target] = []
        self.tape: Tape | None = None
        self.paused = False


_here = _Here()
_tapes: list[Tape] = []  # those that some living tensor on meta may still need


@contextmanager
def _paused() -> Iterator[None]:
    was, _here.paused = _here.paused, True
    try:
        yield
    finally:
        _here.paused = was


@contextmanager
def _placing(target: _Target) -> Iterator[None]:
    with ExitStack() as stack:
        if (
            target.device.type == "meta" and _here.tape is None
        ):  # a context inside another one writes on the same tape
            stack.enter_context(_taping())
        for register, hook in (
            (
                nn_module.register_module_parameter_registration_hook,
                target.on_parameter,
            ),
            (nn_module.register_module_buffer_registration_hook, target.on_buffer),
        ):
            stack.callback(register(hook).remove)
        _here.targets.append(target)
        stack.callback(_here.targets.remove, target)
        yield


@contextmanager
def _taping() -> Iterator[None]:
    from hyper_parallel.platform.torch.tape import Tape

    tape = _here.tape = Tape()
    try:
        with _Operators(), _Functions():
            yield
        _tapes[:] = [*(other for other in _tapes if other.is_needed()), tape]
    finally:
        _here.tape = None
        tape.close()


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if (
            _here.paused
            or _here.tape is None
            or not isinstance(func, torch._ops.OpOverload)
        ):
            return func(*args, **(kwargs or {}))
        return _here.tape.run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Catches what is no operator: ``p.data = x``, values read by Python, and functions of nn.init that skip meta."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        tape = _here.tape
        if tape is not None and not _here.paused:
            if func == _SET_DATA and args[0].is_meta and not args[1].is_meta:
                with _paused():
                    args = (args[0], tape.meta_twin(args[1]))
            elif (
                func == _GET_IS_META
                and (call := _initialiser(sys._getframe(1))) is not None
            ):
                with _paused():
                    tape.call(*call)
                return True
            elif func in _READERS:
                tape.refuse_reading(func, args[0])
        return func(*args, **(kwargs or {}))


def _initialiser(frame: Any) -> tuple[Any, dict[str, Any]] | None:
    """The function of nn.init that this frame runs, and its arguments; None if it runs another one.

    Some of them (trunc_normal_, orthogonal_, ...) return at once if the tensor is on meta. Since trunc_normal_ draws
    until all numbers fit, only the call can be taped, not its operators. They begin by asking ``tensor.is_meta``.
    """
    code: Any = frame.f_code
    func = vars(nn.init).get(code.co_name)
    is_theirs = (
        getattr(func, "__code__", None) is code
    )  # and not a function of the user's that has the same name
    if not is_theirs:
        return None
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return func, {name: frame.f_locals[name] for name in names}


# --- modules


class _Slot:
    """A place in a module that holds a parameter or a buffer without data."""

    def __init__(
        self, owner: nn.Module, path: str, name: str, tensor: torch.Tensor
    ) -> None:
        self.owner = owner
        self.path = path
        self.name = name
        self.tensor = tensor

    def put(self, tensor: torch.Tensor) -> None:
        setattr(
            self.owner, self.name, tensor
        )  # not into the dict: recurrent layers keep a second list


def _meta_slots(module: nn.Module) -> list[_Slot]:
    return [
        _Slot(owner, f"{path}.{name}" if path else name, name, tensor)
        for path, owner in module.named_modules()
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items())
        if tensor is not None
        and _local(tensor).is_meta
        and not nn.parameter.is_lazy(tensor)
    ]


def _local(tensor: Any) -> torch.Tensor:
    return tensor._local if isinstance(tensor, DTensorBase) else tensor


def _like(tensor: Any, data: torch.Tensor) -> Any:
    """``data`` as what ``tensor`` is: the same class, layout, attributes and requires_grad."""
    if not isinstance(tensor, DTensorBase):
        new = torch.Tensor._make_subclass(type(tensor), data, tensor.requires_grad)
        new.__dict__.update(tensor.__dict__)
        return new
    twin: Any = type(tensor)(data, tensor._layout, tensor.shape).requires_grad_(
        tensor.requires_grad
    )
    own = {*vars(twin), "_routes", "_origin", "_last_gradient"}
    twin.__dict__.update(
        {name: value for name, value in vars(tensor).items() if name not in own}
    )
    return twin


def _fill(module: nn.Module, device: torch.device, stage_index: int) -> None:
    slots = _meta_slots(module)
    homes = {id(slot.tensor): _find_tape(_local(slot.tensor)) for slot in slots}
    untaped = [slot for slot in slots if homes[id(slot.tensor)] is None]
    _check_convention(untaped)
    for tape in {tape for tape in homes.values() if tape is not None}:
        _draw(tape, [slot for slot in slots if homes[id(slot.tensor)] is tape], device)
    _reset(module, untaped, device, stage_index)


def _find_tape(tensor: torch.Tensor) -> Tape | None:
    return next((tape for tape in reversed(_tapes) if tape.knows(tensor)), None)


def deferred_copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy of a tensor on meta that will get its numbers; None if no tape knows the tensor."""
    tape = (
        _find_tape(tensor) if _here.tape is None else None
    )  # one that is running sees copies by itself
    if tape is None:
        return None
    return tape.run(
        torch.ops.aten.clone.default,
        (tensor.detach(),),
        {"memory_format": torch.contiguous_format},
    )


def _draw(tape: Tape, slots: Sequence[_Slot], device: torch.device) -> None:
    """Plays the tape and puts the results in their places; what was one tensor, or shared memory, does so again."""
    from hyper_parallel.platform.torch.tape import as_bytes

    by_storage: dict[int, dict[int, list[_Slot]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for slot in slots:
        by_storage[tape.ref(_local(slot.tensor)).storage][id(slot.tensor)].append(slot)

    def receive(places: dict[int, list[_Slot]], storage: torch.UntypedStorage) -> None:
        whole = (
            as_bytes(storage).to(device).untyped_storage()
            if len(places) > 1
            else storage
        )
        for tied in places.values():
            ref = tape.ref(_local(tied[0].tensor))
            data = ref.on(whole)
            if len(places) == 1 and (
                device.type != "cpu" or data.nbytes < storage.nbytes()
            ):
                data = data.to(
                    device, copy=True
                )  # a shard must not hold on to the whole
            new = _like(tied[0].tensor, data)
            for slot in tied:
                slot.put(new)

    tape.play(
        {
            number: [functools.partial(receive, places)]
            for number, places in by_storage.items()
        }
    )


def _resetter(owner: nn.Module) -> Callable[[], None] | None:
    return getattr(owner, "reset_parameters", None) or getattr(
        owner, "_reset_parameters", None
    )


def _check_convention(slots: Sequence[_Slot]) -> None:
    if lost := [s.path for s in slots if _resetter(s.owner) is None]:
        raise coded(
            ValueError,
            "HP131",
            f"init_parameters: nobody knows how to initialise {', '.join(lost)}: the modules have no data and no "
            "reset_parameters(). Build them under init_on_device(meta_device), or define reset_parameters().",
        )


def _reset(
    module: nn.Module, slots: Sequence[_Slot], device: torch.device, stage_index: int
) -> None:
    """The module convention: empty data, then reset_parameters(), children before parents."""
    owners = {slot.owner for slot in slots}
    made: dict[int, Any] = {}
    with _own_generator(device, stage_index), torch.no_grad():
        for owner in (
            owner for owner in _children_first(module, set()) if owner in owners
        ):
            _reset_owner(owner, made, device)


def _reset_owner(owner: nn.Module, made: dict[int, Any], device: torch.device) -> None:
    """Initialises what has no data and is not ``made``, as tied parameters may be; all else keeps its numbers."""
    every = (*owner._parameters.items(), *owner._buffers.items())
    held: dict[str, Any] = {
        name: t for name, t in every if t is not None and not nn.parameter.is_lazy(t)
    }
    # Whole parameters stand in for distributed ones: what is drawn must not depend on the mesh.
    whole = {
        id(t): _empty(t, device) for t in held.values() if isinstance(t, DTensorBase)
    }
    kept = _fill_in(held, whole, made, device)
    for name, tensor in held.items():
        setattr(owner, name, whole.get(id(tensor), made.get(id(tensor), tensor)))
    reset = _resetter(owner)
    assert reset is not None  # checked before anything was begun
    reset()
    for name, tensor in held.items():
        if id(tensor) in whole:
            _take_shard(owner, name, tensor, made)
    for tensor, value in kept:
        tensor.copy_(value)


def _fill_in(
    held: dict[str, Any],
    whole: dict[int, Any],
    made: dict[int, Any],
    device: torch.device,
) -> list[tuple[Any, Any]]:
    """Gives memory to plain tensors without data; returns the others, each with a copy of its numbers."""
    new = {
        id(t): _empty(t, device)
        for t in held.values()
        if t.is_meta and id(t) not in {*whole, *made}
    }
    known = [made.get(id(t), t) for t in held.values() if id(t) not in {*whole, *new}]
    made |= new
    return [(tensor, tensor.clone()) for tensor in known]


def _take_shard(owner: nn.Module, name: str, tensor: Any, made: dict[int, Any]) -> None:
    """Puts the distributed parameter back, with its shard of the whole one if it has no data."""
    if _local(tensor).is_meta and id(tensor) not in made:
        shard = tensor.layout.part_of(getattr(owner, name).detach())
        own = shard.clone(memory_format=torch.contiguous_format)
        made[id(tensor)] = _like(tensor, own)
    setattr(owner, name, made.get(id(tensor), tensor))


def _empty(tensor: Any, device: torch.device) -> Any:
    """The whole tensor with memory, not yet set."""
    if not isinstance(tensor, DTensorBase):
        return _like(tensor, torch.empty_like(tensor, device=device).detach())
    data = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return (
        nn.Parameter(data, tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else data
    )


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    if module not in seen:
        seen.add(module)
        for child in module.children():
            yield from _children_first(child, seen)
        yield module


@contextmanager
def _own_generator(device: torch.device, stage_index: int) -> Iterator[None]:
    """Untested on hardware: the generator of an accelerator."""
    if stage_index == 0:
        yield
        return
    generators = [torch.default_generator]
    if device.type != "cpu":
        generators.append(
            torch.get_device_module(device.type).default_generators[device.index or 0]
        )
    states = [generator.get_state() for generator in generators]
    seed = (torch.initial_seed() + stage_index) % 2**63
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
