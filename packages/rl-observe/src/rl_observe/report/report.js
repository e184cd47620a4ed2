"use strict";
// Draws the charts with uPlot, reads tokens out, and prepares the page for print. Colors are those of report.css.

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const charts = [];

const raised = (power) => String(power).replace(/[-0-9]/g, (digit) => (digit === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]));

const format = (value, unit) => {
  if (value == null) return "–";
  const size = Math.abs(value);
  if (unit === "share") return (100 * value).toFixed(1) + " %";
  if (unit === "seconds") return size < 1 ? Number((1000 * value).toPrecision(3)) + " ms" : Number(value.toPrecision(3)) + " s";
  if (unit === "scientific") {
    const [digits, power] = value.toExponential(1).split("e");
    return value === 0 ? "0" : digits.replace(".0", "").replace("-", "−") + "·10" + raised(Number(power));
  }
  if (unit === "bytes" || (unit === "count" && size >= 10000)) {
    const power = Math.max(0, Math.min(4, Math.floor(Math.log10(size || 1) / 3)));
    return Number((value / 1000 ** power).toPrecision(3)) + [" ", " k", " M", " G", " T"][power] + (unit === "bytes" ? "B" : "");
  }
  return String(Number(value.toPrecision(4))).replace("-", "−");
};

const seriesOf = ({ label, role, x }, unit, rawValue) => {
  const [color, dashed] = role.split(" ");
  const marked = color === "held-out" || color === "greedy";
  const hidden = color === "interval" || (marked && x.length < 3); // nobody measured the way between two evaluations
  return {
    label, marked, class: color,
    stroke: () => css(color),
    width: hidden ? 0 : color === "raw" || marked ? 1.25 : 2,
    dash: dashed || color === "second" || color === "limit" ? [6, 4] : undefined,
    spanGaps: marked || color === "limit" || color === "interval",
    points: { show: marked, size: 10, width: 2, fill: () => css(color), stroke: () => css("surface") },
    value: (u, value, at, index) => format(rawValue ? rawValue(at, index) : value, unit),
  };
};

