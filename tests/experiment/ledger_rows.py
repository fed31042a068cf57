"""Rows of a ledger, made up."""

from __future__ import annotations

import uuid
from typing import Any

from msgspec import structs

from foretrace.experiment.ledger import Row


def make_row(**changes: Any) -> Row:
    row = Row(
        id=str(uuid.uuid4()),
        time="2026-01-02T03:04:05+00:00",
        techniques="mixed-precision",
        model="bert",
        size="tiny",
        threads=1,
        batches="ready",
        device="a processor",
        torch="2.9.0",
        python="3.11.9",
        foretrace="0.1.0",
        clock="cpu",
        before_s=0.1,
        after_s=0.072,
        measured=0.72,
        measured_low=0.71,
        measured_high=0.73,
        predicted=0.70,
        predicted_low=0.66,
        predicted_high=0.75,
        error=0.70 / 0.72 - 1,
        covered=True,
        verdict="covered",
        same=1.0,
        same_low=0.99,
        same_high=1.03,
        samples_before=16,
        samples_after=16,
        seed=0,
        machine={"cores": 2, "cpu": "a processor"},
        allocator={"MALLOC_TOP_PAD_": "1"},
        parameters={"mixed-precision": {"dtype": "bfloat16"}},
        arms={"rounds": 8, "losses_before": [1.0, None]},
        assumptions=({"name": "ratio", "value": 1.0},),
        residual=(),
        notes=("a note",),
    )
    return structs.replace(row, **changes)
