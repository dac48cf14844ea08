// The graph: a node for each command, layers as boxes that open and close, wrapped into columns that fit the view.
const NODE = { width: 176, height: 44, across: 24, down: 30 };
const MANY = 40;    // commands above which layers are closed at first
const BOXES = 60;   // most layers; above, they are those of the level of names before
const ABREAST = 6;  // nodes in a row; a wider level continues below
const opened = new Set();
let cy;

/** Return the runs of successive commands of a layer, at the deepest level of names whose runs have 3 commands or more. */
function runsOfLayers() {
  const deepest = Math.max(0, ...N.steps.map(s => s.scope ? s.scope.split("/").length : 0));
  let best = [];
  for (let depth = 1; depth <= deepest; depth++) {
    const runs = [];
    for (const s of N.steps) {
      const scope = s.scope.split("/").slice(0, depth).join("/"), last = runs.at(-1);
      if (last && last.scope === scope && last.graph === s.graph && scope) last.steps.push(s);
      else runs.push({ id: `g${s.number}`, scope, graph: s.graph, steps: [s] });
    }
    if (depth > 1 && (runs.length > BOXES || N.steps.length / runs.length < 3)) break;
    best = runs;
  }
  return best.filter(run => run.scope && run.steps.length > 1);
}
/** Return pairs of numbers of commands, the second waiting for the first; graphs run one after the other. */
function dependencies() {
  const found = [];
  for (const s of N.steps) {
    found.push(...s.after.map(n => [n, s.number]));
    const before = s.after.length ? undefined : N.steps.findLast(o => o.graph < s.graph);
    if (before) found.push([before.number, s.number]);
  }
  return found;
}
/** Return the positions of units by their level, in columns that make the whole as large as possible in the view. */
function positions(units, edges) {
  const level = new Map(), before = new Map(units.map(u => [u.id, []]));
  for (const [a, b] of edges) before.get(b).push(a);
  for (const u of units) level.set(u.id, Math.max(-1, ...before.get(u.id).map(a => level.get(a) ?? -1)) + 1);
  const rows = [];
  const levels = [...Map.groupBy(units, u => level.get(u.id))].sort((a, b) => a[0] - b[0]).map(([, some]) => some);
  for (const some of levels) for (let n = 0; n < some.length; n += ABREAST) rows.push(some.slice(n, n + ABREAST));
  const last = new Map();
  rows.forEach((row, n) => row.forEach(u => { if (u.box) last.set(u.box, n); }));
  let until = -1;
  const whole = rows.map((row, n) => {  // a column may begin where no box is cut
    const begins = until < n;
    row.forEach(u => { if (u.box) until = Math.max(until, last.get(u.box)); });
    return begins;
  });
  const step = NODE.height + NODE.down, gap = 60;
  const columnsOf = most => {
    const columns = [[]];
    rows.forEach((row, n) => { if (columns.at(-1).length >= most && whole[n]) columns.push([]); columns.at(-1).push(row); });
    return columns;
  };
  const widthOf = column => Math.max(...column.map(row => row.length)) * (NODE.width + NODE.across);
  const zoom = columns => Math.min(cy.width() / columns.reduce((sum, c) => sum + widthOf(c) + gap, 0),
    cy.height() / (Math.max(...columns.map(c => c.length)) * step), 1);
  let best = columnsOf(rows.length);
  for (let n = 1; n < rows.length; n++) { const columns = columnsOf(n); if (zoom(columns) > zoom(best) * 1.02) best = columns; }
  const place = new Map();
  let left = 0;
  for (const column of best) {
    const width = widthOf(column);
    column.forEach((row, y) => row.forEach((u, n) => place.set(u.id, {
      x: left + width / 2 + (n - (row.length - 1) / 2) * (NODE.width + NODE.across), y: y * step })));
    left += width + gap;
  }
  return place;
}
function elements() {
  const all = total(), most = Math.max(...timed().map(s => s.runs * s.ns / all), 1e-9), runs = runsOfLayers();
  const runOf = new Map(runs.flatMap(run => run.steps.map(s => [s.number, run])));
  const unitOf = s => { const run = runOf.get(s.number); return run && !opened.has(run.id) ? run.id : `s${s.number}`; };
  const units = new Map(), found = [];
  for (const run of runs) {
    const ns = nsOf(run.steps.filter(s => s.bound !== "control")), label = short(run.scope, 26);
    const data = { id: run.id, scope: run.scope, heat: ns / all, critical: run.steps.some(s => s.critical) ? 1 : 0 };
    const text = `${label}\n${count(run.steps.length, "command")} · ${percent(ns / all)}`;
    found.push({ data: { ...data, label: opened.has(run.id) ? label : text, box: opened.has(run.id) ? 1 : 0 }, classes: "layer" });
    if (!opened.has(run.id)) units.set(run.id, { id: run.id });
  }
  for (const s of N.steps) {
    const run = runOf.get(s.number);
    if (run && !opened.has(run.id)) continue;
    units.set(`s${s.number}`, { id: `s${s.number}`, box: run?.id });
    const share = s.runs * s.ns / all, times = s.runs > 1 ? `${s.runs.toLocaleString("en")} × ` : "";
    const data = { kernel: s.kernel, critical: s.critical ? 1 : 0, number: s.number, heat: Math.min(1, share / most) };
    const label = `${short(s.kernel || "loop", 26)}\n${times}${time(s.ns)} · ${percent(share)}`;
    found.push({ data: { id: `s${s.number}`, parent: run?.id, label, ...data }, classes: "kernel" });
  }
  const order = new Map(N.steps.map(s => [unitOf(s), s.number]).reverse());
  const pairs = new Map(dependencies().map(([a, b]) => [unitOf(N.steps[a]), unitOf(N.steps[b])])
    .filter(([a, b]) => a !== b).map(pair => [pair.join(), pair]));
  const place = positions([...units.values()].sort((a, b) => order.get(a.id) - order.get(b.id)), [...pairs.values()]);
  for (const e of found) if (place.has(e.data.id)) e.position = place.get(e.data.id);
  return [...found, ...[...pairs.values()].map(([source, target]) => ({ data: { id: `${source}_${target}`, source, target } }))];
}
/** Return a colour of the style sheet as cytoscape reads it, in the present mode. */
function colour(name) {
  const probe = $("theme"), before = probe.style.color;
  probe.style.color = `var(--${name})`;
  const found = getComputedStyle(probe).color;
  probe.style.color = before;
  return found;
}
function graphStyle() {
  const [text, edge, kernel, hot, layer, critical, mark] = ["text", "edge", "kernel", "hot", "layer", "critical", "chosen"].map(colour);
  const heat = from => `mapData(heat, 0, 1, ${from}, ${hot})`;
  const label = { label: "data(label)", color: text, "font-size": 12, "font-family": "system-ui, sans-serif", "text-wrap": "wrap", "text-valign": "center" };
  const box = { shape: "round-rectangle", width: NODE.width, height: NODE.height, "border-width": 1, "border-color": edge };
  return [
    { selector: "node", style: { ...label, ...box } },
    { selector: ".kernel", style: { "background-color": heat(kernel) } },
    { selector: ".layer", style: { "background-color": heat(layer), "font-weight": "bold", shape: "rectangle" } },
    { selector: ".layer[box = 1]", style: { "background-color": layer, "text-valign": "top", padding: 8 } },
    { selector: "node[critical = 1][^box], .layer[critical = 1][box = 0]", style: { "border-width": 2, "border-color": critical } },
    { selector: "edge", style: { width: 1.5, "line-color": edge, "target-arrow-shape": "triangle", "target-arrow-color": edge, "curve-style": "bezier" } },
    { selector: ".chosen", style: { "border-width": 4, "border-color": mark } },
    { selector: ".unmatched", style: { opacity: 0.2 } },
  ];
}
function fit() {
  cy.resize();
  cy.fit(undefined, 16);
  if (cy.zoom() > 1.2) { cy.zoom(1.2); cy.center(); }
}
function graph() {
  cy.elements().remove();
  cy.add(elements());
  $("groups").hidden = !runsOfLayers().length;
  $("groups").textContent = opened.size ? "Show layers" : "Show kernels";
  fit();
  mark();
}
/** Show the selection and the search in the graph. */
function mark() {
  const [kernel, scope] = [chosen.kernel, chosen.scope];
  cy.elements().removeClass("chosen unmatched");
  cy.nodes().filter(n => kernel ? n.data("kernel") === kernel : scope && n.data("scope") && inScope(layerOf(n.data("scope")), layerOf(scope))).addClass("chosen");
  if (!chosen.text) return;
  const runs = new Map(runsOfLayers().map(run => [run.id, run]));
  cy.nodes().filter(n => !(runs.get(n.id())?.steps ?? [N.steps[n.data("number")]]).some(matches)).addClass("unmatched");
}
function toggleLayer(id) {
  if (opened.has(id)) opened.delete(id); else opened.add(id);
  graph();
}
function startGraph() {
  cy = cytoscape({ container: $("cy"), elements: [], style: graphStyle(), minZoom: 0.02, maxZoom: 4, autoungrabify: true });
  if (N.steps.length <= MANY) runsOfLayers().forEach(run => opened.add(run.id));
  cy.on("tap", "node", e => e.target.data("scope") ? chooseLayer(e.target.data("scope"), e.target.id()) : choose(e.target.data("kernel")));
  cy.on("dbltap", ".layer", e => toggleLayer(e.target.id()));
  $("fit").addEventListener("click", fit);
  const middle = () => ({ x: cy.width() / 2, y: cy.height() / 2 });
  $("closer").addEventListener("click", () => cy.zoom({ level: cy.zoom() * 1.4, renderedPosition: middle() }));
  $("further").addEventListener("click", () => cy.zoom({ level: cy.zoom() / 1.4, renderedPosition: middle() }));
  $("groups").addEventListener("click", () => {
    if (opened.size) opened.clear(); else runsOfLayers().forEach(run => opened.add(run.id));
    graph();
  });
  graph();
}
