  // ---- one run ----
  const findingCards = (found, answers) => found.map((one) => {
    const where = (steps) => (steps[0] === steps[1] ? `step ${steps[0]}` : `steps ${steps[0]} to ${steps[1]}`);
    const links = one.evidence.flatMap(([step, row, token]) => [make("a", { href: `${answers}/${step}/${row}${token === null ? "" : `#token-${token}`}` }, `step ${step}, answer ${row}${token === null ? "" : `, token ${token}`}`), " "]);
    return make("div", { class: "finding" },
      make("h4", {}, one.kind, " ", make("small", {}, `${one.sure}, ${where(one.steps)}`)),
      make("p", {}, one.sentence),
      make("p", { class: "note" }, "Try first: ", make("code", {}, one.setting), `. In our run with this fault, ${one.did}.`),
      links.length ? make("p", { class: "note" }, "Seen in ", ...links) : "");
  });
  const watch = (section) => {
    const { curves, events, findings, answers } = section.dataset;
    const plots = new Plots(section);
    let state = section.dataset.state, source = null, later = null, checked = 0;
    const look = async () => {
      checked = Date.now();
      const box = document.getElementById("findings");
      try {
        const { found, marks, error } = await (await fetched(findings)).json();
        if (error) throw new Error(error);
        plots.mark(marks);
        document.querySelector("nav a[href='#doctor']").textContent = found.length ? `Doctor: ${found.length} found` : "Doctor";
        box.replaceChildren(...(found.length ? findingCards(found, answers) : [make("p", { class: "note" }, "Nothing that rolecall doctor knows of.")]));
      } catch (error) { box.replaceChildren(make("p", { class: "note" }, error.message)); }
    };
    const again = () => { // not with every point: the server makes the page anew
      if (later !== null) return;
      later = setTimeout(async () => {
        later = null;
        try { await refresh(); } catch (error) { say(error.message); }
        if (Date.now() - checked > 30000) look();
      }, 3000);
    };
    const begin = async () => {
      source?.close();
      try {
        const held = await (await fetched(curves)).json();
        if (held.error) throw new Error(held.error);
        say("");
        plots.take(held.charts, true);
        if (document.hidden) return;
        source = listen(`${events}?seen=${held.seen.join("-")}&state=${state}`, {
          points: (news) => { plots.take(news.charts || [], false); document.body.dataset.points = news.seen[1]; say(""); again(); },
          state: (now) => { state = now; again(); look(); },
          restart: () => { begin(); again(); },
          gone: ({ why }) => { source.close(); say(why); setTimeout(begin, 2000); },
        });
      } catch (error) { say(error.message); setTimeout(begin, 2000); }
    };
    whileSeen(() => { begin().then(look); }, () => source?.close());
  };
  const curvesSection = document.querySelector("[data-curves][data-events]");
  if (curvesSection) watch(curvesSection);

  // ---- several runs ----
  const overlaid = document.querySelector("[data-curves]:not([data-events])");
  if (overlaid) {
    const plots = new Plots(overlaid), seconds = Number(overlaid.dataset.again) || 0;
    const draw = async () => {
      const all = plots.restBox.open;
      try {
        const { charts, rest, error } = await (await fetched(`${overlaid.dataset.curves}${all ? "&all=1" : ""}`)).json();
        if (error) throw new Error(error);
        say("");
        plots.take(charts, true, all ? 0 : rest);
        if (seconds) await refresh();
      } catch (error) { say(error.message); }
    };
    const again = async () => { await draw(); if (seconds) setTimeout(again, seconds * 1000); };
    again();
    plots.restBox.addEventListener("toggle", () => { if (plots.restBox.open) draw(); }); // the many others are sent when they are wanted
  }
