// The charts over iterations: lines, lengths, plans, where time goes, and two that are none.

/** Positions to draw: all, or of each pixel's values the least and the most. */
function sampled(values, a, b, pixels) {
  const found = [];
  if (b - a <= 2 * pixels) {
    for (let i = a; i < b; i += 1) found.push(i);
    return found;
  }
  const step = (b - a) / pixels;
  for (let p = 0; p < pixels; p += 1) {
    let least = -1, most = -1;
    for (let i = Math.floor(a + p * step); i < Math.floor(a + (p + 1) * step); i += 1) {
      if (values[i] === null) continue;
      if (least < 0 || values[i] < values[least]) least = i;
      if (most < 0 || values[i] > values[most]) most = i;
    }
    if (least >= 0) found.push(...(least === most ? [least] : [Math.min(least, most), Math.max(least, most)]));
  }
  return found;
}
/** The path of a line with gaps where there is no value. */
function path(chart, run, values, positions) {
  let text = "", pen = "M";
  for (const i of positions) {
    const v = values[i];
    if (v === null || (chart.spec.log && v <= 0)) { if (positions.length < 3000) pen = "M"; continue; }
    text += `${pen}${chart.x(middle(run, i)).toFixed(1)},${chart.y(v).toFixed(1)}`;
    pen = "L";
  }
  return text;
}
const middle = (run, i) => run.iteration[i] + (run.group - 1) / 2;
/** Means over a window around each value. */
function smooth(values, window) {
  const found = new Array(values.length);
  let sum = 0, count = 0, a = 0, b = 0;
  for (let i = 0; i < values.length; i += 1) {
    for (; b < values.length && b <= i + window; b += 1) if (values[b] !== null) { sum += values[b]; count += 1; }
    for (; a < i - window; a += 1) if (values[a] !== null) { sum -= values[a]; count -= 1; }
    found[i] = count ? sum / count : null;
  }
  return found;
}

/**
 * Lines of several columns. series(): [{name, colour, run, values, dash, points, smooth}]
 */
function lines(parent, spec) {
  const seen = (chart) => spec.series().filter((s) => s.values && !chart.hidden.has(s.name));
  return new Chart(parent, {
    height: 190, format: short, ...spec,
    extent(chart) {
      let lo = Infinity, hi = -Infinity, any = false;
      for (const s of spec.series()) {
        if (!s.values) continue;
        any = true;
        if (chart.hidden.has(s.name)) continue;
        const [a, b] = range(s.run);
        for (let i = a; i < b; i += 1) {
          const v = s.values[i];
          if (v === null || (spec.log && v <= 0)) continue;
          if (v < lo) lo = v;
          if (v > hi) hi = v;
        }
      }
      if (!any) return null;
      for (const v of spec.also ? spec.also() : []) { lo = Math.min(lo, v); hi = Math.max(hi, v); }
      if (lo > hi) return [0, 1];
      if (spec.log) return [lo * 0.9, hi * 1.1];
      if (spec.zero) lo = Math.min(0, lo);
      const more = (hi - lo || Math.abs(hi) || 1) * 0.05;
      return [spec.zero && lo === 0 ? 0 : lo - more, hi + more];
    },
    marks(chart) {
      const parts = [];
      if (spec.behind) parts.push(spec.behind(chart));
      for (const s of seen(chart)) {
        const [a, b] = range(s.run);
        const from = Math.max(0, a - 1), to = Math.min(s.values.length, b + 1);
        const style = `fill:none;stroke:${s.colour};stroke-width:1.6;${s.dash ? "stroke-dasharray:6 4;" : ""}`;
        const draw = (values, more = "") => {
          const d = path(chart, s.run, values, sampled(values, from, to, Math.round(chart.inner)));
          if (d) parts.push(`<path clip-path="inset(0)" data-series="${escaped(s.name)}" d="${d}" style="${style}${more}"></path>`);
        };
        if (s.smooth && b - a >= 60) {
          draw(s.values, "stroke-width:1;opacity:.35");
          draw(smooth(s.values, Math.round((b - a) / 60)));
        } else draw(s.values);
        if (s.dots || (b - a <= 60 && !s.plain))
          for (let i = a; i < b; i += 1)
            if (s.values[i] !== null && !(spec.log && s.values[i] <= 0))
              parts.push(`<circle cx="${chart.x(middle(s.run, i)).toFixed(1)}" cy="${chart.y(s.values[i]).toFixed(1)}" r="${s.dots ? 3 : 2}" style="fill:${s.colour}"></circle>`);
      }
      return parts.join("");
    },
    rows(at, chart) {
      return seen(chart)
        .map((s) => [s.colour, s.name, (spec.say || spec.format || num)(value1(s, at))])
        .concat(spec.more ? spec.more(at) : []);
    },
    legend: (chart) => spec.series().filter((s) => s.values)
      .map((s) => chart.toggle(s.name, s.colour, s.dash ? "line dash" : "line")),
  });
}
const value1 = (s, at) => { const i = position(s.run, at); return i < 0 ? null : s.values[i]; };

