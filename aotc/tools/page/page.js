"use strict";
const F = JSON.parse(document.getElementById("facts").textContent);
const $ = id => document.getElementById(id);
const make = (tag, text, name) => { const e = document.createElement(tag); if (text !== undefined) e.textContent = text; if (name) e.className = name; return e; };
const SVG = "http://www.w3.org/2000/svg";
const draw = (parent, tag, facts, said) => {
  const e = document.createElementNS(SVG, tag);
  for (const [k, v] of Object.entries(facts)) e.setAttribute(k, v);
  if (said !== undefined) { const t = document.createElementNS(SVG, tag === "text" ? "tspan" : "title"); t.textContent = said; e.append(t); }
  parent.append(e);
  return e;
};
const bytes = n => n < 1000 ? `${n} B` : n < 1e6 ? `${(n / 1e3).toFixed(1)} kB` : n < 1e9 ? `${(n / 1e6).toFixed(1)} MB` : `${(n / 1e9).toFixed(2)} GB`;
const time = ns => ns < 1e3 ? `${ns.toFixed(0)} ns` : ns < 1e6 ? `${(ns / 1e3).toFixed(1)} us` : ns < 1e9 ? `${(ns / 1e6).toFixed(2)} ms` : `${(ns / 1e9).toFixed(2)} s`;
const names = Object.keys(F.kernels);
const stepsOf = name => F.steps.filter(s => s.kernel === name);

// ---------------------------------------------------------------- head
$("title").textContent = `${F.path}: @${F.function} for ${F.target}`;
$("summary").textContent = `${bytes(F.bytes)}, ${names.length} kernels, ${F.steps.length} commands, ${time(F.work)} one after the other` +
  ` (${F.measured_on ? "measured on " + F.measured_on : "predicted"}), at least ${time(F.path_ns)} side by side, ${bytes(F.memory.peak)} alive at most; ${F.producer}`;

