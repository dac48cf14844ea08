// Layers as a tree: for the table by name, with equal layers as one; for the graph by runs of commands.
const ALIKE = 0.8;  // share of the time in the same kernels from which two layers count as equal
const RUN = 3;      // equal layers in a row that the graph shows as one node
const chosenSteps = () => new Set(chosen.steps);

/** Return the name of a command's layer at a depth, without the name of the layer around it: expand for conv_1_expand in conv_1. */
function layerName(s, depth) {
  const [around, name] = [s.layer[depth - 1], s.layer[depth]];
  return around && name?.startsWith(`${around}_`) ? name.slice(around.length + 1) : name;
}
/** Return what identifies the work of a command: its kernel and the sizes. */
const workOf = s => `${s.kernel} ${JSON.stringify(s.sizes)}`;
/** Return true if two lists of commands have the same kernels for most of their time. */
function alike(first, second) {
  const times = some => { const found = new Map(); for (const s of some) found.set(workOf(s), (found.get(workOf(s)) ?? 0) + s.runs * s.ns); return found; };
  const [a, b] = [times(first), times(second)], total = some => [...some.values()].reduce((sum, ns) => sum + ns, 0);
  const shared = [...a].reduce((sum, [work, ns]) => sum + Math.min(ns, b.get(work) ?? 0), 0);
  return shared >= ALIKE * Math.max(total(a), total(b));
}
/** Return numbers as text with ranges: 0–3, 5. */
function rangesOf(numbers) {
  const runs = [];
  for (const n of [...numbers].sort((a, b) => a - b)) {
    if (runs.length && n === runs.at(-1)[1] + 1) runs.at(-1)[1] = n; else runs.push([n, n]);
  }
  return runs.map(([from, to]) => from === to ? `${from}` : to === from + 1 ? `${from}, ${to}` : `${from}–${to}`).join(", ");
}
/** Return one name for names that differ in numbers: block_0–7 for block_0 to block_7. */
function commonName(names) {
  const parts = names.map(name => name.split(/(\d+)/)), differ = parts[0].map((_, n) => n).filter(n => new Set(parts.map(p => p[n])).size > 1);
  if (names.length === 1 || !differ.length) return names[0];
  const text = n => differ.includes(n) ? (differ.length === 1 ? rangesOf(parts.map(p => +p[n])) : "*") : parts[0][n];
  return parts[0].map((_, n) => text(n)).join("");
}
/** Return the entries [name, steps] with those merged that are equal layers and differ in a number of their name. */
function mergeAlike(entries) {
  const groups = [];
  for (const [name, steps] of entries) {
    const pattern = name.replace(/\d+/g, "*"), group = groups.find(g => g.pattern === pattern && pattern.includes("*") && alike(g.members[0][1], steps));
    if (group) group.members.push([name, steps]); else groups.push({ pattern, members: [[name, steps]] });
  }
  return groups.map(({ members }) => [commonName(members.map(m => m[0])), members.flatMap(m => m[1]), members.length]);
}
/** Return sums of commands: nanoseconds, launches, bytes, operations, and the limit of most of the time. */
function sumsOf(steps) {
  const sum = of => steps.reduce((total, s) => total + s.runs * of(s), 0), bounds = new Map();
  for (const s of steps) bounds.set(s.bound, (bounds.get(s.bound) ?? 0) + s.runs * s.ns);
  return { ns: sum(s => s.ns), launches: sum(() => 1), moved: sum(s => s.bytes), flops: sum(s => s.flops), bound: [...bounds].sort((a, b) => b[1] - a[1])[0]?.[0] ?? "" };
}
/** Return the tree of layers of some commands: {name, path, steps, children, count, ns, ...}; ``order`` compares siblings. */
function layerTree(steps, order) {
  const fill = (node, depth) => {
    const layers = new Map(), kernels = new Map();
    for (const s of node.steps) {
      const [map, key] = s.layer.length > depth ? [layers, layerName(s, depth)] : [kernels, s.kernel];
      if (!map.has(key)) map.set(key, []);
      map.get(key).push(s);
    }
    const entries = [...layers];
    for (const [name, some, count] of chosen.merged ? mergeAlike(entries) : entries.map(([name, some]) => [name, some, 1])) {
      let child = fill({ name, path: `${node.path}/${name}`, steps: some, children: [], count }, depth + 1);
      if (child.children.length === 1 && !child.children[0].kernel) {  // a layer that contains one layer only
        child = { ...child.children[0], name: `${child.name}/${child.children[0].name}`, count: Math.max(child.count, child.children[0].count) };
      }
      node.children.push(child);
    }
    for (const [kernel, some] of kernels) node.children.push({ name: kernel, path: `${node.path}#${kernel}`, steps: some, children: [], kernel, count: 1 });
    Object.assign(node, sumsOf(node.steps));
    node.children.forEach(child => Object.assign(child, sumsOf(child.steps)));
    node.children.sort(order);
    return node;
  };
  return fill({ name: "", path: "", steps, children: [], count: 1 }, 0);
}

