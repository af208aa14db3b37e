// Sorts a table by the column whose heading is clicked; a second click reverses the order. Empty cells stay last.
const number = (text) => {
  const found = text.replace(/,/g, "").match(/^[-+]?\d*\.?\d+(e[-+]?\d+)?/i);
  return found ? Number(found[0]) * (/\d s$/.test(text) ? 1000 : 1) : NaN; // times are in s or ms
};
const compare = (a, b) => {
  if (!a || !b) return a ? -1 : b ? 1 : 0;
  const [x, y] = [number(a), number(b)];
  return isNaN(x) || isNaN(y) ? a.localeCompare(b, undefined, { numeric: true }) : x - y;
};
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    if (!heading.textContent) return;
    const button = document.createElement("button");
    button.textContent = heading.textContent;
    heading.replaceChildren(button);
    button.addEventListener("click", () => {
      const sign = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      const cell = (row) => row.cells[column].textContent;
      const order = (a, b) => (cell(a) && cell(b) ? sign : 1) * compare(cell(a), cell(b));
      body.append(...[...body.rows].sort(order));
    });
  });
}
