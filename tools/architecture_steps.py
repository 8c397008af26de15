# SPDX-License-Identifier: Apache-2.0
"""One step of an architecture on a mesh with the plan that is found for it, compared with one process.

run("llama", {"tp": 2}).verdict                      "right"
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hyper_parallel import CommunicationLedger, init_device_mesh
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.planning import auto_plan
from hyper_parallel.platform.error_codes import code_of, without_hint
from hyper_parallel.testing import RankError, run_ranks
from tools.architecture_models import (
    ROWS,
    compute_loss,
    make_batch,
    make_model,
)

CLOSE = {"rtol": 2e-4, "atol": 1e-6}  # many compute norms and losses in float32
LONG = 600  # seconds: the first job on a rank imports transformers
Axes = Mapping[str, int]


@dataclass
class Outcome:
    """What came of one architecture on one mesh. ``verdict``: right, wrong, refused or crashed."""

    verdict: str
    text: str = ""
    sources: tuple[str, ...] = ()
    costs: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


def compare(name: str, axes: Axes, sequence_parallel: bool = False) -> Outcome:
    """Runs on every rank: one step of the model on the mesh, and of the same model on one process."""
    warnings.simplefilter("ignore")
    try:
        return _compare(name, axes, sequence_parallel)
    except AssertionError as error:
        return Outcome("wrong", str(error)[:400])
    except Exception as error:  # noqa: BLE001 - what a model raises is what is told of it
        verdict = "refused" if code_of(error) else "crashed"
        text = without_hint(error).replace("\n", " ")
        return Outcome(verdict, f"{type(error).__name__}: {text}"[:400])


def _compare(name: str, axes: Axes, sequence_parallel: bool) -> Outcome:
    start = make_model(name)
    batch = make_batch(name, start)
    one, many = copy.deepcopy(start), copy.deepcopy(start)
    expected = compute_loss(one, batch)
    expected.backward()
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    plan = auto_plan(many, mesh, sequence_parallel=sequence_parallel)
    plan.apply(many, mesh)
    with CommunicationLedger(mesh, many) as ledger:
        loss = compute_loss(many, _own_rows(batch, mesh))
        loss.backward()
    _check("loss", loss, expected)
    _check_gradients(many, one)
    return Outcome("right", "", plan.sources, dict(plan.costs), ledger.counts())


def _own_rows(batch: Mapping[str, Any], mesh: Any) -> dict[str, Any]:
    """What this rank's data loader would give."""
    from hyper_parallel.planning.roles import find_rows

    part, parts = find_rows(mesh)
    rows = ROWS // parts
    return {
        key: value[part * rows : (part + 1) * rows]
        if isinstance(value, torch.Tensor)
        else value
        for key, value in batch.items()
    }


def _check_gradients(many: Any, one: Any) -> None:
    found = dict(many.named_parameters())
    for name, parameter in one.named_parameters():
        gradient = found[name].grad
        if parameter.grad is None:
            assert gradient is None or not whole(gradient).any(), f"gradient of {name}"
        else:
            assert gradient is not None, f"{name} has no gradient"
            _check(f"gradient of {name}", gradient, parameter.grad)


def whole(tensor: Any) -> Any:
    """The value of a tensor, distributed or not."""
    plain = tensor.detach()
    return plain.full_tensor() if isinstance(plain, DTensor) else plain


def _check(what: str, found: Any, expected: Any) -> None:
    torch.testing.assert_close(
        whole(found),
        expected.detach(),
        msg=lambda told: f"{what}: {told}",
        **CLOSE,
    )


def run(name: str, axes: Axes, sequence_parallel: bool = False) -> Outcome:
    """The outcome of one architecture on ranks; all of them must agree on the verdict."""
    ranks = 1
    for size in axes.values():
        ranks *= size
    try:
        outcomes = run_ranks(
            compare, ranks, name, dict(axes), sequence_parallel, timeout=LONG
        )
    except RankError as error:
        return Outcome("crashed", str(error).splitlines()[-1][:400])
    verdicts = {outcome.verdict for outcome in outcomes}
    if len(verdicts) > 1:
        return Outcome("crashed", f"the ranks disagree: {sorted(verdicts)}")
    first: Outcome = outcomes[0]
    return first
