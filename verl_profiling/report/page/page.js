// What every page has: a theme, and tables that are sorted by a click on a heading.
const root = document.documentElement.dataset;
root.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
document.getElementById("theme").addEventListener("click", () => { root.theme = root.theme === "dark" ? "light" : "dark"; });

// On a narrow screen, each cell shows its heading (page.css). Also called by follow.js, for new tables.
globalThis.label = (page) => {
  for (const row of page.querySelectorAll("tbody > tr")) {
    const headings = row.closest("table").tHead.rows[0].cells;
    for (const cell of row.cells) cell.dataset.h = headings[cell.cellIndex].textContent;
  }
};
label(document);

function sortBy(heading) {
  const body = heading.closest("table").tBodies[0];
  const cell = (row) => row.cells[heading.cellIndex];
  const numeric = [...body.rows].some((row) => cell(row).classList.contains("n"));
  const before = heading.getAttribute("aria-sort") ?? (numeric ? "ascending" : "descending");
  const sign = before === "ascending" ? -1 : 1;
  for (const each of heading.parentNode.children) each.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", sign < 0 ? "descending" : "ascending");
  const compare = (a, b) => (numeric ? a.dataset.v - b.dataset.v : a.textContent.localeCompare(b.textContent, undefined, { numeric: true }));
  body.append(...[...body.rows].sort((a, b) => sign * compare(cell(a), cell(b))));
}

// Delegated, as a page that follows a run gets new tables.
document.addEventListener("click", (event) => {
  const heading = event.target.closest("th");
  if (heading) sortBy(heading);
});
