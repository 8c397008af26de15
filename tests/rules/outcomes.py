# SPDX-License-Identifier: Apache-2.0
"""What MindSpore has for each case on this device: found out by calling it, written to a page, and read from there.

PyTorch has all of them. On MindSpore the tests leave out what the page lists, and one of them compares the page with
what is so.
"""

import functools
import itertools
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rules.cases import CASES, COMPOSITES
from rules.cases.names import BY_NAME
from rules.framework import (
    IS_TORCH,
    AbsentOperatorError,
    gradients,
    weight_of,
    weighted,
)
from rules.operators import SIZES, draw, flat, in_precision, leaf, like

from hyper_parallel import DTensor, Replicate
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard._op_dispatch import _OP_DISPATCHER
from hyper_parallel.core.shard.decision import Way
from hyper_parallel.platform import get_platform

EVERY = [*CASES, *COMPOSITES, *(case for cases in BY_NAME.values() for case in cases)]
PAGE = Path(__file__).resolve().parents[2] / "docs/mindspore-operators.md"
RULE, SEVERAL = (
    "rule",
    "several",
)  # runs: as one operator whose rule is checked by every choice, or otherwise
KERNEL, ABSENT, ARGUMENTS = "no CPU kernel", "no operator", "other arguments"
DEADLY = "ends the process"
UNHELD = "does not hold"  # runs, but what the tests compare is not the same
LEFT_OUT = (KERNEL, ABSENT, ARGUMENTS, DEADLY, UNHELD)
VALUES_ALONE = ", values alone: "  # and why there is no gradient

_WITHOUT_KERNEL = re.compile(
    r"kernel (\w+) unregistered|Not found op (\w+) on device CPU|'?(\w+)'? (?:is not supported on this|only supports A)"
    r"|Kernel select failed(?:.*?(?:op |operator)\[(\w+)\])?|kernelmod for op (\w+) failed|supports? Ascend only"
    r"|Not implement exception|MindSpore has [^;]* on this device, not"
    r"|For primitive\[(\w+)\].*(?:must be a type of|supports types)",
    re.DOTALL,
)
_ABSENT = re.compile(
    r"'Tensor' object has no attribute '(\w+)'|unsupported operand type\(s\) for (\S+):|'(\w+)' object has no attribute"
)


class UnsetGradientError(Exception):
    """A kernel leaves memory as it was."""


@dataclass(frozen=True)
class Outcome:
    """How a case goes. ``sizes``: those that the plain call takes; ``dtype``: in which; ``why`` it does not go.

    ``gradients``: whether the framework has them, else ``why`` not.
    """

    kind: str
    sizes: tuple[str, ...] = ()
    dtype: str = "float64"
    why: str = ""
    gradients: bool = True

    @property
    def runs(self):
        return self.kind in (RULE, SEVERAL)


def sizes_of(case):
    return case.sizes or ("uneven",)


def outcome(case, sizes_to_try=None, before=lambda sizes: None):
    """Calls the case with plain tensors and for gradients, then with distributed ones. On a rank of two.

    ``before`` is told what is called next, in case that nothing comes after it.
    """
    trouble = None
    for with_gradients, dtype in itertools.product(
        (True, False), ("float64", "float32")
    ):
        taken = []
        for sizes in sizes_of(case) if sizes_to_try is None else sizes_to_try:
            before(sizes)
            try:
                arrays = in_precision(
                    draw(case, SIZES[sizes], np.random.default_rng(0)), dtype
                )
                once, again = (
                    _call(case, arrays, with_gradients),
                    _call(case, arrays, with_gradients),
                )
                if case.sizes and not all(map(_is_equal, once, again)):
                    raise UnsetGradientError("the gradient differs from call to call")
                taken.append(sizes)
            except Exception as error:
                trouble = trouble or error
        if taken:
            arrays = in_precision(
                draw(case, SIZES[taken[0]], np.random.default_rng(0)), dtype
            )
            kind = (
                RULE
                if case not in COMPOSITES and _is_one_operator(case, arrays)
                else SEVERAL
            )
            return Outcome(
                kind,
                tuple(taken),
                dtype,
                "" if with_gradients else _why(trouble).why,
                with_gradients,
            )
    return _why(trouble) if trouble is not None else Outcome(DEADLY)


def _call(case, arrays, with_gradients):
    """The gradients of a plain call, or its results."""

    def results(*leaves):
        found = case.call(*like(arrays, leaves))
        return flat(found if isinstance(found, (tuple, list)) else [found])

    def total(*leaves):
        found = results(*leaves)
        return weighted(found, [weight_of(y, np.random.default_rng(0)) for y in found])

    leaves = [leaf(array) for array in flat(arrays)]
    return gradients(total, leaves) if with_gradients else results(*leaves)


