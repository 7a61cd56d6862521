// What every page has: its theme, times as verl_profiling/units.py writes them, a tip, drawing again when resized.
const data = JSON.parse(document.getElementById("data").textContent);
const UNITS = [["s", 1], ["ms", 1e-3], ["us", 1e-6], ["ns", 1e-9]];
const PAPER = 680; // fits A4 and Letter, upright

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("verl-profiling-theme", theme); } catch { /* a file:// page may not store */ }
}

function storedTheme() {
  try { return localStorage.getItem("verl-profiling-theme"); } catch { return null; }
}

function switchTheme() {
  setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
}

setTheme(storedTheme() ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
document.getElementById("theme").addEventListener("click", switchTheme);
document.addEventListener("keydown", (event) => {
  if (event.key === "t" && !event.target.matches("input") && !event.ctrlKey && !event.metaKey) switchTheme();
});

function timeUnit(seconds) {
  return UNITS.find(([, scale]) => Math.abs(seconds) >= 0.9995 * scale) ?? (seconds ? UNITS.at(-1) : UNITS[0]);
}

function duration(seconds) {
  if (!seconds) return "0 s";
  const [unit, scale] = timeUnit(seconds);
  const value = seconds / scale;
  const digits = Math.abs(value) < 9.995 ? 2 : Math.abs(value) < 99.95 ? 1 : 0;
  const rounded = Number(value.toFixed(digits)); // as Python rounds, which toLocaleString alone does not
  return `${rounded.toLocaleString("en-US", { minimumFractionDigits: digits })} ${unit}`;
}

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function onWidth(container, draw) {
  const wide = (width) => { container.style.width = width; draw(); };
  new ResizeObserver(draw).observe(container);
  addEventListener("beforeprint", () => wide(`${PAPER}px`));
  addEventListener("afterprint", () => wide(""));
}

function makeTip(container) {
  const tip = element("div", { className: "tip", hidden: true });
  tip.setAttribute("role", "status");
  container.append(tip);
  return {
    hide() { tip.hidden = true; },
    show([title, ...rest], left, top) {
      const name = element("strong", {}, element("bdi", { textContent: title }));
      tip.replaceChildren(name, ...rest.map((line) => element("span", { textContent: line })));
      tip.hidden = false;
      const room = container.clientWidth - tip.offsetWidth - 4;
      tip.style.left = `${Math.max(4, Math.min(left + 14, room))}px`;
      tip.style.top = `${top + 18}px`;
    },
  };
}
