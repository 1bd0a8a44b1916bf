// Crosshair and values under the pointer. The page is complete without it; points come ready-made in data attributes.
"use strict";
for (const svg of document.querySelectorAll("svg.chart")) {
  const curves = [...svg.querySelectorAll("g[data-points]")].map((group) => ({
    name: group.dataset.name,
    points: group.dataset.points.split(";").map((point) => point.split("|")), // px, x text, py, y text
  }));
  if (!curves.length) continue;
  const cross = document.createElementNS(svg.namespaceURI, "line");
  cross.setAttribute("class", "cross");
  cross.setAttribute("y1", svg.dataset.top);
  cross.setAttribute("y2", svg.dataset.bottom);
  svg.append(cross);
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  svg.parentElement.append(tip);

  const hide = () => {
    tip.hidden = true;
    cross.style.visibility = "hidden";
  };
  hide();
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const scale = svg.viewBox.baseVal.width / box.width;
    const at = (event.clientX - box.left) * scale;
    const near = curves.map(({ name, points }) => ({
      name,
      point: points.reduce((best, p) => (Math.abs(p[0] - at) < Math.abs(best[0] - at) ? p : best)),
    }));
    const lead = near.reduce((best, c) => (Math.abs(c.point[0] - at) < Math.abs(best.point[0] - at) ? c : best)).point;
    tip.textContent = [`${lead[1]} tokens`, ...near.map(({ name, point }) => `${name} ${point[3]}`)].join("\n");
    cross.setAttribute("x1", lead[0]);
    cross.setAttribute("x2", lead[0]);
    cross.style.visibility = "visible";
    tip.hidden = false;
    const left = lead[0] / scale;
    tip.style.left = `${left > box.width / 2 ? left - tip.offsetWidth - 10 : left + 10}px`;
  });
}
