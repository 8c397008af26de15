# SPDX-License-Identifier: Apache-2.0
"""Module boundaries: the order of phases, what attachments rewrite, errors, copies and removal, on both frameworks."""

import copy
import itertools

import frame
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.core.modules.boundary import PHASES, attach, attachments
from hyper_parallel.platform import get_platform

platform = get_platform()
X = [[1.0, 2.0]]


class Double(platform.Module):
    """Doubles its input, adds ``shift`` and calls what is inside it."""

    def __init__(self, inner=None):
        super().__init__()
        self.inner = inner if inner is not None else frame.sequential()
        self.has_inner = inner is not None

    def forward(self, x, shift=0.0):
        if isinstance(shift, str):
            raise ValueError(shift)
        x = x * 2 + shift
        return self.inner(x) if self.has_inner else x

    construct = forward


class Twice(platform.Module):
    """Calls itself once more."""

    def forward(self, x, depth=1):
        return x if depth == 0 else self(x, depth - 1) + 1

    construct = forward


def x():
    return frame.tensor(X, "float32")


def values(tensor):
    return frame.array(platform.detach(tensor)).tolist()


def watch(module, phase, log, name=None):
    """Attaches callbacks that write down what they see."""
    name = name if name is not None else phase
    return attach(
        module,
        phase,
        enter=lambda m, args, kwargs: log.append(("enter", name)),
        leave=lambda m, output: log.append(("leave", name)),
        on_error=None if phase == "trace" else lambda m: log.append(("error", name)),
        source=name,
    )


def table(log, event):
    return [name for kind, name in log if kind == event]


@settings(deadline=None)
@given(st.lists(st.sampled_from(PHASES), max_size=8))
def test_entering_follows_the_table_and_leaving_reverses_it(drawn):
    module, log = Double(), []
    for index, phase in enumerate(drawn):
        watch(module, phase, log, (phase, index))
    module(x())
    order = [PHASES.index(phase) for phase, _ in table(log, "enter")]
    assert order == sorted(order)
    back = [PHASES.index(phase) for phase, _ in table(log, "leave")]
    assert back == order[::-1]
    assert sorted(table(log, "enter")) == sorted(table(log, "leave"))
    assert [one.phase for one in attachments(module)] == sorted(drawn, key=PHASES.index)
    for event in ("enter", "leave"):  # of one phase: in the order of the calls
        for _, group in itertools.groupby(table(log, event), key=lambda one: one[0]):
            indices = [index for _, index in group]
            assert indices == sorted(indices)


def test_arguments_and_outputs_are_rewritten():
    module = Double()
    attach(
        module,
        "style",
        enter=lambda m, args, kwargs: ((args[0] * 10,), {**kwargs, "shift": 1.0}),
        leave=lambda m, output: output * 100,
    )
    attach(module, "data axis", enter=lambda m, args, kwargs: ((args[0] + 1,), kwargs))
    attach(module, "data axis", leave=lambda m, output: output + 5)
    assert values(module(x(), shift=7.0)) == [
        [((1 + 1) * 10 * 2 + 1) * 100 + 5, ((2 + 1) * 10 * 2 + 1) * 100 + 5]
    ]


def test_attachments_are_removed_one_by_one_and_leave_no_trace():
    module, log = Double(), []
    before = set(vars(module))
    handles = [watch(module, phase, log) for phase in reversed(PHASES)]
    handles[2].remove()
    handles[2].remove()
    module(x())
    assert table(log, "enter") == [phase for phase in PHASES if phase != PHASES[2]]
    for handle in handles:
        handle.remove()
    del log[:]
    assert attachments(module) == ()
    assert set(vars(module)) == before
    module(x())
    assert log == []
    watch(module, "user", log)
    module(x())
    assert log == [("enter", "user"), ("leave", "user")]


def test_an_error_ends_everything_that_was_entered():
    module, log = Double(Double()), []
    for phase in ("user", "style", "data axis"):
        watch(module, phase, log)
    watch(module.inner, "style", log, "inner")
    module(x())
    complete = list(log)
    with pytest.raises(ValueError, match="on purpose"):
        module(x(), shift="on purpose")
    assert table(log, "error") == ["user", "style", "data axis"]
    del log[:]
    module(x())
    assert log == complete


def test_an_error_of_an_attachment_undoes_only_what_was_entered():
    module, log = Double(), []

    def refuse(*_):
        raise ValueError("refused")

    watch(module, "data axis", log)
    watch(module, "user", log)
    handle = attach(module, "style", enter=refuse)
    with pytest.raises(ValueError, match="refused"):
        module(x())
    assert log == [("enter", "data axis"), ("error", "data axis")]
    handle.remove()
    attach(module, "style", leave=refuse)
    del log[:]
    with pytest.raises(ValueError, match="refused"):
        module(x())
    assert log[2:] == [("leave", "user"), ("error", "data axis")]


