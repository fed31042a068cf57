// The page about a fleet: theme, who ran where (canvas), curves over time and distributions (SVG), tables that sort.

const $ = (id) => document.getElementById(id);
const LEFT = 92, RIGHT = 14, SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "4 2", "12 4", "1 2", "6 2 1 2"];
const LONG = [["d", 86400, 259200], ["h", 3600, 7200], ["min", 60, 120]];

function longTime(s) {
  if (s && s % 86400 === 0) return s / 86400 + " d"; // round marks read as such
  if (s && s % 3600 === 0) return s / 3600 + " h";
  if (s && s % 60 === 0) return s / 60 + " min";
  if (s && Number.isInteger(s) && s < 60) return s + " s";
  for (const [name, size, first] of LONG) if (Math.abs(s) >= first) return figure(s / size) + " " + name;
  return time(s * 1e9);
}

function make(tag, text, attributes = {}) {
  const node = document.createElement(tag);
  if (text) node.textContent = text;
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

function shape(tag, attributes, parent) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  parent?.append(node);
  return node;
}

const colour = (i) => `var(--g${Math.min(i, 8)})`;

// Marks at round distances, at most `most` of them.
function ticks(low, high, most, steps) {
  const raw = (high - low) / most;
  let step = steps?.find((s) => s >= raw);
  if (!step) {
    const base = 10 ** Math.floor(Math.log10(raw || 1));
    step = base * [1, 2, 5, 10].find((k) => k * base >= raw * 0.999);
  }
  const found = [];
  for (let x = Math.ceil(low / step) * step; x <= high + step * 1e-6; x += step) found.push(x);
  return found;
}

// Labels of an axis: one unit throughout, no more digits than the step needs.
function axisText(marks) {
  const most = Math.abs(marks.at(-1) ?? 0), [name, size] = LONG.find(([, , first]) => most >= first) ?? ["s", 1];
  return (s) => `${Number((s / size).toPrecision(4)).toLocaleString("en-US")} ${name}`;
}

const plain = (v) => Number(v.toPrecision(4)).toLocaleString("en-US");
const ROUND = [1, 5, 15, 30, 60, 300, 900, 1800, 3600, 10800, 21600, 43200, 86400, 172800, 432000, 864000, 1728000, 4320000, 8640000, 31536000];

function tipOf(host) {
  const box = make("div", "", { class: "tip", hidden: "" });
  host.append(box);
  return {
    show(title, lines, x, y) {
      box.hidden = false;
      box.replaceChildren(make("b", title), document.createTextNode(lines.join("\n")));
      box.style.left = Math.max(0, Math.min(x + 14, host.clientWidth - box.offsetWidth - 4)) + "px";
      box.style.top = Math.max(0, y - box.offsetHeight - 10) + "px";
    },
    hide() { box.hidden = true; },
  };
}

function keyItem(list, text, fill, dash) {
  const item = make("li");
  if (dash === undefined) item.append(make("i", "", { class: "sw", style: `background:${fill}` }));
  else {
    const svg = shape("svg", { width: 26, height: 10, "aria-hidden": "true" });
    shape("line", { x1: 0, x2: 26, y1: 5, y2: 5, stroke: fill, "stroke-width": 2.2, "stroke-dasharray": dash }, svg);
    item.append(svg);
  }
  item.append(text);
  list.append(item);
}

// The stretch of time in view, shared by everything over time.
const shared = { window: null, drawn: [] };

function zooms(host, plot, whole) {
  shared.drawn.push(plot);
  const span = () => shared.window ?? whole, width = () => Math.max(host.clientWidth - RIGHT - plot.left(), 1);
  gestures(host, {
    extent: () => whole, span, width,
    at: (x) => { const [a, b] = span(); return a + Math.min(Math.max((x - plot.left()) / width(), 0), 1) * (b - a); },
    show: (a, b) => { if (b - a > (whole[1] - whole[0]) * 1e-5) look(a <= whole[0] && b >= whole[1] ? null : [a, b]); },
  });
}

function look(window) {
  shared.window = window;
  for (const each of shared.drawn) each.draw();
  $("whole").hidden = !window;
}

// One plot of curves. series: {name, y, fill, dash}; x: edges for kind "step" and "stack", own points for "line".
class Plot {
  constructor(host, options) {
    Object.assign(this, { height: 150, yText: figure, yAxis: plain, xText: longTime, log: false, most: null }, options, { host });
    this.svg = shape("svg", { height: this.height }, host);
    this.tip = tipOf(host);
    host.plot = this; // for the curious, in the console
    if (this.kind !== "line") zooms(host, this, [this.x[0], this.x.at(-1)]);
    this.draw();
    new ResizeObserver(() => { if (host.clientWidth !== this.width) this.draw(); }).observe(host);
    host.addEventListener("pointermove", (e) => this.point(e));
    host.addEventListener("pointerleave", () => { this.tip.hide(); this.cursor?.remove(); });
  }

