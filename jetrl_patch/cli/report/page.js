"use strict";
// The page's charts and controls. First numbers as text, the two axes, and smoothing.
const page = JSON.parse(document.getElementById("data").textContent);
const shown = page.runs.map(() => true);
const view = { by: "step", smooth: 0, zoom: null }; // what the controls choose: the x axis, the weight of the past, [from, to]

const power = (d) => `10${[...String(d)].map((c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]).join("")}`;
const plain = (value) => (typeof value === "string" ? Number(value) : value); // JSON has no NaN and no Infinity
const smallest = (values, from = Infinity) => values.reduce((a, b) => Math.min(a, b), from);
const largest = (values, from = -Infinity) => values.reduce((a, b) => Math.max(a, b), from);
const nearest = (values, wish) => values.reduce((a, b) => (Math.abs(b - wish) < Math.abs(a - wish) ? b : a), values[0]);

function digits(value, least = 0) {
  if (Math.abs(value) >= 1e6) return value.toExponential(1);
  return value.toLocaleString("en-US", { minimumFractionDigits: least, maximumFractionDigits: Math.max(least, 6) });
}

const UNITS = { share: "%", seconds: " s", db: " dB" };

// A value formatted for a tooltip.
function write(value, style) {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return style === "share" ? "0%" : "0";
  if (style === "share") return value === 1 ? "100%" : `${Number((100 * value).toPrecision(5))}%`;
  if (style === "seconds" || style === "db") return `${Number(value.toPrecision(style === "db" ? 4 : 3))}${UNITS[style]}`;
  if (style === "count" && Number.isInteger(value)) return value.toLocaleString("en-US");
  return style === "log" || Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6 ? value.toExponential(2) : digits(Number(value.toPrecision(4)));
}

// Round numbers that cover low … high in about `count` steps.
function ticks(low, high, count, whole) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  let step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let k = Math.ceil(low / step - 1e-6); k * step <= high + step * 1e-6; k++) found.push(k * step);
  return { step, found };
}

// The vertical axis: the position of a value, the tick marks, and which of the chart's limits lie outside.
function axis(chart, values, height) {
  const finite = values.filter(Number.isFinite);
  if (chart.log) return logarithmic(finite, height);
  let low = smallest(finite, chart.low ?? Infinity), high = largest(finite, chart.high ?? -Infinity);
  if (!finite.length) [low, high] = [chart.low ?? 0, chart.high ?? 1];
  const floor = low >= 0 ? 0 : -Infinity; // what is never negative gets no negative tick marks
  const ceiling = chart.style === "share" && high <= 1 ? 1 : Infinity;
  if (!(high > low)) {
    const pad = chart.style === "count" ? 1 : Math.abs(high) * 0.05 || (chart.style === "share" ? 0.1 : 1);
    high = Math.min(ceiling, high + pad);
    if (chart.low === null) low = Math.max(floor, low - pad);
  }
  const reach = 4 * (high - low), outside = [];
  for (const [value] of chart.limits) { // a limit far away would flatten the lines; then it is only mentioned
    if (chart.style === "db" || (value >= low - reach && value <= high + reach)) {
      low = Math.min(low, value); high = Math.max(high, value);
    } else outside.push({ value, above: value > high });
  }
  const pad = chart.high === null || chart.low === null ? (high - low) * 0.04 : 0;
  const bottom = chart.low === null ? Math.max(floor, low - pad) : low, top = chart.high === null ? Math.min(ceiling, high + pad) : high;
  const { step, found } = ticks(bottom, top, 5, chart.style === "count");
  const scale = chart.style === "share" ? 100 : 1;
  const decimals = Math.max(0, Math.min(8, -Math.floor(Math.log10(step * scale) + 1e-9)));
  const unit = UNITS[chart.style] ?? "";
  const tiny = step * scale < 1e-4 || high * scale >= 1e6;
  const name = (v) => (tiny && v ? Number(v * scale).toExponential(1) : (v * scale).toFixed(decimals).replace(/^-0(\.0*)?$/, "0")) + unit;
  return { at: (v) => height * (1 - (v - bottom) / (top - bottom)), marks: found.map((v) => [v, name(v)]), band: 0, room: height, outside };
}

