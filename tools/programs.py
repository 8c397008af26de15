# SPDX-License-Identifier: Apache-2.0
"""Runs random programs on distributed tensors and compares them with plain torch; says in a few lines what differs.

    python -m tools.programs --count 10000 --page        writes docs/programs.md
    python -m tools.programs --seed 4711                 one program, minimised if it is wrong

Every program is run on a mesh of two ranks or of two by two, in layouts drawn for it: sharded along every dim, uneven
and empty shards, copies, pending sums, averages, maxima, minima and products. All values, all gradients, those that
hooks see, gradients of gradients, accumulated gradients and what an optimizer's step makes of the leaves are compared
in float64. *Refused*: an error of this library, with a code, on all ranks alike.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hyper_parallel.platform import CommunicationError, get_platform
from hyper_parallel.testing import RankError, close_ranks, run_ranks
from tools.program_grammar import Plain, draw_program

PAGE = Path(__file__).resolve().parents[1] / "docs/programs.md"
MESHES = ((2,), (2, 2))
BATCH = 50  # programs in one job of the ranks
BAD = ("wrong", "crashed", "disagreement", "hung")
# A code of ours; torch's own word on views of which it made several, more of which there may be on a shard.
REFUSALS = (
    "[hyper-parallel explain HP",
    "is a view and its base or another view of its base has been modified inplace",
)
CLOSE = {"rtol": 1e-7, "atol": 1e-8}
LARGEST = 1e6  # of a sum whose sine is compared


@dataclass
class Case:
    """A program, the mesh that it is run on, and what is done with its gradients."""

    seed: int
    lines: list[str]
    mesh: tuple[int, ...]
    ending: str  # one of ENDINGS

    @staticmethod
    def draw(seed: int) -> Case:
        """The case of that number."""
        rng = random.Random(seed + 1)
        mesh, ending = MESHES[rng.random() < 0.3], rng.choice(list(ENDINGS))
        lines = draw_program(seed)
        if ending == "gradients of gradients":
            # Whether the second pass meets a hook depends on how torch computes the first, so none is set.
            lines = [line for line in lines if not line.startswith("hook")]
        return Case(seed, lines, mesh, ending)

    def source(self) -> str:
        """The program as text."""
        return "\n".join(
            [
                f"# seed {self.seed}, mesh {self.mesh}",
                *self.lines,
                f"# then: {self.ending}",
            ]
        )


@dataclass
class Results:
    """All that is compared of one run: names, values; None is zero."""

    values: dict[str, Any] = field(default_factory=dict)


# --- the same on a mesh


class OnMesh(Plain):
    """What the lines of a program call, on distributed tensors."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        from hyper_parallel import init_device_mesh

        super().__init__()
        self.mesh = init_device_mesh(
            "cpu", sizes, mesh_dim_names=tuple("xy"[: len(sizes)])
        )

    def placements(self, number: int, ndim: int, partial: bool) -> list[Any]:
        """The layout of that number for a tensor of so many dims."""
        from hyper_parallel import Partial, Replicate, Shard

        rng = random.Random(number)
        one = [Replicate(), *map(Shard, range(ndim)), *map(Shard, range(ndim))]
        found = [rng.choice(one) for _ in range(self.mesh.ndim)]
        if partial and rng.random() < 0.3:
            op = rng.choice(["sum", "sum", "sum", "avg", "max", "min", "prod"])
            found[rng.randrange(self.mesh.ndim)] = Partial(op)
        return found

    def leaf(self, number: int, shape: tuple[int, ...], layout: int) -> Any:
        from hyper_parallel import DTensor, Replicate, distribute_tensor

        whole = super().leaf(number, shape, layout).detach()
        placements = self.placements(layout, len(shape), partial=True)
        at = next((axis for axis, p in enumerate(placements) if p.is_partial()), None)
        if at is None:
            made = distribute_tensor(whole, self.mesh, placements)
        else:
            others = [
                Replicate() if axis == at else p for axis, p in enumerate(placements)
            ]
            part = self._part(
                whole, placements[at].reduce_op, self.mesh.get_coordinate()[at]
            )
            local = distribute_tensor(part, self.mesh, others).to_local().clone()
            made = DTensor.from_local(local, self.mesh, placements, shape=shape)
        self.leaves[-1] = made.requires_grad_()
        return made

    @staticmethod
    def _part(whole: torch.Tensor, op: str, rank: int) -> torch.Tensor:
        """One of two parts that are reduced to the whole, and differ."""
        if op == "sum":
            return whole * 3 if rank == 0 else whole * -2
        if op == "avg":
            return whole * 3 if rank == 0 else whole * -1
        if op == "prod":
            return whole * 2 if rank == 0 else torch.full_like(whole, 0.5)
        away = -1.0 if op == "max" else 1.0
        wins = (torch.arange(whole.numel()) % 2).reshape(whole.shape) == rank
        return torch.where(wins, whole, whole + away)

    def integers(self, number: int, shape: tuple[int, ...], high: int) -> Any:
        from hyper_parallel import distribute_tensor

        drawn = super().integers(number, shape, high)
        return distribute_tensor(
            drawn, self.mesh, self.placements(number, len(shape), partial=False)
        )

    def move(self, tensor: Any, layout: int) -> Any:
        return tensor.redistribute(
            self.mesh, self.placements(layout, tensor.dim(), partial=True)
        ).clone()

    def weights_like(self, tensor: Any) -> Any:
        """Plain numbers as copies on every rank."""
        from hyper_parallel import Replicate, distribute_tensor

        return distribute_tensor(
            weights_like(tensor), self.mesh, [Replicate()] * self.mesh.ndim
        )


