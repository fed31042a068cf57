// The strip above the lanes: an overview of the whole recording with the window in view, the axis, the steps.

Object.assign(Timeline.prototype, {
  // How busy the device (or, without one, the threads) is, per pixel of the whole recording.
  buildOverview() {
    const track = this.tracks[0], [lo, hi] = this.extent(), origin = this.origin(track), width = Math.max(this.width - this.left, 1);
    const lanes = this.meta.lanes, device = lanes.some((l) => l.kind === "gpu");
    const sums = CLASSES.map(() => new Float64Array(width + 1)), scale = width / (hi - lo);
    for (const [index, [first, last]] of track.ranges) {
      if (device && lanes[index].kind !== "gpu" && lanes[index].kind !== "link") {
        this.addOverview(sums, track, first, last, origin, lo, scale, "data");
        continue;
      }
      this.addOverview(sums, track, first, last, origin, lo, scale, "");
    }
    this.overview = { sums, lo, hi, scale };
  },

  addOverview(sums, track, first, last, origin, lo, scale, only) {
    for (let i = first; i < last; i++) {
      const k = this.classOf[track.kind[i]];
      if (only && CLASSES[k] !== only) continue;
      let a = (track.start[i] - origin - lo) * scale, b = (track.end[i] - origin - lo) * scale;
      for (let p = Math.max(Math.floor(a), 0); p < b && p < sums[k].length; p++) sums[k][p] += Math.min(b, p + 1) - Math.max(a, p);
    }
  },

  paintOverview() {
    if (!this.overview) this.buildOverview();
    const { ctx, c } = this, { sums, lo, hi, scale } = this.overview, h = OVERVIEW - 12;
    ctx.fillStyle = c.row;
    ctx.fillRect(this.left, 0, this.width - this.left, h);
    for (let p = 0; p < this.width - this.left; p++) {
      let total = 0, y = h;
      for (const sum of sums) total += sum[p];
      const shrink = total > 1 ? 1 / total : 1;
      for (let k = 0; k < sums.length; k++) {
        const part = sums[k][p] * shrink * h;
        if (part <= 0) continue;
        ctx.fillStyle = this.fills[k];
        ctx.fillRect(this.left + p, y - part, 1, part);
        y -= part;
      }
    }
    const a = this.left + (Math.max(this.t0, lo) - lo) * scale, b = this.left + (Math.min(this.t1, hi) - lo) * scale;
    ctx.fillStyle = c.surface;
    ctx.globalAlpha = 0.72;
    ctx.fillRect(this.left, 0, Math.max(a - this.left, 0), h);
    ctx.fillRect(b, 0, Math.max(this.width - b, 0), h);
    ctx.globalAlpha = 1;
    ctx.strokeStyle = c.accent;
    ctx.lineWidth = 1.5;
    ctx.strokeRect(a + 0.75, 0.75, Math.max(b - a - 1.5, 3), h - 1.5);
    const track = this.tracks[0], origin = this.origin(track);
    ctx.fillStyle = c.ink;
    for (const mark of track.marks) ctx.fillRect(Math.round(this.left + (mark - origin - lo) * scale), h, 1, 4);
    if (!this.narrow) {
      ctx.fillStyle = c.faint;
      ctx.font = "11px system-ui, sans-serif";
      ctx.textAlign = "left";
      ctx.fillText("whole recording", 0, h / 2);
    }
  },

  paintAxis() {
    const { ctx, c } = this, top = OVERVIEW, room = this.width - this.left;
    ctx.font = "11px system-ui, sans-serif";
    ctx.textAlign = "center";
    const { pace, text } = this.ticks(room);
    for (let t = Math.ceil(this.t0 / pace) * pace; t <= this.t1; t += pace) {
      const x = Math.round(this.x(t)) + 0.5, half = ctx.measureText(text(t)).width / 2;
      ctx.strokeStyle = c.grid;
      ctx.lineWidth = 1;
      ctx.beginPath();
      ctx.moveTo(x, top + AXIS - 4);
      ctx.lineTo(x, this.height);
      ctx.stroke();
      if (x - half >= this.left && x + half <= this.width) {
        ctx.fillStyle = c.soft;
        ctx.fillText(text(t), x, top + AXIS / 2);
      }
    }
    if (this.shown.length > 1) this.paintSaving(top + AXIS + SAVING / 2);
  },

  // The densest round distance between marks at which the labels, as wide as they are, stay apart.
  ticks(room) {
    const span = this.t1 - this.t0;
    for (let power = 10 ** Math.floor(Math.log10(span / room)); ; power *= 10)
      for (const pace of [1, 2, 5].map((m) => m * power)) {
        const unit = unitFor(Math.max(Math.abs(this.t1), Math.abs(this.t0), 1) > pace * 1e4 ? pace * 1e3 : Math.max(span, 1));
        const decimals = Math.max(0, -Math.floor(Math.log10(pace / unit[1]) + 1e-9));
        const text = (t) => (t / unit[1]).toFixed(decimals).replace("-", "−") + " " + unit[0];
        const widest = Math.max(this.ctx.measureText(text(this.t0)).width, this.ctx.measureText(text(this.t1)).width);
        if ((pace / span) * room >= Math.max(widest + 18, 56)) return { pace, text };
      }
  },

  // Where steps begin and end: solid as recorded, dashed as predicted.
  paintMarks() {
    const { ctx, c } = this;
    ctx.lineWidth = 1;
    for (const track of this.shown) {
      const origin = this.origin(track), predicted = track !== this.tracks[0];
      ctx.strokeStyle = predicted ? c.accent : c.ink;
      ctx.setLineDash(predicted ? [4, 3] : []);
      ctx.beginPath();
      for (const mark of track.marks) {
        const x = Math.round(this.x(mark - origin)) + 0.5;
        if (x < this.left || x > this.width) continue;
        ctx.moveTo(x, OVERVIEW + AXIS - 2);
        ctx.lineTo(x, this.height);
      }
      ctx.stroke();
    }
    ctx.setLineDash([]);
  },

  // The step that both tracks are aligned at: how much earlier the predicted one ends.
  paintSaving(y) {
    const { ctx, c } = this, [a, b] = this.shown, k = this.align + 1;
    if (k >= a.marks.length || k >= b.marks.length) return;
    const ends = [a, b].map((track) => track.marks[k] - this.origin(track)), x0 = this.x(Math.min(...ends)), x1 = this.x(Math.max(...ends));
    if (x1 < this.left || x0 > this.width || x1 - x0 < 2) return;
    ctx.fillStyle = c.accent;
    const from = Math.max(x0, this.left), to = Math.min(x1, this.width);
    ctx.fillRect(from, y - 0.75, to - from, 1.5);
    for (const x of [x0, x1]) if (x >= this.left && x <= this.width) ctx.fillRect(x - 0.75, y - 5, 1.5, 10);
    ctx.font = "600 12px system-ui, sans-serif";
    const text = (ends[1] < ends[0] ? "−" : "+") + time(Math.abs(ends[1] - ends[0])), half = ctx.measureText(text).width / 2 + 4;
    if (x1 - x0 < 2 * half) return;
    const x = Math.min(Math.max((from + to) / 2, this.left + half), this.width - half);
    ctx.fillStyle = c.surface;
    ctx.fillRect(x - half, y - 8, 2 * half, 16);
    ctx.fillStyle = c.accent;
    ctx.fillText(text, x, y + 0.5);
  },
});
