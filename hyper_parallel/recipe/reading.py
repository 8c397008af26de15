# SPDX-License-Identifier: Apache-2.0
"""Reads a recipe: YAML and overrides, checked as a whole, so that every problem is told at once with its place.

recipe = read_recipe("demo.yaml", ["optimizer.lr=3e-4", "mesh.tp=2"], nproc=4)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from pydantic import ValidationError

from hyper_parallel.planning.roles import ROLES
from hyper_parallel.recipe.checks import combinations
from hyper_parallel.recipe.errors import Problem, RecipeError
from hyper_parallel.recipe.folders import read_folder
from hyper_parallel.recipe.schema import Recipe, keys

Keys = tuple[str | int, ...]  # from the whole to a value
Places = dict[Keys, str]


def read_recipe(
    path: str | Path, overrides: Sequence[str] = (), nproc: int | None = None
) -> Recipe:
    """The recipe in a file, with ``key=value`` overrides; a RecipeError names everything that is wrong with it.

    ``nproc``: the number of ranks, which the mesh must have; without it the mesh says how many there are.
    """
    path = Path(path)
    is_folder = (path / "config.json").is_file()
    values, places, problems = _of_folder(path) if is_folder else _parsed(path)
    for override in overrides:
        problems += _override(values, places, override)
    if is_folder:
        _find_from_here(values)
    recipe, wrong = _validated(values)
    problems += wrong
    if recipe is not None:
        recipe._path = path
        recipe, further = combinations(recipe, nproc)
        known = [problem.key for problem in problems]
        problems += [
            problem
            for problem in further
            if not any(_touches(problem.key, key) for key in known)
        ]
    if problems or recipe is None:
        placed = [_placed(problem, places) for problem in problems]
        raise RecipeError(path, sorted(placed, key=_order))
    return recipe


def _touches(key: str, other: str) -> bool:
    """Whether one key is the other or within it, so that what is wrong with one may follow from the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


# --- the file


def _of_folder(path: Path) -> tuple[dict[str, Any], Places, list[Problem]]:
    """The keys for a Hugging Face folder in the place of a recipe."""
    return read_folder(path), {}, []


def _find_from_here(values: dict[str, Any]) -> None:
    """Has the text be relative to the current directory: there is no recipe to which it could be."""
    data = values.get("data")
    if isinstance(data, dict) and isinstance(data.get("text"), str):
        data["text"] = str(Path(data["text"]).absolute())


