// The theme lets wide tables scroll. This makes them reachable with the keyboard.
function makeTablesFocusable() {
  for (const frame of document.querySelectorAll(".md-typeset__scrollwrap")) frame.tabIndex = 0;
}
document$.subscribe(() => requestAnimationFrame(makeTablesFocusable));
