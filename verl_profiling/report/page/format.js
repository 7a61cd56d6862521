// Times as a person reads them, as in verl_profiling/units.py, and elements with text.
const UNITS = [["s", 1], ["ms", 1e-3], ["us", 1e-6], ["ns", 1e-9]];
const data = JSON.parse(document.getElementById("data").textContent);

function timeUnit(seconds) {
  return UNITS.find(([, scale]) => Math.abs(seconds) >= 0.9995 * scale) ?? (seconds ? UNITS.at(-1) : UNITS[0]);
}

function duration(seconds) {
  if (!seconds) return "0 s";
  const [unit, scale] = timeUnit(seconds);
  const value = seconds / scale;
  const size = Math.abs(value);
  const digits = size < 9.995 ? 2 : size < 99.95 ? 1 : 0;
  const rounded = Number(value.toFixed(digits)); // as Python rounds, which toLocaleString alone does not
  return `${rounded.toLocaleString("en-US", { minimumFractionDigits: digits })} ${unit}`;
}

function percent(share) {
  return `${Math.round(100 * share)} %`;
}

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function plural(count, thing) {
  return `${count.toLocaleString("en-US")} ${thing}${count === 1 ? "" : "s"}`;
}
