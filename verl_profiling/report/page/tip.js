// A box beside the pointer, or beside what has the focus.
function makeTip(container) {
  const tip = element("div", { className: "tip", hidden: true });
  tip.setAttribute("role", "status");
  container.append(tip);
  return {
    hide() { tip.hidden = true; },
    show(lines, left, top) {
      const [title, ...rest] = lines;
      tip.replaceChildren(element("strong", {}, element("bdi", { textContent: title })), ...rest.map((line) => element("span", { textContent: line })));
      tip.hidden = false;
      const room = container.clientWidth - tip.offsetWidth - 4;
      tip.style.left = `${Math.max(4, Math.min(left + 14, room))}px`;
      tip.style.top = `${top + 18}px`;
    },
  };
}