  left() { return this.width < 560 ? 52 : LEFT; }
  toX(x) { const v = this.log ? Math.log10(x) : x; return this.left() + (v - this.lo) / (this.hi - this.lo || 1) * (this.width - this.left() - RIGHT); }
  toY(y) { return this.height - 22 - y / this.top * (this.height - 32); }

  draw() {
    const { svg, host, series, kind } = this;
    this.width = host.clientWidth;
    svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    svg.replaceChildren();
    const xs = kind === "line" ? series.flatMap((s) => s.x) : this.x;
    const positive = this.log ? xs.filter((x) => x > 0) : xs;
    let lo = Infinity, hi = -Infinity;
    for (const x of positive) { lo = Math.min(lo, x); hi = Math.max(hi, x); }
    if (kind !== "line" && shared.window) [lo, hi] = shared.window;
    this.lo = this.log ? Math.log10(lo) : lo;
    this.hi = this.log ? Math.log10(hi) : hi;
    let top = this.most ?? 0;
    if (this.most === null) for (let i = 0; i < this.x.length - 1; i++) {
      if (this.x[i + 1] <= lo || this.x[i] >= hi) continue; // not in view
      if (kind === "stack") top = Math.max(top, series.reduce((sum, s) => sum + s.y[i], 0));
      else for (const s of series) top = Math.max(top, s.y[i]);
    }
    this.top = top || 1;
    for (const y of ticks(0, this.top, 4, this.yMarks)) {
      shape("line", { class: "axis", x1: this.left(), x2: this.width - RIGHT, y1: this.toY(y), y2: this.toY(y) }, svg);
      shape("text", { x: this.left() - 8, y: this.toY(y) + 4, "text-anchor": "end" }, svg).textContent = this.yAxis(y);
    }
    const room = Math.max(2, Math.floor((this.width - this.left()) / 90));
    const marks = this.log ? ROUND.filter((x) => x >= lo && x <= hi).filter((_, i, all) => i % Math.ceil(all.length / room) === 0) : ticks(lo, hi, room, ROUND);
    const label = this.log ? this.xText : axisText(marks);
    for (const x of marks) {
      shape("line", { class: "axis", x1: this.toX(x), x2: this.toX(x), y1: 10, y2: this.height - 22 }, svg);
      shape("text", { x: this.toX(x), y: this.height - 7, "text-anchor": "middle" }, svg).textContent = label(x);
    }
    if (kind === "line") {
      for (const s of series) {
        let d = "";
        s.x.forEach((x, i) => { if (!this.log || x > 0) d += (d ? `H${this.toX(x).toFixed(1)}V` : `M${this.toX(x).toFixed(1)},`) + this.toY(s.y[i]).toFixed(1); });
        shape("path", { class: "line", d, stroke: s.fill, "stroke-dasharray": s.dash ?? "" }, svg);
      }
      return;
    }
    const base = new Float64Array(this.x.length - 1), cut = `cut-${this.host.id}`;
    const clip = shape("clipPath", { id: cut }, shape("defs", {}, svg));
    shape("rect", { x: this.left(), y: 0, width: Math.max(this.width - this.left() - RIGHT, 0), height: this.height }, clip);
    const inside = shape("g", { "clip-path": `url(#${cut})` }, svg);
    for (const s of series) {
      let up = "", down = "";
      s.y.forEach((y, i) => {
        const a = this.toX(this.x[i]).toFixed(1), b = this.toX(this.x[i + 1]).toFixed(1);
        const from = kind === "stack" ? base[i] : 0;
        up += `${up ? "L" : "M"}${a},${this.toY(from + y).toFixed(1)}H${b}`;
        down = `L${b},${this.toY(from).toFixed(1)}H${a}` + down;
        if (kind === "stack") base[i] += y;
      });
      if (s.open) shape("path", { class: "line", d: up, stroke: s.fill, "stroke-dasharray": s.dash ?? "" }, inside);
      else shape("path", { d: up + down + "Z", fill: s.fill, "fill-opacity": s.opacity ?? 1 }, inside);
    }
  }

