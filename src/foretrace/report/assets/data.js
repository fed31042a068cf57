// Unpacks the columns that tracks.py packed: base64, deflate, byte planes, differences.

const READERS = { uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, int32: Int32Array, float32: Float32Array };

async function inflate(base64) {
  const text = atob(base64.trim());
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function column(bytes, at, n, type) {
  const Reader = READERS[type], width = Reader.BYTES_PER_ELEMENT;
  const mixed = new Uint8Array(n * width);
  for (let b = 0; b < width; b++) for (let i = 0, from = at + b * n; i < n; i++) mixed[i * width + b] = bytes[from + i];
  return new Reader(mixed.buffer);
}

// A track: columns sorted by lane, start and end in nanoseconds from its origin, lanes as [from, to) ranges.
function unpackTrack(meta, columns, bytes) {
  const track = { title: meta.name, n: meta.n, marks: meta.marks, steps: meta.steps, ranges: new Map() };
  let at = meta.offset;
  for (const [key, type] of columns) {
    track[key] = column(bytes, at, meta.n, type);
    at += meta.n * READERS[type].BYTES_PER_ELEMENT;
  }
  const start = new Float64Array(meta.n), end = new Float64Array(meta.n), from = new Float64Array(meta.n);
  track.lane = new Uint16Array(meta.n);
  meta.lanes.forEach(([lane, first], k) => {
    const last = k + 1 < meta.lanes.length ? meta.lanes[k + 1][1] : meta.n;
    let t = 0, before = 0, longest = 0;
    for (let i = first; i < last; i++) {
      t += track.gap[i] * meta.tick;
      start[i] = t;
      end[i] = t + track.dur[i] * meta.tick;
      from[i] = Math.min(before, t); // where the wait before a return begins
      before = Math.max(before, end[i]);
      longest = Math.max(longest, end[i] - t);
      track.lane[i] = lane;
    }
    if (last > first) from[first] = start[first];
    track.ranges.set(lane, [first, last, longest]);
  });
  track.start = start;
  track.end = end;
  track.from = from;
  delete track.gap;
  track.turns = []; // critical tasks that follow a critical task of another lane, by time
  for (let i = 0; i < meta.n; i++)
    if (track.critical[i] && track.cause[i] && track.critical[i - track.cause[i]] && track.lane[i] !== track.lane[i - track.cause[i]]) track.turns.push(i);
  track.turns.sort((a, b) => start[a] - start[b]);
  return track;
}

// First i in [lo, hi) with column[i] > value.
function after(column, lo, hi, value) {
  while (lo < hi) {
    const mid = (lo + hi) >>> 1;
    if (column[mid] > value) hi = mid; else lo = mid + 1;
  }
  return lo;
}
