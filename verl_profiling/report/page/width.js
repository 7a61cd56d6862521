// Draws again when the width of a container changes, and for paper while the page is printed.
const PAPER = 680; // fits A4 and Letter, upright

function onWidth(container, draw) {
  const wide = (width) => { container.style.width = width; draw(); };
  new ResizeObserver(draw).observe(container);
  addEventListener("beforeprint", () => wide(`${PAPER}px`));
  addEventListener("afterprint", () => wide(""));
}
