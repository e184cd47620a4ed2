"use strict";
// The browser of recorded rollouts. Only the rows in view are in the document, so that ten thousand cost what thirty do.

(() => {
  const box = document.getElementById("browser");
  if (!box) return;
  const data = JSON.parse(document.getElementById("rollout-data").textContent);
  const decode = (text, Kind) => {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    return new Kind(bytes.buffer, 0, bytes.length / Kind.BYTES_PER_ELEMENT);
  };
  const column = Object.fromEntries(Object.entries(data.columns).map(([name, text]) => [name, decode(text, name === "truncated" ? Uint8Array : Int32Array)]));
  const kinds = { piece: Uint32Array, flags: Uint8Array, logp_old: Int16Array, logp: Int16Array, advantage: Int16Array };
  const tokens = Object.fromEntries(Object.entries(data.tokens).map(([name, text]) => [name, decode(text, kinds[name])]));
  const total = data.reward.length, ROW = 30, UNKNOWN = -32768, MOST = 4000;
  const [RESPONSE, TRAINABLE, CLIPPED] = [1, 2, 4];
  const find = (name) => box.querySelector(`[name="${name}"]`);
  const make = (kind, text, css) => {
    const made = document.createElement(kind);
    if (text != null) made.textContent = text;
    if (css) made.className = css;
    return made;
  };
  const short = (value) => (value == null ? "–" : String(Number(value.toPrecision(4))).replace("-", "−"));
  const words = (row) => data.texts[column.group[row]];

  // -- the list ------------------------------------------------------------------------------------------------------

  let shown = [], chosen = -1;
  const list = box.querySelector(".rollout-list"), inner = list.firstElementChild, count = box.querySelector(".rollout-count");
  const heading = (step) => data.steps[step];
  data.steps.forEach((name, at) => find("step").append(new Option(name, at)));

  const between = (value, low, high) => (low === "" || (value != null && value >= Number(low))) && (high === "" || (value != null && value <= Number(high)));
  const lengths = column.sampled;

  const select = () => {
    const wanted = Object.fromEntries([...box.querySelectorAll(".filters [name]")].map((one) => [one.name, one.type === "checkbox" ? one.checked : one.value]));
    const text = wanted.text.toLowerCase();
    shown = [];
    for (let row = 0; row < total; row += 1) {
      if (wanted.step !== "" && column.step[row] !== Number(wanted.step)) continue;
      if (wanted.truncated && !(column.truncated[row] & 1)) continue;
      if (!between(data.reward[row], wanted["reward-low"], wanted["reward-high"])) continue;
      if (!between(data.advantage[row], wanted["advantage-low"], wanted["advantage-high"])) continue;
      if (!between(lengths[row], wanted["length-low"], wanted["length-high"])) continue;
      if (text && !(data.responses[row].toLowerCase().includes(text) || words(row).some((one) => one.toLowerCase().includes(text)))) continue;
      shown.push(row);
    }
    const [name, way] = wanted.order.split(" ");
    const values = { reward: data.reward, advantage: data.advantage, length: lengths }[name];
    if (values) {
      const sign = way === "down" ? -1 : 1;
      shown.sort((one, two) => {
        if (values[one] == null || values[two] == null) return (values[one] == null) - (values[two] == null);
        return sign * (values[one] - values[two]) || one - two;
      });
    }
    count.textContent = `${shown.length} of ${total} rollouts`;
    inner.style.height = `${ROW * shown.length}px`;
    list.scrollTop = 0;
    paint();
  };

  const paint = () => {
    const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 5);
    const last = Math.min(shown.length, first + Math.ceil(list.clientHeight / ROW) + 10);
    const lines = [];
    for (let at = first; at < last; at += 1) {
      const row = shown[at], line = make("div", null, row === chosen ? "rollout chosen" : "rollout");
      line.style.top = `${ROW * at}px`;
      line.dataset.row = row;
      line.tabIndex = 0;
      line.setAttribute("role", "option");
      line.setAttribute("aria-selected", String(row === chosen));
      const cut = column.truncated[row] & 2 ? "failed" : column.truncated[row] & 1 ? "cut off" : "";
      for (const [value, css] of [
        [heading(column.step[row]), ""], [column.row[row], "n"], [short(data.reward[row]), "n"], [short(data.advantage[row]), "n"],
        [lengths[row], "n"], [cut, ""], [words(row)[0].replace(/\s+/g, " ").slice(-60), "t"], [data.responses[row], "t"],
      ]) line.append(make("span", value, css));
      lines.push(line);
    }
    inner.replaceChildren(...lines);
  };

  let waiting = false;
  list.addEventListener("scroll", () => {
    if (!waiting) requestAnimationFrame(() => { waiting = false; paint(); });
    waiting = true;
  });

  // -- one rollout, its group, its prompt over steps -----------------------------------------------------------------

  const detail = box.querySelector(".rollout-detail"), readout = box.querySelector(".rollout-readout");
  const at = (name, token) => (tokens[name][token] === UNKNOWN ? null : tokens[name][token] / 1000);
  const measured = (name, token) => {
    if (name === "clip") return tokens.flags[token] & CLIPPED ? 1 : 0;
    if (name === "ratio") {
      const [mine, old] = [at("logp", token), at("logp_old", token)];
      return mine == null || old == null ? null : Math.exp(mine - old);
    }
    if (name === "logp") return at("logp", token) ?? at("logp_old", token);
    return at(name, token);
  };
  // From 0 to 1, and whether it is on the other side of what is neutral.
  const shade = (name, value) => {
    if (value == null) return [0, false];
    if (name === "logp") return [Math.min(1, -value / 7), false];
    if (name === "ratio") return [Math.min(1, Math.abs(Math.log(value)) / 0.7), value < 1];
    if (name === "advantage") return [Math.min(1, Math.abs(value) / 2), value < 0];
    return [value, false];
  };
  const spans = (row) => {
    const made = make("pre", null, "rollout-tokens"), by = find("shade").value, first = column.first[row];
    if (first < 0) {
      made.append(make("span", data.responses[row], "ctx"));
      return made;
    }
    const length = column.length[row];
    for (let index = 0; index < Math.min(length, MOST); index += 1) {
      const token = first + index, flags = tokens.flags[token], text = data.pieces[tokens.piece[token]];
      if (!(flags & RESPONSE)) { made.append(make("span", text, "ctx")); continue; }
      const one = make("i", text, flags & TRAINABLE ? "tok" : "tok off"), [depth, below] = shade(by, measured(by, token));
      one.style.background = `rgb(var(--${below ? "shade-below" : "shade"}) / ${Math.round(60 * depth)}%)`;
      one.dataset.token = token;
      one.dataset.index = index;
      made.append(one);
    }
    if (length > MOST) made.append(make("span", ` … ${length - MOST} more tokens`, "gap"));
    return made;
  };
  const facts = (row) => [
    `${heading(column.step[row])}, row ${column.row[row]}`, `reward ${short(data.reward[row])}`, `advantage ${short(data.advantage[row])}`,
    `${lengths[row]} tokens sampled`, ...(column.truncated[row] & 1 ? ["cut off"] : []), ...(column.truncated[row] & 2 ? ["failed"] : []),
  ].join(" · ");
  const card = (row, content) => {
    const made = make("article", null, "rollout-card");
    made.append(make("p", facts(row), "note"), content ?? spans(row));
    return made;
  };
  const every = (test) => { const rows = []; for (let row = 0; row < total; row += 1) if (test(row)) rows.push(row); return rows; };

  // Pieces of two rollouts that are equal in order, by the longest common subsequence of what differs.
  const difference = (one, two) => {
    const [left, right] = [one, two].map((row) => {
      if (column.first[row] < 0) return data.responses[row].split(/(?<=\s)/);
      const pieces = [];
      for (let token = column.first[row]; token < column.first[row] + column.length[row]; token += 1) if (tokens.flags[token] & RESPONSE) pieces.push(data.pieces[tokens.piece[token]]);
      return pieces.slice(0, 1500);
    });
    const table = Array.from({ length: left.length + 1 }, () => new Uint16Array(right.length + 1));
    for (let i = left.length - 1; i >= 0; i -= 1) for (let j = right.length - 1; j >= 0; j -= 1) {
      table[i][j] = left[i] === right[j] ? table[i + 1][j + 1] + 1 : Math.max(table[i + 1][j], table[i][j + 1]);
    }
    const made = make("pre", null, "rollout-tokens");
    let i = 0, j = 0;
    while (i < left.length || j < right.length) {
      if (i < left.length && j < right.length && left[i] === right[j]) { made.append(make("span", left[i])); i += 1; j += 1; }
      else if (j >= right.length || (i < left.length && table[i + 1][j] >= table[i][j + 1])) { made.append(make("del", left[i])); i += 1; }
      else { made.append(make("ins", right[j])); j += 1; }
    }
    return made;
  };

  // Of each step that has the prompt, its rollout with the highest reward; each is compared with the one before.
  const overSteps = (row) => {
    const [prompt, , source] = words(row), best = new Map();
    for (const other of every((each) => (source ? words(each)[2] === source : words(each)[0] === prompt))) {
      const step = column.step[other], before = best.get(step);
      if (before == null || (data.reward[other] ?? -Infinity) > (data.reward[before] ?? -Infinity)) best.set(step, other);
    }
    const rows = [...best.keys()].sort((one, two) => one - two).map((step) => best.get(step));
    return rows.map((each, place) => card(each, place ? difference(rows[place - 1], each) : null));
  };

  const open = () => {
    if (chosen < 0) return;
    const [prompt, expected, source] = words(chosen), view = find("view").value;
    const head = make("div", null, "rollout-head");
    head.append(make("p", [source, expected && `expected ${expected}`].filter(Boolean).join(" · "), "note"), make("pre", prompt));
    const inside = make("div", null, view === "one" ? "" : "rollout-cards");
    if (view === "one") inside.append(card(chosen));
    else if (view === "group") inside.append(...every((row) => column.group[row] === column.group[chosen]).map((row) => card(row)));
    else inside.append(...overSteps(chosen));
    detail.replaceChildren(head, inside);
    readout.textContent = "Point at a token.";
  };
  const choose = (event) => {
    const line = event.target.closest(".rollout");
    if (!line || (event.type === "keydown" && event.key !== "Enter")) return;
    chosen = Number(line.dataset.row);
    paint();
    open();
  };
  list.addEventListener("click", choose);
  list.addEventListener("keydown", choose);
  detail.addEventListener("pointerover", (event) => {
    const one = event.target.closest("i[data-token]");
    if (!one) return;
    const token = Number(one.dataset.token), ratio = measured("ratio", token);
    readout.textContent = [
      `token ${one.dataset.index} ${JSON.stringify(one.textContent)}`, `logp ${short(at("logp", token))}`, `logp_old ${short(at("logp_old", token))}`,
      `ratio ${short(ratio)}`, `advantage ${short(at("advantage", token))}`, tokens.flags[token] & CLIPPED ? "clipped" : "not clipped",
      tokens.flags[token] & TRAINABLE ? "trained on" : "not trained on",
    ].join(" · ");
  });
  let typing = 0;
  box.querySelector(".filters").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(select, 60); });
  for (const name of ["shade", "view"]) find(name).addEventListener("input", open);
  select();
})();
