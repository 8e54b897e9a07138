// Building the document. Text from proposals only ever becomes text: there is no way to markup in here.

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value == null) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(2).filter((child) => child != null && child !== false));
  return node;
}

// The server's marks for what cannot be seen, or looks like something else: core/texts.py.
const MARK = /<U\+([0-9A-F]{4,6})>/g;

/** Somebody else's text as the server has marked it, with the marks to be told from the text. */
export function marked(text) {
  const held = document.createDocumentFragment();
  let at = 0;
  for (const match of text.matchAll(MARK)) {
    if (match.index > at) held.append(text.slice(at, match.index));
    held.append(el("span", { class: "odd", title: "a character that cannot be seen, or looks like another" }, `U+${match[1]}`));
    at = match.index + match[0].length;
  }
  if (at < text.length) held.append(text.slice(at));
  return held;
}

/** What went wrong, in words that may quote somebody: everything unusual in it is marked here. */
export const complaint = (text) =>
  marked(String(text).replace(/[^\n\x20-\x7e\u00a1-\u017f\u2013-\u201d\u2026]/gu, (odd) => `<U+${odd.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}>`));

export const pill = (status) => el("span", { class: `pill ${status}` }, status);

// --- time: the server's clock, as far as we know it ------------------------------------------------

let ahead = 0;
export const setClock = (iso) => { ahead = Date.parse(iso) - Date.now(); };
export const now = () => Date.now() + ahead;

/** How long, in at most two units: 3 d 4 h, 12 m 05 s, 9 s. */
export function span(ms) {
  const s = Math.max(0, Math.round(ms / 1000));
  if (s < 60) return `${s} s`;
  const m = Math.floor(s / 60);
  if (m < 60) return `${m} m ${String(s % 60).padStart(2, "0")} s`;
  const h = Math.floor(m / 60);
  if (h < 48) return `${h} h ${String(m % 60).padStart(2, "0")} m`;
  return `${Math.floor(h / 24)} d ${h % 24} h`;
}

export function ago(iso) {
  const ms = now() - Date.parse(iso);
  if (ms < 60_000) return "just now";
  const m = Math.floor(ms / 60_000);
  if (m < 60) return `${m} m ago`;
  if (m < 48 * 60) return `${Math.floor(m / 60)} h ago`;
  return new Date(iso).toLocaleDateString(undefined, { day: "numeric", month: "short", year: "numeric" });
}

export const moment = (iso, words = ago(iso)) =>
  el("time", { datetime: iso, title: new Date(iso).toLocaleString(), "data-ago": words === ago(iso) ? iso : null }, words);

/** A countdown that `tick` keeps up to date, with a bar of what is left. */
export function countdown(proposal, { words = false } = {}) {
  const node = el("span", { class: "left" }, el("span", { class: "left-text" }), el("span", { class: "left-bar", "aria-hidden": "true" }));
  node.dataset.until = proposal.expires_at;
  node.dataset.from = proposal.created_at;
  if (words) node.dataset.words = "yes";
  showLeft(node);
  return node;
}

const TEN_YEARS = 10 * 366 * 86_400_000;  // a proposal without an end says the year 9999

function showLeft(node) {
  const until = Date.parse(node.dataset.until), whole = until - Date.parse(node.dataset.from);
  const left = until - now();
  const said = left > TEN_YEARS ? "no end" : left <= 0 ? "time is up" : node.dataset.words ? `${span(left)} left` : span(left);
  if (node.firstChild.textContent !== said) node.firstChild.textContent = said;
  node.lastChild.style.setProperty("--share", String(Math.max(0, Math.min(1, left / whole))));
  node.classList.toggle("soon", left < Math.min(300_000, whole / 5));
}

// What is looked at again and again is as good as now for this long.
const FRESH_MS = 5_000;

/** How old what is shown is, kept up to date by `tick`. */
export function age(iso) {
  const node = el("span", { class: "age", "data-as-of": iso });
  showAge(node);
  return node;
}

function showAge(node) {
  const ms = now() - Date.parse(node.dataset.asOf);
  const said = ms < FRESH_MS ? "now" : `${span(ms)} ago`;
  if (node.textContent !== said) node.textContent = said;
  node.classList.toggle("soon", ms >= FRESH_MS);
}

export function tick(root) {
  for (const node of root.querySelectorAll("[data-until]")) showLeft(node);
  for (const node of root.querySelectorAll("[data-as-of]")) showAge(node);
  for (const node of root.querySelectorAll("[data-ago]")) {
    const said = ago(node.dataset.ago);
    if (node.textContent !== said) node.textContent = said;
  }
}
