"""Views with known numbers, those of the documented examples, and the names that must not break a page."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from foretrace.experiment.job import Assumed
from foretrace.graph.taskgraph import Change
from foretrace.report import headline
from foretrace.report.check import SimulateView
from foretrace.report.compare import CompareRowView, CompareView
from foretrace.report.show import BlameView, ShowView
from foretrace.report.views import BreakdownView, StepTimeView
from foretrace.report.whatif import StageView, WhatIfView
from foretrace.simulate.timeline import BlameRow
from foretrace.techniques.explain import PathPart

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
PARTS = BreakdownView(
    compute=0.112,
    exposed_copy=0.002,
    exposed_communication=0.0,
    launch_bound=0.002,
    data_loading=0.058,
    synchronisation=0.0,
    idle=0.0,
)
FASTER = BreakdownView(
    compute=0.088,
    exposed_copy=0.003,
    exposed_communication=0.0,
    launch_bound=0.001,
    data_loading=0.0,
    synchronisation=0.0,
    idle=0.0,
)
MEAN = BreakdownView(**{name: value * 173 / 174 for name, value in PARTS.parts().items()})
ROWS = (
    BlameRow(
        name=LOADER, layer="", kind="data", count=1, time_s=0.058,
        saved_if_removed_s=0.057, saved_if_10pct_faster_s=0.0058,
    ),
    BlameRow(
        name="volta_scudnn_128x64_relu_interior_nn_v1", layer="layer4.2.conv2", kind="kernel", count=3,
        time_s=0.0091, saved_if_removed_s=0.0088, saved_if_10pct_faster_s=0.0009,
    ),
    BlameRow(
        name="<script>document.title='owned'</script>[bold]", layer="a&b", kind="kernel", count=1 / 6,
        time_s=0.001, saved_if_removed_s=0.0, saved_if_10pct_faster_s=0.0,
    ),
)  # fmt: skip
STEP = StepTimeView(median=0.174, p10=0.164, p90=0.179, mean=0.173)


def make_show(**changes: Any) -> ShowView:
    view = ShowView(
        headline=headline.show(PARTS, ROWS, platform="cuda", ranks=1, every=True),
        bottleneck="data_loading",
        source="run.json.gz",
        device="Tesla V100",
        devices=("Tesla V100",),
        platform="cuda",
        ranks=1,
        rank_numbers=(0,),
        world_size=1,
        steps=6,
        step_numbers=(3, 4, 5, 6, 7, 8),
        step_source="ProfilerStep",
        tasks=30_572,
        step_time_s=STEP,
        breakdown_mean_s=MEAN,
        step_times_s=(0.164, 0.17, 0.174, 0.174, 0.176, 0.18),
        breakdown_s=PARTS,
        attributed_gpu_share=0.987,
        unexplained_gpu_share=0.005,
        holds_back=ROWS,
        not_of_step=(),
        advice=(),
        notes=("PyTorch, recorded 2021-06-08",),
        next="foretrace whatif run.json.gz --do prefetch-data",
    )
    return structs.replace(view, **changes)


def make_blame(**changes: Any) -> BlameView:
    view = BlameView(
        headline=headline.blame(ROWS, 0.174, 0.174, every=True),
        source="run.json.gz",
        platform="cuda",
        rank_numbers=(0,),
        steps=6,
        by="name",
        step_time_s=0.174,
        mean_step_s=0.174,
        rows=ROWS,
        next="",
    )
    return structs.replace(view, **changes)


def make_whatif(**changes: Any) -> WhatIfView:
    view = WhatIfView(
        headline=headline.whatif(0.174, 0.092, (0.084, 0.101)),
        source="run.json.gz",
        platform="cuda",
        name="prefetch-data + mixed-precision",
        techniques=("prefetch-data", "mixed-precision"),
        rank_numbers=(0,),
        steps=6,
        before_s=0.174,
        before_interval_s=(0.168, 0.18),
        after_s=0.092,
        saved_s=0.082,
        speedup=0.174 / 0.092,
        speedup_interval=(0.174 / 0.101, 0.174 / 0.084),
        interval_s=(0.084, 0.101),
        interval_level=0.8,
        interval_source="noise between 6 steps",
        energy_before=None,
        energy_after=None,
        breakdown_before_s=PARTS,
        breakdown_after_s=FASTER,
        critical_path_before=(
            PathPart(name="data loading", time_s=0.058),
            PathPart(name="kernels", time_s=0.116),
        ),
        critical_path_after=(PathPart(name="kernels", time_s=0.09), PathPart(name="host work", time_s=0.002)),
        critical_path_moved=True,
        stages=(
            StageView(
                name="prefetch-data", before_s=0.174, after_s=0.119, saved_s=0.055,
                why_not_more="copies slow down while workers run: assumed 1.0–1.6×",
            ),
            StageView(
                name="mixed-precision", before_s=0.119, after_s=0.092, saved_s=0.027,
                why_not_more="41 of 161 layers are bandwidth-bound",
            ),
        ),
        changes=(Change(technique="prefetch-data", what="hid 6 loader tasks", tasks=6),),
        assumptions=(
            Assumed(
                technique="mixed-precision", name="tensor-core ratio", value=2.5, low=2.0, high=3.1, unit="×",
                why="from the catalog", flag="ratio", step_at_low_s=0.097, step_at_high_s=0.088,
            ),
        ),
        why_not_more="",
        notes=("Not modelled: loss scaling.",),
        next="foretrace report run.json.gz --do prefetch-data",
    )  # fmt: skip
    return structs.replace(view, **changes)


def make_compare(**changes: Any) -> CompareView:
    moved = BreakdownView(**{name: FASTER.parts()[name] - value for name, value in PARTS.parts().items()})
    row = CompareRowView(
        name="layer4.2.conv2", phase="backward", before_s=0.0091, after_s=0.0046, change_s=-0.0045,
        critical_before_s=0.0088, critical_after_s=0.0046, matched=3, changed=3, replaced=1,
        only_before=0, only_after=0,
    )  # fmt: skip
    view = CompareView(
        headline=headline.compare(0.174, 0.092, moved, platform="cuda"),
        platform="cuda",
        before_source="a.json.gz",
        after_source="b.json.gz",
        before_steps=6,
        after_steps=6,
        before_s=0.174,
        after_s=0.092,
        change_s=-0.082,
        speedup=0.174 / 0.092,
        before_time_s=STEP,
        after_time_s=StepTimeView(median=0.092, p10=0.09, p90=0.095, mean=0.092),
        breakdown_before_s=PARTS,
        breakdown_after_s=FASTER,
        breakdown_change_s=moved,
        matched_share=0.97,
        rows=(row,),
        notes=(),
        next="",
    )
    return structs.replace(view, **changes)


def make_simulate(**changes: Any) -> SimulateView:
    view = SimulateView(
        headline=headline.simulate(0.174, 0.174, -0.0002),
        source="run.json.gz",
        rank_numbers=(0,),
        steps=6,
        tasks=30_572,
        edges=39_696,
        step_time_s=0.174,
        measured_s=0.174,
        error=0.0,
        structural_step_time_s=0.17397,
        structural_error=-0.0002,
        interval_s=(0.164, 0.179),
        interval_level=0.8,
        interval_source="noise between 6 steps",
        notes=(),
        next="",
    )
    return structs.replace(view, **changes)
