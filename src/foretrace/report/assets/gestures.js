// The one way to move through time, on every picture that has a time axis: the wheel or two fingers zoom where the
// pointer is, a drag pans, a double click shows all; + and −, arrows and 0 do the same from the keyboard.
//
// view: extent() and span() give [from, to]; at(x) the time at a pixel, width() the pixels of the span; show(from, to)
// moves there. Optional: press(x, y) takes a drag over and returns a function of x, tap(x, y, event) is a click without
// a drag, point(event or null) a pointer that only moves, centre() where keys zoom, keys more of them.
function gestures(host, view) {
  const fingers = new Map();
  let drag = null, scrolled = -1e9;
  const place = (e) => { const box = host.getBoundingClientRect(); return [e.clientX - box.left, e.clientY - box.top]; };
  const show = (a, b) => {
    const [lo, hi] = view.extent(), span = Math.min(b - a, hi - lo), from = Math.max(lo, Math.min((a + b - span) / 2, hi - span));
    view.show(from, from + span);
  };
  const zoom = (factor, at) => { const [a, b] = view.span(); show(at - (at - a) * factor, at + (b - at) * factor); };
  const pan = (by) => { const [a, b] = view.span(), [lo, hi] = view.extent(), from = Math.max(lo, Math.min(a + by, hi - (b - a))); view.show(from, from + b - a); };
  const perPixel = () => { const [a, b] = view.span(); return (b - a) / view.width(); };
  const whole = () => { const [a, b] = view.span(), [lo, hi] = view.extent(); return a <= lo && b >= hi; };

  // A page that is being scrolled past a picture must not start to zoom when the picture arrives below the pointer.
  addEventListener("wheel", (e) => { if (!host.contains(e.target)) scrolled = e.timeStamp; }, { passive: true });
  host.addEventListener("wheel", (e) => {
    if (e.timeStamp - scrolled < 350) { scrolled = e.timeStamp; return; }
    if (Math.abs(e.deltaX) > Math.abs(e.deltaY) || e.shiftKey) pan((e.deltaX || e.deltaY) * perPixel());
    else {
      if (e.deltaY > 0 && whole()) return; // all is in view: let the page scroll
      zoom(Math.exp(Math.max(-60, Math.min(60, e.deltaMode ? e.deltaY * 20 : e.deltaY)) * 0.006), view.at(place(e)[0]));
    }
    e.preventDefault();
  }, { passive: false });

  host.addEventListener("pointerdown", (e) => {
    if (e.button) return;
    host.setPointerCapture(e.pointerId);
    const [x, y] = place(e);
    fingers.set(e.pointerId, [x, y]);
    drag = { x, y, moved: false, take: view.press?.(x, y) };
    drag.take?.(x);
    host.classList.add("drag");
  });
  host.addEventListener("pointermove", (e) => {
    const [x, y] = place(e), before = fingers.get(e.pointerId);
    if (!before) return view.point?.(e);
    if (fingers.size === 2) {
      const [a, b] = [...fingers.values()].map((f) => f[0]);
      fingers.set(e.pointerId, [x, y]);
      const [c, d] = [...fingers.values()].map((f) => f[0]);
      zoom(Math.max(Math.abs(a - b), 8) / Math.max(Math.abs(c - d), 8), view.at((c + d) / 2));
      pan(-((c + d - a - b) / 2) * perPixel());
      drag.moved = true;
    } else {
      if (Math.abs(x - drag.x) + Math.abs(y - drag.y) > 4) drag.moved = true;
      if (drag.take) drag.take(x);
      else if (drag.moved) pan((before[0] - x) * perPixel());
      fingers.set(e.pointerId, [x, y]);
    }
    view.point?.(null);
  });
  const up = (e) => {
    const [x, y] = place(e);
    fingers.delete(e.pointerId);
    host.classList.remove("drag");
    if (drag && !drag.moved && !drag.take && e.type === "pointerup") view.tap?.(x, y, e);
  };
  host.addEventListener("pointerup", up);
  host.addEventListener("pointercancel", up);
  host.addEventListener("pointerleave", () => view.point?.(null));
  host.addEventListener("dblclick", () => view.show(...view.extent()));

  host.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    const [a, b] = view.span(), at = view.centre?.() ?? (a + b) / 2;
    const action = view.keys?.[e.key] ?? {
      "+": () => zoom(0.6, at), "=": () => zoom(0.6, at), "-": () => zoom(1 / 0.6, at), "_": () => zoom(1 / 0.6, at),
      ArrowLeft: () => pan((a - b) * 0.15), ArrowRight: () => pan((b - a) * 0.15),
      "0": () => view.show(...view.extent()), Home: () => view.show(...view.extent()),
    }[e.key];
    if (!action) return;
    e.preventDefault();
    action();
  });
  return { zoom, pan };
}