const draw = (figure) => {
  const chart = JSON.parse(figure.querySelector("script").textContent);
  const plot = figure.querySelector(".plot");
  let series = chart.series, data = uPlot.join(series.map((one) => [one.x, one.y])), rawValue;
  const values = series.flatMap((one) => one.y).filter((value) => value != null);
  const top = Math.max(...values), low = Math.min(0, ...values);
  // Shares are read against 0 and 1, unless they never come near 1.
  let limits = chart.unit === "share" ? [low, top > 0.4 ? Math.max(1, top) : Math.max(1.05 * top, 0.01)] : undefined;
  // A single line is read out in the caption; several need a legend.
  const legend = chart.wide || series.filter((one) => one.role !== "raw" && one.role !== "limit").length > 1;
  const bands = [];
  series.forEach((one, at) => {
    const next = series[at + 1];
    if (one.role === "interval" && next && next.role === "interval") bands.push({ series: [at + 2, at + 1], fill: () => css("interval") });
  });
  if (chart.kind === "stacked") {
    // The tallest pile is drawn first and the others over it.
    series = [...series].reverse();
    const raw = [data[0], ...data.slice(1).reverse()];
    rawValue = (at, index) => (index == null ? null : raw[at][index]);
    limits = (u, low, high) => [0, 1.05 * high];
    data = raw.map((column, at) => (at ? column.map((_, index) => raw.slice(at).reduce((sum, one) => sum + (one[index] || 0), 0)) : column));
  }
  const lines = series.map((one) => seriesOf(one, chart.unit, rawValue));
  if (rawValue) lines.forEach((line) => { line.fill = line.stroke; line.width = 0; });

  const axis = { stroke: () => css("ink-3"), grid: { stroke: () => css("grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const isTick = (value) => chart.kind !== "log" || Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-6;
  const ticks = (u, splits) => splits.map((value) => (isTick(value) ? value : null));
  const last = data[0].length - 1;
  // Evaluations are few: near one of them its value is read out, elsewhere none.
  const nearest = (u, at, index, reach = 0.03 * (data[0][last] - data[0][0])) => {
    const [steps, values] = [u.data[0], u.data[at]];
    if (!at || index == null || !lines[at - 1].marked) return index;
    for (let away = 0; away <= last; away += 1) {
      for (const near of [index - away, index + away]) {
        if (values[near] != null) return Math.abs(steps[near] - steps[index]) <= reach ? near : null;
      }
    }
    return null;
  };
  const tip = figure.querySelector("figcaption").appendChild(document.createElement("output"));
  tip.className = "readout";
  const readOut = (u) => {
    const index = u.cursor.idx;
    if (legend) {
      if (index == null) u.setLegend({ idxs: u.data.map((_, at) => nearest(u, at, last, Infinity)) }, false);
      return;
    }
    const at = (role) => series.findIndex((one) => one.role === role) + 1;
    const value = (role) => format(u.data[at(role)][index], chart.unit);
    tip.textContent = index == null ? "" : "step " + u.data[0][index] + ": " + (at("raw") ? value("raw") + ", mean " : "") + value("main");
  };
  const u = new uPlot({
    width: plot.clientWidth,
    height: chart.wide ? 300 : 150,
    padding: [10, 14, 0, 0],
    series: [{ label: "step" }, ...lines],
    bands,
    scales: {
      x: { time: false },
      y: { distr: chart.kind === "log" ? 3 : 1, range: limits },
    },
    axes: [
      { ...axis, size: 24, space: 50 },
      {
        ...axis, size: 48, space: 28, gap: 6, filter: ticks, grid: { ...axis.grid, filter: ticks },
        values: (u, splits) => splits.map((value) => (value == null ? "" : format(value, chart.unit).replace(".0 %", " %").replace(/^1·/, ""))),
      },
    ],
    legend: { show: legend, markers: { width: 0, fill: (u, at) => "var(--" + lines[at - 1].class + ")" } },
    cursor: { y: false, drag: { x: false, y: false }, dataIdx: (u, at, index) => nearest(u, at, index), sync: { key: chart.group, setSeries: false }, points: { size: 7 } },
    hooks: { setCursor: [readOut], ready: [readOut] },
  }, data, plot);
  charts.push(u);
  return u;
};

// A chart in a closed part of the page has no width yet: it is drawn when it gets one.
const fit = (plot, width) => {
  if (!width) return;
  if (!plot.chart) plot.chart = draw(plot.closest("figure"));
  else if (plot.chart.width !== width) plot.chart.setSize({ width, height: plot.chart.height });
};
const resized = new ResizeObserver((entries) => requestAnimationFrame(() => {
  for (const { target, contentRect } of entries) fit(target, contentRect.width);
}));
const plots = document.querySelectorAll(".plot");
plots.forEach((plot) => { fit(plot, plot.clientWidth); resized.observe(plot); });

const readToken = (event) => {
  const token = event.target.closest("i[data-l]");
  if (!token) return;
  const box = token.closest(".conversation"), out = box.querySelector("output"), fixed = box.querySelector(".chosen");
  if (event.type === "click") {
    if (fixed) fixed.classList.remove("chosen");
    if (fixed !== token) token.classList.add("chosen");
  } else if (fixed) return;
  const { l, i, t } = token.dataset;
  const trained = token.classList.contains("off") ? "not trained on" : "trained on";
  out.textContent = [
    JSON.stringify(token.textContent), "probability " + format(Math.exp(l), "share"), "logp " + l, "token " + i, "response " + (Number(t) + 1), trained,
  ].join(" · ");
};
document.querySelectorAll(".conversation").forEach((box) => {
  const out = box.querySelector("output"), facts = out.textContent;
  for (const kind of ["pointerover", "click"]) box.addEventListener(kind, readToken);
  box.addEventListener("pointerleave", () => { if (!box.querySelector(".chosen")) out.textContent = facts; });
});

const redraw = () => charts.forEach((chart) => chart.redraw(false, true));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
for (const [kind, printing] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(kind, () => {
    document.documentElement.classList.toggle("printing", printing);
    if (printing) {
      document.querySelectorAll("details").forEach((one) => { one.open = true; });
      plots.forEach((plot) => plot.chart || fit(plot, plot.clientWidth));
    }
    redraw();
  });
}
