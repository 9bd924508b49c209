"use strict";
// Numbers in words, elements, colours, and what the page looks at.

const data = JSON.parse(document.getElementById("data").textContent);
for (const run of data.runs) {
  run.plans = run.plans.map(([layout, saves = "", schedule = "", spare = 0, cut = 0]) => {
    const [text, stages, shape] = run.layouts[layout];
    const rest = [saves, schedule && `schedule ${schedule}`, spare && `spare ${spare}`, cut && `cut ${cut}`];
    return { layout, stages, shape, saves, schedule, cut, text: [text, ...rest.filter(Boolean)].join(" ; ") };
  });
}
const COLOURS = ["blue", "orange", "green", "red", "purple", "sky"];

/** An element with attributes and children; functions named on... are listeners. */
function el(tag, attributes = {}, ...children) {
  const found = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) found.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined)
      found.setAttribute(name, value === true ? "" : value);
  }
  found.append(...children.filter((child) => child !== null && child !== undefined));
  return found;
}

const escaped = (text) =>
  String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const clamp = (x, lo, hi) => Math.min(hi, Math.max(lo, x));

/** A number with four digits, in groups of three. */
function num(x) {
  if (x === null || x === undefined) return "–";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e15 || size < 1e-4) return x.toExponential(2);
  const digits = Math.max(0, 3 - Math.floor(Math.log10(size)));
  return x.toLocaleString("en", { maximumFractionDigits: size >= 1000 ? 0 : digits });
}
const integer = (x) => (x === null || x === undefined ? "–" : Math.round(x).toLocaleString("en"));
const percent = (x) => (x === null || x === undefined ? "–" : `${Number((100 * x).toPrecision(3)).toLocaleString("en")} %`);
function scaled(x, units, step) {
  if (x === null || x === undefined) return "–";
  let i = 0;
  while (Math.abs(x) >= step && i < units.length - 1) { x /= step; i += 1; }
  return `${Number(x.toPrecision(4)).toLocaleString("en")} ${units[i]}`;
}
const bytes = (x) => scaled(x, ["B", "KB", "MB", "GB", "TB"], 1000);
function seconds(x) {
  if (x === null || x === undefined) return "–";
  if (x === 0) return "0 s";
  if (x >= 120) return x >= 7200 ? `${num(x / 3600)} h` : `${num(x / 60)} min`;
  return x >= 1 ? `${num(x)} s` : x >= 1e-3 ? `${num(1e3 * x)} ms` : `${num(1e6 * x)} µs`;
}
function short(x) {
  const size = Math.abs(x);
  for (const [unit, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (size >= unit) return `${Number((x / unit).toPrecision(4))}${name}`;
  return String(Number(x.toPrecision(4)));
}

// ---- what is looked at ---------------------------------------------------------------------------

const everything = {
  lo: Math.min(...data.runs.map((run) => run.iteration[0])),
  hi: Math.max(...data.runs.map((run) => run.iteration.at(-1) + run.group - 1)),
};
const state = {
  run: 0, // of what is shown of one run only
  lo: everything.lo, // first and last iteration in view
  hi: everything.hi,
  cursor: null,
  selected: data.runs[0].iteration.at(-1),
  share: false, // times as shares
};
const listeners = [];
/** Call with what changed: "view", "cursor", "selected", "run", "size". */
function changed(...what) {
  for (const listener of listeners) listener(new Set(what));
}
const several = data.runs.length > 1;
const simulated = data.runs.every((run) => run.about.kind === "simulation");
const measured = simulated ? "simulated" : "measured";
const shown = () => data.runs[state.run];
const colourOf = (run) => `var(--${COLOURS[run % COLOURS.length]})`;

/** Position of an iteration in a run's columns; -1 where it is outside. */
function position(run, iteration) {
  const list = run.iteration;
  if (!list.length || iteration < list[0] || iteration > list.at(-1) + run.group - 1) return -1;
  let a = 0, b = list.length - 1;
  while (a < b) {
    const m = (a + b + 1) >> 1;
    if (list[m] <= iteration) a = m; else b = m - 1;
  }
  return a;
}
/** First position and one after the last of the iterations in view. */
function range(run, lo = state.lo, hi = state.hi) {
  const list = run.iteration;
  let a = 0, b = list.length;
  while (a < b && list[a] + run.group - 1 < lo) a += 1;
  while (b > a && list[b - 1] > hi) b -= 1;
  return [a, b];
}
const column = (run, name) => run.columns[name] || null;
function value(run, name, at) {
  const found = column(run, name);
  return found && at >= 0 ? found[at] : null;
}
/** Sum over the iterations in view of a column, where another (or itself) is there. */
function total(run, name, where = name) {
  const found = column(run, name), other = column(run, where);
  if (!found || !other) return 0;
  const [a, b] = range(run);
  let sum = 0;
  for (let i = a; i < b; i += 1) if (other[i] !== null && found[i] !== null) sum += found[i];
  return sum;
}
function view(lo, hi) {
  lo = Math.round(clamp(lo, everything.lo, everything.hi));
  hi = Math.round(clamp(hi, everything.lo, everything.hi));
  if (hi <= lo) hi = Math.min(everything.hi, lo + 1), lo = Math.max(everything.lo, hi - 1);
  if (lo === state.lo && hi === state.hi) return;
  state.lo = lo;
  state.hi = hi;
  changed("view");
}
function select(iteration) {
  state.selected = clamp(Math.round(iteration), everything.lo, everything.hi);
  changed("selected");
}

// ---- the box beside the pointer ------------------------------------------------------------------

const tip = el("div", { id: "tip", role: "status", hidden: true });
/** Show rows [colour, name, value] (or text alone) at a place of the window. */
function showTip(x, y, title, rows) {
  const lines = rows.map(([colour, name, text]) =>
    name === undefined
      ? `<tr><td class="text" colspan="2">${escaped(colour)}</td></tr>`
      : `<tr><td>${colour ? `<span class="swatch" style="background:${colour}"></span>` : ""}` +
        `${escaped(name)}</td><td>${escaped(text)}</td></tr>`);
  tip.innerHTML = `<b>${escaped(title)}</b><table>${lines.join("")}</table>`;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const right = x + 16 + box.width < innerWidth - 4;
  tip.style.left = `${right ? x + 16 : clamp(x - 16 - box.width, 4, innerWidth - box.width - 4)}px`;
  tip.style.top = `${clamp(y + 14 + box.height < innerHeight ? y + 14 : y - 14 - box.height, 4, innerHeight)}px`;
}
const hideTip = () => { tip.hidden = true; };
