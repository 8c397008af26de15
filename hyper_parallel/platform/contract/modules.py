# SPDX-License-Identifier: Apache-2.0
"""Modules, their parameters and hooks, and the optimizers that update them.

Example::

    for name, parameter in platform.parameters_dict(module).items(): ...
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    from hyper_parallel.platform.platform import Platform


class Projection(NamedTuple):
    """The meaning of a weight's dims: ``out`` is the dim of the outputs, ``into`` the dim of the inputs.

    ``kind`` is "linear", "embedding" or "convolution"; ``features`` is the dim of the activations that it projects.
    """

    kind: str
    out: int
    into: int
    features: int


class Modules(ABC):
    """Modules, parameters and optimizers; ``cell`` is MindSpore's word for a module."""

    Parameter: type[Any]
    Module: type[Any]
    PipelineStageBase: type[Any]

    @abstractmethod
    def get_cells_and_names(self, cell: Any) -> Iterable[tuple[str, Any]]:
        """Returns every submodule with its dotted name, starting with the module itself as ""."""

    @abstractmethod
    def get_cell_construct(self, cell: Any) -> Callable[..., Any]:
        """Returns the module's own computation without hooks: forward or construct."""

    @abstractmethod
    def own_modules(self, module: Any) -> list[tuple[str, Any]]:
        """Returns the submodules of the module itself, without theirs; a shared one under each of its names."""

    @abstractmethod
    def replace_submodule(self, parent: Any, name: str, module: Any) -> None:
        """Puts a module in the place of the submodule that ``parent`` itself has under this name."""

    @abstractmethod
    def is_module_list(self, module: Any) -> bool:
        """Returns whether the module is a list of modules that its owner runs: ModuleList or CellList."""

    @abstractmethod
    def parameters_dict(self, cell: Any) -> dict[str, Any]:
        """Returns every parameter by its dotted name."""

    @abstractmethod
    def search_parameter_by_name(
        self, cell: Any, param_name: str
    ) -> tuple[Any, str, Any] | None:
        """Returns (owner, name in owner, parameter) for a dotted name, or None; ignores a leading "self."."""

    @abstractmethod
    def update_parameter_by_name(
        self, cell: Any, result: tuple[Any, str, Any], new_param: Any
    ) -> None:
        """Replaces the parameter that ``search_parameter_by_name`` returned with ``new_param``."""

    @abstractmethod
    def own_tensors(self, module: Any) -> list[tuple[str, Any]]:
        """Returns the parameters and buffers of the module itself, without those of its submodules."""

    @abstractmethod
    def set_own_tensor(self, module: Any, name: str, tensor: Any) -> None:
        """Replaces a tensor of the module itself; a parameter stays a parameter."""

    @abstractmethod
    def remove_own_tensor(self, module: Any, name: str) -> None:
        """Takes a parameter or buffer away from the module itself; the module reads None in its place."""

    @abstractmethod
    def with_tensors(self, module: Any, kind: Any, tensors: Mapping[str, Any]) -> Any:
        """Returns a module of a class that shares all with another one but its own tensors of these names.

        The tensors may be of any type; the other module does not change.
        """

    @abstractmethod
    def new_linear(self, inputs: int, outputs: int, bias: bool) -> Any:
        """Creates the framework's linear layer, with ``weight`` (outputs, inputs) and perhaps ``bias``."""

    @abstractmethod
    def put_tensor(self, module: Any, name: str, tensor: Any) -> None:
        """Makes a tensor, whatever its type, what the module reads as its parameter of that name, without a check."""

    @abstractmethod
    def get_param_local_data(self, param: Any) -> Any:
        """Returns the data on this rank as a plain tensor that shares its memory."""

    @abstractmethod
    def update_param_data(self, param: Any, data: Any) -> None:
        """Makes ``data``, of any shape, the parameter's data; the parameter stays the same object."""

    def load_into_param(self, param: Any, data: Any) -> None:
        """Copies full, local or distributed data into the parameter in place; raises if the shape fits none."""
        from hyper_parallel.platform.parameters import load_into

        load_into(cast("Platform", self), param, data)

    @abstractmethod
    def init_parameters(self, module: Any, stage_index: int) -> None:
        """Materializes parameters created without data, with the values that one device would have drawn."""

    @abstractmethod
    def is_embedding_module(self, module: Any) -> bool:
        """Returns whether the module is an embedding."""

    @abstractmethod
    def is_compiled_module(self, module: Any) -> bool:
        """Returns whether the module is compiled by torch.compile(module) or module.compile()."""

    @abstractmethod
    def projection(self, module: Any) -> Projection | None:
        """Returns the meaning of the weight's dims of a linear layer, embedding or convolution; None for others."""

    @abstractmethod
    def register_forward_pre_hook(
        self,
        module: Any,
        hook: Callable[..., Any],
        prepend: bool = False,
        with_kwargs: bool = False,
    ) -> Any:
        """Registers a hook that runs before the module's forward; returns a handle with remove()."""

    @abstractmethod
    def register_forward_hook(
        self,
        module: Any,
        hook: Callable[..., Any],
        with_kwargs: bool = False,
        always_call: bool = False,
    ) -> Any:
        """Registers ``hook(module, args[, kwargs], output)`` to run after forward; its result replaces the output.

        ``always_call``: also run it if forward raised.
        """

    @abstractmethod
    def register_full_backward_hook(
        self, module: Any, hook: Callable[..., Any], prepend: bool = False
    ) -> Any:
        """Registers ``hook(module, grad_input, grad_output)`` to run after backward; returns a handle."""

    @abstractmethod
    def register_full_backward_pre_hook(
        self, module: Any, hook: Callable[..., Any], prepend: bool = False
    ) -> Any:
        """Registers ``hook(module, grad_output)`` to run before the module's backward; returns a handle."""

    def get_model_state_dict(
        self, model: Any, *, options: Any = None
    ) -> dict[str, Any]:
        """Returns the model's state dict; options: full_state_dict, cpu_offload, ignore_frozen_params."""
        from hyper_parallel.platform.parameters import model_state_dict

        return model_state_dict(cast("Platform", self), model, options)

    @abstractmethod
    def _frozen_names(self, model: Any) -> set[str]:
        """Returns the names in the state dict of parameters that require no gradient."""

    @abstractmethod
    def _to_host(self, tensor: Any) -> Any:
        """Returns the tensor, distributed if it was, in host memory."""

    def clip_grad_norm_(
        self,
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        """Scales gradients down to ``max_norm`` in place and returns the total norm before scaling, a plain tensor.

        ``parameters``: a module, a tensor, or an iterable of tensors or of pairs (parameter, gradient). The norm is
        that of one device, computed in float32 or wider: sharded parameters count whole, on whatever meshes they are,
        and replicated or plain ones once. Every rank passes its parameters in the same order. What a rank does not
        hold it does not count: the stages of a pipeline get a norm each, unless their schedule clips them.
        """
        from hyper_parallel.platform.clipping import clip_grad_norm

        platform = cast("Platform", self)
        return clip_grad_norm(
            platform, parameters, max_norm, norm_type, error_if_nonfinite, foreach
        )

    @abstractmethod
    def _gradient_norm(
        self,
        gradients: Sequence[Any],
        parameters: Sequence[Any],
        norm_type: float,
        foreach: bool | None,
    ) -> Any:
        """Returns the norm of all elements, 0 without any; the parameters decide the dtype, so that ranks agree."""

    @abstractmethod
    def _norm_of_norms(self, norms: Sequence[Any], norm_type: float) -> Any:
        """Returns the norm of the elements of 1-dimensional tensors, 0 without any."""

    @abstractmethod
    def _scale_gradients(
        self,
        gradients: Sequence[Any],
        max_norm: float,
        total: Any,
        foreach: bool | None,
    ) -> None:
        """Scales gradients by max_norm / total in place if that is less than 1."""

    def _check_clippable(self, param: Any) -> None:  # noqa: B027 - a framework may have nothing to check
        """Raises if a tensor without a gradient cannot be meant as a parameter."""

    @abstractmethod
    def prepare_module(self, module: Any, dtype: str) -> Any:
        """Moves a module's tensors to this process's device and to the dtype of that name; returns the module.

        A module with parameters that have no data yet only gets the dtype.
        """

    @abstractmethod
    def optimizer_parts(
        self, optimizer: Any
    ) -> tuple[Sequence[dict[str, Any]], MutableMapping[Any, dict[str, Any]]]:
        """Returns (groups with "params" and options, state per parameter), as the optimizer itself stores them."""

    @abstractmethod
    def new_optimizer(
        self, kind: str, groups: Sequence[Mapping[str, Any]], **options: Any
    ) -> Any:
        """Creates an "adamw", "adam" or "sgd" optimizer for groups of parameters, with torch's option names."""

    @abstractmethod
    def set_learning_rate(self, optimizer: Any, rate: float) -> None:
        """Sets the learning rate of all groups of an optimizer."""

    @abstractmethod
    def compute_gradients(
        self, loss_of: Callable[[], Any], parameters: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        """The loss that ``loss_of()`` returns, and its gradients, as clip_grad_norm_ and apply_gradients take them."""

    @abstractmethod
    def apply_gradients(self, optimizer: Any, gradients: Sequence[Any]) -> None:
        """Has an optimizer update its parameters by the gradients that compute_gradients returned, and forgets them."""