/** Series of one column for every run; with several runs each has its colour. */
function overRuns(columns) {
  return data.runs.flatMap((run, r) => columns.map(([name, field, colour, dash]) => ({
    name: several ? `${run.name}: ${name}` : name,
    colour: several ? colourOf(r) : `var(--${colour})`,
    run, values: column(run, field), dash, smooth: field.endsWith("loss"),
  })));
}

// ---- lengths and plans ---------------------------------------------------------------------------

function lengths(parent) {
  const bands = [["shortest to longest", "length0", "length100", 0.16], ["10 % to 90 %", "length10", "length90", 0.3],
    ["middle half", "length25", "length75", 0.45]];
  return new Chart(parent, {
    id: "lengths", title: "Lengths of the samples", height: 150, format: short, log: true, ticks: 4,
    why: "Tokens of the samples of each batch: the line is the median, the bands hold the middle half, four fifths, and all. A pipeline must be long enough for the longest.",
    missing: "The records of this run have no lengths.",
    extent() {
      const run = shown(), most = column(run, "length100"), least = column(run, "length0");
      if (!most || !least) return null;
      const [a, b] = range(run);
      let lo = Infinity, hi = 1;
      for (let i = a; i < b; i += 1) {
        if (most[i] > hi) hi = most[i];
        if (least[i] !== null && least[i] < lo) lo = least[i];
      }
      return [Math.max(1, Math.min(lo, hi) * 0.9), hi * 1.15];
    },
    marks(chart) {
      const run = shown(), [a, b] = range(run), parts = [];
      for (const [name, low, high, alpha] of bands) {
        if (chart.hidden.has(name)) continue;
        const lo = column(run, low), hi = column(run, high);
        if (!lo || !hi) continue;
        const step = Math.max(1, Math.floor((b - a) / chart.inner));
        const up = [], down = [];
        for (let i = a; i < b; i += step) {
          let l = Infinity, h = -Infinity;
          for (let j = i; j < Math.min(b, i + step); j += 1)
            if (lo[j] !== null) { l = Math.min(l, lo[j]); h = Math.max(h, hi[j]); }
          if (h < l) continue;
          const half = b - a <= 400 ? 0.45 * run.group : 0.5 * step * run.group;
          for (const x of [middle(run, i) - half, middle(run, i) + half]) {
            up.push(`${chart.x(x).toFixed(1)},${chart.y(h).toFixed(1)}`);
            down.push(`${chart.x(x).toFixed(1)},${chart.y(l).toFixed(1)}`);
          }
        }
        parts.push(`<polygon points="${up.concat(down.reverse()).join(" ")}" style="fill:var(--blue);opacity:${alpha}"></polygon>`);
      }
      const half = column(run, "length50");
      if (half && !chart.hidden.has("median"))
        parts.push(`<path d="${path(chart, run, half, sampled(half, a, b, Math.round(chart.inner)))}" style="fill:none;stroke:var(--strong);stroke-width:1.4"></path>`);
      return parts.join("");
    },
    rows(at) {
      const run = shown(), i = position(run, at);
      const rows = [["longest", "length100"], ["90 % are below", "length90"], ["three quarters", "length75"],
        ["median", "length50"], ["a quarter", "length25"], ["10 % are below", "length10"], ["shortest", "length0"]];
      return rows.map(([name, field]) => [null, name, integer(value(run, field, i))])
        .concat([[null, "samples", integer(value(run, "samples", i))], [null, "tokens", integer(value(run, "tokens", i))],
          [null, "in slices", integer(value(run, "sliced_samples", i))]]);
    },
    legend: (chart) => [...bands.map(([name, , , alpha]) =>
      chart.toggle(name, `color-mix(in srgb, var(--blue) ${100 * alpha + 20}%, transparent)`)),
      chart.toggle("median", "var(--strong)", "line")],
  });
}

