// Puts the page together: theme, tables, search, details. Names enter the document as text only.

const $ = (id) => document.getElementById(id);
const REASONS = {
  program: "the task before it on its thread ended", launch: "the host launched it", stream: "the task before it on its stream ended",
  event: "an event of another stream was reached", sync: "the device work that it waits for ended", thread: "the other thread handed over",
  queue: "a slot of the full launch queue became free", data: "its batch was ready", collective: "the last rank arrived",
  contention: "another stream let go of the device",
};

function make(tag, text, attributes = {}) {
  const node = document.createElement(tag);
  if (text) node.textContent = text;
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

function tables() {
  sorting("table.blame");
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const open = (tab) => {
    for (const other of tabs) {
      other.ariaSelected = String(other === tab);
      other.tabIndex = other === tab ? 0 : -1;
      $(other.getAttribute("aria-controls")).hidden = other !== tab;
    }
  };
  tabs.forEach((tab, i) => {
    tab.tabIndex = i ? -1 : 0;
    tab.addEventListener("click", () => open(tab));
    tab.addEventListener("keydown", (e) => {
      const to = tabs[i + { ArrowRight: 1, ArrowLeft: -1 }[e.key]];
      if (to) { open(to); to.focus(); }
    });
  });
}

// Facts of one task, as [bold, soft, …] lines shared by the tip and the details.
function facts(line, spot) {
  const { track, i } = spot, { meta } = line, kind = meta.kinds[track.kind[i]];
  const waits = line.waits.has(track.kind[i]), long = track.end[i] - (waits ? track.from[i] : track.start[i]);
  const layer = meta.layers[track.layer[i]], op = meta.names[track.op[i]], phase = meta.phases[track.phase[i]];
  const what = [waits ? "waiting" : kind];
  if (layer) what.push(layer);
  if (phase && phase !== "none") what.push(phase);
  if (op && op !== meta.names[track.name[i]]) what.push(op);
  if (track.nbytes[i] >= 0) what.push(bytesText(track.nbytes[i]));
  return { long, what: what.join(" · "), name: meta.names[track.name[i]], critical: Boolean(track.critical[i]), waits };
}

function startText(line, { track, i }) {
  let k = after(track.marks, 0, track.marks.length, track.start[i]) - 1;
  if (k < 0 || k >= track.steps.length) return `starts at ${time(track.start[i])}`;
  return `starts ${time(track.start[i] - track.marks[k])} into step ${track.steps[k]}`;
}

function tip(line) {
  const box = $("tip");
  line.onPoint = (spot, x, y) => {
    box.hidden = !spot;
    if (!spot) return;
    const f = facts(line, spot);
    box.replaceChildren(make("b", f.name), make("span", f.what), make("span", `${time(f.long)}, ${startText(line, spot)}${f.critical ? ", on the critical path" : ""}`));
    const stage = $("stage");
    box.style.left = Math.max(0, Math.min(x + 14, stage.clientWidth - box.offsetWidth - 4)) + "px";
    const below = y + 18;
    box.style.top = (below + box.offsetHeight > stage.clientHeight ? Math.max(y - box.offsetHeight - 12, 0) : below) + "px";
  };
}

function details(line) {
  const box = $("detail");
  line.onSelect = (spot) => {
    box.hidden = !spot;
    if (!spot) return;
    const f = facts(line, spot), { track, i } = spot, { meta } = line;
    const first = make("p"), second = make("p"), third = make("p");
    first.append(make("b", time(f.long)), ` · ${f.what} · ${startText(line, spot)}${f.critical ? " · on the critical path" : ""} · ${track.title}`);
    if (track.cause[i]) {
      const cause = i - track.cause[i];
      second.append("Could start when ", REASONS[meta.edges[track.why[i]]] ?? "its predecessor ended", ": ", make("b", line.title(track, cause)));
      const go = make("button", "Go there", { type: "button", class: "detail-go" });
      go.addEventListener("click", () => line.select({ track, i: cause }, true));
      second.append(go);
    } else second.append("Waited for nothing that the recording shows.");
    let count = 0, sum = 0;
    for (let k = 0; k < track.n; k++) if (track.name[k] === track.name[i] && track.kind[k] === track.kind[i]) { count++; sum += track.end[k] - track.start[k]; }
    const steps = Math.max(track.steps.length, 1);
    third.append(`Tasks of this name: ${count.toLocaleString("en-US")} in ${steps === 1 ? "the step" : steps + " steps"}, ${time(sum / steps)} per step.`);
    box.replaceChildren(make("h3", f.name), first, second, third);
  };
}

function search(line) {
  const input = $("search"), found = $("found"), { meta } = line;
  let hits = [], at = -1;
  const run = (text) => {
    const wanted = text.trim().toLowerCase();
    hits = [];
    at = -1;
    line.matches = null;
    if (wanted) {
      const has = (list) => Uint8Array.from(list, (entry) => (entry.toLowerCase().includes(wanted) ? 1 : 0));
      const names = has(meta.names), shorts = has(meta.shorts), layers = has(meta.layers);
      line.matches = (track, i) => names[track.name[i]] | shorts[track.name[i]] | layers[track.layer[i]] | names[track.op[i]];
      const track = line.tracks[0];
      for (let i = 0; i < track.n; i++) if (track.end[i] > track.start[i] && line.matches(track, i)) hits.push(i);
      hits.sort((a, b) => track.start[a] - track.start[b]);
    }
    let sum = 0;
    for (const i of hits) sum += line.tracks[0].end[i] - line.tracks[0].start[i];
    found.textContent = wanted ? (hits.length ? `${hits.length.toLocaleString("en-US")} · ${time(sum / Math.max(line.tracks[0].steps.length, 1))}/step` : "none") : "";
    $("prev").disabled = $("next").disabled = !hits.length;
    line.draw();
  };
  const go = (by) => {
    if (!hits.length) return;
    const track = line.tracks[0], origin = line.origin(track);
    if (at < 0) at = Math.max(hits.findIndex((i) => track.start[i] - origin >= line.t0), 0) - (by > 0 ? 1 : 0);
    at = (at + by + hits.length) % hits.length;
    line.select({ track, i: hits[at] }, true);
  };
  input.addEventListener("input", () => run(input.value));
  input.addEventListener("keydown", (e) => {
    if (e.key === "Enter") go(e.shiftKey ? -1 : 1);
    if (e.key === "Escape") { input.value = ""; run(""); }
  });
  $("prev").addEventListener("click", () => go(-1));
  $("next").addEventListener("click", () => go(1));
  addEventListener("keydown", (e) => {
    if (e.key !== "/" || /INPUT|SELECT|TEXTAREA/.test(document.activeElement.tagName)) return;
    e.preventDefault();
    input.focus();
    input.select();
  });
  for (const button of document.querySelectorAll(".find")) button.addEventListener("click", () => {
    input.value = button.dataset.find;
    run(input.value);
    $("stage").scrollIntoView({ block: "nearest" });
  });
}

function controls(line) {
  const step = $("step"), track = line.tracks[0], all = track.steps.length;
  step.append(make("option", all > 1 ? `all ${all}` : "the only one", { value: "-1" }));
  if (all > 1) track.steps.forEach((name, i) => step.append(make("option", `${name} (${time(track.marks[i + 1] - track.marks[i])})`, { value: String(i) })));
  const show = (i) => {
    step.value = String(i);
    line.align = Math.max(i, 0);
    line.focused = i >= 0;
    line.overview = null;
    if (i < 0) return line.view(...line.extent());
    const ends = line.shown.map((t) => (t.marks[i + 1] ?? t.marks.at(-1)) - line.origin(t)), long = Math.max(...ends);
    line.view(-0.012 * long, 1.012 * long);
  };
  step.addEventListener("change", () => show(Number(step.value)));
  line.onStep = (by) => show(Math.min(Math.max(Number(step.value) + by, 0), all - 1));
  if (line.tracks.length > 1) {
    const against = $("against");
    $("against-field").hidden = false;
    line.tracks.forEach((t, i) => against.append(make("option", i ? t.title : "nothing", { value: String(i) })));
    against.value = String(line.against);
    against.addEventListener("change", () => { line.against = Number(against.value); line.select(null); line.layout(); show(Number(step.value)); });
  }
  const middle = () => (line.t0 + line.t1) / 2;
  $("in").addEventListener("click", () => line.zoom(0.5, middle()));
  $("out").addEventListener("click", () => line.zoom(2, middle()));
  $("fit").addEventListener("click", () => show(Number(step.value)));
  const quiet = $("quiet"), word = () => {
    quiet.hidden = !line.hidden && !line.showQuiet;
    quiet.textContent = line.showQuiet ? "Hide quiet lanes" : `Show ${line.hidden} quiet ${line.hidden === 1 ? "lane" : "lanes"}`;
  };
  const toggle = () => { line.showQuiet = !line.showQuiet; line.layout(); word(); };
  line.onQuiet = toggle;
  quiet.addEventListener("click", toggle);
  word();
  const used = new Set();
  for (const t of line.tracks) for (let i = 0; i < t.n; i++) if (t.end[i] > t.start[i]) used.add(CLASSES[line.classOf[t.kind[i]]]);
  for (const name of ["compute", "comm", "copy", "data", "host", "call", "wait", "critical"]) {
    if (name === "critical" ? !line.tracks.some((t) => t.ranges.size > 1) : !used.has(name) && name !== "wait") continue;
    const item = make("li");
    item.append(make("i", "", { class: "sw k-" + SWATCH[name] }), WORDS[name]);
    $("colours").append(item);
  }
  for (const [name, words] of [["step", "step begins"], ["step-predicted", "step begins, predicted"], ["found", "found by the search"]]) {
    if (name === "step-predicted" && line.tracks.length < 2) continue;
    const item = make("li");
    item.append(make("i", "", { class: "sw k-" + name }), words);
    $("colours").append(item);
  }
  show(all > 1 ? Number(document.body.dataset.step ?? 0) : -1);
}

async function timeline() {
  const meta = JSON.parse($("meta").textContent), loading = $("loading");
  if (typeof DecompressionStream === "undefined") {
    loading.textContent = "This browser is too old for the timeline (it lacks DecompressionStream); everything else on this page works.";
    return;
  }
  const bytes = await inflate($("data").textContent);
  const line = new Timeline($("canvas"), meta, meta.tracks.map((track) => unpackTrack(track, meta.columns, bytes)));
  document.body.dataset.step = meta.focus;
  loading.remove();
  tip(line);
  details(line);
  search(line);
  controls(line);
  line.listen();
  line.canvas.timeline = line; // for the curious, in the console
  let width = line.width;
  new ResizeObserver(() => { if ($("stage").clientWidth !== width) { width = $("stage").clientWidth; line.layout(); } }).observe($("stage"));
  addEventListener("themechange", () => { line.theme(); line.draw(); });
  document.body.dataset.ready = "yes";
}

theme();
tables();
if ($("canvas")) timeline();
