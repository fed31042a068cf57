"""Answers about fleets: figures are those of the result, and the page in headless Chromium shows them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from foretrace.fleet import comparison, metrics, occupancy, synthetic
from foretrace.fleet.cluster import ClusterTree, parse_cluster
from foretrace.fleet.result import Cause, FleetResult, Segments
from foretrace.fleet.workload import SECOND, Workload
from foretrace.report import fleet, fleet_page, fleet_policies, fleet_questions
from foretrace.report.fleet import FleetRunView, energy
from foretrace.report.fleet_page import FleetPage
from foretrace.report.fleet_policies import FleetCompareView
from foretrace.report.terminal import Terminal, render
from foretrace.report.units import long_range, long_time
from reproductions.results import simple
from tests.fleet.fleet_demo import packed
from tests.report.test_page import Opened

NASTY = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def cluster() -> ClusterTree:
    return parse_cluster("2x2x8@v100")


@pytest.fixture(scope="module")
def result(cluster: ClusterTree) -> FleetResult:
    """A hundred jobs with two reasons to wait, communication, a model with a nasty name and time that was lost."""
    made = packed(5, 100, cluster)
    models = np.array(["resnet50", "bert", NASTY], object)[np.arange(100) % 3]
    waited = np.zeros((100, 4), np.int64)
    wait = made.start_ns - made.workload.submit_ns
    waited[:, Cause.FULL], waited[:, Cause.SCATTERED] = wait - wait // 4, wait // 4
    few = np.arange(100) < 4
    return replace(
        made, workload=made.workload.with_columns(model=models), waited_ns=waited, preempted=few.astype(np.int64),
        comm_ns=np.asarray(made.held_ns * 0.25, np.float64), dead_ns=made.held_ns * few // 10,
        facts={"rounds": 7, "matrix": [1, 2]},
    )  # fmt: skip


@pytest.fixture(scope="module")
def compared(result: FleetResult) -> comparison.PolicyComparison:
    rng = np.random.default_rng(0)
    samples: dict[str, dict[str, npt.NDArray[np.float64]]] = {"fifo": {}, "las": {}, "slow": {}}
    for name, value in comparison.figures(result).items():
        base = value * rng.normal(1, 0.01, 20)
        samples["fifo"][name] = base
        samples["las"][name] = base * rng.normal(1, 0.01, 20)
        samples["slow"][name] = base * 2
    return comparison.judge(samples, how="submissions moved by up to 60 s")


@pytest.fixture(scope="module")
def view(result: FleetResult, cluster: ClusterTree, compared: comparison.PolicyComparison) -> FleetRunView:
    return fleet.run(result, cluster, path="some/log.csv", repeated=compared, next_="foretrace fleet policies")


@pytest.fixture(scope="module")
def against(compared: comparison.PolicyComparison) -> FleetCompareView:
    return fleet_policies.compare(compared, path="some/log.csv", cluster="2x2x8@v100", gpus=32, jobs=100)


@pytest.fixture(scope="module")
def page(view: FleetRunView, result: FleetResult, cluster: ClusterTree, against: FleetCompareView) -> FleetPage:
    later = replace(result, end_ns=result.end_ns + 100 * SECOND, policy="slow")
    return FleetPage(view=view, result=result, cluster=cluster, others={"slow": later}, comparison=against)


def test_the_run_answers_with_the_figures_of_the_result(view: FleetRunView, result: FleetResult) -> None:
    said = json.loads(msgspec.json.encode(view))
    assert said["jobs"] == said["finished"] == 100 and said["command"] == "fleet run"
    jct, queue = result.jct_s, result.queue_s
    wanted = {
        "mean_jct_s": jct.mean(), "p50_jct_s": np.median(jct), "p90_jct_s": np.percentile(jct, 90),
        "p99_jct_s": np.percentile(jct, 99), "makespan_s": result.makespan_s, "mean_queue_s": queue.mean(),
        "utilisation": result.utilisation, "total_queue_s": queue.sum(),
    }  # fmt: skip
    assert {key: said[key] for key in wanted} == pytest.approx(wanted)
    assert sum(cause["share"] for cause in said["causes"]) == pytest.approx(1)
    assert [cause["cause"] for cause in said["causes"]] == ["full", "scattered"]
    assert said["over_time"]["edges_s"][-1] == pytest.approx(result.end_ns.max() / SECOND)
    assert np.average(said["over_time"]["utilisation"]) == pytest.approx(result.utilisation, rel=1e-3)
    assert said["usd_all"] == pytest.approx(said["bills"][0]["all_gpu_h"] * 3.06)
    assert said["facts"] == {"rounds": "7"}
    assert said["lost"]["gpu_h"] > 0 and said["useful_utilisation"] < said["utilisation"]
    assert {each["slot_gpus"] for each in said["slots"]} == {8, 16}
    assert said["intervals"]["mean_jct_s"]["low"] < said["mean_jct_s"] < said["intervals"]["mean_jct_s"]["high"]
    assert msgspec.convert(said, FleetRunView) == view


def test_the_sentence_says_what_holds_jobs_up(view: FleetRunView, result: FleetResult, cluster: ClusterTree) -> None:
    waits = 100 * result.queue_s.mean() / result.jct_s.mean()
    assert view.headline.startswith(f"Jobs take {long_time(result.jct_s.mean())} on average, {waits:.1f} % of it")
    assert "mostly because fewer GPUs are free than they ask for" in view.headline
    text = render(view, Terminal(width=200))
    assert text.index(view.headline) < text.index("completion") < text.index("waits because") < text.index("next: ")
    assert "95 % intervals from 20 runs: submissions moved by up to 60 s" in text
    never = np.zeros(100, bool)
    never[3] = True
    stuck = replace(result, end_ns=np.where(never, -1, result.end_ns), never=never)
    said = fleet.run(stuck, cluster)
    assert said.headline.endswith("; 1 can never run here.")
    assert any("means of completion, waiting and fairness cover the 99 of 100" in note for note in said.notes)
    assert any(note == "the cluster can never hold: 3." for note in said.notes) and said.unfinished_jobs["never"] == (
        "3",
    )
    nothing = fleet.run(replace(result, end_ns=np.full(100, -1)), cluster)
    assert nothing.headline.startswith("None of the 100 jobs finishes") and nothing.mean_jct_s is None
    assert "–" in render(nothing, Terminal(width=200))


def test_times_read_well() -> None:
    texts = {
        0.5: "500 ms",
        58.1: "58.1 s",
        119: "119 s",
        120: "2.00 min",
        7199: "120 min",
        7200: "2.00 h",
        259_200: "3.00 d",
    }
    assert {value: long_time(value) for value in texts} == texts
    assert long_time(None) == long_time(float("nan")) == "–"
    assert long_range(7000, 8000) == "1.94 – 2.22 h"
    assert [energy(kwh) for kwh in (0.106, 41.06, 6459.4, 370_000)] == ["0.106 kWh", "41.1 kWh", "6,459 kWh", "370 MWh"]


def test_the_comparison_says_what_is_noise(against: FleetCompareView) -> None:
    assert [row.policy for row in against.policies] == ["fifo", "las", "slow"]
    slow = against.policies[2].figures["mean_jct_s"]
    assert slow.ratio == pytest.approx(2) and slow.verdict == "worse"
    assert against.policies[1].figures["mean_jct_s"].verdict == "within noise"
    assert "within noise" in against.headline
    text = render(against, Terminal(width=200))
    assert "2.00×" in text and "from 20 runs of each: submissions moved by up to 60 s" in text
    best = next(each for each in against.best if each.figure == "mean_jct_s")
    assert {best.best, *best.tied} == {"fifo", "las"}
    assert msgspec.convert(json.loads(msgspec.json.encode(against)), FleetCompareView) == against


def test_one_run_of_each_policy_tells_no_noise(result: FleetResult) -> None:
    once = comparison.judge(
        {
            name: {key: [value * k] for key, value in comparison.figures(result).items()}
            for name, k in (("a", 1), ("b", 0.5))
        }
    )
    said = fleet_policies.compare(once, path="x", cluster="c", gpus=8, jobs=100)
    assert said.headline.startswith("Under b, jobs complete 2.00× faster than under a")
    assert "one run cannot tell that from noise" in said.headline and "--seeds 20" in said.notes[0]
    assert "noise unknown" in render(said, Terminal(width=200))


def test_slots_and_generators_answer(result: FleetResult, cluster: ClusterTree, tmp_path: Path) -> None:
    said = fleet_questions.slots(result, cluster, sizes=[8], at_s=100.0)
    assert (said.at_s, [each.level for each in said.slots]) == (100, ["node", "rack"])
    node = said.slots[0]
    assert (
        f"{node.free_now} jobs of 8 GPUs find room inside a" in said.headline or node.free_now != said.slots[1].free_now
    )
    assert "8 GPUs inside a node" in render(said, Terminal(width=200))
    made = synthetic.fit(result.workload)
    fitted = fleet_policies.fit(made, path="log.csv", stored=str(tmp_path / "g.json"))
    assert (fitted.jobs, fitted.tenants, fitted.profile_of) == (100, 3, "flat")
    assert "--load 1.2" in render(fitted, Terminal(width=200))


# --- the page -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page_file(page: FleetPage, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fleet") / "fleet.html"
    path.write_text(fleet_page.render(page), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser: Any, page_file: Path) -> Iterator[Opened]:
    found = Opened(browser, page_file)
    yield found
    found.close()


def test_the_page_is_the_same_for_the_same_result(page: FleetPage) -> None:
    text = fleet_page.render(page)
    assert text == fleet_page.render(page)
    assert NASTY not in text and "&lt;/script&gt;" not in text.split('id="meta"')[0].split("<style>")[0]


def test_it_needs_nothing_but_itself(opened: Opened, page_file: Path, view: FleetRunView) -> None:
    assert opened.requests == [page_file.as_uri()] and opened.complaints == []
    assert opened.page.locator("h1").inner_text().replace("\N{NO-BREAK SPACE}", " ") == view.headline
    assert opened.page.evaluate("typeof alert.called") == "undefined"


def test_the_picture_is_who_ran_where(opened: Opened, result: FleetResult) -> None:
    drawn = opened.page.evaluate(
        "(() => { const m = document.getElementById('gantt').gantt.meta;"
        " const [row, lane, wide, start, end] = m.pieces;"
        " const inside = row.every((r, k) => lane[k] >= 0 && lane[k] + wide[k] <= m.rows[r].gpus);"
        " const gpu = row.reduce((sum, _, k) => sum + wide[k] * (end[k] - start[k]), 0);"
        " return { gpu, rows: m.rows.map(r => r.name), inside, by: m.by }; })()"
    )
    assert drawn["gpu"] == pytest.approx(result.gpu_ns.sum() / SECOND)
    assert drawn["rows"] == ["node0", "node1", "node2", "node3"] and drawn["inside"] and drawn["by"] == "model"
    seen = opened.page.evaluate(
        "(() => { const g = document.getElementById('gantt').gantt, c = g.canvas, d = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data, s = new Set();"
        " const hex = (v) => v.toString(16).padStart(2, '0');"
        " for (let i = 0; i < d.length; i += 4) s.add('#' + [0, 1, 2].map(k => hex(d[i + k])).join(''));"
        " const css = getComputedStyle(document.documentElement);"
        " return g.meta.groups.map((_, i) => s.has(css.getPropertyValue('--g' + i).trim())); })()"
    )
    assert seen == [True] * 3


def test_hovering_tells(opened: Opened, result: FleetResult) -> None:
    page = opened.page
    assert result.segments is not None
    first = int(result.segments.devices_of(0)[0])
    at = page.evaluate(
        f"(() => {{ const g = document.getElementById('gantt').gantt, box = g.canvas.getBoundingClientRect();"
        f" return [box.x + g.x({(result.segments.start_ns[0] + result.segments.end_ns[0]) / 2 / SECOND}),"
        f" box.y + {first // 8} * (g.row + 2) + ({first % 8} + 0.5) * g.row / 8]; }})()"
    )
    page.mouse.move(*at)
    tip = page.locator("#gantt .tip")
    opened.until("!document.querySelector('#gantt .tip').hidden")
    job = int(result.segments.job[0])
    assert tip.inner_text().startswith(str(result.workload.job[job])) and "of them here" in tip.inner_text()
    for name, word in (("used", "in use: "), ("waiting", "GPUs are free"), ("cdf", "fifo: "), ("slots", "free: ")):
        box = page.locator(f"#{name}").bounding_box()
        page.locator(f"#{name}").scroll_into_view_if_needed()
        box = page.locator(f"#{name}").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        opened.until(f"!document.querySelector('#{name} .tip').hidden")
        assert word in page.locator(f"#{name} .tip").inner_text()
    assert opened.complaints == []


def test_the_wheel_looks_closer_and_a_drag_pans_everywhere(opened: Opened) -> None:
    page = opened.page
    page.locator("#used").scroll_into_view_if_needed()
    box = page.locator("#used").bounding_box()
    assert box is not None and page.locator("#whole").is_hidden()
    window = "(() => { const p = document.getElementById('waiting').plot; return [p.lo, p.hi]; })()"
    edges = page.evaluate("document.getElementById('gantt').gantt.meta.edges")
    wide = page.evaluate("document.getElementById('used').clientWidth") - 92 - 14
    page.mouse.move(box["x"] + 92 + wide / 4, box["y"] + 60)
    page.wait_for_timeout(400)  # a wheel that scrolls the page past a picture does not zoom it
    page.mouse.wheel(0, -60)
    opened.until(f"{window}[1] - {window}[0] < {0.9 * (edges[1] - edges[0])}")
    low, high = page.evaluate(window)
    assert low + (high - low) / 4 == pytest.approx(edges[0] + (edges[1] - edges[0]) / 4, rel=1e-3)
    assert page.evaluate(f"document.getElementById('gantt').gantt.x({low})") == pytest.approx(92)
    page.mouse.down()
    page.mouse.move(box["x"] + 92 + wide / 4 - 20, box["y"] + 60, steps=3)
    page.mouse.up()
    moved = page.evaluate(window)
    assert moved[0] - low == pytest.approx(20 / wide * (high - low), rel=0.01)
    assert moved[1] - moved[0] == pytest.approx(high - low)
    page.locator("#whole").click()
    assert page.evaluate(window) == edges
    page.locator("#waiting").focus()
    page.keyboard.press("+")
    assert page.evaluate(window)[0] > edges[0]
    page.locator("#waiting").dblclick()
    assert page.evaluate(window) == edges and opened.complaints == []


def test_curves_are_those_of_the_answer(opened: Opened, view: FleetRunView) -> None:
    drawn = opened.page.evaluate(
        "document.getElementById('waiting').plot.series.map(s => s.y.reduce((a, b) => a + b, 0))"
    )
    assert sum(drawn) == pytest.approx(sum(view.over_time.waiting_jobs), rel=1e-3)
    assert opened.page.locator("#causes li").all_inner_texts() == [each.why for each in view.causes]
    names = opened.page.evaluate("document.getElementById('cdf').plot.series.map(s => [s.name, s.y.at(-1), s.dash])")
    assert [each[:2] for each in names] == [["fifo", 1], ["slow", 1]] and names[0][2] != names[1][2]
    opened.page.locator("#slot").select_option(label="16 GPUs inside a rack")
    wanted = next(each for each in view.slots if (each.slot_gpus, each.level) == (16, "rack"))
    assert opened.page.evaluate("document.getElementById('slots').plot.series[1].y") == list(wanted.free)


def test_tables_sort_and_say_intervals(opened: Opened, against: FleetCompareView) -> None:
    page = opened.page
    head = page.locator("table.sorts thead th").nth(3)
    head.locator("button").click()
    values = page.locator("table.sorts tbody td:nth-child(4)").evaluate_all("n => n.map(x => Number(x.dataset.v))")
    assert head.get_attribute("aria-sort") == "descending" and values == sorted(values, reverse=True)
    rows = page.locator("table.policies tbody tr").all_inner_texts()
    assert len(rows) == 3 and "within noise" in rows[1] and re.search(r"\d – \d", rows[0])
    assert "2.00×" in rows[2]


def test_no_width_overflows(opened: Opened) -> None:
    for scheme in ("light", "dark"):
        opened.follow(scheme)
        for width in (320, 390, 768, 1024, 1920):
            opened.page.set_viewport_size({"width": width, "height": 800})
            opened.until(
                "document.getElementById('gantt').gantt.width === document.getElementById('gantt').clientWidth"
            )
            assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.complaints == []


def test_without_script_the_answers_are_there(browser: Any, page_file: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    shown = context.new_page()
    shown.goto(page_file.as_uri())
    assert shown.locator("h1").is_visible() and shown.locator("table.policies tbody tr").first.is_visible()
    assert shown.locator("text=waits because").is_visible() and not shown.locator("#gantt").is_visible()
    context.close()


def crowd(jobs: int, cluster: ClusterTree) -> FleetResult:
    """Many jobs, each on neighbouring GPUs for a while."""
    rng = np.random.default_rng(0)
    size = cluster.gpus
    each = np.int64(3600 * SECOND)
    per = size // 4  # jobs of four GPUs side by side, wave after wave
    start = (np.arange(jobs) // per) * each
    load = Workload.of(
        submit_s=start / SECOND, gpus=np.full(jobs, 4), work_s=np.full(jobs, 3600.0),
        tenant=rng.choice([f"team{i}" for i in range(30)], jobs),
    )  # fmt: skip
    first = (np.arange(jobs) % per) * 4
    column = np.arange(jobs)
    rows = Segments(
        job=column, start_ns=start, end_ns=start + each, gpus=load.gpus, level=np.ones(jobs, np.int64),
        dead_ns=np.zeros(jobs, np.int64), offset=np.arange(jobs + 1) * 4,
        devices=(first[:, None] + np.arange(4)).reshape(-1),
    )  # fmt: skip
    return simple(
        load, policy="waves", cluster=cluster.name, gpus=size, start_ns=start, end_ns=start + each, segments=rows
    )


def test_many_jobs_keep_the_page_small(browser: Any, tmp_path: Path) -> None:
    cluster = parse_cluster("6x12x8")
    big = crowd(82_000, cluster)
    file = tmp_path / "big.html"
    file.write_text(
        fleet_page.render(FleetPage(view=fleet.run(big, cluster), result=big, cluster=cluster)), encoding="utf-8"
    )
    assert file.stat().st_size < 600_000
    found = Opened(browser, file)
    drawn = found.page.evaluate(
        "(() => { const g = document.getElementById('gantt').gantt, m = g.meta;"
        " const used = g.bytes.reduce((a, b) => a + b, 0) / 255 / m.bins / m.rows.length;"
        " return [m.exact, m.rows.length, m.groups.at(-1), used]; })()"
    )
    assert drawn[:3] == [False, 6, "others"] and drawn[3] == pytest.approx(metrics.utilisation(big), abs=0.02)
    assert found.page.locator("#groups li").count() == 9 and found.complaints == []
    found.page.mouse.move(600, found.page.locator("#gantt").bounding_box()["y"] + 20)
    found.until("!document.querySelector('#gantt .tip').hidden")
    assert "rack0 at" in found.page.locator("#gantt .tip").inner_text()
    found.close()


def test_rows_stay_few_on_any_cluster() -> None:
    for text, word, rows in (
        ("4x8", "node", 4),
        ("200x8", "group of nodes", 48),
        ("10x30x8", "rack", 10),
        ("64", "cluster", 1),
    ):
        cluster = parse_cluster(text)
        what, names, first = occupancy._rows(cluster)
        assert (what, len(names), len(first)) == (word, rows, rows + 1) and first[-1] == cluster.gpus


def test_counts_alone_are_drawn_as_one_row(
    result: FleetResult, cluster: ClusterTree, browser: Any, tmp_path: Path
) -> None:
    counts = replace(result, segments=None)
    said = fleet.run(counts, cluster)
    assert said.slots == () and any("free slots are not known" in note for note in said.notes)
    file = tmp_path / "counts.html"
    file.write_text(fleet_page.render(FleetPage(view=said, result=counts, cluster=cluster)), encoding="utf-8")
    found = Opened(browser, file)
    assert found.page.evaluate("document.getElementById('gantt').gantt.meta.rows") == [{"name": "all GPUs", "gpus": 32}]
    assert found.page.locator("#slots").count() == 0 and found.complaints == []
    found.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_groups_differ_for_colour_blind_readers(scheme: str) -> None:
    """Distance in CIELAB after simulating missing red and green cones (Viénot, Brettel and Mollon 1999)."""
    css = files("foretrace.report").joinpath("assets", "fleet.css").read_text(encoding="utf-8")
    block = css.split(":root")[1 if scheme == "light" else 2]
    colours = [re.search(rf"--g{i}: #(\w+);", block) for i in range(9)]
    rgb = np.array([[int(each[1][k : k + 2], 16) / 255 for k in (0, 2, 4)] for each in colours if each is not None])
    assert len(rgb) == 9
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    blind = {
        "none": np.eye(3),
        "red": np.array([[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]]),
        "green": np.array([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]]),
    }
    white = np.array([0.95047, 1, 1.08883])
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    for matrix in blind.values():
        xyz = (linear @ matrix.T).clip(0) @ to_xyz.T / white
        f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
        lab = np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], 1)
        apart = min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(lab, 2))
        assert apart > 15  # a difference is seen from about 2
