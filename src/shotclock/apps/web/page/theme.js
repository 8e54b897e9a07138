"use strict";
// Before anything is painted, so that a chosen theme does not flash.
try {
  const chosen = localStorage.getItem("theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch { /* storage may be switched off; then the system decides */ }
