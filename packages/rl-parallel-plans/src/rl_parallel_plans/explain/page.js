"use strict";
(() => {
  const table = document.getElementById("parameters");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const search = document.getElementById("search");
  const whole = document.getElementById("whole");
  const shown = document.getElementById("shown");
  const text = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));

  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/);
    let count = 0;
    for (const row of rows) {
      const fits = (!whole.checked || "whole" in row.dataset) && words.every((word) => text.get(row).includes(word));
      row.hidden = !fits;
      count += fits;
    }
    shown.textContent = count === rows.length ? "" : `${count} of ${rows.length}`;
  };

  const value = (row, column) => {
    const cell = row.cells[column];
    return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent;
  };

  const sort = (header, column) => {
    const numeric = "value" in rows[0].cells[column].dataset;
    const before = header.getAttribute("aria-sort");
    const next = before === null ? (numeric ? "descending" : "ascending")
      : before === "ascending" ? "descending" : "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", next);
    const sign = next === "ascending" ? 1 : -1;
    const compare = (a, b) => {
      const [x, y] = [value(a, column), value(b, column)];
      return sign * (numeric ? x - y : x.localeCompare(y, undefined, { numeric: true }));
    };
    body.append(...[...rows].sort(compare));
  };

  [...table.tHead.rows[0].cells].forEach((header, column) => {
    const button = document.createElement("button");
    button.textContent = header.textContent;
    header.replaceChildren(button);
    button.addEventListener("click", () => sort(header, column));
  });
  search.addEventListener("input", filter);
  whole.addEventListener("change", filter);
  document.querySelector(".controls").hidden = false;
})();
