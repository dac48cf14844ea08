// The table of layers: a tree of layers with kernels as leaves, each with its share of the time.
const ROWS = 24;      // rows that a screen shows: the largest layers are open until there are as many
const SIBLINGS = 20;  // rows of one layer before the rest folds into one row
const MERGED = 24;    // layers above which equal layers are one row at first
const open = new Set(), whole = new Set();

// Columns: title, class of its cells, the value that a click on the title sorts by, its text.
const COLUMNS = [
  { title: "Layer or kernel", kind: "", words: true, value: n => n.name },
  { title: "Share", kind: "", value: n => n.ns },
  { title: "Time", kind: "n", value: n => n.ns, text: n => time(n.ns) },
  { title: "Launches", kind: "n optional", value: n => n.launches, text: n => n.launches.toLocaleString("en") },
  { title: "Limited by", kind: "optional", words: true, value: n => n.bound, text: n => n.bound },
  { title: "Bytes moved", kind: "n optional", value: n => n.moved, text: n => bytes(n.moved) },
  { title: "GFLOP/s", kind: "n optional", value: n => n.flops / (n.ns || 1), text: n => rate(n.flops / (n.ns || 1)) },
  { title: "GB/s", kind: "n optional", value: n => n.moved / (n.ns || 1), text: n => rate(n.moved / (n.ns || 1)) },
];
const sorted = { column: 2, down: true };

/** Return a comparison of rows by the value of a column: texts with numbers in their natural order. */
function comparison(columns, { column, down }) {
  const value = columns[column].value, sign = down ? -1 : 1;
  return (a, b) => {
    const [x, y] = [value(a), value(b)];
    return sign * (typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y);
  };
}
/** Return the head of the table ``id``, whose columns sort by click; ``again`` draws the table. */
function sortableHead(id, columns, state, again) {
  const line = make("tr");
  columns.forEach(({ title, kind }, n) => {
    const th = make("th", undefined, kind), button = make("button", title, "sort"), active = state.column === n;
    button[kind.startsWith("n") ? "prepend" : "append"](make("span", active ? (state.down ? "▼" : "▲") : "", "arrow"));
    th.setAttribute("aria-sort", active ? (state.down ? "descending" : "ascending") : "none");
    button.addEventListener("click", () => {
      Object.assign(state, active ? { down: !state.down } : { column: n, down: !columns[n].words });
      again();
      document.querySelectorAll(`#${id} .sort`)[n].focus();
    });
    th.append(button);
    line.append(th);
  });
  return line;
}
/** Open the layers with the most time, as long as the table fits a screen. */
function openLargest(root) {
  let shown = root.children.length;
  const ready = [...root.children];
  while (ready.length) {
    ready.sort((a, b) => b.ns - a.ns);
    const node = ready.shift();
    if (!node.children.length) continue;
    const added = Math.min(node.children.length, SIBLINGS + 1);
    if (shown + added > ROWS) break;
    shown += added;
    open.add(node.path);
    ready.push(...node.children);
  }
}
/** Return a cell with a bar of a share of the whole and a text. */
function shareCell(share, text) {
  const td = make("td"), bar = make("span", undefined, "share"), filled = make("i");
  filled.style.width = `${100 * share}%`;
  bar.append(filled);
  td.append(bar, text);
  return td;
}
/** Return the cell with the name of a layer or kernel and small facts about it. */
function nameCell(node, depth, folded) {
  const td = make("td", undefined, "name");
  td.style.setProperty("--depth", depth);
  td.append(make("span", node.kernel ? "" : folded ? "▸" : "▾", "fold"), node.name, " ");
  if (!node.kernel) {
    const kernels = count(new Set(node.steps.map(s => s.kernel)).size, "kernel");
    td.append(make("small", node.count > 1 ? `${count(node.count, "equal layer")} · ${kernels}` : kernels));
    return td;
  }
  const ops = opsOf(node.kernel).length;
  td.append(make("small", [ops > 1 ? count(ops, "fused op") : "", node.steps[0].place].filter(Boolean).join(" · ")));
  td.append(make("small", count(node.launches, "launch"), "phone"));
  return td;
}
function layerRow(node, depth, searched) {
  const share = node.ns / total(), tr = make("tr", undefined, "link"), folded = !node.kernel && !searched && !open.has(node.path);
  if (!node.kernel) { tr.classList.add("scope"); tr.setAttribute("aria-expanded", String(!folded)); }
  tr.append(nameCell(node, depth, folded), shareCell(share, percent(share)));
  tr.append(...COLUMNS.slice(2).map(({ kind, text }) => make("td", text(node), kind)));
  const act = () => {
    if (node.kernel) return choose(node.kernel, true);
    if (open.has(node.path)) open.delete(node.path); else open.add(node.path);
    chooseLayer(node.name, node.steps);
  };
  tr.tabIndex = 0;
  tr.dataset.path = node.path.slice(1);
  tr.addEventListener("click", act);
  tr.addEventListener("keydown", e => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); act(); } });
  if (node.kernel ? node.kernel === chosen.kernel : sameSteps(node.steps)) tr.classList.add("selected");
  return tr;
}
/** Return true if the selected layer has these commands. */
const sameSteps = steps => !chosen.kernel && steps.length === chosen.steps.length && steps[0]?.number === chosen.steps[0];
function foldedRow(rest, node) {
  const tr = make("tr", undefined, "link"), td = make("td");
  td.colSpan = COLUMNS.length;
  td.append(make("span", "", "fold"), `${rest.length} more rows, ${percent(rest.reduce((sum, n) => sum + n.ns, 0) / total())} of the time`);
  tr.append(td);
  tr.addEventListener("click", () => { whole.add(node.path); layers(); });
  return tr;
}
function layers(first = false) {
  const searched = chosen.text !== "", steps = timed().filter(s => !searched || matches(s)), root = layerTree(steps, comparison(COLUMNS, sorted));
  if (first) openLargest(root);
  const body = [sortableHead("table", COLUMNS, sorted, layers)];
  const add = (node, depth) => {
    const all = whole.has(node.path) || node.children.length <= SIBLINGS + 1;
    for (const child of all ? node.children : node.children.slice(0, SIBLINGS)) {
      body.push(layerRow(child, depth, searched));
      if (searched || open.has(child.path)) add(child, depth + 1);
    }
    if (!all) body.push(foldedRow(node.children.slice(SIBLINGS), node));
  };
  add(root, 0);
  if (!steps.length) body.push(emptyRow(searched ? "No command matches the search." : "This function runs no kernel.", COLUMNS.length));
  $("table").replaceChildren(...body);
  $("hits").textContent = searched ? `${steps.length} of ${count(timed().length, "command")}` : "";
  $("next").hidden = !searched || !steps.length;
}
function emptyRow(text, columns) {
  const tr = make("tr"), td = make("td", text, "dim");
  td.colSpan = columns;
  tr.append(td);
  return tr;
}
function mergeLayers(yes) {
  chosen.merged = yes;
  $("merge").checked = yes;
  open.clear();
  layers(true);
}
function openAll(yes) {
  const visit = node => node.children.forEach(child => { if (!child.kernel) { open.add(child.path); visit(child); } });
  open.clear();
  if (yes) visit(layerTree(timed(), () => 0));
  layers();
}
