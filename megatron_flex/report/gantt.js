// One iteration, operation by operation: as it was planned, and as it went.

const KIND = [
  ["forward", "sky"], ["backward", "green"], ["backward, input half", "green"], ["backward, weight half", "orange"],
  ["waiting", "card"], ["message under way", "red"], ["sending", "strong"], ["reduction", "purple"],
  ["global norm", "yellow"], ["update", "grey"], ["moving state", "blue"],
];
const ROWS = 24; // workers in view at one time

/** From the packed text of an iteration to spans by worker. */
async function unpacked(text) {
  const raw = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
  const found = JSON.parse(await new Response(stream).text());
  for (const name of ["planned", "actual"]) if (found[name]) found[name] = course(found[name]);
  return found;
}
function course(packed) {
  const workers = new Map(), byName = new Map();
  let start = 0, end = 0;
  packed.k.forEach((kind, i) => {
    start += packed.t[i];
    const span = {
      worker: packed.w[i], kind, stage: packed.s[i], batch: packed.m[i],
      start: start * packed.u, stop: (start + packed.l[i]) * packed.u,
    };
    if (!workers.has(span.worker)) workers.set(span.worker, []);
    workers.get(span.worker).push(span);
    if (kind < 4) byName.set(`${kind} ${span.stage} ${span.batch}`, span);
    end = Math.max(end, span.stop);
  });
  return { workers, byName, end, tokens: packed.n, chains: packed.c, schedule: packed.p };
}
/** Seconds in which a worker computes. */
const busy = (spans) => spans.reduce((sum, s) => sum + (s.kind < 4 ? s.stop - s.start : 0), 0);

class Gantt {
  constructor(parent) {
    this.cache = new Map();
    this.window = [0, 1];
    this.first = 0;
    this.common = false;
    this.node = el("div", { class: "gantts" });
    parent.append(this.node);
    listeners.push((what) => {
      if (what.has("selected") || what.has("run")) this.load();
      else if (what.has("size")) this.draw();
    });
    this.load();
  }

  async load() {
    const run = shown(), text = run.gantts[state.selected], key = `${state.run} ${state.selected}`;
    this.wanted = key;
    this.found = null;
    if (text && !this.cache.has(key)) {
      try {
        this.cache.set(key, await unpacked(text));
      } catch (error) {
        this.problem = "This browser cannot unpack the drawing (it lacks DecompressionStream).";
      }
    }
    if (this.wanted !== key) return; // another iteration was chosen meanwhile
    this.found = this.cache.get(key) || null;
    this.window = [0, 1];
    this.first = 0;
    this.draw();
  }

  get courses() {
    return ["planned", "actual"].filter((name) => this.found && this.found[name]).map((name) => [name, this.found[name]]);
  }

  draw() {
    if (!this.found) {
      this.node.replaceChildren(el("p", { class: "note" }, this.problem || this.missing()));
      return;
    }
    const all = this.courses, workers = [...new Set(all.flatMap(([, c]) => [...c.workers.keys()]))].sort((p, q) => p - q);
    this.first = clamp(this.first, 0, Math.max(0, workers.length - ROWS));
    this.rows = workers.slice(this.first, this.first + ROWS);
    const longest = Math.max(...all.map(([, c]) => c.end));
    const button = (words, label, action, pressed) => el("button", { type: "button", "aria-label": label, "aria-pressed": pressed === undefined ? null : String(pressed), onclick: () => { action(); this.repaint(); } }, words);
    const [a, b] = this.window, span = b - a;
    const tools = el("div", { class: "row gantt-tools" },
      button("+", "zoom in", () => this.zoom(0.5)), button("−", "zoom out", () => this.zoom(2)),
      button("◀", "earlier", () => this.shift(-0.3)), button("▶", "later", () => this.shift(0.3)),
      button("all", "whole iteration", () => { this.window = [0, 1]; }));
    if (all.length > 1) tools.append(button("same time scale", "same time scale for both", () => { this.common = !this.common; }, this.common));
    if (workers.length > ROWS) {
      tools.append(el("label", {}, "workers from", el("input", {
        type: "number", min: 0, max: workers.length - ROWS, step: ROWS, value: this.first,
        onchange: (e) => { this.first = Number(e.target.value) || 0; this.draw(); },
      }), `of ${workers.length}`));
    }
    const kinds = [...new Set(all.flatMap(([, c]) => [...c.workers.values()].flatMap((s) => [...new Set(s.map((x) => x.kind))])))].sort((p, q) => p - q);
    const legend = el("div", { class: "legend" }, ...kinds.filter((k) => k !== 4).map((k) => el("span", { class: "key" },
      el("span", { class: "swatch", style: `background:var(--${KIND[k][1]})` }), KIND[k][0])),
    ...(kinds.includes(4) ? [el("span", { class: "key" }, "empty: waiting")] : []));
    this.panels = all.map(([name, c]) => this.panel(name, c, this.common ? longest : c.end));
    this.tools = tools;
    this.node.replaceChildren(tools, legend, ...this.panels.map((p) => p.node));
    this.repaint();
    void span;
  }

