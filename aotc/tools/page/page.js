// The head, the panel of the selected kernel or layer, the table of sizes, and the start of the page.
/** Return where the times come from: a measurement at these sizes or at others, or the cost model. */
function timesText() {
  const sources = new Map(Object.entries(Object.groupBy(timed(), sourceOf)).map(([source, some]) => [source, some.length]));
  if (!sources.has("measured") && !sources.has("scaled from other sizes")) return "times predicted, not measured";
  const on = ` on ${N.measured_on}`;
  if (sources.size > 1) return `times of commands${on}: ${[...sources].map(([source, n]) => `${n} ${source}`).join(", ")}`;
  return sources.has("measured") ? `times measured${on}` : `times measured${on} at other sizes, and scaled to these`;
}
function head() {
  const sizes = Object.entries(N.sizes ?? {}).map(([dim, size]) => `${dim} = ${size}${N.typical.includes(dim) ? " (typical)" : N.assumed.includes(dim) ? " (assumed)" : ""}`);
  $("title").textContent = `${F.path.split("/").at(-1)}: ${F.function}`;
  $("summary").textContent = [F.target, F.mesh, sizes.join(", "), timesText(), F.producer]
    .filter(Boolean).join(" · ");
  const where = F.target === undefined || F.target.startsWith("cpu") ? "on one core" : "on the GPU", sources = [...new Set(timed().map(sourceOf))];
  const tiles = [
    [time(N.work), `all kernels one after the other ${where}, ${sources.length > 1 ? "partly predicted" : sources[0] ?? "predicted"}`],
    [time(N.path_ns), `critical path: kernels that wait for each other, each ${where}`],
    [String(Object.keys(F.kernels).length), `kernels, ${count(N.steps.length, "command")}`],
    [bytes(N.memory.peak), "peak of intermediate values"],
    [bytes(F.weights.reduce((sum, w) => sum + w.bytes, 0)), "weights"],
    [bytes(F.bytes), "bundle file"],
  ];
  $("tiles").replaceChildren(...tiles.map(([value, text]) => { const e = make("div"); e.append(make("b", value), make("span", text)); return e; }));
}
function pickers() {
  if (!F.choices?.length) return;
  const choices = [F, ...F.choices].sort((a, b) => a.work - b.work), select = make("select"), label = make("label", "Sizes ");
  choices.forEach((c, n) => {
    const option = make("option", Object.entries(c.sizes).map(([dim, size]) => `${dim} = ${size}`).join(", "));
    option.value = n;
    option.selected = c === F;
    select.append(option);
  });
  select.addEventListener("change", () => { N = choices[select.value]; all(); });
  select.id = "size";
  label.append(select);
  $("pickers").append(label);
}

// ---------------------------------------------------------------- the panel
const fold = (title, content, isOpen = false) => {
  const details = make("details");
  details.open = isOpen;
  details.append(make("summary", title), content);
  return details;
};
const list = rows => {
  const dl = make("dl");
  for (const [key, value] of rows) if (value) dl.append(make("dt", key), make("dd", value));
  return dl;
};
const reasons = (rows, kind) => {
  const box = make("div");
  box.append(...rows.map(n => make("p", `${n.ops.join(", ")} (${n.lines.map(placeOf).join(", ")}): ${n.reason}`, kind)));
  return box;
};
/** Return bytes as text: a number, or an expression of dims. */
const sizeText = text => /^\d+$/.test(text) ? bytes(+text) : `${text} B`;
function panelOfKernel(name, step) {
  const k = F.kernels[name], steps = N.steps.filter(s => s.kernel === name), s = step ?? steps[0], panel = $("panel");
  panel.replaceChildren(make("h3", name));
  if (!s) return panel.append(make("p", "Not used at these sizes.", "dim"));
  const scopes = [...new Set(steps.map(o => o.scope).filter(Boolean))], launches = steps.reduce((sum, o) => sum + o.runs, 0);
  panel.append(list([
    ["Time", `${time(s.ns)} ${sourceOf(s)}, ${count(launches, "launch")}, ${percent(nsOf(steps) / total())} of the call`],
    ["Layer", scopes.slice(0, 4).join(", ") + (scopes.length > 4 ? ` and ${scopes.length - 4} more` : "")],
    ["Limited by", s.bound],
    ["Throughput", `${digits(s.flops / s.ns)} GFLOP/s, ${digits(s.bytes / s.ns)} GB/s`],
    ["Memory traffic", bytes(s.bytes)],
    ["Reads", k?.bytes_in && sizeText(k.bytes_in)],
    ["Writes", k?.bytes_out && sizeText(k.bytes_out)],
    ["Parallel items", `${s.items.toLocaleString("en")}, ${s.claim.toLocaleString("en")} at a time`],
    ["Machine code", k && bytes(k.code_bytes)],
  ]));
  if (!k) return;
  const taken = k.neighbours.filter(n => n.taken), refused = k.neighbours.filter(n => !n.taken);
  if (k.ops.length) panel.append(fold(`Fused ops (${k.ops.length})`, make("p", k.ops.join(", "))));
  if (refused.length) panel.append(fold(`Not fused with its neighbours (${refused.length})`, reasons(refused, "refused"), true));
  if (taken.length) panel.append(fold(`Why these ops were fused (${taken.length})`, reasons(taken, "took")));
  panel.append(fold("Lines of the model", make("pre", k.lines.length ? k.lines.join("\n") : k.loc), true));
  const ops = k.text_lines.map(n => F.source[n - 1][0].trim());
  if (ops.length) panel.append(fold("StableHLO of this kernel", make("pre", ops.join("\n"))));
  panel.append(fold("Loops", make("pre", k.text)));
  if (k.asm) panel.append(fold("Assembly", make("pre", k.asm)));
}
function panelOfLayer(name, steps) {
  const some = steps.filter(s => s.bound !== "control"), ns = nsOf(some), panel = $("panel"), table = make("table");
  panel.replaceChildren(make("h3", name), list([
    ["Time", `${time(ns)}, ${percent(ns / total())} of the call`], ["Commands", String(some.length)],
  ]));
  const kernels = [...Map.groupBy(some, s => s.kernel)].sort((a, b) => nsOf(b[1]) - nsOf(a[1]));
  for (const [kernel, same] of kernels) {
    const tr = make("tr", undefined, "link");
    tr.append(make("td", kernel, "name"), make("td", `${same.length} ×`, "n"), make("td", percent(nsOf(same) / total()), "n"));
    table.append(linked(tr, kernel));
  }
  panel.append(table);
}
/** Select a kernel everywhere; ``scroll`` moves to its first command in the graph. */
function choose(kernel, scroll = false) {
  const steps = N.steps.filter(s => s.kernel === kernel);
  Object.assign(chosen, { kernel, layer: "", steps: steps.map(s => s.number) });
  panelOfKernel(kernel);
  if (scroll && steps.length) { reveal(steps[0].number); $("graph").scrollIntoView(); }
  layers(); mark();
}
/** Select the kernel of a command, with the facts of this command. */
function chooseStep(step) {
  choose(step.kernel);
  panelOfKernel(step.kernel, step);
}
function chooseLayer(layer, steps) {
  Object.assign(chosen, { kernel: "", layer, steps: steps.map(s => s.number) });
  panelOfLayer(layer, steps);
  layers(); mark();
}
/** Jump to the next command that matches the search, in the order of the call. */
function jump() {
  const found = timed().filter(matches), after = found.find(s => s.number > (jump.last ?? -1)) ?? found[0];
  if (!after) return;
  jump.last = after.number;
  reveal(after.number);
  chooseStep(after);
  $("hits").textContent = `${found.indexOf(after) + 1} of ${count(found.length, "match")}`;
  $("graph").scrollIntoView();
}

