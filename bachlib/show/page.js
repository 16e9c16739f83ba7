"use strict";
(() => {
  const read = (id) => JSON.parse(document.getElementById(id)?.textContent ?? "null");
  const make = (tag, props = {}, ...inside) => {
    const { data, aria, style, ...rest } = props;
    const node = Object.assign(document.createElement(tag), rest);
    Object.assign(node.dataset, data ?? {});
    Object.assign(node.style, style ?? {});
    for (const [name, value] of Object.entries(aria ?? {})) node.setAttribute(`aria-${name}`, value);
    node.append(...inside); // strings become text: nothing of the data is ever markup
    return node;
  };

  // ------------------------------------------------------------------------------------------------ light and dark

  const twin = Object.fromEntries(Object.entries(read("data-dark")).map(([light, dark]) => [light.toLowerCase(), dark]));
  let dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const tint = (colour) => (dark ? twin[colour.toLowerCase()] ?? colour : colour);
  const recoloured = (part) => {
    if (Array.isArray(part)) return part.map(recoloured);
    if (part && typeof part === "object") {
      return Object.fromEntries(Object.entries(part).map(([key, value]) => [key, recoloured(value)]));
    }
    return typeof part === "string" ? tint(part) : part;
  };

  // ------------------------------------------------------------------------------------------------------- figures

  const plots = [...document.querySelectorAll(".plot")];
  const narrow = (div) => div.clientWidth < 600;
  const draw = (div) => {
    const { data, layout, frames } = recoloured(JSON.parse(div.nextElementSibling.textContent));
    div.dataset.narrow = narrow(div);
    if (narrow(div)) fitted(layout, data);
    div.style.height = `${layout.height}px`;
    const drawn = Plotly.newPlot(div, { data, layout: { ...layout, autosize: true }, frames: frames ?? [],
      config: { responsive: true, displaylogo: false, displayModeBar: narrow(div) ? false : "hover" } });
    return drawn.then(() => { div.dataset.drawn = dark ? "dark" : "light"; });
  };
  /** A text of a figure: an entity such as &lt; is one letter. */
  const cut = (text) => {
    const letters = text.match(/&#?\w+;|[^]/gu) ?? [];
    return letters.length > 20 ? `${letters.slice(0, 17).join("")}…` : text;
  };
  /** On a phone: the legend below, short labels, small type. */
  const fitted = (layout, data) => {
    const entries = data.filter((trace) => trace.name && trace.showlegend !== false).length;
    const below = entries > 1 && layout.showlegend !== false ? 21 * entries + 10 : 0;
    layout.legend = { ...layout.legend, orientation: "h", x: 0, xanchor: "left", y: 0, yref: "container", yanchor: "bottom" };
    layout.legend.font = { ...layout.legend.font, size: 11 };
    delete layout.legend.title;
    layout.font = { ...layout.font, size: 11 };
    layout.margin = { ...layout.margin, l: Math.min(layout.margin?.l ?? 50, 50), r: 10, b: (layout.margin?.b ?? 50) + below };
    layout.height += below;
    for (const key of Object.keys(layout).filter((name) => /^[xy]axis/.test(name))) {
      const { ticktext: texts, title } = layout[key];
      if (title?.text) layout[key].title = { ...title, font: { ...title.font, size: 10 } };
      if (texts && key[0] === "y") layout[key].ticktext = texts.map(cut);
      if (layout[key].tickfont) layout[key].tickfont = { ...layout[key].tickfont, size: 10 };
    }
    for (const trace of data) {
      if (trace.colorbar) trace.colorbar = { ...trace.colorbar, thickness: 10 };
      if (trace.type === "heatmap") delete trace.texttemplate; // the cells are too small for numbers
    }
  };
  const watcher = new IntersectionObserver((seen) => {
    for (const { isIntersecting, target } of seen) {
      if (!isIntersecting) continue;
      watcher.unobserve(target);
      draw(target);
    }
  }, { rootMargin: "500px" });
  plots.forEach((div) => watcher.observe(div));
  addEventListener("beforeprint", () => plots.filter((div) => !div.dataset.drawn).forEach(draw));
  let waiting;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      plots.filter((div) => div.dataset.drawn && div.dataset.narrow !== String(narrow(div))).forEach(draw);
    }, 200);
  });

  // ------------------------------------------------------------------------------------------------------ steering

  /** The K best for weights of the voices, and what is proved: `bachlib.show.steering.rerank`, line by line. */
  const rerank = (of, weights, K) => {
    const total = weights.reduce((a, b) => a + b, 0);
    const logPi = weights.map((w) => Math.log(w / total));
    const sum = (terms) => {
      const top = Math.max(...terms);
      return top === -Infinity ? top : top + Math.log(terms.reduce((a, x) => a + Math.exp(x - top), 0));
    };
    const scored = of.sigma.map((row, n) => {
      const terms = row.map((x, r) => logPi[r] + x);
      return { n, item: of.items[n], terms, score: sum(terms) };
    });
    scored.sort((a, b) => b.score - a.score || a.item - b.item);
    const best = scored.slice(0, K), room = 2 * of.margin;
    const floors = Array.isArray(of.floor[0]) ? of.floor : [of.floor]; // one for each group of the other items
    const above = (floor) => sum(floor.map((x, r) => (weights[r] > 0 && x !== null ? logPi[r] + x : -Infinity)));
    const bound = Math.max(...floors.map(above));
    const edge = scored.slice(0, K + 1);
    return {
      best: best.map((one) => ({ ...one, share: one.terms.map((x) => Math.exp(x - one.score)) })),
      enough: best[best.length - 1].score - bound > room,
      apart: edge.every((one, n) => n === 0 || edge[n - 1].score - one.score > room),
    };
  };

  const percent = (x) => `${(100 * x).toFixed(x > 0 && x < 0.0995 ? 1 : 0)}%`;
  const short = (text, longest = 48) => apart(text.length > longest ? `${text.slice(0, longest - 1)}…` : text);
  const apart = (text) => `\u2068${text}\u2069`; // in a line of several: from right to left only within itself
  const number = (x) => x.toLocaleString("en");

  /** Sliders of one model. `mark` keeps the ids of several on one page apart. */
  const steer = (root, told, mark) => {
    const { K, titles } = told;
    let user, weights, forbidden, before, open, last;
    const list = make("ol", { className: "slate" });
    const proof = make("p", { id: `proof${mark}`, className: "proof", aria: { live: "polite" } });
    const past = make("p", { className: "past" });
    const rows = make("div", { className: "heads" });
    const select = make("select", { id: `steer-user${mark}` }, ...told.users.map((u, n) => make("option", { value: n }, u.name)));
    const back = make("button", { type: "button", className: "reset" }, "back to π_u");
    root.append(
      make("div", { className: "controls" },
        make("label", { className: "who", htmlFor: select.id }, "whose slate"), select, rows, back),
      make("div", {}, proof, past, list),
    );
    const voice = (r) => user.names[r];
    const now = () => weights.map((w, r) => (forbidden[r] ? 0 : w));

    const controls = () => {
      rows.replaceChildren(...user.names.map((_, r) => {
        const kappa = user.kappa[r] === null ? "" : `κ ${user.kappa[r].toFixed(1)}`;
        const slider = make("input", { type: "range", min: 0, max: 1, step: 0.01, id: `head-${r}${mark}`, data: { head: r } });
        const forbid = make("input", { type: "checkbox", id: `forbid-${r}${mark}`, data: { forbid: r } });
        slider.value = weights[r];
        slider.addEventListener("input", () => { weights[r] = Number(slider.value); update(); });
        forbid.addEventListener("change", () => { forbidden[r] = forbid.checked; update(); });
        forbid.setAttribute("aria-label", `forbid ${voice(r)}`);
        return make("div", { className: "head" },
          make("span", { className: "chip", data: { voice: r } }),
          make("label", { htmlFor: slider.id, title: voice(r) }, voice(r)), make("small", {}, kappa),
          make("output", { htmlFor: slider.id }),
          slider, make("label", { className: "forbid", htmlFor: forbid.id }, forbid, "forbid"));
      }));
    };

    const moved = (item, place) => {
      const was = before.findIndex((one) => one.item === item);
      if (was < 0) return ["new", "new"];
      return was === place ? ["", ""] : was > place ? ["up", `↑${was - place}`] : ["down", `↓${place - was}`];
    };

    const why = (one) => {
      const pi = now(), total = pi.reduce((a, b) => a + b, 0);
      const order = one.share.map((share, r) => ({ share, r })).sort((a, b) => b.share - a.share);
      const lines = order.filter(({ share }, n) => n < 3 || share >= 0.005).map(({ share, r }) => make("tr", {},
        make("td", {}, make("span", { className: "chip", style: { background: tint(user.colours[r]) } }), voice(r)),
        make("td", {}, percent(total > 0 ? pi[r] / total : 0)), make("td", {}, user.kappa[r]?.toFixed(1) ?? "–"),
        make("td", {}, user.cosine[one.n][r]?.toFixed(2) ?? "–"), make("td", {}, percent(share))));
      const head = ["head", "π", "κ", "cosine", "share"].map((name) => make("th", {}, name));
      const near = user.near[one.n].map((item, n) => `${short(titles[item])} (${user.nearCosine[one.n][n].toFixed(2)})`);
      return make("div", { className: "why" },
        make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...lines)),
        make("p", {}, `Closest in the history, by cosine: ${near.join(" · ")}`));
    };

    const show = () => {
      const top = last.best[0].score;
      list.replaceChildren(...last.best.map((one, place) => {
        const [kind, text] = moved(one.item, place);
        const title = make("span", { className: "title", title: titles[one.item] }, titles[one.item]);
        if (user.later.includes(one.item)) title.append(make("span", { className: "liked", title: "liked later" }, "✓", make("span", {}, " liked later")));
        const length = Math.exp(one.score - top);
        const bar = make("span", { className: "bar", aria: { hidden: true } }, ...one.share.map((share, r) => make("span", {
          title: `${voice(r)} ${percent(share)}`,
          style: { width: `${100 * length * share}%`, background: tint(user.colours[r]) },
        })));
        const row = make("button", { type: "button", className: "row", aria: { expanded: open === one.item } },
          make("span", { className: "place" }, String(place + 1)), title,
          make("span", { className: `moved ${kind}` }, text), bar);
        row.addEventListener("click", () => {
          open = open === one.item ? null : one.item;
          show();
          list.children[place].querySelector("button").focus();
        });
        const line = make("li", { data: { item: one.item } }, row);
        if (open === one.item) line.append(why(one));
        return line;
      }));
    };

    const update = () => {
      const pi = now(), total = pi.reduce((a, b) => a + b, 0);
      [...rows.children].forEach((row, r) => {
        row.classList.toggle("off", forbidden[r]);
        row.querySelector(".chip").style.background = tint(user.colours[r]);
        row.querySelector("output").textContent = percent(total > 0 ? pi[r] / total : 0);
      });
      if (!(total > 0)) {
        proof.className = "proof open";
        proof.textContent = "No head has any weight: there is nothing to serve by. This is the last slate.";
        return;
      }
      last = rerank(user, pi, K);
      before ??= last.best;
      proof.className = last.enough && last.apart ? "proof proved" : "proof open";
      proof.textContent = !last.enough
        ? `best of a shortlist of ${number(user.items.length)} items; an item outside of it could belong here`
        : !last.apart ? `best of ${number(user.servable)} items, but for two scores too close to tell which comes first`
        : `proved: exactly the best ${K} of ${number(user.servable)} items`;
      show();
    };

    const begin = () => {
      user = told.users[Number(select.value)];
      [weights, forbidden, before, open] = [[...user.pi], user.pi.map(() => false), null, null];
      past.textContent = `Last liked: ${user.history.map((item) => short(titles[item], 36)).join(" · ")}`;
      controls();
      update();
    };
    select.addEventListener("change", begin);
    back.addEventListener("click", begin);
    begin();
    return () => { update(); show(); };
  };

  const steered = [...document.querySelectorAll(".steer")].map((root) => (
    steer(root, JSON.parse(root.nextElementSibling.textContent), root.id.slice("steer".length))));

  const button = document.getElementById("theme");
  const themed = () => {
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    button.textContent = dark ? "light" : "dark";
    button.setAttribute("aria-label", `show the page ${dark ? "light" : "dark"}`);
    steered.forEach((again) => again());
    plots.filter((div) => div.dataset.drawn).forEach(draw);
  };
  button.addEventListener("click", () => { dark = !dark; themed(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => { dark = event.matches; themed(); });
  themed();
})();