const degrees = (plan) => `(${plan.stages.map((s) => s[2]).join(",")})`;
function mixed(t) {
  const hex = (name) => [1, 3, 5].map((i) => parseInt(css(name).slice(i, i + 2), 16));
  const [a, b] = [hex("--light-degree"), hex("--dark-degree")];
  return `rgb(${a.map((v, i) => Math.round(v + (b[i] - v) * t)).join(",")})`;
}
/** What a box says of a plan. */
function planRows(run, i) {
  const plan = run.plans[run.plan[i]];
  if (!plan) return [];
  const rows = [[null, "workers of each stage", degrees(plan)], [null, "stages", integer(plan.stages.length)]];
  if (plan.schedule) rows.push([null, "schedule", plan.schedule]);
  if (plan.cut) rows.push([null, "cut by", `${integer(plan.cut)} tokens`]);
  if (plan.saves) rows.push([null, "saves memory", plan.saves.replace(/ ; /g, ", ")]);
  if (run.action[i] >= 0) rows.push([null, "action", run.actions[run.action[i]]]);
  rows.push([null, "micro-batches", integer(value(run, "micro_batches", i))]);
  return rows;
}
function plans(parent) {
  const most = () => Math.max(1, ...shown().plans.flatMap((p) => p.stages.map((s) => s[2])));
  return new Chart(parent, {
    id: "plans", title: "The plan", height: 170, format: (v) => `unit ${integer(v)}`, down: true,
    why: "Where the model is cut, iteration by iteration: from its first unit (above) to its last (below), gaps are the borders between stages, and the darker a stage, the more workers hold it.",
    missing: "The records of this run have no plans.",
    extent() {
      const units = Math.max(0, ...shown().plans.map((p) => (p.stages.length ? p.stages.at(-1)[1] : 0)));
      return units && shown().plan.some((p) => p >= 0) ? [0, units] : null;
    },
    paint(chart, context) {
      const run = shown(), [a, b] = range(run), top = most();
      const shade = new Map(), page = css("--card");
      const same = (p, q) => run.plans[run.plan[p]]?.layout === run.plans[run.plan[q]]?.layout;
      const colour = (n) => {
        if (!shade.has(n)) shade.set(n, mixed(top > 1 ? Math.log(n) / Math.log(top) : 0.3));
        return shade.get(n);
      };
      const units = chart.extent[1], y = (u) => TOP + (u / units) * chart.spec.height;
      let i = a;
      while (i < b) {
        // One rectangle for each stage as long as the layout stays; at least a pixel wide.
        let j = i + 1;
        while (j < b && (same(i, j) || chart.x(run.iteration[j]) - chart.x(run.iteration[i]) < 1)) j += 1;
        const left = Math.max(LEFT, chart.x(run.iteration[i] - 0.5));
        const right = Math.min(LEFT + chart.inner, chart.x(run.iteration[j - 1] + run.group - 0.5));
        const wide = right - left > 5;
        for (const [start, stop, n] of run.plans[run.plan[i]]?.stages || []) {
          context.fillStyle = colour(n);
          context.fillRect(left, y(start), right - left + (wide ? -0.7 : 0.3), y(stop) - y(start));
          context.fillStyle = page;
          if (start) context.fillRect(left, y(start) - 0.75, right - left, 1.5);
        }
        i = j;
      }
    },
    rows: (at) => planRows(shown(), position(shown(), at)),
    legend() {
      const top = most(), marks = [...new Set([1, 2, 4, 8, 16, 64, 256, top])].filter((n) => n <= top).sort((p, q) => p - q);
      return marks.map((n) => el("span", { class: "key" },
        el("span", { class: "swatch", style: `background:${mixed(top > 1 ? Math.log(n) / Math.log(top) : 0.3)}` }),
        n === 1 ? "1 worker" : `${n} workers`));
    },
  });
}

