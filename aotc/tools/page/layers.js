// The table of layers: name scopes as a tree, kernels as leaves, each with its share of the time.
const ROWS = 24;      // rows that a screen shows: the largest layers are open until there are as many
const SIBLINGS = 20;  // rows of one layer before the rest folds into one row
const MERGED = 24;    // layers above which equal names that differ in a number are one row at first
const open = new Set(), whole = new Set();

/** Return the tree of layers of some commands: {name, path, steps, children}; children with the most time come first. */
function layerTree(steps) {
  const root = { name: "", path: "", steps, children: [] };
  const fill = (node, depth) => {
    const scopes = new Map(), kernels = new Map();
    for (const s of node.steps) {
      const parts = layerOf(s.scope).split("/").filter(Boolean);
      const [map, key] = parts.length > depth ? [scopes, parts.slice(0, depth + 1).join("/")] : [kernels, s.kernel];
      if (!map.has(key)) map.set(key, []);
      map.get(key).push(s);
    }
    for (const [path, some] of scopes) {
      let child = fill({ name: path.split("/").at(-1), path, steps: some, children: [] }, depth + 1);
      if (child.children.length === 1 && !child.children[0].kernel) {  // a scope that contains one scope only
        child = { ...child.children[0], name: `${child.name}/${child.children[0].name}` };
      }
      node.children.push(child);
    }
    for (const [kernel, some] of kernels) {
      node.children.push({ name: kernel, path: `${node.path}#${kernel}`, steps: some, children: [], kernel });
    }
    node.children.forEach(child => { child.ns = nsOf(child.steps); });
    node.children.sort((a, b) => b.ns - a.ns);
    return node;
  };
  return fill(root, 0);
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
function layerRow(node, depth, searched) {
  const first = node.steps[0], all = total(), flops = node.steps.reduce((sum, s) => sum + s.runs * s.flops, 0);
  const moved = node.steps.reduce((sum, s) => sum + s.runs * s.bytes, 0), tr = make("tr", undefined, "link");
  const launches = node.steps.reduce((sum, s) => sum + s.runs, 0), name = make("td", undefined, "name");
  const folded = !node.kernel && !searched && !open.has(node.path);
  name.style.setProperty("--depth", depth);
  name.append(make("span", node.kernel ? "" : folded ? "▸" : "▾", "fold"), node.name);
  if (node.kernel) {
    const ops = opsOf(node.kernel).length, place = first.place;
    name.append(" ", make("small", [ops > 1 ? count(ops, "fused op") : "", place].filter(Boolean).join(" · ")));
    name.append(make("small", ` · ${count(launches, "launch")}`, "phone"));
  } else {
    tr.classList.add("scope");
    tr.setAttribute("aria-expanded", String(!folded));
    name.append(" ", make("small", count(new Set(node.steps.map(s => s.kernel)).size, "kernel")));
  }
  const share = make("td"), bar = make("span", undefined, "share"), filled = make("i");
  filled.style.width = `${100 * node.ns / all}%`;
  bar.append(filled);
  share.append(bar, percent(node.ns / all));
  tr.append(name, share, make("td", time(node.ns), "n"), make("td", launches.toLocaleString("en"), "n optional"));
  const bounds = new Map();
  for (const s of node.steps) bounds.set(s.bound, (bounds.get(s.bound) ?? 0) + s.runs * s.ns);
  const bound = [...bounds].sort((a, b) => b[1] - a[1])[0][0];
  tr.append(make("td", bound, "optional"));
  tr.append(...[bytes(moved), rate(flops / node.ns), rate(moved / node.ns)].map(text => make("td", text, "n optional")));
  const act = () => {
    if (node.kernel) return choose(node.kernel, true);
    if (open.has(node.path)) open.delete(node.path); else open.add(node.path);
    chooseLayer(node.path);
  };
  tr.tabIndex = 0;
  tr.dataset.path = node.path;
  tr.addEventListener("click", act);
  tr.addEventListener("keydown", e => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); act(); } });
  if (node.kernel ? node.kernel === chosen.kernel : node.path === chosen.scope) tr.classList.add("selected");
  return tr;
}
function layers(first = false) {
  const searched = chosen.text !== "", steps = timed().filter(s => !searched || matches(s)), root = layerTree(steps);
  if (first) openLargest(root);
  const head = make("tr");
  for (const [text, kind] of [["Layer or kernel", ""], ["Share", ""], ["Time", "n"], ["Launches", "n optional"], ["Limited by", "optional"],
    ["Bytes moved", "n optional"], ["GFLOP/s", "n optional"], ["GB/s", "n optional"]]) head.append(make("th", text, kind));
  const body = [head];
  const add = (node, depth) => {
    const all = whole.has(node.path) || node.children.length <= SIBLINGS + 1;
    for (const child of all ? node.children : node.children.slice(0, SIBLINGS)) {
      body.push(layerRow(child, depth, searched));
      if (searched || open.has(child.path)) add(child, depth + 1);
    }
    if (all) return;
    const rest = node.children.slice(SIBLINGS), tr = make("tr", undefined, "link"), td = make("td");
    td.colSpan = 8;
    td.append(make("span", "", "fold"), `${rest.length} more rows, ${percent(rest.reduce((sum, n) => sum + n.ns, 0) / total())} of the time`);
    tr.append(td);
    tr.addEventListener("click", () => { whole.add(node.path); layers(); });
    body.push(tr);
  };
  add(root, 0);
  $("table").replaceChildren(...body);
  $("hits").textContent = searched ? `${steps.length} of ${count(timed().length, "command")}` : "";
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
  if (yes) visit(layerTree(timed()));
  layers();
}
