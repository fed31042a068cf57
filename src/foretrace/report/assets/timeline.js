// Draws lanes of tasks on a canvas. Tasks narrower than a pixel are merged into columns whose height is how much of
// the pixel they fill, so the cost of a frame is one walk over what is in view.

const STYLE = {
  kernel: "compute", operator: "compute", memset: "compute", collective: "comm", copy: "copy", data: "data",
  cpu: "host", python: "host", call: "call",
};
const WORDS = {
  compute: "compute", comm: "communication", copy: "copy", data: "data loading", host: "host work",
  call: "runtime call", wait: "waiting", critical: "critical path",
};
const SWATCH = { compute: "kernel", comm: "collective", copy: "copy", data: "data", host: "cpu", call: "call", wait: "wait", critical: "critical" };
const CLASSES = ["host", "call", "wait", "compute", "copy", "comm", "data"]; // later ones win a shared pixel
const OVERVIEW = 40, AXIS = 24, SAVING = 18, TIGHT = 2, LANE = 10, LABEL = 17;
let ROW = 20; // height of a row; taller where there are few

class Timeline {
  constructor(canvas, meta, tracks) {
    this.canvas = canvas;
    this.ctx = canvas.getContext("2d");
    this.meta = meta;
    this.tracks = tracks;
    this.against = tracks.length > 1 ? tracks.length - 1 : 0; // track below the recorded one, 0 for none
    this.showQuiet = false;
    this.matches = null;
    this.selected = null; // {track, i}
    this.chain = [];
    this.hover = null;
    this.align = 0;
    this.focused = false; // whether one step is chosen
    this.classOf = Uint8Array.from(meta.kinds.map((k) => CLASSES.indexOf(STYLE[k] ?? "wait")));
    this.waits = new Set(["return", "join"].map((k) => meta.kinds.indexOf(k)));
    for (const track of tracks) if (track.ranges.size === 1) track.critical.fill(0); // one lane: all of it decides
    const recorded = tracks[0];
    this.t0 = 0;
    this.t1 = recorded.marks[recorded.marks.length - 1];
    this.theme();
    this.layout();
  }

  get shown() { return this.against ? [this.tracks[0], this.tracks[this.against]] : [this.tracks[0]]; }

  // View time 0 is the beginning of the step that all tracks are aligned at.
  origin(track) { return track.marks[Math.min(this.align, track.marks.length - 1)]; }

  extent() {
    let lo = Infinity, hi = -Infinity;
    for (const track of this.shown) {
      const origin = this.origin(track);
      lo = Math.min(lo, track.marks[0] - origin);
      hi = Math.max(hi, track.marks[track.marks.length - 1] - origin);
    }
    return [lo, hi];
  }

  theme() {
    const css = getComputedStyle(document.documentElement);
    this.c = {};
    for (const name of ["compute", "comm", "copy", "data", "host", "call", "wait", "wait-line", "critical", "ink", "soft",
      "faint", "line", "accent", "surface", "row", "grid", "on-dark", "on-light", "idle", "accent-soft"])
      this.c[name] = css.getPropertyValue("--" + name).trim();
    this.fills = CLASSES.map((name) => this.c[name]);
    this.fills[CLASSES.indexOf("wait")] = this.hatch(this.c.wait, this.c["wait-line"], 4, 1);
    this.fills[CLASSES.indexOf("data")] = this.hatch(this.c.data, this.c.surface, 9, 1, 0.35);
    this.overview = null;
  }

