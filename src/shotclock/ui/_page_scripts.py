"""The scripts that a browser runs in its pages."""

from __future__ import annotations

READ_TEXTS = "nodes => nodes.map(n => /^(INPUT|TEXTAREA|SELECT)$/.test(n.tagName) ? n.value : n.innerText)"

# Scrolls the given node or its first scrollable ancestor; without a node, the page.
SCROLL = """(node, [x, y]) => {
  let box = node ?? document.scrollingElement ?? document.documentElement;
  const can = n => y ? n.scrollHeight > n.clientHeight : n.scrollWidth > n.clientWidth;
  while (node && !can(box) && box.parentElement) box = box.parentElement;
  const before = [box.scrollLeft, box.scrollTop];
  box.scrollBy({left: x * box.clientWidth, top: y * box.clientHeight, behavior: "instant"});
  return box.scrollLeft !== before[0] || box.scrollTop !== before[1];
}"""

# The value of a label: its control, the cell or definition beside it, or the text after its colon.
READ_PAIR = """node => {
  const text = n => (/^(INPUT|TEXTAREA|SELECT)$/.test(n.tagName) ? n.value : n.innerText).trim();
  const label = text(node);
  const control = node.closest("label")?.control;
  if (control) return [label, text(control)];
  const cell = node.closest("dt, th, td");
  const beside = cell?.nextElementSibling ?? node.nextElementSibling ?? node.parentElement?.nextElementSibling;
  const [key, ...rest] = label.split(":");
  if (rest.join(":").trim()) return [key.trim(), rest.join(":").trim()];
  return beside ? [label.replace(/:$/, ""), text(beside)] : null;
}"""

TAKES_FILES = "node => (node.control ?? node).type === 'file'"

COUNT_NODES = "node => (node ?? document).querySelectorAll('*').length"

# A selector engine that limits the next snapshot to some nodes: `shotclock-cut=3000 8000` keeps 3000 nodes for at most
# 8000 ms and finds those; `shotclock-cut=0 0` ends it. Playwright writes a line for every node of a page, which takes
# it longer than an action has on a page with 50,000 of them, and it has no option against that. It walks from
# `firstChild` to `nextSibling`, so a node gets properties of these names that skip others. They are set in Playwright's
# own world: neither the page nor its scripts see them. Nodes above the visible part are skipped first, so that
# scrolling shows other ones.
CUT = """({
  queryAll(root, body) {
    const [most, ms] = body.split(" ").map(Number);
    globalThis.shotclockUndo?.();
    if (!most) return [];
    const changed = [], kept = [];
    const undo = globalThis.shotclockUndo = () => {
      for (const [node, name] of changed) delete node[name];
      if (globalThis.shotclockUndo === undo) delete globalThis.shotclockUndo;
    };
    setTimeout(undo, ms);
    const point = (node, name, to) => {
      Object.defineProperty(node, name, {value: to, configurable: true});
      changed.push([node, name]);
    };
    const walk = (parent, depth) => {
      let last = null, skipped = false;
      for (let child = parent.firstChild, next; child; child = next) {
        next = child.nextSibling;
        const isElement = child.nodeType === Node.ELEMENT_NODE;
        const box = isElement && kept.length < most ? child.getBoundingClientRect() : null;
        if (kept.length >= most || depth > 100 || (box && box.height && box.bottom < 0)) {
          skipped = true;
          continue;
        }
        if (skipped) point(last ?? parent, last ? "nextSibling" : "firstChild", child);
        [last, skipped] = [child, false];
        if (!isElement) continue;
        kept.push(child);
        walk(child, depth + 1);
        if (child.shadowRoot) walk(child.shadowRoot, depth + 1);
      }
      if (skipped) point(last ?? parent, last ? "nextSibling" : "firstChild", null);
    };
    walk(root.body ?? root, 0);
    return kept;
  }
})"""
