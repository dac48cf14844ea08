"""The status page at ``/``: models, latencies, and facts about their bundles.

It is one document without external resources. It polls ``/v2/state`` every two seconds, with the token if there is one.
"""

from __future__ import annotations

import base64
import hashlib

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 1080px; padding: 1.2rem; color: #1d2430;
  background: #fbfaf7; }
h1 { font-size: 1.3rem; margin: 0; } h2 { font-size: 1.05rem; margin: 0; }
header { display: flex; gap: 1.2rem; align-items: baseline; flex-wrap: wrap; margin-bottom: 1rem; }
section { background: #fff; border: 1px solid #dcd8cf; border-radius: 8px; padding: .9rem 1.1rem; margin: 0 0 1rem; }
.row { display: flex; gap: 1rem; align-items: baseline; justify-content: space-between; flex-wrap: wrap; }
.muted { color: #69707c; } .bad { color: #a3261c; white-space: pre-wrap; } .good { color: #22703a; }
table { border-collapse: collapse; width: 100%; margin-top: .5rem; } td, th { text-align: left; vertical-align: top;
  padding: .2rem .8rem .2rem 0; border-top: 1px solid #eeeae2; font-weight: normal; }
th { color: #69707c; width: 11rem; } code { font: 13px/1.4 ui-monospace, monospace; overflow-wrap: anywhere; }
svg { width: 100%; height: 120px; display: block; margin-top: .5rem; } summary { cursor: pointer; margin-top: .5rem; }
@media (prefers-color-scheme: dark) { body { background: #171a20; color: #e4e6ea; }
  section { background: #1f242c; border-color: #353c47; } td, th { border-color: #2c323c; }
  .muted, th { color: #9aa3b0; } .bad { color: #ff9a90; } .good { color: #7fd39a; } }
"""

_SCRIPT = """
"use strict";
const $ = (name, text, kind) => {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
};
const svg = (name, values) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in values) made.setAttribute(key, values[key]);
  return made;
};
const ms = s => s === undefined ? "" : s < 1e-3 ? (s * 1e6).toFixed(0) + " us"
  : s < 1 ? (s * 1e3).toPrecision(3) + " ms" : s.toPrecision(3) + " s";
const size = n => n < 1024 ? n + " B" : n < 1 << 20 ? (n / 1024).toFixed(1) + " KiB"
  : n < 1 << 30 ? (n / (1 << 20)).toFixed(1) + " MiB" : (n / (1 << 30)).toFixed(2) + " GiB";
const opened = new Set();

function plot(points) {
  const seconds = points.map(p => p[1]).sort((a, b) => a - b);
  const at = q => seconds[Math.min(seconds.length - 1, Math.floor(q * seconds.length))];
  const box = $("div");
  box.append($("div", `last ${points.length} requests: median ${ms(at(.5))}, 90 % ${ms(at(.9))}, ` +
    `99 % ${ms(at(.99))} (log scale)`, "muted"));
  const low = Math.log10(Math.max(seconds[0], 1e-6)) - .1, high = Math.log10(Math.max(at(1), 1e-6)) + .1;
  const y = s => 110 - 100 * (Math.log10(Math.max(s, 1e-6)) - low) / (high - low);
  const drawing = svg("svg", {viewBox: "0 0 1000 120", preserveAspectRatio: "none", role: "img",
    "aria-label": `latencies of the last ${points.length} requests, median ${ms(at(.5))}`});
  for (const q of [.5, .99]) {
    drawing.append(svg("line", {x1: 0, x2: 1000, y1: y(at(q)), y2: y(at(q)), stroke: "#8a93a0", "stroke-width": 1,
      "stroke-dasharray": q < .9 ? "none" : "6 6", "vector-effect": "non-scaling-stroke"}));
  }
  const step = 1000 / Math.max(points.length, 50);
  points.forEach((p, n) => drawing.append(svg("rect", {x: n * step, width: Math.max(step - 1, 1), y: y(p[1]),
    height: Math.max(118 - y(p[1]), 1), fill: "#3b73b9", opacity: .75})));
  box.append(drawing);
  return box;
}

function report(model) {
  const table = $("table");
  const row = (key, ...values) => {
    const line = $("tr"), cell = $("td");
    values.forEach((v, n) => { if (n) cell.append($("br")); cell.append(v instanceof Node ? v : $("code", v)); });
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
    row("memory " + place, `${size(m.in_use)} in use, ${size(m.idle)} kept, ${size(m.high_water)} at most`);
  }
  row("file", model.path, "since " + new Date(model.loaded_at * 1e3).toLocaleString());
  const details = $("details"), key = model.name + "/" + model.version;
  details.append($("summary", "the bundle"), table);
  details.open = opened.has(key);
  details.addEventListener("toggle", () => details.open ? opened.add(key) : opened.delete(key));
  return details;
}

function show(state) {
  const list = $("div");
  for (const model of state.models) {
    const box = $("section"), head = $("div", undefined, "row"), points = state.latencies[model.name] || [];
    head.append($("h2", model.name), $("span", "version " + model.version, "muted"));
    box.append(head, points.length ? plot(points) : $("div", "no request yet", "muted"));
    const row = state.index.find(r => r.name === model.name && r.version === String(model.version));
    if (row && row.reason) box.append($("div", row.reason, "bad"));
    box.append(report(model));
    list.append(box);
  }
  for (const row of state.index.filter(r => r.state !== "READY")) {
    const box = $("section"), head = $("div", undefined, "row");
    head.append($("h2", row.name), $("span", row.version ? "version " + row.version : "", "muted"));
    box.append(head, $("div", row.reason, "bad"));
    list.append(box);
  }
  if (!list.children.length) list.append($("section", "No model yet."));
  document.getElementById("models").replaceChildren(list);
  const status = document.getElementById("status");
  status.textContent = (state.ready ? "ready" : "not ready") + `, ${state.in_flight} of ${state.queue} requests` +
    (state.trouble ? `, the folder cannot be read: ${state.trouble}` : "");
  status.className = state.ready && !state.trouble ? "good" : "bad";
}

async function look() {
  const token = sessionStorage.getItem("token"), form = document.getElementById("token");
  try {
    const answer = await fetch("v2/state", {headers: token ? {Authorization: "Bearer " + token} : {}});
    form.hidden = answer.status !== 401;
    if (answer.ok) show(await answer.json());
    else document.getElementById("status").textContent = (await answer.json()).error.split("\\n")[0];
  } catch (error) {
    const status = document.getElementById("status");
    status.textContent = "the server does not answer";
    status.className = "bad";
  }
  setTimeout(look, 2000);
}
document.getElementById("token").addEventListener("submit", event => {
  event.preventDefault();
  sessionStorage.setItem("token", event.target.elements[0].value);
});
look();
"""

PAGE = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>aotc serve</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>
<body><header><h1>aotc serve</h1><span id="status" class="muted">...</span>
<form id="token" hidden><label>Token <input type="password" autocomplete="off"></label> <button>Show</button></form>
</header><main id="models"></main><script>{_SCRIPT}</script></body></html>
"""


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


HEADERS = {
    "content-security-policy": f"default-src 'none'; connect-src 'self'; script-src 'sha256-{_digest(_SCRIPT)}'; "
    f"style-src 'sha256-{_digest(_STYLE)}'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
"""Only the page's own script can run, whatever the names of models are."""