  hatch(back, line, gap, width, alpha = 1) {
    const ratio = devicePixelRatio || 1, size = Math.round(gap * ratio * 1.414) || 4;
    const tile = document.createElement("canvas");
    tile.width = tile.height = size;
    const c = tile.getContext("2d");
    c.fillStyle = back;
    c.fillRect(0, 0, size, size);
    c.globalAlpha = alpha;
    c.strokeStyle = line;
    c.lineWidth = width * ratio;
    for (const shift of [-size, 0, size]) {
      c.beginPath();
      c.moveTo(shift - 1, size + 1);
      c.lineTo(shift + size + 1, -1);
      c.stroke();
    }
    const pattern = this.ctx.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix([1 / ratio, 0, 0, 1 / ratio, 0, 0]));
    return pattern;
  }

  layout() {
    const width = this.canvas.parentElement.clientWidth;
    this.narrow = width < 640;
    this.left = this.narrow ? 0 : 164;
    this.width = width;
    this.rows = [];
    this.heads = [];
    const two = this.shown.length > 1;
    this.top = OVERVIEW + AXIS + (two ? SAVING : 0); // where the lanes begin
    const lanes = this.meta.lanes.filter((lane, i) => (this.showQuiet || !lane.quiet) && this.shown.some((t) => t.ranges.has(i)));
    ROW = lanes.length * this.shown.length > 12 ? 22 : 26;
    let y = this.top + 6;
    this.hidden = 0;
    this.meta.lanes.forEach((lane, index) => {
      const tracks = this.shown.filter((track) => track.ranges.has(index));
      if (!tracks.length) return;
      if (lane.quiet && !this.showQuiet) { this.hidden++; return; }
      if (this.narrow) y += LABEL;
      this.heads.push({ y, lane, predicted: tracks[0] !== this.tracks[0] }); // a lane that the prediction adds
      for (const track of tracks) {
        this.rows.push({ y, lane: index, track, predicted: tracks.length > 1 && track !== this.tracks[0] });
        y += ROW + TIGHT;
      }
      y += LANE;
    });
    this.height = y + 2;
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.canvas.style.height = this.height + "px";
    this.overview = null;
    this.draw();
  }

  x(t) { return this.left + (t - this.t0) * this.scale; }
  text(ns) { return time(ns); }
  time(x) { return this.t0 + (x - this.left) / this.scale; }

  draw() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => { this.pending = 0; this.paint(); });
  }

  paint() {
    const { ctx, c } = this, ratio = devicePixelRatio || 1;
    this.scale = (this.width - this.left) / (this.t1 - this.t0);
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    ctx.clearRect(0, 0, this.width, this.height);
    ctx.textBaseline = "middle";
    this.paintOverview();
    this.paintAxis();
    ctx.save();
    ctx.beginPath();
    ctx.rect(this.left, this.top, this.width - this.left, this.height);
    ctx.clip();
    for (const row of this.rows) this.paintRow(row);
    this.paintLinks();
    if (this.focused) this.paintVeil();
    ctx.restore();
    this.paintMarks();
    ctx.save();
    ctx.beginPath();
    ctx.rect(this.left, this.top, this.width - this.left, this.height);
    ctx.clip();
    this.paintSelection();
    ctx.restore();
    this.paintLabels();
  }

  paintRow(row) {
    const { ctx, c } = this, { track, y } = row;
    ctx.fillStyle = c.row;
    ctx.fillRect(this.left, y, this.width - this.left, ROW);
    const [first, last, longest] = track.ranges.get(row.lane);
    const origin = this.origin(track), v0 = this.t0 + origin, scale = this.scale, left = this.left;
    const lo = after(track.start, first, last, v0 - longest), hi = after(track.start, lo, last, this.t1 + origin);
    const wide = CLASSES.map(() => []), thin = CLASSES.map(() => []), labels = [], outlined = [], lit = [];
    const cover = new Float64Array(CLASSES.length), match = this.matches, waitClass = CLASSES.indexOf("wait");
    let pixel = -1, red = false, hit = false, lineFrom = -1;
    const redLines = [], hitLines = [];
    const flush = () => {
      if (pixel < 0) return;
      let sum = 0, best = 0;
      for (let k = 0; k < cover.length; k++) { sum += cover[k]; if (cover[k] > 0 && cover[k] >= cover[best] * 0.7) best = k; }
      if (sum > 0) thin[best].push(pixel, Math.min(sum, 1));
      if (red) redLines.push(pixel);
      if (hit) hitLines.push(pixel);
      cover.fill(0);
      red = hit = false;
    };
    // A wait may begin long before its zero-length task: look one task past the right edge as well.
    for (let i = Math.max(lo - 1, first); i < Math.min(hi + 1, last); i++) {
      const waits = this.waits.has(track.kind[i]);
      const a = waits ? track.from[i] : track.start[i], b = track.end[i];
      if (b <= a) continue;
      const x0 = left + (a - v0) * scale, x1 = left + (b - v0) * scale;
      if (x1 < left || x0 > this.width) continue;
      const k = waits ? waitClass : this.classOf[track.kind[i]], width = x1 - x0;
      const found = match && match(track, i);
      if (width >= 2) {
        flush();
        pixel = -1;
        wide[k].push(x0, width);
        if (width > 45) labels.push(i, Math.max(x0, left), Math.min(x1, this.width), k);
        if (track.critical[i] && !waits) outlined.push(x0, width);
        if (found) lit.push(x0, width);
      } else {
        const at = Math.floor(x0);
        if (at !== pixel) { flush(); pixel = at; }
        cover[k] += width;
        if (track.critical[i] && !waits) red = true;
        if (found) hit = true;
      }
    }
    flush();
    ctx.globalAlpha = match ? 0.28 : 1;
    for (let k = 0; k < CLASSES.length; k++) {
      ctx.fillStyle = this.fills[k];
      for (let j = 0, list = thin[k]; j < list.length; j += 2) {
        const h = Math.max(3, ROW * list[j + 1]);
        ctx.fillRect(list[j], y + (ROW - h) / 2, 1, h);
      }
      for (let j = 0, list = wide[k]; j < list.length; j += 2)
        ctx.fillRect(list[j], y, list[j + 1] > 4 ? list[j + 1] - 0.75 : list[j + 1], ROW);
    }
    ctx.globalAlpha = 1;
    if (match) {
      ctx.fillStyle = c.accent;
      for (let j = 0; j < lit.length; j += 2) ctx.fillRect(lit[j], y, Math.max(lit[j + 1] - 0.75, 1.5), ROW);
      for (const x of hitLines) ctx.fillRect(x, y, 1.5, ROW);
    }
    ctx.strokeStyle = ctx.fillStyle = c.critical;
    ctx.lineWidth = 1.5;
    for (let j = 0; j < outlined.length; j += 2) {
      if (outlined[j + 1] > 14) ctx.strokeRect(outlined[j] + 0.75, y + 0.75, outlined[j + 1] - 2.25, ROW - 1.5);
      else ctx.fillRect(outlined[j], y + ROW - 2, outlined[j + 1], 2);
    }
    for (const x of redLines) ctx.fillRect(x, y + ROW - 2, 1, 2);
    ctx.font = "11px system-ui, sans-serif";
    ctx.textAlign = "left";
    for (let j = 0; j < labels.length; j += 4) this.label(track, labels[j], labels[j + 1], labels[j + 2], y, labels[j + 3]);
  }

  // With one step chosen, whatever belongs to other steps steps back.
  paintVeil() {
    const { ctx, c } = this;
    ctx.fillStyle = c.surface;
    ctx.globalAlpha = 0.74;
    for (const row of this.rows) {
      const origin = this.origin(row.track), end = row.track.marks[Math.min(this.align + 1, row.track.marks.length - 1)];
      const x0 = this.x(0), x1 = this.x(end - origin);
      if (x0 > this.left) ctx.fillRect(this.left, row.y, x0 - this.left, ROW);
      if (x1 < this.width) ctx.fillRect(Math.max(x1, this.left), row.y, this.width - Math.max(x1, this.left), ROW);
    }
    ctx.globalAlpha = 1;
  }

  label(track, i, x0, x1, y, k) {
    const room = Math.floor((x1 - x0 - 10) / 5.9);
    if (room < 6) return;
    const name = CLASSES[k];
    let text = name === "wait" ? "waits " + time(track.end[i] - track.from[i]) : this.title(track, i);
    if (text.length > room) text = text.slice(0, room - 1) + "…";
    const light = name === "host" || name === "wait" || this.matches;
    if (name === "wait") {
      this.ctx.fillStyle = this.c.wait;
      this.ctx.fillRect(x0 + 3, y + 3, text.length * 5.9 + 4, ROW - 6);
    }
    this.ctx.fillStyle = light ? this.c["on-light"] : this.c["on-dark"];
    this.ctx.fillText(text, x0 + 5, y + ROW / 2 + 0.5);
  }

  title(track, i) { return this.meta.shorts[track.name[i]] || this.meta.kinds[track.kind[i]]; }

  // Thin red lines where the critical path changes lanes; one per pixel at most.
  paintLinks() {
    const { ctx, c } = this, seat = new Map();
    for (const row of this.rows) seat.set(row.track.title + "/" + row.lane, row.y);
    ctx.strokeStyle = c.critical;
    ctx.globalAlpha = 0.65;
    ctx.lineWidth = 1;
    for (const track of this.shown) {
      const origin = this.origin(track);
      let lastX = -9;
      for (const i of track.turns) {
        const t = track.start[i] - origin;
        if (t < this.t0 || t > this.t1) continue;
        const x = Math.round(this.x(t)) + 0.5;
        if (x - lastX < 3) continue;
        const a = seat.get(track.title + "/" + track.lane[i]), b = seat.get(track.title + "/" + track.lane[i - track.cause[i]]);
        if (a === undefined || b === undefined) continue;
        lastX = x;
        ctx.beginPath();
        ctx.moveTo(x, Math.min(a, b) + ROW);
        ctx.lineTo(x, Math.max(a, b));
        ctx.stroke();
      }
    }
    ctx.globalAlpha = 1;
  }

  rowOf(track, i) {
    const lane = track.lane[i];
    return this.rows.find((row) => row.track === track && row.lane === lane);
  }

  paintSelection() {
    const { ctx, c } = this;
    const box = (spot, colour, width) => {
      const row = this.rowOf(spot.track, spot.i);
      if (!row) return;
      const origin = this.origin(spot.track), waits = this.waits.has(spot.track.kind[spot.i]);
      const x0 = this.x((waits ? spot.track.from[spot.i] : spot.track.start[spot.i]) - origin), x1 = this.x(spot.track.end[spot.i] - origin);
      ctx.strokeStyle = colour;
      ctx.lineWidth = width;
      ctx.strokeRect(x0 - 1, row.y - 1, Math.max(x1 - x0, 2) + 1, ROW + 2);
    };
    if (this.hover) box(this.hover, c.ink, 1);
    if (!this.selected) return;
    ctx.strokeStyle = c.ink;
    ctx.lineWidth = 1.25;
    ctx.beginPath();
    let spot = this.selected;
    for (const i of this.chain) {
      const a = this.rowOf(spot.track, spot.i), b = this.rowOf(spot.track, i), origin = this.origin(spot.track);
      if (a && b) {
        const xa = this.x(spot.track.start[spot.i] - origin), xb = this.x(Math.min(spot.track.end[i], spot.track.start[spot.i]) - origin);
        ctx.moveTo(xb, b.y + ROW / 2);
        ctx.bezierCurveTo((xa + xb) / 2 + 6, b.y + ROW / 2, (xa + xb) / 2 - 6, a.y + ROW / 2, xa, a.y + ROW / 2);
      }
      spot = { track: spot.track, i };
    }
    ctx.stroke();
    box(this.selected, c.ink, 2.5);
  }

  paintLabels() {
    const { ctx, c } = this;
    ctx.textAlign = "left";
    for (const head of this.heads) {
      ctx.font = "12px system-ui, sans-serif";
      ctx.fillStyle = head.predicted ? c.accent : c.ink;
      const y = this.narrow ? head.y - LABEL / 2 : head.y + ROW / 2 + 0.5;
      ctx.fillText(this.fit(head.lane.label, this.narrow ? this.width - 8 : this.left - 14), this.narrow ? 4 : 0, y); // beside the mark of a step
    }
    if (this.narrow) return;
    ctx.font = "11px system-ui, sans-serif";
    ctx.fillStyle = c.accent;
    for (const row of this.rows) if (row.predicted) ctx.fillText("predicted", 0, row.y + ROW / 2 + 0.5);
  }

  fit(text, width) {
    if (this.ctx.measureText(text).width <= width) return text;
    let n = text.length;
    while (n > 1 && this.ctx.measureText(text.slice(0, n) + "…").width > width) n--;
    return text.slice(0, n) + "…";
  }
}
