"""An accelerator that looks a model's products up: which products these are, and the design for settings measured."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isnan, sqrt

from foretrace.cost.accelerators.product_quantised import (
    LOOK_UP_DESIGNS,
    LayerProduct,
    LookUpDesign,
    MeasuredQuantisation,
    Surroundings,
    best_design,
)
from foretrace.cost.calls import Family
from foretrace.errors import ForetraceError
from foretrace.model.operator_graph import OperatorGraph, Role

_Z80 = 1.2816  # of a normal distribution, 80 % two-sided


@dataclass(frozen=True, kw_only=True)
class LookUpCandidate:
    """One setting with its design."""

    design: LookUpDesign
    loss: float  # of accuracy
    loss_interval: tuple[float, float]  # as if both accuracies were counted on different samples
    fits: bool  # loses no more than allowed


@dataclass(frozen=True, kw_only=True)
class LookUpPlan:
    """Every measured setting with the design that suits it best, most performance per area first."""

    layers: int
    share: float  # of the model's multiply-adds with weights that are in these layers
    candidates: tuple[LookUpCandidate, ...]
    choice: LookUpCandidate | None  # the first that loses no more than allowed
    points: int  # designs that were compared


def layer_products(graph: OperatorGraph) -> tuple[list[LayerProduct], float]:
    """Return products of one forward pass with weights, but the first, and their share of all multiply-adds with
    weights.

    Those of grouped convolutions are left out, and counted. Raises ForetraceError where nothing is left.
    """
    calls, batch = graph.calls, max(graph.batch, 1)
    found: Counter[tuple[int, int, int]] = Counter()
    all_, first = 0.0, True
    for i, node in enumerate(graph.nodes):
        weighted = any(
            graph.storages[graph.tensors[at].storage].role == Role.WEIGHT and len(graph.tensors[at].dims) > 1
            for at in node.inputs
        )
        if calls.family[i] not in (Family.GEMM, Family.CONV) or not weighted:
            continue
        b, m, n, k = (int(getattr(calls, name)[i]) for name in "bmnk")
        all_ += b * m * n * k
        if b == 1 and not first:
            found[max(m // batch, 1), k, n] += 1
        first = False
    products = [LayerProduct(rows=m, inputs=k, outputs=n, count=many) for (m, k, n), many in found.items()]
    if not products:
        raise ForetraceError(f"{graph.name} has no product with weights behind the first that could be looked up.")
    return products, sum(each.rows * each.inputs * each.outputs * each.count for each in products) * batch / all_


def setting(text: str, *, dense: float, samples: int, bits: int) -> MeasuredQuantisation:
    """Parse text as `9/16/l1=0.936`: length, prototypes, distance, accuracy. Raises ForetraceError."""
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})/(l1|l2)=(\d{1,9}\.?\d{0,9}|\.\d{1,9})", text.strip().lower())
    if found is None:
        raise ForetraceError(
            f"a setting must be LENGTH/PROTOTYPES/DISTANCE=ACCURACY as in 9/16/l1=0.936, got {text!r}."
        )
    return MeasuredQuantisation(
        length=int(found[1]), prototypes=int(found[2]), distance=found[3], bits=bits, dense=dense,
        accuracy=float(found[4]), samples=samples,
    )  # fmt: skip


def plan_look_ups(
    graph: OperatorGraph, settings: Sequence[MeasuredQuantisation], *, most_loss: float = inf,
    around: Surroundings | None = None,
) -> LookUpPlan:  # fmt: skip
    """Compare settings of product quantisation by performance per area over an array of multipliers.

    Args:
        graph: of one forward pass.
        settings: with the accuracy that was measured at each.
        most_loss: of accuracy that a choice may have.
        around: memory and batch.

    Raises:
        ForetraceError: a loss that is no number, a setting that is given twice, or no product.

    """
    if isnan(most_loss):
        raise ForetraceError(f"`most-loss=` must be a share of accuracy, got {most_loss}; give 0.01.")
    if len({replace(each, dense=1.0, accuracy=1.0) for each in settings}) < len(settings):
        raise ForetraceError("a setting is given twice; keep the accuracy that was measured last.")
    products, share = layer_products(graph)
    candidates = []
    for each in settings:
        variance = each.dense * (1 - each.dense) + each.accuracy * (1 - each.accuracy)
        spread = _Z80 * sqrt(variance / each.samples)
        candidates.append(
            LookUpCandidate(
                design=best_design(products, each, around=around), loss=each.loss,
                loss_interval=(each.loss - spread, each.loss + spread), fits=each.loss <= most_loss,
            )
        )  # fmt: skip
    candidates.sort(key=lambda each: -each.design.over_dense)
    return LookUpPlan(
        layers=sum(each.count for each in products), share=share, candidates=tuple(candidates),
        choice=next((each for each in candidates if each.fits), None), points=len(settings) * LOOK_UP_DESIGNS,
    )  # fmt: skip