function logarithmic(finite, height) {
  const positive = finite.filter((v) => v > 0);
  const low = positive.length ? Math.floor(Math.log10(smallest(positive))) : -6;
  const high = positive.length ? Math.max(low + 1, Math.ceil(Math.log10(largest(positive)) - 1e-9)) : 0;
  const band = finite.some((v) => v <= 0) ? 36 : 0, room = height - band;
  const every = Math.ceil((high - low) / Math.max(1, Math.floor(room / 22)));
  const marks = [];
  for (let d = low; d <= high; d += every) marks.push([10 ** d, power(d)]);
  const at = (v) => (v > 0 ? room * (1 - (Math.log10(v) - low) / (high - low)) : room + band / 2 + 4);
  return { at, marks, band, room, word: finite.some((v) => v < 0) ? "≤ 0" : "0", outside: [] };
}

// The horizontal axis: steps, sampled tokens or seconds. Tokens and seconds are sums up to a step, between known steps a line.
function across(run, step) {
  if (view.by === "step") return step;
  const [steps, sums] = page.runs[run].sums[view.by];
  if (step <= steps[0]) return step < steps[0] ? 0 : sums[0];
  const i = steps.findIndex((s) => s >= step);
  if (i < 0) return sums.at(-1);
  return sums[i - 1] + ((sums[i] - sums[i - 1]) * (step - steps[i - 1])) / (steps[i] - steps[i - 1]);
}

const placed = (run) => view.by === "step" || Boolean(page.runs[run].sums[view.by]);

// Ends of the axis: of all steps of the runs, not only of one metric, so that charts of the same runs share an axis.
function extent(runs) {
  if (view.zoom) return view.zoom;
  const ends = runs.flatMap((run) => page.runs[run].extent.map((step) => across(run, step)));
  const [low, high] = [smallest(ends), largest(ends)];
  return [low, high > low ? high : low + 1];
}

const SECONDS = [[3 * 3600, 3600, "hours"], [180, 60, "minutes"], [0, 1, "seconds"]];
function horizontal([first, last], room) {
  const many = Math.max(2, Math.min(8, room / 70));
  if (view.by === "step") return { title: "step", marks: ticks(first, last, many, true).found.map((v) => [v, v >= 10000 ? `${digits(v / 1000)}k` : v]) };
  if (view.by === "tokens") return { title: "sampled tokens", marks: ticks(first, last, many, true).found.map((v) => [v, brief(v)]) };
  const [, unit, title] = SECONDS.find(([from]) => last >= from);
  return { title: `${title} of training`, marks: ticks(first / unit, last / unit, many).found.map((v) => [v * unit, digits(Number(v.toPrecision(6)))]) };
}
const brief = (v) => (v >= 1e9 ? `${digits(v / 1e9)}G` : v >= 1e6 ? `${digits(v / 1e6)}M` : v >= 1000 ? `${digits(v / 1000)}k` : v);

// A running mean with weight `view.smooth` on the past, corrected for its start; what is no number stays as it is.
function smoothed(values) {
  let sum = 0, weight = 0;
  return values.map((value) => {
    if (!Number.isFinite(value)) return value;
    sum = view.smooth * sum + (1 - view.smooth) * value;
    weight = view.smooth * weight + 1 - view.smooth;
    return sum / weight;
  });
}

// One chart: an SVG with a line for every visible run, redrawn whenever anything changes.
const SPACE = "http://www.w3.org/2000/svg";

