// The head, the panel of the selected kernel or layer, the table of sizes, and the start of the page.
function head() {
  const sizes = Object.entries(N.sizes ?? {}).map(([dim, size]) => `${dim} = ${size}${N.typical.includes(dim) ? " (typical)" : N.assumed.includes(dim) ? " (assumed)" : ""}`);
  $("title").textContent = `${F.path.split("/").at(-1)}: ${F.function}`;
  $("summary").textContent = [F.target, F.mesh, sizes.join(", "), N.measured_on ? `times measured on ${N.measured_on}` : "times predicted, not measured", F.producer]
    .filter(Boolean).join(" · ");
  const where = F.target === undefined || F.target.startsWith("cpu") ? "on one core" : "on the GPU";
  const tiles = [
    [time(N.work), `all kernels one after the other ${where}, ${N.measured_on ? "measured" : "predicted"}`],
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
function panelOfKernel(name) {
  const k = F.kernels[name], steps = N.steps.filter(s => s.kernel === name), s = steps[0], panel = $("panel");
  panel.replaceChildren(make("h3", name));
  if (!s) return panel.append(make("p", "Not used at these sizes.", "dim"));
  const scopes = [...new Set(steps.map(o => o.scope).filter(Boolean))], launches = steps.reduce((sum, o) => sum + o.runs, 0);
  panel.append(list([
    ["Time", `${time(s.ns)} ${s.measured === null ? "predicted" : "measured"}, ${count(launches, "launch")}, ${percent(nsOf(steps) / total())} of the call`],
    ["Layer", scopes.slice(0, 4).join(", ") + (scopes.length > 4 ? ` and ${scopes.length - 4} more` : "")],
    ["Limited by", s.bound],
    ["Throughput", `${digits(s.flops / s.ns)} GFLOP/s, ${digits(s.bytes / s.ns)} GB/s`],
    ["Memory traffic", bytes(s.bytes)],
    ["Reads", k?.bytes_in && `${k.bytes_in} B`],
    ["Writes", k?.bytes_out && `${k.bytes_out} B`],
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
function panelOfLayer(path, group) {
  const steps = timed().filter(s => inScope(layerOf(s.scope), path)), ns = nsOf(steps), panel = $("panel"), table = make("table");
  panel.replaceChildren(make("h3", path), list([
    ["Time", `${time(ns)}, ${percent(ns / total())} of the call`], ["Commands", String(steps.length)],
  ]));
  const kernels = [...Map.groupBy(steps, s => s.kernel)].sort((a, b) => nsOf(b[1]) - nsOf(a[1]));
  for (const [kernel, some] of kernels) {
    const tr = make("tr", undefined, "link"), name = make("td", kernel, "name");
    tr.append(name, make("td", `${some.length} ×`, "n"), make("td", percent(nsOf(some) / total()), "n"));
    table.append(linked(tr, kernel));
  }
  panel.append(table);
  if (!group) return;
  const button = make("button", opened.has(group) ? "Close in the graph" : "Open in the graph");
  button.addEventListener("click", () => { toggleLayer(group); panelOfLayer(path, group); });
  panel.append(make("p"), button);
}
/** Select a kernel everywhere; ``scroll`` moves to the graph and its panel. */
function choose(kernel, scroll = false) {
  Object.assign(chosen, { kernel, scope: "" });
  panelOfKernel(kernel);
  const hidden = runsOfLayers().filter(run => !opened.has(run.id) && run.steps.some(s => s.kernel === kernel));
  if (hidden.length && !cy.nodes().some(n => n.data("kernel") === kernel)) { opened.add(hidden[0].id); graph(); }
  layers(); mark();
  if (scroll) $("graph").scrollIntoView();
}
function chooseLayer(scope, group) {
  Object.assign(chosen, { kernel: "", scope });
  panelOfLayer(layerOf(scope), group);
  layers(); mark();
}

// ---------------------------------------------------------------- sizes, theme, start
function sizes() {
  const rows = [...F.weights.map(w => [w.name, w.bytes, "weight"]), ...F.segments.map(s => [s.name, s.bytes, "part of the bundle"])];
  const most = Math.max(1, ...rows.map(r => r[1])), line = make("tr");
  line.append(make("th", "Name"), make("th", "Size"), make("th", "Kind", "optional"));
  $("sizes").append(line, ...rows.map(([name, size, kind]) => {
    const tr = make("tr"), td = make("td"), bar = make("span", undefined, "share"), filled = make("i");
    filled.style.width = `${100 * size / most}%`;
    bar.append(filled);
    td.append(bar, bytes(size));
    tr.append(make("td", name, "name"), td, make("td", kind, "optional"));
    return tr;
  }));
}
function theme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  $("theme").textContent = dark ? "Light mode" : "Dark mode";
  if (cy) cy.style(graphStyle());
}
/** Draw all that depends on the sizes. */
function all() {
  head(); layers(); graph(); charts();
  if (chosen.kernel) panelOfKernel(chosen.kernel); else if (chosen.scope) panelOfLayer(chosen.scope);
}
const system = matchMedia("(prefers-color-scheme: dark)");
theme(system.matches);
system.addEventListener("change", () => theme(system.matches));
$("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme !== "dark"));
$("search").addEventListener("input", () => { chosen.text = $("search").value.trim(); layers(); mark(); charts(); });
$("all").addEventListener("click", () => openAll(true));
$("none").addEventListener("click", () => openAll(false));
addEventListener("resize", () => { charts(); fit(); });
$("merge").addEventListener("change", () => mergeLayers($("merge").checked));
$("merger").hidden = !N.steps.some(s => /(^|[/_])\d+(\/|$)/.test(s.scope));
head(); pickers(); mergeLayers(new Set(N.steps.map(s => s.scope)).size > MERGED); startGraph(); charts(); sizes();
const slowest = timed().filter(s => F.kernels[s.kernel]).sort((a, b) => b.runs * b.ns - a.runs * a.ns)[0];
if (slowest) { chosen.kernel = slowest.kernel; panelOfKernel(slowest.kernel); layers(); mark(); }
document.body.dataset.ready = "yes";
