"""The page in headless Chromium: it works from a file without a network, draws what was simulated, and obeys."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from foretrace.report.html import Page, render
from foretrace.report.tracks import Track
from foretrace.report.units import seconds
from tests.report.report_demo import NASTY, make_tracks
from tests.report.report_views import make_show, make_whatif

SIZE = {"width": 1280, "height": 900}
LINE = "document.getElementById('canvas').timeline"


class Opened:
    """A page with everything that it complained about or asked the network for; a browser has one tab for all."""

    def __init__(self, browser: Any, file: Path) -> None:
        if not browser.contexts:  # a process for each page takes longer than what the page does
            browser.new_context(viewport=SIZE).new_page()
        (self.page,) = browser.contexts[0].pages
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.listeners: dict[str, Callable[[Any], None]] = {
            "console": lambda message: self.complaints.append(message.text),
            "pageerror": lambda error: self.complaints.append(str(error)),
            "request": lambda request: self.requests.append(request.url),
        }
        for event, listener in self.listeners.items():
            self.page.on(event, listener)
        self.page.goto(file.as_uri())
        self.until("document.body.dataset.ready === 'yes'")

    def close(self) -> None:
        """Leave the tab as it was found."""
        for event, listener in self.listeners.items():
            self.page.remove_listener(event, listener)
        self.page.mouse.up()
        self.page.mouse.move(0, 0)
        self.page.emulate_media(media="null", color_scheme="null")
        self.page.set_viewport_size(SIZE)
        self.page.goto("about:blank")

    def until(self, condition: str) -> None:
        """Wait for a condition; the page's own policy forbids the browser's way of polling for one."""
        for _ in range(250):
            if self.page.evaluate(condition):
                return
            self.page.wait_for_timeout(20)
        raise AssertionError(f"never came true: {condition}")

    def follow(self, scheme: str) -> None:
        """Let the system prefer light or dark."""
        self.page.emulate_media(color_scheme=scheme)
        self.until(f"document.documentElement.dataset.theme === '{scheme}'")

    def window(self) -> tuple[float, float]:
        t0, t1 = self.page.evaluate(f"[{LINE}.t0, {LINE}.t1]")
        return t0, t1

    def row(self, lane: int, track: int = 0) -> dict[str, float]:
        """Place of a lane's row in the viewport."""
        box = self.page.locator("#canvas").bounding_box()
        y = self.page.evaluate(f"{LINE}.rows.find(r => r.lane === {lane} && r.track === {LINE}.tracks[{track}]).y")
        return {"x": box["x"], "y": box["y"] + y + 8, "width": box["width"]}


@pytest.fixture
def opened(browser: Any, page_file: Path) -> Iterator[Opened]:
    found = Opened(browser, page_file)
    yield found
    found.close()


def test_it_needs_nothing_but_itself(opened: Opened, page_file: Path) -> None:
    assert opened.requests == [page_file.as_uri()]
    assert opened.complaints == []
    first = opened.page.locator("h1").inner_text().replace("\N{NO-BREAK SPACE}", " ")
    assert first == "The GPU waits for data: 58.0 of every 174 ms are DataLoader work that nothing overlaps."


def test_the_timeline_is_what_was_simulated(opened: Opened, tracks: list[Track]) -> None:
    for k, track in enumerate(tracks):
        drawn = opened.page.evaluate(
            f"(() => {{ const t = {LINE}.tracks[{k}]; return {{ n: t.n, steps: t.steps, marks: t.marks,"
            " busy: t.dur.reduce((a, b) => a + b, 0), last: Math.max(...t.end),"
            " critical: t.critical.reduce((a, b) => a + b, 0) }; })()"
        )
        assert drawn["n"] == len(track.graph)
        assert drawn["busy"] == int((track.end - track.start).sum())
        assert drawn["last"] == int(track.end.max() - min(track.start.min(), track.marks[0]))
        assert drawn["marks"] == (track.marks - track.marks[0]).tolist()
        assert drawn["critical"] == len(track.critical)


def test_names_stay_text(opened: Opened) -> None:
    assert opened.page.title().startswith("The GPU waits for data")
    names = opened.page.locator("#blame-1 .find").evaluate_all("nodes => nodes.map(n => n.dataset.find)")
    assert "<script>document.title='owned'</script>[bold]" in names
    assert opened.page.evaluate(f"{LINE}.meta.names.includes({NASTY!r})")
    assert opened.page.locator("script").count() == 4


