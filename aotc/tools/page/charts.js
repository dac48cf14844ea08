// The charts: schedule, memory over time, roofline. Each fills the width of its box and names the unit of each axis.
const MARGIN = { left: 64, right: 18, top: 10, bottom: 40 };
const TICK = 90;  // pixels between two labels of an axis

function chart(place, height) {
  const width = Math.max(300, $(place).clientWidth), svg = document.createElementNS(SVG, "svg");
  for (const [k, v] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}`, role: "img" })) svg.setAttribute(k, v);
  $(place).replaceChildren(svg);
  return { svg, width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
}
/** Return round numbers from 0 to ``end``, ``most`` of them or fewer. */
function ticksOf(end, most) {
  const raw = end / Math.max(most, 1), power = 10 ** Math.floor(Math.log10(raw)), size = [1, 2, 5, 10].find(n => n * power >= raw) * power;
  return Array.from({ length: Math.floor(end / size + 1e-9) + 1 }, (_, n) => n * size);
}
/** Draw both axes: ``x`` and ``y`` map values to pixels; ticks are pairs of a value and a text. */
function axes(c, x, xTicks, xTitle, y, yTicks, yTitle) {
  const bottom = MARGIN.top + c.height, right = MARGIN.left + c.width;
  for (const [v, text] of xTicks) {
    draw(c.svg, "line", { x1: x(v), x2: x(v), y1: MARGIN.top, y2: bottom, class: "rule" });
    draw(c.svg, "text", { x: x(v), y: bottom + 15, "text-anchor": "middle", class: "axis" }, text);
  }
  for (const [v, text] of yTicks) {
    draw(c.svg, "line", { x1: MARGIN.left, x2: right, y1: y(v), y2: y(v), class: "rule" });
    draw(c.svg, "text", { x: MARGIN.left - 6, y: y(v) + 4, "text-anchor": "end", class: "axis" }, text);
  }
  draw(c.svg, "text", { x: MARGIN.left + c.width / 2, y: bottom + 32, "text-anchor": "middle", class: "axis" }, xTitle);
  const middle = MARGIN.top + c.height / 2;
  draw(c.svg, "text", { x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})`, class: "axis" }, yTitle);
}
const inUnit = (ticks, size) => ticks.map(v => [v, String(+(v / size).toPrecision(6))]);
const faded = s => chosen.text && !matches(s) ? " unmatched" : "";