  panel(name, c, length) {
    const active = this.rows.filter((w) => c.workers.has(w)), n = [...c.workers.values()].filter((s) => s.some((x) => x.kind < 4)).length;
    const idle = 1 - [...c.workers.values()].reduce((sum, s) => sum + busy(s), 0) / (Math.max(1, n) * c.end);
    const canvas = el("canvas", { tabindex: "0", role: "img", "data-course": name,
      "aria-label": `${name} course of iteration ${state.selected}: ${seconds(c.end)}. Left and right move through operations, up and down through workers, plus and minus zoom, 0 shows all.` });
    const plot = el("div", { class: "plot gantt" }, canvas);
    const shares = name === "actual" && this.found.shares ? this.sharesOf(this.found.shares, c.end) : null;
    const node = el("div", {}, el("h3", {}, `${name === "planned" ? "As planned" : "As it went"}: ${seconds(c.end)}, computing ${percent(1 - idle)} of it${c.schedule && name === "planned" ? `, ${c.schedule}` : ""}`), plot, shares);
    const panel = { name, c, length, canvas, plot, node, at: null, high: this.rows.length > 12 ? 18 : 26 };
    void active;
    canvas.addEventListener("pointermove", (e) => this.hover(panel, e));
    canvas.addEventListener("pointerleave", () => { panel.at = null; hideTip(); this.paint(panel); });
    canvas.addEventListener("blur", () => { panel.at = null; hideTip(); this.paint(panel); });
    canvas.addEventListener("pointerdown", (e) => {
      if (e.button || e.pointerType === "touch") return;
      panel.from = { x: e.offsetX, moved: false };
      canvas.setPointerCapture(e.pointerId);
    });
    canvas.addEventListener("pointerup", (e) => {
      const from = panel.from;
      panel.from = null;
      if (from && Math.abs(e.offsetX - from.x) > 5) {
        const [p, q] = [from.x, e.offsetX].map((x) => this.part(panel, x)).sort((s, t) => s - t);
        if (q - p > 1e-4) this.window = [clamp(p, 0, 1), clamp(q, 0, 1)];
        this.repaint();
      }
    });
    canvas.addEventListener("dblclick", () => { this.window = [0, 1]; this.repaint(); });
    canvas.addEventListener("wheel", (e) => {
      if (!e.ctrlKey && !e.metaKey) return; // the page scrolls
      e.preventDefault();
      this.zoom(e.deltaY > 0 ? 1.25 : 0.8, this.part(panel, e.offsetX));
      this.repaint();
    }, { passive: false });
    canvas.addEventListener("keydown", (e) => this.key(panel, e));
    return panel;
  }

  /** What a trace knows and a record does not: bubble apart from messages. */
  sharesOf(shares, end) {
    const words = [["compute", "computing"], ["bubble", "bubble (waiting for what another worker had not yet sent)"],
      ["message", "messages under way and sending"], ["reduction", "reductions"], ["norm", "at the global norm"], ["update", "update"]];
    return el("p", { class: "note", id: "shares" }, `Of a worker's time, on average: ${words.map(([k, w]) => `${w} ${percent(shares[k] / end)}`).join(", ")}.`);
  }

