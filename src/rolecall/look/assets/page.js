  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === null || value === undefined) continue;
      if (name === "on") for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
      else element.setAttribute(name, value);
    }
    element.append(...children); // strings become text nodes, never markup
    return element;
  };
  const dataOf = (id) => JSON.parse(document.getElementById(id).textContent);
  const number = (value) => {
    if (value === null || value === undefined) return "–";
    if (typeof value === "string") return value; // nan, inf
    const size = Math.abs(value);
    if (value === 0) return "0";
    if (size >= 1e6 || size < 1e-6) return value.toExponential(3);
    return String(Number(value.toPrecision(size >= 1000 ? 6 : 4)));
  };
  const signed = (value) => (typeof value === "number" && value > 0 ? "+" : "") + number(value);

  // ---- the token view ----
  class View {
    constructor(root) {
      this.root = root;
      this.name = root.dataset.name;
      this.data = dataOf(root.dataset.view);
      this.quantities = new Map(this.data.quantities.map((q) => [q.key, q]));
      this.key = this.quantities.has("verdict") ? "verdict" : "role";
      this.strips = [];
      this.base = root.dataset.base; // where each sample has a page of its own
      this.build();
      this.choose(0);
      const token = /^#token-([0-9]+)$/.exec(location.hash);
      if (this.base && token) this.show(Number(token[1]));
    }

    show(position) { // bring a position of the sample above into view
      const [strip] = this.strips, { positions } = this.sample;
      const i = positions ? positions.indexOf(position) : position;
      if (strip.tokens[i]) { strip.tokens[i].focus(); strip.tokens[i].scrollIntoView({ block: "center" }); }
    }

    go(sample) {
      if (this.base) location.assign(`${this.base}/${sample.place}${location.search}`);
      else this.open(sample);
    }

    build() {
      const pick = (label, entries, handler) => {
        const select = make("select", { on: { change: () => handler(select.value) } });
        for (const [value, words] of entries) select.append(make("option", { value }, words));
        return [make("label", {}, label, select), select];
      };
      const sets = this.data.sets.map((set, i) => [i, set.label]);
      const [setLabel, setSelect] = pick("From", sets, (value) => this.choose(Number(value)));
      this.setSelect = setSelect;
      setLabel.hidden = sets.length < 2;
      const colours = this.data.quantities.map((q) => [q.key, q.label]);
      const [colourLabel, colourSelect] = pick("Colour by", colours, (value) => this.colour(value));
      this.colourSelect = colourSelect;
      colourSelect.value = this.key;
      const [passLabel, passSelect] = pick("Optimiser step", [], (value) => this.pass(Number(value)));
      [this.passLabel, this.passSelect] = [passLabel, passSelect];
      this.picks = make("div", { class: "picks", role: "group", "aria-label": "Which one to show" });
      this.legend = make("ul", { class: "legend", "aria-label": "Legend" });
      this.about = make("p", { class: "note" });
      this.main = make("div", {});
      this.told = make("aside", { class: "told", tabindex: 0, "aria-label": `Details of a ${this.data.unit}` });
      this.side = make("div", { class: "side" });
      this.sideTitle = make("h3", {});
      this.root.replaceChildren(
        this.picks,
        make("div", { class: "bar" }, setLabel, colourLabel, passLabel, make("div", { class: "meaning" }, this.about, this.legend)),
        make("div", { class: "panes" }, make("div", {}, this.main, this.sideTitle, this.side), this.told),
      );
    }

    choose(index) {
      this.set = this.data.sets[index];
      for (const note of this.root.parentElement.querySelectorAll(".set-note")) note.hidden = Number(note.dataset.set) !== index;
      const shown = this.set.samples.filter((s) => s.labels.length);
      this.picks.replaceChildren(...shown.map((sample) => {
        const small = make("small", {}, sample.title);
        return make("button", { type: "button", on: { click: () => this.open(sample) } }, sample.labels.join(", "), small);
      }));
      this.shown = shown;
      this.open(shown[0] || this.set.samples[0]);
    }

    open(sample) {
      this.sample = sample;
      [...this.picks.children].forEach((button, i) => button.setAttribute("aria-pressed", this.shown[i] === sample));
      this.passSelect.replaceChildren(...sample.passes.map((p, i) => make("option", { value: i }, p.label)));
      this.passLabel.hidden = sample.passes.length < 2;
      this.index = sample.passes.length - 1;
      this.passSelect.value = this.index;
      this.draw();
    }

    draw() {
      this.strips = [];
      const facts = this.sample.facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
      const strip = this.strip(this.sample, 0, Infinity, `${this.data.unit}s of ${this.sample.title}`);
      this.main.replaceChildren(strip, make("dl", { class: "facts" }, ...facts));
      const beside = this.sample.group ? this.set.samples.filter((s) => s.group === this.sample.group) : [];
      beside.sort((a, b) => a.place - b.place);
      this.sideTitle.textContent = beside.length > 1 ? `Side by side: ${this.sample.group}` : "";
      this.side.replaceChildren(...(beside.length > 1 ? beside.map((s) => this.card(s)) : []));
      this.colour(this.key);
      this.tell(null, null);
    }

    card(sample) {
      const first = Math.max(0, sample.roles.findIndex((role) => role !== 1));
      const open = make("button", { type: "button", on: { click: () => this.go(sample) } }, "open");
      const chosen = sample === this.sample;
      const short = sample.facts.slice(0, 2).map(([name, value]) => `${name} ${value}`).join(" · ");
      return make("div", { class: chosen ? "answer chosen" : "answer" },
        make("h4", {}, sample.short, chosen ? make("span", { class: "note" }, "shown above") : open),
        make("p", { class: "note" }, short),
        this.strip(sample, first, first + 400, `${this.data.unit}s of ${sample.title}, answer only`));
    }

    // One list of boxes; arrow keys move inside it, so that it is a single stop for Tab.
    strip(sample, from, to, label) {
      const box = make("div", { class: "strip", role: "listbox", "aria-label": label, "aria-orientation": "horizontal" });
      const strip = { sample, box, tokens: [], from };
      const end = Math.min(to, sample.texts.length);
      const place = (i) => (sample.positions ? sample.positions[i] : i);
      let segment = null, spanAt = -1;
      for (let i = from; i < end; i++) {
        const position = place(i);
        if (sample.positions && i > from && position !== place(i - 1) + 1) {
          box.append(make("span", { class: "gap", role: "presentation" }, `… ${position - place(i - 1) - 1} ${this.data.unit}s left out here; the record holds them …`));
          segment = null;
        }
        let at = spanAt < 0 ? 0 : spanAt;
        while (at < sample.spans.length - 1 && sample.spans[at][1] <= position) at++;
        if (segment === null || at !== spanAt) {
          spanAt = at;
          const who = sample.spans.length ? sample.spans[at][2] : "";
          const mine = sample.roles[i] === 2 || sample.roles[i] === 3;
          segment = make("div", { class: mine ? "seg mine" : "seg", role: "group", "aria-label": who },
            make("span", { class: "who", "aria-hidden": "true" }, who));
          box.append(segment);
        }
        const token = document.createElement("span");
        token.setAttribute("role", "option");
        token.tabIndex = -1;
        token.textContent = sample.texts[i];
        segment.append(token);
        if (sample.texts[i].includes("↵")) segment.append(document.createElement("br"));
        strip.tokens.push(token);
      }
      if (strip.tokens.length) strip.tokens[0].tabIndex = 0;
      if (end < sample.texts.length) {
        const more = make("button", { type: "button", class: "more", on: { click: () => {
          const whole = this.strip(sample, from, Infinity, label);
          box.replaceWith(whole);
          more.remove();
          this.strips = this.strips.filter((s) => s !== strip);
          this.paint(this.strips[this.strips.length - 1]);
        } } }, `show the other ${sample.texts.length - end}`);
        queueMicrotask(() => box.after(more));
      }
      const found = (event) => strip.tokens.indexOf(event.target.closest(".tok"));
      box.addEventListener("pointerover", (event) => { const i = found(event); if (i >= 0) this.tell(strip, i); });
      box.addEventListener("pointerleave", () => this.tell(...(this.held || [null, null])));
      box.addEventListener("click", (event) => { const i = found(event); if (i >= 0) strip.tokens[i].focus(); });
      box.addEventListener("focusin", (event) => { const i = found(event); if (i >= 0) this.focus(strip, i); });
      box.addEventListener("keydown", (event) => this.move(strip, event));
      this.strips.push(strip);
      return box;
    }

    focus(strip, i) {
      for (const token of strip.box.querySelectorAll('[aria-selected="true"]')) token.setAttribute("aria-selected", "false");
      for (const token of strip.tokens) if (token.tabIndex === 0) token.tabIndex = -1;
      strip.tokens[i].tabIndex = 0;
      strip.tokens[i].setAttribute("aria-selected", "true");
      strip.tokens[i].setAttribute("aria-describedby", `${this.name}-why`);
      this.held = [strip, i];
      this.tell(strip, i);
      if (this.base && strip === this.strips[0]) history.replaceState(null, "", `#token-${this.sample.positions ? this.sample.positions[i] : i}`);
    }

    move(strip, event) {
      const i = strip.tokens.indexOf(event.target);
      if (i < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
      const last = strip.tokens.length - 1;
      let next;
      if (event.key === "ArrowRight") next = i + 1;
      else if (event.key === "ArrowLeft") next = i - 1;
      else if (event.key === "Home") next = 0;
      else if (event.key === "End") next = last;
      else if (event.key === "ArrowDown" || event.key === "ArrowUp") next = this.line(strip, i, event.key === "ArrowDown" ? 1 : -1);
      else return;
      event.preventDefault();
      strip.tokens[Math.max(0, Math.min(last, next))].focus();
    }

    line(strip, i, step) { // the box above or below
      const here = strip.tokens[i].getBoundingClientRect();
      let best = i, distance = Infinity, row = null;
      for (let k = i + step; k >= 0 && k < strip.tokens.length; k += step) {
        const there = strip.tokens[k].getBoundingClientRect();
        if ((there.top - here.top) * step < here.height / 2) continue;
        if (row !== null && Math.abs(there.top - row) > here.height / 2) break;
        row = there.top;
        if (Math.abs(there.left - here.left) < distance) [best, distance] = [k, Math.abs(there.left - here.left)];
      }
      return best;
    }

    pass(index) {
      this.index = index;
      this.colour(this.key);
      this.tell(...(this.held || [null, null]));
    }

    passOf(sample) { return sample.passes.length ? sample.passes[Math.min(this.index, sample.passes.length - 1)] : null; }
    verdict(sample, i) {
      const pass = this.passOf(sample);
      const held = pass && pass.verdicts ? pass.verdicts : sample.verdicts;
      return held ? held[i] : null;
    }
    value(sample, key, i) {
      const pass = this.passOf(sample);
      if (pass && key in pass.numbers) return pass.numbers[key][i];
      return key in sample.numbers ? sample.numbers[key][i] : null;
    }

    look(quantity, sample, i) { // the class that colours a box
      if (quantity.key === "verdict") return `v${this.verdict(sample, i)}`;
      if (quantity.key === "role") return `r${sample.roles[i]}`;
      const value = this.value(sample, quantity.key, i);
      if (value === null || value === undefined) return "x";
      return this.shade(quantity, value);
    }
    shade(quantity, value) {
      if (typeof value === "string") return "v12";
      const away = quantity.scale === "ratio" ? value - 1 : value;
      const strength = Math.min(5, Math.ceil(Math.sqrt(Math.abs(away) / (quantity.limit || 1)) * 5));
      if (strength === 0) return "";
      if (quantity.scale === "low") return `s${strength}`;
      return (away > 0 ? "a" : "b") + strength;
    }

    colour(key) {
      this.key = key;
      this.colourSelect.value = key;
      for (const strip of this.strips) this.paint(strip);
      this.explain();
    }

    paint(strip) {
      const { sample } = strip, quantity = this.quantities.get(this.key);
      const category = quantity.scale === "category";
      strip.tokens.forEach((token, k) => {
        const i = strip.from + k;
        const verdict = this.verdict(sample, i);
        const trained = verdict === 1;
        token.className = `tok ${this.look(quantity, sample, i)}${trained ? " t" : ""}`;
        const reason = verdict === null ? this.data.roles[sample.roles[i]].name : this.data.verdicts[verdict].name;
        const value = category ? "" : `, ${quantity.label} ${number(this.value(sample, this.key, i))}`;
        token.setAttribute("aria-label", `${sample.texts[i] || "empty"}, ${reason}${value}`);
      });
    }

    explain() {
      const quantity = this.quantities.get(this.key);
      this.about.textContent = `Colour: ${quantity.label}, ${quantity.about}.`;
      const swatch = (kind) => make("span", { class: `tok ${kind}`, "aria-hidden": "true" }, " ");
      const items = [];
      if (quantity.scale === "category") {
        const counts = new Map(), names = quantity.key === "verdict" ? this.data.verdicts : this.data.roles;
        this.sample.roles.forEach((role, i) => {
          const code = quantity.key === "verdict" ? this.verdict(this.sample, i) : role;
          if (code !== null) counts.set(code, (counts.get(code) || 0) + 1);
        });
        const letter = quantity.key === "verdict" ? "v" : "r";
        for (const [code, count] of [...counts].sort((a, b) => a[0] - b[0])) {
          const mark = letter === "v" && code === 1 ? " t" : "";
          items.push(make("li", {}, swatch(letter + code + mark), `${names[code].name} (${count})`));
        }
      } else {
        const centre = quantity.scale === "ratio" ? 1 : 0, limit = quantity.limit;
        const steps = quantity.scale === "low" ? [5, 4, 3, 2, 1, 0] : [-5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5];
        const kinds = steps.map((s) => (quantity.scale === "low" ? (s ? `s${s}` : "") : s === 0 ? "" : (s > 0 ? "a" : "b") + Math.abs(s)));
        const ramp = make("span", { class: "ramp", "aria-hidden": "true" }, ...kinds.map((kind) => make("i", { class: kind })));
        const left = quantity.scale === "low" ? -limit : centre - limit;
        items.push(make("li", {}, `${number(left)} or less`, ramp, quantity.scale === "low" ? "0" : `${number(centre + limit)} or more`));
        items.push(make("li", {}, swatch("x"), "no number here"));
      }
      items.push(make("li", {}, make("span", { class: "tok t", "aria-hidden": "true" }, " "), "solid line: trains"));
      this.legend.replaceChildren(...items);
    }

    tell(strip, k) {
      if (strip === null) {
        this.held = null;
        this.told.replaceChildren(make("p", { class: "hint" }, `Point at a ${this.data.unit}, or press Tab and the arrow keys, to see its numbers and why it does or does not train.`));
        return;
      }
      const { sample } = strip, i = strip.from + k;
      const position = sample.positions ? sample.positions[i] : i;
      const verdict = this.verdict(sample, i), role = this.data.roles[sample.roles[i]];
      const span = sample.spans.find(([start, end]) => start <= position && position < end);
      const facts = [];
      const fact = (name, value, about) => facts.push(make("div", {}, make("dt", { title: about }, name), make("dd", {}, value)));
      fact("index", `${position} of ${sample.length}`, "counted from 0");
      fact("id", String(sample.ids[i]));
      fact("role", role.name, role.sentence);
      if (span) fact("part", span[2]);
      if (this.passOf(sample)) fact("optimiser step", this.passOf(sample).label);
      for (const quantity of this.data.quantities) {
        if (quantity.scale === "category") continue;
        const value = this.value(sample, quantity.key, i);
        if (value !== null && value !== undefined) fact(quantity.label, quantity.scale === "signed" ? signed(value) : number(value), quantity.about);
      }
      const extra = [];
      if (sample.parts && sample.parts[i]) extra.push(make("p", { class: "note" }, sample.parts[i]));
      const clipped = this.clipped(sample, i);
      if (clipped) extra.push(make("p", { class: "note" }, clipped));
      const sentence = verdict === null ? `${role.sentence} No verdict was recorded.` : this.data.verdicts[verdict].sentence;
      const head = sentence.indexOf(":") + 1; // the verdict's name
      this.told.replaceChildren(
        make("span", { class: "token" }, sample.texts[i] || "∅"),
        make("p", { class: "why", id: `${this.name}-why` }, make("strong", {}, sentence.slice(0, head)), sentence.slice(head)),
        ...extra,
        make("dl", { class: "facts" }, ...facts));
    }

    clipped(sample, i) {
      const bounds = this.set.clip, ratio = this.value(sample, "ratio", i), advantage = this.value(sample, "advantage", i);
      if (!bounds || this.verdict(sample, i) !== 1 || typeof ratio !== "number" || typeof advantage !== "number") return "";
      if (!((ratio < bounds[0] && advantage < 0) || (ratio > bounds[1] && advantage > 0))) return "";
      return `Clipped: the ratio has left ${number(bounds[0])} to ${number(bounds[1])} on the side its advantage pushes to, so the clipped policy term gives no gradient here.`;
    }
  }

  for (const root of document.querySelectorAll("[data-view]")) new View(root);