def weights_like(tensor: Any) -> torch.Tensor:
    """Fixed numbers in the shape of a tensor."""
    count = tensor.numel()
    return (torch.arange(count, dtype=torch.float64) % 7 - 2.5).reshape(
        tuple(tensor.shape)
    )


def whole(tensor: Any) -> Any:
    """The whole of a tensor, plain, outside the graph; None stays."""
    if tensor is None:
        return None
    found = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


# --- one run


class Run:
    """One run of a case, plain or on a mesh."""

    def __init__(self, case: Case, calls: Plain, weights: Callable[[Any], Any]) -> None:
        self._case, self._calls, self._weights = case, calls, weights
        self._namespace = calls.names()
        self.results: dict[str, Any] = {}
        self.second: list[bool] = []  # of plain torch: which gradients have gradients

    def run(self, second: Sequence[bool] | None = None) -> dict[str, Any]:
        """All values that are compared."""
        for line in self._case.lines:
            exec(line, self._namespace)  # noqa: S102 - a line of our own
        names = [
            line.partition(" = ")[0]
            for line in self._case.lines
            if line.startswith("v")
        ]
        tensors = {
            name: self._namespace[name]
            for name in names
            if " " not in name and name in self._namespace
        }
        for name, tensor in tensors.items():
            self.results[name] = whole(tensor)
        loss = self._total(
            [
                t
                for t in list(tensors.values())[-4:]
                if t.is_floating_point() and t.requires_grad
            ]
        )
        if loss is not None:
            ENDINGS[self._case.ending](self, loss, second)
        for i, seen in enumerate(self._calls.seen):
            for j, gradient in enumerate(seen):
                self.results[f"gradient {j} of hook {i}"] = whole(gradient)
        return self.results

    def _total(self, tensors: Sequence[Any]) -> Any:
        if not tensors:
            return None
        terms = [(t * self._weights(t)).sum() for t in tensors]
        total = sum(terms[1:], terms[0])
        if abs(float(total.detach())) > LARGEST:
            raise OverflowError("rounding alone would change the sine of the sum")
        return total.sin()

    def once(self, loss: Any, _: Any) -> None:
        """Gradients by autograd.grad."""
        self._note(
            "gradient", torch.autograd.grad(loss, self._calls.leaves, allow_unused=True)
        )

    def twice(self, loss: Any, second: Sequence[bool] | None) -> None:
        """Gradients of gradients."""
        firsts = torch.autograd.grad(
            loss, self._calls.leaves, create_graph=True, allow_unused=True
        )
        self._note("gradient", firsts)
        self.second = (
            [g is not None and g.requires_grad for g in firsts]
            if second is None
            else list(second)
        )
        penalty = self._total(
            [
                g
                for g, wanted in zip(firsts, self.second, strict=True)
                if wanted and g is not None
            ]
        )
        if penalty is not None and penalty.requires_grad:
            found = torch.autograd.grad(penalty, self._calls.leaves, allow_unused=True)
            self._note("gradient of gradients", found)

    def accumulated(self, loss: Any, _: Any) -> None:
        """Two backward passes, which add up."""
        loss.backward(retain_graph=True)
        loss.backward()
        self._note("accumulated gradient", [leaf.grad for leaf in self._calls.leaves])

    def stepped(self, loss: Any, _: Any) -> None:
        """A step of an optimizer, clipped."""
        loss.backward()
        used = [leaf for leaf in self._calls.leaves if leaf.grad is not None]
        if used:
            get_platform().clip_grad_norm_(used, 1.0)
            torch.optim.AdamW(
                used, lr=0.1, eps=0.01
            ).step()  # a smaller eps would enlarge rounding
            self._note("updated leaf", used)

    def _note(self, name: str, tensors: Sequence[Any]) -> None:
        for i, tensor in enumerate(tensors):
            self.results[f"{name} {i}"] = whole(tensor)


