"use strict";
// The pointer reads the curves out; printing opens what is folded. The page is whole without either.

const format = (value, unit) => {
  if (unit === "share") return (100 * value).toFixed(1) + " %";
  if (unit === "seconds") return value < 1 ? (1000 * value).toPrecision(3) + " ms" : value.toPrecision(3) + " s";
  if (unit === "scientific") return value === 0 ? "0" : value.toExponential(1);
  if (unit === "count" || unit === "bytes") return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
};

const nearest = (steps, step) => {
  let best = 0;
  steps.forEach((candidate, index) => {
    if (Math.abs(candidate - step) < Math.abs(steps[best] - step)) best = index;
  });
  return best;
};

const node = (name, className, text) => {
  const made = document.createElement(name);
  made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
};

const readOut = (area) => {
  const series = JSON.parse(area.dataset.series).filter((one) => one.x.length);
  if (!series.length) return;
  const every = series.flatMap((one) => one.x);
  const low = Math.min(...every), high = Math.max(...every);
  const hair = node("div", "hair"), tip = node("div", "tip");
  hair.hidden = tip.hidden = true;
  area.append(hair, tip);

  const show = (event) => {
    const box = area.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const densest = series.reduce((left, right) => (right.x.length > left.x.length ? right : left));
    const step = densest.x[nearest(densest.x, low + share * (high - low))];
    const place = high > low ? (step - low) / (high - low) : 0.5;
    tip.replaceChildren(node("b", "", "step " + step));
    for (const one of series) {
      const index = nearest(one.x, step);
      if (one.x[index] !== step) continue;
      const row = node("div", "");
      row.append(node("i", "key " + one.role), node("span", "", one.label), node("em", "", format(one.y[index], area.dataset.unit)));
      tip.append(row);
    }
    hair.hidden = tip.hidden = false;
    hair.style.left = 100 * place + "%";
    tip.style.left = place < 0.5 ? 100 * place + "%" : "auto";
    tip.style.right = place < 0.5 ? "auto" : 100 * (1 - place) + "%";
  };
  area.addEventListener("pointermove", show);
  area.addEventListener("pointerdown", show);
  area.addEventListener("pointerleave", () => { hair.hidden = tip.hidden = true; });
};

const readToken = (event) => {
  const token = event.target.closest("i[data-l]");
  if (!token) return;
  const box = token.closest(".conversation"), fixed = box.querySelector(".chosen");
  if (event.type === "click") {
    if (fixed) fixed.classList.remove("chosen");
    if (fixed !== token) token.classList.add("chosen");
  } else if (fixed) return;
  const logp = Number(token.dataset.l);
  const trained = token.classList.contains("off") ? "not trained on" : "trained on";
  box.querySelector("output").textContent =
    JSON.stringify(token.textContent) + " · logp " + token.dataset.l + " · probability " + format(Math.exp(logp), "share") +
    " · token " + token.dataset.i + " · answer " + (Number(token.dataset.t) + 1) + " · " + trained;
};

document.querySelectorAll(".conversation").forEach((box) => {
  for (const kind of ["pointerover", "click"]) box.addEventListener(kind, readToken);
});
document.querySelectorAll("[data-series]").forEach(readOut);
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => { one.open = true; }));
