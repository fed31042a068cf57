// The same figures as units.py: three significant digits, the unit that gives 1 to 999.

const UNITS = [["ns", 1], ["µs", 1e3], ["ms", 1e6], ["s", 1e9]];

function figure(value) {
  const size = Math.abs(value);
  if (!isFinite(size)) return "–";
  if (size < 0.005) return "0";
  const decimals = size >= 99.95 ? 0 : size >= 9.995 ? 1 : size >= 0.9995 || size < 0.0995 ? 2 : 3;
  const text = size >= 999.5 ? Number(size.toPrecision(3)).toLocaleString("en-US") : size.toFixed(decimals);
  return value < 0 ? "−" + text : text;
}

function unitFor(ns) {
  const size = Math.abs(ns);
  if (size === 0) return UNITS[2];
  for (const unit of UNITS) if (Number((size / unit[1]).toPrecision(3)) < 1000) return unit;
  return UNITS[3];
}

function time(ns) {
  if (ns === 0) return "0";
  const unit = unitFor(ns);
  return figure(ns / unit[1]) + " " + unit[0];
}

function bytesText(n) {
  let size = n, power = 0;
  while (Number(size.toPrecision(3)) >= 1000 && power < 5) { size /= 1000; power++; }
  return (power ? figure(size) : String(size)) + " " + ["", "k", "M", "G", "T", "P"][power] + "B";
}
