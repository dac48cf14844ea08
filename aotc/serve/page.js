"use strict";
const $ = (name, text, kind) => {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
};
const svg = (parent, name, values, text) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in values) made.setAttribute(key, values[key]);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
};
const ms = s => s === undefined ? "–" : s < 1e-3 ? (s * 1e6).toFixed(0) + " us"
  : s < 1 ? +(s * 1e3).toPrecision(3) + " ms" : +s.toPrecision(3) + " s";
const size = n => n < 1e3 ? n + " B" : n < 1e6 ? +(n / 1e3).toPrecision(3) + " kB"
  : n < 1e9 ? +(n / 1e6).toPrecision(3) + " MB" : (n / 1e9).toFixed(2) + " GB";
const rate = n => (n < 10 ? +n.toFixed(1) : Math.round(n)) + "/s";
const RECENT = 10, SHOWN = 120, FEW = 3;  // seconds of a rate, seconds of a chart, models that are open at first
const toggled = new Map();  // details that the reader opened or closed

// ---------------------------------------------------------------- figures
const quantile = (points, q) => {
  const seconds = points.map(p => p[1]).sort((a, b) => a - b);
  return seconds[Math.min(seconds.length - 1, Math.floor(q * seconds.length))];
};
const since = (state, traffic, seconds) => (traffic?.seconds ?? []).filter(row => row[0] > state.now - seconds);
const sum = (rows, column) => rows.reduce((total, row) => total + row[column], 0);
const failures = traffic => Object.entries(traffic?.statuses ?? {}).filter(([status]) => status >= 400);
const failed = traffic => failures(traffic).reduce((total, [, n]) => total + n, 0);
const calls = model => {
  const found = new Map();
  for (const f of model.functions) if (!f.why_alone) for (const [rows, n] of Object.entries(f.calls)) found.set(+rows, (found.get(+rows) ?? 0) + n);
  return [...found].sort((a, b) => a[0] - b[0]);
};
const meanRows = found => {
  const total = found.reduce((n, [, count]) => n + count, 0);
  return total ? found.reduce((n, [rows, count]) => n + rows * count, 0) / total : 0;
};

// ---------------------------------------------------------------- charts
const LEFT = 66, BOTTOM = 34, HIGH = 150, TOP = 8;
function chart(title, xTitle, yTitle, wide) {
  const box = $("div"), drawing = svg(box, "svg", {width: wide, height: HIGH, viewBox: `0 0 ${wide} ${HIGH}`, role: "img", "aria-label": title});
  box.prepend($("h3", title));
  const text = (x, y, words, anchor = "middle", turn = "") => svg(drawing, "text", {x, y, "text-anchor": anchor, ...(turn && {transform: turn})}, words);
  text(LEFT + (wide - LEFT) / 2, HIGH - 3, xTitle);
  const middle = TOP + (HIGH - BOTTOM - TOP) / 2;
  text(10, middle, yTitle, "middle", `rotate(-90 10 ${middle})`);
  return {box, drawing, text, right: wide - 12};
}
const along = (c, share) => LEFT + share * (c.right - LEFT), up = share => HIGH - BOTTOM - share * (HIGH - BOTTOM - TOP);
function yTicks(c, ticks) {
  for (const [share, words] of ticks) {
    svg(c.drawing, "line", {x1: LEFT, x2: c.right, y1: up(share), y2: up(share)});
    c.text(LEFT - 5, up(share) + 4, words, "end");
  }
}
const seconds = c => { for (const n of [120, 90, 60, 30, 0]) c.text(along(c, 1 - n / SHOWN), HIGH - 19, n ? `-${n}` : "now", n ? "middle" : "end"); };
const round = n => { const power = 10 ** Math.floor(Math.log10(n)); return [1, 2, 5, 10].find(k => k * power >= n) * power; };
function requests(state, traffic, wide) {
  const rows = since(state, traffic, SHOWN), top = Math.max(2, round(Math.max(1, ...rows.map(r => r[1]))));
  const c = chart("Requests per second (red: errors)", "seconds", "requests/s", wide), width = Math.max(1, (c.right - LEFT) / SHOWN - .5);
  yTicks(c, [[0, "0"], [.5, String(top / 2)], [1, String(top)]]);
  seconds(c);
  for (const [second, all, bad] of rows) {
    const x = along(c, 1 - (state.now - second) / SHOWN);
    for (const [n, kind] of [[all, "good"], [bad, "bad"]]) {
      if (n) svg(c.drawing, "rect", {x: Math.max(LEFT, x), width, y: up(n / top), height: up(0) - up(n / top), class: kind});
    }
  }
  return c.box;
}
function latency(state, points, wide) {
  const c = chart("Latency (log scale; line: median, dashed: p99)", "seconds", "latency", wide);
  const some = points.filter(p => p[0] > state.now - SHOWN), all = some.length ? some : points;
  const low = Math.floor(Math.log10(Math.max(1e-6, Math.min(...all.map(p => p[1])))));
  const high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(1e-6, ...all.map(p => p[1])))));
  const y = s => up((Math.log10(Math.max(s, 10 ** low)) - low) / (high - low));
  yTicks(c, Array.from({length: high - low + 1}, (_, n) => [n / (high - low), ms(+(10 ** (low + n)).toPrecision(3))]));
  seconds(c);
  for (const [q, kind] of [[.5, "median"], [.99, "high"]]) {
    svg(c.drawing, "line", {x1: LEFT, x2: c.right, y1: y(quantile(all, q)), y2: y(quantile(all, q)), class: kind});
  }
  for (const [at, s] of some) svg(c.drawing, "circle", {cx: along(c, Math.max(0, 1 - (state.now - at) / SHOWN)), cy: y(s), r: 2.5});
  return c.box;
}
function batches(found, wide) {
  const c = chart(`Batch size: ${meanRows(found).toFixed(1)} rows on average`, "rows of a call", "calls", wide);
  const top = Math.max(...found.map(([, n]) => n)), step = 1 / found.length, every = Math.ceil(found.length / 8);
  yTicks(c, [[0, "0"], [1, top.toLocaleString("en", {notation: "compact"})]]);
  found.forEach(([rows, n], place) => {
    const width = Math.min(40, (c.right - LEFT) * step * .8), middle = along(c, (place + .5) * step);
    svg(c.drawing, "rect", {x: middle - width / 2, width, y: up(n / top), height: Math.max(1, up(0) - up(n / top))});
    if (place % every === 0) c.text(middle, HIGH - 19, String(rows));
  });
  return c.box;
}

