// What is said in words and tables: the whole run, its switches, one iteration.

const FIGURES = [
  ["iterations", "iterations", integer, ""],
  ["tokens", "tokens", short, ""],
  ["seconds", "time", seconds, "of the iterations, without evaluations and saving"],
  ["tokens_per_second", "tokens a second", num, ""],
  ["of_balance", "of perfect balance", percent, "what the computing would take if it were spread evenly over all workers with nothing in between, as a share of the time"],
  ["loss_last", "loss at the end", num, "mean of the last iterations, at most ten"],
  ["loss_first", "loss at the beginning", num, ""],
  ["bubble", "bubble", percent, "share of the time up to the global norm in which workers do not compute"],
  ["plans", "plans", integer, "different layouts"],
  ["switches", "switches", integer, "of the layout between iterations"],
  ["stall", "switch stalls", seconds, "time that switches kept workers from computing, all together"],
  ["memory", "memory", bytes, "the most that a worker used"],
  ["budget", "budget", bytes, "what a worker may use"],
  ["over_budget", "iterations over the budget", integer, ""],
  ["sliced_samples", "samples cut to slices", integer, ""],
  ["slices_save", "without slices", (x) => `${num(x)} ×`, "as long would the same plans take with whole samples, by the cost model"],
  ["measured_to_predicted", "measured / predicted", num, "median over the iterations with a decision"],
];
function overview(parent) {
  const known = FIGURES.filter(([name]) => !(simulated && name === "measured_to_predicted") && data.runs.some((run) => run.summary[name] !== undefined));
  if (!several) {
    const [run] = data.runs;
    parent.append(el("section", {}, el("h2", {}, "The run in figures"), el("dl", { class: "facts cards", id: "overview" },
      ...known.map(([name, words, format, why]) => el("div", { "data-figure": name },
        el("dt", {}, words), el("dd", {}, format(run.summary[name])), why ? el("small", {}, why) : null)))));
    return;
  }
  const table = el("table", { class: "data", id: "overview" });
  table.append(el("tr", {}, el("th", {}, "run"), ...data.runs.map((run, r) =>
    el("th", { class: "n" }, el("span", { class: "swatch", style: `background:${colourOf(r)}` }), run.name))));
  for (const [name, words, format, why] of known) {
    table.append(el("tr", { "data-figure": name, class: why ? "open" : null }, el("td", {}, words),
      ...data.runs.map((run) => el("td", { class: "n" }, run.summary[name] === undefined ? "–" : format(run.summary[name])))));
    if (why) table.append(el("tr", {}, el("td", { colspan: data.runs.length + 1 }, el("small", {}, why))));
  }
  parent.append(el("section", {}, el("h2", {}, "The runs side by side"), el("div", { class: "scroll" }, table)));
}

function switchList(parent) {
  const node = el("section", { id: "switches" });
  parent.append(node);
  let most = 25;
  const draw = () => {
    const run = shown(), inView = run.switches.filter((s) => s.iteration >= state.lo && s.iteration <= state.hi);
    const stall = inView.reduce((sum, s) => sum + (s.stall || 0), 0);
    const name = (number) => {
      const { shape, stages, text } = run.plans[number];
      return shape.length > 40 ? `${integer(stages.length)} stages${shape.slice(shape.indexOf(")") + 1)}` : shape || text;
    };
    const change = (a, b) => (a === b && a.length ? a : `${a} → ${b}`);
    node.replaceChildren(el("h2", {}, "Switches"),
      el("p", { class: "why" }, "Changes of the layout. A stall is how much longer than usual the worker that waited longest did not compute; the reasons are the planner's conditions with both sides in figures."),
      el("p", { id: "switch-count" }, inView.length
        ? `${integer(inView.length)} in view, which kept workers waiting for ${seconds(stall)} together.`
        : run.switches.length ? "None in view." : "The layout stayed the same all the time."),
      ...inView.slice(-most).reverse().map((s) => el("details", { class: "switch" },
        el("summary", {}, el("b", {}, integer(s.iteration)), el("span", { class: "what" }, s.action || "scripted"),
          el("span", {}, change(name(s.before), name(s.after))), el("span", {}, s.stall === null ? "" : `stall ${seconds(s.stall)}`)),
        el("p", {}, "from ", el("code", {}, run.plans[s.before].text)), el("p", {}, "to ", el("code", {}, run.plans[s.after].text)),
        s.reason.length ? el("ul", {}, ...s.reason.map((r) => el("li", {}, r))) : null,
        el("button", { type: "button", onclick: () => { select(s.iteration); document.getElementById("iteration").scrollIntoView(); } }, `show iteration ${integer(s.iteration)}`))),
      inView.length > most ? el("button", { type: "button", class: "more", onclick: () => { most *= 4; draw(); } }, `show more of ${integer(inView.length)}`) : "");
  };
  listeners.push((what) => { if (what.has("view") || what.has("run")) { most = 25; draw(); } });
  draw();
}

function oneIteration(parent) {
  const node = el("section", { id: "iteration" });
  const facts = el("div");
  const input = el("input", { type: "number", id: "chosen", onchange: (e) => select(Number(e.target.value)) });
  const step = (by) => {
    const known = Object.keys(shown().gantts).map(Number);
    const next = by > 0 ? known.find((k) => k > state.selected) : known.reverse().find((k) => k < state.selected);
    if (next !== undefined) select(next);
  };
  const before = el("button", { type: "button", onclick: () => step(-1) }, "◀ drawn before");
  const after = el("button", { type: "button", onclick: () => step(1) }, "drawn after ▶");
  node.append(el("h2", {}, "One iteration"),
    el("p", { class: "why" }, "Choose it here, or by a click or Enter in any chart. Each row is a worker, time runs to the right; numbers are micro-batches, a darker operation is of a worker's later stage. Drag to zoom, double-click for all."),
    el("div", { class: "row" }, el("label", {}, "iteration", input), before, after), facts);
  parent.append(node);
  const draw = () => {
    const run = shown(), i = position(run, state.selected), known = Object.keys(run.gantts).map(Number);
    input.min = run.iteration[0];
    input.max = run.iteration.at(-1);
    input.value = state.selected;
    before.disabled = !known.some((k) => k < state.selected);
    after.disabled = !known.some((k) => k > state.selected);
    if (i < 0) { facts.replaceChildren(el("p", { class: "note" }, "This run has no such iteration.")); return; }
    const v = (name) => value(run, name, i);
    const list = [["took", seconds(v("elapsed"))], ["predicted", seconds(v("predicted") ?? v("predicted_program"))],
      ...run.losses.map((name) => [name, num(v(name))]), ["tokens a second", num(v("tokens_per_second"))],
      ["samples", integer(v("samples"))], ["tokens", integer(v("tokens"))], ["longest sample", integer(v("length100"))],
      ["micro-batches", integer(v("micro_batches"))], ["slices", integer(v("slices"))], ["bubble", percent(v("bubble"))],
      ["memory", bytes(v("memory"))], ["switch stall before it", seconds(v("stall"))]].filter(([, text]) => text !== "–");
    const plan = run.plans[run.plan[i]];
    facts.replaceChildren(el("dl", { class: "facts" }, ...list.map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text)))),
      plan ? el("p", {}, "plan ", el("code", { id: "plan-text" }, plan.text)) : "");
  };
  listeners.push((what) => { if (what.has("selected") || what.has("run")) draw(); });
  draw();
  window.gantt = new Gantt(node);
}
