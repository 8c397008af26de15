# SPDX-License-Identifier: Apache-2.0
"""Runs units: gathers before forward and backward, frees after them, and reduces gradients while backward goes on.

A forward call of the outermost unit, the root, begins a pass. Within a pass a unit is differentiated through one
autograd function, from its shards to its whole tensors: its backward runs when the gradients of all of them are
complete, however often and in whatever order they were used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.fully_shard.root import ACTIVE, Root
from hyper_parallel.core.fully_shard.unit import Managed, Unit, wrap_whole
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()
_RUNNER = "_hyper_parallel_unit"


def runner_of(module: Any) -> Runner | None:
    """What runs the unit that this module is, or is a part of; None if it is none."""
    runner: Runner | None = vars(module).get(_RUNNER)
    return runner


def runners_below(module: Any) -> list[Runner]:
    """The runners of the module and of all modules below it, each once, from the outside in."""
    runners = [runner_of(inner) for _, inner in platform.get_cells_and_names(module)]
    return list(dict.fromkeys(one for one in runners if one is not None))


class Use:
    """The use of a unit in one pass: what of its backward is still to come."""

    def __init__(
        self, number: int, versions: Any, factor: float, is_whole_batch: bool
    ) -> None:
        self.pass_number, self.versions, self.factor = number, versions, factor
        self.is_whole_batch = is_whole_batch
        self.backward: int | None = None  # the one that has entered it last
        self.inputs = 0  # whose gradients show that backward has left the unit
        self.inputs_left = 0
        self.has_unwatched_inputs = False
        self.is_reduced = False

    def enter_backward(self, number: int) -> bool:
        """Begins a backward; False if it has begun already."""
        if self.backward == number:
            return False
        self.backward, self.inputs_left, self.is_reduced = number, 0, False
        return True


class Runner:
    """Runs one unit at the boundaries of its modules."""

    def __init__(self, unit: Unit, modules: Sequence[Any]) -> None:
        self.unit, self.modules = unit, list(modules)
        self.root: Root | None = None
        self.forward_prefetch: list[Runner] | None = None
        self.backward_prefetch: list[Runner] | None = None
        self.frees_after_backward = True
        self.entered_in: int | None = None  # the last backward that has
        self._promised_in: int | None = None  # the last backward with a gradient to be
        self._use: Use | None = None
        self._waiting_factor: float | None = None  # of gradients that were taken last
        self._tensors: list[Any] | None = None  # of this use, in the graph
        self._is_recorded = False
        self._in_backward: set[Use] = set()
        self._depth = 0  # a unit's method may call its forward
        self._modules_run: set[int] = set()
        for module in modules:
            setattr(module, _RUNNER, self)

    def __deepcopy__(self, memo: Any) -> Runner:
        raise coded(
            RuntimeError,
            "HP423",
            f"fully_shard: {self.unit.name} cannot be copied, since its parameters are shared with what runs it; copy "
            "the model before fully_shard",
        )

    @property
    def is_root(self) -> bool:
        """Whether it is the outermost unit."""
        return self.root is not None and self.root.outermost is self

    @property
    def is_in_backward(self) -> bool:
        """Whether backward has entered the unit and not left it."""
        return bool(self._in_backward)

    @property
    def reshards_after_forward(self) -> bool:
        """Whether parameters are freed between forward and backward."""
        setting = self.unit.settings.reshard_after_forward
        return not self.is_root if setting is None else setting

    def show(self) -> None:
        """Gathers, and makes modules see whole tensors outside the graph."""
        self.unit.gather()
        if not self.unit.is_installed:
            pairs = zip(self.unit.managed, self.unit.whole_tensors(), strict=True)
            self.unit.install([wrap_whole(one, tensor) for one, tensor in pairs])

    # --- forward

    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before forward: gathers, and makes modules see whole tensors."""
        self._depth += 1
        if self._depth > 1:
            return None
        try:
            return self._enter(module, args, kwargs)
        except BaseException:
            self.undo(module)
            raise

    def _enter(self, module: Any, args: Any, kwargs: Any) -> Any:
        root = self._begin()
        self.unit.gather()
        args, kwargs = self._cast_inputs(args, kwargs)
        self._show_in_graph(root, _is_whole_batch(self.unit, (args, kwargs)))
        if root.is_in_backward:  # a recomputation
            return args, kwargs
        if ACTIVE.root is root:
            self._modules_run.add(id(module))
        root.order.enter(self)
        if ACTIVE.root is root:
            self._prefetch(self.forward_prefetch, root.order.after(self))
        return self._watch_inputs(args, kwargs)

    def _begin(self) -> Root:
        root, active = self.root, ACTIVE.root
        if root is not None and root.is_in_backward:
            return root  # a recomputation
        if active is not None and active.outermost is not self:
            active.claim(self)
            return active
        if root is None:
            root = Root(self)
        if root.outermost is not self:
            return root  # called by itself, outside the model's forward
        for runner in (self, *(one for m in self.modules for one in runners_below(m))):
            root.claim(runner)
        root.begin_pass()
        ACTIVE.root = root
        return root

    def _cast_inputs(self, args: Any, kwargs: Any) -> Any:
        policy = self.unit.policy
        if policy.param_dtype is None or not policy.cast_forward_inputs:
            return args, kwargs
        return _cast((args, kwargs), policy.param_dtype)

    def _show_in_graph(self, root: Root, is_whole_batch: bool) -> None:
        shards = [one._local for one in self.unit.sharded]
        is_recorded = any(platform.is_recorded(shard) for shard in shards)
        if not self._is_current(root, is_recorded):
            use = self._use
            if use is None or not root.is_in_backward:
                factor = self._factor(is_whole_batch)
                versions = self.unit.versions
                use = Use(root.pass_number, versions, factor, is_whole_batch)
            plain = _unshard().apply(self, use, *shards)
            self._use, self._is_recorded = use, is_recorded
            self._tensors = self._wrap(plain, is_whole_batch)
        assert self._tensors is not None
        self.unit.install(self._tensors)

    def _is_current(self, root: Root, is_recorded: bool) -> bool:
        """Whether the tensors of an earlier call can be used again."""
        use = self._use
        if use is None or not self._tensors or self._is_recorded != is_recorded:
            return False
        return root.is_in_backward or use.pass_number == root.pass_number

    def _factor(self, is_whole_batch: bool) -> float:
        factor = self.unit.settings.divide_factor
        if factor is not None:
            return factor
        return 1 if is_whole_batch else self.unit.mesh.size

    def _wrap(self, plain: Sequence[Any], is_whole_batch: bool) -> list[Any]:
        wrap = _replicated if is_whole_batch else wrap_whole
        pairs = zip(self.unit.managed, plain, strict=True)
        return [wrap(one, tensor) for one, tensor in pairs]

    def _watch_inputs(self, args: Any, kwargs: Any) -> Any:
        use = self._use
        assert use is not None

        def watch(tensor: Any) -> Any:
            if not platform.is_recorded(tensor):
                return tensor
            if isinstance(tensor, DTensor):
                use.has_unwatched_inputs = True
                return tensor
            use.inputs += 1
            return platform.after_backward_to(tensor, left)

        def left() -> None:
            use.inputs_left += 1
            self._leave_backward(use)

        return platform.apply_to_tensors(watch, (args, kwargs))

    def leave(self, _: Any, output: Any) -> Any:
        """After forward: makes modules see shards, and frees what is not needed before backward."""
        self._depth -= 1
        if self._depth:
            return None
        root = self.root
        assert root is not None
        if not root.is_in_backward:
            root.order.leave(self)
        if not self.is_in_backward:
            self.unit.uninstall()
            self._watch_outputs(output)
            if self.reshards_after_forward and self._has_run():
                self.unit.release_after_forward()
                if not platform.releases_saved_tensors:
                    self._tensors = None
        if self.is_root and not root.is_in_backward:
            ACTIVE.root = None
            root.end_forward()
        if self.unit.policy.output_dtype is not None:
            output = _cast(output, self.unit.policy.output_dtype)
        return output

    def _has_run(self) -> bool:
        """Whether forward has left all modules of the unit, or the one that was called by itself."""
        root = self.root
        assert root is not None
        is_alone = ACTIVE.root is not root and not root.is_in_backward
        if not is_alone and len(self._modules_run) < len(self.modules):
            return False
        self._modules_run = set()
        return True

    def begin_pass(self) -> None:
        """Forgets which modules have run in the last pass, perhaps not all."""
        self._modules_run = set()

    def undo(self, _: Any) -> None:
        """After an error in forward, or a recomputation that ended early."""
        self._depth = 0
        root = self.root
        if root is not None and root.is_in_backward:
            return
        self.reset()
        if self.is_root and root is not None:
            ACTIVE.root = None
            root.reset()

    def _watch_outputs(self, output: Any) -> None:
        recorded: list[Any] = []

        def note(tensor: Any) -> Any:
            plain = tensor._local if isinstance(tensor, DTensor) else tensor
            if platform.is_recorded(plain):
                recorded.append(plain)
            return tensor

        platform.apply_to_tensors(note, output)
        if recorded:
            assert self._use is not None
            call = functools.partial(self._enter_backward, self._use)
            platform.before_backward_of(recorded, call)

    # --- backward

    def _enter_backward(self, use: Use) -> None:
        root = self.root
        assert root is not None
        number = root.enter_backward()
        if not use.enter_backward(number):
            return
        root.pass_over_skipped_before(self)
        self.entered_in = number
        self.unit.check_unchanged(use.versions)
        if self._use is not use:
            self._use, self._tensors = use, None
        self._in_backward.add(use)
        self.unit.gather()
        if self._tensors is None:
            self._tensors = self._new_leaves(use.is_whole_batch)
        self.unit.install(self._tensors)  # for recomputations within
        self._prefetch(self.backward_prefetch, root.order.before(self))

    def _new_leaves(self, is_whole_batch: bool) -> list[Any]:
        """Whole tensors for recomputations, which are recorded as in forward, and through which no gradient flows."""
        tensors = self.unit.whole_tensors()
        for tensor, is_trained in zip(tensors, self.unit.is_trained, strict=True):
            platform.set_requires_grad(tensor, is_trained)
        return self._wrap(tensors, is_whole_batch)

    def _prefetch(self, given: list[Runner] | None, following: Any) -> None:
        if given is None:
            given = [] if following is None else [following]
        for runner in given:
            runner.unit.start_gather()

    def reduce(self, context: Any, gradients: Sequence[Any]) -> Sequence[Any]:
        """Takes the gradients of the whole tensors; returns what backward returns for the shards.

        ``context``: of the autograd function from the shards to the whole tensors.
        """
        root, unit, use = self.root, self.unit, context.use
        assert root is not None
        self._check_first_order(gradients)
        root.enter_backward()
        nothing = [None] * len(unit.managed)
        unit.take_gradients(gradients)
        self._waiting_factor = use.factor
        use.is_reduced = True
        self._leave_backward(use)
        if not unit.settings.syncs_gradients:
            return nothing
        root.pass_over_skipped_within(self)
        root.advance_reductions()
        leaves = [one._local for one in unit.sharded]
        with platform.no_grad():
            reductions = unit.start_reduction(use.factor)
        if self._promised_in != platform.backward_number():
            reduced = [leaves[number] for one in reductions for number in one.numbers]
            if platform.can_defer_gradients(reduced, context):
                return self._defer(root, reductions, leaves)
        root.finish_reductions()  # what was promised is complete before it is added to
        results: list[Any] = list(nothing)
        with platform.no_grad():
            for reduction in reductions:
                for number, gradient in reduction.finish().items():
                    results[number] = fit_gradient(gradient, leaves[number])
        return results

    def _check_first_order(self, gradients: Sequence[Any]) -> None:
        given = [gradient for gradient in gradients if gradient is not None]
        if any(platform.is_recorded(gradient) for gradient in given):
            raise coded(
                RuntimeError,
                "HP432",
                f"fully_shard: gradients of gradients through {self.unit.name} are not supported; leave create_graph "
                "out, or use replicate, with which they are exact",
            )

    def _defer(
        self, root: Root, reductions: Sequence[Any], leaves: Sequence[Any]
    ) -> Sequence[Any]:
        returned: list[Any] = [None] * len(leaves)
        complete: dict[int, Callable[[Any], None]] = {}
        for reduction in reductions:
            for number in reduction.numbers:
                leaf = leaves[number]
                sum_now = functools.partial(_finish, root, returned, number)
                returned[number], deliver = platform.defer_gradient(leaf, None, sum_now)
                complete[number] = functools.partial(_deliver, deliver, leaf)
        if any(promised is not None for promised in returned):
            self._promised_in = platform.backward_number()
        root.add_reductions(reductions, complete)
        return returned

    def pass_over(self) -> None:
        """Takes part in what other ranks do in backward through this unit: gathers, and adds zeros to gradients."""
        root = self.root
        assert root is not None
        self.unit.gather()
        self._prefetch(self.backward_prefetch, root.order.before(self))
        self.reduce_waiting(root)
        self._end_use()

    def reduce_waiting(self, root: Root) -> None:
        """Reduces what waits, outside the graph; parameters without a gradient add zeros."""
        unit = self.unit
        root.advance_reductions()
        leaves = [one._local for one in unit.sharded]
        factor = self._waiting_factor
        if self._use is not None:
            factor = self._use.factor
        elif factor is None:
            factor = self._factor(is_whole_batch=False)
        with platform.no_grad():
            reductions = unit.start_reduction(factor)
        complete: dict[int, Callable[[Any], None]] = {
            number: functools.partial(
                _deliver,
                functools.partial(platform.accumulate_gradient, leaves[number]),
                leaves[number],
            )
            for reduction in reductions
            for number in reduction.numbers
        }
        root.add_reductions(reductions, complete)

    def _leave_backward(self, use: Use) -> None:
        if use not in self._in_backward:
            return
        is_trained = self.unit.is_trained
        if any(is_trained) and not use.is_reduced:
            return
        # The gradient of an input may still need a frozen parameter.
        is_unknown = use.has_unwatched_inputs and not all(is_trained)
        if use.inputs_left < use.inputs or is_unknown:
            return
        self._in_backward.discard(use)
        if not self._in_backward:
            self._end_use()

    def _end_use(self) -> None:
        self._tensors = None
        if self.unit.settings.reshard_after_backward:
            self.unit.release()
        else:
            self.unit.uninstall()

    def end_backward(self) -> None:
        """When backward has ended: frees what backward was not seen to leave."""
        self._in_backward.clear()
        self._use = self._tensors = None
        self.unit.uninstall()
        if self.unit.settings.reshard_after_backward and self.frees_after_backward:
            self.unit.release()

    def reset(self) -> None:
        """Back to ``sharded`` from every state."""
        self._depth = 0
        self._in_backward.clear()
        self._use = self._tensors = None
        self._modules_run = set()
        self.unit.release()