// ---------------------------------------------------------------- a model
function details(key, kind, open) {
  const made = $("details", undefined, kind);
  made.open = toggled.get(key) ?? open;
  made.addEventListener("toggle", () => { if (made.open !== (toggled.get(key) ?? open)) { toggled.set(key, made.open); if (last) show(last); } });
  return made;
}
function bundle(model) {
  const table = $("table"), made = details(`bundle ${model.name}/${model.version}`, "bundle", false);
  const row = (key, ...values) => {
    const line = $("tr"), cell = $("td");
    values.filter(Boolean).forEach((v, n) => { if (n) cell.append($("br")); cell.append(v instanceof Node ? v : $("code", v)); });
    line.append($("th", key), cell);
    table.append(line);
  };
  for (const f of model.functions) {
    row(f.name, f.signature, $("span", f.why_alone ? "not batched: " + f.why_alone
      : `batches of up to ${f.batch} rows`, "muted"));
  }
  if (model.generates) row("tokens", $("span", model.generates, "muted"));
  row("runs on", model.stats.target, model.stats.threads ? `${model.stats.threads} threads` : "");
  row("compiled for", model.targets.join(", "), model.producer);
  row("size", size(model.bytes), `${size(model.stats.constants_bytes || 0)} of constants`);
  row("kernels", String(model.stats.kernels));
  for (const [place, m] of Object.entries(model.stats.memory || {})) {
    row("memory " + place, `${size(m.in_use)} in use, ${size(m.idle)} cached, peak ${size(m.high_water)}`);
  }
  row("file", model.path, "loaded " + new Date(model.loaded_at * 1e3).toLocaleString());
  made.append($("summary", "Signature and bundle"), table);
  return made;
}
const figure = (value, words, kind) => { const made = $("span", value, kind); made.append($("small", words)); return made; };
function section(state, model, few) {
  const points = state.latencies[model.name] || [], traffic = state.traffic[model.name], found = calls(model);
  const box = $("section"), made = details(`${model.name}/${model.version}`, "", few), head = $("summary");
  const name = $("h2", model.name), bad = failed(traffic), recent = sum(since(state, traffic, RECENT), 1) / RECENT;
  name.className = "name";
  name.append($("span", ` version ${model.version}`, "muted"));
  head.append(name, figure(rate(recent), "requests"), figure(String(bad), "errors", bad ? "bad" : ""), figure(ms(quantile(points, .5)), "median"), figure(ms(quantile(points, .99)), "p99"));
  made.append(head);
  box.append(made);
  const row = state.index.find(r => r.name === model.name && r.version === String(model.version));
  if (row && row.reason) box.append($("div", row.reason, "bad"));
  if (!made.open) return box;  // charts are drawn when they are seen
  const inside = Math.min(document.body.clientWidth, 1240) - 64, wide = innerWidth <= 700 ? Math.max(240, inside) : Math.floor((inside - 40) / 3);
  if (points.length) {
    const charts = $("div", undefined, "charts");
    charts.append(requests(state, traffic, wide), latency(state, points, wide));
    if (found.length) charts.append(batches(found, wide));
    made.append(charts);
    const queue = model.functions.map(f => f.phases.queue).filter(s => s !== undefined);
    const words = [`Last ${points.length} requests: median ${ms(quantile(points, .5))}, p90 ${ms(quantile(points, .9))}, p99 ${ms(quantile(points, .99))}`,
      queue.length ? `mean time in the queue ${ms(Math.max(...queue))}` : ""];
    const refused = failures(traffic).map(([status, n]) => `${n} × status ${status}`);
    const since = refused.length ? `. Errors since the start: ${refused.join(", ")}` : "";
    made.append($("p", words.filter(Boolean).join("; ") + since, "muted"));
  } else made.append($("p", `No requests yet. Clients call v2/models/${model.name}/infer.`, "muted"));
  made.append(bundle(model));
  return box;
}

