// The page's own script. It reads what render_html wrote into #data: graphs with their steps, buffers and times.
"use strict";
(async () => {
  const packed = document.getElementById("packed");
  if (packed) {  // large pages travel compressed
    const bytes = Uint8Array.from(atob(packed.textContent), c => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    document.getElementById("body").innerHTML = await new Response(stream).text();
  }
  const holder = document.getElementById("data");
  const graphs = holder ? JSON.parse(holder.textContent) : [];
  const NS = "http://www.w3.org/2000/svg", WIDE = 200, HIGH = 40, DOWN = 84, ACROSS = 220, ACROSS_MOST = 6, MANY = 700;
  const make = (name, attributes, parent, text) => {
    const e = document.createElementNS(NS, name);
    for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
    if (text !== undefined) e.textContent = text;
    if (parent) parent.append(e);
    return e;
  };
  const html = (name, parent, text, kind) => {
    const e = document.createElement(name);
    if (text !== undefined) e.textContent = text;
    if (kind) e.className = kind;
    if (parent) parent.append(e);
    return e;
  };
  const bytes = n => {
    let unit = 0;
    while (n >= 1023.95 && unit < 4) { n /= 1024; unit++; }
    return (unit ? n.toFixed(1) : n) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][unit];
  };
  const time = us => us >= 1e6 ? (us / 1e6).toPrecision(3) + " s" : us >= 1e3 ? (us / 1e3).toPrecision(3) + " ms"
    : us.toPrecision(3) + " us";
  const sum = o => Object.values(o).reduce((a, b) => a + b, 0);
  const short = op => { const p = op.split("."); return p.length === 3 ? (p[0] === "aten" ? p[1] : p[0] + "." + p[1]) : op; };
  const cut = (text, n) => text.length > n ? text.slice(0, n - 1) + "…" : text;
  const about = s => [s.kind === "kernel" ? s.name : short(s.op), s.line,
    "reads " + bytes(sum(s.reads)) + ", writes " + bytes(sum(s.writes)), s.us ? time(s.us) + " " + s.how : ""]
    .filter(Boolean).join("\n");
  const tip = html("div", document.body, "", "tip");
  const show = (event, text) => {
    tip.textContent = text;
    tip.style.display = text ? "block" : "none";
    tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
  };

  // --- where nodes stand: by the longest way from the inputs, below the middle of what they read ---

  const placed = steps => {
    const writer = new Map(), edges = [], rows = [], readers = new Map();
    let last = 0;
    steps.forEach((s, k) => {
      const from = new Map();
      for (const [b, count] of Object.entries(s.reads))
        if (writer.has(b)) from.set(writer.get(b), (from.get(writer.get(b)) || 0) + count);
      const above = [...from.keys()].map(i => steps[i]), busy = above.filter(p => !p.free);
      s.free = !above.length;  // it stands above its first reader
      s.row = busy.length ? 1 + Math.max(...busy.map(p => p.row)) : above.length ? 1 : Math.max(0, last - 1);
      if (!s.free) last = s.row;
      s.wish = busy.length ? busy.reduce((a, p) => a + p.wish, 0) / busy.length : 0;
      for (const [i, count] of from) {
        edges.push({ from: steps[i], to: s, count });
        if (!readers.has(steps[i])) readers.set(steps[i], s);
      }
      for (const b of Object.keys(s.writes)) writer.set(b, k);
    });
    for (const s of steps) {
      if (s.free && readers.has(s)) { s.row = Math.max(0, readers.get(s).row - 1); s.wish = readers.get(s).wish; }
      (rows[s.row] ||= []).push(s);
    }
    let y = 0;
    for (const row of rows) {  // of a long row, every ACROSS_MOST nodes are a line
      if (!row) continue;
      row.sort((a, b) => a.wish - b.wish);
      for (let start = 0; start < row.length; start += ACROSS_MOST, y += start < row.length ? HIGH + 14 : DOWN) {
        const line = row.slice(start, start + ACROSS_MOST), middle = line.reduce((a, s) => a + s.wish, 0) / line.length;
        line.forEach((s, i) => { s.x = middle + (i - (line.length - 1) / 2) * ACROSS; s.y = y; });
      }
      for (const s of row) s.wish = s.x;
    }
    return edges;
  };

  const pane = (steps, parent, title, marks) => {
    const box = html("figure", parent);
    html("figcaption", box, title + ": " + steps.length + (steps.length === 1 ? " step, " : " steps, ")
      + bytes(steps.reduce((a, s) => a + sum(s.reads) + sum(s.writes), 0)));
    const svg = make("svg", { class: "flow", tabindex: 0, role: "img", "aria-label": title }, box);
    const edges = placed(steps), all = make("g", {}, svg);
    const most = Math.max(1, ...edges.map(e => e.count));
    for (const e of edges) {
      const [x, y, u, v] = [e.from.x, e.from.y + HIGH, e.to.x, e.to.y], m = (y + v) / 2;
      const wide = 1 + 4 * Math.sqrt(e.count / most);
      const rows = e.to.row - e.from.row, away = rows > 1 ? WIDE / 2 + Math.min(120, 14 * rows) : 0;  // past what is between
      const curve = away ? `${x + 1.3 * away} ${y + 20} ${u + 1.3 * away} ${v - 20}` : `${x} ${m} ${u} ${m}`;
      const path = make("path", { class: "edge", d: `M${x} ${y}C${curve} ${u} ${v}`, "stroke-width": wide }, all);
      make("title", {}, path, bytes(e.count));
      make("text", { class: "bytes", x: (x + u) / 2 + 5 + away, y: m + 4 }, all, bytes(e.count));
    }
    for (const s of steps) {
      const g = make("g", { class: "node " + s.kind, transform: `translate(${s.x - WIDE / 2} ${s.y})` }, all);
      g.style.setProperty("--h", s.hue);
      make("rect", { width: WIDE, height: HIGH, rx: 5 }, g);
      make("text", { x: 8, y: 16 }, g, cut(s.kind === "kernel" ? s.name : short(s.op), 28));
      make("text", { x: 8, y: 32, class: "small" }, g, bytes(sum(s.reads)) + " in, " + bytes(sum(s.writes)) + " out"
        + (s.us ? ", " + time(s.us) : ""));
      s.shape = g;
      g.addEventListener("pointermove", e => show(e, about(s)));
      g.addEventListener("pointerenter", () => marks(s, true));
      g.addEventListener("pointerleave", e => { show(e, ""); marks(s, false); });
      g.addEventListener("click", () => { if (s.article) { s.article.scrollIntoView({ block: "start" }); flash(s.article); } });
    }
    return view(svg, steps);
  };
  const flash = e => { e.classList.remove("flash"); void e.offsetWidth; e.classList.add("flash"); };

  // --- zoom: wheel, buttons, dragging, two fingers by the browser's own scrolling of the page left alone ---

  const view = (svg, steps) => {
    const [x0, x1] = [Math.min(...steps.map(s => s.x)) - WIDE / 2, Math.max(...steps.map(s => s.x)) + WIDE / 2];
    const high = Math.max(...steps.map(s => s.y)) + HIGH;
    let box = [0, 0, 1, 1], drag = null;
    const ratio = () => (svg.clientHeight || 420) / (svg.clientWidth || 400);
    const set = b => {
      box = b;
      svg.setAttribute("viewBox", b.join(" "));
      svg.classList.toggle("far", b[2] / (svg.clientWidth || 400) > 2.2);
    };
    const fit = () => {  // the whole picture, or as much of its beginning as can be read
      const most = (svg.clientWidth || 400) * 1.5, first = steps.filter(s => s.y < most * ratio());
      const wide = Math.min(most, Math.max(x1 - x0 + 40, Math.min((high + 40) / ratio(), most)));
      const middle = x1 - x0 + 40 <= wide ? (x0 + x1) / 2 : first.reduce((a, s) => a + s.x, 0) / first.length;
      set([middle - wide / 2, -20, wide, wide * ratio()]);
    };
    const whole = () => {
      const wide = Math.max(x1 - x0 + 40, (high + 40) / ratio());
      set([(x0 + x1 - wide) / 2, -20, wide, wide * ratio()]);
    };
    const zoom = (f, px = 0.5, py = 0.5) =>
      set([box[0] + box[2] * (1 - f) * px, box[1] + box[3] * (1 - f) * py, box[2] * f, box[3] * f]);
    svg.addEventListener("wheel", e => {
      e.preventDefault();
      const r = svg.getBoundingClientRect();
      zoom(Math.exp(e.deltaY / 500), (e.clientX - r.left) / r.width, (e.clientY - r.top) / r.height);
    }, { passive: false });
    svg.addEventListener("pointerdown", e => { drag = [e.clientX, e.clientY, box]; });
    addEventListener("pointerup", () => { drag = null; });
    svg.addEventListener("pointermove", e => {
      if (!drag) return;
      const k = drag[2][2] / svg.clientWidth;
      set([drag[2][0] - (e.clientX - drag[0]) * k, drag[2][1] - (e.clientY - drag[1]) * k, drag[2][2], drag[2][3]]);
    });
    svg.addEventListener("keydown", e => { if (e.key === "+") zoom(0.8); if (e.key === "-") zoom(1.25); });
    const at = s => { const w = (svg.clientWidth || 400) * 1.1; set([s.x - w / 2, s.y - w * ratio() / 3, w, w * ratio()]); };
    fit();
    return { svg, fit, whole, zoom, at, steps };
  };

  const picture = (place, graph, number) => {
    const hues = new Map(), parts = new Map();
    graph.kernels.forEach((k, i) => {
      hues.set(k.name, (i * 137) % 360);
      for (const node of k.nodes) { if (!parts.has(node)) parts.set(node, []); parts.get(node).push(k.name); }
    });
    for (const s of graph.steps) {
      s.hue = hues.get(s.name) ?? 0;
      s.article = document.querySelector(`[data-kernels~="${number}-${CSS.escape(s.name)}"]`);
    }
    for (const s of graph.unfused) {
      s.of = parts.get(s.name) || [s.name];
      s.hue = hues.get(s.of[0]) ?? 0;
      s.article = document.querySelector(`[data-kernels~="${number}-${CSS.escape(s.of[0])}"]`);
    }
    const marks = (s, on) => {
      const names = new Set(s.of || [s.name]);
      for (const t of [...graph.steps, ...graph.unfused])
        if (t.shape && (names.has(t.name) && t.kind !== "operation" || (t.of || []).some(n => names.has(n))))
          t.shape.classList.toggle("marked", on);
    };
    const bar = html("div", place, undefined, "bar"), panes = html("div", place, undefined, "panes");
    const search = html("input", bar);
    search.type = "search";
    search.placeholder = "search kernels, operations, lines";
    search.setAttribute("aria-label", "search the picture");
    const found = html("span", bar, "", "found");
    const views = [pane(graph.steps, panes, "after fusion", marks)];
    const button = (text, does) => html("button", bar, text).addEventListener("click", does);
    const before = () => {
      if (views.length === 1) views.push(pane(graph.unfused, panes, "before fusion", marks));
      else views.pop().svg.parentNode.remove();
      panes.classList.toggle("both", views.length > 1);
      views.forEach(v => v.fit());
    };
    button("before fusion", before);
    button("+", () => views.forEach(v => v.zoom(0.8)));
    button("−", () => views.forEach(v => v.zoom(1.25)));
    button("all", () => views.forEach(v => v.whole()));
    if (graph.unfused.length <= MANY && graph.unfused.length > graph.steps.length) before();
    search.addEventListener("input", () => {
      const word = search.value.trim().toLowerCase();
      let count = 0;
      for (const v of views) {
        const hits = v.steps.filter(s => word && [s.name, s.op, s.line].some(t => t.toLowerCase().includes(word)));
        v.steps.forEach(s => s.shape.classList.toggle("hit", hits.includes(s)));
        v.svg.classList.toggle("searched", hits.length > 0);
        if (hits.length) v.at(hits[0]); else v.fit();
        count += hits.length;
      }
      found.textContent = word ? count + " found" : "";
    });
  };

  // --- memory: what is there during each step, beside the inputs ---

  const memory = (place, graph) => {
    const inputs = sum(graph.inputs), ends = new Map(graph.results.map(b => [b, graph.steps.length])), made = new Map();
    const size = new Map(), first = new Map(), change = new Array(graph.steps.length + 1).fill(0);
    graph.steps.forEach((s, k) => {
      for (const b of [...Object.keys(s.reads), ...Object.keys(s.writes)]) ends.set(b, Math.max(ends.get(b) || 0, k));
      for (const [b, n] of Object.entries(s.writes))
        if (!(b in graph.inputs)) { made.set(b, s); if (!first.has(b)) first.set(b, k); size.set(b, n); }
    });
    for (const [b, k] of first) {
      change[k] += size.get(b);
      if (ends.get(b) < graph.steps.length) change[ends.get(b) + 1] -= size.get(b);
    }
    const totals = [];
    graph.steps.forEach((_, k) => totals.push((totals[k - 1] || 0) + change[k]));
    const most = Math.max(...totals), high = 150, wide = 640, step = wide / totals.length, peak = totals.indexOf(most);
    const holders = k => [...first].filter(([b, f]) => f <= k && ends.get(b) >= k).map(([b]) => [b, size.get(b)])
      .sort((a, b) => b[1] - a[1]);
    const named = b => { const s = made.get(b); return s ? (s.kind === "kernel" ? s.name : short(s.op)) + " → " + b : b; };
    const svg = make("svg", { class: "memory", viewBox: `0 0 ${wide} ${high + 4}`, role: "img",
      preserveAspectRatio: "none", "aria-label": "memory over time" }, place);
    const says = html("p", place, "", "legend");
    const say = k => {
      const top = holders(k), rest = top.slice(4);
      says.textContent = `${k === peak ? "peak" : "step " + (k + 1)}: ${bytes(totals[k])} beside inputs of `
        + `${bytes(inputs)}, during ${graph.steps[k].kind === "kernel" ? graph.steps[k].name : short(graph.steps[k].op)}; held: `
        + top.slice(0, 4).map(([b, n]) => `${named(b)} ${bytes(n)}`).join(", ") + (rest.length ? ` and ${rest.length} more` : "");
    };
    totals.forEach((total, k) => {
      const own = Object.keys(graph.steps[k].writes).reduce((a, b) => a + (first.get(b) === k ? size.get(b) : 0), 0);
      const [y, top] = [high * (1 - total / (most || 1)), high * own / (most || 1)];
      make("rect", { class: "old", x: k * step, width: Math.max(step - .6, .6), y: y + top, height: Math.max(0, high - y - top) }, svg);
      make("rect", { class: k === peak ? "new peak" : "new", x: k * step, width: Math.max(step - .6, .6), y, height: top }, svg);
      const hit = make("rect", { class: "hit", x: k * step, width: step, y: 0, height: high }, svg);
      hit.addEventListener("pointerenter", () => say(k));
    });
    svg.addEventListener("pointerleave", () => say(peak));
    say(peak);
  };

  // --- sources: a generated line and the lines of the user's that it comes from, by the operation that names it ---

  const NAMES = { normal: "gelu", exp2: "exp", welford: "var_mean", max: "amax", min: "amin", word: "uniform", widen: "_to_copy",
    narrow: "_to_copy", cast: "_to_copy", product: "mm" };
  const stem = line => {
    if (/\btl\.dot\(/.test(line)) return "mm";
    const m = /^\s*(?:(?:const )?\w+\*? )?([a-z]+[a-z0-9_]*?)_?\d*(?:_acc\d.*|_\d+.*)? [-+*]?= /.exec(line);
    return m ? NAMES[m[1]] || NAMES[m[1].split("_")[0]] || m[1].replace(/_16$/, "") : "";
  };
  const linked = article => {
    const pre = article.querySelector("pre.source"), rows = [...article.querySelectorAll("tr[data-op]")];
    if (!pre || pre.dataset.done) return;
    pre.dataset.done = 1;
    const text = pre.textContent.replace(/\n$/, "").split("\n");
    pre.textContent = "";
    const lines = text.map(t => {
      const name = /^\s*(#|\/\/|\*)/.test(t) ? "" : stem(t);
      const of = name ? rows.filter(r => [name, name === "mm" && "bmm", name === "mm" && "addmm"].includes(r.dataset.op)) : [];
      const e = html("span", pre, t || " ", of.length ? "line linked" : "line");
      e.addEventListener("pointerenter", () => mark([e], of, true));
      e.addEventListener("pointerleave", () => mark([e], of, false));
      e.addEventListener("click", () => { if (of.length) of[0].scrollIntoView({ block: "nearest" }); });
      return [e, of];
    });
    const mark = (spans, ofRows, on) => [...spans, ...ofRows].forEach(x => x.classList.toggle("marked", on));
    for (const r of rows) {
      const own = lines.filter(([, of]) => of.includes(r)).map(([e]) => e);
      r.classList.toggle("linked", own.length > 0);
      r.addEventListener("pointerenter", () => mark(own, [r], true));
      r.addEventListener("pointerleave", () => mark(own, [r], false));
      r.addEventListener("click", () => {
        article.querySelector("details.generated").open = true;
        if (own.length) own[0].scrollIntoView({ block: "nearest" });
      });
    }
  };

  graphs.forEach((graph, number) => {
    const place = document.querySelector(`.picture[data-graph="${number}"]`);
    if (place && graph.steps.length) picture(place, graph, number);
    const chart = document.querySelector(`.held[data-graph="${number}"]`);
    if (chart && graph.steps.length) memory(chart, graph);
  });
  for (const article of document.querySelectorAll("article"))
    article.addEventListener("pointerenter", () => linked(article), { once: true });
  for (const d of document.querySelectorAll("details.generated"))
    d.addEventListener("toggle", () => linked(d.closest("article")));
  document.documentElement.dataset.ready = 1;
})();
