"use strict";
// Runs before the first paint, so that a chosen theme does not flash. Everything else is a module and waits.
(() => {
  try {
    const chosen = localStorage.getItem("theme");
    if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
  } catch { /* without storage, the system's theme applies */ }
})();
