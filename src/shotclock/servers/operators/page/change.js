// What would change, for a person to read: a file line by line, arguments by name, and what an operator made of them.

import { compareLines, compareWords, linesOf } from "/page/difference.js";
import { el, visible } from "/page/elements.js";

// Unchanged lines kept around a change; longer stretches are folded.
const CONTEXT = 3;
// Rows and characters shown at once. A file of a megabyte would otherwise take the browser seconds to lay out.
const ROWS_AT_ONCE = 1_500;
const LINE_SHOWN = 1_000;

/** A unified view of two texts. `before` null: there was nothing. */
export function fileChange(path, before, after, { label = "" } = {}) {
  const made = before === null ? allNew(after) : compareLines(before, after);
  const gone = made.rows.filter((row) => row.kind === "gone").length;
  const fresh = made.rows.filter((row) => row.kind === "new").length;
  const head = el("div", { class: "diff-head" },
    el("bdi", { class: "name" }, visible(path)),
    label && el("span", { class: "muted" }, label),
    el("span", { class: "spread" }),
    before === null ? el("span", { class: "added" }, `new file, ${fresh} ${fresh === 1 ? "line" : "lines"}`)
      : [el("span", { class: "added" }, `+${fresh}`), el("span", { class: "removed" }, `−${gone}`)]);
  const notes = [];
  if (before !== null && !gone && !fresh && before === after) notes.push("Nothing would change: the texts are the same.");
  if (made.exhausted) notes.push("The texts are too different to compare all of them line by line; what could not be compared is shown as removed and added.");
  if (made.endings[0] !== made.endings[1]) notes.push(made.endings[1] ? "A line end is added at the end of the file." : "The line end at the end of the file is removed.");
  const body = el("div", { class: "diff", role: "group", "aria-label": `Change of ${path}`, tabindex: "0" });
  fill(body, folded(made.rows));
  return el("div", { class: "change" }, head, notes.map((note) => el("p", { class: "diff-note" }, note)), body);
}

function allNew(text) {
  const { lines, ended } = linesOf(text);
  return { rows: lines.map((line, i) => ({ kind: "new", is: i + 1, text: line })), exhausted: false, endings: [true, ended] };
}

/** Long unchanged stretches become one row that can be opened. */
function folded(rows) {
  const shown = [];
  for (let i = 0; i < rows.length;) {
    if (rows[i].kind !== "same") { shown.push(rows[i++]); continue; }
    let end = i;
    while (end < rows.length && rows[end].kind === "same") end++;
    const head = i === 0 ? 0 : CONTEXT, tail = end === rows.length ? 0 : CONTEXT;
    if (end - i > head + tail + 1) {
      shown.push(...rows.slice(i, i + head), { kind: "fold", rows: rows.slice(i + head, end - tail) }, ...rows.slice(end - tail, end));
    } else shown.push(...rows.slice(i, end));
    i = end;
  }
  return shown;
}

function fill(body, rows) {
  const held = document.createDocumentFragment();
  for (const row of rows.slice(0, ROWS_AT_ONCE)) held.append(row.kind === "fold" ? foldOf(row) : rowOf(row));
  body.append(held);
  const rest = rows.slice(ROWS_AT_ONCE);
  if (!rest.length) return;
  const more = el("button", { type: "button", class: "fold" }, `Show more: ${rest.length} rows are not shown yet`);
  more.addEventListener("click", () => { more.remove(); fill(body, rest); });
  body.append(more);
}

function foldOf(fold) {
  const button = el("button", { type: "button", class: "fold" }, `⋯ ${fold.rows.length} unchanged lines`);
  button.addEventListener("click", () => {
    const held = el("div");
    fill(held, fold.rows);
    button.replaceWith(...held.childNodes);
  });
  return button;
}

const SIGNS = { same: " ", gone: "−", new: "+" };

function rowOf(row) {
  const code = el("span", { class: "code" });
  const parts = row.partner && words(row);
  if (parts) for (const [text, changed] of parts) code.append(changed ? el("mark", {}, visible(text)) : visible(text));
  else put(code, row.text);
  return el("div", { class: `dl ${row.kind}` },
    el("span", { class: "no", "aria-hidden": "true" }, row.was || ""),
    el("span", { class: "no", "aria-hidden": "true" }, row.is || ""),
    el("span", { class: "sign" }, SIGNS[row.kind]), code);
}

function words(row) {
  const [before, after] = row.kind === "gone" ? [row, row.partner] : [row.partner, row];
  const parts = compareWords(before.text, after.text);
  return parts && parts[row.kind === "gone" ? 0 : 1];
}

function put(code, text) {
  code.append(visible(text.slice(0, LINE_SHOWN)));
  if (text.length <= LINE_SHOWN) return;
  const more = el("button", { type: "button", class: "more" }, `show ${text.length - LINE_SHOWN} more characters`);
  more.addEventListener("click", () => more.replaceWith(visible(text.slice(LINE_SHOWN))));
  code.append(more);
}

// --- arguments --------------------------------------------------------------------------------------

export const asText = (value) => JSON.stringify(value, null, 2) ?? "";

/** Names and values as they would be used; with `changed`, what became of each. */
export function argumentsShown(before, after = null) {
  const names = [...new Set([...Object.keys(before || {}), ...Object.keys(after || {})])];
  if (!names.length) return el("p", { class: "muted" }, "No arguments.");
  return el("dl", { class: "arguments" }, names.map((name) => {
    const was = Object.hasOwn(before || {}, name), is = after === null ? was : Object.hasOwn(after, name);
    const same = after === null || (was && is && asText(before[name]) === asText(after[name]));
    return el("div", { class: same ? "argument" : "argument changed" },
      el("dt", {}, el("bdi", { class: "name" }, visible(name))),
      same ? el("dd", {}, valueOf(before[name]))
        : el("dd", {},
          was ? el("del", {}, el("span", { class: "sr" }, "was: "), valueOf(before[name])) : el("span", { class: "muted" }, "not set"),
          el("span", { class: "arrow", "aria-hidden": "true" }, " → "),
          is ? el("ins", {}, el("span", { class: "sr" }, "is now: "), valueOf(after[name])) : el("span", { class: "muted" }, "taken away")));
  }));
}

function valueOf(value) {
  if (typeof value === "string") {
    if (value === "") return el("span", { class: "muted" }, "empty text");
    return el(value.includes("\n") || value.length > 200 ? "pre" : "span", { class: "text" }, longText(value));
  }
  const short = JSON.stringify(value, null, 1).replace(/\s*\n\s*/g, " ");
  if (short.length <= 80) return el("code", {}, visible(short));
  if (value !== null && typeof value === "object") return el("pre", { class: "text" }, longText(asText(value)));
  return el("code", {}, String(value));
}

function longText(text) {
  const held = document.createDocumentFragment();
  const code = el("span");
  put(code, text);
  held.append(...code.childNodes);
  return held;
}
