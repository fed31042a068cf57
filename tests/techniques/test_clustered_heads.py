"""clustered-heads: which attention of a recording of decoding it takes, and what it puts in its place."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import ClassVar

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5", reason="decoders are those of transformers")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from foretrace.cost.operators.bench import measure
from foretrace.cost.operators.calibration import Calibration
from foretrace.errors import NotApplicableError
from foretrace.flow import read
from foretrace.graph.taskgraph import TaskGraph
from foretrace.simulate.timeline import simulate
from foretrace.techniques.arguments import parse
from foretrace.techniques.base import Technique
from foretrace.techniques.compute.clustered_heads import ClusteredHeads, attentions
from foretrace.testing import TechniqueConformance, recorded
from foretrace.training.training import Training
from reproductions import ROOT

sys.path.append(str(ROOT / "examples"))

import decode

HEADS, LAYERS, CONTEXT = 8, 2, 40


def job(heads: int = HEADS, keys: int = HEADS) -> Training:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=heads,
        num_key_value_heads=keys, attn_implementation="sdpa",
    )  # fmt: skip
    return decode.decoding(LlamaForCausalLM(config), torch.randint(3, 64, (1, CONTEXT)))


@lru_cache
def graph(heads: int = HEADS, keys: int = HEADS) -> TaskGraph:
    return recorded(job(heads, keys), steps=3)


class TestClusteredHeads(TechniqueConformance):
    technique: ClassVar[Technique] = ClusteredHeads(clusters="2")

    make_training = staticmethod(job)
    test_composes = None  # type: ignore[assignment]  # scales a backward pass, which decoding has not: see below


def test_every_attention_is_found_with_the_copies_into_its_cache() -> None:
    found = attentions(graph())
    assert len(found) == LAYERS * graph().n_steps
    assert all(len(each.copies) == 2 and each.heads == HEADS and each.queries == 1 for each in found)
    assert all(CONTEXT <= each.tokens <= CONTEXT + 16 for each in found)


def test_a_recording_of_a_user_has_the_shapes() -> None:
    shown = read(ROOT / "tests" / "data" / "decode-heads.json.gz").graph().graph
    found = attentions(shown)
    assert len(found) == 4 * shown.n_steps and {each.heads for each in found} == {8}
    after = parse("clustered-heads clusters=2").predict(shown)
    assert simulate(after).step_time_s < simulate(shown).step_time_s
    with pytest.raises(NotApplicableError, match="clusters=4,2 is for 2 layers and the model has 4"):
        parse("clustered-heads clusters=4,2").predict(shown)


def test_only_layers_that_are_clustered_change() -> None:
    after = parse("clustered-heads clusters=8,2").predict(graph())
    changed = np.flatnonzero(after.dur != graph().dur)
    found = attentions(graph())
    assert len(changed) and set(changed.tolist()) <= {row for each in found[1::2] for row in each.rows}


def test_prediction_is_the_difference_of_both_forms_timed_alone() -> None:
    technique = ClusteredHeads(clusters="2")
    wanted = technique.wants(graph())
    assert len(wanted) >= 2 and not measure(wanted, target_s=0.002).failed
    seconds = {each.key: 2e-6 if each.concrete[2] == "2" else 1e-6 for each in wanted}
    known = Calibration(seconds=seconds).on(graph())
    after = technique.predict(known)
    of_one = [sum(int(after.dur[row] - known.dur[row]) for row in each.rows) for each in attentions(known)]
    assert of_one == pytest.approx([1000] * len(of_one), rel=0.15)
    assert set(technique.priors(known)) == {"measured"}


@pytest.mark.parametrize(
    ("text", "sizes", "says"),
    [
        ("clusters=9", (HEADS, HEADS), "more than 8 heads"),
        ("clusters=8", (HEADS, HEADS), "changes nothing"),
        ("clusters=2,2,2", (HEADS, HEADS), "3 layers"),
        ("clusters=none", (HEADS, HEADS), "whole numbers"),
        ("clusters=2 efficiency=-1", (HEADS, HEADS), "efficiency must be 0 or more"),
        ("clusters=2 more-us=-1", (HEADS, HEADS), "0 or more"),
        ("clusters=2 warm-up=100", (HEADS, HEADS), "within the warm-up"),
        ("clusters=1", (HEADS, 2), "grouped-query"),
        ("clusters=1", (1, 1), "one head"),
    ],
)
def test_refuses_in_one_sentence(text: str, sizes: tuple[int, int], says: str) -> None:
    with pytest.raises(NotApplicableError, match=says):
        parse(f"clustered-heads {text}").predict(graph(*sizes))


def test_composes_with_other_changes_of_decoding() -> None:
    heads, half = ClusteredHeads(clusters="2"), parse("scale op=aten::mm by=0.5")
    one, other = half.predict(heads.predict(graph())), heads.predict(half.predict(graph()))
    assert np.array_equal(one.dur, other.dur)
    assert {each.technique for each in one.changes} >= {"clustered-heads", "scale"}
