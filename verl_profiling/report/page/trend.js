// Stacked bars, one for each step: those of captured steps lead to their pages.
const HEIGHT = 240;
const MARGIN = { left: 62, right: 8, top: 8, bottom: 24 };
const WIDEST = 72;

function hatching(drawing) {
  const pattern = drawing.append("defs").append("pattern").attr("id", "hatching")
    .attr("width", 6).attr("height", 6).attr("patternUnits", "userSpaceOnUse");
  pattern.append("path").attr("d", "M-1,7 L7,-1 M-1,1 L1,-1 M5,7 L7,5");
}

function makeTrend(container, kind) {
  const steps = kind === "watch" ? data.watch : data.steps;
  const colours = data[kind === "watch" ? "exposed" : kind];
  const names = Object.keys(colours);
  const secondsOf = (step, name) => (Object.hasOwn(step[kind], name) ? step[kind][name] : 0); // any name: "toString", too
  const layers = d3.stack().keys(names).value(secondsOf)(steps);
  const totals = steps.map((_, index) => layers.at(-1)?.[index][1] ?? 0);
  const most = data.axis[kind] || 1;
  const isBeyond = (step) => totals[steps.indexOf(step)] > most * 1.001; // the sums differ in their last digits
  const shown = (name) => (kind === "lost" ? name.replaceAll("_", " ") : name);
  const legend = element("ul", { className: "legend" }, ...names.map((name) =>
    element("li", {}, element("i", { className: colours[name] }), element("bdi", { textContent: shown(name) }))));
  const marks = steps.some((step) => step.captured) ? 12 : 0;
  if (marks) legend.append(element("li", {}, element("i", { className: "mark" }), "captured"));
  if (steps.some(isBeyond)) legend.append(element("li", {}, element("i", { className: "beyond" }), "beyond the axis"));
  container.append(legend);
  const drawing = d3.select(container).append("svg").attr("height", HEIGHT);
  if (kind === "lost") hatching(drawing);
  const tip = makeTip(container);
  const [unit, scale] = timeUnit(most);

  function lines(step, index) {
    const parts = names.map((name) => [name, secondsOf(step, name)]).filter(([, seconds]) => seconds > 0).sort((a, b) => b[1] - a[1]);
    const captured = step.captured ? [`captured: ${step.captured}`] : [];
    return [`step ${step.name}: ${duration(totals[index])}`, ...captured, ...parts.map(([name, seconds]) => `${shown(name)} ${duration(seconds)}`)];
  }

  function draw() {
    const width = container.clientWidth;
    const x = d3.scaleBand(steps.map((_, index) => index), [MARGIN.left, width - MARGIN.right]).padding(0.15);
    const y = d3.scaleLinear([0, most / scale], [HEIGHT - MARGIN.bottom, MARGIN.top + marks]).nice().clamp(true);
    const every = Math.ceil(46 / x.step());
    const wide = Math.min(x.bandwidth(), WIDEST);
    const left = (index) => x(index) + (x.bandwidth() - wide) / 2;
    drawing.attr("width", width).selectAll("g, a").remove();
    drawing.append("g").attr("aria-hidden", "true").attr("transform", `translate(${MARGIN.left},0)`)
      .call(d3.axisLeft(y).ticks(5).tickSizeInner(-(width - MARGIN.left - MARGIN.right)).tickFormat((value) => `${value} ${unit}`));
    drawing.append("g").attr("aria-hidden", "true").attr("transform", `translate(0,${HEIGHT - MARGIN.bottom})`)
      .call(d3.axisBottom(x).tickValues(x.domain().filter((index) => index % every === 0)).tickFormat((index) => steps[index].name).tickSizeOuter(0));
    const bars = drawing.selectAll(".step").data(steps).join((enter) => enter.append((step) => document.createElementNS("http://www.w3.org/2000/svg", step.link ? "a" : "g")))
      .attr("class", "step").attr("href", (step) => step.link || null);
    bars.filter((step) => step.link).attr("aria-label", (step) => lines(step, steps.indexOf(step)).join(", "));
    for (const layer of layers) {
      for (const name of [colours[layer.key], ...(kind === "lost" ? ["hatch"] : [])]) {
        bars.append("rect").attr("class", name).attr("x", (_, index) => left(index)).attr("width", wide)
          .attr("y", (_, index) => y(layer[index][1] / scale)).attr("height", (_, index) => y(layer[index][0] / scale) - y(layer[index][1] / scale));
      }
    }
    bars.append("rect").attr("class", "outline").attr("x", (_, index) => left(index)).attr("width", wide)
      .attr("y", (_, index) => y(totals[index] / scale)).attr("height", (_, index) => y(0) - y(totals[index] / scale));
    bars.filter((step) => step.captured).append("path").attr("class", "mark").attr("d", "M-5,-10 L5,-10 L0,-2 Z")
      .attr("transform", (step) => `translate(${x(steps.indexOf(step)) + x.bandwidth() / 2},${y(totals[steps.indexOf(step)] / scale)})`);
    bars.filter(isBeyond).append("path").attr("class", "beyond").attr("d", "M-4,8 L4,8 L0,1 Z")
      .attr("transform", (step) => `translate(${x(steps.indexOf(step)) + x.bandwidth() / 2},${y(totals[steps.indexOf(step)] / scale)})`);
    bars.on("pointermove", (event, step) => tip.show(lines(step, steps.indexOf(step)), ...d3.pointer(event, container)))
      .on("pointerleave", tip.hide)
      .on("focus", (_, step) => tip.show(lines(step, steps.indexOf(step)), x(steps.indexOf(step)), MARGIN.top))
      .on("blur", tip.hide);
  }
  onWidth(container, draw);
}

for (const kind of ["watch", "stages", "lost"]) {
  const place = document.getElementById(kind);
  if (place) makeTrend(place, kind);
}
