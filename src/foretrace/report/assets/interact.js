// What mouse, fingers and keys do to the timeline.

Object.assign(Timeline.prototype, {
  listen() {
    const moves = gestures(this.canvas, {
      extent: () => this.extent(), span: () => [this.t0, this.t1], at: (x) => this.time(x), width: () => this.width - this.left,
      show: (t0, t1) => this.view(t0, t1),
      press: (x, y) => (y < OVERVIEW && x >= this.left ? (to) => this.jump(to) : undefined),
      tap: (x, y) => this.select(this.pick(x, y)),
      point: (e) => {
        if (!e) return this.point(null);
        const box = this.canvas.getBoundingClientRect(), x = e.clientX - box.left, y = e.clientY - box.top;
        this.point(this.pick(x, y), x, y);
      },
      centre: () => {
        const at = this.selected ? this.selected.track.start[this.selected.i] - this.origin(this.selected.track) : NaN;
        return at >= this.t0 && at <= this.t1 ? at : (this.t0 + this.t1) / 2;
      },
      keys: {
        "[": () => this.onStep?.(-1), "]": () => this.onStep?.(1),
        j: () => this.neighbour(1), k: () => this.neighbour(-1), ArrowDown: () => this.neighbour(1), ArrowUp: () => this.neighbour(-1),
        w: () => this.chain.length && this.select({ track: this.selected.track, i: this.chain[0] }, true),
        f: () => this.selected && this.zoomTo(this.selected), Escape: () => this.select(null),
      },
    });
    this.zoom = moves.zoom;
  },

  jump(x) {
    const t = this.overview.lo + (x - this.left) / this.overview.scale, half = (this.t1 - this.t0) / 2;
    this.view(t - half, t + half);
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
