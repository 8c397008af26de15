# SPDX-License-Identifier: Apache-2.0
"""Actions of pipeline schedules: their text, their parts, and where stages are."""

import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.core.pipeline_parallel.action import (
    CustomStepType,
    Message,
    MetaStep,
    MetaStepType,
    backward,
    computations,
    flatten,
    forward,
    message_of,
    overlap,
)
from hyper_parallel.core.pipeline_parallel.mapping import StageMapping
from hyper_parallel.platform.error_codes import code_of

TEXTS = {
    "0F3": MetaStep(3, MetaStepType.FWD, 0),
    "2I1": MetaStep(1, MetaStepType.BWD_INPUT, 2),
    "2W1": MetaStep(1, MetaStepType.BWD_WEIGHT, 2),
    "1B0": MetaStep(0, MetaStepType.BWD, 1),
    "0SEND_F0": MetaStep(0, MetaStepType.FWD_SEND, 0),
    "1RECV_F0": MetaStep(0, MetaStepType.FWD_RECV, 1),
    "3SEND_B12": MetaStep(12, MetaStepType.BWD_SEND, 3),
    "2RECV_B1": MetaStep(1, MetaStepType.BWD_RECV, 2),
    "1UNSHARD": MetaStep(None, MetaStepType.FSDP_UNSHARD, 1),
    "1RESHARD": MetaStep(None, MetaStepType.FSDP_RESHARD, 1),
    "1REDUCE_GRAD": MetaStep(None, MetaStepType.FSDP_REDUCE_GRAD, 1),
    "0SEND_F3>2": MetaStep(3, MetaStepType.FWD_SEND, 0, None, 2),
    "2RECV_F3<0": MetaStep(3, MetaStepType.FWD_RECV, 2, None, 0),
    "(0F7;7B3)OVERLAP_F_B": overlap(forward(0, 7), backward(7, 3)),
    "(7B3;0F7)OVERLAP_B_F": overlap(backward(7, 3), forward(0, 7)),
}


@pytest.mark.parametrize("text", TEXTS)
def test_text_and_action_are_one(text):
    step = TEXTS[text]
    assert str(step) == text
    assert MetaStep.parse(f" {text} ") == step
    assert hash(MetaStep.parse(text)) == hash(step)
    assert pickle.loads(pickle.dumps(step)) == step


def test_a_step_is_a_frozen_value():
    step = MetaStep(3, MetaStepType.FWD, 0)
    assert (step.micro_index, step.type, step.stage_index) == (3, MetaStepType.FWD, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        step.micro_index = 4
    assert MetaStep(None, MetaStepType.OVERLAP_F_B, None, [step, step]).sub_steps == (
        step,
        step,
    )


@pytest.mark.parametrize(
    "text",
    ["", "F", "F0", "0F", "0X1", "0f1", "3SEND1", "-1F0", "0F1>2", "(0F1)OVERLAP_F_B",
     "(0F1;0X1)OVERLAP_F_B", "0OVERLAP_F_B1", "0F1 1F1"],
)  # fmt: skip
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ValueError, match="is not an action") as caught:
        MetaStep.parse(text)
    assert code_of(caught.value) == "HP462"


def test_types_of_the_user_are_read_and_written():
    swap = CustomStepType("SWAP_OUT")
    step = MetaStep(2, swap, 1)
    assert str(step) == "1SWAP_OUT2"
    assert MetaStep.parse("1SWAP_OUT2", [swap]) == step
    assert MetaStep.parse("1SWAP_OUT", [swap]) == MetaStep(None, swap, 1)
    with pytest.raises(ValueError, match="a type of F B"):
        MetaStep.parse("1SWAP_OUT2")


def test_neighbors_are_not_named():
    for text in ("0SEND_F1>1", "1RECV_F1<0", "2SEND_B1>1", "1RECV_B1<2"):
        assert str(MetaStep.parse(text)) == text[:-2]


@given(st.booleans(), st.integers(0, 9), st.integers(0, 9), st.integers(0, 99))
def test_both_ends_name_the_same_message(is_forward, source, target, micro):
    message = Message(is_forward, source, target, micro)
    for step in (message.send(), message.receive()):
        assert message_of(step) == message
        assert MetaStep.parse(str(step)) == step


def test_pairs_have_parts():
    pair = TEXTS["(0F7;7B3)OVERLAP_F_B"]
    unshard = TEXTS["1UNSHARD"]
    assert list(flatten([unshard, None, pair])) == [
        unshard,
        forward(0, 7),
        backward(7, 3),
    ]
    assert computations(pair) == (forward(0, 7), backward(7, 3))
    assert computations(unshard) == ()


def test_stages_are_on_ranks():
    loop, v = StageMapping("loop", 4, 8), StageMapping("v", 4, 8)
    assert [loop.rank_of(s) for s in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [v.rank_of(s) for s in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert (loop.stages_of(1), v.stages_of(1)) == ((1, 5), (1, 6))
    assert (loop.chunks, v.chunks) == (2, 2)
    both = StageMapping("bidirectional", 4, 4, micro_batches=6)
    assert [both.rank_of(1, micro) for micro in range(6)] == [1, 1, 1, 2, 2, 2]
    assert (both.stages_of(1), both.chunks) == ((1, 2), 1)
    with pytest.raises(ValueError, match="loop, v, bidirectional"):
        StageMapping("zigzag", 4, 8)