def test_the_canvas_shows_the_colours_of_their_meaning(opened: Opened) -> None:
    opened.until(f"{LINE}.ctx.getImageData(0, 0, {LINE}.canvas.width, {LINE}.canvas.height).data.some((v) => v > 0)")
    found = opened.page.evaluate(
        f"""(() => {{
          const line = {LINE}, ratio = devicePixelRatio, seen = {{}};
          const hex = (c) => '#' + [0, 1, 2].map((k) => c[k].toString(16).padStart(2, '0')).join('');
          for (const row of line.rows) {{
            const data = line.ctx.getImageData(0, Math.round((row.y + 10) * ratio), line.canvas.width, 1).data;
            for (let i = 0; i < data.length; i += 4) (seen[row.lane] ??= new Set()).add(hex(data.slice(i, i + 3)));
          }}
          return Object.values(line.meta.lanes).map((lane, i) => [lane.label, [line.c.compute, line.c.comm, line.c.data]
            .map((c) => seen[i]?.has(c) ?? false)]);
        }})()"""
    )
    assert dict(found) == {
        "main thread": [False, False, True],
        "autograd thread": [False, False, False],
        "stream 7": [True, False, False],
        "stream 20 (nccl)": [False, True, False],
    }


def test_figures_read_as_in_the_tables(opened: Opened) -> None:
    for value in (0, 4, 999, 999_600, 15_000, 58_100_000, 619_000_000, 1_210_000_000, 12_345_000_000_000, -5_800_000):
        assert opened.page.evaluate(f"{LINE}.text({value})") == seconds(value / 1e9)


def test_wheel_zooms_where_the_pointer_is(opened: Opened) -> None:
    row = opened.row(2)
    before = opened.window()
    opened.page.mouse.move(row["x"] + row["width"] * 0.6, row["y"])
    at = opened.page.evaluate(f"{LINE}.time({row['width'] * 0.6})")
    opened.page.mouse.wheel(0, -60)
    opened.until(f"{LINE}.t1 - {LINE}.t0 < {before[1] - before[0]} * 0.9")
    opened.page.wait_for_timeout(60)
    assert opened.page.evaluate(f"{LINE}.time({row['width'] * 0.6})") == pytest.approx(at, rel=1e-3)


def test_wheel_scrolls_the_page_when_everything_is_in_view(opened: Opened) -> None:
    opened.page.keyboard.press("Tab")
    opened.page.locator("#canvas").focus()
    opened.page.keyboard.press("0")
    row = opened.row(2)
    opened.page.mouse.move(row["x"] + row["width"] * 0.6, row["y"])
    opened.page.mouse.wheel(0, 120)
    opened.until("scrollY > 0")


def test_drag_pans(opened: Opened) -> None:
    row = opened.row(2)
    opened.page.locator("#in").click()
    t0, t1 = opened.window()
    opened.page.mouse.move(row["x"] + 700, row["y"])
    opened.page.mouse.down()
    opened.page.mouse.move(row["x"] + 500, row["y"], steps=4)
    opened.page.mouse.up()
    moved = opened.window()
    assert moved[0] > t0 and moved[1] - moved[0] == pytest.approx(t1 - t0)


def test_keys_zoom_pan_and_step(opened: Opened) -> None:
    page = opened.page
    page.locator("#canvas").focus()
    start = opened.window()
    page.keyboard.press("+")
    closer = opened.window()
    assert closer[1] - closer[0] < start[1] - start[0]
    page.keyboard.press("ArrowRight")
    assert opened.window()[0] > closer[0]
    page.keyboard.press("0")
    t0, t1 = opened.window()
    assert t1 - t0 == pytest.approx(page.evaluate(f"{LINE}.extent()[1] - {LINE}.extent()[0]"))
    assert page.locator("#step").input_value() == "2"
    page.keyboard.press("]")
    assert page.locator("#step").input_value() == "3"
    page.keyboard.press("[")
    page.keyboard.press("[")
    assert page.locator("#step").input_value() == "1"