function timeline() {
  const rows = [];
  let start = 0, now = null, longest = 0, most = 1, lanes = [];
  for (const s of [...N.steps].sort((a, b) => a.graph - b.graph || a.begin - b.begin)) {
    if (s.graph !== now) { start += longest; longest = 0; lanes = []; now = s.graph; }
    let lane = lanes.findIndex(end => end <= s.begin + 1e-9);
    if (lane < 0) lane = lanes.push(0) - 1;
    lanes[lane] = s.begin + s.ns;
    longest = Math.max(longest, s.begin + s.ns); most = Math.max(most, lane + 1);
    rows.push([s, start + s.begin, lane]);
  }
  const end = start + longest || 1, high = most > 16 ? 12 : 26, c = chart("timeline", most * high + MARGIN.top + MARGIN.bottom);
  const x = ns => MARGIN.left + ns / end * c.width, y = lane => MARGIN.top + lane * high, [unit, size] = unitOf("time", end);
  const every = Math.ceil(most / 12), numbers = Array.from({ length: Math.ceil(most / every) }, (_, n) => n * every);
  axes(c, x, inUnit(ticksOf(end, c.width / TICK), size), `time since the call began (${unit})`,
    lane => y(lane) + high / 2, numbers.map(n => [n, String(n + 1)]), most > 4 ? "at the same time" : "");
  for (const [s, at, lane] of rows) {
    const width = Math.max(1, s.ns / end * c.width), title = `${s.kernel}, ${time(s.ns)}, ${s.scope || s.place}`;
    const facts = { x: x(at), y: y(lane) + 2, width, height: high - 4, class: (s.critical ? "critical" : "box") + faded(s) };
    linked(draw(c.svg, "rect", facts, title), s.kernel);
    if (width > 7.5 * s.kernel.length && high > 20) draw(c.svg, "text", { x: x(at) + 4, y: y(lane) + 17, "pointer-events": "none" }, s.kernel);
  }
}
function arena() {
  const m = N.memory;
  if (!m.rows.length) {
    $("arena-said").textContent = "";
    return $("arena").replaceChildren(make("p", "This call has no intermediate values.", "empty"));
  }
  const steps = Math.max(m.steps, 1), top = Math.max(1, ...m.rows.map(r => r.offset + r.bytes)), c = chart("arena", 320);
  const arenas = Object.entries(m.arenas).map(([n, size]) => `${bytes(size)} reserved on ${n}`).join(", ");
  $("arena-said").textContent = `Peak: ${bytes(m.peak)} at command ${m.at}; ${arenas}. Weights, arguments and results are not included.`;
  const x = n => MARGIN.left + n / steps * c.width, y = b => MARGIN.top + c.height - b / top * c.height, [unit, size] = unitOf("bytes", top);
  const xTicks = ticksOf(steps, Math.min(steps, c.width / TICK)).filter(Number.isInteger);
  axes(c, x, inUnit(xTicks, 1), "command number", y, inUnit(ticksOf(top, 6), size), `offset in the reserved memory (${unit})`);
  for (const r of m.rows) {
    const width = Math.max(1, x(r.last + 1) - x(r.first)), height = Math.max(1, y(r.offset) - y(r.offset + r.bytes));
    const title = `${bytes(r.bytes)}, ${r.type}, computed by ${r.producer}, read by ${r.read_by.join(", ")}, ${r.loc}`;
    linked(draw(c.svg, "rect", { x: x(r.first), y: y(r.offset + r.bytes), width, height, class: "alive" }, title), r.producer);
  }
  const points = m.alive.flatMap((sum, n) => [`${x(n)},${y(Math.min(sum, top))}`, `${x(n + 1)},${y(Math.min(sum, top))}`]);
  draw(c.svg, "polyline", { points: points.join(" ") });
  draw(c.svg, "line", { x1: x(m.at + 0.5), x2: x(m.at + 0.5), y1: MARGIN.top, y2: MARGIN.top + c.height, class: "peak" });
}
/** Return the kernels with arithmetic and memory traffic as points of the roofline chart. */
function rooflinePoints() {
  const all = total(), kernels = Map.groupBy(timed().filter(s => s.flops > 0 && s.bytes > 0), s => `${s.kernel} ${s.ns}`);
  return [...kernels.values()].map(some => {
    const s = some[0], x = s.flops / s.bytes, rate = F.roof.levels[s.level].rate ?? Infinity;
    return { s, x, y: s.flops / s.ns, limit: Math.min(F.roof.flops, x * rate), share: nsOf(some) / all };
  });
}
/** Explain the lines and colours of the roofline chart, and points above their line. */
function rooflineTexts(rows) {
  const { levels } = F.roof, one = F.target === undefined || F.target.startsWith("cpu") ? "one core" : "the GPU";
  const above = rows.filter(r => r.y > 1.05 * r.limit).length;
  $("roof-said").textContent = `Limits of ${one} in the cost model: each slope is the bandwidth of one level of memory, the flat part is arithmetic. ` +
    "A kernel has the colour of the level that its data fits, and that level's line is its limit. Data in a cache is faster than memory, so a kernel may be above the line of memory." +
    (above ? ` ${count(above, "kernel")} ${above === 1 ? "is above its" : "are above their"} own line too: there the cost model is too low for this machine, or counts too many operations.` : "");
  $("roof-legend").replaceChildren(make("span", "Data in:"), ...levels.flatMap((level, n) => [
    make("i", undefined, `key dot level${levels.length - n}`), `${level.name}${level.rate ? ` (${digits(level.rate)} GB/s)` : ""}${level.size ? `, up to ${bytes(level.size)}` : ""} `]),
    make("span", " · larger dot: larger share of the time"));
}
function roofline() {
  const c = chart("roof", 360), { flops: roof, levels } = F.roof, rows = rooflinePoints(), slopes = levels.map(level => level.rate);
  rooflineTexts(rows);
  const slowest = levels.at(-1).rate, lows = [0.1, ...rows.map(r => r.x)], speeds = [1, roof / 100, ...rows.map(r => r.y)];
  const left = Math.floor(Math.log10(Math.min(...lows))), right = Math.ceil(Math.log10(Math.max(100, roof / slowest, ...lows)));
  const low = Math.floor(Math.log10(Math.min(...speeds))), high = Math.ceil(Math.log10(Math.max(roof * 1.1, ...speeds)));
  const x = v => MARGIN.left + (Math.log10(v) - left) / (right - left) * c.width;
  const y = v => MARGIN.top + c.height - (Math.log10(v) - low) / (high - low) * c.height;
  const powers = (from, to) => Array.from({ length: to - from + 1 }, (_, n) => [10 ** (from + n), String(+(10 ** (from + n)).toPrecision(6))]);
  axes(c, x, powers(left, right), "operations per byte of memory traffic", y, powers(low, high), "GFLOP/s");
  draw(c.svg, "text", { x: x(10 ** right) - 4, y: y(roof) - 7, "text-anchor": "end", class: "axis" }, `arithmetic: ${digits(roof)} GFLOP/s`);
  slopes.forEach((rate, n) => {
    if (!rate) return;
    const begin = Math.max(10 ** left, 10 ** low / rate), points = [[begin, begin * rate], [roof / rate, roof], [10 ** right, roof]];
    draw(c.svg, "polyline", { points: points.map(([a, b]) => `${x(a)},${y(b)}`).join(" "), class: `roof level${levels.length - n}` });
  });
  for (const r of rows) {
    const title = `${r.s.kernel}: ${digits(r.y)} GFLOP/s, ${digits(r.x)} operations per byte, ${time(r.s.ns)}, ${percent(r.share)}, data in ${levels[r.s.level].name}`;
    const facts = { cx: x(r.x), cy: y(r.y), r: 4 + 10 * Math.sqrt(r.share), class: `level${levels.length - r.s.level}${faded(r.s)}` };
    linked(draw(c.svg, "circle", facts, title), r.s.kernel);
  }
  if (!rows.length) draw(c.svg, "text", { x: MARGIN.left + c.width / 2, y: MARGIN.top + c.height / 2, "text-anchor": "middle", class: "axis" }, "No kernel has arithmetic.");
}
function charts() { timeline(); arena(); roofline(); }
