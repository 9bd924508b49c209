// Charts that are not over iterations: memory of each worker, predicted against measured.

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