  point(e) {
    const box = this.host.getBoundingClientRect(), px = e.clientX - box.left, py = e.clientY - box.top;
    const part = (px - this.left()) / (this.width - this.left() - RIGHT);
    if (part < 0 || part > 1) { this.tip.hide(); this.cursor?.remove(); return; }
    const v = this.lo + part * (this.hi - this.lo), x = this.log ? 10 ** v : v;
    this.cursor?.remove();
    this.cursor = shape("line", { class: "cursor", x1: px, x2: px, y1: 8, y2: this.height - 22 }, this.svg);
    const lines = [];
    for (const s of this.series) {
      if (this.kind === "line") {
        let k = 0;
        while (k < s.x.length && s.x[k] <= x) k++;
        lines.push(`${s.name}: ${this.yText(k ? s.y[k - 1] : 0)}`);
        continue;
      }
      let k = 0;
      while (k < s.y.length - 1 && this.x[k + 1] <= x) k++;
      if (s.y[k] > 0 || this.series.length < 3) lines.push(`${s.name}: ${this.yText(s.y[k])}`);
    }
    this.tip.show(`${this.kind === "line" ? "within" : "at"} ${this.xText(x)}`, lines, px, py);
  }
}

// Rows of GPUs over time: job by job, or shares of colours per bin.
class Gantt {
  constructor(host, meta, bytes) {
    Object.assign(this, { host, meta, bytes, canvas: make("canvas") });
    host.append(this.canvas);
    this.tip = tipOf(host);
    host.gantt = this; // for the curious, in the console
    zooms(host, this, meta.edges);
    this.draw();
    new ResizeObserver(() => { if (host.clientWidth !== this.width) this.draw(); }).observe(host);
    addEventListener("themechange", () => this.draw());
    host.addEventListener("pointermove", (e) => this.point(e));
    host.addEventListener("pointerleave", () => this.tip.hide());
  }

  left() { return this.width < 560 ? 52 : LEFT; }
  span() { return shared.window ?? this.meta.edges; }
  x(t) { const [a, b] = this.span(); return this.left() + (t - a) / (b - a || 1) * (this.width - this.left() - RIGHT); }

  draw() {
    const { canvas, meta, host } = this, rows = meta.rows.length, ratio = devicePixelRatio || 1;
    this.width = host.clientWidth;
    const left = this.left(), right = this.width - RIGHT;
    this.row = Math.max(9, Math.min(34, Math.floor(460 / rows)));
    const height = rows * (this.row + 2);
    canvas.style.height = height + "px";
    canvas.width = this.width * ratio;
    canvas.height = height * ratio;
    const ctx = canvas.getContext("2d"), css = getComputedStyle(document.documentElement), value = (name) => css.getPropertyValue(name).trim();
    ctx.scale(ratio, ratio);
    const fills = meta.groups.map((_, i) => value(`--g${Math.min(i, 8)}`));
    ctx.font = "11px system-ui, sans-serif";
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    const every = Math.ceil(13 / (this.row + 2));
    meta.rows.forEach((row, i) => {
      const y = i * (this.row + 2);
      ctx.fillStyle = value("--shade");
      ctx.fillRect(left, y, right - left, this.row);
      if (i % every) return;
      ctx.fillStyle = value("--soft");
      let name = row.name;
      while (name.length > 3 && ctx.measureText(name).width > left - 12) name = name.slice(0, -2) + "…";
      ctx.fillText(name, left - 8, y + this.row / 2 + 0.5);
    });
    ctx.beginPath();
    ctx.rect(left, 0, right - left, height);
    ctx.clip();
    const [a, b] = this.span();
    if (meta.exact) {
      const [row, lane, wide, start, end, group] = meta.pieces;
      for (let k = 0; k < row.length; k++) {
        if (end[k] < a || start[k] > b) continue;
        const size = this.row / meta.rows[row[k]].gpus, y = row[k] * (this.row + 2) + lane[k] * size, x = this.x(start[k]);
        const w = Math.max(this.x(end[k]) - x, 0.6), h = wide[k] * size;
        ctx.fillStyle = fills[group[k]];
        ctx.fillRect(x, y, w > 3 ? w - 0.7 : w, h > 3 ? h - 0.5 : h);
      }
      return;
    }
    const { bins } = meta, [first, last] = meta.edges, long = (last - first) / bins;
    const from = Math.max(0, Math.floor((a - first) / long)), to = Math.min(bins, Math.ceil((b - first) / long));
    const step = (right - left) * long / (b - a || 1);
    for (let r = 0; r < rows; r++) for (let b = from; b < to; b++) {
      let y = (r + 1) * (this.row + 2) - 2;
      for (let g = 0; g < fills.length; g++) {
        const h = this.bytes[(g * rows + r) * bins + b] / 255 * this.row;
        if (!h) continue;
        y -= h;
        ctx.fillStyle = fills[g];
        ctx.fillRect(this.x(first + b * long), y, step + 0.4, h);
      }
    }
  }