  zoom(factor, around = (this.window[0] + this.window[1]) / 2) {
    const [a, b] = this.window, width = clamp((b - a) * factor, 1e-4, 1);
    const lo = clamp(around - (around - a) * (width / (b - a)), 0, 1 - width);
    this.window = [lo, lo + width];
  }
  shift(by) {
    const [a, b] = this.window, width = b - a, lo = clamp(a + by * width, 0, 1 - width);
    this.window = [lo, lo + width];
  }
  part(panel, x) {
    const inner = panel.canvas.clientWidth - LEFT - RIGHT;
    return this.window[0] + ((x - LEFT) / inner) * (this.window[1] - this.window[0]);
  }
  x(panel, time) {
    const inner = panel.canvas.clientWidth - LEFT - RIGHT, [a, b] = this.window;
    return LEFT + ((time / panel.length - a) / (b - a)) * inner;
  }
  repaint() {
    const longest = Math.max(...this.courses.map(([, c]) => c.end));
    const zoomed = this.window[1] - this.window[0] < 1;
    const [zoomIn, zoomOut, back, on, whole, same] = this.tools.querySelectorAll("button");
    zoomOut.disabled = whole.disabled = !zoomed;
    back.disabled = this.window[0] <= 0;
    on.disabled = this.window[1] >= 1;
    if (same) same.setAttribute("aria-pressed", String(this.common));
    void zoomIn;
    for (const panel of this.panels) {
      panel.length = this.common ? longest : panel.c.end;
      this.paint(panel);
    }
  }

  paint(panel) {
    const { canvas, c, high } = panel, ratio = devicePixelRatio || 1;
    const width = Math.max(120, panel.plot.clientWidth), height = this.rows.length * high + 24;
    canvas.style.height = `${height}px`;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const g = canvas.getContext("2d");
    g.scale(ratio, ratio);
    const colours = KIND.map(([, name]) => css(`--${name}`)), ink = css("--op-ink"), soft = css("--soft"), line = css("--line");
    g.font = "11px system-ui, sans-serif";
    g.textBaseline = "middle";
    const [a, b] = this.window, bottom = this.rows.length * high;
    for (const t of ticks(a * panel.length, b * panel.length, Math.max(2, (width - LEFT) / 110))) {
      const x = this.x(panel, t);
      g.fillStyle = line;
      g.fillRect(x, 0, 1, bottom);
      g.fillStyle = soft;
      g.textAlign = x > width - 40 ? "right" : "center";
      g.fillText(seconds(t), Math.min(x, width - 2), bottom + 12);
    }
    this.rows.forEach((worker, row) => {
      const top = row * high;
      g.fillStyle = soft;
      g.textAlign = "right";
      g.fillText(width < 500 || this.rows.at(-1) > 9 ? String(worker) : `worker ${worker}`, LEFT - 6, top + high / 2);
      const spans = c.workers.get(worker) || [], firstStage = Math.min(...spans.filter((s) => s.kind < 4).map((s) => s.stage));
      g.save();
      g.beginPath();
      g.rect(LEFT, top, width - LEFT - RIGHT, high);
      g.clip();
      for (const s of spans) {
        const x0 = this.x(panel, s.start), x1 = this.x(panel, s.stop);
        if (x1 < LEFT || x0 > width - RIGHT || s.kind === 4) continue;
        const whole = s.kind < 4 || s.kind === 9, wide = Math.max(x1 - x0, 0.6);
        const y = top + (whole ? 2 : high * 0.8), h = whole ? high * 0.74 : high * 0.16;
        g.fillStyle = colours[s.kind];
        g.fillRect(x0, y, Math.max(0.6, wide - (wide > 3 ? 0.8 : 0)), h);
        if (s.kind < 4 && s.stage !== firstStage) { // a later stage of the same worker is darker
          g.fillStyle = "#00000038";
          g.fillRect(x0, y, Math.max(0.6, wide - (wide > 3 ? 0.8 : 0)), h);
        }
        const text = String(s.batch);
        if (s.kind < 4 && wide > 7 * text.length + 5) {
          g.fillStyle = ink;
          g.textAlign = "center";
          g.fillText(text, (Math.max(x0, LEFT) + Math.min(x1, width - RIGHT)) / 2, y + h / 2 + 0.5);
        }
        if (panel.at === s) {
          g.strokeStyle = css("--strong");
          g.lineWidth = 2;
          g.strokeRect(x0 + 1, y + 1, Math.max(1, wide - 2), h - 2);
        }
      }
      g.restore();
    });
    if (panel.from && panel.from.to !== undefined) {
      g.fillStyle = css("--shade");
      g.fillRect(Math.min(panel.from.x, panel.from.to), 0, Math.abs(panel.from.to - panel.from.x), bottom);
    }
  }

