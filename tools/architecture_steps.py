# SPDX-License-Identifier: Apache-2.0
"""One step of an architecture on a mesh with the plan that is found for it, compared with one process.

run("llama", {"tp": 2}).verdict                      "right"
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hyper_parallel import RowwiseParallel, init_device_mesh
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.pipeline_parallel import (
    build_stages,
    get_schedule_class,
    plan_stages,
)
from hyper_parallel.planning import auto_plan
from hyper_parallel.planning.plan import ParallelPlan, format_cost
from hyper_parallel.planning.roles import find_rows
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


STEPS = 20


@dataclass
class Outcome:
    """What came of one architecture on one mesh. ``verdict``: right, wrong, refused or crashed.

    ``sources``: where its styles come from. ``costs``: the collectives of its blocks, by pattern, as text. ``rows``:
    how many outputs in each block are summed, which is what Megatron communicates in each direction.
    """

    verdict: str
    text: str = ""
    sources: tuple[str, ...] = ()
    costs: dict[str, str] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def compare(name: str, axes: Axes, what: str = "step") -> Outcome:
    """Runs on every rank: the model on the mesh and on one process. ``what``: step, sequence parallel, or training."""
    warnings.simplefilter("ignore")
    try:
        if "pp" in axes:
            return _compare_pipeline(name, axes)
        return (
            _compare_training(name, axes)
            if what == "training"
            else _compare(name, axes, what == "sequence parallel")
        )
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
    loss = compute_loss(many, _own_rows(batch, mesh))
    loss.backward()
    _check("loss", loss, expected)
    _check_gradients(many, one)
    return _tell(plan)


def _tell(plan: ParallelPlan) -> Outcome:
    """That all is right, and the plan's facts for the page."""
    costs = {
        pattern: format_cost(cost)
        + (" and experts" if plan.has_experts(pattern) else "")
        for pattern, cost in plan.costs.items()
    }
    rows = {pattern: _count_sums(plan, pattern) for pattern in costs}
    return Outcome("right", "", plan.sources, costs, rows, plan.notes)


def _count_sums(plan: ParallelPlan, block: str) -> int:
    """How many row-wise layers a block has."""
    prefix = f"{block}."
    inside = [
        entry.style
        for entry in plan.entries
        if isinstance(entry.style, RowwiseParallel)
        and f"{_generalize(entry.pattern)}.".startswith(_generalize(prefix))
    ]
    return len(inside)


def _generalize(pattern: str) -> str:
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", pattern)


def _compare_training(name: str, axes: Axes) -> Outcome:
    """Losses of STEPS steps, whose optimizer makes differences grow."""
    start = make_model(name)
    batch = make_batch(name, start)
    one, many = copy.deepcopy(start), copy.deepcopy(start)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    plan = auto_plan(many, mesh)
    plan.apply(many, mesh)
    own = _own_rows(batch, mesh)
    expected = _train(one, batch)
    found = _train(many, own)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-4)
    assert expected[-1] < expected[0], f"{name} does not learn: {expected.tolist()}"
    return _tell(plan)


def _train(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    losses = []
    for _ in range(STEPS):
        loss = compute_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(whole(loss)))
    return torch.tensor(losses, dtype=torch.float64)


def _compare_pipeline(name: str, axes: Axes) -> Outcome:
    """A language model in stages, with two micro batches: the loss and every gradient that this rank has."""
    one = make_model(name)
    batch = make_batch(name, one)
    ids, labels = batch["input_ids"], batch["labels"]
    expected = _loss_of(one(input_ids=ids), labels)
    expected.backward()
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    many = make_model(name)
    plan = auto_plan(many, mesh)
    stages = plan_stages(many, axes["pp"], begin=plan.begin, last=plan.last)
    own = mesh.get_local_rank("pp")
    stages.keep(many, [own])
    built = build_stages(
        many,
        stages,
        [own],
        forward=lambda given: many(input_ids=given, use_cache=False),
        group=mesh.get_group("pp"),
    )
    schedule = get_schedule_class("1F1B")(built, 2, loss_fn=_loss_of)
    schedule.step(ids, target=labels, return_outputs=False)
    wanted = dict(one.named_parameters(remove_duplicate=False))
    for found, parameter in many.named_parameters():
        plain = found.replace("_checkpoint_wrapped_module.", "")
        _check(f"gradient of {plain}", parameter.grad, wanted[plain].grad)
    return _tell(plan)


def _loss_of(output: Any, labels: Any) -> Any:
    logits = getattr(output, "logits", output)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _own_rows(batch: Mapping[str, Any], mesh: Any) -> dict[str, Any]:
    """What this rank's data loader would give."""
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


def run(name: str, axes: Axes, what: str = "step") -> Outcome:
    """The outcome of one architecture on ranks; all of them must agree on the verdict."""
    ranks = 1
    for size in axes.values():
        ranks *= size
    try:
        outcomes = run_ranks(compare, ranks, name, dict(axes), what, timeout=LONG)
    except RankError as error:
        return Outcome("crashed", str(error).splitlines()[-1][:400])
    verdicts = {outcome.verdict for outcome in outcomes}
    if len(verdicts) > 1:
        return Outcome("crashed", f"the ranks disagree: {sorted(verdicts)}")
    first: Outcome = outcomes[0]
    return first
