// The theme lets wide tables scroll. This makes them reachable with the keyboard.
document$.subscribe(() => {
  for (const frame of document.querySelectorAll(".md-typeset__scrollwrap")) frame.tabIndex = 0;
});