ENDINGS: dict[str, Callable[[Run, Any, Any], None]] = {
    "gradients": Run.once,
    "gradients of gradients": Run.twice,
    "accumulation": Run.accumulated,
    "an optimizer's step": Run.stepped,
}


def judge(case: Case) -> tuple[str, str]:
    """The outcome on this rank, and what there is to say about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _judge(case)


def _judge(case: Case) -> tuple[str, str]:
    plain = Run(case, Plain(), weights_like)
    try:
        expected = plain.run()
    except (
        RuntimeError,
        OverflowError,
    ):  # a graph that torch itself cannot go back through, a loss of mere rounding
        return "invalid", ""
    if not all(
        value is None or bool(value.isfinite().all()) for value in expected.values()
    ):
        return "invalid", ""
    try:
        calls = OnMesh(case.mesh)
        found = Run(case, calls, calls.weights_like).run(plain.second)
    except CommunicationError:
        raise
    except Exception as error:  # noqa: BLE001 - that is what is looked for
        told = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300] if str(error) else ''}"
        return (
            "refused" if any(words in str(error) for words in REFUSALS) else "crashed"
        ), told
    told = difference(found, expected)
    return ("wrong", told) if told else ("right", "")


def difference(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """What differs first; nothing if nothing does."""
    for name in dict.fromkeys([*expected, *found]):
        mine, true = found.get(name), expected.get(name)
        if mine is None and true is None:
            continue
        mine, true = (
            torch.zeros_like(other) if one is None else one
            for one, other in ((mine, true), (true, mine))
        )
        if mine.shape != true.shape:
            return f"{name} has the shape {tuple(mine.shape)}, expected {tuple(true.shape)}"
        scale = max(1.0, float(true.abs().max())) if true.numel() else 1.0
        if not torch.allclose(mine / scale, true / scale, **CLOSE, equal_nan=True):
            return f"{name} is {mine.flatten()[:4].tolist()}, expected {true.flatten()[:4].tolist()}"
    return ""


# --- many runs


def judge_on_rank(cases: Sequence[Case]) -> list[tuple[str, str]]:
    """The outcomes of some programs on this rank; ends where the ranks have lost each other."""
    torch.set_num_threads(1)
    found: list[tuple[str, str]] = []
    with get_platform().checked_order():
        for case in cases:
            try:
                found.append(judge(case))
            except CommunicationError as error:
                return [*found, ("disagreement", str(error).splitlines()[0][:300])]
            outcomes: list[Any] = [None] * len(
                torch.distributed.get_process_group_ranks(None)
            )
            torch.distributed.all_gather_object(outcomes, found[-1][0])
            if len(set(outcomes)) > 1:
                found[-1] = (
                    ("wrong", found[-1][1])
                    if "wrong" in outcomes
                    else ("disagreement", str(outcomes))
                )
    return found


def judge_all(cases: Sequence[Case]) -> list[tuple[str, str]]:
    """The outcomes of cases on one mesh."""
    found: list[tuple[str, str]] = []
    ranks = 1
    for size in cases[0].mesh if cases else ():
        ranks *= size
    while len(found) < len(cases):
        rest = cases[len(found) :]
        try:
            mine, *others = run_ranks(
                judge_on_rank, ranks, rest, timeout=20 + 2.0 * len(rest)
            )
        except RankError as error:
            if len(rest) == 1:
                found.append(("hung", str(error).splitlines()[0]))
            else:
                for case in rest:
                    found += judge_all([case])
            continue
        for number, outcomes in enumerate(itertools.zip_longest(mine, *others)):
            told = [one for one in outcomes if one is not None and one[0] in BAD]
            found.append(told[0] if told else mine[number])
    return found


def run_cases(
    seeds: Sequence[int], report: Callable[[str], None] | None = None
) -> dict[int, tuple[str, str]]:
    """The outcomes of the cases of these numbers."""
    found: dict[int, tuple[str, str]] = {}
    for start in range(0, len(seeds), BATCH):
        cases = [Case.draw(seed) for seed in seeds[start : start + BATCH]]
        for mesh in MESHES:
            group = [case for case in cases if case.mesh == mesh]
            for case, outcome in zip(group, judge_all(group), strict=True):
                found[case.seed] = outcome
                if report is not None and outcome[0] in BAD:
                    report(f"{case.seed}: {outcome}")
        if report is not None:
            report(
                f"{len(found)} of {len(seeds)}: {dict(Counter(kind for kind, _ in found.values()))}"
            )
    return found


def minimise(case: Case) -> tuple[Case, str]:
    """The shortest program found that fails in the same way, and how."""
    outcome, told = judge_all([case])[0]
    changed = True
    while changed:
        changed = False
        for at in reversed(range(len(case.lines))):
            shorter = Case(
                case.seed,
                case.lines[:at] + case.lines[at + 1 :],
                case.mesh,
                case.ending,
            )
            if not runs(shorter):
                continue
            found, why = judge_all([shorter])[0]
            if found == outcome:
                case, told, changed = shorter, why, True
    return case, told


def runs(case: Case) -> bool:
    """Whether plain torch runs a program."""
    try:
        Run(case, Plain(), weights_like).run()
    except Exception:  # noqa: BLE001 - a name may be missing now
        return False
    return bool(case.lines)


# --- the page and the command

TEXT = """# Random programs

