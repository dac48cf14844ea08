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
const count = (n, what) => `${+n.toFixed(1)} ${what}${n === 1 ? "" : "s"}`;
const rate = n => (n < 10 ? +n.toFixed(1) : Math.round(n)) + "/s";
const RECENT = 10, SHOWN = 120, FEW = 3;  // seconds of a rate, seconds of a chart, models that are open at first
const WIDEST = 1440, GAP = 18;  // pixels: the widest page, and between two charts
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
const LEFT = 66, BOTTOM = 34, HIGH = 170, TOP = 8, SPREAD = "dot: median, line: up to p99";
function chart(title, note, xTitle, yTitle, wide) {
  const box = $("div"), drawing = svg(box, "svg", {width: wide, height: HIGH, viewBox: `0 0 ${wide} ${HIGH}`, role: "img", "aria-label": title});
  box.prepend($("h3", title), $("p", note, "note"));
  box.style.width = `${wide}px`;
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
const seconds = c => { for (const n of [120, 90, 60, 30, 0]) c.text(along(c, 1 - n / SHOWN), HIGH - 19, n, n ? "middle" : "end"); };
const round = n => { const power = 10 ** Math.floor(Math.log10(n)); return [1, 2, 5, 10].find(k => k * power >= n) * power; };
function requests(state, traffic, wide) {
  const rows = since(state, traffic, SHOWN), top = Math.max(2, round(Math.max(1, ...rows.map(r => r[1]))));
  const c = chart("Requests per second", "red: errors", "seconds ago", "requests/s", wide), width = Math.max(1, (c.right - LEFT) / SHOWN - .5);
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
/** Return round values from below ``low`` to above ``high``: 1, 2, 5, or if these are many 1 and 3, or powers of ten. */
function logTicks(low, high) {
  for (const steps of [[1, 2, 5], [1, 3], [1]]) {
    const all = Array.from({length: 12}, (_, n) => n - 6).flatMap(power => steps.map(step => +`${step}e${power}`));
    const first = Math.max(0, all.findLastIndex(v => v <= low)), found = all.slice(first, all.findIndex(v => v >= high && v > all[first]) + 1);
    if (found.length <= 6 || steps.length === 1) return found;
  }
}
/** Draw a logarithmic axis for latencies; return the map to pixels. */
function latencyAxis(c, values) {
  const ticks = logTicks(Math.max(1e-6, Math.min(...values)), Math.max(1e-6, ...values));
  const [bottom, top] = [ticks[0], ticks.at(-1)].map(Math.log10), share = s => (Math.log10(Math.max(s, 1e-6)) - bottom) / (top - bottom);
  yTicks(c, ticks.map(v => [share(v), ms(v)]));
  return s => up(share(s));
}
/** Draw a median as a dot and the way to the p99 as a line. */
function quantiles(c, x, y, median, p99) {
  svg(c.drawing, "line", {x1: x, x2: x, y1: y(median), y2: y(p99), class: "high"});
  svg(c.drawing, "circle", {cx: x, cy: y(median), r: 2.5});
}
function latency(state, traffic, wide) {
  const c = chart("Latency by time", SPREAD, "seconds ago", "latency", wide);
  const rows = since(state, traffic, SHOWN).filter(row => row[3] !== null);
  if (!rows.length) { c.text(along(c, .5), up(.5), "no successful request in this time"); seconds(c); return c.box; }
  const y = latencyAxis(c, rows.flatMap(row => [row[3], row[4]]));
  seconds(c);
  for (const row of rows) quantiles(c, along(c, Math.max(0, 1 - (state.now - row[0]) / SHOWN)), y, row[3], row[4]);
  return c.box;
}
const loadText = load => load <= 2 ? String(load) : `${load / 2 + 1}–${load}`;
function underLoad(rows, wide) {
  const c = chart("Latency under load", SPREAD, "requests in flight when it began", "latency", wide);
  const y = latencyAxis(c, rows.flatMap(row => [row[1], row[2]])), place = n => along(c, (n + .5) / rows.length);
  const every = Math.ceil(rows.length * 46 / (c.right - LEFT));  // a label is at most 46 pixels wide
  svg(c.drawing, "polyline", {points: rows.map(([, median], n) => `${place(n)},${y(median)}`).join(" ")});
  rows.forEach(([load, median, p99], n) => {
    quantiles(c, place(n), y, median, p99);
    if (n % every === 0) c.text(place(n), HIGH - 19, loadText(load));
  });
  return c.box;
}
function batches(found, wide) {
  const c = chart("Batch size", `mean: ${count(meanRows(found), "row")}`, "rows of a call", "calls", wide);
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
const MEANINGS = {400: "invalid request", 401: "no valid token", 403: "not allowed", 404: "unknown model or path", 405: "wrong method",
  408: "sent too slowly", 413: "too large", 429: "server busy", 499: "client disconnected", 500: "internal error",
  503: "not available", 504: "timeout"};
const errorTexts = traffic => failures(traffic).map(([status, n]) => `${n.toLocaleString("en")} × ${status}${MEANINGS[status] ? ` ${MEANINGS[status]}` : ""}`);
const queueSeconds = model => model.functions.map(f => f.phases.queue).filter(s => s !== undefined);
/** Return the width of one of ``count`` charts: side by side, two in a row, or one on a phone. */
function chartWidth(count) {
  const inside = Math.min(document.body.clientWidth, WIDEST) - 64, abreast = innerWidth <= 700 ? 1 : innerWidth <= 1100 ? 2 : count;
  return Math.max(240, Math.floor((inside - GAP * (abreast - 1)) / abreast));
}
function charts(state, model, traffic) {
  const loads = traffic.loads ?? [], found = calls(model), wide = chartWidth(2 + (loads.length > 0) + (found.length > 0));
  const made = $("div", undefined, "charts");
  made.append(requests(state, traffic, wide), latency(state, traffic, wide));
  if (loads.length) made.append(underLoad(loads, wide));
  if (found.length) made.append(batches(found, wide));
  return made;
}
/** Return sentences about the latencies and errors of a model. */
function sentences(points, traffic) {
  const made = $("p", undefined, "muted"), errors = errorTexts(traffic);
  if (points.length) made.append(`Last ${points.length} successful requests: median ${ms(quantile(points, .5))}, p90 ${ms(quantile(points, .9))}, p99 ${ms(quantile(points, .99))}. `);
  if (errors.length) made.append(`Errors since the start: ${errors.join(", ")}.`);
  return made;
}
function section(state, model, few) {
  const points = state.latencies[model.name] || [], traffic = state.traffic[model.name], queue = queueSeconds(model);
  const box = $("section"), made = details(`${model.name}/${model.version}`, "", few), head = $("summary");
  const name = $("h2", model.name), bad = failed(traffic), recent = sum(since(state, traffic, RECENT), 1) / RECENT;
  name.className = "name";
  name.append($("span", ` version ${model.version}`, "muted"));
  head.append(name, figure(rate(recent), "requests"), figure(bad.toLocaleString("en"), "errors", bad ? "bad" : ""),
    figure(ms(points.length ? quantile(points, .5) : undefined), "median"), figure(ms(points.length ? quantile(points, .99) : undefined), "p99"),
    figure(ms(queue.length ? Math.max(...queue) : undefined), "mean in queue"));
  made.append(head);
  box.append(made);
  const row = state.index.find(r => r.name === model.name && r.version === String(model.version));
  if (row && row.reason) box.append($("div", row.reason, "bad"));
  if (!made.open) return box;  // charts are drawn when they are seen
  if (traffic) made.append(charts(state, model, traffic), sentences(points, traffic));
  else made.append($("p", `No requests yet. Clients call v2/models/${model.name}/infer.`, "muted"));
  made.append(bundle(model));
  return box;
}
/** Return the section of requests that were refused before a model was found. */
function withoutModel(state) {
  const traffic = state.traffic[""], box = $("section"), names = Object.entries(state.unknown ?? {}).sort((a, b) => b[1] - a[1]);
  const body = $("div");
  body.append($("div", errorTexts(traffic).join(", "), "bad"));
  if (names.length) body.append($("div", `Unknown models: ${names.map(([name, n]) => `${name} (${n.toLocaleString("en")})`).join(", ")}`, "muted"));
  box.append(row("Requests without a model", "", body));
  return box;
}
/** Return a row of a name and a text below or next to it. */
function row(title, more, body) {
  const made = $("div", undefined, "row"), name = $("h2", title);
  if (more) name.append($("span", ` ${more}`, "muted"));
  made.append(name, body);
  return made;
}

// ---------------------------------------------------------------- the page
let last;
function tiles(state) {
  const traffic = Object.values(state.traffic), points = Object.values(state.latencies).flat();
  const recent = traffic.flatMap(t => since(state, t, RECENT)), bad = traffic.reduce((n, t) => n + failed(t), 0);
  const tile = (value, words, kind) => { const made = $("div"); made.append($("b", value, kind), $("span", words)); return made; };
  document.getElementById("tiles").replaceChildren(
    tile(rate(sum(recent, 1) / RECENT), `requests, last ${RECENT} s`), tile(rate(sum(recent, 2) / RECENT), `errors, last ${RECENT} s`, sum(recent, 2) ? "bad" : ""),
    tile(bad.toLocaleString("en"), "errors since start", bad ? "bad" : ""), tile(String(state.in_flight), `requests in flight, limit ${state.queue}`),
    tile(ms(points.length ? quantile(points, .5) : undefined), "median latency"),
    tile(ms(points.length ? quantile(points, .99) : undefined), "p99 latency"),
    tile(String(state.models.length), "model versions ready"));
}
function show(state) {
  last = state;
  tiles(state);
  const list = [], few = state.models.length <= FEW, focused = document.activeElement?.closest("section")?.dataset.key;
  for (const found of state.index.filter(r => r.state !== "READY")) {
    const box = $("section");
    box.append(row(found.name, found.version && `version ${found.version}`, $("pre", `not available: ${found.reason}`, "bad")));
    list.push(box);
  }
  for (const model of state.models) {
    const box = section(state, model, few);
    box.dataset.key = `${model.name}/${model.version}`;
    list.push(box);
  }
  if (!list.length) {
    const box = $("section");
    box.append(row("No model yet", "", $("span", "Copy a .vmfb file into the served folder. It is loaded at once.", "muted")));
    list.push(box);
  }
  if (failed(state.traffic[""])) list.push(withoutModel(state));
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