function element(parent, name, attributes = {}, text) {
  const made = parent.appendChild(document.createElementNS(SPACE, name));
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const color = (run) => `var(--run${page.runs[run].color})`;

class Chart {
  constructor(figure, spec) {
    this.figure = figure; this.box = figure.querySelector(".plot"); this.spec = spec; this.cursor = null;
    this.tip = figure.appendChild(Object.assign(document.createElement("div"), { className: "tip", hidden: true }));
    this.tip.setAttribute("role", "status");
    this.box.addEventListener("pointermove", (e) => this.follow(e));
    this.box.addEventListener("pointerdown", (e) => this.press(e));
    this.box.addEventListener("pointerup", (e) => this.release(e));
    this.box.addEventListener("pointerleave", () => { this.point(null); this.drag(null); });
    this.box.addEventListener("dblclick", () => zoomTo(null));
    this.box.addEventListener("keydown", (e) => this.walk(e));
    this.box.addEventListener("focusout", () => this.point(null));
    figure.querySelector("button.csv").addEventListener("click", () => this.save());
  }

  get style() { return this.spec.log ? "log" : this.spec.style; }

  lines() {
    return this.spec.series.flatMap((series, run) => {
      if (!series || !shown[run] || !placed(run)) return [];
      const raw = series[1].map(plain);
      return [{ run, steps: series[0], places: series[0].map((step) => across(run, step)), raw, values: view.smooth ? smoothed(raw) : raw }];
    });
  }

  draw() {
    const width = this.box.clientWidth, whole = this.box.clientHeight;
    if (!width) return; // inside a closed section
    const drawn = this.lines();
    this.point(null); this.box.replaceChildren();
    if (!drawn.length) {
      const why = this.spec.series.some((series, run) => series && shown[run]) ? `no visible run logs its ${view.by === "time" ? "step times" : "tokens"}` : "no visible run has this metric";
      this.box.appendChild(Object.assign(document.createElement("div"), { className: "empty", textContent: why }));
      return;
    }
    const [first, last] = extent(drawn.map((line) => line.run)), span = last - first;
    const inside = drawn.flatMap((line) => [line.values, line.raw].flatMap((all) => all.filter((_, i) => line.places[i] >= first && line.places[i] <= last)));
    const top = 14, height = whole - top - 38, y = axis(this.spec, inside, height);
    const left = 14 + 7.2 * Math.max(...y.marks.map(([, name]) => name.length), 3), right = 16, room = width - left - right;
    const x = (place) => left + (room * (place - first)) / span;
    const svg = element(this.box, "svg", { viewBox: `0 0 ${width} ${whole}`, role: "img", "aria-label": this.describe(drawn) });
    const plot = element(svg, "g", { transform: `translate(0 ${top})` });
    if (y.band) {
      element(plot, "rect", { class: "band", x: left, y: y.room + 8, width: room, height: y.band - 8 });
      element(plot, "text", { class: "band-word", x: left - 7, y: y.room + y.band / 2 + 8, "text-anchor": "end" }, y.word);
    }
    for (const [value, name] of y.marks) {
      const at = y.at(value);
      element(plot, "line", { class: "rule", x1: left, x2: left + room, y1: at, y2: at });
      element(plot, "text", { x: left - 7, y: at + 4, "text-anchor": "end" }, name);
    }
    element(plot, "line", { class: "axis", x1: left, x2: left + room, y1: height, y2: height });
    const floor = horizontal([first, last], room);
    for (const [value, name] of floor.marks) element(plot, "text", { x: x(value), y: height + 17, "text-anchor": "middle" }, name);
    element(plot, "text", { x: left + room / 2, y: height + 34, "text-anchor": "middle" }, floor.title);
    this.limits(plot, y, left, room, height);
    const hole = { x: left - 5, y: -12, width: room + 10, height: height + 16 }; // a nested SVG cuts off what a zoom leaves outside
    const ink = element(plot, "svg", { ...hole, viewBox: Object.values(hole).join(" "), class: "ink" });
    const solid = (line) => page.runs[line.run].dash === "none"; // drawn first, so that dashes show where two lines coincide
    for (const line of [...drawn].sort((a, b) => solid(b) - solid(a))) this.line(ink, line, x, y, left, left + room);
    Object.assign(this, { drawn, x, y, top, svg, plot, height, first, span, left, room });
  }

  // Thresholds: a line where the axis reaches, otherwise a word at the edge.
  limits(plot, y, left, room, height) {
    for (const [value, name] of this.spec.limits) {
      const out = y.outside.find((limit) => limit.value === value);
      const at = out ? (out.above ? 0 : height) : y.at(value);
      if (!out) element(plot, "line", { class: "limit", x1: left, x2: left + room, y1: at, y2: at });
      const text = out ? `${out.above ? "↑" : "↓"} ${name}` : name;
      element(plot, "text", { class: "limit-word", x: left + room, y: out ? (out.above ? -3 : height - 5) : at < 10 ? at + 13 : at - 5, "text-anchor": "end" }, text);
    }
  }

  line(plot, { run, places, raw, values }, x, y, from, to) {
    const stroke = color(run), near = (i) => x(places[i]) >= from - 3 && x(places[i]) <= to + 3;
    const path = (all) => {
      let d = "", pen = "M";
      all.forEach((value, i) => {
        if (!Number.isFinite(value)) { pen = "M"; return; }
        d += `${pen}${x(places[i]).toFixed(1)} ${y.at(value).toFixed(1)}${pen === "M" ? "l0 0" : ""}`; pen = "L"; // a point between two gaps is a dot
      });
      return d;
    };
    raw.forEach((value, i) => { // a gap, and a cross at the edge of the chart
      if (Number.isFinite(value) || !near(i)) return;
      const at = x(places[i]), up = value === -Infinity ? y.room : 0;
      element(plot, "path", { class: "bad", d: `M${at - 4} ${up - 4}l8 8m0 -8l-8 8`, style: `stroke:${stroke}` });
    });
    if (view.smooth) element(plot, "path", { class: "raw", d: path(raw), style: `stroke:${stroke}` });
    element(plot, "path", { class: "line", "data-run": run, d: path(values), style: `stroke:${stroke}`, "stroke-dasharray": page.runs[run].dash });
    if (places.filter((_, i) => near(i)).length <= 12)
      values.forEach((value, i) => Number.isFinite(value) && near(i) && element(plot, "circle", { cx: x(places[i]), cy: y.at(value), r: 3, style: `fill:${stroke}` }));
  }

  describe(drawn) {
    const ends = drawn.map((line) => `${page.runs[line.run].name}: ${write(line.raw[0], this.style)} to ${write(line.raw.at(-1), this.style)}`);
    return `${this.spec.title}. ${ends.slice(0, 8).join("; ")}. Arrow keys move along the steps; plus and minus zoom, 0 shows all.`;
  }

  // The place on the axis under the pointer.
  place(event) {
    const inside = event.clientX - this.box.getBoundingClientRect().left;
    return this.first + (this.span * Math.min(this.room, Math.max(0, inside - this.left))) / this.room;
  }

  follow(event) {
    if (!this.svg?.isConnected) return;
    if (this.start === undefined) return this.point(this.place(event));
    this.drag(this.place(event));
  }

  press(event) {
    if (!this.svg?.isConnected) return;
    this.point(this.place(event));
    if (event.pointerType === "mouse" && event.button === 0) this.start = this.place(event); // a finger scrolls the page
  }

  release(event) {
    const from = this.start, to = this.svg?.isConnected ? this.place(event) : from;
    this.drag(null);
    if (from !== undefined && Math.abs(to - from) * this.room > this.span * 8) zoomTo([Math.min(from, to), Math.max(from, to)]);
  }

  // Show the stretch from the start of a drag to `place`; null ends the drag.
  drag(place) {
    this.chosen?.remove(); this.chosen = undefined;
    if (place === null) { this.start = undefined; return; }
    const [a, b] = [this.x(this.start), this.x(place)];
    this.chosen = element(this.plot, "rect", { class: "chosen", x: Math.min(a, b), y: 0, width: Math.abs(b - a), height: this.height });
  }

  walk(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key], size = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
    if (event.key === "Escape") return this.point(null);
    if (event.key === "0") return zoomTo(null);
    if ((!move && !size) || !this.svg?.isConnected) return;
    event.preventDefault();
    if (size) {
      const middle = this.cursor ?? this.first + this.span / 2, half = (this.span * size) / 2;
      return zoomTo([middle - half, middle + half]);
    }
    const all = [...new Set(this.drawn.flatMap((line) => line.places))].filter((p) => p >= this.first && p <= this.first + this.span).sort((a, b) => a - b);
    const at = this.cursor === null ? (move > 0 ? -1 : all.length) : all.indexOf(nearest(all, this.cursor));
    if (all.length) this.point(all[Math.min(all.length - 1, Math.max(0, at + move))]);
  }

  // Show the values at the place nearest to `wish`; null removes the guide.
  point(wish) {
    this.guide?.remove(); this.tip.hidden = true; this.cursor = null;
    if (wish === null || !this.svg?.isConnected) return;
    this.cursor = nearest(this.drawn.flatMap((line) => line.places), wish);
    const at = this.x(this.cursor), far = (this.span * 8) / this.room;
    if (at < this.left - 1 || at > this.left + this.room + 1) { this.cursor = null; return; }
    this.guide = element(this.plot, "g");
    element(this.guide, "line", { class: "guide", x1: at, x2: at, y1: 0, y2: this.height });
    this.tip.replaceChildren(Object.assign(document.createElement("div"), { textContent: this.where() }));
    const table = this.tip.appendChild(document.createElement("table"));
    for (const { run, places, raw, values } of this.drawn) {
      const place = nearest(places, this.cursor), i = places.indexOf(place);
      if (Math.abs(place - this.cursor) > far) continue;
      const row = table.insertRow();
      row.insertCell().appendChild(swatch(run));
      row.insertCell().textContent = page.runs[run].name;
      row.insertCell().textContent = write(values[i], this.style) + (view.smooth && values[i] !== raw[i] ? ` (${write(raw[i], this.style)})` : "");
      if (Number.isFinite(values[i])) element(this.guide, "circle", { cx: this.x(place), cy: this.y.at(values[i]), r: 4, style: `fill:${color(run)}` });
    }
    this.tip.hidden = false;
    this.tip.style.left = "8px"; // so that its width follows its text, not the space left in the figure
    const width = this.tip.offsetWidth, most = this.figure.clientWidth - width - 8, here = at + this.box.offsetLeft;
    const left = here + 14 <= most ? here + 14 : here - 14 - width; // beside the guide where there is room
    this.tip.style.left = `${left >= 8 ? left : Math.max(8, most)}px`;
    this.tip.style.top = `${this.box.offsetTop + this.top}px`;
  }

  where() {
    if (view.by === "step") return `step ${this.cursor.toLocaleString("en-US")}`;
    const line = this.drawn.find(({ places }) => places.includes(this.cursor)), step = line.steps[line.places.indexOf(this.cursor)];
    const sum = view.by === "tokens" ? `${Math.round(this.cursor).toLocaleString("en-US")} tokens` : `${Math.round(this.cursor).toLocaleString("en-US")} s`;
    return `${sum}, step ${step.toLocaleString("en-US")} of ${page.runs[line.run].name}`;
  }

  // The visible runs' points as a file: one row per step, one column per run.
  save() {
    const drawn = this.lines(), steps = [...new Set(drawn.flatMap((line) => line.steps))].sort((a, b) => a - b);
    const by = view.by === "step" ? [] : drawn.map((line) => `${page.runs[line.run].name}: ${view.by === "time" ? "seconds" : "tokens"}`);
    const rows = [["step", ...by, ...drawn.map((line) => page.runs[line.run].name)]];
    for (const step of steps) {
      const at = drawn.map((line) => line.steps.indexOf(step));
      const of = (key) => drawn.map((line, k) => (at[k] < 0 ? "" : line[key][at[k]]));
      rows.push([step, ...(by.length ? of("places") : []), ...of("raw")]);
    }
    const text = rows.map((row) => row.map(field).join(",")).join("\r\n") + "\r\n";
    const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: `${this.figure.id.replace(/^chart-/, "")}.csv` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }
}

// A field of a CSV file. A spreadsheet would compute a text that starts like a formula, so that text gets an apostrophe.
function field(value) {
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function swatch(run) {
  const svg = document.createElementNS(SPACE, "svg");
  for (const [key, value] of [["class", "swatch"], ["viewBox", "0 0 34 10"], ["aria-hidden", "true"]]) svg.setAttribute(key, value);
  element(svg, "line", { x1: 2, x2: 32, y1: 5, y2: 5, "stroke-width": 3, "stroke-dasharray": page.runs[run].dash, style: `stroke:${color(run)}` });
  return svg;
}
