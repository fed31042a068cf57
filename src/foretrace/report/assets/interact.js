// What mouse, fingers and keys do to the timeline.

Object.assign(Timeline.prototype, {
  listen() {
    const canvas = this.canvas;
    canvas.addEventListener("wheel", (e) => this.onWheel(e), { passive: false });
    canvas.addEventListener("pointerdown", (e) => this.onDown(e));
    canvas.addEventListener("pointermove", (e) => this.onMove(e));
    canvas.addEventListener("pointerup", (e) => this.onUp(e));
    canvas.addEventListener("pointercancel", (e) => this.onUp(e));
    canvas.addEventListener("pointerleave", () => this.point(null));
    canvas.addEventListener("dblclick", (e) => this.zoomTo(this.pick(...this.place(e))));
    canvas.addEventListener("keydown", (e) => this.onKey(e));
    this.fingers = new Map();
    // A page that is being scrolled past the timeline must not start to zoom when the timeline arrives below the pointer.
    this.scrolled = -1e9;
    addEventListener("wheel", (e) => { if (e.target !== canvas) this.scrolled = e.timeStamp; }, { passive: true });
  },

  place(e) {
    const box = this.canvas.getBoundingClientRect();
    return [e.clientX - box.left, e.clientY - box.top];
  },

  onWheel(e) {
    if (e.timeStamp - this.scrolled < 350) { this.scrolled = e.timeStamp; return; }
    const [x] = this.place(e), [lo, hi] = this.extent();
    const across = Math.abs(e.deltaX) > Math.abs(e.deltaY) || e.shiftKey;
    if (across) this.move(((e.deltaX || e.deltaY) / (this.width - this.left)) * (this.t1 - this.t0));
    else {
      if (e.deltaY > 0 && this.t0 <= lo && this.t1 >= hi) return; // all is in view: let the page scroll
      this.zoom(Math.exp(Math.max(-60, Math.min(60, e.deltaMode ? e.deltaY * 20 : e.deltaY)) * 0.006), this.time(x));
    }
    e.preventDefault();
  },

  onDown(e) {
    if (e.button) return;
    this.canvas.setPointerCapture(e.pointerId);
    const [x, y] = this.place(e);
    this.fingers.set(e.pointerId, [x, y]);
    this.drag = { x, y, moved: false, overview: y < OVERVIEW && x >= this.left };
    if (this.drag.overview) this.jump(x);
    this.canvas.classList.add("drag");
  },

  onMove(e) {
    const [x, y] = this.place(e), before = this.fingers.get(e.pointerId);
    if (!before) return this.point(this.pick(x, y), x, y);
    if (this.fingers.size === 2) {
      const [a, b] = [...this.fingers.values()].map((f) => f[0]), gap = Math.abs(a - b);
      this.fingers.set(e.pointerId, [x, y]);
      const [c, d] = [...this.fingers.values()].map((f) => f[0]);
      this.zoom(Math.max(gap, 8) / Math.max(Math.abs(c - d), 8), this.time((c + d) / 2));
      this.move(-((c + d - a - b) / 2 / this.scale));
    } else {
      if (Math.abs(x - this.drag.x) + Math.abs(y - this.drag.y) > 4) this.drag.moved = true;
      if (this.drag.overview) this.jump(x);
      else if (this.drag.moved) this.move((before[0] - x) / this.scale);
      this.fingers.set(e.pointerId, [x, y]);
    }
    this.point(null);
  },

  onUp(e) {
    const [x, y] = this.place(e);
    this.fingers.delete(e.pointerId);
    this.canvas.classList.remove("drag");
    if (this.drag && !this.drag.moved && !this.drag.overview && e.type === "pointerup") this.select(this.pick(x, y));
  },

  jump(x) {
    const t = this.overview.lo + (x - this.left) / this.overview.scale, half = (this.t1 - this.t0) / 2;
    this.view(t - half, t + half);
  },

  onKey(e) {
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    const span = this.t1 - this.t0, middle = (this.t0 + this.t1) / 2;
    const at = this.selected ? this.selected.track.start[this.selected.i] - this.origin(this.selected.track) : middle;
    const centre = at >= this.t0 && at <= this.t1 ? at : middle;
    const action = {
      "+": () => this.zoom(0.6, centre), "=": () => this.zoom(0.6, centre), "-": () => this.zoom(1 / 0.6, centre), "_": () => this.zoom(1 / 0.6, centre),
      ArrowLeft: () => this.move(-span * 0.15), ArrowRight: () => this.move(span * 0.15),
      "0": () => this.view(...this.extent()), Home: () => this.view(...this.extent()),
      "[": () => this.onStep?.(-1), "]": () => this.onStep?.(1),
      j: () => this.neighbour(1), k: () => this.neighbour(-1), ArrowDown: () => this.neighbour(1), ArrowUp: () => this.neighbour(-1),
      w: () => this.chain.length && this.select({ track: this.selected.track, i: this.chain[0] }, true),
      f: () => this.selected && this.zoomTo(this.selected), Escape: () => this.select(null),
    }[e.key];
    if (!action) return;
    e.preventDefault();
    action();
  },

  // Next or previous task of the selected lane; the middle of the first lane if nothing is selected.
  neighbour(by) {
    let { track, i } = this.selected ?? {};
    if (!track) {
      const row = this.rows[0];
      if (!row) return;
      track = row.track;
      i = after(track.start, ...track.ranges.get(row.lane).slice(0, 2), (this.t0 + this.t1) / 2 + this.origin(track)) - (by > 0 ? 1 : 0);
    }
    const [first, last] = track.ranges.get(track.lane[i]);
    do i += by; while (i > first && i < last - 1 && track.end[i] <= track.start[i] && !(this.waits.has(track.kind[i]) && track.from[i] < track.end[i]));
    if (i >= first && i < last) this.select({ track, i }, true);
  },

  zoom(factor, centre) { this.view(centre - (centre - this.t0) * factor, centre + (this.t1 - centre) * factor); },
  move(by) {
    const [lo, hi] = this.extent(), span = this.t1 - this.t0;
    const t0 = Math.max(lo, Math.min(this.t0 + by, hi - span));
    this.view(t0, t0 + span);
  },

  view(t0, t1) {
    const [lo, hi] = this.extent(), span = Math.min(Math.max(t1 - t0, 200), hi - lo);
    const middle = (t0 + t1) / 2;
    this.t0 = Math.max(lo, Math.min(middle - span / 2, hi - span));
    this.t1 = this.t0 + span;
    this.draw();
  },

  // The task under a point, or the nearest within three pixels.
  pick(x, y) {
    const row = this.rows.find((r) => y >= r.y - 1 && y < r.y + ROW + 1);
    if (!row || x < this.left) return null;
    const { track } = row, [first, last, longest] = track.ranges.get(row.lane), origin = this.origin(track);
    const t = this.time(x) + origin, reach = 3 / this.scale;
    let best = null, gap = reach;
    for (let i = after(track.start, first, last, t - longest - reach), n = 0; i < last && n < 5000; i++, n++) {
      const waits = this.waits.has(track.kind[i]), a = waits ? track.from[i] : track.start[i];
      if (track.start[i] > t + reach && !(waits && a <= t)) { if (track.start[i] > t + reach && !this.waits.has(track.kind[i])) break; continue; }
      if (track.end[i] <= a) continue;
      const away = t < a ? a - t : t > track.end[i] ? t - track.end[i] : 0;
      if (away < gap || (away === 0 && gap === 0)) { best = i; gap = away; }
    }
    return best === null ? null : { track, i: best };
  },

  zoomTo(spot) {
    if (!spot) return;
    const origin = this.origin(spot.track), a = spot.track.start[spot.i] - origin, b = spot.track.end[spot.i] - origin;
    this.view(a - (b - a) * 3 - 1000, b + (b - a) * 3 + 1000);
  },

  select(spot, follow = false) {
    this.selected = spot;
    this.chain = [];
    if (spot) {
      let i = spot.i;
      for (let n = 0; n < 24 && spot.track.cause[i]; n++) { i -= spot.track.cause[i]; this.chain.push(i); }
      if (follow) {
        const origin = this.origin(spot.track), a = spot.track.start[spot.i] - origin, b = spot.track.end[spot.i] - origin, span = this.t1 - this.t0;
        if (a < this.t0 || b > this.t1) this.view((a + b) / 2 - span / 2, (a + b) / 2 + span / 2);
        const row = this.rowOf(spot.track, spot.i);
        if (!row && this.meta.lanes[spot.track.lane[spot.i]].quiet) this.onQuiet?.();
      }
    }
    this.onSelect?.(spot);
    this.draw();
  },

  point(spot, x, y) {
    const changed = spot?.i !== this.hover?.i || spot?.track !== this.hover?.track;
    this.hover = spot;
    this.onPoint?.(spot, x, y);
    if (changed) this.draw();
  },
});
