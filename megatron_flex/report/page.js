// The page: its parts in order.

function controls(parent) {
  const from = el("input", { type: "number", id: "from", min: everything.lo, max: everything.hi });
  const to = el("input", { type: "number", id: "to", min: everything.lo, max: everything.hi });
  const all = el("button", { type: "button", id: "all", onclick: () => view(everything.lo, everything.hi) }, "all");
  const read = () => view(Number(from.value) || everything.lo, Number(to.value) || everything.hi);
  from.addEventListener("change", read);
  to.addEventListener("change", read);
  const node = el("div", { class: "bar" }, el("label", {}, "iterations", from), el("label", {}, "to", to), all,
    el("span", { class: "sub" }, "or drag in a chart"));
  if (several) {
    node.append(el("fieldset", {}, el("legend", {}, "where one run is shown:"), ...data.runs.map((run, r) => el("label", {},
      el("input", { type: "radio", name: "run", value: r, checked: r === 0, onchange: () => { state.run = r; changed("run", "selected"); } }), run.name))));
  }
  parent.append(node);
  const draw = () => {
    from.value = state.lo;
    to.value = state.hi;
    all.disabled = state.lo === everything.lo && state.hi === everything.hi;
  };
  listeners.push((what) => { if (what.has("view")) draw(); });
  draw();
}

function title(parent) {
  const one = data.runs[0], kinds = [...new Set(data.runs.map((run) => run.about.kind || "training"))];
  const alike = (of) => data.runs.every((run) => of(run) === of(one));
  const width = alike((run) => run.about.width) && alike((run) => run.about.workers) ? one.about.width : 0;
  const words = [one.model, one.about.parameters ? `${short(one.about.parameters)} parameters` : "",
    one.about.workers ? `${integer(one.about.workers)} workers${one.about.width ? `, of which one of every ${integer(one.about.width)} is shown` : ""}` : "",
    one.group > 1 ? `each point is the mean of ${one.group} iterations` : ""].filter(Boolean);
  parent.append(el("h1", {}, `${data.runs.map((run) => run.name).join(", ")}`),
    el("p", { class: "sub" }, `${kinds.join(" and ")} ${several ? "runs" : "run"}${!several && words.length ? `: ${words.join("; ")}` : several && width ? `: ${integer(one.about.workers)} workers, of which one of every ${integer(width)} is shown` : ""}`));
}

function start() {
  const body = document.body, main = el("main");
  title(main);
  controls(main);
  body.append(main, tip);
  overview(main);
  const has = (name) => data.runs.some((run) => column(run, name));

  const limited = data.runs.filter((run) => run.about.budget && column(run, "memory"));
  const equal = new Set(limited.map((run) => run.about.budget)).size === 1;
  const budgets = () => (equal ? limited.slice(0, 1) : limited).map((run) => ({
    name: equal ? "budget" : `${run.name}: budget`, colour: "var(--strong)", run, dash: true, plain: true,
    values: run.iteration.map(() => run.about.budget),
  }));
  const losses = [...new Set(data.runs.flatMap((run) => run.losses))];
  if (losses.length) lines(main, {
    id: "loss", title: "Loss", format: num, why: "Mean over the loss tokens of each batch; of many iterations the strong line is a running mean. Points are validations.",
    missing: "The records have no loss.",
    series: () => overRuns(losses.map((name, n) => [name, name, COLOURS[n % COLOURS.length], n > 0])),
    behind: (chart) => data.runs.map((run, r) => run.validation.filter(([k]) => k >= state.lo && k <= state.hi).map(([k, v]) =>
      `<circle class="validation" cx="${chart.x(k)}" cy="${chart.y(v)}" r="4.5" style="fill:none;stroke:${several ? colourOf(r) : "var(--red)"};stroke-width:2"></circle>`).join("")).join(""),
    also: () => data.runs.flatMap((run) => run.validation.filter(([k]) => k >= state.lo && k <= state.hi).map(([, v]) => v)),
    more: (at) => data.runs.flatMap((run) => run.validation.filter(([k]) => k === at).map(([, v]) => [null, "validation", num(v)])),
  });
  // Of simulations of one set of batches it is the same line.
  const balances = data.runs.map((run) => column(run, "balanced"));
  const sameBalance = several && balances.every((b) => b && JSON.stringify(b) === JSON.stringify(balances[0]));
  lines(main, {
    id: "rate", title: "Tokens a second", zero: true,
    why: `All workers together. Perfect balance is what the computing would allow if it were spread evenly over all workers with nothing in between: the gap is what waiting, messages, reductions, updates and reading cost. ${simulated ? "(The computing of the samples alone, without padding and recomputation.)" : "(The computing that was done, with recomputation; in a simulation that of the samples alone.)"}`,
    missing: "The records have no times.", say: num,
    series: () => (sameBalance ? [...overRuns([[measured, "tokens_per_second", "blue"]]), { name: "perfect balance", colour: "var(--strong)", run: data.runs[0], values: balances[0], dash: true }]
      : overRuns([[measured, "tokens_per_second", "blue"], ["perfect balance", "balanced", "green", true]])),
  });
  lengths(main);
  plans(main);
  timeParts(main);
  if (has("bubble")) lines(main, {
    id: "bubble", title: "Bubble", zero: true, format: percent, height: 120,
    why: "Share of the time up to the global norm in which a worker that has a stage does not compute.",
    missing: "", series: () => overRuns([["bubble", "bubble", "orange"]]),
  });
  const memory = lines(main, {
    id: "memory", title: "Memory against budget", zero: true, format: bytes, height: 150,
    why: simulated ? "Peak bytes of the fullest worker, as simulated." : "Peak bytes of the fullest worker, as measured and as predicted before the iteration ran.",
    missing: "The records of this run have no memory.",
    series: () => overRuns([[measured, "memory", "blue"], ["predicted", "memory_predicted", "orange", true]]).concat(budgets()),
  });
  workers(memory.node);
  switchList(main);
  oneIteration(main);
  if (!simulated) scatter(main);
  if (has("without_slices")) {
    const chart = lines(main, {
      id: "slices", title: "What slices save", zero: true, format: (v) => `${num(v)} s`, say: seconds, height: 150,
      why: "Samples that are cut to slices keep a pipeline busy. By the cost model: the plan that was chosen, and the same plan with whole samples.",
      missing: "", series: () => overRuns([["with slices", "predicted_uncorrected", "blue"], ["whole samples", "without_slices", "red", true]]),
      more: (at) => { const run = shown(), i = position(run, at); return [[null, "samples cut", integer(value(run, "sliced_samples", i))], [null, "into slices", integer(value(run, "slices", i))]]; },
    });
    const words = el("p", { class: "note", id: "slices-words" });
    chart.node.append(words);
    const say = () => {
      words.textContent = data.runs.map((run) => {
        const without = total(run, "without_slices", "predicted_uncorrected"), with_ = total(run, "predicted_uncorrected", "without_slices");
        return without ? `${several ? `${run.name}: with` : "With"} whole samples the iterations in view that have slices would take ${num(without / with_)} times as long, by the cost model.` : "";
      }).filter(Boolean).join(" ");
    };
    listeners.push((what) => { if (what.has("view")) say(); });
    say();
  }
  main.append(el("footer", {}, "Written by tools/report.py of megatron_flex. Charts answer to the keyboard: Tab goes to one, arrow keys move, plus and minus zoom, 0 shows all, Enter chooses an iteration."));

  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) { width = innerWidth; requestAnimationFrame(() => changed("size")); }
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => changed("size"));
  document.documentElement.dataset.ready = "yes";
}
start();
