"use strict";
document.querySelectorAll("table.sortable").forEach((table) => {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const value = (row, k) => { const cell = row.cells[k]; return cell.dataset.v === undefined ? null : Number(cell.dataset.v); };
  heads.forEach((head, k) => head.querySelector("button").addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...body.rows], numbers = rows.some((row) => value(row, k) !== null);
    rows.sort((a, b) => {
      const x = value(a, k), y = value(b, k);
      if (numbers && (x === null || y === null)) return (x === null) - (y === null);
      const order = numbers ? x - y : a.cells[k].textContent.localeCompare(b.cells[k].textContent);
      return down ? -order : order;
    });
    body.append(...rows);
  }));
});