// ---------------------------------------------------------------- the panel
function show(name) {
  const k = F.kernels[name], panel = $("panel"), steps = stepsOf(name);
  panel.replaceChildren(make("h3", name));
  if (!k) return;
  const add = (title, text) => { if (text) { panel.append(make("h3", title), make("pre", text)); } };
  const ns = steps.map(s => s.ns), s = steps[0];
  if (s) panel.append(make("p", `${k.kind || "kernel"}; ${time(ns[0])}${s.measured === null ? " predicted" : " measured"}, bound by ${s.bound}, ` +
    `${bytes(s.bytes)}, ${(s.flops / s.ns).toFixed(1)} GFLOP/s, ${(s.bytes / s.ns).toFixed(1)} GB/s, ${s.items} items by ${s.claim}, code ${bytes(k.code_bytes)}`));
  if (k.bytes_in) panel.append(make("p", `reads ${k.bytes_in} B, writes ${k.bytes_out} B, ${k.work} operations`));
  if (k.ops.length) panel.append(make("p", `ops: ${k.ops.join(", ")}`));
  add("Lines of the model", k.lines.length ? k.lines.join("\n") : k.loc);
  for (const n of k.neighbours) panel.append(make("p", `${n.taken ? "took" : "refused"} ${n.ops.join(", ")} (${n.lines.join(", ")}): ${n.reason}`, n.taken ? "took" : "refused"));
  const places = new Set(k.lines);
  add("StableHLO of these lines", F.source.filter(row => places.has(row[1]) && /^\s*(%|"|stablehlo\.|chlo\.)/.test(row[0])).map(row => row[0].trim()).join("\n"));
  add("Loops", k.text);
  add("Assembly", k.asm);
}

// ---------------------------------------------------------------- the graph
function layers() {
  const level = {};
  let graph = null, base = 0, most = 0;
  for (const s of F.steps) {  // graphs run one after the other
    if (s.graph !== graph) { base = most; graph = s.graph; }
    level[s.number] = Math.max(base, ...s.after.map(n => (level[n] ?? -1) + 1));
    most = Math.max(most, level[s.number] + 1);
  }
  return level;
}
function elements() {
  const level = layers(), found = [], rows = {};
  for (const s of F.steps) (rows[level[s.number]] ??= []).push(s);
  let top = 0;
  for (const l of Object.keys(rows).map(Number).sort((a, b) => a - b)) {
    const high = Math.max(...rows[l].map(s => Math.ceil(Math.max(1, F.kernels[s.kernel]?.ops.length ?? 1) / 4)));
    rows[l].forEach((s, n) => {
      const ops = F.kernels[s.kernel]?.ops ?? [], parent = `s${s.number}`, left = (n - (rows[l].length - 1) / 2) * 460;
      found.push({ data: { id: parent, label: `${s.number}: ${s.kernel}  ${time(s.ns)}`, kernel: s.kernel, critical: s.critical ? 1 : 0 } });
      (ops.length ? ops : [s.kernel]).forEach((op, i) => found.push({
        data: { id: `${parent}o${i}`, parent, label: op, kernel: s.kernel }, position: { x: left + (i % 4 - Math.min(3, ops.length - 1) / 2) * 100, y: top + Math.floor(i / 4) * 42 } }));
    });
    top += high * 42 + 80;
  }
  for (const s of F.steps) {
    for (const n of s.after) found.push({ data: { id: `e${n}_${s.number}`, source: `s${n}`, target: `s${s.number}` } });
    if (!s.after.length && F.steps[0].number !== s.number && F.steps.some(o => o.graph < s.graph)) {
      const before = F.steps.filter(o => o.graph < s.graph).at(-1);
      found.push({ data: { id: `g${before.number}_${s.number}`, source: `s${before.number}`, target: `s${s.number}` } });
    }
  }
  return found;
}
const cy = cytoscape({
  container: $("cy"), elements: elements(), layout: { name: "preset", fit: true, padding: 20 }, wheelSensitivity: 0.3, minZoom: 0.02, maxZoom: 4,
  style: [
    { selector: "node", style: { label: "data(label)", "font-size": 11, "text-valign": "center", shape: "round-rectangle", width: 92, height: 28, "background-color": "#fff", "border-width": 1, "border-color": "#9ab", "text-max-width": 88, "text-wrap": "ellipsis" } },
    { selector: ":parent", style: { "text-valign": "top", "font-size": 14, "font-weight": "bold", "background-color": "#e8eef4", "border-color": "#7a93ac", padding: 10, "text-max-width": 440, "text-wrap": "ellipsis" } },
    { selector: ":parent[critical = 1]", style: { "background-color": "#f9e8e3", "border-color": "#b3442e" } },
    { selector: "edge", style: { width: 1.5, "line-color": "#9ab", "target-arrow-shape": "triangle", "target-arrow-color": "#9ab", "curve-style": "bezier" } },
    { selector: ".chosen", style: { "border-width": 4, "border-color": "#e0a020" } },
  ],
});
if (cy.zoom() < 0.45) {  // of a long program the beginning, in letters that can be read
  const box = cy.elements().boundingBox();
  cy.zoom(0.7);
  cy.pan({ x: cy.width() / 2 - 0.7 * (box.x1 + box.x2) / 2, y: 20 - 0.7 * box.y1 });
}
function choose(name) {
  show(name);
  cy.elements().removeClass("chosen");
  cy.nodes(":parent").filter(n => n.data("kernel") === name).addClass("chosen");
}
cy.on("tap", "node", e => choose(e.target.data("kernel")));
const linked = (e, name) => { e.addEventListener("click", () => { choose(name); $("graph").scrollIntoView(); }); return e; };

// ---------------------------------------------------------------- pictures
const WIDTH = 1100, LEFT = 60;
function canvas(place, height) { const svg = draw($(place), "svg", { width: WIDTH + LEFT + 40, height, viewBox: `0 0 ${WIDTH + LEFT + 40} ${height}` }); return svg; }
function axis(svg, end, height, text, ticks = 10) {
  for (let n = 0; n <= ticks; n++) {
    const x = LEFT + n / ticks * WIDTH;
    draw(svg, "line", { x1: x, x2: x, y1: 6, y2: height - 20, class: "rule" });
    draw(svg, "text", { x, y: height - 6, "text-anchor": "middle" }, text(n / ticks * end));
  }
}
function timeline() {
  const rows = [], begins = {};
  let start = 0, graph = null, longest = 0, most = 0, lanes = [];
  for (const s of [...F.steps].sort((a, b) => a.graph - b.graph || a.begin - b.begin)) {
    if (s.graph !== graph) { start += longest; longest = 0; lanes = []; graph = s.graph; }
    let lane = lanes.findIndex(end => end <= s.begin + 1e-9);
    if (lane < 0) lane = lanes.push(0) - 1;
    lanes[lane] = s.begin + s.ns;
    longest = Math.max(longest, s.begin + s.ns); most = Math.max(most, lane + 1);
    begins[s.number] = start + s.begin;
    rows.push([s, start + s.begin, lane]);
  }
  const end = start + longest, height = most * 26 + 40, svg = canvas("timeline", height);
  axis(svg, end, height, time);
  for (const [s, at, lane] of rows) {
    const x = LEFT + at / end * WIDTH, width = Math.max(1, s.ns / end * WIDTH);
    linked(draw(svg, "rect", { x, y: 8 + lane * 26, width, height: 22, class: s.critical ? "critical" : "box" }, `${s.number}: ${s.kernel}, ${time(s.ns)}, ${s.loc}`), s.kernel);
    if (width > 8 * s.kernel.length) draw(svg, "text", { x: x + 4, y: 23 + lane * 26, "pointer-events": "none" }, s.kernel);
  }
}
function arena() {
  const m = F.memory, steps = Math.max(m.steps, 1), top = Math.max(1, ...m.rows.map(r => r.offset + r.bytes)), height = 320, svg = canvas("arena", height);
  $("arena-said").textContent = `${bytes(m.peak)} alive at step ${m.at}; ` + Object.entries(m.arenas).map(([n, size]) => `the arena of ${n} has ${bytes(size)}`).join(", ");
  const every = Math.ceil(steps / 10);
  axis(svg, Math.ceil(steps / every) * every, height, n => n.toFixed(0), Math.ceil(steps / every));
  const x = n => LEFT + n / (Math.ceil(steps / every) * every) * WIDTH, y = b => height - 24 - b / top * (height - 40);
  for (const r of m.rows) linked(draw(svg, "rect", { x: x(r.first), y: y(r.offset + r.bytes), width: Math.max(1, x(r.last + 1) - x(r.first)), height: Math.max(1, y(r.offset) - y(r.offset + r.bytes)), class: "alive" },
    `${bytes(r.bytes)} ${r.type} made by ${r.producer}, read by ${r.read_by.join(", ")}, ${r.loc}`), r.producer);
  const alive = [...Array(steps).keys()].map(n => m.rows.filter(r => r.first <= n && n <= r.last).reduce((sum, r) => sum + r.bytes, 0));
  draw(svg, "polyline", { points: alive.flatMap((b, n) => [`${x(n)},${y(Math.min(b, top))}`, `${x(n + 1)},${y(Math.min(b, top))}`]).join(" ") });
  draw(svg, "line", { x1: x(m.at + 0.5), x2: x(m.at + 0.5), y1: 6, y2: height - 20, class: "peak" });
  draw(svg, "text", { x: 4, y: 16 }, bytes(top));
}
function roofline() {
  const rows = F.steps.filter(s => s.flops > 0 && s.bytes > 0), height = 340, svg = canvas("roof", height);
  $("roof-said").textContent = `operations for a byte, and operations in a nanosecond; the roof is the cost model's, of one core or a GPU: ${F.roof.flops.toFixed(0)} GFLOP/s, ${F.roof.bytes.toFixed(0)} GB/s of memory`;
  const lx = v => LEFT + (Math.log10(v) + 2) / 5 * WIDTH, ly = v => height - 30 - (Math.log10(v) + 2) / 6 * (height - 40);
  for (let n = -2; n <= 3; n++) { draw(svg, "line", { x1: lx(10 ** n), x2: lx(10 ** n), y1: 6, y2: height - 24, class: "rule" }); draw(svg, "text", { x: lx(10 ** n), y: height - 8, "text-anchor": "middle" }, `${10 ** n}`); }
  for (let n = -2; n <= 4; n++) { draw(svg, "line", { x1: LEFT, x2: LEFT + WIDTH, y1: ly(10 ** n), y2: ly(10 ** n), class: "rule" }); draw(svg, "text", { x: 4, y: ly(10 ** n) + 4 }, `${10 ** n}`); }
  const knee = F.roof.flops / F.roof.bytes;
  draw(svg, "polyline", { points: [[0.01, 0.01 * F.roof.bytes], [knee, F.roof.flops], [1000, F.roof.flops]].map(([a, b]) => `${lx(a)},${ly(b)}`).join(" ") });
  for (const s of rows) linked(draw(svg, "circle", { cx: lx(Math.min(1000, Math.max(0.01, s.flops / s.bytes))), cy: ly(Math.min(1e4, Math.max(0.01, s.flops / s.ns))), r: 6 }, `${s.kernel}: ${(s.flops / s.ns).toFixed(1)} GFLOP/s, ${(s.flops / s.bytes).toFixed(2)} operations for a byte, ${time(s.ns)}`), s.kernel);
}

// ---------------------------------------------------------------- tables
function table(place, heads, rows, numbers) {
  const head = make("tr");
  heads.forEach((h, n) => head.append(make("th", h, numbers.includes(n) ? "n" : "")));
  $(place).append(head);
  for (const [cells, name] of rows) {
    const tr = make("tr", undefined, name ? "link" : "");
    cells.forEach((c, n) => tr.append(make("td", c, numbers.includes(n) ? "n" : "")));
    $(place).append(name ? linked(tr, name) : tr);
  }
}
timeline(); arena(); roofline();
table("table", ["kernel", "kind", "ops", "time", "bound", "bytes", "GFLOP/s", "GB/s", "code", "from"], F.steps.filter(s => F.kernels[s.kernel]).sort((a, b) => b.ns - a.ns).map(s => {
  const k = F.kernels[s.kernel];
  return [[s.kernel, k.kind, k.ops.length || "", time(s.ns), s.bound, bytes(s.bytes), (s.flops / s.ns).toFixed(1), (s.bytes / s.ns).toFixed(1), bytes(k.code_bytes), s.loc], s.kernel];
}), [2, 3, 5, 6, 7, 8]);
table("sizes", ["what", "bytes"], [...F.weights.map(w => [[`weight ${w.name}`, bytes(w.bytes)]]), ...F.segments.map(s => [[s.name, bytes(s.bytes)]])], [1]);
if (names.length) choose(stepsOf(names[0]).length ? names[0] : F.steps[0]?.kernel);
document.body.dataset.ready = "yes";
