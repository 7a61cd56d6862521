// Tables: sorted by a click on a heading, long ones folded, metrics filtered by name.
function sortBy(heading) {
  const table = heading.closest("table");
  const column = [...heading.parentNode.children].indexOf(heading);
  const body = table.tBodies[0];
  const numeric = [...body.rows].some((row) => row.cells[column].classList.contains("n"));
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

function makeFoldable(button) {
  const table = button.previousElementSibling.querySelector("table");
  const all = button.textContent;
  const fold = (folded) => {
    table.classList.toggle("folded", folded);
    button.setAttribute("aria-expanded", String(!folded));
    button.textContent = folded ? all : `top ${table.dataset.top}`;
  };
  button.hidden = false;
  fold(true);
  button.addEventListener("click", () => fold(!table.classList.contains("folded")));
}

function makeFilter(field) {
  const groups = [...field.parentNode.querySelectorAll("details:has(table)")];
  field.hidden = false;
  field.addEventListener("input", () => {
    const wanted = field.value.trim().toLowerCase();
    for (const group of groups) {
      let found = 0;
      for (const row of group.querySelectorAll("tbody tr")) {
        row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted);
        found += !row.hidden;
      }
      group.classList.toggle("filtered", wanted !== "");
      group.hidden = found === 0;
      group.open = wanted !== "" && found > 0;
    }
  });
}

for (const heading of document.querySelectorAll("th")) {
  heading.querySelector("button").addEventListener("click", () => sortBy(heading));
}
document.querySelectorAll("button.fold").forEach(makeFoldable);
document.querySelectorAll("#filter").forEach(makeFilter);
