// Where the time of iterations goes.

const PARTS = {
  compute: ["computing", "blue", "forward and backward"],
  bubble: ["bubble", "yellow", "waiting for what other workers had not made yet"],
  message: ["messages", "orange", "waiting for what was under way, and sending"],
  waiting: ["other stages", "yellow", "waiting for messages of other stages: until they were made (bubble) and until they were here"],
  norm: ["last worker", "orange", "waiting at the global norm until the last worker is there"],
  reduce: ["reductions", "purple", "summing gradients over the workers of a stage, as far as computing does not hide it"],
  state: ["moving state", "red", "sending and receiving weights and optimizer state for the next plan"],
  update: ["update", "green", "the optimizer"],
  host: ["host", "sky", "waiting for what comes from the host's memory"],
  stall: ["switch stall", "strong", "how much longer than usual a switch kept workers from starting"],
  program: ["program", "sky", "until the iteration's program was there: the planner, or a late worker"],
  other: ["the rest", "grey", "reading, logging, and what no clock tells apart"],
};
const partsOf = (run) => data.parts.filter((p) => {
  const values = column(run, `part_${p}`);
  return values && values.some((v) => v > 1e-6);
});
function timeParts(parent) {
  const chart = new Chart(parent, {
    id: "time", title: "Where the time goes", height: 210, format: (v) => (state.share ? `${num(100 * v)} %` : `${num(v)} s`),
    why: "Seconds of an iteration, as means over the workers that compute. All but computing is what a plan tries to avoid.",
    missing: "The records of this run do not say where its time went.",
    extent(chart) {
      const run = shown(), names = partsOf(run).filter((p) => !chart.hidden.has(PARTS[p][0]));
      if (!partsOf(run).length) return null;
      if (state.share) return [0, 1];
      const [a, b] = range(run);
      let hi = 0;
      for (const bucket of buckets(run, a, b, chart.inner, names)) hi = Math.max(hi, bucket.sum);
      return [0, hi * 1.04 || 1];
    },
    marks(chart) {
      const run = shown(), [a, b] = range(run);
      const names = partsOf(run).filter((p) => !chart.hidden.has(PARTS[p][0]));
      const all = buckets(run, a, b, chart.inner, names), parts = [];
      const below = new Array(all.length).fill(0);
      for (const name of names) {
        const up = [], down = [];
        all.forEach((bucket, n) => {
          const scale = state.share ? 1 / (bucket.sum || 1) : 1;
          const low = below[n], high = low + bucket.values[name] * scale;
          below[n] = high;
          for (const x of [bucket.from - 0.5, bucket.to + 0.5]) {
            const px = chart.x(x).toFixed(1);
            up.push(`${px},${chart.y(high).toFixed(1)}`);
            down.push(`${px},${chart.y(low).toFixed(1)}`);
          }
        });
        parts.push(`<polygon data-part="${name}" points="${up.concat(down.reverse()).join(" ")}" style="fill:var(--${PARTS[name][1]});stroke:var(--card);stroke-width:${all.length < 120 ? 0.6 : 0}"></polygon>`);
      }
      return parts.join("");
    },
    rows(at) {
      const run = shown(), i = position(run, at), sum = value(run, "elapsed", i);
      return partsOf(run).map((p) => {
        const v = value(run, `part_${p}`, i);
        return [`var(--${PARTS[p][1]})`, PARTS[p][0], v === null ? "–" : `${seconds(v)} (${percent(v / sum)})`];
      }).concat([[null, "iteration", seconds(sum)]]);
    },
    legend: (chart) => [...partsOf(shown()).map((p) => chart.toggle(PARTS[p][0], `var(--${PARTS[p][1]})`)),
      el("button", { type: "button", class: "share", "aria-pressed": String(state.share),
        onclick: () => { state.share = !state.share; chart.draw(); chart.legend.querySelector(".share").focus(); } },
      "shares")],
  });
  const rest = el("div", { class: "totals" });
  chart.node.append(rest);
  const draw = () => rest.replaceChildren(...totals());
  listeners.push((what) => { if (what.has("view") || what.has("run")) draw(); });
  draw();
  return chart;
}
/** Means of the parts in runs of iterations that are a pixel wide or more. */
function buckets(run, a, b, pixels, names) {
  const step = Math.max(1, Math.ceil((b - a) / pixels)), found = [];
  const columns = names.map((p) => column(run, `part_${p}`));
  for (let i = a; i < b; i += step) {
    const to = Math.min(b, i + step), values = {};
    let sum = 0;
    names.forEach((name, n) => {
      values[name] = mean(columns[n], i, to) || 0;
      sum += values[name];
    });
    found.push({ from: run.iteration[i], to: run.iteration[to - 1] + run.group - 1, values, sum });
  }
  return found;
}
/** A bar and a table of the iterations in view, for each run. */
function totals() {
  const runs = data.runs.filter((run) => partsOf(run).length);
  if (!runs.length) return [];
  const all = data.parts.filter((p) => runs.some((run) => partsOf(run).includes(p)));
  const sums = runs.map((run) => Object.fromEntries(all.map((p) => [p, total(run, `part_${p}`)])));
  const whole = sums.map((s) => Object.values(s).reduce((x, y) => x + y, 0) || 1);
  const bars = runs.flatMap((run, r) => [
    several ? el("h3", {}, run.name) : null,
    el("div", { class: "stack", role: "img", "aria-label": all.map((p) => `${PARTS[p][0]} ${percent(sums[r][p] / whole[r])}`).join(", ") },
      ...all.map((p) => el("span", { style: `width:${(100 * sums[r][p]) / whole[r]}%;background:var(--${PARTS[p][1]})` }))),
  ]);
  if (!several) {
    return [...bars.filter(Boolean), el("dl", { class: "facts cards" }, ...all.map((p) => el("div", { "data-part": p },
      el("dt", {}, el("span", { class: "swatch", style: `background:var(--${PARTS[p][1]})` }), PARTS[p][0]),
      el("dd", {}, percent(sums[0][p] / whole[0])), el("small", {}, PARTS[p][2]))))];
  }
  const table = el("table", { class: "data" },
    el("tr", {}, el("th", {}, "of all iterations in view"), ...runs.map((run) => el("th", { class: "n" }, several ? run.name : "share"))),
    ...all.flatMap((p) => [el("tr", { "data-part": p, class: "open" },
      el("td", {}, el("span", { class: "swatch", style: `background:var(--${PARTS[p][1]})` }), PARTS[p][0]),
      ...runs.map((_, r) => el("td", { class: "n" }, percent(sums[r][p] / whole[r])))),
    el("tr", {}, el("td", { colspan: runs.length + 1 }, el("small", {}, PARTS[p][2])))]));
  return [...bars.filter(Boolean), el("div", { class: "scroll" }, table)];
}
