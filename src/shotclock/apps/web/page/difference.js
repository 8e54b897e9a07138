// What changed between two sequences, in bounded work. Pure: no document, no time.
//
// Lines that occur once on both sides are anchors; between them Myers' shortest edit script. All of it draws on one
// budget of steps. When that is used up the rest counts as replaced: less readable, never wrong, never slow.

// A file of a megabyte with thousands of edits needs about a third of this; it takes well below a second.
export const STEPS = 4_000_000;
// Myers keeps a table of this many rows squared; more edits between two anchors are shown as replaced.
const MOST_EDITS = 1_000;

/** For each element of `a` the index of its partner in `b`, or -1. */
export function partners(a, b, budget = { left: STEPS }) {
  const ids = new Map();
  const number = (one) => {
    let id = ids.get(one);
    if (id === undefined) ids.set(one, (id = ids.size));
    return id;
  };
  const A = Int32Array.from(a, number);
  const B = Int32Array.from(b, number);
  const found = new Int32Array(A.length).fill(-1);
  const todo = [[0, A.length, 0, B.length]];
  while (todo.length) {
    let [a0, a1, b0, b1] = todo.pop();
    while (a0 < a1 && b0 < b1 && A[a0] === B[b0]) found[a0++] = b0++;
    while (a0 < a1 && b0 < b1 && A[a1 - 1] === B[b1 - 1]) found[--a1] = --b1;
    if (a0 === a1 || b0 === b1) continue;
    budget.left -= a1 - a0 + b1 - b0;
    if (budget.left < 0) { budget.exhausted = true; continue; }
    const anchors = anchorsOf(A, a0, a1, B, b0, b1);
    if (!anchors.length) { shortest(A, a0, a1, B, b0, b1, found, budget); continue; }
    let [pa, pb] = [a0, b0];
    for (const [x, y] of anchors) {
      found[x] = y;
      todo.push([pa, x, pb, y]);
      [pa, pb] = [x + 1, y + 1];
    }
    todo.push([pa, a1, pb, b1]);
  }
  return found;
}

/** Pairs of elements that occur once on each side, in an order both sides agree on. */
function anchorsOf(A, a0, a1, B, b0, b1) {
  const inB = new Map();
  for (let y = b0; y < b1; y++) inB.set(B[y], inB.has(B[y]) ? -1 : y);
  const inA = new Map();
  for (let x = a0; x < a1; x++) inA.set(A[x], inA.has(A[x]) ? -1 : x);
  const pairs = [];
  for (const [id, x] of inA) {
    const y = inB.get(id);
    if (x >= 0 && y !== undefined && y >= 0) pairs.push([x, y]);
  }
  // The longest run of pairs that grows on both sides: patience sorting.
  const tops = [];
  const before = new Array(pairs.length);
  pairs.forEach(([, y], i) => {
    let low = 0, high = tops.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (pairs[tops[middle]][1] < y) low = middle + 1; else high = middle;
    }
    before[i] = low ? tops[low - 1] : -1;
    tops[low] = i;
  });
  const chosen = [];
  for (let i = tops.length ? tops[tops.length - 1] : -1; i >= 0; i = before[i]) chosen.push(pairs[i]);
  return chosen.reverse();
}

function shortest(A, a0, a1, B, b0, b1, found, budget) {
  const n = a1 - a0, m = b1 - b0;
  const most = Math.min(n + m, MOST_EDITS);
  const reach = new Int32Array(2 * most + 3), zero = most + 1;
  const rounds = [];
  for (let d = 0; d <= most; d++) {
    budget.left -= d + 1;
    if (budget.left < 0) break;
    rounds.push(reach.slice(zero - d - 1, zero + d + 2));
    for (let k = -d; k <= d; k += 2) {
      const down = k === -d || (k !== d && reach[zero + k - 1] < reach[zero + k + 1]);
      let x = down ? reach[zero + k + 1] : reach[zero + k - 1] + 1;
      let y = x - k;
      while (x < n && y < m && A[a0 + x] === B[b0 + y]) { x++; y++; }
      reach[zero + k] = x;
      if (x >= n && y >= m) return walkBack(rounds, n, m, a0, b0, found);
    }
  }
  budget.exhausted = true;
}

function walkBack(rounds, n, m, a0, b0, found) {
  let x = n, y = m;
  for (let d = rounds.length - 1; d >= 0; d--) {
    const reach = rounds[d], at = (k) => reach[k + d + 1];
    const k = x - y;
    const down = k === -d || (k !== d && at(k - 1) < at(k + 1));
    const fromK = down ? k + 1 : k - 1;
    const fromX = d ? at(fromK) : 0, fromY = d ? fromX - fromK : 0;
    while (x > fromX && y > fromY) { x--; y--; found[a0 + x] = b0 + y; }
    [x, y] = [fromX, fromY];
  }
}

/** Lines without their ends, and whether the last one had one. */
export function linesOf(text) {
  if (text === "") return { lines: [], ended: true };
  const lines = text.split("\n");
  const ended = lines[lines.length - 1] === "";
  if (ended) lines.pop();
  return { lines, ended };
}

/** Rows of a unified view: {kind: "same" | "gone" | "new", was, is, text, partner}. Numbers count from 1. */
export function compareLines(before, after) {
  const budget = { left: STEPS };
  const a = linesOf(before), b = linesOf(after);
  const found = partners(a.lines, b.lines, budget);
  const rows = [];
  let y = 0;
  for (let x = 0; x <= a.lines.length;) {
    const gone = [], fresh = [];
    while (x < a.lines.length && found[x] < 0) gone.push({ kind: "gone", was: x + 1, text: a.lines[x++] });
    const until = x < a.lines.length ? found[x] : b.lines.length;
    while (y < until) fresh.push({ kind: "new", is: y + 1, text: b.lines[y++] });
    for (let i = 0; i < Math.min(gone.length, fresh.length); i++) { gone[i].partner = fresh[i]; fresh[i].partner = gone[i]; }
    for (const row of gone) rows.push(row);
    for (const row of fresh) rows.push(row);
    if (x === a.lines.length) break;
    rows.push({ kind: "same", was: x + 1, is: y + 1, text: a.lines[x] });
    x++; y++;
  }
  return { rows, exhausted: Boolean(budget.exhausted), endings: [a.ended, b.ended] };
}

const WORD = /[\p{L}\p{N}_]+|\s+|[^\p{L}\p{N}_\s]/gu;
// Longer lines are not compared word by word.
const LONGEST_LINE = 2_000;

/** The parts of two lines, [text, changed] each; null where they share too little to be worth marking. */
export function compareWords(before, after) {
  if (before.length > LONGEST_LINE || after.length > LONGEST_LINE) return null;
  const a = before.match(WORD) || [], b = after.match(WORD) || [];
  const found = partners(a, b, { left: 50_000 });
  const kept = new Set();
  let shared = 0;
  found.forEach((y, x) => { if (y >= 0) { kept.add(y); if (a[x].trim()) shared += a[x].length; } });
  if (shared * 3 < Math.max(before.trim().length, after.trim().length)) return null;
  return [joined(a, (i) => found[i] < 0), joined(b, (i) => !kept.has(i))];
}

function joined(words, isChanged) {
  const parts = [];
  words.forEach((word, i) => {
    const changed = isChanged(i), last = parts[parts.length - 1];
    if (last && last[1] === changed) last[0] += word; else parts.push([word, changed]);
  });
  return parts;
}
