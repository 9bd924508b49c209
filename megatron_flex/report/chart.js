// A chart over iterations: axes, cursor, zoom and selection by pointer and keyboard.

const LEFT = 54, RIGHT = 10, TOP = 8, BOTTOM = 22;

/** Round numbers between two values. */
function ticks(lo, hi, count) {
  const step0 = (hi - lo) / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(step0));
  const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= step0 * 0.75);
  const found = [];
  for (let i = Math.ceil(lo / step - 1e-9); i * step <= hi + step * 1e-9; i += 1)
    found.push(Number((i * step).toPrecision(12)));
  return found;
}
function logTicks(lo, hi) {
  const found = [];
  const decades = Math.log10(hi / lo);
  if (decades < 0.8) return ticks(lo, hi, 4); // hardly any would be a round one
  for (let p = Math.floor(Math.log10(lo)); p <= Math.log10(hi) + 1e-9; p += 1)
    for (const f of decades > 3 ? [1] : decades > 1.2 ? [1, 3] : [1, 2, 5]) {
      const v = f * 10 ** p;
      if (v >= lo * 0.999 && v <= hi * 1.001) found.push(Number(v.toPrecision(6)));
    }
  return found;
}

class Chart {
  /**
   * spec: id, title, why, height, format (of the y axis), log, zero,
   *   down (the y axis goes down), extent(chart) -> [lo, hi] of y or null: nothing to draw,
   *   marks(chart) -> SVG, paint(chart, context) -> on a canvas below,
   *   rows(iteration) -> rows of the box, legend(chart) -> elements, after(chart)
   */
  constructor(parent, spec) {
    this.spec = spec;
    this.hidden = new Set();
    this.heading = el("h2", {}, spec.title);
    this.why = el("p", { class: "why" }, spec.why);
    this.legend = el("div", { class: "legend" });
    this.plot = el("div", {
      class: "plot", tabindex: "0", role: "img",
      "aria-label": `${spec.title}. Arrow keys move through iterations, plus and minus zoom, 0 shows all, Enter selects.`,
    });
    this.nothing = el("p", { class: "note" });
    this.node = el("section", { "data-chart": spec.id }, this.heading, this.why, this.legend, this.plot, this.nothing);
    parent.append(this.node);
    this.plot.addEventListener("pointermove", (event) => this.moved(event));
    this.plot.addEventListener("pointerleave", () => this.left());
    this.plot.addEventListener("pointerdown", (event) => this.pressed(event));
    this.plot.addEventListener("pointerup", (event) => this.released(event));
    this.plot.addEventListener("pointercancel", () => { this.from = null; this.mark(); });
    this.plot.addEventListener("dblclick", () => view(everything.lo, everything.hi));
    this.plot.addEventListener("keydown", (event) => this.key(event));
    this.plot.addEventListener("blur", () => this.left());
    listeners.push((what) => {
      if (what.has("view") || what.has("run") || what.has("size")) this.draw();
      else if (what.has("cursor") || what.has("selected")) this.mark();
    });
    this.draw();
  }

  get width() { return Math.max(120, this.plot.clientWidth); }
  get inner() { return this.width - LEFT - RIGHT; }
  x(iteration) { return LEFT + ((iteration - this.lo) / (this.hi - this.lo)) * this.inner; }
  y(v) {
    const [lo, hi] = this.extent;
    const part = this.spec.log ? Math.log(Math.max(v, lo) / lo) / Math.log(hi / lo) : (v - lo) / (hi - lo);
    return TOP + (1 - part) * this.spec.height;
  }
  iteration(event) {
    const x = event.clientX - this.plot.getBoundingClientRect().left;
    return clamp(Math.round(this.lo + ((x - LEFT) / this.inner) * (this.hi - this.lo)), state.lo, state.hi);
  }

  draw() {
    // Half an iteration at each end, so that the first and the last have room.
    this.lo = state.lo - 0.5;
    this.hi = state.hi + 0.5;
    this.extent = this.spec.extent(this);
    const empty = !this.extent;
    this.plot.hidden = this.legend.hidden = empty;
    this.nothing.textContent = empty ? this.spec.missing : this.spec.note ? this.spec.note(this) : "";
    if (this.spec.legend) this.legend.replaceChildren(...this.spec.legend(this));
    if (empty) return;
    const height = this.spec.height + TOP + BOTTOM;
    const parts = [`<svg viewBox="0 0 ${this.width} ${height}" height="${height}" aria-hidden="true">`];
    parts.push(this.axes());
    parts.push(`<g class="marks">${this.spec.marks ? this.spec.marks(this) : ""}</g>`);
    parts.push(`<rect class="pick" y="${TOP}" height="${this.spec.height}" width="0"></rect>`);
    parts.push(`<line class="cursor" y1="${TOP}" y2="${TOP + this.spec.height}" visibility="hidden"></line>`);
    parts.push(`<path class="chosen" d="M-4,0 L4,0 L0,6 Z" fill="var(--strong)" visibility="hidden"></path></svg>`);
    this.plot.innerHTML = parts.join("");
    if (this.spec.paint) this.painted(height);
    this.mark();
  }

