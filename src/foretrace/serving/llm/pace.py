"""The seconds of one step, read from a `TimeTable`; compiled. `foretrace.serving.llm.step_times` states the rule."""

from __future__ import annotations

from foretrace.arrays import Float64
from foretrace.compiled import njit
from foretrace.serving.llm.step_times import TimeTable

MIDDLE, LOW, HIGH = 0, -1, 1  # which end of the range of a step


@njit()
def segment(grid: Float64, x: float) -> int:
    """Return the i with grid[i] <= x < grid[i + 1]; the first or the last segment where x lies outside."""
    low, high = 0, len(grid) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if grid[middle] <= x:
            low = middle
        else:
            high = middle
    return low


@njit()
def along(grid: Float64, values: Float64, x: float) -> float:
    """Return a time of a grid with one axis."""
    i = segment(grid, x)
    share = (x - grid[i]) / (grid[i + 1] - grid[i])
    found: float = values[i] + share * (values[i + 1] - values[i])
    return max(found, values[i + 1]) if share > 1.0 else found


@njit()
def within(rows: Float64, columns: Float64, values: Float64, i: int, j: int, x: float, y: float) -> float:
    """Return a time of a grid with two axes, whose segments i and j are known."""
    s = (x - rows[i]) / (rows[i + 1] - rows[i])
    t = (y - columns[j]) / (columns[j + 1] - columns[j])
    upper = values[i, j] + t * (values[i, j + 1] - values[i, j])
    lower = values[i + 1, j] + t * (values[i + 1, j + 1] - values[i + 1, j])
    found: float = upper + s * (lower - upper)
    if s > 1.0 or t > 1.0:
        s, t = min(s, 1.0), min(t, 1.0)
        upper = values[i, j] + t * (values[i, j + 1] - values[i, j])
        lower = values[i + 1, j] + t * (values[i + 1, j + 1] - values[i + 1, j])
        found = max(found, upper + s * (lower - upper))
    return found


@njit()
def across(rows: Float64, columns: Float64, values: Float64, x: float, y: float) -> float:
    """Return a time of a grid with two axes."""
    return within(rows, columns, values, segment(rows, x), segment(columns, y), x, y)


@njit()
def fixed_seconds(table: TimeTable, tokens: int, sequences: int, outputs: int) -> float:
    """Return seconds of a step, all but attention."""
    host = table.host_s + table.host_per_sequence_s * sequences
    return along(table.tokens, table.linear_s, tokens) + along(table.sequences, table.output_s, outputs) + host


@njit()
def in_range(table: TimeTable, seconds: float, beyond: float, end: int) -> float:
    """Return the middle, lower or upper end of the range of a step that lies outside of grids by the factor
    `beyond`.
    """
    if end == LOW:
        return seconds * table.low / max(beyond, 1.0)
    if end == HIGH:
        return seconds * table.high * max(beyond, 1.0)
    return seconds