def fit_gradient(gradient: Any, leaf: Any) -> Any:
    """A reduced gradient in the dtype and on the device of its shard."""
    is_fit = gradient.dtype is leaf.dtype and gradient.device == leaf.device
    # MindSpore writes into the memory of a gradient, which is one for a whole unit, where it adds another.
    if is_fit and platform.counts_changes:
        return gradient
    return (
        platform.clone(gradient) if is_fit else gradient.to(leaf.device).to(leaf.dtype)
    )


def _finish(root: Root, promised: Sequence[Any], number: int) -> Any:
    root.finish_reductions()
    return promised[number]


def _deliver(deliver: Callable[[Any], None], leaf: Any, gradient: Any) -> None:
    deliver(fit_gradient(gradient, leaf))


def _cast(tree: Any, dtype: Any) -> Any:
    def cast(tensor: Any) -> Any:
        return tensor.to(dtype) if platform.is_floating_point(tensor) else tensor

    return platform.apply_to_tensors(cast, tree)


def _is_whole_batch(unit: Unit, inputs: Any) -> bool:
    """Whether the inputs are distributed along the data axes."""
    ranks = set(unit.mesh.ranks)
    is_distributed = False

    def look(tensor: Any) -> Any:
        nonlocal is_distributed
        if isinstance(tensor, DTensor) and ranks <= set(tensor.device_mesh.rank_list):
            is_distributed = True
        return tensor

    platform.apply_to_tensors(look, inputs)
    return is_distributed


def _replicated(one: Managed, tensor: Any) -> Any:
    """The whole tensor, the same on the data axes; each rank gives it a part of its gradient."""
    return DTensor.from_local(
        tensor,
        None,
        one.joint_layout,
        shape=one.global_shape,
        grad_placements=one.joint_gradient,
    )


@functools.cache
def _unshard() -> Any:
    class Unshard(platform.Function):  # type: ignore[name-defined, misc]
        @staticmethod
        def forward(ctx: Any, runner: Runner, use: Use, *_: Any) -> Any:
            ctx.runner, ctx.use = runner, use
            ctx.set_materialize_grads(False)
            tensors = runner.unit.whole_tensors()
            pairs = zip(tensors, runner.unit.is_trained, strict=True)
            frozen = [tensor for tensor, is_trained in pairs if not is_trained]
            ctx.mark_non_differentiable(*frozen)
            return tuple(tensors)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return (None, None, *ctx.runner.reduce(ctx, gradients))

    return Unshard