def _parsed(path: Path) -> tuple[dict[str, Any], Places, list[Problem]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(
            path.name, [f.name for f in path.parent.glob("*.y*ml")], n=1, cutoff=0.5
        )
        told = f"there is no such file{f'; did you mean {path.with_name(near[0])}?' if near else ''}"
        raise RecipeError(path, [Problem("", told)]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(path, [Problem("", f"it cannot be read: {error}")]) from None
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        values = {} if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}" if mark is not None else ""
        told = f"invalid YAML: {getattr(error, 'problem', None) or error}"
        raise RecipeError(path, [Problem("", told, place)]) from None
    finally:
        loader.dispose()
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise RecipeError(
            path,
            [
                Problem(
                    "",
                    f"expected keys such as model: and data:, found a {kind}",
                    "line 1",
                )
            ],
        )
    places: Places = {}
    problems = [] if node is None else list(_walk(node, (), places))
    return values, places, problems


def _walk(node: Any, at: Keys, places: Places) -> Iterator[Problem]:
    """Notes the line of every key; a key that is there twice is a problem."""
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for name, value in node.value:
            line = name.start_mark.line + 1
            if name.value in seen:
                told = f"it is there twice, first in line {seen[name.value]}"
                yield Problem(
                    ".".join(map(str, (*at, name.value))), told, f"line {line}"
                )
            seen.setdefault(name.value, line)
            places[(*at, name.value)] = f"line {line}"
            yield from _walk(value, (*at, name.value), places)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            places[(*at, number)] = f"line {value.start_mark.line + 1}"
            yield from _walk(value, (*at, number), places)


def _override(values: dict[str, Any], places: Places, override: str) -> list[Problem]:
    """Puts a ``key=value`` into the values."""
    key, equals, text = override.partition("=")
    at = tuple(key.split("."))
    if not equals or not all(at):
        return [
            Problem(
                "",
                "an override is key=value, such as optimizer.lr=3e-4",
                f"override {override!r}",
            )
        ]
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:  # such as *.txt
        value = text
    inner = values
    for name in at[:-1]:
        if not isinstance(inner.get(name), dict):
            inner[name] = {}
        inner = inner[name]
    inner[at[-1]] = value
    for length in range(1, len(at) + 1):
        if length == len(at) or at[:length] not in places:
            places[at[:length]] = f"override {override!r}"
    return []


# --- the schema

# With these in the place of what is needed and missing, the rest can be checked.
_STAND_INS: dict[Any, Any] = {"steps": 10**9, "model": {}, "data": {}}


def _validated(values: Mapping[str, Any]) -> tuple[Recipe | None, list[Problem]]:
    """The recipe without what is wrong with it, if something is left, and what is wrong."""
    problems: list[Problem] = []
    left: Any = values
    for _ in range(3):  # what is wrong, what is missing without that, and the rest
        try:
            return Recipe.model_validate(left), problems
        except ValidationError as error:
            found = error.errors(include_url=False)
        known = {problem.key for problem in problems}
        problems += [
            made
            for one in found
            if (made := _problem(one["loc"], one)).key not in known
        ]
        for one in found:
            is_needed = one["type"] == "missing" and one["loc"][0] in _STAND_INS
            key = one["loc"][0]
            left = (
                {**left, key: _STAND_INS[key]}
                if is_needed
                else _without(left, one["loc"])
            )
    return None, problems


def _without(values: Any, at: Keys) -> Any:
    """The values without one of them; as far down as there are mappings."""
    if not isinstance(values, dict) or not at:
        return values
    inner = values.get(at[0])
    if len(at) > 1 and isinstance(inner, dict):
        return {**values, at[0]: _without(inner, at[1:])}
    return {name: value for name, value in values.items() if name != at[0]}


def _problem(at: Keys, found: Any) -> Problem:
    key = ".".join(map(str, at))
    if found["type"] == "extra_forbidden" and len(at) == 2 and at[0] == "mesh":
        known = f"the roles of its axes are {', '.join(ROLES)}"
        return Problem(key, f"a mesh has no axis {at[1]}; {known}")
    if found["type"] == "extra_forbidden":
        return Problem(key, f"there is no such key{_suggestion(key)}")
    if found["type"] == "missing":
        return Problem(key, "this key is needed")
    if found["type"] == "model_type":
        return Problem(key, f"expected keys of its own, got {found['input']!r}")
    if found["type"] == "literal_error":
        expected, given = found["ctx"]["expected"], str(found["input"])
        near = difflib.get_close_matches(
            given, expected.replace("'", "").replace(" or ", ", ").split(", "), n=1
        )
        return Problem(
            key,
            f"expected {expected}, got {given!r}{f'; did you mean {near[0]}?' if near else ''}",
        )
    message = found["msg"].removeprefix("Input should be ").partition(", unable to")[0]
    return Problem(key, f"expected {message}, got {found['input']!r}")


def _suggestion(key: str) -> str:
    """What may have been meant: a key beside it, or one of that name elsewhere."""
    known = [name for name, _, _ in keys()]
    above, _, own = key.rpartition(".")
    siblings = {
        name.removeprefix(f"{above}." if above else "").split(".")[0]
        for name in known
        if _is_in(name, above)
    }
    near = difflib.get_close_matches(own, siblings, n=1)
    if near:
        return f"; did you mean {f'{above}.' if above else ''}{near[0]}?"
    names = {name.rpartition(".")[2]: name for name in reversed(known)}
    near = difflib.get_close_matches(own, names, n=1, cutoff=0.75)
    if near:
        return f"; did you mean {names[near[0]]}?"
    return f"; there are {', '.join(sorted(siblings))}" if siblings else ""


def _is_in(name: str, above: str) -> bool:
    return not above or name.startswith(f"{above}.")


# --- places


def _placed(problem: Problem, places: Places) -> Problem:
    """The problem with the place of its key, or of what is around it."""
    if problem.place or not problem.key:
        return problem
    dotted = {".".join(map(str, at)): place for at, place in places.items()}
    key = problem.key
    while key and key not in dotted:
        key = key.rpartition(".")[0]
    return Problem(problem.key, problem.message, dotted.get(key, ""))


def _order(problem: Problem) -> tuple[bool, int, str]:
    number = problem.place.removeprefix("line ")
    return (not number.isdigit(), int(number) if number.isdigit() else 0, problem.key)
