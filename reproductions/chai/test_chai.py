"""The text is divided by files, a few steps of training make a decoder, and bytes follow the formula."""

from __future__ import annotations

import pytest

pytest.importorskip("tokenizers", reason="words are made by tokenizers, which comes with transformers")

from reproductions.chai.trained import HEADS, texts, train


def test_texts_share_no_file_and_most_of_it_trains() -> None:
    found = texts()
    assert len(found["train"]) > 5 * len(found["judge"]) > 0 and len(found["choose"]) > 0
    assert found["judge"][:2000] not in found["train"]


@pytest.mark.slow("trains words and a decoder on the standard library")
def test_few_steps_train_a_decoder_of_eight_heads() -> None:
    made = train(steps=2, samples=2, length=32, tell=lambda said: None)
    assert made.model.config.num_attention_heads == HEADS
    assert made.choose.shape == made.judge.shape == (2, 32)
