# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing as users call it: the same numbers as without it, options, groups, shared modules.

test_recompute and its neighbours have what the platform does: selective policies, wrappers, copies.
"""

import dataclasses
import functools
import gc
import warnings
import weakref

import frame
import numpy as np
import pytest

from hyper_parallel import CheckpointPolicy, checkpoint_wrapper, swap_wrapper
from hyper_parallel.core.activation_checkpoint import (
    SwapManager,
    apply_activation_checkpointing,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    groups,
    is_recomputing,
    swap,
)
from hyper_parallel.platform import get_platform

platform = get_platform()
X = (frame.draw(6, 64) / 4).astype(np.float32)
MUST_SWAP, MUST_SAVE = CheckpointPolicy.MUST_SWAP, CheckpointPolicy.MUST_SAVE


@pytest.fixture(autouse=True)
def _one_warning():
    """The warning about a CPU has a test of its own; it comes once in a process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        groups._warn_on_cpu()
    yield
    SwapManager().set_current_group_name("")


class Block(platform.Module):
    """A layer with dropout, whose activations are larger than the smallest that are swapped."""

    def __init__(self):
        super().__init__()
        self.up, self.down = frame.linear(64, 128), frame.linear(128, 64)
        self.runs, self.first_runs = 0, 0

    def forward(self, x, scale=None):
        self.runs += 1
        self.first_runs += not is_recomputing()
        hidden = frame.dropout(self.up(x).sin(), 0.3)
        x = x + self.down(hidden * platform.rand(tuple(hidden.shape)))
        return x.sin() if scale is None else (x * scale).sin()

    construct = forward