// ---- where time goes -----------------------------------------------------------------------------

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
      let part = 0, count = 0;
      for (let j = i; j < to; j += 1) if (columns[n][j] !== null) { part += columns[n][j]; count += 1; }
      values[name] = count ? part / count : 0;
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

// ---- memory by worker ----------------------------------------------------------------------------

function workers(parent) {
  const node = el("div", { class: "workers" });
  parent.append(node);
  let at = -1;
  const peaks = () => {
    const { starts, workers: rows } = shown().memory, found = [];
    const reach = (g) => (g + 1 < starts.length ? starts[g + 1] - 1 : everything.hi);
    rows.forEach((row, g) => {
      if (starts[g] > state.hi || reach(g) < state.lo) return;
      row.forEach((v, w) => { if (v !== null && !(found[w] >= v)) found[w] = v; });
    });
    return found;
  };
  const draw = () => {
    const found = peaks(), budget = shown().about.budget;
    if (!found.length) { node.replaceChildren(); return; }
    const plot = el("div", { class: "plot", tabindex: "0", role: "img", "aria-label": "Peak memory of each worker. Arrow keys move through workers." });
    node.replaceChildren(el("h3", {}, "The most that each worker used, over the iterations in view"), plot);
    const width = Math.max(120, plot.clientWidth), height = 120, n = found.length;
    const most = Math.max(budget || 0, ...found.map((v) => v || 0)) * 1.06;
    const x = (w) => LEFT + (w * (width - LEFT - RIGHT)) / n, y = (v) => TOP + (1 - v / most) * height;
    const wide = (width - LEFT - RIGHT) / n, bar = Math.max(0.5, Math.min(wide > 6 ? wide * 0.8 : wide, 90));
    const parts = [`<svg viewBox="0 0 ${width} ${height + TOP + BOTTOM}" height="${height + TOP + BOTTOM}" aria-hidden="true"><g class="grid">`];
    for (const v of ticks(0, most, 3)) parts.push(`<line x1="${LEFT}" x2="${width - RIGHT}" y1="${y(v)}" y2="${y(v)}"></line><text x="${LEFT - 6}" y="${y(v) + 4}" text-anchor="end">${bytes(v)}</text>`);
    parts.push("</g>");
    found.forEach((v, w) => {
      if (!v) return;
      const over = budget && v > budget;
      parts.push(`<rect data-worker="${w}" x="${x(w) + (wide - bar) / 2}" width="${bar}" y="${y(v)}" height="${TOP + height - y(v)}" style="fill:var(--${over ? "red" : "sky"})"></rect>`);
      if (over && wide > 30) parts.push(`<text x="${x(w) + wide / 2}" y="${y(v) - 3}" text-anchor="middle">over</text>`);
    });
    const every = Math.max(1, Math.ceil(36 / wide));
    for (let w = 0; w < n; w += every) parts.push(`<text x="${x(w) + wide / 2}" y="${TOP + height + 16}" text-anchor="middle">${w}</text>`);
    if (budget) parts.push(`<line x1="${LEFT}" x2="${width - RIGHT}" y1="${y(budget)}" y2="${y(budget)}" style="stroke:var(--strong);stroke-width:1.5;stroke-dasharray:7 4"></line><text x="${width - RIGHT}" y="${y(budget) - 4}" text-anchor="end">budget ${bytes(budget)}</text>`);
    plot.innerHTML = `${parts.join("")}</svg>`;
    const show = (w, px, py) => {
      at = clamp(w, 0, n - 1);
      const v = found[at] || null;
      showTip(px, py, `worker ${at}`, [[null, "most used", bytes(v)]].concat(budget && v ? [[null, "of the budget", percent(v / budget)]] : []));
    };
    const box = () => plot.getBoundingClientRect();
    plot.onpointermove = (e) => show(Math.floor((e.clientX - box().left - LEFT) / wide), e.clientX, e.clientY);
    plot.onpointerleave = plot.onblur = hideTip;
    plot.onkeydown = (e) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
      if (!step) return;
      e.preventDefault();
      show(at + step, box().left + x(clamp(at + step, 0, n - 1)) + wide / 2, box().top + 40);
    };
  };
  listeners.push((what) => { if (what.has("view") || what.has("run") || what.has("size")) draw(); });
  draw();
}

