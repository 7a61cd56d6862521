// The page of a run that goes on: fetches itself twice a second, and replaces the sections that differ. What is open,
// unfolded, scrolled or focused in the others stays.
const sectionsOf = (page) => [...page.querySelectorAll("main > section")];
let shown = new Map(sectionsOf(document).map((section) => [section.id, section.outerHTML]));

function replaced(old, section) {
  const opened = [...old.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent);
  for (const details of section.querySelectorAll("details")) details.open ||= opened.includes(details.firstChild.textContent);
  const fold = section.querySelector(".fold input");
  if (fold) fold.checked = old.querySelector(".fold input")?.checked ?? false;
  old.replaceWith(section);
}

function show(page) {
  label(page);
  const latest = new Map();
  let before = null;
  for (const section of sectionsOf(page)) {
    const old = document.getElementById(section.id);
    latest.set(section.id, section.outerHTML);
    if (!old) before ? before.after(section) : document.querySelector("main").prepend(section);
    else if (shown.get(section.id) !== section.outerHTML) replaced(old, section);
    before = document.getElementById(section.id);
  }
  for (const id of shown.keys()) if (!latest.has(id)) document.getElementById(id)?.remove();
  document.querySelector("header p").textContent = page.querySelector("header p").textContent;
  shown = latest;
}

async function follow() {
  try {
    const answer = await fetch(location.pathname);
    if (!answer.ok) throw new Error(answer.statusText);
    show(new DOMParser().parseFromString(await answer.text(), "text/html"));
  } catch (error) {
    document.querySelector("header p").textContent = "not followed any more: verl-profiling view has ended";
  }
  setTimeout(follow, 500);
}
setTimeout(follow, 500);