def test_hover_and_click_tell_about_a_task(opened: Opened) -> None:
    page, row = opened.page, opened.row(0)
    page.mouse.move(row["x"] + 300, row["y"])
    page.wait_for_selector("#tip:not([hidden])")
    assert "DataLoader" in page.locator("#tip").inner_text()
    assert re.search(r"\d ms, starts .* into step 5, on the critical path", page.locator("#tip").inner_text())
    page.mouse.click(row["x"] + 300, row["y"])
    page.wait_for_selector("#detail:not([hidden])")
    assert "Could start when" in page.locator("#detail").inner_text()
    first = page.evaluate(f"{LINE}.selected.i")
    page.locator("#detail .detail-go").click()
    assert page.evaluate(f"{LINE}.selected.i") != first
    page.locator("#canvas").focus()
    page.keyboard.press("w")
    page.keyboard.press("j")
    page.keyboard.press("Escape")
    assert page.locator("#detail").is_hidden()
    assert opened.complaints == []


def test_search_finds_by_name_and_layer(opened: Opened, tracks: list[Track]) -> None:
    page, graph = opened.page, tracks[0].graph
    page.keyboard.press("/")
    page.keyboard.type("layer2.4")
    layers = [i for i, layer in enumerate(graph.layers) if "layer2.4" in layer]
    hits = sum(int((graph.layer == i).sum()) for i in layers)
    assert page.locator("#found").inner_text().startswith(f"{hits:,} · ")
    page.keyboard.press("Enter")
    selected = page.evaluate(f"{LINE}.meta.layers[{LINE}.selected.track.layer[{LINE}.selected.i]]")
    assert "layer2.4" in selected
    page.locator("#search").fill("no such task")
    assert page.locator("#found").inner_text() == "none"
    assert page.locator("#next").is_disabled()
    page.locator("#blame-1 .find").first.click()
    assert page.locator("#search").input_value().endswith("__next__")


def test_tables_sort_both_ways(opened: Opened) -> None:
    page = opened.page
    head = page.locator("#blame-1 thead th").nth(4)
    values = "nodes => nodes.map(n => Number(n.dataset.v))"
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    down = page.locator("#blame-1 tbody td:nth-child(5)").evaluate_all(values)
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    up = page.locator("#blame-1 tbody td:nth-child(5)").evaluate_all(values)
    assert down == sorted(down, reverse=True) == up[::-1]


def test_tabs_switch_tables(opened: Opened) -> None:
    page = opened.page
    assert page.locator("#blame-2").is_hidden()
    page.locator("#tab-2").click()
    assert page.locator("#blame-2").is_visible() and page.locator("#blame-1").is_hidden()
    page.keyboard.press("ArrowRight")
    assert page.locator("#blame-3").is_visible()


@pytest.mark.parametrize("width", [320, 420, 1280])
def test_labels_of_the_axis_stay_apart(opened: Opened, width: int) -> None:
    page = opened.page
    page.set_viewport_size({"width": width, "height": 800})
    opened.until(f"{LINE}.width === document.getElementById('stage').clientWidth")
    page.evaluate(
        f"""(() => {{ const line = {LINE}; line.labels = []; const fill = line.ctx.fillText.bind(line.ctx);
        line.ctx.fillText = (text, x, y) => {{
          if (y === 52) {{  // the height of the axis; further to the left, another picture begins
            if (line.labels.length && x <= line.labels.at(-1)[0]) line.labels.length = 0;
            line.labels.push([x, line.ctx.measureText(text).width / 2]); }}
          fill(text, x, y); }}; }})()"""
    )
    for action in ("+", "+", "+", "+", "ArrowRight", "+", "+", "+", "+", "+", "0"):
        page.evaluate(f"{LINE}.labels.length = 0")
        page.locator("#canvas").focus()
        page.keyboard.press(action)
        opened.until(f"{LINE}.pending === 0 && {LINE}.labels.length > 0")
        found = page.evaluate(f"{LINE}.labels")
        ends = [(x - half, x + half) for x, half in found]
        assert all(later[0] - earlier[1] >= 10 for earlier, later in itertools.pairwise(ends))
        assert len(found) >= 2 or width < 400


def test_double_click_shows_all(opened: Opened) -> None:
    opened.page.locator("#in").click()
    row = opened.row(2)
    opened.page.mouse.dblclick(row["x"] + 300, row["y"])
    t0, t1 = opened.window()
    assert t1 - t0 == pytest.approx(opened.page.evaluate(f"{LINE}.extent()[1] - {LINE}.extent()[0]"))


