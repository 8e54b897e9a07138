// What would change, for a person to read, line by line: in a file, or in the text of an action. All of it is marked
// text from the server.

import { compareLines, compareWords, linesOf } from "/page/difference.js";
import { el, marked } from "/page/elements.js";

// Unchanged lines kept around a change; longer stretches are folded.
const CONTEXT = 3;
// Rows and characters shown at once. A file of a megabyte would otherwise take the browser seconds to lay out.
const ROWS_AT_ONCE = 1_500;
const LINE_SHOWN = 1_000;

/** A unified view of two texts. `before` null: there was nothing. `claimed`: what is the same is so by the agent's word,
 * and is folded away only where it is more than can be shown at once. */
export function textChange(path, before, after, { label = "", claimed = false } = {}) {
  const made = before === null ? allNew(after) : compareLines(before, after);
  const gone = made.rows.filter((row) => row.kind === "gone").length;
  const fresh = made.rows.filter((row) => row.kind === "new").length;
  const head = el("div", { class: "diff-head" },
    el("bdi", { class: "name" }, marked(path)),
    label && el("span", { class: "muted" }, label),
    el("span", { class: "spread" }),
    before === null ? el("span", { class: "added" }, `new, ${fresh} ${fresh === 1 ? "line" : "lines"}`)
      : [el("span", { class: "added" }, `+${fresh}`), el("span", { class: "removed" }, `−${gone}`)]);
  const notes = [];
  if (before !== null && !gone && !fresh && before === after) notes.push("Nothing would change: the texts are the same.");
  if (made.exhausted) notes.push("The texts are too different to compare all of them line by line; what could not be compared is shown as removed and added.");
  if (made.endings[0] !== made.endings[1]) notes.push(made.endings[1] ? "A line end is added at the end of the file." : "The line end at the end of the file is removed.");
  const body = el("div", { class: "diff", role: "group", "aria-label": `Change of ${path}`, tabindex: "0" });
  fill(body, claimed && made.rows.length <= ROWS_AT_ONCE ? made.rows : folded(made.rows, claimed ? "lines that the agent says are there already" : "unchanged lines"));
  return el("div", { class: "change" }, head, notes.map((note) => el("p", { class: "diff-note" }, note)), body);
}

function allNew(text) {
  const { lines, ended } = linesOf(text);
  return { rows: lines.map((line, i) => ({ kind: "new", is: i + 1, text: line })), exhausted: false, endings: [true, ended] };
}

/** Long unchanged stretches become one row that can be opened. */
function folded(rows, what) {
  const shown = [];
  for (let i = 0; i < rows.length;) {
    if (rows[i].kind !== "same") { shown.push(rows[i++]); continue; }
    let end = i;
    while (end < rows.length && rows[end].kind === "same") end++;
    const head = i === 0 ? 0 : CONTEXT, tail = end === rows.length ? 0 : CONTEXT;
    if (end - i > head + tail + 1) {
      shown.push(...rows.slice(i, i + head), { kind: "fold", what, rows: rows.slice(i + head, end - tail) }, ...rows.slice(end - tail, end));
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
  const button = el("button", { type: "button", class: "fold" }, `⋯ ${fold.rows.length} ${fold.what}`);
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
  if (parts) for (const [text, changed] of parts) code.append(changed ? el("mark", {}, marked(text)) : marked(text));
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
  code.append(marked(text.slice(0, LINE_SHOWN)));
  if (text.length <= LINE_SHOWN) return;
  const more = el("button", { type: "button", class: "more" }, `show ${text.length - LINE_SHOWN} more characters`);
  more.addEventListener("click", () => more.replaceWith(marked(text.slice(LINE_SHOWN))));
  code.append(more);
}

// --- whose word it is -------------------------------------------------------------------------------

const SOURCES = {
  claim: "Compared with what the agent said the file held when it asked: its word, not a look at the file.",
  read: "Compared with the file itself, which the server has read.",
  same: "The file already holds this text: all of it is shown as new.",
  nothing: "Nobody says what is there now: all of it is shown as new.",
};

/** A proposed file against what it would replace: `file` is the server's `shown.file`. */
export function fileChange(file, { after = file.proposed, decided = false } = {}) {
  const unread = decided && ["claim", "nothing"].includes(file.source);
  return el("div", {},
    el("p", { class: `source ${file.source}` }, SOURCES[file.source], unread ? " The file itself is read only while a proposal waits." : null),
    file.contradicts ? el("p", { class: "contradicts" }, el("strong", {}, "The agent says that the file holds something else now.")) : null,
    textChange(file.path, file.before, after, { claimed: file.source === "claim" }));
}

/** All of what would be done, exactly as the server says it and the approval is bound to it. */
export function actionShown(text) {
  const held = el("pre", { class: "action", tabindex: "0" });
  const lines = text.split("\n");
  lines.forEach((line, i) => { put(held, line); if (i < lines.length - 1) held.append("\n"); });
  return held;
}
