"""`foretrace check`: whether the graph of a recording stands up to being changed."""

from __future__ import annotations

import typer

from foretrace.cli import options


def check(
    source: options.Source,
    rank: options.Rank = None,
    all_ranks: options.AllRanks = False,
    steps: options.Steps = "",
    salvage: options.Salvage = False,
    as_json: options.AsJson = False,
) -> None:
    """Test whether the graph of a recording can be trusted.

    Checks its invariants, and what it predicts where the answer is known.

    Exit code 1 where a check fails. Example: foretrace check run/
    """
    run = options.scenario(source, rank=rank, steps=steps, salvage=salvage, as_recorded=True, together=all_ranks)
    report = run.check()
    failed = [finding for finding in report.findings if finding.verdict == "fail"]
    headline = (
        f"{len(failed)} of {len(report.findings)} checks failed: {', '.join(f.name for f in failed)}."
        if failed
        else f"All {len(report.findings)} checks of this graph hold."
    )
    if not report.gpu_whatifs:
        headline += " What-ifs on the device are refused."
    if as_json:
        from foretrace.report.jsonout import dumps
        from foretrace.report.listings import CheckView, FindingView

        findings = tuple(
            FindingView(name=f.name, verdict=str(f.verdict), value=f.value, limit=f.limit, says=f.says)
            for f in report.findings
        )
        print(dumps(CheckView(headline=headline, ok=report.ok, gpu_whatifs=report.gpu_whatifs, findings=findings)))
    else:
        print(headline + "\n")
        width = max(len(finding.name) for finding in report.findings)
        for finding in report.findings:
            print(f"  {finding.verdict:<5} {finding.name:<{width}}  {finding.says}")
    raise typer.Exit(0 if report.ok else 1)
