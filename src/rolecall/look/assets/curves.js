  // ---- curves: the chart is there already; the script reads out numbers, and draws the lines smoothed ----
  const smoothers = [];
  // A moving average that forgets by `weight` per point, corrected for its start.
  const averaged = (ys, weight) => {
    let sum = 0, count = 0;
    return ys.map((y) => {
      if (y === null) return null;
      sum = weight * sum + (1 - weight) * y;
      count = weight * count + (1 - weight);
      return sum / count;
    });
  };
  const smoother = (svg, { xs, series, box, sparse, range: [low, high] }) => {
    const span = xs[xs.length - 1] - xs[0] || 1;
    const place = (i, y) => `${(box[0] + ((xs[i] - xs[0]) / span) * box[2]).toFixed(1)} ${(box[1] + ((high - y) / (high - low || 1)) * box[3]).toFixed(1)}`;
    const lines = [...svg.querySelectorAll("path.line")].map((line) => {
      const raw = line.cloneNode();
      raw.classList.add("raw");
      return { line, raw, drawn: line.getAttribute("d") };
    });
    return (weight) => lines.forEach(({ line, raw, drawn }, k) => {
      raw.remove();
      line.setAttribute("d", drawn);
      if (!weight) return;
      line.before(raw);
      let pen = "M";
      line.setAttribute("d", averaged(series[k].ys, weight).map((y, i) => {
        const part = y === null ? "" : pen + place(i, y);
        pen = y !== null ? "L" : sparse ? pen : "M";
        return part;
      }).join(""));
    });
  };
  const curve = (plot, chart) => {
    const { xs, series, box } = chart;
    if (!xs.length) return;
    const cross = plot.querySelector(".cross");
    const values = [...plot.parentElement.querySelectorAll(".key b")];
    const at = plot.parentElement.querySelector(".at");
    const svg = plot.querySelector("svg");
    const span = xs[xs.length - 1] - xs[0] || 1;
    const last = xs.length - 1;
    let index = last;
    const show = (i, active) => {
      index = i;
      const x = box[0] + ((xs[i] - xs[0]) / span) * box[2];
      cross.setAttribute("x1", x);
      cross.setAttribute("x2", x);
      plot.classList.toggle("at", active);
      series.forEach((s, k) => (values[k].textContent = number(s.ys[i])));
      at.textContent = `step ${xs[i]}`;
      plot.setAttribute("aria-valuenow", xs[i]);
      plot.setAttribute("aria-valuetext", `step ${xs[i]}: ${series.map((s) => `${s.label} ${number(s.ys[i])}`).join(", ")}`);
    };
    const under = (event) => {
      const frame = svg.getBoundingClientRect();
      const x = ((event.clientX - frame.left) / frame.width) * box[4];
      const wanted = xs[0] + ((x - box[0]) / box[2]) * span;
      let best = 0;
      xs.forEach((value, i) => { if (Math.abs(value - wanted) < Math.abs(xs[best] - wanted)) best = i; });
      show(best, true);
    };
    plot.addEventListener("pointermove", under);
    plot.addEventListener("pointerdown", under);
    plot.addEventListener("pointerleave", () => show(last, document.activeElement === plot));
    plot.addEventListener("focus", () => show(index, true));
    plot.addEventListener("blur", () => show(last, false));
    plot.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1, PageDown: -10, PageUp: 10, Home: -Infinity, End: Infinity }[event.key];
      if (move === undefined) return;
      event.preventDefault();
      show(Math.min(last, Math.max(0, index + move)), true);
    });
    show(last, false);
    if (chart.range) smoothers.push(smoother(svg, chart));
  };

  for (const block of document.querySelectorAll("script[data-kind=curves], script[id^=curves]")) {
    for (const [id, chart] of Object.entries(JSON.parse(block.textContent))) curve(document.getElementById(id), chart);
  }

  // ---- tools of the page: theme and smoothing, remembered where the browser keeps anything for files ----
  const kept = (name, value) => {
    try {
      if (value === undefined) return localStorage.getItem(`rolecall-${name}`);
      localStorage.setItem(`rolecall-${name}`, value);
    } catch { /* storage is switched off: nothing is remembered */ }
    return null;
  };
  const dark = [...document.styleSheets[0].cssRules].find((rule) => rule.media && rule.media.mediaText.includes("dark"));
  const system = dark.media.mediaText;
  const themes = { system: ["System", system], light: ["Light", "not all"], dark: ["Dark", "all"] };
  const wear = (theme) => {
    dark.media.mediaText = themes[theme][1];
    document.documentElement.style.colorScheme = theme === "system" ? "" : theme;
  };
  const choice = make("select", { on: { change: () => { wear(choice.value); kept("theme", choice.value); } } });
  for (const [value, [label]] of Object.entries(themes)) choice.append(make("option", { value }, label));
  choice.value = themes[kept("theme")] ? kept("theme") : "system";
  wear(choice.value);
  const tools = make("div", { class: "tools" }, make("label", {}, "Theme", choice));
  if (smoothers.length) {
    const slider = make("input", { type: "range", min: 0, max: 0.95, step: 0.05 });
    const said = make("output", {});
    const smooth = () => {
      const weight = Number(slider.value);
      for (const draw of smoothers) draw(weight);
      said.textContent = weight ? weight.toFixed(2) : "off";
      slider.setAttribute("aria-valuetext", said.textContent);
    };
    slider.addEventListener("input", () => { smooth(); kept("smoothing", slider.value); });
    slider.value = Number(kept("smoothing")) || 0;
    tools.append(make("label", { title: "Lines become moving averages; the numbers that are read out stay those of the step." }, "Smoothing", make("span", {}, slider, said)));
    smooth();
  }
  document.querySelector("header.top").append(tools);
