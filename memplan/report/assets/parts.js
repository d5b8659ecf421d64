// Parts that every page has: tiles with figures, the switch of the colours.

function tile(title, figure, ...told) {
  return make("div", { className: "tile" }, make("h3", { textContent: title }), make("strong", { textContent: figure }),
    ...told.filter(Boolean).map((text) => (typeof text === "string" ? make("p", { textContent: text }) : text)));
}

function bar(part, whole) {
  const filled = make("i");
  filled.style.width = `${Math.min(100, (100 * part) / whole)}%`;
  if (part > whole) filled.className = "over";
  return make("div", { className: "bar", role: "img", ariaLabel: percent(part, whole) }, filled);
}

function drawTheme(charts) {
  const themes = ["auto", "light", "dark"];
  const button = byId("theme");
  const redraw = () => charts.forEach((chart) => chart.draw());
  button.hidden = false;
  button.onclick = () => {
    const now = themes[(themes.indexOf(document.documentElement.dataset.theme || "auto") + 1) % themes.length];
    if (now === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = now;
    button.textContent = `theme: ${now}`;
    redraw();
  };
  addEventListener("beforeprint", redraw);
  addEventListener("afterprint", redraw);
}