// ---------------------------------------------------------------- units of the graph
/** Return true if a command may join ``unit``: no other unit lies on a path from that unit to the command. */
function mayJoin(unit, step, unitOf) {
  const seen = new Set(), todo = step.before.map(n => unitOf.get(n)).filter(u => u && u !== unit);
  while (todo.length) {
    const at = todo.pop();
    if (seen.has(at)) continue;
    seen.add(at);
    for (const before of at.before) { if (before === unit) return false; todo.push(before); }
  }
  return true;
}
/** Return the units of commands at a depth of the layers: {id, name, steps, layer}; units have no circular dependency. */
function unitsOf(steps, depth) {
  const units = [], unitOf = new Map(), latest = new Map();
  for (const s of steps) {
    const name = layerName(s, depth), known = name === undefined ? undefined : latest.get(name);
    let unit = known && known.graph === s.graph && mayJoin(known, s, unitOf) ? known : undefined;
    if (!unit) {
      unit = { id: name === undefined ? `s${s.number}` : `g${s.number}_${depth}`, name: name ?? s.kernel, steps: [], layer: name !== undefined, graph: s.graph, depth, before: new Set() };
      units.push(unit);
      if (unit.layer) latest.set(name, unit);
    }
    unit.steps.push(s);
    unitOf.set(s.number, unit);
    for (const n of s.before) { const before = unitOf.get(n); if (before && before !== unit) unit.before.add(before); }
  }
  return units.map(simplified);
}
/** Return a unit without needless levels: one command is that command, a layer of one layer is the inner one. */
function simplified(unit) {
  if (!unit.layer) return unit;
  if (unit.steps.length === 1) return { ...unit, id: `s${unit.steps[0].number}`, name: unit.steps[0].layer.slice(unit.depth).map((_, n) => layerName(unit.steps[0], unit.depth + n)).join("/"), layer: false };
  const inner = new Set(unit.steps.map(s => s.layer[unit.depth + 1]));
  if (inner.size > 1 || inner.has(undefined)) return unit;
  const deeper = unitsOf(unit.steps, unit.depth + 1);
  return deeper.length === 1 ? { ...deeper[0], name: `${unit.name}/${deeper[0].name}` } : unit;
}
/** Return the units with runs of ``RUN`` equal layers or more as one unit that contains them. */
function stacked(units) {
  const found = [];
  for (const unit of units) {
    const last = found.at(-1), first = last?.inside?.[0] ?? last, pattern = name => name.replace(/\d+/g, "*");
    if (last && last.layer && unit.layer && pattern(first.name) === pattern(unit.name) && alike(first.steps, unit.steps)) {
      const inside = [...(last.inside ?? [last]), unit];
      found[found.length - 1] = { id: `r${inside[0].id}`, name: commonName(inside.map(u => u.name)), steps: inside.flatMap(u => u.steps), layer: true, inside, depth: unit.depth };
    } else found.push(unit);
  }
  return found.flatMap(unit => unit.inside && unit.inside.length < RUN ? unit.inside : [unit]);
}
/** Return the units inside a layer, or of the whole call: a call of one layer begins inside it. */
function unitsInside(unit) {
  if (unit?.inside) return unit.inside;
  let units = unitsOf(unit?.steps ?? N.steps, unit ? unit.depth + 1 : 0);
  while (!unit && units.length === 1 && units[0].layer) units = unitsOf(units[0].steps, units[0].depth + 1);
  return units.length > STACKED ? stacked(units) : units;
}