  point(e) {
    const box = this.host.getBoundingClientRect(), px = e.clientX - box.left, py = e.clientY - box.top, { meta } = this;
    const r = Math.floor(py / (this.row + 2)), [a, b] = this.span(), t = a + (px - this.left()) / (this.width - this.left() - RIGHT) * (b - a);
    if (r < 0 || r >= meta.rows.length || t < a || t > b) return this.tip.hide();
    const name = meta.rows[r].name;
    if (meta.exact) {
      const [row, lane, wide, start, end, , job] = meta.pieces, at = (py - r * (this.row + 2)) / this.row * meta.rows[r].gpus;
      for (let k = row.length - 1; k >= 0; k--) {
        if (row[k] !== r || t < start[k] || t >= end[k] || at < lane[k] || at >= lane[k] + wide[k]) continue;
        const [id, what, gpus, waited] = meta.jobs[job[k]], lines = [what, `${gpus} GPU${gpus > 1 ? "s" : ""}, ${wide[k]} of them here`, `ran ${longTime(end[k] - start[k])} from ${longTime(start[k])} on`];
        if (waited !== null) lines.push(`waited ${longTime(waited)} in all`);
        return this.tip.show(id, lines.filter(Boolean), px, py);
      }
      return this.tip.show(name, [`${longTime(t)}: nothing runs here`], px, py);
    }
    const bin = Math.min(meta.bins - 1, Math.floor((t - meta.edges[0]) / (meta.edges[1] - meta.edges[0]) * meta.bins)), lines = [];
    meta.groups.forEach((group, g) => {
      const part = this.bytes[(g * meta.rows.length + r) * meta.bins + bin] / 255;
      if (part > 0.002) lines.push(`${group}: ${figure(100 * part)} %`);
    });
    this.tip.show(`${name} at ${longTime(t)}`, lines.length ? lines : ["nothing runs here"], px, py);
  }
}

async function page() {
  const meta = JSON.parse($("meta").textContent), { gantt, time: series, cdfs, slots } = meta;
  let bytes = null;
  if (!gantt.exact && typeof DecompressionStream !== "undefined") bytes = await inflate($("data").textContent);
  if (gantt.exact || bytes) {
    new Gantt($("gantt"), gantt, bytes);
    gantt.groups.forEach((name, i) => keyItem($("groups"), name, colour(i)));
  } else $("gantt").append(make("p", "This browser is too old for this picture (it lacks DecompressionStream); everything else on this page works.", { class: "hint" }));
  const percent = (v) => `${figure(100 * v)} %`, whole = (v) => `${plain(100 * v)} %`;
  new Plot($("used"), { kind: "step", x: series.edges, most: 1, height: 120, yText: percent, yAxis: whole, series: [{ name: "in use", y: series.used, fill: "var(--compute)", opacity: 0.85 }] });
  const causes = series.causes.length ? series.causes.map((c, i) => ({ name: c.why, y: c.values, fill: colour(i) })) : [{ name: "waiting", y: series.waiting, fill: "var(--wait-line)" }];
  new Plot($("waiting"), { kind: "stack", x: series.edges, series: causes });
  if (series.causes.length) for (const c of causes) keyItem($("causes"), c.name, c.fill);
  if (cdfs.length) {
    const lines = cdfs.map((c, i) => ({ name: c.name, x: c.x, y: c.y, fill: colour(i), dash: DASHES[i % DASHES.length] }));
    new Plot($("cdf"), { kind: "line", log: true, most: 1, height: 240, yText: percent, yAxis: whole, series: lines });
    for (const line of lines) keyItem($("cdf-key"), line.name, line.fill, line.dash);
  }
  if (slots.length) {
    const select = $("slot");
    slots.forEach((slot, i) => select.append(make("option", slot.name, { value: String(i) })));
    let plot = null;
    const show = () => {
      const slot = slots[Number(select.value)];
      const lines = [
        { name: "if the free GPUs lay together", y: slot.together, fill: "var(--g1)", open: true, dash: "5 3" },
        { name: "free", y: slot.free, fill: "var(--g0)", open: true },
      ];
      if (plot) { plot.series = lines; plot.draw(); } else plot = new Plot($("slots"), { kind: "step", x: series.edges, series: lines });
    };
    select.addEventListener("change", show);
    show();
    keyItem($("slots-key"), "free slots", "var(--g0)", "");
    keyItem($("slots-key"), "if the same free GPUs lay together", "var(--g1)", "5 3");
  }
  document.body.dataset.ready = "yes";
}

theme();
sorting("table.sorts");
$("whole").addEventListener("click", () => look(null));
page();
