  // ---- rolecall view: what all its pages share ----
  const kind = document.body.dataset.page;
  const said = document.getElementById("said");
  const say = (words) => {
    if (!words) return said.replaceChildren();
    const again = make("button", { type: "button", on: { click: () => location.reload() } }, "reload");
    return said.replaceChildren(make("p", {}, words, " ", again));
  };
  const LOST = "rolecall view does not answer any more; this page is as it was.";
  const ages = () => {
    for (const time of document.querySelectorAll("time[data-at]")) {
      const at = Number(time.dataset.at), s = Math.max(0, Date.now() / 1000 - at);
      const words = s < 10 ? "now" : s < 90 ? `${Math.round(s)} s` : s < 5400 ? `${Math.round(s / 60)} min` : s < 129600 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} d`;
      if (time.textContent !== words) time.textContent = words;
      time.dateTime = new Date(at * 1000).toISOString();
      time.title = new Date(at * 1000).toLocaleString();
    }
  };
  ages();
  setInterval(ages, 10000);
  const fetched = async (address) => {
    const answer = await fetch(address, { cache: "no-store" });
    if (answer.status === 401) throw new Error("rolecall view was started again: open the address that it printed");
    return answer;
  };
  // The page as the server shows it now: parts whose id begins with live- take its content.
  const refresh = async () => {
    const answer = await fetched(location.href);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (!answer.ok) throw new Error(fresh.querySelector("main p")?.textContent || "this page is gone");
    for (const part of document.querySelectorAll("[id^=live-]")) {
      const newer = fresh.getElementById(part.id);
      if (newer && newer.innerHTML !== part.innerHTML && !part.contains(document.activeElement)) part.innerHTML = newer.innerHTML;
    }
    ages();
    return fresh;
  };
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button.copy");
    if (!button) return;
    const text = button.parentElement.querySelector("code").textContent;
    try { await navigator.clipboard.writeText(text); button.textContent = "copied"; }
    catch { getSelection().selectAllChildren(button.parentElement.querySelector("code")); button.textContent = "press Ctrl-C"; }
    setTimeout(() => { button.textContent = "copy"; }, 2000);
  });
  const typing = (event) => event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  // Reading a stream of events, with a sentence when nobody answers.
  const listen = (address, handlers) => {
    const source = new EventSource(address);
    let lost = null;
    source.onopen = () => { clearTimeout(lost); lost = null; if (said.textContent.startsWith(LOST)) say(""); };
    source.onerror = () => {
      if (source.readyState === EventSource.CLOSED) { say(LOST); return; }
      if (lost === null) lost = setTimeout(() => say(LOST), 5000);
    };
    for (const [name, handler] of Object.entries(handlers)) source.addEventListener(name, (event) => handler(JSON.parse(event.data)));
    return source;
  };
  // A browser keeps few connections to one server, so tabs in the background give theirs back.
  const whileSeen = (begin, end) => {
    document.addEventListener("visibilitychange", () => (document.hidden ? end() : begin()));
    return document.hidden ? undefined : begin();
  };

  // ---- the table of runs ----
  const table = () => {
    const body = document.querySelector("table.runs tbody");
    const filter = document.getElementById("filter"), count = document.getElementById("count");
    const compare = document.getElementById("compare");
    const sources = new Map([...body.rows].map((row) => [row.dataset.run, row.innerHTML]));
    const hash = new URLSearchParams(location.hash.slice(1));
    let sort = hash.get("sort") || "changed", down = hash.get("order") !== "up";
    filter.value = hash.get("q") || "";
    const keep = () => {
      const held = new URLSearchParams();
      if (filter.value) held.set("q", filter.value);
      if (sort !== "changed" || !down) { held.set("sort", sort); held.set("order", down ? "down" : "up"); }
      history.replaceState(null, "", held.size ? `#${held}` : location.pathname);
    };
    const value = (row) => {
      const text = row.dataset[sort];
      if (sort === "changed" && row.dataset.state === "running") return Infinity; // they keep their places, whichever wrote last
      return ["last", "evaluated", "changed"].includes(sort) ? (text === "" ? -Infinity : Number(text)) : text.toLowerCase();
    };
    const arrange = () => {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of body.rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        shown += !row.hidden;
      }
      const focused = document.activeElement;
      const rows = [...body.rows].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1) || (a.dataset.name < b.dataset.name ? -1 : 1);
      });
      if (rows.some((row, i) => body.rows[i] !== row)) { body.append(...rows); focused.focus(); }
      count.textContent = words.length ? `${shown} of ${body.rows.length}` : "";
      for (const button of document.querySelectorAll("[data-sort]")) {
        button.closest("th").setAttribute("aria-sort", button.dataset.sort !== sort ? "none" : down ? "descending" : "ascending");
      }
      const picked = body.querySelectorAll("input:checked").length;
      compare.disabled = picked < 2;
      compare.textContent = picked < 2 ? "Choose two or more to compare" : `Compare ${picked} runs`;
    };
    filter.addEventListener("input", () => { keep(); arrange(); });
    filter.form.addEventListener("change", arrange);
    document.querySelector("table.runs thead").addEventListener("click", (event) => {
      const name = event.target.dataset.sort;
      if (!name) return;
      down = name === sort ? !down : ["last", "evaluated", "changed"].includes(name);
      sort = name;
      keep();
      arrange();
    });
    body.addEventListener("click", (event) => {
      if (!event.target.dataset.tag) return;
      filter.value = event.target.dataset.tag;
      keep();
      arrange();
    });
    document.addEventListener("keydown", (event) => {
      if (typing(event)) return;
      if (event.key === "/") { event.preventDefault(); filter.focus(); return; }
      const step = { j: 1, k: -1 }[event.key];
      if (!step) return;
      const links = [...body.rows].filter((row) => !row.hidden).map((row) => row.querySelector("a")).filter(Boolean);
      const at = links.findIndex((link) => link.closest("tr").contains(document.activeElement));
      links[Math.max(0, Math.min(links.length - 1, at < 0 ? 0 : at + step))]?.focus();
    });
    arrange();
    return (fresh) => {
      const newer = fresh.querySelector("table.runs tbody");
      if (!newer) return location.reload();
      const old = new Map([...body.rows].map((row) => [row.dataset.run, row]));
      for (const row of [...newer.rows]) {
        const id = row.dataset.run, before = old.get(id), html = row.innerHTML;
        old.delete(id);
        if (!before) body.append(document.adoptNode(row));
        else if (sources.get(id) !== html) {
          const checked = before.querySelector("input")?.checked, focused = before.contains(document.activeElement);
          before.replaceWith(document.adoptNode(row));
          if (checked && row.querySelector("input")) row.querySelector("input").checked = true;
          if (focused) row.querySelector("a")?.focus();
        }
        sources.set(id, html);
      }
      for (const row of old.values()) row.remove();
      document.querySelector("h1").textContent = fresh.querySelector("h1").textContent;
      ages();
      return arrange();
    };
  };
  if (kind === "runs") {
    const update = document.querySelector("table.runs") ? table() : () => location.reload();
    const content = document.getElementById("content"); // which knows what table it shows, so that no change falls between two streams
    const changed = async () => {
      try {
        const answer = await fetched("/");
        if (!answer.ok) return;
        const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
        content.dataset.seen = fresh.getElementById("content").dataset.seen;
        update(fresh);
      }
      catch (error) { say(error.message); }
    };
    let source = null;
    whileSeen(() => { source = listen(`/events?seen=${content.dataset.seen}`, { changed }); }, () => source?.close());
  }

  // ---- answers: n and p go on to the next and back, u up to the list ----
  if (kind === "answer" || kind === "answers") {
    document.addEventListener("keydown", (event) => {
      if (typing(event)) return;
      if (event.key === "/" && document.getElementById("text")) { event.preventDefault(); document.getElementById("text").focus(); }
      const link = { n: "next", p: "previous", u: "up" }[event.key];
      if (link) document.getElementById(link)?.click();
      const step = { j: 1, k: -1 }[event.key];
      const links = [...document.querySelectorAll("table.answers a")];
      if (step && links.length) links[Math.max(0, Math.min(links.length - 1, links.indexOf(document.activeElement) + step))].focus();
    });
  }

  for (const form of document.querySelectorAll("form.search")) { // an address says what is wanted, and no more
    form.addEventListener("submit", () => { for (const field of form.elements) field.disabled = !field.value; });
    addEventListener("pageshow", () => { for (const field of form.elements) field.disabled = false; });
  }
