# SPDX-License-Identifier: Apache-2.0
"""The actions of a pipeline schedule: one computation, send, receive or parameter action of a rank.

    MetaStep(3, MetaStepType.FWD, 0)     prints 0F3: the forward of micro batch 3 on stage 0
    MetaStep.parse("2RECV_B1")           stage 2 receives the gradient of micro batch 1
    MetaStep.parse("(0F7;7B3)OVERLAP_F_B")   a forward and a backward that run together

The text has torch's form: the stage, the type, the micro batch. A message between stages that are
not neighbours also names the other stage: ``0SEND_F3>2``, ``2RECV_F3<0``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from hyper_parallel.platform.error_codes import coded


class MetaStepType(Enum):
    """What an action does; the value is its name in texts."""

    FWD = "F"
    BWD = "B"
    BWD_INPUT = "I"
    BWD_WEIGHT = "W"
    FWD_RECV = "RECV_F"
    FWD_SEND = "SEND_F"
    BWD_RECV = "RECV_B"
    BWD_SEND = "SEND_B"
    OVERLAP_F_B = "OVERLAP_F_B"
    OVERLAP_B_F = "OVERLAP_B_F"
    FSDP_UNSHARD = "UNSHARD"
    FSDP_RESHARD = "RESHARD"
    FSDP_REDUCE_GRAD = "REDUCE_GRAD"

    # Members are compared by identity; an enum's own hash of the name takes a call of Python.
    __hash__ = object.__hash__


@dataclass(frozen=True)
class CustomStepType:
    """A type of action that the user defines: ``value``, in capitals, is its name in texts."""

    value: str


StepType = MetaStepType | CustomStepType

COMPUTE = frozenset(
    {
        MetaStepType.FWD,
        MetaStepType.BWD,
        MetaStepType.BWD_INPUT,
        MetaStepType.BWD_WEIGHT,
    }
)
SENDS = frozenset({MetaStepType.FWD_SEND, MetaStepType.BWD_SEND})
RECEIVES = frozenset({MetaStepType.FWD_RECV, MetaStepType.BWD_RECV})
MESSAGES = SENDS | RECEIVES
PAIRS = frozenset({MetaStepType.OVERLAP_F_B, MetaStepType.OVERLAP_B_F})

# The stage at the other end of a message between neighbours, relative to the stage of the action.
_NEIGHBOR = {
    MetaStepType.FWD_SEND: 1,
    MetaStepType.FWD_RECV: -1,
    MetaStepType.BWD_SEND: -1,
    MetaStepType.BWD_RECV: 1,
}
_ONE = re.compile(r"(\d+)([A-Z_]+?)(\d*)(?:[<>](\d+))?")
_PAIR = re.compile(r"\(([^();]*);([^();]*)\)(OVERLAP_F_B|OVERLAP_B_F)")


@dataclass(frozen=True, slots=True, repr=False)
class MetaStep:
    """One action of a rank.

    ``micro_index`` is None where an action belongs to all micro batches, such as FSDP_UNSHARD; a
    pair has neither stage nor micro batch of its own, but two ``sub_steps``. ``peer_stage`` is the
    stage at the other end of a message; None: the neighbour.
    """

    micro_index: int | None
    meta_type: StepType
    stage_index: int | None
    sub_steps: tuple[MetaStep, ...] | None = None
    peer_stage: int | None = None

    def __post_init__(self) -> None:
        if self.sub_steps is not None:
            object.__setattr__(self, "sub_steps", tuple(self.sub_steps))

    @property
    def type(self) -> StepType:
        """What the action does."""
        return self.meta_type

    def __str__(self) -> str:
        if self.sub_steps:
            parts = ";".join(str(step) for step in self.sub_steps)
            return f"({parts}){self.meta_type.value}"
        micro = "" if self.micro_index is None else self.micro_index
        text = f"{self.stage_index}{self.meta_type.value}{micro}"
        if self.peer_stage is None:
            return text
        arrow = "<" if self.meta_type in RECEIVES else ">"
        return f"{text}{arrow}{self.peer_stage}"

    __repr__ = __str__

    @staticmethod
    def parse(text: str, custom: Iterable[CustomStepType] = ()) -> MetaStep:
        """The action that prints as ``text``; further types of actions may be given."""
        text = text.strip()
        pair = _PAIR.fullmatch(text)
        if pair is not None:
            parts = (_parse_one(pair[1], ()), _parse_one(pair[2], ()))
            return MetaStep(None, MetaStepType(pair[3]), None, parts)
        return _parse_one(text, custom)


def _parse_one(text: str, custom: Iterable[CustomStepType]) -> MetaStep:
    match = _ONE.fullmatch(text)
    types: dict[str, StepType] = {kind.value: kind for kind in custom}
    types.update((kind.value, kind) for kind in MetaStepType if kind not in PAIRS)
    kind = types.get(match[2]) if match else None
    if match is None or kind is None or not _is_complete(kind, match):
        raise coded(
            ValueError,
            "HP462",
            f"{text!r} is not an action; expected a stage, a type of {' '.join(types)} and a micro "
            "batch, as in 0F3, 2RECV_B1, 1UNSHARD or (0F7;7B3)OVERLAP_F_B",
        )
    micro = int(match[3]) if match[3] else None
    peer = int(match[4]) if match[4] else None
    stage = int(match[1])
    if kind in MESSAGES and peer == stage + _NEIGHBOR[kind]:
        peer = None
    return MetaStep(micro, kind, stage, None, peer)


def _is_complete(kind: StepType, match: re.Match[str]) -> bool:
    needs_micro = kind in COMPUTE or kind in MESSAGES
    if match[4]:
        return kind in MESSAGES
    return bool(match[3]) or not needs_micro


def flatten(order: Iterable[MetaStep | None]) -> Iterator[MetaStep]:
    """The actions of an order, with the parts of pairs in place of the pairs."""
    for step in order:
        if step is None:
            continue
        if step.sub_steps:
            yield from step.sub_steps
        else:
            yield step


def computations(step: MetaStep) -> tuple[MetaStep, ...]:
    """What an action computes: itself, the parts of a pair, or nothing."""
    if step.sub_steps is None:
        return (step,) if step.meta_type in COMPUTE else ()
    return tuple(part for part in step.sub_steps if part.meta_type in COMPUTE)


# --- constructors; equal actions are one object


@functools.lru_cache(maxsize=1 << 15)
def forward(stage: int, micro: int) -> MetaStep:
    """The forward of a micro batch on a stage."""
    return MetaStep(micro, MetaStepType.FWD, stage)


@functools.lru_cache(maxsize=1 << 15)
def backward(stage: int, micro: int) -> MetaStep:
    """The whole backward of a micro batch on a stage."""
    return MetaStep(micro, MetaStepType.BWD, stage)


@functools.lru_cache(maxsize=1 << 15)
def backward_input(stage: int, micro: int) -> MetaStep:
    """The part of a backward that computes the gradients of the stage's inputs."""
    return MetaStep(micro, MetaStepType.BWD_INPUT, stage)


