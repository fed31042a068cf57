"""The text is divided by files, a few steps of training make a decoder, and tables are what rows say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", minversion="5", reason="decoders are those of transformers")
pytest.importorskip("tokenizers", reason="words are made by tokenizers, which comes with transformers")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from foretrace.experiment.ledger import import_lines
from reproductions.chai import trained
from reproductions.chai.protocol import ROWS, SAVINGS, Held, claims, perplexities, perplexity_table, step_table
from reproductions.chai.published import alike, elbow, spreads
from reproductions.chai.trained import texts, train


def test_elbow_of_a_curve_that_bends_once() -> None:
    assert elbow(np.array([10.0, 6.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0])) == 3
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 8, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape)).eval()
    found = spreads(model, torch.randint(64, (2, 16)))
    same = alike(model, torch.randint(64, (2, 16)))
    assert same.shape == (2, 8) and (same <= 1 + 1e-6).all() and (same > 0.5).all(), (
        "untrained heads attend to all alike"
    )
    assert found.shape == (2, 8) and (found[:, -1] < 1e-6).all() and (found[:, 0] >= found[:, 3]).all()


def test_texts_share_no_file_and_most_of_it_trains() -> None:
    found = texts()
    for use in ("spare", "compare", "judge"):
        assert len(found["train"]) > 5 * len(found[use]) > 0
        assert found[use][:2000] not in found["train"]


def test_few_steps_train_a_decoder_whose_heads_are_clustered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = {use: text[:60_000] for use, text in texts().items()}
    monkeypatch.setattr(trained, "texts", lambda: short)
    made = train(8, steps=2, samples=2, length=80, weights=tmp_path, tell=lambda said: None)
    assert made.model.config.num_attention_heads == 8 and made.choose[0, 0] == made.judge[1, 0] == 0
    assert made.choose.shape == made.compare.shape == made.judge.shape == (2, 80)
    again = train(8, steps=2, samples=2, length=80, weights=tmp_path)
    assert all((a == b).all() for a, b in zip(made.model.parameters(), again.model.parameters(), strict=True))
    found = list(perplexities(made, tell=lambda said: None))
    assert [each.rule for each in found] == ["chosen"] * len(SAVINGS) + ["elbow"]
    assert all(saving <= each.saved < saving + 0.02 for each, saving in zip(found, SAVINGS, strict=False))


def test_what_is_claimed_was_compared_on_another_text() -> None:
    def held(heads: int, compared: float, known: float) -> Held:
        return Held(layers=4, heads=heads, rule="chosen", saved=0.203, counts=[heads // 2] * 8, compared=compared,
                    known=known, asked=9.0, random=[7.0, 12.0, 8.0], alike=[0.5, 0.25])  # fmt: skip

    steps = import_lines(ROWS.read_text(encoding="utf-8"), str(ROWS))
    found = [held(8, 4.0, 1.0), held(16, 2.0, 3.3), held(32, 3.0, 2.0)]
    said = claims(found, steps)
    assert "**not reached** with 4 x 16 heads: perplexity +3.3 % at −20.3 %" in said and "+7.0 to +12.0 %" in said
    assert "| reached with 4 x 8 heads" in claims(found[:1], steps)
    assert "| 4 x 16, chosen | −20.3 | +2.0 | +3.3 | +9.0 | +7.0, +12.0, +8.0 |" in perplexity_table(found)
    assert step_table(steps).count("/8 |") == len(steps) == 6
