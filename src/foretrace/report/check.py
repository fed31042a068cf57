"""`foretrace check` as an answer: whether the graph of a recording stands up to being changed."""

from __future__ import annotations

from collections.abc import Iterator

from foretrace.report.blocks import Block, Column, listing
from foretrace.report.views import Result, taken
from foretrace.simulate.check import CheckReport, Finding


class CheckView(Result, frozen=True, kw_only=True):
    """`foretrace check`: whether the graph of a recording stands up to being changed."""

    command: str = "check"
    headline: str
    ok: bool
    gpu_whatifs: bool
    findings: tuple[Finding, ...]

    def shown(self, top: int) -> Iterator[Block]:
        yield listing(self.findings, ("verdict", ""), ("name", ""), ("says", Column(wide=True)))


def check(report: CheckReport) -> CheckView:
    """Return what the checks of a graph came to."""
    failed = [finding.name for finding in report.findings if finding.verdict == "fail"]
    headline = (
        f"{len(failed)} of {len(report.findings)} checks failed: {', '.join(failed)}."
        if failed
        else f"All {len(report.findings)} checks of this graph hold."
    )
    if not report.gpu_whatifs:
        headline += " What-ifs on the device are refused."
    return taken(CheckView, report, headline=headline)