def test_every_colour_has_a_key(opened: Opened) -> None:
    named = set(opened.page.locator("#colours li").all_inner_texts())
    assert {
        "compute",
        "waiting",
        "critical path",
        "step begins",
        "step begins, predicted",
        "found by the search",
    } <= named


def test_it_prints_without_what_only_a_screen_needs(opened: Opened) -> None:
    page = opened.page
    page.emulate_media(media="print")
    for hidden in (".tools", ".hint", "#theme"):
        assert page.locator(hidden).first.is_hidden()
    shape = page.evaluate("(() => { const c = document.getElementById('canvas'); return c.clientWidth / c.clientHeight "
                          "/ (c.width / c.height); })()")  # fmt: skip
    assert shape == pytest.approx(1, rel=0.02)
    page.emulate_media(media="screen")


def test_predicted_runs_below_recorded(opened: Opened) -> None:
    page = opened.page
    rows = page.evaluate(f"{LINE}.rows.filter(r => r.lane === 2).map(r => [r.track.title, r.y])")
    assert [title for title, _ in rows] == ["recorded", "prefetch-data"] and rows[0][1] < rows[1][1]
    page.locator("#against").select_option("0")
    assert page.evaluate(f"{LINE}.rows.filter(r => r.lane === 2).length") == 1


def test_no_width_overflows(opened: Opened) -> None:
    page = opened.page
    for scheme in ("light", "dark"):
        opened.follow(scheme)
        for width in (320, 390, 768, 1024, 1920):
            page.set_viewport_size({"width": width, "height": 800})
            opened.until(f"{LINE}.width === document.getElementById('stage').clientWidth")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(opened: Opened, scheme: str) -> None:
    """WCAG AA for every colour that text is set in, against the background it stands on."""
    opened.follow(scheme)
    ratios = opened.page.evaluate(
        """(() => {
          const css = getComputedStyle(document.documentElement);
          const lum = (name) => {
            const hex = css.getPropertyValue('--' + name).trim().slice(1);
            const [r, g, b] = [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255)
              .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const pairs = [['ink', 'bg'], ['soft', 'bg'], ['faint', 'bg'], ['ink', 'surface'], ['soft', 'surface'],
            ['faint', 'surface'], ['accent', 'surface'], ['accent', 'bg'], ['accent', 'accent-soft'],
            ['on-dark', 'compute'], ['on-dark', 'data'], ['on-light', 'idle'], ['on-light', 'host']];
          return pairs.map(([a, b]) => {
            const [x, y] = [lum(a), lum(b)].sort((p, q) => q - p);
            return [a + ' on ' + b, (x + 0.05) / (y + 0.05)];
          });
        })()"""
    )
    limits = {"on-dark on compute": 3.0, "on-dark on data": 3.0}  # bold labels inside bars, said again in the legend
    assert {pair: round(r, 2) for pair, r in ratios if r < limits.get(pair, 4.5)} == {}


def test_the_theme_button_wins_over_the_system(opened: Opened) -> None:
    page = opened.page
    before = page.evaluate(f"{LINE}.c.surface")
    page.locator("#theme").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate(f"{LINE}.c.surface") != before


def test_without_script_the_answers_are_there(browser: Any, page_file: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(page_file.as_uri())
    assert page.locator("h1").is_visible()
    assert page.locator("#blame-1 tbody tr").first.is_visible()
    assert not page.locator("#stage").is_visible()
    context.close()


def test_many_tasks_stay_fluid_and_small(browser: Any, tmp_path: Path) -> None:
    big = make_tracks(steps=60, layers=50, kernel_us=150.0)
    assert len(big[0].graph) > 70_000
    file = tmp_path / "big.html"
    file.write_text(render(Page(show=make_show(), whatifs=[make_whatif()], tracks=big)), encoding="utf-8")
    assert file.stat().st_size < 3_000_000
    found = Opened(browser, file)
    walked = found.page.evaluate(f"(() => {{ {LINE}.view(...{LINE}.extent()); {LINE}.paint(); return {LINE}.t1; }})()")
    assert walked > 0 and found.complaints == []
    found.close()


def test_a_page_without_a_timeline_or_tables(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "short.html"
    file.write_text(render(Page(show=make_show())), encoding="utf-8")
    context = browser.new_context()
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(file.as_uri())
    assert page.locator("h1").is_visible() and page.locator("#canvas").count() == 0
    assert problems == []
    context.close()