// ---------------------------------------------------------------- the page
let last;
function tiles(state) {
  const traffic = Object.values(state.traffic), points = Object.values(state.latencies).flat();
  const recent = traffic.flatMap(t => since(state, t, RECENT)), bad = traffic.reduce((n, t) => n + failed(t), 0);
  const tile = (value, words, kind) => { const made = $("div"); made.append($("b", value, kind), $("span", words)); return made; };
  document.getElementById("tiles").replaceChildren(
    tile(rate(sum(recent, 1) / RECENT), `requests, last ${RECENT} s`), tile(rate(sum(recent, 2) / RECENT), `errors, last ${RECENT} s`, sum(recent, 2) ? "bad" : ""),
    tile(String(bad), "errors since start", bad ? "bad" : ""), tile(String(state.in_flight), `requests in flight, limit ${state.queue}`),
    tile(ms(quantile(points, .5)), "median latency"), tile(ms(quantile(points, .99)), "p99 latency"),
    tile(String(state.models.length), "model versions ready"));
}
function show(state) {
  last = state;
  tiles(state);
  const list = [], few = state.models.length <= FEW, focused = document.activeElement?.closest("section")?.dataset.key;
  const broken = state.index.filter(r => r.state !== "READY");
  for (const row of broken) {
    const box = $("section"), head = $("div", undefined, "row"), name = $("h2", row.name);
    if (row.version) name.append($("span", ` version ${row.version}`, "muted"));
    head.append(name, $("div", `not available: ${row.reason}`, "bad"));
    box.append(head);
    list.push(box);
  }
  for (const model of state.models) {
    const box = section(state, model, few);
    box.dataset.key = `${model.name}/${model.version}`;
    list.push(box);
  }
  if (!list.length) {
    const box = $("section"), head = $("div", undefined, "row");
    head.append($("h2", "No model yet"), $("span", "Copy a .vmfb file into the served folder. It is loaded at once.", "muted"));
    box.append(head);
    list.push(box);
  }
  document.getElementById("models").replaceChildren(...list);
  if (focused) list.find(box => box.dataset.key === focused)?.querySelector("summary").focus();
  const status = document.getElementById("status");
  status.textContent = (state.ready ? "ready" : "not ready") + (state.trouble ? `, cannot read the folder: ${state.trouble}` : "");
  status.className = state.ready && !state.trouble ? "good" : "bad";
}
async function poll() {
  const token = sessionStorage.getItem("token"), form = document.getElementById("token");
  try {
    const answer = await fetch("v2/state", {headers: token ? {Authorization: "Bearer " + token} : {}});
    form.hidden = answer.status !== 401;
    if (answer.ok) show(await answer.json());
    else document.getElementById("status").textContent = (await answer.json()).error.split("\n")[0];
  } catch (error) {
    const status = document.getElementById("status");
    status.textContent = "the server does not respond";
    status.className = "bad";
  }
  setTimeout(poll, 2000);
}
document.getElementById("token").addEventListener("submit", event => {
  event.preventDefault();
  sessionStorage.setItem("token", event.target.elements[0].value);
});
function theme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  document.getElementById("theme").textContent = dark ? "Light mode" : "Dark mode";
}
const system = matchMedia("(prefers-color-scheme: dark)");
theme(system.matches);
system.addEventListener("change", () => theme(system.matches));
document.getElementById("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme !== "dark"));
addEventListener("resize", () => { if (last) show(last); });
poll();
