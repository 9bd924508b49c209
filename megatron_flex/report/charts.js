// Lines over iterations, and how they are thinned out.

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
/** Whether so many positions are in view that a line would be a smear. */
const dense = (chart, a, b) => b - a > 2 * chart.inner;
/** The least of one column and the most of another between two positions; null where there is none. */
function ends(low, high, from, to) {
  let l = Infinity, h = -Infinity;
  for (let i = from; i < to; i += 1) if (low[i] !== null) { l = Math.min(l, low[i]); h = Math.max(h, high[i]); }
  return h < l ? [null, null] : [l, h];
}
/** The mean of a column between two positions; null where there is none. */
function mean(values, from, to) {
  let sum = 0, count = 0;
  for (let i = from; i < to; i += 1) if (values[i] !== null) { sum += values[i]; count += 1; }
  return count ? sum / count : null;
}
/** The polygon from the least to the most of what shares a pixel. */
function band(chart, run, low, high, a, b) {
  const step = Math.max(1, (b - a) / chart.inner), up = [], down = [];
  for (let p = 0; a + p * step < b; p += 1) {
    const from = Math.floor(a + p * step), to = Math.min(b, Math.max(from + 1, Math.floor(a + (p + 1) * step)));
    const [l, h] = ends(low, high, from, to);
    if (l === null) continue;
    const x = chart.x((middle(run, from) + middle(run, to - 1)) / 2).toFixed(1);
    up.push(`${x},${chart.y(h).toFixed(1)}`);
    down.push(`${x},${chart.y(l).toFixed(1)}`);
  }
  return up.concat(down.reverse()).join(" ");
}
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
 * Lines of several columns. series(): [{name, colour, run, values, least, most, dash, plain, smooth}];
 * least and most: where each value is a mean, what it is of.
 */
function lines(parent, spec) {
  const seen = (chart) => spec.series().filter((s) => s.values && !chart.hidden.has(s.name));
  return new Chart(parent, {
    height: 190, format: short, ...spec,
    note(chart) {
      const many = seen(chart).filter((s) => !s.plain);
      if (many.some((s) => dense(chart, ...range(s.run)))) return "Bands are from the least to the most of the iterations that share a pixel, lines are running means: zoom in for single iterations.";
      return many.some((s) => s.least) ? "Bands are from the least to the most of the iterations that each point is the mean of." : "";
    },
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
          lo = Math.min(lo, s.least ? s.least[i] : v);
          hi = Math.max(hi, s.most ? s.most[i] : v);
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
        const many = dense(chart, from, to) && !s.plain;
        if (many || s.least)
          parts.push(`<polygon points="${band(chart, s.run, s.least || s.values, s.most || s.values, from, to)}" style="fill:${s.colour};opacity:.25"></polygon>`);
        if (many) draw(smooth(s.values, Math.round((b - a) / 200)));
        else if (s.smooth && b - a >= 60) {
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
    run, values: column(run, field), least: column(run, `${field}_least`), most: column(run, `${field}_most`),
    dash, smooth: field.endsWith("loss"),
  })));
}
