// Show the values under the pointer. Everything else on the page works without this.
for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const chart = JSON.parse(svg.dataset.chart), hover = svg.querySelector(".hover"), cursor = svg.querySelector(".cursor");
  const tip = Object.assign(document.createElement("div"), { className: "tip", hidden: true });
  svg.parentNode.append(tip);
  const dots = chart.lines.map((line, number) => {
    const dot = document.createElementNS("http://www.w3.org/2000/svg", "circle");
    dot.setAttribute("class", `mark c${number % 4}`);
    dot.setAttribute("r", 4);
    hover.append(dot);
    return dot;
  });
  const nearest = (points, x) => points.reduce((best, point) => Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best);
  const show = (event) => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const first = nearest(chart.lines.flatMap((line) => line.points), (event.clientX - box.left) * scale);
    const texts = [`${first[2]} ${chart.x}`];
    chart.lines.forEach((line, number) => {
      const point = nearest(line.points, first[0]);
      dots[number].setAttribute("cx", point[0]);
      dots[number].setAttribute("cy", point[1]);
      texts.push(`${line.label}: ${point[3]}`);
    });
    for (const [name, value] of [["x1", first[0]], ["x2", first[0]], ["y1", chart.top], ["y2", chart.bottom]]) cursor.setAttribute(name, value);
    tip.replaceChildren(...texts.flatMap((text, number) => number ? [document.createElement("br"), text] : [text]));
    hover.removeAttribute("hidden");
    tip.hidden = false;
    const left = first[0] / scale;
    tip.style.left = `${Math.max(0, Math.min(left + 10, box.width - tip.offsetWidth))}px`;
    tip.style.top = `${Math.max(0, chart.top / scale)}px`;
    if (left + 10 + tip.offsetWidth > box.width) tip.style.left = `${Math.max(0, left - 10 - tip.offsetWidth)}px`;
  };
  const hide = () => { hover.setAttribute("hidden", ""); tip.hidden = true; };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", hide);
}
