// The graph: a node for each command, layers as boxes that open on click, wrapped into columns that fit the view.
const NODE = { width: 184, height: 44, across: 22, down: 28 };
const BOX = { side: 10, head: 20 };  // pixels inside a box at each side, and above it for its name
const STACKED = 10;    // units of a layer above which runs of equal layers are one node
const ABREAST = { least: 2, most: 6 };  // nodes in a row: as many as are readable in the view; a wider level continues below
const COLUMN_GAP = 56;
const READABLE = 0.85; // zoom at which labels are 10 pixels high: the first view and jumps are not smaller
const LARGEST = 1.2;   // zoom that fitting does not exceed
const opened = new Set();
let cy, shown = [], moved = false;  // whether the reader has moved the view

/** Return the units that are drawn: a tree of {unit, inside} in which opened layers have their units inside. */
function visibleUnits(unit) {
  return unitsInside(unit).map(u => u.layer && opened.has(u.id) ? { unit: u, inside: visibleUnits(u) } : { unit: u });
}
/** Return the pairs of ids of units of which the second waits for the first. */
function pairsOf(units, steps) {
  const unitOf = new Map(units.flatMap(u => u.steps.map(s => [s.number, u.id]))), found = new Map();
  for (const s of steps) for (const n of s.before) {
    const [a, b] = [unitOf.get(n), unitOf.get(s.number)];
    if (a && b && a !== b) found.set(`${a} ${b}`, [a, b]);
  }
  return [...found.values()];
}
/** Return the units by levels: each level waits for earlier levels only; a wide level is several rows. */
function rowsOf(tree, pairs) {
  const before = new Map(tree.map(t => [t.unit.id, []])), level = new Map(), rows = [];
  for (const [a, b] of pairs) before.get(b).push(a);
  for (const t of tree) level.set(t.unit.id, Math.max(-1, ...before.get(t.unit.id).map(a => level.get(a) ?? -1)) + 1);
  const fitting = Math.floor((cy.width() - 32) / READABLE / (NODE.width + NODE.across)), abreast = Math.min(Math.max(fitting, ABREAST.least), ABREAST.most);
  for (const [, some] of [...Map.groupBy(tree, t => level.get(t.unit.id))].sort((a, b) => a[0] - b[0])) {
    for (let n = 0; n < some.length; n += abreast) rows.push(some.slice(n, n + abreast));
  }
  return rows;
}
/** Split rows into columns not higher than ``most`` pixels, if they have several rows. */
function columnsOf(rows, most) {
  const columns = [];
  for (const row of rows) {
    const last = columns.at(-1), height = Math.max(...row.map(t => t.size.height)) + NODE.down;
    if (last && last.height + height <= most) { last.rows.push(row); last.height += height; } else columns.push({ rows: [row], height });
  }
  for (const c of columns) c.width = Math.max(...c.rows.map(row => row.reduce((sum, t) => sum + t.size.width + NODE.across, -NODE.across)));
  return columns;
}
const sizeOf = columns => ({
  width: columns.reduce((sum, c) => sum + c.width + COLUMN_GAP, -COLUMN_GAP),
  height: Math.max(...columns.map(c => c.height)) - NODE.down,
});
const zoomOf = ({ width, height }) => Math.min((cy.width() - 32) / width, (cy.height() - 32) / height, LARGEST);
/** Return the columns of rows that make the whole as large as possible in the view. */
function bestColumns(rows) {
  let best = columnsOf(rows, Infinity);
  const whole = best[0].height;
  for (let parts = 2; parts <= Math.min(rows.length, 12); parts++) {
    const columns = columnsOf(rows, whole / parts + NODE.height);
    if (zoomOf(sizeOf(columns)) > zoomOf(sizeOf(best)) * 1.05) best = columns;
  }
  return best;
}
/** Lay out units: set ``size`` and the centre ``at`` of each, the centre relative to the layer around it. */
function arrange(tree) {
  const units = tree.map(t => t.unit);
  for (const t of tree) {
    const inner = t.inside ? arrange(t.inside) : undefined;
    t.size = inner ? { width: inner.width + 2 * BOX.side, height: inner.height + 2 * BOX.side + BOX.head } : { width: NODE.width, height: NODE.height };
  }
  const columns = bestColumns(rowsOf(tree, pairsOf(units, units.flatMap(u => u.steps)))), size = sizeOf(columns);
  let left = -size.width / 2;
  columns.forEach((column, number) => {
    let top = -size.height / 2;
    for (const row of column.rows) {
      const high = Math.max(...row.map(t => t.size.height));
      let x = left + (column.width - row.reduce((sum, t) => sum + t.size.width + NODE.across, -NODE.across)) / 2;
      for (const t of row) {
        Object.assign(t, { at: { x: x + t.size.width / 2, y: top + high / 2 }, column: number });
        x += t.size.width + NODE.across;
      }
      top += high + NODE.down;
    }
    left += column.width + COLUMN_GAP;
  });
  return size;
}
const pen = document.createElement("canvas").getContext("2d");
/** Return the width of a text in a node, in pixels. */
function textWidth(text, bold) {
  pen.font = `${bold ? "bold " : ""}12px system-ui, sans-serif`;
  return pen.measureText(text).width;
}
/** Shorten a text to the width of a node by dropping its middle. */
function fitted(text, bold) {
  for (let n = text.length; n > 4; n--) {
    const short = n === text.length ? text : `${text.slice(0, Math.ceil(n / 2))}…${text.slice(-Math.floor(n / 2))}`;
    if (textWidth(short, bold) <= NODE.width - 14) return short;
  }
  return text.slice(0, 4);
}
/** Return the data of the node of a unit; ``most`` is the largest share of a unit that is shown. */
function nodeData(unit, isOpen, most) {
  const some = unit.steps.filter(s => s.bound !== "control"), ns = nsOf(unit.layer ? some : unit.steps), share = ns / total(), first = unit.steps[0];
  const kinds = unit.inside ? count(unit.inside.length, "equal layer") : count(unit.steps.length, "command");
  const kernel = unit.name === first.kernel ? time(ns) : first.kernel || "loop";
  const under = unit.layer ? `${kinds} · ${percent(share)}` : `${first.runs > 1 ? `${first.runs.toLocaleString("en")} × ` : ""}${kernel} · ${percent(share)}`;
  const name = unit.name || "loop", label = isOpen ? `${name} · ${percent(share)}` : `${fitted(name, true)}\n${fitted(under)}`;
  return { id: unit.id, label, heat: Math.min(1, share / most), critical: unit.steps.some(s => s.critical) ? 1 : 0, box: isOpen ? 1 : 0, layer: unit.layer ? 1 : 0 };
}
/** Return the nodes of a tree of units, with absolute positions; a box has the size of what it contains. */
function nodesOf(tree, most, origin = { x: 0, y: 0 }, parent = undefined) {
  return tree.flatMap(t => {
    const at = { x: origin.x + t.at.x, y: origin.y + t.at.y }, data = { ...nodeData(t.unit, Boolean(t.inside), most), parent };
    data.shift = t.inside ? (textWidth(data.label, true) - t.size.width) / 2 : 0;  // its name begins at the left of a box
    t.absolute = at;
    const own = { data, classes: t.unit.layer ? "layer" : "kernel", position: at };
    return t.inside ? [own, ...nodesOf(t.inside, most, { x: at.x, y: at.y + BOX.head / 2 }, t.unit.id)] : [own];
  });
}
const leavesOf = tree => tree.flatMap(t => t.inside ? leavesOf(t.inside) : [t]);
/** Return the class of an edge between two places: up to another column, past other nodes, or directly down. */
function edgeClass(a, b, leaves) {
  if (b.y <= a.y + NODE.height / 2) return "back";
  const onLine = ({ x, y }) => y > a.y + 1 && y < b.y - 1 && Math.abs(a.x + (b.x - a.x) * (y - a.y) / (b.y - a.y) - x) < NODE.width / 2;
  return leaves.some(t => onLine(t.absolute)) ? "skip" : "";
}
function elements() {
  const tree = visibleUnits(), leaves = leavesOf(tree), places = new Map(leaves.map(t => [t.unit.id, t]));
  arrange(tree);
  const most = Math.max(...leaves.map(t => nsOf(t.unit.steps.filter(s => s.bound !== "control")) / total()), 1e-9), nodes = nodesOf(tree, most);
  const edges = pairsOf(leaves.map(t => t.unit), N.steps).map(([source, target]) => (
    { data: { id: `${source}_${target}`, source, target }, classes: edgeClass(places.get(source).absolute, places.get(target).absolute, leaves) }));
  shown = tree;
  return [...nodes, ...edges];
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
  const label = { label: "data(label)", color: text, "font-size": 12, "font-family": "system-ui, sans-serif", "text-wrap": "wrap", "text-valign": "center", "line-height": 1.25 };
  const box = { shape: "round-rectangle", width: NODE.width, height: NODE.height, "border-width": 1, "border-color": edge };
  const line = { width: 1.5, "line-color": edge, "target-arrow-shape": "triangle", "target-arrow-color": edge, "curve-style": "bezier" };
  return [
    { selector: "node", style: { ...label, ...box } },
    { selector: ".kernel", style: { "background-color": heat(kernel) } },
    { selector: ".layer", style: { "background-color": heat(layer), "font-weight": "bold", shape: "rectangle", "border-style": "double", "border-width": 4 } },
    { selector: ".layer[box = 1]", style: { "background-color": layer, "text-valign": "top", "text-margin-y": -2, "text-margin-x": "data(shift)", padding: BOX.side, "border-style": "solid", "border-width": 1 } },
    { selector: "node[critical = 1][box = 0]", style: { "border-color": critical } },
    { selector: ".kernel[critical = 1]", style: { "border-width": 2 } },
    { selector: "edge", style: line },
    { selector: ".skip", style: { "curve-style": "unbundled-bezier", "control-point-distances": [-NODE.width * 0.6], "control-point-weights": [0.5], "source-endpoint": "90deg", "target-endpoint": "90deg" } },
    { selector: ".back", style: { "curve-style": "taxi", "taxi-direction": "rightward", "taxi-turn": -18, "source-endpoint": "90deg", "target-endpoint": "270deg" } },
    { selector: ".chosen", style: { "border-width": 4, "border-style": "solid", "border-color": mark } },
    { selector: ".unmatched", style: { opacity: 0.2 } },
  ];
}
/** Show the whole graph, or its beginning where labels would be too small to read. */
function fit(readable = false) {
  cy.resize();
  cy.fit(undefined, 16);
  if (cy.zoom() > LARGEST) { cy.zoom(LARGEST); cy.center(); }
  if (!readable || cy.zoom() >= READABLE) return;
  const box = cy.elements().boundingBox(), left = box.w * READABLE < cy.width() - 32 ? (cy.width() - box.w * READABLE) / 2 : 16;
  cy.viewport({ zoom: READABLE, pan: { x: left - box.x1 * READABLE, y: 16 - box.y1 * READABLE } });
}
/** Move the view to some nodes, large enough to read. */
function center(nodes) {
  moved = true;
  if (!nodes.length) return;
  cy.fit(nodes, 40);
  cy.zoom({ level: Math.min(Math.max(cy.zoom(), READABLE), LARGEST), renderedPosition: { x: cy.width() / 2, y: cy.height() / 2 } });
  cy.center(nodes);
}
function graph() {
  cy.elements().remove();
  cy.add(elements());
  $("groups").hidden = !allLayers().length;
  $("groups").textContent = opened.size ? "Close all layers" : "Open all layers";
  mark();
}
/** Return the ids of all layers of the graph. */
function allLayers(unit) {
  return unitsInside(unit).filter(u => u.layer).flatMap(u => [u.id, ...allLayers(u)]);
}
/** Show the selection and the search in the graph. */
function mark() {
  const steps = chosenSteps(), trees = new Map(flat(shown).map(t => [t.unit.id, t]));
  const isChosen = id => trees.has(id) && steps.size > 0 && trees.get(id).unit.steps.every(s => steps.has(s.number));
  cy.elements().removeClass("chosen unmatched");
  for (const node of cy.nodes()) {
    const t = trees.get(node.id());
    if (isChosen(node.id()) && !isChosen(node.data("parent"))) node.addClass("chosen");
    if (chosen.text && !t.inside && !t.unit.steps.some(matches)) node.addClass("unmatched");
  }
}
const flat = tree => tree.flatMap(t => [t, ...flat(t.inside ?? [])]);
/** Open or close a layer; the view stays if all of the layer is readable in it. */
function toggleLayer(id) {
  if (opened.has(id)) opened.delete(id); else opened.add(id);
  graph();
  fit();
  if (cy.zoom() < READABLE) center(cy.getElementById(id));
}
/** Open the layers around a command and move to it. */
function reveal(number) {
  const visit = unit => unitsInside(unit).some(u => {
    if (!u.steps.some(s => s.number === number)) return false;
    if (u.layer) { opened.add(u.id); visit(u); }
    return true;
  });
  if (!cy.getElementById(`s${number}`).length) { visit(); graph(); }
  center(cy.getElementById(`s${number}`));
}
/** Open layers level by level, as long as all labels are readable in the view. */
function openReadable() {
  for (;;) {
    const closed = leavesOf(visibleUnits()).filter(t => t.unit.layer).map(t => t.unit.id);
    if (!closed.length) return;
    closed.forEach(id => opened.add(id));
    if (zoomOf(arrange(visibleUnits())) < READABLE) { closed.forEach(id => opened.delete(id)); return; }
  }
}
/** Return the unit of a node. */
const unitOfNode = node => flat(shown).find(t => t.unit.id === node.id()).unit;
function startGraph() {
  cy = cytoscape({ container: $("cy"), elements: [], style: graphStyle(), minZoom: 0.02, maxZoom: 4, autoungrabify: true });
  // Without a key the wheel scrolls the page: the graph must not catch a reader who passes it.
  $("cy").addEventListener("wheel", e => { if (!e.ctrlKey && !e.metaKey) e.stopImmediatePropagation(); }, { capture: true });
  cy.on("tap", "node", e => {
    const unit = unitOfNode(e.target);
    if (!unit.layer) return chooseStep(unit.steps[0]);
    toggleLayer(unit.id);
    chooseLayer(unit.name, unit.steps);
  });
  cy.on("dragpan pinchzoom scrollzoom", () => { moved = true; });
  $("fit").addEventListener("click", () => { moved = false; fit(); });
  const zoom = factor => { moved = true; cy.zoom({ level: cy.zoom() * factor, renderedPosition: { x: cy.width() / 2, y: cy.height() / 2 } }); };
  $("closer").addEventListener("click", () => zoom(1.4));
  $("further").addEventListener("click", () => zoom(1 / 1.4));
  $("groups").addEventListener("click", () => {
    if (opened.size) opened.clear(); else allLayers().forEach(id => opened.add(id));
    graph();
    fit(!opened.size);
  });
  cy.resize();
  openReadable();
  graph();
  fit(true);
}