  painted(height) {
    const canvas = el("canvas", { class: "under" });
    const ratio = devicePixelRatio || 1;
    canvas.width = this.width * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
    this.plot.prepend(canvas);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    this.spec.paint(this, context);
  }

  axes() {
    const bottom = TOP + this.spec.height;
    const parts = [`<g class="grid">`];
    for (const v of this.spec.log ? logTicks(...this.extent) : ticks(...this.extent, this.spec.ticks || 4)) {
      const y = this.spec.down ? 2 * TOP + this.spec.height - this.y(v) : this.y(v);
      if (!this.spec.paint) parts.push(`<line x1="${LEFT}" x2="${this.width - RIGHT}" y1="${y}" y2="${y}"></line>`);
      parts.push(`<text x="${LEFT - 6}" y="${y + 4}" text-anchor="end">${escaped(this.spec.format(v))}</text>`);
    }
    for (const v of ticks(state.lo, state.hi, Math.max(2, Math.floor(this.inner / 90)))) {
      if (v !== Math.round(v)) continue;
      const x = this.x(v);
      parts.push(`<text x="${clamp(x, LEFT + 4, this.width - 2 - 3.4 * integer(v).length)}" y="${bottom + 16}" text-anchor="middle">${integer(v)}</text>`);
    }
    return `${parts.join("")}</g>`;
  }

  /** Cursor, the selected iteration, and what is being marked for a zoom. */
  mark() {
    const line = this.plot.querySelector(".cursor");
    if (!line) return;
    const at = state.cursor;
    const inside = at !== null && at >= state.lo && at <= state.hi;
    line.setAttribute("visibility", inside ? "visible" : "hidden");
    if (inside) { line.setAttribute("x1", this.x(at)); line.setAttribute("x2", this.x(at)); }
    const chosen = this.plot.querySelector(".chosen");
    const seen = state.selected >= state.lo && state.selected <= state.hi;
    chosen.setAttribute("visibility", seen ? "visible" : "hidden");
    if (seen) chosen.setAttribute("transform", `translate(${this.x(state.selected)},1)`);
    const pick = this.plot.querySelector(".pick");
    if (this.from && this.to !== undefined && this.from.moved) {
      const [a, b] = [this.x(this.from.at), this.x(this.to)].sort((p, q) => p - q);
      pick.setAttribute("x", a);
      pick.setAttribute("width", b - a);
    } else pick.setAttribute("width", 0);
  }

  moved(event) {
    if (this.plot.hidden) return;
    const at = this.iteration(event);
    if (this.from) {
      this.to = at;
      this.from.moved = this.from.moved || Math.abs(event.clientX - this.from.x) > 5;
    }
    this.point(at, event.clientX, event.clientY);
  }
  point(at, x, y) {
    state.cursor = at;
    changed("cursor");
    showTip(x, y, this.title(at), this.spec.rows(at, this));
  }
  title(at) {
    const run = shown();
    if (run.group === 1) return `iteration ${integer(at)}`;
    const i = position(run, at);
    const first = i < 0 ? at : run.iteration[i];
    return `iterations ${integer(first)} to ${integer(Math.min(first + run.group - 1, everything.hi))}`;
  }
  left() {
    hideTip();
    state.cursor = null;
    changed("cursor");
  }
  pressed(event) {
    if (event.button || event.pointerType === "touch") return;
    this.from = { at: this.iteration(event), x: event.clientX, moved: false };
    this.to = this.from.at;
    this.plot.setPointerCapture(event.pointerId);
  }
  released(event) {
    const from = this.from;
    this.from = null;
    if (from && from.moved && this.to !== from.at) {
      const [a, b] = [from.at, this.to].sort((p, q) => p - q);
      view(a, b);
    } else select(this.iteration(event));
    this.mark();
  }
  key(event) {
    const step = event.shiftKey ? 10 : 1;
    const span = state.hi - state.lo;
    const at = state.cursor === null ? clamp(state.selected, state.lo, state.hi) : state.cursor;
    const go = (to) => {
      to = clamp(to, everything.lo, everything.hi);
      if (to < state.lo) view(to, to + span);
      if (to > state.hi) view(to - span, to);
      const box = this.plot.getBoundingClientRect();
      this.point(to, box.left + this.x(to), box.top + TOP + this.spec.height / 2);
    };
    const zoom = (factor) => view(at - (at - state.lo) * factor, at + (state.hi - at) * factor);
    const actions = {
      ArrowRight: () => go(at + step), ArrowLeft: () => go(at - step),
      Home: () => go(state.lo), End: () => go(state.hi),
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2),
      0: () => view(everything.lo, everything.hi), Escape: () => this.left(),
      Enter: () => select(at),
    };
    const action = actions[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    action();
  }

  /** A button of the legend that hides a series. */
  toggle(name, colour, kind = "") {
    return el("button", {
      type: "button", "aria-pressed": String(!this.hidden.has(name)),
      onclick: () => {
        if (!this.hidden.delete(name)) this.hidden.add(name);
        this.draw();
        [...this.legend.querySelectorAll("button")].find((b) => b.textContent === name)?.focus();
      },
    }, el("span", { class: `swatch ${kind}`, style: `background:${colour};border-color:${colour}` }), name);
  }
}
