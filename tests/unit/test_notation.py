# SPDX-License-Identifier: Apache-2.0
"""Rule texts are read and printed back, and a text that cannot be read is pointed at."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.core.shard.notation import (
    At,
    Merged,
    Named,
    Notation,
    NotationError,
    Rest,
    Tensor,
    from_equation,
    parse,
)

GOLDEN = [
    "... -> ...",
    "..., ..., ... -> ...",
    "... k, n k, +n -> ... n",
    "+m n, m k, k n -> m n",
    "b ci y! x!, co ci ky! kx!, +co -> b co y2! x2!",
    "... {dim} -> ... {dim=1}",
    "... {dim}! -> ... {dim=k}!, ... {dim=k}!",
    "... {dim0=a} {dim1=b} -> ... {dim0=b} {dim1=a}",
    "b (h g) s d!, b h t! d!, b h t! e -> b (h g) s e",
    "n c!, n ->",
    "-> n",
    "->",
    ", a, -> , b",
    "[... {dim}!] -> ... {dim}!",
    "... {dim}! -> [... {dim=part}!]",
    "[] -> n",
    "+[... n], n -> n",
    "... {dim=v}@, j -> ... {dim=j}",
    "(a) {dim=1}! -> a",
    "n (c! k) -> n c (k d!)",
]


@pytest.mark.parametrize("text", GOLDEN)
def test_a_text_is_printed_as_it_was_written(text):
    assert str(parse(text)) == text


def test_a_text_is_a_value():
    text = "... {dim=v}@, (h g),+j->[... d!]"
    assert parse(text) == Notation(
        (
            Tensor((Rest(), At("dim", "v", "@"))),
            Tensor((Merged(("h", "g")),)),
            Tensor((Named("j"),), added=True),
        ),
        (Tensor((Rest(), Named("d", "!")), listed=True),),
    )
    assert parse(text).marks == {"v": "@", "d": "!"}
    assert len({parse(text), parse(str(parse(text)))}) == 1


def test_spaces_do_not_matter():
    assert str(parse("  ...k , n k,+ n->...n\t")) == "... k, n k, +n -> ... n"


def test_an_unnamed_attribute_names_its_factor():
    assert parse("{dim} {dim=a} {dim=1} ->").operands[0].factors == ("{dim}", "a")


@pytest.mark.parametrize(
    ("text", "position", "problem"),
    [
        ("a b", 3, "expected a dim, ',' or '->', got the end"),
        ("a -> b -> c", 7, "expected a dim, ',' or the end, got '->'"),
        ("a b) -> a", 3, "expected a dim, ',' or '->', got '\\)'"),
        ("a -> +a", 5, "a result cannot have it"),
        ("a +b -> a", 2, "got '\\+'"),
        ("... a ... -> a", 6, "'...' only once"),
        ("() -> a", 1, "expected a factor, got '\\)'"),
        ("(a ...) -> a", 3, "expected a factor or '\\)', got '...'"),
        ("(a b@) -> a", 4, "expected a factor or '\\)', got '@'"),
        ("a@ (a! b) -> b", 5, "factor a is marked '@' before"),
        ("{} -> a", 1, "the name of an attribute, got '}'"),
        ("{dim -> a", 5, "expected '=' or '}', got '->'"),
        ("{dim=2} -> a", 5, "expected a factor or 1, got '2'"),
        ("{dim=a -> a", 7, "expected '}', got '->'"),
        ("[a, b] -> a", 2, "one pattern stands for all tensors of a list"),
        ("a! b@ -> a@", 10, "factor a is marked '!' before"),
        ("{dim}@ -> {dim}!", 15, "factor {dim} is marked '@' before"),
        ("... ! -> a", 4, "got '!'"),
        ("a -> b # c", 7, "got '#'"),
        ("a 2 -> a", 2, "got '2'"),
        ("a .. -> a", 2, "got '.'"),
    ],
)
def test_an_error_points_to_the_place(text, position, problem):
    with pytest.raises(NotationError, match=problem) as caught:
        parse(text)
    assert caught.value.position == position
    message = str(caught.value).splitlines()
    assert message[0].startswith(f"rule {text!r}, column {position + 1}: ")
    assert message[1:] == ["    " + text, "    " + " " * position + "^"]


@pytest.mark.parametrize(
    ("equation", "text"),
    [
        ("ij,jk->ik", "i j, j k -> i k"),
        ("ij, jk", "i j, j k -> i k"),
        ("ba", "b a -> a b"),
        ("ii", "i i ->"),
        ("...ij,...jk->...ik", "... i j, ... j k -> ... i k"),
        ("b...i , i", "b ... i, i -> ... b"),
        ("i,i->", "i, i ->"),
        ("iJ->Ji", "i J -> J i"),
    ],
)
def test_an_equation_has_a_factor_a_letter(equation, text):
    assert from_equation(equation) == text


@pytest.mark.parametrize(
    ("equation", "position"), [("ij,j2->i", 4), ("ij->i->j", 2), ("i..j->i", 1)]
)
def test_an_equation_that_cannot_be_read_is_pointed_at(equation, position):
    with pytest.raises(NotationError) as caught:
        from_equation(equation)
    assert caught.value.position == position


NAMES = st.sampled_from(["a", "b2", "_c", "dim"])
MARKS = st.sampled_from(["", "!"])
DIMS = st.one_of(
    st.builds(Named, NAMES, MARKS),
    st.lists(NAMES, min_size=1, max_size=3).flatmap(
        lambda names: st.builds(
            Merged,
            st.just(tuple(names)),
            st.sampled_from([(), tuple(dict.fromkeys(names))]),
        )
    ),
    st.builds(At, NAMES, st.sampled_from(["", "1", "a"]), MARKS),
)


@st.composite
def tensors(draw, added):
    dims = draw(st.lists(DIMS, max_size=3))
    if draw(st.booleans()):
        dims.insert(draw(st.integers(0, len(dims))), Rest())
    return Tensor(tuple(dims), draw(added), draw(st.booleans()))


SIDES = st.lists(tensors(st.booleans()), min_size=1, max_size=3).map(tuple)
RESULTS = st.lists(tensors(st.just(False)), min_size=1, max_size=3).map(tuple)


@given(st.builds(Notation, SIDES, RESULTS))
def test_whatever_is_printed_is_read_back(notation):
    assert parse(str(notation)) == notation


@given(st.text("ab.,->+!@(){}[]=1 ", max_size=12))
def test_any_text_is_read_or_refused(text):
    try:
        notation = parse(text)
    except NotationError:
        return
    assert parse(str(notation)) == notation