@functools.lru_cache(maxsize=1 << 15)
def backward_weight(stage: int, micro: int) -> MetaStep:
    """The part of a backward that computes the gradients of the stage's parameters."""
    return MetaStep(micro, MetaStepType.BWD_WEIGHT, stage)


def overlap(first: MetaStep, second: MetaStep) -> MetaStep:
    """A forward and a backward, in either order, that run together."""
    is_forward_first = first.type is MetaStepType.FWD
    kind = MetaStepType.OVERLAP_F_B if is_forward_first else MetaStepType.OVERLAP_B_F
    return MetaStep(None, kind, None, (first, second))


# --- messages


class Message(NamedTuple):
    """What one stage hands to another: an output forward, or a gradient backward."""

    is_forward: bool
    source: int
    target: int
    micro: int

    def send(self) -> MetaStep:
        """The action on the rank of the source."""
        kind = MetaStepType.FWD_SEND if self.is_forward else MetaStepType.BWD_SEND
        return _end_of_message(kind, self.micro, self.source, self.target)

    def receive(self) -> MetaStep:
        """The action on the rank of the target."""
        kind = MetaStepType.FWD_RECV if self.is_forward else MetaStepType.BWD_RECV
        return _end_of_message(kind, self.micro, self.target, self.source)


@functools.lru_cache(maxsize=1 << 15)
def _end_of_message(kind: MetaStepType, micro: int, stage: int, peer: int) -> MetaStep:
    is_neighbor = peer == stage + _NEIGHBOR[kind]
    return MetaStep(micro, kind, stage, None, None if is_neighbor else peer)


def message_of(step: MetaStep) -> Message:
    """The message that an action sends or receives."""
    assert step.meta_type in MESSAGES
    assert step.stage_index is not None
    assert step.micro_index is not None
    stage, peer = step.stage_index, peer_stage(step)
    is_forward = step.meta_type in (MetaStepType.FWD_SEND, MetaStepType.FWD_RECV)
    if step.meta_type in SENDS:
        return Message(is_forward, stage, peer, step.micro_index)
    return Message(is_forward, peer, stage, step.micro_index)


def peer_stage(step: MetaStep) -> int:
    """The stage at the other end of a message."""
    if step.peer_stage is not None:
        return step.peer_stage
    assert isinstance(step.meta_type, MetaStepType)
    assert step.stage_index is not None
    return step.stage_index + _NEIGHBOR[step.meta_type]