def test_an_error_that_the_caller_catches_stays_inside():
    class Catches(Double):
        def forward(self, x):
            try:
                return self.inner(x, shift="caught")
            except ValueError:
                return x

        construct = forward

    module, log = Catches(Double()), []
    watch(module, "data axis", log, "outer")
    watch(module.inner, "data axis", log, "inner")
    module(x())
    assert log == [
        ("enter", "outer"),
        ("enter", "inner"),
        ("error", "inner"),
        ("leave", "outer"),
    ]


def test_modules_nest_and_call_themselves():
    module, log = Double(Double()), []
    watch(module, "style", log, "outer")
    watch(module.inner, "trace", log, "inner")
    module(x())
    order = [("enter", "outer"), ("enter", "inner")]
    assert log == [*order, ("leave", "inner"), ("leave", "outer")]
    recursive = Twice()
    del log[:]
    watch(recursive, "style", log, "a")
    recursive(x())
    assert [event for event, _ in log] == ["enter", "enter", "leave", "leave"]


def test_a_trace_is_outside_of_the_hooks_of_users():
    module, log = Double(), []
    platform.register_forward_pre_hook(module, lambda *_: log.append("hook before"))
    handle = watch(module, "trace", log)
    watch(module, "style", log)
    platform.register_forward_hook(module, lambda *_: log.append("hook after"))
    second = watch(module, "trace", log, "second")
    module(x())
    assert log[:3] == [("enter", "trace"), ("enter", "second"), "hook before"]
    assert log[-3:] == ["hook after", ("leave", "trace"), ("leave", "second")]
    handle.remove()
    second.remove()
    del log[:]
    module(x())
    assert log == ["hook before", ("enter", "style"), ("leave", "style"), "hook after"]


def test_a_copy_has_attachments_of_its_own():
    module, log = Double(Double()), []
    handle = watch(module, "style", log, "both")
    watch(module.inner, "user", log, "inside")
    twin = copy.deepcopy(module)
    handle.remove()
    assert [str(one) for one in attachments(twin)] == [
        "style: both (enter, leave, on_error)"
    ]
    watch(twin, "trace", log, "twin")
    module(x())
    assert table(log, "enter") == ["inside"]
    del log[:]
    twin(x())
    assert table(log, "enter") == ["twin", "both", "inside"]
    for one in attachments(twin):
        type(handle)(twin, one).remove()
    del log[:]
    twin(x())
    assert table(log, "enter") == ["inside"]
    watch(twin, "data axis", log, "again")
    twin(x())
    assert table(log, "leave")[-1] == "again"


@settings(deadline=None, max_examples=30)
@given(st.permutations(PHASES))
def test_backward_enters_at_the_outputs(drawn):
    module, log = frame.linear(2, 2), []

    def attach_to(phase):
        return attach(
            module,
            phase,
            before_backward=lambda m, out: log.append(("before", phase)),
            after_backward=lambda m, into, out: log.append(("after", phase)),
        )

    handles = [attach_to(phase) for phase in drawn]
    leaf = frame.leaf(X, "float32")
    frame.backward([module(leaf)], [[[1.0, 1.0]]])
    assert table(log, "before") == list(PHASES)
    assert table(log, "after") == list(PHASES[::-1])
    assert [kind for kind, _ in log] == ["before"] * 5 + ["after"] * 5
    for handle in handles:
        handle.remove()
    del log[:]
    frame.backward([module(leaf)], [[[1.0, 1.0]]])
    assert log == []


def test_gradients_are_rewritten():
    module = frame.linear(2, 2)
    weight = values(module.weight)
    attach(module, "style", before_backward=lambda m, out: (out[0] * 3,))
    attach(module, "user", after_backward=lambda m, into, out: (into[0] * 5,))
    leaf = frame.leaf(X, "float32")
    frame.backward([module(leaf)], [[[1.0, 1.0]]])
    expected = 15 * np.ones((1, 2)) @ np.array(weight)
    np.testing.assert_allclose(frame.array(frame.grad(leaf)), expected, rtol=1e-6)


def test_invalid_attachments_are_refused():
    with pytest.raises(ValueError, match=r"unknown phase 'before'.*'trace'.*HP415"):
        attach(Double(), "before", enter=print)
    with pytest.raises(ValueError, match=r"'trace' only observes.*HP415"):
        attach(Double(), "trace", on_error=print)