def _is_equal(one, other):
    if one is None or other is None:
        return one is other
    return np.array_equal(
        get_platform().tensor_to_numpy(one),
        get_platform().tensor_to_numpy(other),
        equal_nan=True,
    )


def _is_one_operator(case, arrays):
    seen = []
    _OP_DISPATCHER.forget()
    passed_on = (Way.OUT, Way.REDUCE_FIRST)

    def see(decision):
        if decision.way not in passed_on and decision.text != Way.COPY_BACK.value:
            seen.append(decision.text)

    _OP_DISPATCHER.on_decision = see
    layout = Layout((2,), ("x",))([Replicate()])
    tensors = [
        DTensor(leaf(array), layout.bind(array.ndim), array.shape)
        for array in flat(arrays)
    ]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case.call(*like(arrays, tensors))
    except Exception:
        return False
    finally:
        _OP_DISPATCHER.on_decision = None
    return len(seen) == 1 and seen[0] not in (
        "by itself",
        "by other operators",
        "on whole tensors",
    )


def _why(error):
    told = str(error)
    first = re.sub(
        r"-op\d+", "", " ".join(told.split("\n\n---", maxsplit=1)[0].split())
    )[:90].rstrip()
    if isinstance(error, AbsentOperatorError):
        return Outcome(ABSENT, why=told)
    if found := _ABSENT.search(told):
        return Outcome(
            ABSENT,
            why=f"torch.Tensor.{found[1]}"
            if found[1]
            else f"x {found[2]} y"
            if found[2]
            else found[3],
        )
    if found := _WITHOUT_KERNEL.search(told):
        return Outcome(
            KERNEL, why=next((name for name in found.groups() if name), first)
        )
    return Outcome(ARGUMENTS, why=first)


# --- the page


def row(case, found):
    """The line of a case on the page."""
    told = found.why
    if found.runs:
        told = f"{', '.join(found.sizes)} in {found.dtype}{'' if found.gradients else VALUES_ALONE + found.why}"
    return f"| {_escaped(case.name)} | {found.kind} | {_escaped(told)} |"


def _escaped(text):
    return text.replace("|", "\\|").replace("<", "&lt;")


@functools.cache
def listed():
    """The outcome of each case by its name, as the page has it."""
    found: dict[str, Outcome] = {}
    for line in PAGE.read_text().splitlines():
        cells = [
            cell.strip().replace("\\|", "|").replace("&lt;", "<")
            for cell in re.split(r"(?<!\\)\|", line)[1:-1]
        ]
        if len(cells) == 3 and cells[1] in (RULE, SEVERAL):
            ran, alone, why = cells[2].partition(VALUES_ALONE)
            sizes, dtype = ran.rsplit(" in ", 1)
            found[cells[0]] = Outcome(
                cells[1], tuple(sizes.split(", ")), dtype, why, not alone
            )
        elif len(cells) == 3 and cells[1] in LEFT_OUT:
            found[cells[0]] = Outcome(cells[1], why=cells[2])
    return found


@functools.cache
def known(name):
    """How the case of this name goes: on PyTorch in all its sizes, on MindSpore as the page says."""
    return Outcome(RULE, ("even", "uneven", "empty")) if IS_TORCH else listed()[name]


def that_run(cases, *kinds):
    """Those of the cases that this framework has, or that go in one of these ways."""
    return [
        case
        for case in cases
        if (known(case.name).kind in kinds if kinds else known(case.name).runs)
    ]


def taken(case):
    """The sizes of a case that this framework takes."""
    return [sizes for sizes in case.sizes if sizes in known(case.name).sizes]


def drawn(case, sizes, rng):
    """The operands of sizes of that name, in a precision in which this framework has the operator."""
    return in_precision(draw(case, SIZES[sizes], rng), known(case.name).dtype)


def drawn_within(case, rng):
    """The operands of a pointwise operator: between 0.1 and 0.9, where all of them are defined, or small integers."""
    made = in_precision(draw(case, SIZES["uneven"], rng), known(case.name).dtype)
    return [
        x + 1 if case.ints else (0.1 + 0.8 * (x - 0.3) / 1.7).astype(x.dtype)
        for x in made
    ]


def found_here(broken):
    """The rows of a table of controls whose case, with which they begin, is one operator here, for doubles."""
    return [
        line
        for line in broken
        if known(line[0]).kind == RULE and known(line[0]).dtype == "float64"
    ]
