# SPDX-License-Identifier: Apache-2.0
"""Calls every case of tests/rules on MindSpore and writes docs/mindspore-operators.md.

HYPER_PARALLEL_PLATFORM=mindspore python -m tools.mindspore_operators
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np
from rules import framework, operators, outcomes, test_dispatch

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.platform import get_platform
from hyper_parallel.testing import RankError, check_rule, close_ranks, run_ranks

HEAD = """# Operators on MindSpore

<!-- Generated: HYPER_PARALLEL_PLATFORM=mindspore python -m tools.mindspore_operators -->

The operator rules are written once, and so are their tests: {count} calls of operators, with PyTorch's names. On
MindSpore {version} a function is what the platform offers under that name (`mint`, `ops`, or a composition where those
have no kernel), a method is MindSpore's own. All of this is about the CPU.

| | calls |
| --- | --: |
| one operator with a rule: every choice of every axis is compared, and drawn layouts between ranks | {rule} |
| several operators, or one on whole tensors: drawn layouts are compared between ranks | {several} |
| left out: the operator, or one it is made of, has no CPU kernel for floats of 64 or 32 bits | {kernel} |
| left out: MindSpore has no operator or method of that name | {absent} |
| left out: MindSpore's takes other arguments or shapes than this call has | {arguments} |
| left out: MindSpore's ends the process | {deadly} |
| left out: it runs, but [MindSpore's own](mindspore.md#what-runs-and-what-does-not-yet) differs | {unheld} |

Of {values} that run MindSpore has no gradient on a CPU: their values alone are compared. `make test-mindspore` tries
all that run and compares what is left out with this page; what is left out here is left out of the tests.

## Operators without a CPU kernel

{kernels} operators of MindSpore that the calls or their gradients lead to: {names}.

## Operators that MindSpore does not have

{absences} functions, methods and signs of PyTorch that the calls name: {missing}.

## Each call

| call | how it goes | sizes and precision, or why not |
| --- | --- | --- |
"""


def found_on_a_rank(
    folder: str, deadly: set[tuple[str, str]]
) -> list[outcomes.Outcome]:
    """How every case goes; what is called next is noted in the folder."""
    note = Path(folder, "next")

    def how_it_goes(case: Any) -> outcomes.Outcome:
        safe = [
            sizes
            for sizes in outcomes.sizes_of(case)
            if (case.name, sizes) not in deadly
        ]
        return outcomes.outcome(
            case, safe, lambda sizes: note.write_text(json.dumps([case.name, sizes]))
        )

    return (
        [how_it_goes(case) for case in outcomes.EVERY]
        if get_platform().get_rank() == 0
        else []
    )


def find() -> list[outcomes.Outcome]:
    """How every case goes, begun again without what ended the process."""
    deadly: set[tuple[str, str]] = set()
    with tempfile.TemporaryDirectory() as folder:
        while True:
            try:
                return run_ranks(found_on_a_rank, 2, folder, deadly, timeout=1800)[0]
            except RankError:
                name, sizes = json.loads(Path(folder, "next").read_text())
                print(f"{name} ({sizes}) ends the process", flush=True)
                if (name, sizes) in deadly:
                    raise
                deadly.add((name, sizes))


def compared(found: list[outcomes.Outcome]) -> list[outcomes.Outcome]:
    """The outcomes, and of which cases the tests would fail."""
    wrong = checked(found)
    for number, case in enumerate(outcomes.EVERY):
        if (
            found[number].runs
            and number not in wrong
            and case.name in test_dispatch.ALL
        ):
            try:
                run_ranks(dispatch_on_rank, 4, case.name, found[number], timeout=120)
            except RankError as error:
                told = [
                    line
                    for line in str(error).splitlines()
                    if "Error" in line and "pool.RankError" not in line
                ]
                wrong[number] = (told or [str(error)])[-1]
                print(f"{case.name}: {wrong[number][:150]}", flush=True)
    for number, why in wrong.items():
        found[number] = outcomes.Outcome(
            outcomes.UNHELD, why=" ".join(why.split())[:90]
        )
    return found


def checked(found: list[outcomes.Outcome]) -> dict[int, str]:
    """The numbers of the cases whose rule does not hold by some choice of some axis, and what is wrong with them."""
    wrong: dict[int, str] = {}
    start = 0
    with tempfile.TemporaryDirectory() as folder:
        while True:
            try:
                run_ranks(checked_on_rank, 1, folder, found, start, timeout=1800)
                died = None
            except RankError as error:
                died = str(error).splitlines()[0]
            for line in Path(folder, "done").read_text().splitlines():
                start, why = json.loads(line)
                if why is not None:
                    wrong[start] = why
            if died is None:
                return {number: why for number, why in wrong.items() if why}
            wrong[start] = died[-60:]
            start += 1


def checked_on_rank(folder: str, found: list[outcomes.Outcome], start: int) -> None:
    """Notes before each case that nothing is known of it, and after it what is wrong."""
    for number, (case, one) in list(enumerate(zip(outcomes.EVERY, found, strict=True)))[
        start:
    ]:
        if one.kind != outcomes.RULE or not case.sizes:
            continue
        with Path(folder, "done").open("a") as notes:
            notes.write(json.dumps([number, None]) + "\n")
            notes.flush()
            why = ""
            try:
                check(case, one)
            except Exception as error:  # noqa: BLE001 - whatever it is, the test would fail
                why = f"{type(error).__name__}: {error}"
                print(f"{case.name}: {why[:150]}", flush=True)
            notes.write(json.dumps([number, why]) + "\n")


def check(case: Any, found: outcomes.Outcome) -> None:
    """As tests/rules/test_operators.py and test_pointwise.py do."""
    if case.name.endswith(", by name"):
        with mock.patch.object(outcomes, "known", return_value=found):
            operands = outcomes.drawn_within(case, np.random.default_rng(0))
        tolerance = None if found.dtype == "float64" else 1e-4
        assert (
            check_rule(
                case.call,
                *operands,
                meshes=[(2,)],
                tolerance=tolerance,
                gradients=found.gradients,
            )
            > 1
        )
    else:
        for sizes in found.sizes:
            operators.check(
                case, operators.SIZES[sizes], found.dtype, gradients=found.gradients
            )


def dispatch_on_rank(name: str, found: outcomes.Outcome) -> None:
    """In drawn layouts between ranks."""
    case = test_dispatch.ALL[name]
    with (
        mock.patch.object(outcomes, "known", return_value=found),
        mock.patch.object(test_dispatch, "known", return_value=found),
        framework.unruled_is_an_error(),
    ):
        for seed in test_dispatch.SEEDS:
            shape = test_dispatch.MESHES[seed % len(test_dispatch.MESHES)]
            for sizes in outcomes.taken(case):
                test_dispatch.compare(
                    case, sizes, Layout(shape, tuple("xy"[: len(shape)])), seed
                )


def main() -> None:
    import mindspore

    try:
        found = compared(find())
    finally:
        close_ranks()
    counts = Counter(one.kind for one in found)
    lacking = [one for one in found if one.kind == outcomes.KERNEL or not one.gradients]
    names = sorted({one.why for one in lacking if one.why.isidentifier()})
    missing = sorted(
        {one.why.removeprefix("torch.") for one in found if one.kind == outcomes.ABSENT}
    )
    head = HEAD.format(
        version=mindspore.__version__,
        count=len(found),
        kernels=len(names),
        names=", ".join(names),
        absences=len(missing),
        missing=", ".join(f"`{name}`" for name in missing),
        rule=counts[outcomes.RULE],
        several=counts[outcomes.SEVERAL],
        kernel=counts[outcomes.KERNEL],
        absent=counts[outcomes.ABSENT],
        values=sum(not one.gradients for one in found),
        arguments=counts[outcomes.ARGUMENTS],
        deadly=counts[outcomes.DEADLY],
        unheld=counts[outcomes.UNHELD],
    )
    rows = [
        outcomes.row(case, one) for case, one in zip(outcomes.EVERY, found, strict=True)
    ]
    outcomes.PAGE.write_text(head + "\n".join(rows) + "\n")
    print(dict(counts))


if __name__ == "__main__":
    main()
