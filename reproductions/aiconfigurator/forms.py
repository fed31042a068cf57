"""Forms of the law beside the one that is used, and what is chosen where a group has no part in the choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import numpy as np

from foretrace.serving.llm.operator_tables import OperatorTables
from foretrace.serving.llm.step_law import FORMATS, LawTimes
from reproductions.aiconfigurator.model import Aggregated, fitted
from reproductions.aiconfigurator.sample import Measured
from reproductions.aiconfigurator.study import Key, errors_of, medians

GOALS = (0.11, 0.29)  # of TPOT and TTFT: what their errors are divided by, so that both count


class Unconverted(LawTimes):
    """No kernels that convert what products multiply."""

    @property
    def kernels(self) -> int:
        """See `LawTimes`."""
        return _kernels(self, "bf16")


class ConvertedInFp4(LawTimes):
    """Such kernels in fp4, too, whose attention is in 16 bits."""

    @property
    def kernels(self) -> int:
        """See `LawTimes`."""
        if self.kept.name != "fp4":
            return _kernels(self, self.kept.name)
        return _kernels(self, "fp8") - self.model.layers * (3 if self.model.latent else 2)


FORMS: Mapping[str, type[LawTimes]] = {
    "converted in fp8": LawTimes, "converted in fp8 and fp4": ConvertedInFp4, "not converted": Unconverted,
}  # fmt: skip


def _kernels(of: LawTimes, name: str) -> int:
    return LawTimes(model=of.model, device=of.device, layout=of.layout, kept=FORMATS[name], law=of.law).kernels


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """How many groups each form was chosen for, and medians of TPOT and TTFT by these choices."""

    forms: Counter[str]
    medians: tuple[float, float]


def chosen(rows: Sequence[Measured], key: Key, tables: OperatorTables | None) -> Chosen:
    """Predict each group by the form that predicts all other groups best, each of them by a fit without both."""
    groups = {name: [one for one in rows if key(one) == name] for name in sorted({key(one) for one in rows}, key=str)}
    left = {}
    for form, kind in FORMS.items():
        make = partial(Aggregated, form=kind)
        for one, other in [*combinations(groups, 2), *((name, name) for name in groups)]:
            logs = fitted(make([each for each in rows if key(each) not in (one, other)]))
            for mine, beside in {(one, other), (other, one)}:
                left[form, mine, beside] = errors_of(groups[mine], logs, make, tables)
    choices, errors = Counter[str](), []
    for name in groups:

        def score(form: str, name: object = name) -> float:
            found = medians(np.concatenate([left[form, other, name] for other in groups if other != name]))
            return found[0] / GOALS[0] + found[1] / GOALS[1]

        best = min(FORMS, key=score)
        choices[best] += 1
        errors.append(left[best, name, name])
    return Chosen(forms=choices, medians=medians(np.concatenate(errors)))
