"""What every kind of rows must do."""

from __future__ import annotations

from foretrace.arrays import Float32
from foretrace.testing import RowsConformance
from foretrace.training.rows.rows import Rows, RowsInMemory


class TestInMemory(RowsConformance):
    def rows(self, values: Float32) -> Rows:
        return RowsInMemory(values)
