"use strict";
// Data of the page, formatting of numbers, and helpers to build elements and SVG.
const F = JSON.parse(document.getElementById("facts").textContent);
let N = F;  // the facts that depend on sizes: F itself, or one of F.choices
// The selection: a kernel, or a layer by its name; the numbers of its commands; the search text; equal layers as one.
const chosen = { kernel: "", layer: "", steps: [], text: "", merged: false };

const $ = id => document.getElementById(id);
const make = (tag, text, name) => {
  const e = document.createElement(tag);
  if (text !== undefined) e.textContent = text;
  if (name) e.className = name;
  return e;
};
const SVG = "http://www.w3.org/2000/svg";
const draw = (parent, tag, facts, title) => {
  const e = document.createElementNS(SVG, tag);
  for (const [k, v] of Object.entries(facts)) e.setAttribute(k, v);
  if (tag === "text") e.textContent = title;
  else if (title !== undefined) { const t = document.createElementNS(SVG, "title"); t.textContent = title; e.append(t); }
  parent.append(e);
  return e;
};

const UNITS = { bytes: [["B", 1], ["kB", 1e3], ["MB", 1e6], ["GB", 1e9]], time: [["ns", 1], ["us", 1e3], ["ms", 1e6], ["s", 1e9]] };
const unitOf = (kind, n) => UNITS[kind].findLast(([, size]) => n >= size) ?? UNITS[kind][0];
const digits = n => n >= 100 || Number.isInteger(n) ? n.toFixed(0) : n >= 10 ? n.toFixed(1) : n.toFixed(2);
const quantity = kind => n => { const [unit, size] = unitOf(kind, n); return `${digits(n / size)} ${unit}`; };
const bytes = quantity("bytes"), time = quantity("time");
const rate = n => n >= 1000 ? Math.round(n).toLocaleString("en") : digits(n);
const percent = share => share > 0 && share < 0.0005 ? "<0.1 %" : share >= 0.0995 ? `${(100 * share).toFixed(0)} %` : `${(100 * share).toFixed(1)} %`;
const count = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : what.endsWith("ch") ? "es" : "s"}`;
const short = (text, most) => text.length <= most ? text : `${text.slice(0, most - 1)}…`;

/** Return where a location points: its file without folders and its line, or else the text. */
const placeOf = loc => { const place = loc.split(" at ").at(-1).split(", in ")[0]; return /:\d+/.test(place) ? place.split("/").at(-1) : place; };
const opsOf = name => F.kernels[name]?.ops ?? [];
const timed = () => N.steps.filter(s => s.bound !== "control");  // a loop that is a command contains its kernels' time
const nsOf = steps => steps.reduce((sum, s) => sum + s.runs * s.ns, 0);
const total = () => nsOf(timed()) || 1;

/** Return true if a command matches the search text. */
function matches(step) {
  const text = chosen.text.toLowerCase();
  const k = F.kernels[step.kernel];
  return [step.kernel, step.scope, step.layer.join("/"), step.loc, step.device, k?.kind, ...(k?.ops ?? []), ...(k?.lines ?? [])]
    .some(part => part?.toLowerCase().includes(text));
}
/** Add to each command the numbers of those before it; graphs run one after the other. */
function linkSteps(steps) {
  const last = new Map();
  for (const s of steps) last.set(s.graph, s.number);
  const before = graph => [...last].filter(([other]) => other < graph).map(([, number]) => number);
  for (const s of steps) s.before = s.after.length ? s.after : before(s.graph).slice(-1);
}
/** Return the words for the source of a time: measured, scaled to these sizes from a measurement, or predicted. */
const sourceOf = s => s.measured === null ? "predicted" : s.scaled ? "scaled from other sizes" : "measured";
const linked = (e, name) => { e.addEventListener("click", () => choose(name)); return e; };
