  // ---- curves that can grow, be zoomed and overlaid, drawn by uPlot ----
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3], [1, 4], [12, 4], [4, 2], [10, 2, 1, 2]];
  const isFlat = (chart) => !chart.stacked && chart.xs.length > 1 && chart.series.every((s) => new Set([...s.ys, ...(s.low || []), ...(s.high || [])].filter((y) => y !== null)).size <= 1);
  const WHOLE = [...Array(9).keys()].flatMap((e) => [1, 2, 5].map((m) => m * 10 ** e)); // steps are counted
  class Plots {
    constructor(section) {
      this.section = section;
      this.curves = new Map();
      this.zoom = null;
      this.weight = Number(kept("smoothing")) || 0;
      this.log = kept("log") === "yes";
      this.marks = {};
      this.tools();
      this.cards = make("div", { class: "cards" });
      this.rest = make("div", { class: "cards" });
      this.flat = make("dl", { class: "facts" });
      this.restBox = make("details", { hidden: "" }, make("summary", {}, "All other numbers"), this.rest);
      this.flatBox = make("details", { hidden: "" }, make("summary", {}, "Numbers that never changed"), this.flat);
      this.none = make("p", { class: "note" }, "No step is finished yet; curves appear here by themselves.");
      section.append(this.bar, this.none, this.cards, this.restBox, this.flatBox);
      this.seen = new IntersectionObserver((entries) => entries.forEach((e) => { e.target.curve.visible(e.isIntersecting); }), { rootMargin: "300px" });
      this.sizes = new ResizeObserver((entries) => entries.forEach((e) => e.target.curve.fit()));
      const repaint = () => requestAnimationFrame(() => this.each((curve) => curve.plot && curve.plot.redraw(false)));
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
      choice.addEventListener("change", repaint);
    }

    tools() {
      const slider = make("input", { type: "range", min: 0, max: 0.95, step: 0.05, id: "smoothing" });
      const words = make("output", {});
      const smooth = () => {
        this.weight = Number(slider.value);
        words.textContent = this.weight ? this.weight.toFixed(2) : "off";
        slider.setAttribute("aria-valuetext", words.textContent);
        if (this.curves) this.each((curve) => curve.draw());
      };
      slider.value = this.weight;
      slider.addEventListener("input", () => { smooth(); kept("smoothing", slider.value); });
      const log = make("input", { type: "checkbox", id: "log-scale" });
      log.checked = this.log;
      log.addEventListener("change", () => { this.log = log.checked; kept("log", log.checked ? "yes" : "no"); this.each((curve) => curve.rebuild()); });
      const find = this.wanted = make("input", { type: "search", id: "find-number", placeholder: "name of a number", on: { input: () => this.find(find.value) } });
      this.all = make("button", { type: "button", hidden: "", on: { click: () => this.zoomTo(null) } }, "Show all steps");
      this.bar = make("div", { class: "tools curve-tools" },
        make("label", {}, "Find", find),
        make("label", { title: "Lines become moving averages; the numbers that are read out stay those of the step." }, "Smoothing", make("span", {}, slider, words)),
        make("label", {}, log, "Log scale"), this.all,
        make("span", { class: "note keys" }, "drag to zoom; with Tab and arrow keys: + − 0"));
      smooth();
    }

    each(action) { for (const curve of this.curves.values()) action(curve); }

    // Adds points after those that are there; `whole`: these are all, and cards that stay keep the focus. `unread` others were not sent.
    take(charts, whole, unread = 0) {
      const names = new Set(charts.map((chart) => chart.name));
      for (const [name, curve] of whole ? this.curves : []) if (!names.has(name)) { curve.remove(); this.curves.delete(name); }
      charts.forEach((chart, order) => {
        const held = this.curves.get(chart.name);
        if (!held) this.curves.set(chart.name, new Curve(this, chart, whole ? order : this.curves.size));
        else if (whole) held.replace(chart, order);
        else held.append(chart);
      });
      this.unread = unread;
      this.arrange();
      this.find(this.wanted.value);
    }

    arrange() {
      const values = [];
      let first = true, rest = 0;
      for (const curve of this.curves.values()) {
        const home = isFlat(curve.chart) && !first ? null : curve.chart.main ? this.cards : this.rest;
        first = false;
        if (home === this.rest) rest += 1;
        if (home === null) for (const s of curve.chart.series) values.push([curve.chart.series.length > 1 ? `${curve.chart.title}: ${s.label}` : curve.chart.title, number(s.ys.findLast((y) => y !== null) ?? null)]);
        curve.put(home);
      }
      this.none.hidden = this.curves.size > 0;
      rest += this.unread;
      this.restBox.hidden = !rest;
      this.restBox.querySelector("summary").textContent = `All other numbers (${rest})`;
      this.flatBox.hidden = !values.length;
      this.flatBox.querySelector("summary").textContent = `Numbers that never changed (${values.length})`;
      this.flat.replaceChildren(...values.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
    }

    find(words) {
      const wanted = words.toLowerCase().trim();
      this.each((curve) => { curve.card.hidden = !`${curve.chart.title} ${curve.chart.series.map((s) => s.label).join(" ")}`.toLowerCase().includes(wanted); });
      if (wanted) this.restBox.open = true;
    }

    zoomTo(range) {
      this.zoom = range;
      this.all.hidden = range === null;
      this.each((curve) => curve.scale());
    }

    mark(marks) {
      this.marks = marks;
      this.each((curve) => { curve.name(); curve.plot?.redraw(false); });
    }
  }

  class Curve {
    constructor(plots, chart, order) {
      this.plots = plots;
      this.chart = chart;
      this.order = order;
      this.key = make("ul", { class: "key" });
      this.place = make("div", { class: "plot live", tabindex: 0, role: "slider" });
      this.card = make("figure", { class: "card", id: `curve-${chart.name}` },
        make("figcaption", {}, make("h4", {}, chart.title), chart.about ? make("p", { class: "about" }, chart.about) : ""), this.place, this.key);
      this.place.curve = this;
      this.card.curve = this;
      this.index = this.pointed = null; // by keyboard, by anything
      plots.seen.observe(this.card);
      plots.sizes.observe(this.place);
      this.place.addEventListener("keydown", (event) => this.keydown(event));
      this.place.addEventListener("focus", () => this.point(this.index ?? this.chart.xs.length - 1));
      this.place.addEventListener("blur", () => this.point(null));
      this.name();
      this.legend();
    }

    // What the shaded steps are is said under the pointer, and to those who do not see them.
    name() {
      const marks = (this.plots.marks[this.chart.name] || []).map(([first, last, why]) => `steps ${first} to ${last}: ${why}`).join("; ");
      this.place.title = marks;
      this.place.setAttribute("aria-label", `${this.chart.title} by step${marks && `; marked, ${marks}`}`);
    }

    put(home) {
      if (this.card.parentElement === home) return;
      if (home === null) { this.card.remove(); return; }
      const after = [...home.children].find((card) => card.curve.order > this.order);
      home.insertBefore(this.card, after || null);
    }

    remove() {
      this.plots.seen.unobserve(this.card);
      this.plots.sizes.unobserve(this.place);
      this.plot?.destroy();
      this.card.remove();
    }

    replace(chart, order) {
      const lines = (of) => JSON.stringify(of.series.map((s) => [s.label, Boolean(s.low)]));
      const same = lines(chart) === lines(this.chart);
      if (order !== this.order) this.card.remove();
      Object.assign(this, { chart, order });
      if (same) this.draw();
      else this.rebuild();
      this.legend();
    }

    append(more) {
      const { chart } = this, before = chart.xs.length;
      const last = before ? chart.xs[before - 1] : -Infinity;
      const from = more.xs.findIndex((x) => x > last);
      let series = false;
      for (const s of more.series) {
        if (chart.series.some((mine) => mine.label === s.label)) continue;
        chart.series.push({ label: s.label, ys: chart.xs.map(() => null) });
        series = true;
      }
      if (from >= 0) {
        chart.xs.push(...more.xs.slice(from));
        for (const mine of chart.series) {
          const theirs = more.series.find((s) => s.label === mine.label);
          mine.ys.push(...(theirs ? theirs.ys.slice(from) : more.xs.slice(from).map(() => null)));
        }
      }
      if (series) this.rebuild();
      else if (from >= 0) this.draw();
      this.legend();
    }

    visible(now) {
      this.shown = now;
      if (now && !this.plot) this.build();
      else if (now && this.stale) this.draw();
    }

    rebuild() {
      this.plot?.destroy();
      this.plot = null;
      this.legend();
      if (this.shown) this.build();
    }

    logarithmic() { return this.plots.log && !this.chart.stacked && this.chart.series.some((s) => s.ys.some((y) => y > 0)); }

    data() {
      const { chart, plots } = this, log = this.logarithmic();
      const fit = (ys) => (log ? ys.map((y) => (y > 0 ? y : null)) : ys);
      if (chart.stacked) {
        let below = chart.xs.map(() => 0);
        return [chart.xs, ...chart.series.map((s) => (below = s.ys.map((y, i) => below[i] + (y || 0)))).reverse()];
      }
      return [chart.xs, ...chart.series.flatMap((s) => {
        if (s.low) return [fit(plots.weight ? averaged(s.high, plots.weight) : s.high), fit(plots.weight ? averaged(s.low, plots.weight) : s.low), fit(plots.weight ? averaged(s.ys, plots.weight) : s.ys)];
        return plots.weight ? [fit(s.ys), fit(averaged(s.ys, plots.weight))] : [fit(s.ys)];
      })];
    }

    build() {
      const { chart, plots } = this;
      const colour = (i) => () => css(`--c${i % 8}`);
      const faint = (i) => () => `color-mix(in srgb, ${css(`--c${i % 8}`)} 30%, transparent)`;
      const lines = [], bands = [];
      chart.series.forEach((s, i) => {
        const line = { stroke: colour(i), width: 1.7, dash: DASHES[i % 8], points: { size: 5, fill: colour(i), stroke: colour(i) }, spanGaps: Boolean(chart.sparse) };
        if (chart.stacked) lines.unshift({ stroke: () => css("--card"), width: 0.6, fill: colour(i), points: { show: false } });
        else if (s.low) {
          const at = 1 + lines.length;
          const edge = { stroke: faint(i), width: 0, points: { show: false }, spanGaps: Boolean(chart.sparse) };
          bands.push({ series: [at, at + 1], fill: () => `color-mix(in srgb, ${css(`--c${i % 8}`)} 16%, transparent)` });
          lines.push(edge, { ...edge }, line);
        } else if (plots.weight) lines.push({ ...line, stroke: faint(i), width: 1, dash: [], points: { show: false } }, line);
        else lines.push(line);
      });
      this.lines = lines.length;
      const axis = { stroke: () => css("--soft"), font: "10px system-ui, sans-serif", grid: { stroke: () => css("--rule"), width: 1 }, ticks: { show: false } };
      this.plot = new uPlot({
        width: Math.max(120, this.place.clientWidth), height: 160, bands,
        padding: [8, 8, 0, 0],
        legend: { show: false },
        scales: { x: { time: false, range: (u, low, high) => (high > low ? [low, high] : [low - 1, high + 1]) }, y: this.logarithmic() ? { distr: 3 } : { range: (u, low, high) => this.range(low, high) } },
        axes: [{ ...axis, size: 24, gap: 4, space: 60, incrs: WHOLE }, { ...axis, size: 46, gap: 4, space: 26, values: (u, ticks) => told(ticks) }],
        series: [{}, ...lines],
        cursor: { drag: { x: true, y: false, setScale: false }, sync: { key: "steps", scales: ["x", null] }, points: { size: 5 }, y: false },
        select: { show: true },
        hooks: {
          drawClear: [(u) => this.shade(u)],
          setCursor: [(u) => this.read(u.cursor.idx)],
          setSelect: [(u) => { if (u.select.width > 4) plots.zoomTo([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]); u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false); }],
        },
      }, this.data(), this.place);
      this.plot.over.addEventListener("dblclick", () => plots.zoomTo(null));
      this.scale();
      this.stale = false;
    }

    range(low, high) {
      if (low === null || high === null) return [0, 1];
      if (this.chart.stacked || (low > 0 && low <= 0.35 * high)) low = 0;
      if (low === high) return [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
      const room = (high - low) * 0.06;
      return [low === 0 ? 0 : low - room, high + room];
    }

    draw() {
      if (!this.plot || !this.shown) { this.stale = true; return; }
      const data = this.data();
      if (data.length - 1 !== this.lines) { this.rebuild(); return; }
      this.plot.setData(data, false);
      this.scale();
      this.stale = false;
    }

    scale() {
      if (!this.plot) return;
      const { xs } = this.chart;
      const [min, max] = this.plots.zoom || [xs[0] ?? 0, xs[xs.length - 1] ?? 1];
      this.plot.setScale("x", { min, max });
    }

    shade(u) {
      u.ctx.save();
      u.ctx.fillStyle = `color-mix(in srgb, ${css("--c1")} 15%, transparent)`;
      for (const [first, last] of this.plots.marks[this.chart.name] || []) {
        const [left, right] = [u.valToPos(first, "x", true), u.valToPos(last, "x", true)].map((x) => Math.max(u.bbox.left, Math.min(u.bbox.left + u.bbox.width, x)));
        u.ctx.fillRect(left, u.bbox.top, Math.max(3, right - left), u.bbox.height);
      }
      u.ctx.restore();
    }

    fit() {
      const width = this.place.clientWidth;
      if (this.plot && width && Math.abs(width - this.plot.width) > 1) this.plot.setSize({ width, height: 160 });
    }

    legend() {
      this.values = this.chart.series.map(() => make("b", {}));
      this.at = make("li", { class: "at" });
      const swatch = (i) => {
        const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
        svg.setAttribute("viewBox", "0 0 22 10");
        svg.setAttribute("aria-hidden", "true");
        const shape = document.createElementNS("http://www.w3.org/2000/svg", this.chart.stacked ? "rect" : "path");
        const looks = this.chart.stacked ? { class: `d${i % 8}`, x: 4, width: 10, height: 10, rx: 2 } : { class: `line k${i % 8}`, d: "M1 5H21" };
        for (const [name, value] of Object.entries(looks)) shape.setAttribute(name, value);
        svg.append(shape);
        return svg;
      };
      this.key.replaceChildren(...this.chart.series.map((s, i) => make("li", {}, swatch(i), s.label, " ", this.values[i])), this.at);
      this.read(this.pointed < this.chart.xs.length ? this.pointed : null);
    }

    // The numbers at a step; the last ones if none is pointed at.
    read(index) {
      const { xs, series } = this.chart;
      this.pointed = index ?? null;
      if (!xs.length) return;
      const i = index ?? xs.length - 1;
      series.forEach((s, k) => {
        const y = index === null || index === undefined ? s.ys.findLast((v) => v !== null) ?? null : s.ys[i];
        const band = index !== null && index !== undefined && s.low && s.low[i] !== null && s.low[i] !== s.high[i] ? ` (${number(s.low[i])} to ${number(s.high[i])})` : "";
        this.values[k].textContent = number(y) + band;
      });
      this.at.textContent = `step ${xs[i]}`;
      this.place.setAttribute("aria-valuemin", xs[0]);
      this.place.setAttribute("aria-valuemax", xs[xs.length - 1]);
      this.place.setAttribute("aria-valuenow", xs[i]);
      this.place.setAttribute("aria-valuetext", `step ${xs[i]}: ${series.map((s) => `${s.label} ${number(s.ys[i])}`).join(", ")}`);
    }

    point(index) {
      this.index = index;
      if (!this.plot) return;
      if (index === null) this.plot.setCursor({ left: -10, top: -10 }, true, true);
      else this.plot.setCursor({ left: this.plot.valToPos(this.chart.xs[index], "x"), top: 20 }, true, true);
    }

    keydown(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const { xs } = this.chart, last = xs.length - 1;
      const at = this.index ?? last;
      const move = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1, PageDown: -10, PageUp: 10, Home: -Infinity, End: Infinity }[event.key];
      const [low, high] = this.plots.zoom || [xs[0], xs[last]];
      if (move !== undefined) this.point(Math.min(last, Math.max(0, at + move)));
      else if (event.key === "0" || event.key === "Escape") this.plots.zoomTo(null);
      else if (event.key === "+" || event.key === "=" || event.key === "-") {
        const half = ((high - low) / 2) * (event.key === "-" ? 2 : 0.5);
        const range = [Math.max(xs[0], xs[at] - half), Math.min(xs[last], xs[at] + half)];
        this.plots.zoomTo(range[0] <= xs[0] && range[1] >= xs[last] ? null : range);
        this.point(at);
      } else return;
      event.preventDefault();
    }
  }
  const short = (value, digits) => {
    const size = Math.abs(value);
    if (value !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(digits - 3).replace(/\.?0*e\+?/, "e");
    return String(Number(value.toPrecision(digits)));
  };
  const told = (ticks) => { // with as many digits as tell them apart
    for (let digits = 4; ; digits++) {
      const words = ticks.map((tick) => (tick === null ? "" : short(tick, digits)));
      if (digits > 8 || new Set(words.filter(Boolean)).size === words.filter(Boolean).length) return words;
    }
  };

