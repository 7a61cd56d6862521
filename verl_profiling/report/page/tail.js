// The share of requests (or replicas) that are done, over time.
function drawTail(container) {
  const [width, height] = [Math.min(container.clientWidth, 600), 200];
  const margin = { left: 48, right: 16, top: 10, bottom: 24 };
  const last = data.finishes_us.at(-1) / 1e6;
  const [unit, scale] = timeUnit(last);
  const x = d3.scaleLinear([0, last / scale], [margin.left, width - margin.right]);
  const y = d3.scaleLinear([0, 1], [height - margin.bottom, margin.top]);
  const points = [[0, 0], ...data.finishes_us.map((us, index) => [us / 1e6 / scale, (index + 1) / data.finishes_us.length])];
  const drawing = d3.select(container).selectAll("svg").data([null]).join("svg").attr("width", width).attr("height", height)
    .attr("role", "img").attr("aria-label", `Share of requests done over time: half after ${duration(data.half_us / 1e6)}, all after ${duration(last)}`);
  drawing.selectAll("*").remove();
  const axis = d3.axisBottom(x).ticks(Math.max(2, width / 110)).tickFormat((value) => `${value} ${unit}`);
  drawing.append("g").attr("transform", `translate(0,${height - margin.bottom})`).call(axis);
  drawing.append("g").attr("transform", `translate(${margin.left},0)`).call(d3.axisLeft(y).ticks(4, "%").tickSizeInner(-(width - margin.left - margin.right)));
  const half = x(data.half_us / 1e6 / scale);
  drawing.append("line").attr("class", "half").attr("x1", half).attr("x2", half).attr("y1", margin.top).attr("y2", height - margin.bottom);
  drawing.append("path").attr("class", "done").attr("d", d3.line().curve(d3.curveStepAfter).x(([when]) => x(Math.max(when, 0))).y(([, share]) => y(share))(points));
}

const tail = document.getElementById("tail");
if (tail && data.finishes_us.length) onWidth(tail, () => drawTail(tail));