class Layers(platform.Module):
    """Blocks in a list."""

    def __init__(self, count=4, wrap=lambda module: module):
        super().__init__()
        platform.manual_seed(1)
        self.layers = frame.module_list([wrap(Block()) for _ in range(count)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    construct = forward


def run(function, x=X, seed=3, module=None, **kwargs):
    """(output, gradients of x and of the parameters, what is drawn afterwards), the same draws each time."""
    leaf = frame.leaf(x, "float32")
    module = function if module is None else module
    parameters = platform.parameters_dict(module)
    for parameter in parameters.values():
        frame.set_grad(parameter, None)
    platform.manual_seed(seed)
    out = function(leaf, **kwargs)
    frame.backward([out], [np.ones(out.shape)])
    gradients = [frame.array(frame.grad(t)) for t in (leaf, *parameters.values())]
    after = frame.array(platform.rand((2,)))
    return [frame.array(platform.detach(out)), *gradients, after]


def assert_same(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert np.array_equal(a, b)


PRODUCTS = {"addmm", "matmul", "MatMul", "mm", "linear", "sin"}


def swap_products(ctx, op, *args, **kwargs):
    is_meant = platform.get_op_name(op) in PRODUCTS
    return MUST_SWAP if is_meant else CheckpointPolicy.MUST_RECOMPUTE


def swap_all(ctx, op, *args, **kwargs):
    return MUST_SWAP


WAYS = {
    "recompute": checkpoint_wrapper,
    "recompute to the end": functools.partial(checkpoint_wrapper, early_stop=False),
    "inputs in host memory": functools.partial(checkpoint_wrapper, swap_inputs=True),
    "by operator": functools.partial(checkpoint_wrapper, policy_fn=swap_all),
    "by operator, inputs too": functools.partial(
        checkpoint_wrapper, policy_fn=swap_all, swap_inputs=True
    ),
    "swap": swap_wrapper,
    "recompute twice": lambda m: checkpoint_wrapper(checkpoint_wrapper(m)),
    "swap of recompute": lambda m: swap_wrapper(checkpoint_wrapper(m)),
    "recompute of swap": lambda m: checkpoint_wrapper(swap_wrapper(m)),
    "function": lambda m: functools.partial(checkpoint, m, use_reentrant=False),
    "swapped function": lambda m: functools.partial(swap, m),
}
each_way = pytest.mark.parametrize("wrap", WAYS.values(), ids=WAYS.keys())


@each_way
def test_values_gradients_and_draws_are_those_without(wrap):
    block = Block()
    plain = run(block)
    assert np.any(plain[1])
    assert_same(run(wrap(block), module=block), plain)


def test_the_function_runs_twice_and_once_without_gradients():
    block = Block()
    run(checkpoint_wrapper(block))
    assert (block.runs, block.first_runs) == (2, 1)
    with platform.no_grad():
        checkpoint_wrapper(block)(frame.tensor(X))
    assert (block.runs, block.first_runs) == (3, 2)
    assert not is_recomputing()


def test_is_recomputing_inside_a_checkpoint_inside_another():
    seen = []

    def inner(x):
        seen.append(is_recomputing())
        return x.exp().sin()

    x = frame.leaf(X)
    out = checkpoint(lambda x: checkpoint(inner, x).sin(), x)
    frame.backward([out], [np.ones(X.shape)])
    # The outer recompute runs the inner one for the first time again, whose own recompute may follow.
    assert seen[0] is False
    assert seen[1:]
    assert all(seen[1:])
    frame.equal(
        frame.grad(x), np.cos(np.sin(np.exp(X))) * np.cos(np.exp(X)) * np.exp(X), 1e-5
    )


# --- A3: where the recompute ends


def test_early_stop_can_be_turned_off():
    for early_stop, ends in ((True, 1), (False, 2)):
        seen = []

        def function(x, seen=seen):
            x = x.exp().sin()
            seen.append(1)
            return x + 1

        x = frame.leaf(X)
        out = checkpoint(function, x, early_stop=early_stop)
        frame.backward([out], [np.ones(X.shape)])
        assert len(seen) == ends


def test_an_exception_of_the_recompute_comes_out_and_leaves_nothing_behind():
    class BrokenError(Exception):
        pass

    alive = []

    def function(x, y):
        if is_recomputing():
            platform.rand((5,))
            raise BrokenError("the second time")
        alive.append(weakref.ref(y))
        return (x.exp() * y).sin() * platform.rand((6, 64))

    x = frame.leaf(X, "float32")
    out = checkpoint(function, x, frame.tensor(X), swap_inputs=True)
    before = frame.array(platform.get_rng_state())
    with pytest.raises(BrokenError, match="the second time"):
        frame.backward([out], [np.ones(X.shape)])
    assert not is_recomputing()
    assert np.array_equal(frame.array(platform.get_rng_state()), before)
    del out
    gc.collect()
    block = Block()
    assert_same(run(checkpoint_wrapper(block)), run(block))


# --- A4: what goes in and comes out


@dataclasses.dataclass
class Outputs:
    """What some models return."""

    main: object
    note: str


@pytest.mark.parametrize("swap_inputs", [False, True])
def test_nested_inputs_and_outputs_in_a_dataclass(swap_inputs):
    def function(pair, options, *, scale, index):
        left, right = pair["left"], pair["right"][0]
        main = (left * right).exp() * scale * options["factor"]
        return Outputs(
            main + index.astype(main.dtype)
            if hasattr(index, "astype")
            else main + index,
            "kept",
        ), left

    gradients = []
    for call in (
        function,
        functools.partial(checkpoint, function, swap_inputs=swap_inputs),
    ):
        leaves = [frame.leaf(X / 4 + n) for n in range(3)]
        pair = {"left": leaves[0], "right": [leaves[1], None]}
        index = frame.tensor(np.arange(64, dtype=np.int32))
        outputs, left = call(pair, {"factor": 2}, scale=leaves[2], index=index)
        assert outputs.note == "kept"
        frame.equal(left, leaves[0])
        frame.backward([outputs.main, left], [np.ones(X.shape)] * 2)
        gradients.append([frame.array(frame.grad(leaf)) for leaf in leaves])
    assert_same(*gradients)
    assert all(np.any(gradient) for gradient in gradients[0])


def test_inputs_without_grad_still_train():
    block = Block()
    results = []
    for call in (block, checkpoint_wrapper(block), swap_wrapper(block)):
        frame.recording()
        for parameter in platform.parameters_dict(block).values():
            frame.set_grad(parameter, None)
        platform.manual_seed(3)
        out = call(frame.tensor(X))
        frame.backward([out], [np.ones(out.shape)])
        results.append(
            [
                frame.array(frame.grad(p))
                for p in platform.parameters_dict(block).values()
            ]
        )
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


def test_keywords_of_the_module_do_not_clash_with_options():
    class Picky(platform.Module):
        def forward(self, x, debug, policy_fn):
            return (x * debug).sin() * policy_fn

        construct = forward

    x = frame.leaf(X)
    out = checkpoint_wrapper(Picky())(x, debug=2.0, policy_fn=3.0)
    frame.equal(out, np.sin(X * 2.0) * 3.0, 1e-6)


# --- A6 and A7


def test_error_messages_of_determinism_check():
    runs = []

    def other_shape(x):
        runs.append(1)
        return x.exp().sin() if len(runs) % 2 else x[1:].exp().sin()

    def fewer(x):
        runs.append(1)
        return x.exp().sin() if len(runs) % 2 else x.exp()

    x = frame.leaf(X)
    out = checkpoint(other_shape, x)
    with pytest.raises(RuntimeError, match=r"6, 64(.|\n)*5, 64"):
        frame.backward([out], [np.ones(X.shape)])
    runs.clear()
    out = checkpoint(fewer, x)
    with pytest.raises(RuntimeError, match=r"\b2\b(.|\n)*\b1\b"):
        frame.backward([out], [np.ones(X.shape)])


def test_the_policy_is_asked_once_so_that_it_cannot_change_its_mind():
    answers = []

    def policy(ctx, op, *args, **kwargs):
        assert not ctx.is_recompute
        answers.append(op)
        return MUST_SAVE if len(answers) % 2 else CheckpointPolicy.MUST_RECOMPUTE

    block = Block()
    plain = run(block)
    assert_same(run(checkpoint_wrapper(block, policy_fn=policy), module=block), plain)
    assert answers


def test_contexts_of_a_policy_are_a_context_fn():
    block = Block()
    make = functools.partial(create_selective_checkpoint_contexts, swap_all)
    assert_same(run(checkpoint_wrapper(block, context_fn=make)), run(block))


# --- options


def test_reentrance_is_refused_and_says_why():
    impl = type("Impl", (), {"name": "REENTRANT"})
    for call in (
        lambda: checkpoint(Block(), frame.tensor(X), use_reentrant=True),
        lambda: checkpoint_wrapper(Block(), use_reentrant=True),
        lambda: checkpoint_wrapper(Block(), impl),
        lambda: checkpoint_sequential(
            [Block()], 1, frame.tensor(X), use_reentrant=True
        ),
    ):
        with pytest.raises(ValueError, match="backward inside backward") as error:
            call()
        assert error.value.code == "HP440"
    impl.name = "NO_REENTRANT"
    assert_same(
        run(checkpoint_wrapper(block := Block(), impl, use_reentrant=False)), run(block)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"early": True}, "unknown options early"),
        ({"policy_fn": 3}, "policy_fn must be a function"),
        ({"policy_fn": swap_all, "context_fn": lambda: None}, "exclude each other"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message) as error:
        checkpoint_wrapper(Block(), **options)
    assert error.value.code == "HP441"


def test_a_function_of_ones_own_recomputes():
    calls = []

    def own(function, *args, extra):
        calls.append(extra)
        return checkpoint(function, *args)

    block = Block()
    plain = run(block)
    assert_same(run(checkpoint_wrapper(block, checkpoint_fn=own, extra=4)), plain)
    assert calls == [4]


# --- sequences


@pytest.mark.parametrize("segments", [1, 2, 3, 5])
def test_sequences_in_segments(segments):
    blocks = [Block() for _ in range(5)]
    whole = frame.sequential(*blocks)
    plain = run(whole)
    for block in blocks:
        block.runs = 0
    assert_same(
        run(lambda x: checkpoint_sequential(whole, segments, x), module=whole), plain
    )
    size = 5 // segments
    assert [block.runs for block in blocks] == [
        2 if number < size * (segments - 1) else 1 for number in range(5)
    ]


def test_sequences_with_too_many_segments():
    with pytest.raises(
        ValueError, match="between 1 and the number of functions, 2; got 3"
    ):
        checkpoint_sequential([Block(), Block()], 3, frame.tensor(X))


# --- models


def test_selected_submodules_are_wrapped_once_and_keep_their_names():
    plain, model = Layers(3), Layers(3)
    shared = model.layers[0]
    platform.replace_submodule(model.layers, "2", shared)
    platform.replace_submodule(plain.layers, "2", plain.layers[0])
    names = list(platform.parameters_dict(model))
    apply_activation_checkpointing(
        model, check_fn=lambda module: isinstance(module, Block)
    )
    assert list(platform.parameters_dict(model)) == names
    assert model.layers[2] is model.layers[0]
    assert model.layers[1] is not model.layers[0]
    assert_same(run(model), run(plain))
    assert model.layers[0].runs == 4  # used twice, run twice


def test_all_submodules_by_default_and_by_a_policy():
    plain, model = Layers(2), Layers(2)
    wrapped = []

    def wrap(module):
        wrapped.append(type(module))
        return checkpoint_wrapper(module)

    apply_activation_checkpointing(model, wrap)
    assert len(wrapped) == 6
    assert_same(run(model), run(plain))
    wrapped.clear()
    asked = []

    def policy(module, recurse, nonwrapped_numel):
        asked.append((recurse, nonwrapped_numel))
        return recurse or nonwrapped_numel == 64 * 128 + 128

    apply_activation_checkpointing(Layers(1), wrap, auto_wrap_policy=policy)
    assert len(wrapped) == 1
    # The block without what was wrapped inside it.
    assert (False, 128 * 64 + 64) in asked
    with pytest.raises(ValueError, match="exclude each other"):
        apply_activation_checkpointing(model, check_fn=bool, auto_wrap_policy=policy)


def test_submodules_can_be_listed_and_replaced():
    model = Layers(2)
    assert [name for name, _ in platform.own_modules(model)] == ["layers"]
    assert [name for name, _ in platform.own_modules(model.layers)] == ["0", "1"]
    assert platform.is_module_list(model.layers)
    assert not platform.is_module_list(model)
    whole = frame.sequential(Block(), Block())
    platform.replace_submodule(whole, "1", checkpoint_wrapper(whole[1]))
    run(whole)
    assert [block.runs for block in whole] == [1, 2]
    with pytest.raises(AttributeError, match="'9'"):
        platform.replace_submodule(model.layers, "9", Block())


# --- A9 to A12: swap


def saved_by(function, *args, **kwargs):
    """What the policy of a swap is asked about, by shape."""
    asked = []

    def policy(tensor):
        asked.append(tuple(tensor.shape))
        return True

    out = swap(function, *args, policy_fn=policy, **kwargs)
    frame.backward([out], [np.ones(out.shape)])
    return asked


def test_parameters_and_inputs_of_others_are_not_swapped():
    table = frame.tensor(frame.draw(3, 64).astype(np.float32))
    layer = frame.linear(64, 64)
    x = frame.leaf(frame.draw(3, 64), "float32")
    asked = saved_by(lambda x, table: (x * 2).exp() * table, x, table)
    assert len(asked) == 1  # exp's result, not the table
    assert len(saved_by(lambda x: (x * 2).exp() * table, x)) == 2  # control: no input
    assert (64, 64) not in saved_by(layer, frame.leaf(X, "float32").sin())
    assert (64, 64) not in saved_by(lambda x: x, x) + saved_by(layer, x)


def test_small_tensors_stay_unless_a_policy_says_otherwise():
    moved = []

    class Spy(groups._OwnTime):
        def add(self, tensor):
            moved.append(tensor.nbytes)
            super().add(tensor)

    for size, policy, count in (
        (255, None, 0),
        (256, None, 1),
        (3, bool_true, 1),
        (300, lambda t: MUST_SAVE, 0),
    ):
        moved.clear()
        x = frame.leaf(frame.draw(size), "float32")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "hyper_parallel.core.activation_checkpoint.offload.new_storage", Spy
            )
            out = swap(lambda x: x.exp(), x, policy_fn=policy)
        frame.backward([out], [np.ones(size)])
        assert moved == [4 * size] * count
        frame.equal(frame.grad(x), np.exp(frame.array(platform.detach(x))), 1e-4)


def bool_true(tensor):
    return True


@pytest.mark.parametrize("answer", [CheckpointPolicy.MUST_RECOMPUTE, None, "MUST_SWAP"])
def test_what_a_policy_of_swap_may_not_say(answer):
    x = frame.leaf(X)
    with pytest.raises(
        ValueError, match="expected MUST_SWAP, MUST_SAVE or a bool"
    ) as error:
        swap(lambda x: x.exp(), x, policy_fn=lambda tensor: answer)
    assert error.value.code == "HP442"
    with pytest.raises(ValueError, match="policy_fn must be a function of a tensor"):
        swap_wrapper(Block(), 3)


def test_shared_input_storage_not_freed_by_swap():
    x = frame.leaf(X, "float32")
    shared = x * 2
    expected = frame.array(platform.detach(shared)).copy()
    view = shared[1:3]
    out = checkpoint(lambda x: x.exp().sin(), shared, swap_inputs=True)
    more = swap(lambda x: x.exp().sin(), shared)
    assert np.array_equal(frame.array(platform.detach(shared)), expected)
    assert np.array_equal(frame.array(platform.detach(view)), expected[1:3])
    frame.backward(
        [out, more, view], [np.ones(X.shape), np.ones(X.shape), np.ones((2, 64))]
    )
    slope = 2 * np.cos(np.exp(expected)) * np.exp(expected)
    wanted = 2 * slope
    wanted[1:3] += 2
    frame.equal(frame.grad(x), wanted, 1e-3)


def test_a_cpu_is_warned_about_once():
    groups._warn_on_cpu.cache_clear()
    block = Block()
    plain = run(block)
    with pytest.warns(UserWarning, match="saves no memory"):
        found = run(swap_wrapper(block))
    assert_same(found, plain)
    assert_same(run(swap_wrapper(block)), plain)  # a warning would be an error


# --- groups


def swapped_in(group, function, x):
    manager = SwapManager()
    manager.set_current_group_name(group)
    try:
        return swap(function, x, policy_fn=bool_true)
    finally:
        manager.set_current_group_name("")


@pytest.mark.parametrize(
    "calls",
    [
        [],
        ["launch_offload"],
        ["launch_offload", "wait_offload"],
        ["launch_offload", "wait_offload", "launch_load"],
        ["launch_offload", "wait_offload", "launch_load", "wait_load"],
        ["launch_offload", "launch_load", "wait_offload", "wait_load"],
        ["wait_load", "wait_offload", "launch_load", "launch_offload", "wait_offload"],
        ["launch_offload", "wait_offload"] * 2,
    ],
    ids=" ".join,
)
def test_groups_move_in_any_order(calls):
    manager = SwapManager()
    x = frame.leaf(X)
    out = swapped_in("any order", lambda x: x.exp().exp().sin(), x)
    for call in calls:
        getattr(manager, call)("any order")
    frame.backward([out], [np.ones(X.shape)])
    once, twice = np.exp(X.astype(np.float64)), np.exp(np.exp(X.astype(np.float64)))
    frame.equal(frame.grad(x), np.cos(twice) * twice * once, 1e-9)


def test_wait_before_launch():
    manager = SwapManager()
    manager.set_current_group_name("new")
    manager.set_current_group_name("")
    manager.wait_offload("new")
    manager.wait_load("new")
    for call in (manager.wait_load, manager.launch_offload):
        for name, message in (
            ("no such", "there is no swap group 'no such'"),
            ("", "expected the name of a group"),
        ):
            with pytest.raises(ValueError, match=message) as error:
                call(name)
            assert error.value.code == "HP443"
    with pytest.raises(ValueError, match="a list has no launch_offload, wait_offload"):
        manager.add_storage("new", [])


def test_there_is_one_manager():
    SwapManager().set_current_group_name("mine")
    assert SwapManager() is SwapManager()
    assert SwapManager().get_current_group_name() == "mine"


def test_a_group_moves_only_what_is_in_it_and_keeps_nothing_alive():
    log = []

    class Noting(groups.Storage):
        def launch_offload(self, copy_stream=None):
            log.append(copy_stream)

    manager, storage = SwapManager(), Noting()
    manager.add_storage("a", storage)
    manager.add_storage("b", other := Noting())
    manager.launch_offload("a", "a stream")
    assert log == ["a stream"]
    del storage, other
    gc.collect()
    manager.launch_offload("a")
    assert log == ["a stream"]


def test_must_swap_without_group_is_not_global():
    """Each call has a storage of its own, whose tensors have left when the call returns."""
    before = {name: list(found) for name, found in SwapManager()._groups.items()}
    storages = [groups.new_storage() for _ in range(2)]
    assert storages[0] is not storages[1]
    x = frame.leaf(X)
    out = checkpoint(lambda x: x.exp().sin(), x, policy_fn=swap_all)
    assert SwapManager()._groups == before
    frame.backward([out], [np.ones(X.shape)])


def test_a_saved_tensor_that_changes_before_it_moves_is_refused():
    x = frame.leaf(X)
    kept = []

    def function(x):
        kept.append(x.exp())
        return kept[0] * 2

    out = swapped_in("changed", function, x)
    platform.copy_into(platform.detach(kept[0]), frame.tensor(np.zeros(X.shape)))
    with pytest.raises(RuntimeError, match=r"modified by an in-place operation"):
        SwapManager().launch_offload("changed")
    del out


# --- chains of layers


class Log:
    """What happens to the groups of layers, in order."""

    def __init__(self, monkeypatch, model):
        self.calls = []
        names = {
            layer.__dict__[groups._LINK].name: n for n, layer in enumerate(model.layers)
        }
        for call in ("launch_offload", "wait_offload", "launch_load", "wait_load"):
            self._note(monkeypatch, call, names)

    def _note(self, monkeypatch, call, names):
        usual = getattr(SwapManager, call)

        def noted(manager, name, *rest):
            moved = [n for s in manager._storages(call, name) for n in s._tensors()]
            if moved and name in names:
                self.calls.append((call, names[name]))
            return usual(manager, name, *rest)

        monkeypatch.setattr(SwapManager, call, noted)


WRAPS = {
    "swap": swap_wrapper,
    "inputs": functools.partial(checkpoint_wrapper, swap_inputs=True),
    "by operator": functools.partial(checkpoint_wrapper, policy_fn=swap_products),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS.keys())
def test_async_swap_prefetches_before_use(monkeypatch, wrap):
    plain, model = Layers(3), Layers(3, wrap)
    manager = SwapManager()
    for _ in range(2):  # a second call changes nothing
        for first, second in zip(model.layers, list(model.layers)[1:], strict=False):
            manager.set_forward_prefetch_layer(first, second)
    log = Log(monkeypatch, model)
    for _ in range(2):
        assert_same(run(model), run(plain))
        offloads = [
            call for call in log.calls if call[0] in ("launch_offload", "wait_offload")
        ]
        assert offloads == [
            ("launch_offload", 0),
            ("launch_offload", 1),
            ("wait_offload", 0),
            ("wait_offload", 1),
        ]
        # Layer 1 is loaded when layer 2 begins its backward, before its own.
        loads = [call for call in log.calls if call[0] in ("launch_load", "wait_load")]
        assert loads[:5] == [
            ("launch_load", 2),
            ("wait_load", 2),
            ("launch_load", 1),
            ("launch_load", 1),
            ("wait_load", 1),
        ]
        log.calls.clear()
    assert manager.get_current_group_name() == ""
    with pytest.raises(ValueError, match="both layers are the same") as error:
        manager.set_forward_prefetch_layer(model.layers[0], model.layers[0])
    assert error.value.code == "HP444"


def test_a_layer_that_raises_leaves_its_group():
    class Failing(platform.Module):
        def forward(self, x):
            raise KeyError("no luck")

        construct = forward

    layers = Block(), Failing()
    SwapManager().set_forward_prefetch_layer(*layers)
    with pytest.raises(KeyError, match="no luck"):
        layers[1](frame.tensor(X))
    assert SwapManager().get_current_group_name() == ""


def test_shared_function_is_no_overlap():
    """One layer that runs twice in a chain is right, though its group holds both of its calls."""
    layers = Block(), swap_wrapper(Block())
    SwapManager().set_forward_prefetch_layer(layers[1], layers[0])

    def twice(x):
        return layers[1](layers[0](layers[1](x)))

    both = frame.sequential(*layers)
    found = run(twice, module=both)
    plain = frame.sequential(*(Block() for _ in range(2)))
    plain.load_state_dict(both.state_dict())
    assert_same(found, run(lambda x: plain[1](plain[0](plain[1](x))), module=plain))
