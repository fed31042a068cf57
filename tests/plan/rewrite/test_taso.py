"""TASO's rules: the reader on bytes made here, seams of splits, and every rule of the published file."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from foretrace.errors import ForetraceError
from foretrace.plan.rewrite import patterns, taso
from foretrace.plan.rewrite.catalog import imported
from foretrace.plan.rewrite.rules import GraphView, Maker
from foretrace.plan.rewrite.shapes import UnfitError
from foretrace.plan.rewrite.terms import Graph, Terms
from foretrace.plan.rewrite.verifier import difference, verify

pytest.importorskip("torch")


def varint(value: int) -> bytes:
    value %= 1 << 64
    found = b""
    while value >= 0x80:
        found += bytes([value & 0x7F | 0x80])
        value >>= 7
    return found + bytes([value])


def message(*fields: tuple[int, int | bytes]) -> bytes:
    found = b""
    for number, value in fields:
        if isinstance(value, int):
            found += varint(number << 3) + varint(value)
        else:
            found += varint(number << 3 | 2) + varint(len(value)) + value
    return found


def operator(kind: int, inputs: list[tuple[int, int]], **keys: int) -> bytes:
    parameters = [(3, message((1, int(key[1:])), (2, value))) for key, value in keys.items()]
    return message((1, kind), *((2, message((1, op), (2, out))) for op, out in inputs), *parameters)


def rule(source: list[bytes], target: list[bytes], outputs: list[tuple[int, int, int, int]]) -> bytes:
    maps = [(3, message((1, a), (2, b), (3, c), (4, d))) for a, b, c, d in outputs]
    return message((1, message(*((1, each) for each in source), *((2, each) for each in target), *maps)))


def merged(axis: int) -> bytes:
    """Two products of the same matrix: as one with the others side by side, then split."""
    source = [operator(18, [(-1, 0), (-2, 0)], k9=0), operator(18, [(-1, 0), (-3, 0)], k9=0)]
    target = [
        operator(12, [(-2, 0), (-3, 0)], k1=2, k10=2, k11=axis),
        operator(18, [(-1, 0), (0, 0)], k9=0),
        operator(13, [(1, 0)], k2=2, k11=1),
    ]
    return rule(source, target, [(0, 2, 0, 0), (1, 2, 0, 1)])


def test_the_reader_gives_what_was_written() -> None:
    (pattern,) = taso.parse(merged(1))
    assert pattern.source[0].kind == "matmul"
    assert [each.op for each in pattern.source[1].inputs] == [-1, -3]
    assert (pattern.target[0].axis, pattern.target[2].outputs) == (1, 2)
    assert pattern.outputs[1] == (taso.Ref(op=1, out=0), taso.Ref(op=2, out=1))


def test_a_rule_with_a_split_holds_and_is_found_in_a_graph() -> None:
    found = patterns.as_rule(taso.parse(merged(1))[0])
    assert verify(found).holds
    m = Maker(Terms(), random.Random(0))
    a, b, c = m.input(3, 4), m.input(4, 2), m.input(4, 5)
    graph = m.graph(m.terms.make("matmul", (a, b)), m.terms.make("matmul", (a, c)))
    places = list(found.places(GraphView(graph)))
    assert places
    for place in places:
        changed = graph.replaced(place.pairs)
        assert changed is not None
        assert [each.op for each in changed.outputs] == ["slice", "slice"]
        assert difference(graph, changed) < 1e-12


def test_a_rule_that_is_wrong_or_fits_nothing_is_not_usable() -> None:
    swapped = rule([operator(18, [(-1, 0), (-2, 0)], k9=0)], [operator(18, [(-2, 0), (-1, 0)], k9=0)], [(0, 0, 0, 0)])
    verdict = verify(patterns.as_rule(taso.parse(swapped)[0]))
    assert not verdict.holds
    assert "differs by" in verdict.why
    tall = rule(
        [operator(12, [(-1, 0), (-1, 0)], k1=2, k10=2, k11=0)], [operator(8, [(-1, 0)])], [(0, 0, 0, 0)]
    )  # a tensor and its double are never of one size
    assert not verify(patterns.as_rule(taso.parse(tall)[0])).holds
    uncut = rule([operator(8, [(-1, 0)])], [operator(13, [(-1, 0)], k2=2, k11=0)], [(0, 0, 0, 1)])
    assert not verify(patterns.as_rule(taso.parse(uncut)[0])).holds
    torn = rule(
        [operator(12, [(-1, 0), (-2, 0)], k1=2, k10=4, k11=0)], [operator(18, [(-1, 0), (-2, 0)], k9=0)], [(0, 0, 0, 0)]
    )
    with pytest.raises(UnfitError):
        patterns.as_rule(taso.parse(torn)[0])


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (merged(1)[:-7], "cut"),
        (rule([operator(77, [(-1, 0)])], [operator(8, [(-1, 0)])], [(0, 0, 0, 0)]), "operator type 77"),
        (rule([operator(18, [(-1, 0), (-2, 0)], k9=3)], [operator(8, [(-1, 0)])], [(0, 0, 0, 0)]), "activation 3"),
        (rule([operator(8, [(1, 0)])], [operator(8, [(-1, 0)])], [(0, 0, 0, 0)]), "reads a later one"),
        (rule([operator(8, [(-1, 0)])], [operator(8, [(-1, 0)])], [(0, 4, 0, 0)]), "output that it does not have"),
        (message((1, 5)), "a number stands"),
        (b"", "holds no rewrite rule"),
    ],
)
def test_what_is_no_file_of_rules_is_refused(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "rules.pb"
    path.write_bytes(data)
    with pytest.raises(ForetraceError, match=says) as error:
        taso.read(path)
    assert str(path) in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ForetraceError, match=r"nothing\.pb, which does not exist; give TASO's file"):
        taso.read(tmp_path / "nothing.pb")


def test_all_published_rules_are_read_and_held_against_numbers(shared_data: Path) -> None:
    path = shared_data / "substitutions" / "graph_subst.pb"
    if not path.exists():
        pytest.skip(f"TASO's rules are not at {path}")
    found = imported(path, examples=3)
    assert len(found.verdicts) == 133
    assert [each for each in found.verdicts if not each.holds] == []
    assert found.idle == tuple(f"taso-{i}" for i in (92, 93, 106, 107, 108, 109))


def test_two_groups_ask_for_equal_halves(shared_data: Path) -> None:
    """Rule 99 as published is wrong where both convolutions differ in their output channels."""
    path = shared_data / "substitutions" / "graph_subst.pb"
    if not path.exists():
        pytest.skip(f"TASO's rules are not at {path}")
    found = patterns.as_rule(taso.read(path)[99])
    for channels, places in (((2, 2), 1), ((1, 3), 0)):
        m = Maker(Terms(), random.Random(0))
        convs = [m.conv(m.input(1, 2, 5, 5), out=out, kernel=(3, 3), same=True, bias=False, act="") for out in channels]
        graph = Graph(m.terms, (m.terms.make("concat", convs, axis=1),))
        assert len(list(found.places(GraphView(graph)))) == places