  hover(panel, event) {
    if (panel.from) { panel.from.to = event.offsetX; this.paint(panel); return; }
    const worker = this.rows[Math.floor(event.offsetY / panel.high)];
    const time = this.part(panel, event.offsetX) * panel.length;
    const spans = panel.c.workers.get(worker) || [];
    const hits = spans.filter((s) => s.start <= time && time < s.stop);
    const lower = event.offsetY % panel.high > panel.high * 0.78;
    const found = hits.find((s) => lower === !(s.kind < 4 || s.kind === 9)) || hits[0] || null;
    if (found !== panel.at) { panel.at = found; this.paint(panel); }
    if (found) this.tell(panel, found, event.clientX, event.clientY);
    else hideTip();
  }
  tell(panel, s, x, y) {
    const { c } = panel, rows = [];
    const other = this.found[panel.name === "planned" ? "actual" : "planned"];
    if (s.batch >= 0) {
      const chain = (c.chains.length ? c.chains : other?.chains || []).find((list) => list.includes(s.batch));
      const slice = chain ? `, slice ${chain.indexOf(s.batch) + 1} of ${chain.length}` : "";
      rows.push([null, "micro-batch", `${s.batch} (${integer(c.tokens[s.batch])} tokens${slice})`], [null, "stage", integer(s.stage)]);
    }
    rows.push([null, "takes", seconds(s.stop - s.start)], [null, "from", seconds(s.start)], [null, "to", seconds(s.stop)]);
    const twin = s.kind < 4 && other && other.byName.get(`${s.kind} ${s.stage} ${s.batch}`);
    if (twin) rows.push([null, panel.name === "planned" ? "took" : "planned to take", seconds(twin.stop - twin.start)],
      [null, panel.name === "planned" ? "began at" : "planned to begin at", seconds(twin.start)]);
    showTip(x, y, `worker ${s.worker}: ${KIND[s.kind][0]}`, rows);
  }

  key(panel, event) {
    const { c } = panel;
    const go = (s) => {
      if (!s) return;
      panel.at = s;
      const t = (s.start + s.stop) / 2 / panel.length, [a, b] = this.window;
      if (t < a || t > b) this.shift((t - (a + b) / 2) / (b - a));
      this.repaint();
      const box = panel.canvas.getBoundingClientRect();
      this.tell(panel, s, box.left + this.x(panel, (s.start + s.stop) / 2), box.top + (this.rows.indexOf(s.worker) + 0.5) * panel.high);
    };
    const listOf = (w) => (c.workers.get(w) || []).filter((s) => s.kind !== 4);
    const at = panel.at;
    const along = (by) => {
      const list = listOf(at ? at.worker : this.rows[0]);
      go(at ? list[clamp(list.indexOf(at) + by, 0, list.length - 1)] : list[0]);
    };
    const across = (by) => {
      const row = at ? clamp(this.rows.indexOf(at.worker) + by, 0, this.rows.length - 1) : 0;
      const list = listOf(this.rows[row]);
      go(list.find((s) => !at || s.stop > at.start) || list.at(-1));
    };
    const actions = {
      ArrowRight: () => along(1), ArrowLeft: () => along(-1), ArrowDown: () => across(1), ArrowUp: () => across(-1),
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2),
      0: () => { this.window = [0, 1]; }, Escape: () => { panel.at = null; hideTip(); },
    };
    const action = actions[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    action();
    this.repaint();
  }

  missing() {
    const known = Object.keys(shown().gantts);
    return known.length
      ? "This iteration is not drawn operation by operation on this page; “drawn before” and “drawn after” go to those that are. tools/report.py --iterations adds others."
      : "No iteration of this run is drawn: its records have neither a trace (--flexpipe-trace) nor what programs are made from, or each is too large for this page (tools/report.py --iterations).";
  }
}
