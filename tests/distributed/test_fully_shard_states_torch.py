# SPDX-License-Identifier: Apache-2.0
"""Every state of a unit meets every event, and sequences of events are drawn: gradients stay those of one process."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharded_models import batches, both, check_gradients, part_of
from thorough import THOROUGH
from torch.utils.checkpoint import checkpoint

from hyper_parallel import init_device_mesh
from hyper_parallel.core.fully_shard.running import runner_of, runners_below
from hyper_parallel.core.fully_shard.unit import TRANSITIONS, State
from hyper_parallel.testing import on_ranks, run_ranks


def new_mesh():
    return init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))


class Run:
    """The model on one process and sharded, with the forwards of both whose backward has not run."""

    def __init__(self, **options):
        self.mesh = new_mesh()
        self.one, self.many = both(self.mesh, **options)
        self.data = iter(batches(40))
        self.pending = []
        self.forward()
        self.backward()

    @property
    def block(self):
        return self.many.blocks[1]

    def forward(self):
        x = next(self.data)
        true = self.one(x).square().mean()
        mine = self.many(part_of(x, self.mesh)).square().mean()
        self.pending.append((true, mine))

    def backward(self):
        """Of the last forward."""
        if self.pending:
            true, mine = self.pending.pop()
            true.backward()
            mine.backward()

    def backward_of_the_first(self):
        if self.pending:
            true, mine = self.pending.pop(0)
            true.backward()
            mine.backward()

    def forward_of_another_unit(self):
        """Only the first block runs, and its backward."""
        x = torch.ones(2, 6, dtype=torch.float64, requires_grad=True)
        self.one.blocks[0](x).sum().backward()
        rows = torch.ones(2, 6, dtype=torch.float64, requires_grad=True)
        self.many.blocks[0](rows).sum().backward()

    def evaluate(self):
        x = next(self.data)
        with torch.no_grad():
            torch.testing.assert_close(self.many(x), self.one(x))

    def unshard(self):
        self.block.unshard()

    def start_to_unshard(self):
        self.block.unshard(async_op=True)

    def reshard(self):
        self.block.reshard()

    def recompute(self):
        x = next(self.data)

        true = checkpoint(self.one, x, use_reentrant=False).square().mean()
        rows = part_of(x, self.mesh)
        mine = checkpoint(self.many, rows, use_reentrant=False).square().mean()
        true.backward()
        mine.backward()

    def fail_in_forward(self):
        def fail(*_):
            raise ArithmeticError("on purpose")

        handle = self.block.up.register_forward_pre_hook(fail)
        with pytest.raises(ArithmeticError):
            self.many(next(self.data))
        handle.remove()

    def read_state(self):
        own, true = self.many.state_dict(), self.one.state_dict()
        for name, value in true.items():
            assert torch.equal(own[name].full_tensor(), value)

    def check(self):
        """Everything that is pending runs, and gradients are compared."""
        while self.pending:
            self.backward()
        self.forward()
        self.backward()
        check_gradients(self.one, self.many)
        self.block.reshard()
        assert {one.unit.state for one in runners_below(self.many)} == {State.SHARDED}


EVENTS = [
    "forward",
    "backward",
    "backward_of_the_first",
    "forward_of_another_unit",
    "evaluate",
    "unshard",
    "start_to_unshard",
    "reshard",
    "recompute",
    "fail_in_forward",
    "read_state",
]

# How to bring a unit into a state.
PREPARED = {
    State.SHARDED: (),
    State.GATHERING: ("start_to_unshard",),
    State.WHOLE: ("unshard",),
    State.REGROUPED: ("forward",),
}


def meet_all_events(state):
    """Every event in one state of a unit, each followed by a step that is compared."""
    for event in EVENTS:
        if event == "fail_in_forward" and state is State.REGROUPED:
            continue  # it ends the pass whose backward is to come
        run = Run(reshard_after_forward=2 if state is State.REGROUPED else None)
        for call in PREPARED[state]:
            getattr(run, call)()
        assert runner_of(run.block).unit.state is state, event
        getattr(run, event)()
        run.check()


@pytest.mark.parametrize("state", list(State))
@on_ranks(4)
def test_every_state_meets_every_event(state):
    meet_all_events(state)


def test_every_state_can_be_left_and_leads_back():
    assert set(TRANSITIONS) == set(State)
    assert all(State.SHARDED in after for after in list(TRANSITIONS.values())[1:])


def run_events(events, reshard):
    """A sequence of events on this rank."""
    run = Run(reshard_after_forward=reshard)
    for event in events:
        getattr(run, event)()
    run.check()


# A failure ends the pass whose backward is to come, so it is not drawn.
DRAWN = [event for event in EVENTS if event != "fail_in_forward"]


@settings(max_examples=100 if THOROUGH else 8, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(DRAWN), min_size=3, max_size=8),
    st.sampled_from([None, True, False, 2]),
)
def test_sequences_of_events(events, reshard):
    run_ranks(run_events, 4, events, reshard)