// ---- predicted against measured ------------------------------------------------------------------

function scatter(parent) {
  const node = el("section", { "data-chart": "predicted" }, el("h2", {}, "Predicted against measured"),
    el("p", { class: "why" }, "Each point is an iteration; on the line they are equal. Filled points are what the planner expected after what earlier iterations taught it, rings are the cost model alone."));
  const legend = el("div", { class: "legend" });
  const plot = el("div", { class: "plot", tabindex: "0", role: "img", "aria-label": "Predicted against measured time. Arrow keys move through iterations, Enter selects." });
  const words = el("p", { class: "note" });
  node.append(legend, plot, words);
  parent.append(node);
  const hidden = new Set();
  const kinds = [["predicted", "predicted"], ["cost model alone", "predicted_uncorrected"], ["program, by the cost model", "predicted_program"]];
  let points = [], at = -1, x, y;
  const has = (field) => data.runs.some((run) => column(run, field));
  const used = () => (has("predicted") ? kinds.slice(0, 2) : kinds.slice(2)).filter(([, field]) => has(field));
  const draw = () => {
    points = [];
    const ratios = [];
    data.runs.forEach((run, r) => used().forEach(([name, field], k) => {
      const guess = column(run, field), took = column(run, "elapsed");
      if (!guess || !took || hidden.has(name)) return;
      const [a, b] = range(run), step = Math.max(1, Math.ceil((b - a) / 1500));
      for (let i = a; i < b; i += 1) {
        if (!(guess[i] > 0) || !(took[i] > 0)) continue;
        if (k === 0) ratios.push(took[i] / guess[i]);
        if ((i - a) % step === 0) points.push({ run, r, i, name, ring: k > 0, p: guess[i], m: took[i] });
      }
    }));
    points.sort((p, q) => p.run.iteration[p.i] - q.run.iteration[q.i]);
    legend.replaceChildren(...used().map(([name], k) => el("button", {
      type: "button", "aria-pressed": String(!hidden.has(name)),
      onclick: () => { if (!hidden.delete(name)) hidden.add(name); draw(); [...legend.children].find((b) => b.textContent === name).focus(); },
    }, el("span", { class: "swatch", style: `border-radius:50%;width:10px;border:1.5px solid var(--blue);background:${k ? "none" : "var(--blue)"}` }), name)),
    ...(several ? data.runs.map((run, r) => el("span", { class: "key" }, el("span", { class: "swatch", style: `background:${colourOf(r)}` }), run.name)) : []));
    plot.hidden = !points.length;
    if (!points.length) {
      plot.innerHTML = "";
      words.textContent = used().length ? "" : "The records of these runs have no predictions.";
      return;
    }
    const width = Math.max(120, plot.clientWidth), height = 240, all = points.flatMap((p) => [p.p, p.m]);
    const lo = Math.min(...all) * 0.9, hi = Math.max(...all) * 1.1, part = (v) => Math.log(v / lo) / Math.log(hi / lo);
    x = (v) => LEFT + part(v) * (width - LEFT - RIGHT);
    y = (v) => TOP + (1 - part(v)) * height;
    const parts = [`<svg viewBox="0 0 ${width} ${height + TOP + 36}" height="${height + TOP + 36}" aria-hidden="true"><g class="grid">`];
    let last = -100;
    for (const v of logTicks(lo, hi)) {
      parts.push(`<line x1="${LEFT}" x2="${width - RIGHT}" y1="${y(v)}" y2="${y(v)}"></line><text x="${LEFT - 6}" y="${y(v) + 4}" text-anchor="end">${seconds(v)}</text>`);
      if (x(v) - last > 60) { parts.push(`<text x="${x(v)}" y="${TOP + height + 16}" text-anchor="middle">${seconds(v)}</text>`); last = x(v); }
    }
    parts.push(`</g><text x="${width - RIGHT}" y="${TOP + height + 32}" text-anchor="end">predicted →</text><text x="${LEFT + 6}" y="${TOP + 16}">↑ measured</text>`);
    parts.push(`<line x1="${x(lo)}" y1="${y(lo)}" x2="${x(hi)}" y2="${y(hi)}" style="stroke:var(--soft);stroke-dasharray:5 4"></line>`);
    for (const p of points) {
      const colour = several ? colourOf(p.r) : "var(--blue)";
      parts.push(`<circle cx="${x(p.p).toFixed(1)}" cy="${y(p.m).toFixed(1)}" r="3.2" style="${p.ring ? `fill:none;stroke:${colour};stroke-width:1.2;opacity:.7` : `fill:${colour};opacity:.75`}"></circle>`);
    }
    parts.push(`<circle class="ring" r="7" style="fill:none;stroke:var(--strong);stroke-width:2" visibility="hidden"></circle></svg>`);
    plot.innerHTML = parts.join("");
    ratios.sort((p, q) => p - q);
    const of = (q) => num(ratios[Math.min(ratios.length - 1, Math.floor(q * ratios.length))]);
    words.textContent = ratios.length ? `Measured over predicted, of the iterations in view: ${of(0.5)} (median), four in five between ${of(0.1)} and ${of(0.9)}.` : "";
  };
  const show = (p, px, py) => {
    at = points.indexOf(p);
    const ring = plot.querySelector(".ring");
    ring.setAttribute("cx", x(p.p));
    ring.setAttribute("cy", y(p.m));
    ring.setAttribute("visibility", "visible");
    showTip(px, py, `${several ? `${p.run.name}, ` : ""}iteration ${integer(p.run.iteration[p.i])}`,
      [[null, p.name, seconds(p.p)], [null, "measured", seconds(p.m)], [null, "measured / predicted", num(p.m / p.p)]]);
  };
  const near = (event) => {
    const box = plot.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
    let best = null, least = 900;
    for (const p of points) {
      const d = (x(p.p) - px) ** 2 + (y(p.m) - py) ** 2;
      if (d < least) { least = d; best = p; }
    }
    return best;
  };
  const leave = () => { hideTip(); plot.querySelector(".ring")?.setAttribute("visibility", "hidden"); };
  plot.onpointermove = (e) => { const p = near(e); if (p) show(p, e.clientX, e.clientY); else leave(); };
  plot.onpointerleave = plot.onblur = leave;
  plot.onclick = (e) => { const p = near(e); if (p) select(p.run.iteration[p.i]); };
  plot.onkeydown = (e) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
    if (e.key === "Enter" && at >= 0) select(points[at].run.iteration[points[at].i]);
    if (!step || !points.length) return;
    e.preventDefault();
    const p = points[clamp(at + step, 0, points.length - 1)], box = plot.getBoundingClientRect();
    show(p, box.left + x(p.p), box.top + y(p.m));
  };
  listeners.push((what) => { if (what.has("view") || what.has("size")) draw(); });
  draw();
}
