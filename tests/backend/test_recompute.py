# SPDX-License-Identifier: Apache-2.0
"""Recompute and swap: the plain module's gradients, less memory, the same names and the same random numbers."""

import contextlib
import copy
import functools
import itertools

import frame
import numpy as np
import pytest

from hyper_parallel import CheckpointPolicy, get_platform

platform = get_platform()


class Block(platform.Module):
    """Two layers with dropout between, drawn by the framework and by the platform."""

    def __init__(self, share=0.4):
        super().__init__()
        self.share = share
        self.runs = 0
        self.enter = frame.linear(4, 6)
        self.leave = frame.linear(6, 4)
        self.register_buffer("scale", frame.tensor(0.5, "float32"))

    def forward(self, x, shift=None):
        self.runs += 1
        hidden = self.enter(x).exp().sin()
        if self.share:
            hidden = frame.dropout(hidden, self.share) * platform.rand(
                tuple(hidden.shape)
            )
        x = x + self.leave(hidden * self.scale).sin()
        if shift is not None:
            x = x * shift
        return x.sin()

    construct = forward

    def answer(self):
        return 42


X = frame.draw(3, 4).astype(np.float32)


def run(module, x=X, seed=3, **kwargs):
    """(output, gradients of x and of the parameters), the same draws each time."""
    leaf = frame.leaf(x, "float32")
    parameters = platform.parameters_dict(module)
    for parameter in parameters.values():
        frame.set_grad(parameter, None)
    platform.manual_seed(seed)
    out = module(leaf, **kwargs)
    platform.rand((3,))  # somebody draws between forward and backward
    frame.backward([out], [np.ones(out.shape)])
    after = frame.array(platform.rand((2,)))
    gradients = [frame.array(frame.grad(t)) for t in (leaf, *parameters.values())]
    return [frame.array(platform.detach(out)), *gradients, after]


