"""What `foretrace plan sync` answers: policies by which workers of unlike speed agree."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from foretrace.plan.sync import PlannedPolicy, SyncPlan, TriedPolicy
from foretrace.report.blocks import About, Block, Column, Line, listing
from foretrace.report.units import digits, share, things
from foretrace.report.views import Report, taken


class PlanSyncView(Report, frozen=True, kw_only=True):
    """`foretrace plan sync`: what policies do with workers of given speed."""

    command: str = "plan sync"
    source: str
    step_s: tuple[float, ...]
    commit_s: float
    policies: tuple[PlannedPolicy, ...]
    tried: tuple[TriedPolicy, ...]
    ledger: str
    row: str

    def shown(self, top: int) -> Iterator[Block]:
        yield About((f"{self.source} · {things(len(self.step_s), 'worker')}", f"a commit takes {self.commit_s:g} s"))
        yield listing(
            self.policies,
            ("policy", "policy"),
            ("over_synchronous", "steps per second", "ratio"),
            ("waited", "waiting", "share"),
            ("seconds", "run", "time"),
            ("interval_s", Column("range", "seconds", least=90)),
            (lambda each: each.sent_bytes or None, Column("sent per step", "bytes", least=80, unknown="not asked")),
            (lambda each: " ".join(map(str, each.commits[:8])), Column("commits", right=True, least=100)),
            top=top, noun="policy",
        )  # fmt: skip
        if self.tried:
            yield listing(
                self.tried,
                ("policy", "run in processes"),
                ("commit_s", "commit", "seconds"),
                ("foreseen_s", "foreseen", "seconds"),
                ("measured_s", "measured", "seconds"),
                ("error", "error", "signed"),
                (lambda each: " ".join(map(str, each.foreseen_commits[:8])), Column("commits", right=True)),
                (lambda each: " ".join(map(str, each.commits[:8])), Column("counted", right=True)),
            )
            same = [each.policy for each in self.tried if each.same_model]
            yield Line(", ".join(same) or "of none", label="model as foreseen, to the bit")
            yield f"row {self.row[:8]} added to {self.ledger}" if self.ledger else "no row was written"


def planned_sync(plan: SyncPlan, tried: Sequence[TriedPolicy] = (), ledger: str = "", row: str = "") -> PlanSyncView:
    """Return the answer, with what became of it in processes and where its rows went."""
    best, question = plan.ranked[0], plan.question
    base = next((each for each in plan.policies if each.policy == "synchronous"), None)
    wait = f", in which workers wait {share(base.waited)} of the time" if base else ""
    sentence = (
        f"{best.policy} does {digits(best.over_synchronous)} times the steps per second of synchronous training{wait}."
    )
    words = ["foretrace", "plan", "sync", question.source, "--policy", best.policy, "--run"]
    return taken(
        PlanSyncView, question, plan, headline=sentence, ledger=ledger, row=row,
        policies=tuple(plan.ranked), tried=tuple(tried), next="foretrace ledger" if tried else shlex.join(words),
    )  # fmt: skip