// ---------------------------------------------------------------- sizes, theme, start
const SIZE_COLUMNS = [
  { title: "Name", kind: "", words: true, value: r => r.name },
  { title: "Size", kind: "", value: r => r.bytes },
  { title: "Kind", kind: "optional", words: true, value: r => r.kind },
];
const sortedSizes = { column: 1, down: true };
function sizes() {
  const rows = [...F.weights.map(w => ({ ...w, kind: "weight" })), ...F.segments.map(s => ({ ...s, kind: "part of the bundle" }))];
  const most = Math.max(1, ...rows.map(r => r.bytes)), lines = rows.sort(comparison(SIZE_COLUMNS, sortedSizes)).map(r => {
    const tr = make("tr");
    tr.append(make("td", r.name, "name"), shareCell(r.bytes / most, bytes(r.bytes)), make("td", r.kind, "optional"));
    return tr;
  });
  $("sizes").replaceChildren(sortableHead("sizes", SIZE_COLUMNS, sortedSizes, sizes), ...lines);
}
function theme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  $("theme").textContent = dark ? "Light mode" : "Dark mode";
  if (cy) cy.style(graphStyle());
}
/** Draw all that depends on the sizes. */
function all() {
  head(); layers(); graph(); fit(); charts();
  if (chosen.kernel) panelOfKernel(chosen.kernel);
  else if (chosen.layer) panelOfLayer(chosen.layer, N.steps.filter(s => chosen.steps.includes(s.number)));
}
const system = matchMedia("(prefers-color-scheme: dark)");
theme(system.matches);
system.addEventListener("change", () => theme(system.matches));
$("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme !== "dark"));
$("search").addEventListener("input", () => { chosen.text = $("search").value.trim(); jump.last = -1; layers(); mark(); charts(); });
$("search").addEventListener("keydown", e => { if (e.key === "Enter") { e.preventDefault(); jump(); } });
$("next").addEventListener("click", jump);
$("all").addEventListener("click", () => openAll(true));
$("none").addEventListener("click", () => openAll(false));
addEventListener("resize", () => { charts(); cy.resize(); if (!moved) fit(true); });
$("merge").addEventListener("change", () => mergeLayers($("merge").checked));
$("merger").hidden = !N.steps.some(s => s.layer.some(name => /\d/.test(name)));
[F, ...F.choices].forEach(facts => linkSteps(facts.steps));
head(); pickers(); mergeLayers(new Set(N.steps.map(s => s.scope)).size > MERGED); startGraph(); charts(); sizes();
const slowest = timed().filter(s => F.kernels[s.kernel]).sort((a, b) => b.runs * b.ns - a.runs * a.ns)[0];
if (slowest) choose(slowest.kernel);
else $("panel").append(make("p", "Select a layer or a kernel.", "dim"));
document.body.dataset.ready = "yes";
