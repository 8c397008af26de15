# SPDX-License-Identifier: Apache-2.0
"""Styles are values: printed, compared, copied, and asked for layouts without any process or change of the module."""

import copy
import dataclasses
import pickle

import pytest
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    DeviceMesh,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
)
from hyper_parallel.core.dtensor.placement_types import FusedShard
from hyper_parallel.core.modules.layouts import Crossing, ModuleLayouts
from hyper_parallel.core.tensor_parallel import (
    FusedColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    Replicated,
)

R, S = Replicate(), Shard
WHOLE, PART = ({"output_layouts": p, "desired_output_layouts": R} for p in (R, S(0)))
NAMED = {
    "input_kwarg_layouts": {"x": S(0)},
    "desired_input_kwarg_layouts": {"x": R},
}
# Per line: a function that makes the style, and how it is printed. All of them differ.
STYLES = [
    (ColwiseParallel, "ColwiseParallel()"),
    (lambda: ColwiseParallel(heads=4), "ColwiseParallel(heads=4)"),
    (lambda: ColwiseParallel(input_layouts=S(1)), "ColwiseParallel(input_layouts=S(1))"),
    (lambda: ColwiseParallel(use_local_output=False), "ColwiseParallel(use_local_output=False)"),
    (lambda: ColwiseParallel(use_local_output=True), "ColwiseParallel(use_local_output=True)"),
    (lambda: FusedColwiseParallel(sections=3), "FusedColwiseParallel(sections=3)"),
    (lambda: FusedColwiseParallel(sections=[4, 2]), "FusedColwiseParallel(sections=(4, 2))"),
    (RowwiseParallel, "RowwiseParallel()"),
    (lambda: RowwiseParallel(output_layouts=S(1)), "RowwiseParallel(output_layouts=S(1))"),
    (SequenceParallel, "SequenceParallel()"),
    (lambda: SequenceParallel(sequence_dim=0), "SequenceParallel(sequence_dim=0)"),
    (lambda: SequenceParallel(use_local_output=True), "SequenceParallel(use_local_output=True)"),
    (Replicated, "Replicated()"),
    (lambda: Replicated(use_local_output=True), "Replicated(use_local_output=True)"),
    (lambda: PrepareModuleInput(**NAMED), "PrepareModuleInput(desired=[], x=R)"),
    (lambda: PrepareModuleInput(input_layouts=R, desired_input_layouts=[S(0)]), "PrepareModuleInput(desired=['S(0)'])"),
    (lambda: PrepareModuleOutput(**WHOLE), "PrepareModuleOutput(desired=['R'])"),
    (
        lambda: PrepareModuleOutput(**WHOLE, use_local_output=False),
        "PrepareModuleOutput(desired=['R'], use_local_output=False)",
    ),
    (
        lambda: PrepareModuleInput(**NAMED, use_local_output=True),
        "PrepareModuleInput(desired=[], x=R, use_local_output=True)",
    ),
    (lambda: PrepareModuleOutput(**PART), "PrepareModuleOutput(desired=['R'])"),
    (
        lambda: PrepareModuleInputOutput(**NAMED, **PART),
        ("PrepareModuleInputOutput(input=PrepareModuleInput(desired=[], x=R), "
        "output=PrepareModuleOutput(desired=['R']))"),
    ),
]  # fmt: skip


def test_equal_styles_are_equal_and_different_ones_differ():
    for index, (make, text) in enumerate(STYLES):
        style = make()
        assert repr(style) == text
        assert (style, hash(style)) == (make(), hash(make()))
        assert style == copy.deepcopy(style) == pickle.loads(pickle.dumps(style))
        others = [other() for other, _ in STYLES[:index] + STYLES[index + 1 :]]
        assert style not in others


@pytest.mark.parametrize("make", [make for make, _ in STYLES])
def test_styles_are_frozen(make):
    style = make()
    field = dataclasses.fields(style)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(style, field, None)


def test_layouts_are_decided_without_touching_the_module():
    mesh, layer = DeviceMesh("cpu", [0], mesh_dim_names=("tp",)), nn.Linear(4, 6)
    before = dict(vars(layer))
    assert ColwiseParallel().layouts(layer, mesh) == ModuleLayouts(
        parameters=(("weight", S(0)), ("bias", S(0))),
        first_input=Crossing(plain=R, wanted=R, size=(-1, 4)),
        output=Crossing(wanted=S(-1), to_local=None, may_be_uneven=True),
    )
    fused = FusedColwiseParallel(sections=2).layouts(layer, mesh)
    assert fused.parameters[0] == ("weight", FusedShard(0, (3, 3)))
    rows = RowwiseParallel(input_layouts=R, use_local_output=False)
    assert rows.layouts(layer, mesh) == ModuleLayouts(
        parameters=(("weight", S(1)), ("bias", R)),
        first_input=Crossing(plain=R, wanted=S(-1)),
        output=Crossing(wanted=R, to_local=False),
    )
    assert Replicated().layouts(layer, mesh) == ModuleLayouts(replicates_rest=True)
    prepared = PrepareModuleInput(
        input_layouts=(None, S(0)), desired_input_layouts=(None, R), **NAMED
    ).layouts(layer, mesh)
    assert prepared.inputs == (None, Crossing(plain=S(0), wanted=R))
    assert prepared.wraps == {1, "x"}
    alone = {
        "input_kwarg_layouts": {"x": None},
        "desired_input_kwarg_layouts": {"x": R},
    }
    assert PrepareModuleInput(**alone).layouts(layer, mesh) == ModuleLayouts()
    assert vars(layer) == before
