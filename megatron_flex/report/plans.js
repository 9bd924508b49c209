// Lengths of samples and plans over iterations.

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
          const [l, h] = low === "length0" ? ends(lo, hi, i, Math.min(b, i + step)) : [mean(lo, i, Math.min(b, i + step)), mean(hi, i, Math.min(b, i + step))];
          if (l === null) continue;
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
        parts.push(`<path d="${path(chart, run, dense(chart, a, b) ? smooth(half, Math.round((b - a) / chart.inner)) : half, sampled(half, a, b, Math.round(chart.inner)))}" style="fill:none;stroke:var(--strong);stroke-width:1.4"></path>`);
      return parts.join("");
    },
    note: (chart) => (dense(chart, ...range(shown())) ? "Where iterations share a pixel, the outermost band holds all of their samples; the others and the line are means." : ""),
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

function mixed(t) {
  const hex = (name) => [1, 3, 5].map((i) => parseInt(css(name).slice(i, i + 2), 16));
  const [a, b] = [hex("--light-degree"), hex("--dark-degree")];
  return `rgb(${a.map((v, i) => Math.round(v + (b[i] - v) * t)).join(",")})`;
}
/** What a box says of a plan. */
function planRows(run, i) {
  const plan = run.plans[run.plan[i]];
  if (!plan) return [];
  const rows = [[null, "workers of each stage", plan.shape], [null, "stages", integer(plan.stages.length)]];
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
    why: "Where the model is cut, iteration by iteration: from its first unit (above) to its last (below). Units are the embedding, halves of layers, and the output; gaps are the borders between stages, and a stage's shade says how many workers hold it.",
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
          const border = Math.min(1.5, 0.3 * (y(stop) - y(start)));
          if (start) context.fillRect(left, y(start) - border / 2, right - left, border);
        }
        i = j;
      }
    },
    rows: (at) => planRows(shown(), position(shown(), at)),
    legend() {
      const each = shown().about.width || 1; // workers that one of those shown stands for
      const top = most(), marks = [...new Set([1, 2, 4, 8, 16, 64, 256, top])].filter((n) => n <= top).sort((p, q) => p - q);
      return marks.map((n) => el("span", { class: "key" },
        el("span", { class: "swatch", style: `background:${mixed(top > 1 ? Math.log(n) / Math.log(top) : 0.3)}` }),
        n * each === 1 ? "1 worker" : `${integer(n * each)} workers`));
    },
  });
}
