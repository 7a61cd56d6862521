"use strict";
const root = document.documentElement;

function setTheme(theme) {
  root.dataset.theme = theme;
  try { localStorage.setItem("verl-profiling-theme", theme); } catch { /* a file:// page may not store */ }
}

function initialTheme() {
  try {
    const stored = localStorage.getItem("verl-profiling-theme");
    if (stored) return stored;
  } catch { /* as above */ }
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

function switchTheme() {
  setTheme(root.dataset.theme === "dark" ? "light" : "dark");
}

function sortBy(heading) {
  const table = heading.closest("table");
  const column = [...heading.parentNode.children].indexOf(heading);
  const body = table.tBodies[0];
  const numeric = body.rows[0].cells[column].classList.contains("n");
  const first = numeric ? "descending" : "ascending";
  const other = numeric ? "ascending" : "descending";
  const order = heading.getAttribute("aria-sort") === first ? other : first;
  for (const each of heading.parentNode.children) each.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", order);
  const sign = order === "ascending" ? 1 : -1;
  const value = (row) => (numeric ? Number(row.cells[column].dataset.v) : row.cells[column].textContent);
  const compare = (a, b) => (numeric ? value(a) - value(b) : value(a).localeCompare(value(b), undefined, { numeric: true }));
  body.append(...[...body.rows].sort((a, b) => sign * compare(a, b)));
}

setTheme(initialTheme());
document.getElementById("theme").addEventListener("click", switchTheme);
document.addEventListener("keydown", (event) => {
  if (event.key === "t" && !event.ctrlKey && !event.metaKey && !event.altKey) switchTheme();
});
for (const heading of document.querySelectorAll("th")) {
  heading.querySelector("button").addEventListener("click", () => sortBy(heading));
}