def assert_same(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert np.array_equal(a, b)


def by_ndim(tensor):
    return tensor.ndim == 2


def selective(policy, **options):
    context_fn = functools.partial(
        platform.create_selective_checkpoint_contexts, policy
    )
    return lambda module: platform.ckpt_wrapper(
        module, context_fn=context_fn, **options
    )


# Not what a dropout does in place.
NAMES = {
    "exp",
    "sin",
    "add",
    "mul",
    "addmm",
    "matmul",
    "MatMul",
    "BiasAdd",
    "linear",
    "Dropout",
}


def saving(verdict, every=1):
    """A policy that keeps some of the operators, or only some of their runs."""
    turns = itertools.count()

    def policy(ctx, op, *args, **kwargs):
        is_meant = platform.get_op_name(op) in NAMES and next(turns) % every == 0
        return verdict if is_meant else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


WRAPPERS = {
    "ckpt": platform.ckpt_wrapper,
    "ckpt to the end": lambda m: platform.ckpt_wrapper(m, early_stop=False),
    "ckpt of ckpt": lambda m: platform.ckpt_wrapper(platform.ckpt_wrapper(m)),
    "swap": platform.swap_wrapper,
    "swap some": lambda m: platform.swap_wrapper(m, by_ndim),
    "swap of ckpt": lambda m: platform.swap_wrapper(platform.ckpt_wrapper(m)),
    "ckpt of swap": lambda m: platform.ckpt_wrapper(platform.swap_wrapper(m)),
    "select none": selective([]),
    "select by name": selective(saving(CheckpointPolicy.MUST_SAVE)),
    "select some": selective(saving(CheckpointPolicy.PREFER_SAVE, every=2)),
    "select to the end": selective(
        saving(CheckpointPolicy.MUST_SAVE, every=2), early_stop=False
    ),
    "swap all operators": selective(
        lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_SWAP
    ),
    "swap some operators": selective(saving(CheckpointPolicy.MUST_SWAP, every=3)),
    "select of ckpt": lambda m: selective(saving(True))(platform.ckpt_wrapper(m)),
    "ckpt of select": lambda m: platform.ckpt_wrapper(selective(saving(True))(m)),
    "select of select": lambda m: selective(saving(True, every=2))(
        selective(saving(True, every=3))(m)
    ),
    "select of swap": lambda m: selective(saving(True))(platform.swap_wrapper(m)),
    "swap of select": lambda m: platform.swap_wrapper(selective(saving(True))(m)),
}
each_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
SIMPLE = [platform.ckpt_wrapper, platform.swap_wrapper]


@each_wrapper
def test_gradients_are_those_of_the_plain_module(wrap):
    block = Block()
    plain = run(block)
    assert np.any(plain[1])
    assert_same(run(wrap(block)), plain)


@each_wrapper
def test_inside_a_model_and_with_keyword_tensors(wrap):
    class Model(platform.Module):
        def __init__(self, wrap):
            super().__init__()
            platform.manual_seed(1)
            self.first, self.second = wrap(Block()), wrap(Block())
            self.head = frame.linear(4, 2)

        def forward(self, x, shift):
            return self.head(self.second(self.first(x, shift=shift), shift=shift))

        construct = forward

    plain, wrapped = Model(lambda m: m), Model(wrap)
    gradients = []
    for model in (plain, wrapped):
        shift = frame.leaf(X + 1, "float32")
        gradients.append([*run(model, shift=shift), frame.array(frame.grad(shift))])
    assert_same(*gradients)
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    for mine, theirs in zip(frame.cells(wrapped), frame.cells(plain), strict=True):
        assert list(mine) == list(theirs)


def test_recompute_happens():
    for wrap, runs in (
        (platform.ckpt_wrapper, 2),
        (platform.swap_wrapper, 1),
        (lambda m: m, 1),
    ):
        block = Block()
        run(wrap(block))
        assert block.runs == runs


def test_a_recompute_function_of_ones_own():
    seen = {}

    def spy(function, *args, **kwargs):
        seen.update(kwargs)
        return function(*args)

    block = Block(0.0)
    assert_same(run(platform.ckpt_wrapper(block, spy, debug=7)), run(block))
    assert seen == {"debug": 7}


def test_a_function_under_recompute():
    count = []

    def function(x, y):
        count.append(1)
        return (x.exp() * y).sin()

    gradients = []
    for call in (
        function,
        lambda *a: platform.checkpoint(function, *a, use_reentrant=False),
    ):
        leaves = frame.leaf(X), frame.leaf(X + 1)
        frame.backward([call(*leaves)], [np.ones(X.shape)])
        gradients.append([frame.array(frame.grad(leaf)) for leaf in leaves])
    assert_same(*gradients)
    assert len(count) == 3


def test_contexts_of_both_runs():
    log = []

    @contextlib.contextmanager
    def context(name):
        log.append(f"enter {name}")
        try:
            yield
        finally:
            log.append(f"leave {name}")

    block = Block()
    plain = run(block)
    wrapped = platform.ckpt_wrapper(
        block, context_fn=lambda: (context("forward"), context("again"))
    )
    assert_same(run(wrapped), plain)
    assert log == ["enter forward", "leave forward", "enter again", "leave again"]
    with contextlib.ExitStack() as stack:
        for nothing in platform.noop_context_fn():
            stack.enter_context(nothing)


def test_without_preserved_draws_the_generator_is_not_turned_back():
    x = frame.leaf(X)
    masks = []

    def forward(x):
        masks.append(frame.array(platform.rand(X.shape, dtype=x.dtype)))
        return (x * frame.tensor(masks[-1])).sin()

    platform.manual_seed(3)
    out = platform.checkpoint(forward, x, use_reentrant=False, preserve_rng_state=False)
    frame.backward([out], [np.ones(X.shape)])
    assert len(masks) == 2
    assert not np.array_equal(*masks)


def test_second_backward():
    x = frame.leaf(X, "float32")
    out = platform.ckpt_wrapper(Block(0.0))(x)
    frame.run_backward([out], [frame.tensor(np.ones(out.shape), "float32")], keep=True)
    first = frame.array(frame.grad(x)).copy()
    frame.run_backward([out], [frame.tensor(np.ones(out.shape), "float32")])
    assert np.array_equal(frame.array(frame.grad(x)), 2 * first)


# --- by operator


def test_the_policy_is_asked_about_operators_by_name():
    asked = []

    def policy(ctx, op, *args, **kwargs):
        assert not ctx.is_recompute
        asked.append((platform.get_op_name(op), tuple(ctx.op_output.shape), len(args)))
        return True

    x = frame.leaf(X)
    context_fn = functools.partial(
        platform.create_selective_checkpoint_contexts, policy
    )
    out = platform.checkpoint(
        lambda x: x.exp().sin(), x, use_reentrant=False, context_fn=context_fn
    )
    frame.backward([out], [np.ones(X.shape)])
    assert asked == [("exp", (3, 4), 1), ("sin", (3, 4), 1)]
    frame.equal(
        frame.grad(x),
        np.cos(np.exp(X.astype(np.float64))) * np.exp(X.astype(np.float64)),
    )


@pytest.mark.parametrize("bad", [None, 3, [3], [None], ["no operator at all"]])
def test_no_policy(bad):
    with pytest.raises(ValueError, match="create_selective_checkpoint_contexts: "):
        platform.create_selective_checkpoint_contexts(bad)


def test_no_verdict():
    with pytest.raises(
        ValueError, match="the checkpoint policy returned 'perhaps' for"
    ):
        selective(lambda ctx, op, *args, **kwargs: "perhaps")(Block())(
            frame.leaf(X, "float32")
        )


def test_a_function_that_does_something_else_the_second_time():
    runs = []

    def forward(x):
        runs.append(1)
        return x.exp().sin() if len(runs) == 1 else x.exp().exp()

    x = frame.leaf(X)
    context_fn = functools.partial(
        platform.create_selective_checkpoint_contexts, saving(True, every=2)
    )
    out = platform.checkpoint(forward, x, use_reentrant=False, context_fn=context_fn)
    with pytest.raises(RuntimeError, match="must do the same both times"):
        frame.backward([out], [np.ones(X.shape)])


# --- the wrapper passes for the module


@pytest.mark.parametrize("wrap", SIMPLE)
def test_state_goes_both_ways(wrap):
    bare = frame.sequential(Block(), frame.sequential(frame.linear(8, 8)))
    wrapped = wrap(
        frame.sequential(
            wrap(wrap(Block())), wrap(frame.sequential(wrap(frame.linear(8, 8))))
        )
    )
    assert list(wrapped.state_dict()) == list(bare.state_dict())
    assert list(platform.parameters_dict(wrapped)) == list(
        platform.parameters_dict(bare)
    )
    wrapped.load_state_dict(bare.state_dict())
    assert_same(list(frame.state(wrapped).values()), list(frame.state(bare).values()))
    bare.load_state_dict(wrapped.state_dict())


@pytest.mark.parametrize("wrap", SIMPLE)
def test_attributes_indexing_and_copies(wrap):
    inner = Block()
    wrapped = wrap(inner)
    assert wrapped.answer() == 42
    assert wrapped.enter is inner.enter
    with pytest.raises(AttributeError, match="nonsense"):
        _ = wrapped.nonsense
    layers = wrap(frame.sequential(frame.linear(2, 2), frame.linear(2, 3)))
    assert layers[1] is list(layers)[1]
    assert len(layers) == 2
    twin = copy.deepcopy(wrapped)
    assert twin.enter.weight is not inner.enter.weight
    assert_same(list(frame.state(twin).values()), list(frame.state(inner).values()))
    assert_same(run(twin), run(inner))


def test_setting_what_the_module_owns_sets_it_there():
    layer = frame.linear(2, 2)
    layer.note = "old"
    wrapped = platform.ckpt_wrapper(platform.swap_wrapper(layer))
    wrapped.weight = new = platform.Parameter(frame.tensor(np.ones((2, 2)), "float32"))
    wrapped.note = "new"
    assert layer.weight is new
    assert layer.note == "new"
    assert sorted(platform.parameters_dict(wrapped)) == ["bias", "weight"]


def test_wrapping_what_is_no_module():
    for wrap in SIMPLE:
        with pytest.raises(ValueError, match=r"to wrap, got int"):
            wrap(3)
    with pytest.raises(ValueError, match="checkpoint_fn must be a function"):
        platform.ckpt_wrapper(frame.linear(2, 2), 3)


# --- swap


def test_parameters_stay_and_the_policy_decides():
    block = Block()
    seen = []

    def policy(tensor):
        seen.append(tensor.untyped_storage().data_ptr())
        return tensor.ndim == 2

    run(platform.swap_wrapper(block, policy))
    own = {
        t.untyped_storage().data_ptr()
        for named in frame.cells(block)
        for t in named.values()
    }
    assert seen
    assert not own & set(seen)
    sizes = []
    for policy_fn in (
        lambda t: False,
        lambda t: t.untyped_storage().data_ptr() not in own,
        None,
    ):
        x = frame.leaf(X, "float32")
        with platform.async_save_on_cpu(policy_fn) as swap:
            out = block(x)
        frame.backward([out], [np.ones(out.shape)])
        sizes.append(swap.swapped_bytes)
    assert sizes[0] == 0 < sizes[1] <= sizes[2]
    for make in (
        platform.async_save_on_cpu,
        lambda policy: platform.swap_wrapper(block, policy),
    ):
        with pytest.raises(ValueError, match="policy_fn must be a function"):
            make(3)


@pytest.mark.parametrize("name", ["float64", "float32", "float16"])
def test_what_was_swapped_comes_back_as_it_was(name):
    gradients = []
    for context in (contextlib.nullcontext, platform.async_save_on_cpu):
        x = frame.leaf(X, name)
        with context():
            hidden = x * 2
            out = (hidden.T * x.T)[1:] * hidden.T[1:]
            del hidden
        frame.backward([out], [np.ones(out.shape)])
        gradients.append([frame.array(frame.grad(x))])
    assert_same(*gradients)


def test_backward_is_fed_ahead_and_can_come_again():
    x = frame.leaf(X)
    with platform.async_save_on_cpu() as swap:
        out = x
        for _ in range(6):
            out = out.sin()
    assert swap.prefetched == 0
    assert swap.swapped_tensors == 6
    assert swap.swapped_bytes == 6 * X.size * 8
    gradient = [frame.tensor(np.ones(X.shape))]
    frame.run_backward([out], gradient, keep=True)
    assert swap.prefetched == 5  # all but the last packed arrive ahead of use
    first = frame.array(frame.grad(x)).copy()
    frame.run_backward([out], gradient)
    assert np.array_equal(frame.array(frame.grad(x)), 2 * first)


def test_nothing_is_saved_without_grad():
    frame.recording()
    with platform.no_grad(), platform.async_save_on_cpu() as swap:
        Block()(frame.tensor(X))
    assert swap.swapped_tensors == 0


def test_each_of_two_wrappers_runs_its_own_function():
    ran = []

    def run(name, call, *args, **kwargs):
        ran.append(name)
        return call(*args, **kwargs)

    module = frame.linear(2, 2)
    for name in ("inner", "outer"):
        module = platform.ckpt_wrapper(module, functools.partial(run, name))
    module(frame.tensor(frame.draw(3, 2).astype("float32")))
    assert ran == ["outer", "inner"]
