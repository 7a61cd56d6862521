// The time axis that all lanes share, and how it is zoomed and panned: wheel, drag, pinch, keys, buttons.
const SHORTEST_US = 10; // what fills the picture at the closest zoom
const STEP = 1.6; // of one key press

function makeTimeAxis(container, span_us, redraw) {
  const whole = d3.scaleLinear().domain([0, span_us]);
  const axis = { x: whole, left: 0, width: 0, whole };
  const selection = d3.select(container);
  const active = () => container.contains(document.activeElement);
  let asked = 0;
  const zoom = d3.zoom()
    .clickDistance(4)
    .filter((event) => {
      if (event.type === "wheel") {
        const outwards = event.deltaY > 0 && d3.zoomTransform(container).k <= 1;
        return event.ctrlKey || event.metaKey || (active() && !outwards);
      }
      return !event.button && !event.target.closest(".label");
    })
    .on("zoom", ({ transform }) => {
      axis.x = transform.rescaleX(whole);
      cancelAnimationFrame(asked);
      asked = requestAnimationFrame(redraw);
    });
  selection.call(zoom);

  axis.resize = (left, width) => {
    Object.assign(axis, { left, width });
    whole.range([left, left + width]);
    const extent = [[left, 0], [left + width, 1]];
    zoom.extent(extent).translateExtent(extent).scaleExtent([1, Math.max(span_us / SHORTEST_US, 1)]);
    axis.x = d3.zoomTransform(container).rescaleX(whole);
  };
  axis.zoomBy = (factor) => selection.call(zoom.scaleBy, factor);
  axis.closer = () => axis.zoomBy(STEP);
  axis.farther = () => axis.zoomBy(1 / STEP);
  axis.pan = (share) => selection.call(zoom.translateBy, (-share * axis.width) / d3.zoomTransform(container).k, 0);
  axis.reset = () => selection.call(zoom.transform, d3.zoomIdentity);
  axis.show = (begin, end) => {
    const margin = Math.max((end - begin) * 0.1, SHORTEST_US / 2);
    const k = Math.min(Math.max(span_us / (end - begin + 2 * margin), 1), zoom.scaleExtent()[1]);
    const { left, width } = axis;
    const middle = left + width / 2 - k * whole((begin + end) / 2);
    const x = Math.min(left * (1 - k), Math.max((left + width) * (1 - k), middle));
    selection.call(zoom.transform, d3.zoomIdentity.translate(x, 0).scale(k));
  };
  axis.visible = () => axis.x.domain();
  return axis;
}
