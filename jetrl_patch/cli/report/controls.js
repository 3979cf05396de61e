// Controls: show and hide runs, the x axis, zoom and smoothing, sort tables, choose a statistic and a layer.
const charts = [...document.querySelectorAll("figure[data-chart]")].map((figure) => new Chart(figure, page.charts[figure.dataset.chart] ?? { series: [] }));
const control = (id) => document.getElementById(id);

function drawAll() {
  for (const row of document.querySelectorAll("tr[data-run]")) row.hidden = !shown[row.dataset.run];
  const bars = [...document.querySelectorAll(".bar")].filter((bar) => !bar.closest("tr").hidden);
  const most = Math.max(0, ...bars.map((bar) => Number(bar.dataset.total)));
  for (const bar of bars) bar.style.setProperty("--most", most || 1);
  control("whole").hidden = !view.zoom;
  control("smooth-value").textContent = view.smooth ? view.smooth.toFixed(2) : "off";
  for (const chart of charts) chart.draw();
}

const boxes = [...document.querySelectorAll("#runs .names input")];
for (const box of boxes) box.addEventListener("change", () => { shown[box.value] = box.checked; drawAll(); });
for (const button of document.querySelectorAll("#runs button[data-all]"))
  button.addEventListener("click", () => {
    for (const box of boxes) shown[box.value] = box.checked = Boolean(button.dataset.all);
    drawAll();
  });

// All charts show the same stretch of the x axis; null is the whole axis.
function zoomTo(stretch) {
  view.zoom = null;
  if (stretch) {
    const [low, high] = extent(page.runs.map((_, run) => run).filter((run) => shown[run] && placed(run)));
    const [from, to] = [Math.max(low, stretch[0]), Math.min(high, stretch[1])];
    if (to - from < (high - low) * 0.999 && to - from > (high - low) * 1e-4) view.zoom = [from, to];
  }
  drawAll();
}
control("whole").addEventListener("click", () => zoomTo(null));
control("by").addEventListener("change", () => { view.by = control("by").value; zoomTo(null); });
control("smooth").addEventListener("input", () => { view.smooth = Number(control("smooth").value); drawAll(); });

// The summary shows its main columns, or all.
const summary = control("summary-table"), every = control("every");
const widen = () => summary.classList.toggle("few", !every.checked);
every.addEventListener("change", widen);
every.closest("label").hidden = !summary.querySelector(".more");
widen();

// Sort rows by a column: numbers numerically, text alphabetically, missing values last in either direction.
function sort(table, column, words, down) {
  const key = (row) => {
    const raw = row.cells[column].dataset.value ?? "";
    return raw === "" || raw === "NaN" ? null : words ? raw : Number(raw);
  };
  const compare = (a, b) => (words ? a.localeCompare(b, "en", { numeric: true }) : Math.sign(a - b) || 0); // ∞ − ∞ is NaN
  const rows = [...table.tBodies[0].rows].map((row) => [key(row), row]);
  rows.sort(([a], [b]) => (a === null || b === null ? (a === null) - (b === null) : down ? compare(b, a) : compare(a, b)));
  table.tBodies[0].append(...rows.map(([, row]) => row));
}

for (const button of document.querySelectorAll("th button"))
  button.addEventListener("click", () => {
    const head = button.closest("th"), table = button.closest("table");
    const words = head.classList.contains("left");
    const down = head.hasAttribute("aria-sort") ? head.getAttribute("aria-sort") !== "descending" : !words; // numbers start with the largest
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    sort(table, head.cellIndex, words, down);
  });

// Per-layer statistics: one chart, for the selected statistic and layer.
const what = control("what"), layer = control("layer");
function choose() {
  const chart = charts.find((c) => c.figure.dataset.chart === "scales");
  const { layers, title: name, ...rest } = page.scales[what.value], together = Object.keys(layers).length === 1; // there are no per-layer values
  layer.disabled = together;
  const title = together ? name : `${name}, ${layer.selectedOptions[0].text}`;
  Object.assign(chart.spec, rest, { title, series: layers[together ? "" : layer.value] ?? page.runs.map(() => null) });
  chart.figure.querySelector("figcaption span").textContent = title;
  chart.figure.querySelector("figcaption small").textContent = rest.help;
  chart.draw();
}
if (what) {
  what.addEventListener("change", choose); layer.addEventListener("change", choose);
  choose();
}

for (const section of document.querySelectorAll("details")) section.addEventListener("toggle", drawAll);
let width = 0;
new ResizeObserver(() => { if (innerWidth !== width) { width = innerWidth; drawAll(); } }).observe(document.documentElement);
drawAll();

// While `jetrl report --watch` rewrites this file, the page reloads and keeps what was chosen, also when it is finished.
const live = control("live"), KEPT = `jetrl-report ${location.pathname}`;
let paused = false;

// Runs are kept by name and layers by text, because a newer page may have more of them.
function keep() {
  const hidden = page.runs.filter((_, run) => !shown[run]).map((run) => run.name);
  const open = [...document.querySelectorAll("details")].map((section) => section.open);
  const picked = what ? [what.value, layer.value] : null;
  const state = { hidden, open, picked, view, every: every.checked, scroll: scrollY };
  try { sessionStorage.setItem(KEPT, JSON.stringify(state)); } catch { /* no storage for files here: start anew */ }
}

function restore() {
  let state = null;
  try { state = JSON.parse(sessionStorage.getItem(KEPT)); sessionStorage.removeItem(KEPT); } catch { return; }
  if (!state) return;
  for (const box of boxes) shown[box.value] = box.checked = !state.hidden.includes(page.runs[box.value].name);
  document.querySelectorAll("details").forEach((section, i) => { section.open = Boolean(state.open[i]); });
  if ([...control("by").options].some((option) => option.value === state.view.by)) Object.assign(view, state.view);
  control("by").value = view.by; control("smooth").value = view.smooth; every.checked = state.every; widen();
  if (what && state.picked && page.scales[state.picked[0]]) { [what.value, layer.value] = state.picked; choose(); }
  drawAll();
  scrollTo(0, state.scroll);
}

const busy = () => paused || document.hidden || document.querySelector(".tip:not([hidden]), .chosen") || document.activeElement?.tagName === "SELECT";
function again() {
  if (busy()) return setTimeout(again, 1000);
  keep();
  location.reload();
}
restore();
if (live) {
  const pause = live.querySelector("button");
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.textContent = paused ? "Go on" : "Pause";
  });
  setTimeout(again, 1000 * Number(live.dataset.seconds));
}
