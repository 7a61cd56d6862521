// Light and dark: the system's preference, until the reader switches.
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

root.dataset.theme = initialTheme();
document.getElementById("theme").addEventListener("click", switchTheme);
document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input");
  if (event.key === "t" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) switchTheme();
});
