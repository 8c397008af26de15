# SPDX-License-Identifier: Apache-2.0
"""The tensor subclass that distributed tensors derive from: a local tensor, its layout and the global shape.

The framework's part of it is the shard: it shares memory and autograd state with the local tensor, so that gradients
flow without more ado. Operators arrive at ``__fallback__`` and go to ``dispatch`` of the class that derives from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mindspore import Tensor, ops

from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.mindspore import private, versions
from hyper_parallel.platform.mindspore.cpu.op_adapters import adapter_for
from hyper_parallel.platform.mindspore.operators import function, operation

_Base = private.base_tensor()
_OWN = ("_local", "_layout", "_whole", "_spec", "_routes", "_gathered_from")


class DTensorBase(Tensor):
    """A shard with the metadata of the whole: ``shape`` is global, ``local_shape`` is this rank's."""

    _local: Any
    _layout: Any
    _routes: Any = None  # the shard by other routes, as they are asked for
    _wraps_user_tensor = False  # the shard is a tensor of the user's, from which others may be made as well
    _gathered_from: Any = (
        None  # what it was gathered from, or of what gathered it is a view
    )
    _origin_versions: tuple[int | None, ...] = ()  # of the origin and of itself, then
    _lost_view_of: str | None = (
        None  # the view that it would be, had its base not been redistributed
    )
    _reduced: Any = None  # the same with its reduction taken, where a maximum, minimum or product is pending
    _parts: Any = (
        None  # what takes its gradient in parts, and the axes along which it does
    )
    _taken: Any = None  # from what, and how to take it again when that has changed
    _forms = 0  # shapes do not change in place
    _unrecorded = False
    _spec: Any = None  # stands for its layout, shape and dtype

    def __new__(
        cls,
        local: Any,
        layout: Any = None,
        shape: Sequence[int] | None = None,
        **_: Any,
    ) -> DTensorBase:
        if isinstance(
            local, DTensorBase
        ):  # Parameter(tensor) makes a class of both, and asks it for one of the same
            local, layout, shape = local._local, local._layout, local._whole
        assert layout is not None
        assert shape is not None
        return cls.wrapped(local, None, layout, tuple(shape), None)

    def __init__(self, *_: Any, **__: Any) -> None:
        """Nothing is left to do: the framework's own would copy."""

    @classmethod
    def wrapped(
        cls,
        local: Any,
        dtype: Any,  # noqa: ARG003
        layout: Any,
        size: tuple[int, ...],
        spec: Any,
    ) -> DTensorBase:
        """The distributed tensor of a shard, for those who know what stands for it."""
        wrapper = Tensor._make_subclass(cls, local)
        wrapper._local = local
        wrapper._layout = layout
        wrapper._whole = size
        wrapper._spec = spec
        return wrapper

    @classmethod
    def install_fast_dispatch(cls, make: Callable[..., Any]) -> None:
        """The compiled dispatch knows the other framework alone."""

    answers_for_plain = (
        True  # is asked for an operator even where a plain tensor is the first operand
    )

    # --- what the framework asks

    def __fallback__(
        self,
        func: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found, given, named = operation(func, args, kwargs)
        versions.note_operator(found)
        instead = adapter_for(found)
        if instead is not None:
            return instead(*given, **named)
        return type(self).dispatch(found, given, named)

    @property
    def param_info(self) -> Any:
        """What the framework knows about a parameter; the shard is the same leaf."""
        return _Base.param_info.__get__(self)

    @param_info.setter
    def param_info(self, value: Any) -> None:
        _Base.param_info.__set__(self, value)
        self._local.param_info = value

    @property
    def local_param_info(self) -> Any:
        """The same of the shard, which the framework sets when it makes a parameter."""
        return self._local.param_info

    @local_param_info.setter
    def local_param_info(self, value: Any) -> None:
        self._local.param_info = value

    def set_data(self, data: Any, slice_shape: bool = False) -> DTensorBase:  # noqa: ARG002 - the framework's
        """Other data for the shard, or for the whole, of which the shard is taken; both views of it get it."""
        data = data.init_data() if getattr(data, "has_init", False) else data
        local = data._local if isinstance(data, DTensorBase) else data
        if tuple(local.shape) != self.local_shape and tuple(local.shape) == self._whole:
            local = self._layout.part_of(local).copy()
        versions.note()
        self._local.data = local
        _Base.data.__set__(self, local)
        return self

    def assign_value(self, value: Any) -> DTensorBase:
        """The same, as ``load_state_dict`` of a Cell asks for it."""
        return self.set_data(value)

    def adopt_after_inplace(self, local: Any) -> None:
        """Other data for the shard, with what backward knows of it."""
        self._local = local
        self._routes = self._gathered_from = None
        _Base.data.__set__(self, local)

    def init_data(self, layout: Any = None, set_sliced: bool = False) -> DTensorBase:  # noqa: ARG002 - the framework's
        """The tensor itself: it has its data."""
        return self

    def __copy__(self) -> DTensorBase:
        twin = type(self).wrapped(
            self._local.copy(), None, self._layout, self._whole, self._spec
        )
        twin.__dict__.update(
            {key: value for key, value in vars(self).items() if key not in _OWN}
        )
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensorBase:
        if id(self) not in memo:
            memo[id(self)] = self.__copy__()
        return memo[id(self)]

    # --- what is asked about the whole

    @property
    def layout(self) -> Any:
        """How the whole tensor lies on the mesh."""
        return self._layout

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""
        return self._whole

    @property
    def _shape(self) -> tuple[int, ...]:
        return self._whole

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self._whole)

    def dim(self) -> int:
        """The number of dims."""
        return len(self._whole)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole."""
        return math.prod(self._whole) * int(self._local.itemsize)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the data on this rank."""
        return tuple(self._local.shape)

    @property
    def is_parameter(self) -> bool:
        """Whether a module has it as a parameter."""
        return self.param_info is not None

    @property
    def lost_its_graph(self) -> bool:
        """Never: the shard is in the graph of whatever made it."""
        return False

    def keep_gradient_of(self, leaf: Any) -> None:
        """Nothing to do: MindSpore returns gradients, and tensors have none."""

    def _backward_root(self, gradient: Any) -> tuple[Any, Any]:
        """Where backward begins and with what: the gradient of a pending sum is the same for every part."""
        waits = any(op not in (None, "sum") for op in self._layout.partial)
        target = self.reduce_partial() if waits else self
        if gradient is None:
            return target._local, ops.ones_like(target._local)
        if isinstance(gradient, DTensorBase):
            return target._local, target.gradient_of_shard(gradient)
        if gradient.ndim:
            raise coded(
                TypeError,
                "HP227",
                f"backward: expected a gradient that lies as {self._layout}, got a plain tensor",
            )
        return target._local, gradient

    def current(self) -> DTensorBase:
        """The tensor itself: MindSpore counts no changes, so copies of others do not follow them."""
        return self

    def to_local(self) -> Any:
        """The data on this rank, as a plain tensor: that of a leaf and of what is not recorded shares its memory.

        That of a recorded result is a copy, in the graph: MindSpore would not tell us of changes.
        """
        return (
            self._local
            if versions.version_of(self._local) is None
            else self._local.copy()
        )

    def __len__(self) -> int:
        return self._whole[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self._whole}, local={self._local!r}, layout={self._layout!r})"

    __str__ = __repr__

    # --- operators that do not arrive at __fallback__

    def __getitem__(self, index: Any) -> Any:
        return type(self).dispatch(
            function("getitem"), (self, _as_numpy_reads(index)), {}
        )

    def __setitem__(self, index: Any, value: Any) -> Any:
        type(self).dispatch(
            function("setitem"), (self, _as_numpy_reads(index), value), {}
        )
        return self

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        return bool(self.redistribute()._local)

    def __float__(self) -> float:
        return float(self.redistribute()._local)

    def __int__(self) -> int:
        return int(self.redistribute()._local)

    def asnumpy(self) -> Any:
        """The whole as an array."""
        return self.full_tensor().asnumpy()

    def item(self) -> Any:
        """The one element of the whole."""
        return self.redistribute()._local.item()

    def tolist(self) -> Any:
        """The whole as nested lists."""
        return self.redistribute()._local.tolist()

    # --- what a deriving class says

    @staticmethod
    def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operator on distributed tensors; a deriving class says how."""
        raise NotImplementedError

    def redistribute(
        self, device_mesh: Any = None, placements: Any = None
    ) -> DTensorBase:
        """The same tensor in another layout; a deriving class says how."""
        raise NotImplementedError

    def reduce_partial(self) -> DTensorBase:
        """The same tensor without pending reductions; a deriving class says how."""
        raise NotImplementedError

    def full_tensor(self) -> Any:
        """The whole as a plain tensor; a deriving class says how."""
        raise NotImplementedError


def _as_numpy_reads(index: Any) -> Any:
    """The index with numbers as lists where that matters: apart from a tensor, a number counts as one here."""
    if not isinstance(index, tuple):
        return index
    numbers = [
        i
        for i, item in enumerate(index)
        if isinstance(item, int) and not isinstance(item, bool)
    ]
    tensors = [
        i
        for i, item in enumerate(index)
        if isinstance(item, list) or (isinstance(item, Tensor) and item.ndim)
    ]
    found = sorted(numbers + tensors)
    if not numbers or not tensors or found[-1] - found[0] == len(found) - 1:
        return index
    return tuple([item] if i in numbers else item for i, item in enumerate(index))


def _by_rule(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return type(self).dispatch(function(name), (self, *args), kwargs)

    method.__name__ = name
    return method


# Methods that are made of several operators, not all of which say what they do.
for _name in ("cov", "diagonal_scatter", "hsplit", "logit", "select_scatter", "vsplit"):
    setattr(DTensorBase, _name, _by_rule(_name))


def plain_fallback(
    self: Any,  # noqa: ARG001
    func: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """An operator that a plain tensor was asked for, because one that answers for it is among its arguments."""
    found = next(
        (
            one
            for one in _tensors((args, kwargs or {}))
            if getattr(one, "answers_for_plain", False)
        ),
        None,
    )
    if found is not None:
        return found.__fallback__(func, args, kwargs)
    with private.no_fallback()():
        return func(*args, **(kwargs or {}))


def _tensors(tree: Any) -> Iterator[Any]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))