<!-- Generated by tools/programs.py; `make programs` writes it anew. -->

Programs of 4 to 14 lines are drawn at random: operators, views, changes in place, hooks, redistribution, tensors that
are used again. Each is run by plain torch and on a mesh, {share} % of them on two by two ranks and the others on two,
in layouts drawn for them: sharded along any dim, evenly, unevenly and with nothing on some rank, copied, and with
sums, averages, maxima, minima and products pending. It ends with gradients, gradients of gradients, two accumulated
backward passes or a clipped step of AdamW. Every value and every gradient is compared in float64, and so is what hooks
see. A program is left out if plain torch cannot take its gradients, if it overflows, or if its loss is so large that
rounding decides its sine.

| outcome of {count:,} programs | |
| --- | --: |
{rows}

*Refused* is an error of this library that says what to do, on all ranks alike. The most frequent ones:

{refusals}

`make programs` repeats it (seeds {first} to {last}); CI runs some hundred others, and controls that must be found. A
program that fails is minimised: `python -m tools.programs --seed N` prints the few lines that are left of it.
"""


def page(found: dict[int, tuple[str, str]]) -> str:
    """The page."""
    counts = Counter(kind for kind, _ in found.values())
    valid = {seed: one for seed, one in found.items() if one[0] != "invalid"}
    names = ("right", "refused", "wrong", "crashed", "disagreement", "hung")
    titles = {
        "wrong": "**wrong value, no error**",
        "disagreement": "ranks disagree",
        "crashed": "raised another error",
    }
    rows = "\n".join(
        f"| {titles.get(name, name)} | {counts[name]:,} |" for name in names
    )
    reasons = Counter(
        _reason(told) for kind, told in found.values() if kind == "refused"
    )
    refusals = (
        "\n".join(
            f"- {count} times: `{reason}`" for reason, count in reasons.most_common(6)
        )
        or "- none"
    )
    share = round(
        100
        * sum(len(Case.draw(seed).mesh) > 1 for seed in list(found)[:500])
        / max(1, min(500, len(found)))
    )
    return TEXT.format(
        count=len(valid),
        rows=rows,
        refusals=refusals,
        first=min(found),
        last=max(found),
        share=share,
    )


def _reason(told: str) -> str:
    """The beginning of a message, without what differs from program to program."""
    return " ".join(told.split()[1:9]).rstrip(",;:") + " ..."


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200, help="how many programs")
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    parser.add_argument("--seed", type=int, help="one program, which is shown")
    parser.add_argument("--page", action="store_true", help="writes docs/programs.md")
    options = parser.parse_args(arguments)
    every = range(options.first, options.first + options.count)
    seeds = list(every) if options.seed is None else [options.seed]
    found = run_cases(seeds, lambda text: print(text, file=sys.stderr))
    bad = {seed: one for seed, one in found.items() if one[0] in BAD}
    for seed, (kind, told) in bad.items():
        case, told_shortest = minimise(Case.draw(seed))
        print(f"--- {kind}: {told_shortest or told}\n{case.source()}", flush=True)
    if options.page:
        PAGE.write_text(page(found))
    close_ranks()
    print(dict(Counter(kind for kind, _ in found.values())))
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
