// The page: the list of what waits, the history, which proposal is open, and the keys.

import { Events, ask, keepPlace, keepProof, onProof } from "/page/api.js";
import { complaint, countdown, el, marked, moment, now, pill, setClock, tick } from "/page/elements.js";
import { ProposalView } from "/page/proposal.js";
import { RunningView } from "/page/running.js";

const $ = (id) => document.getElementById(id);
// A row that was decided stays where it is for this long, so that the list does not jump under anybody's hand.
const LINGER_MS = 4_000;
const HISTORY_PAGE = 50;
// As many as the server gives at once. There may be more: what waits longest must not be missing.
const PENDING_PAGE = 500;
const ENDED = ["approved", "modified", "rejected", "expired", "withdrawn"];
const MARKS = { operation: "▸", file: "≡", question: "?" };
const narrow = matchMedia("(max-width: 52rem)");

const me = { name: "", role: "" };
const waiting = new Map(); // id → summary, oldest first; those just decided linger
const history = new Map(); // id → summary, newest first
const rows = new Map(); // id → list item
const state = { tab: "waiting", open: null, statuses: new Set(), hasOlder: false, historyLoaded: false, wanted: 0, asked: null };

const running = new RunningView($("rows"), $("detail"), {
  onBack: () => go(null, "running"), onOpen: (id) => go(id, "running"), onRefused: whoAreWe, say,
  onEmpty: (isEmpty) => { $("nothing").hidden = !isEmpty; $("nothing").textContent = "Nothing runs."; },
  onCount: (count) => { $("running-count").hidden = !count; $("running-count").textContent = String(count); },
});
const view = new ProposalView($("detail"), { onChange: changed, onBack: () => go(null), onRefused: whoAreWe, me });

// --- what the server says --------------------------------------------------------------------------

const events = new Events({
  async onHello(hello) {
    setClock(hello.now);
    setLink("live");
    showEngine(hello.engine);
    try { await load(); } catch (refusal) { refused(refusal); }
  },
  onAlive({ engine }) { showEngine(engine); },
  onProposal(summary) { heard(summary); },
  onReminder({ id, title, expires_at }) {
    say(`Reminder: ${title} expires soon.`);
    const row = rows.get(id);
    if (row) { row.classList.add("reminded"); row.title = `expires ${new Date(expires_at).toLocaleTimeString()}`; }
  },
  onRefused() { signIn(); },
  onLost(wait) {
    setLink("lost");
    lostUntil = Date.now() + wait;
    showLost();
  },
});

let lostUntil = 0;

function setLink(link) {
  document.body.dataset.link = link;
  $("link-text").textContent = link === "live" ? "live" : "reconnecting";
  if (link === "live") $("lost").hidden = true;
}

/** What is wrong with the engine whose runs ask here, if there is one. */
function showEngine(engine) {
  const problem = engine?.problem ? `What runs on Temporal ask is shown as it was: ${engine.problem}` : "";
  $("engine-problem").hidden = !problem;
  if ($("engine-problem").textContent !== problem) $("engine-problem").textContent = problem;
}

async function showLost() {
  const seconds = Math.max(0, Math.ceil((lostUntil - Date.now()) / 1000));
  $("lost-text").textContent = `No connection to the server. What you type is kept. ${seconds ? `Trying again in ${seconds} s.` : "Trying again…"}`;
  $("lost").hidden = document.body.dataset.link !== "lost" || document.body.dataset.state === "signin";
}

/** Who are we, and what waits? After a reconnect the whole list is read again: it is the truth, events only add. */
async function load() {
  const data = await ask("GET", `?status=pending&limit=${PENDING_PAGE}`);
  for (let page = data.proposals; page.length === PENDING_PAGE; data.proposals.push(...page)) {
    page = (await ask("GET", `?status=pending&limit=${PENDING_PAGE}&before=${page.at(-1).seq}`)).proposals;
  }
  Object.assign(me, data.principal);
  if (me.role !== "operator") return signIn(data.sign_in);
  document.body.dataset.state = "ready";
  $("signin").hidden = true;
  $("me").textContent = me.name;
  $("sign-out").hidden = false;
  $("served").textContent = data.served;
  state.served = data.served;
  showEngine(data.engine);
  const open = new Set(data.proposals.map((one) => one.id));
  for (const summary of data.proposals) put(waiting, summary);
  for (const summary of waiting.values()) if (summary.status === "pending" && !open.has(summary.id)) refresh(summary.id);
  if (state.tab === "history" || state.historyLoaded) await loadHistory();
  paint();
  await follow();
  return data.seq;
}

/** Whether a refusal means that our session has ended: then signing in is what there is to say about it. */
async function whoAreWe(refusal) {
  if (refusal.status === 401) signIn();
  else if (refusal.code === "NOT_ALLOWED") await load().catch(refused);
  return document.body.dataset.state === "signin";
}

async function loadHistory(before) {
  const query = before ? `&before=${before}` : "";
  const data = await ask("GET", `?status=ended&limit=${HISTORY_PAGE}${query}`);
  for (const summary of data.proposals) put(history, summary);
  if (before || !state.historyLoaded) state.hasOlder = data.proposals.length === HISTORY_PAGE;
  state.historyLoaded = true;
  paint();
}

/** A change of one proposal that came by itself. */
function heard(summary) {
  const known = waiting.get(summary.id);
  if (summary.status === "pending") {
    if (!known) say(`New: ${summary.title}, asked by ${summary.asked_by}.`);
    put(waiting, summary);
  } else {
    if (known && known.status === "pending") {
      put(waiting, { ...summary, lingers: now() + LINGER_MS });
      if (summary.decided_by !== me.name) say(`${summary.title}: ${summary.status}${summary.decided_by ? ` by ${summary.decided_by}` : ""}.`);
    }
    if (state.historyLoaded) put(history, summary);
  }
  if (view.proposal?.id === summary.id && view.proposal.seq < summary.seq) refresh(summary.id);
  paint();
}

async function refresh(id) {
  try {
    const { proposal } = await ask("GET", `/${id}`);
    changed(proposal);
  } catch (refusal) { refused(refusal); }
}

/** The whole of a proposal that we asked for, decided or read again. */
function changed(proposal, { mine = false, lost = false } = {}) {
  const { id, seq } = proposal;
  const held = view.proposal;
  const linger = proposal.status !== "pending" && waiting.get(id)?.status === "pending" ? { lingers: now() + LINGER_MS } : {};
  if (proposal.status === "pending" || waiting.has(id)) put(waiting, { ...summaryOf(proposal), ...linger });
  if (proposal.status !== "pending" && state.historyLoaded) put(history, summaryOf(proposal));
  if (held?.id === id && held.seq <= seq) view.show(proposal);
  if (mine && proposal.status !== "pending") say(`${proposal.title}: ${proposal.status}.`);
  if (lost) say(`${proposal.title} was ${proposal.status}${proposal.decided_by ? ` by ${proposal.decided_by}` : ""} before yours arrived.`);
  paint();
}

function summaryOf(p) {
  return { ...p, path: p.file?.path, destructive: p.policy.destructive, notes: p.decision?.notes };
}

function put(map, summary) {
  const known = map.get(summary.id);
  if (!known || known.seq <= summary.seq) map.set(summary.id, { ...(known?.lingers ? { lingers: known.lingers } : {}), ...summary });
}

// --- the list ----------------------------------------------------------------------------------------

function listed() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (p) => {
    const said = [p.title, p.asked_by, p.operation, p.path, p.decided_by, p.notes].filter(Boolean).join(" ").toLowerCase();
    return words.every((word) => said.includes(word) || (word.startsWith("p-") && p.id.startsWith(word)));
  };
  if (state.tab === "waiting") {
    return [...waiting.values()].filter(fits).sort((a, b) => Date.parse(a.created_at) - Date.parse(b.created_at) || (a.id < b.id ? -1 : 1));
  }
  return [...history.values()].filter((p) => fits(p) && (!state.statuses.size || state.statuses.has(p.status)))
    .sort((a, b) => endOf(b) - endOf(a) || b.seq - a.seq);
}

const endOf = (p) => Date.parse(p.decided_at || p.expires_at);

function paint() {
  if (state.tab === "running") {
    badge([...waiting.values()].filter((p) => p.status === "pending").length);
    $("waiting-count").textContent = String([...waiting.values()].filter((p) => p.status === "pending").length);
    return;
  }
  const list = $("rows");
  const shown = listed();
  const kept = new Set();
  let before = null;
  for (const summary of shown) {
    const row = rowOf(summary);
    kept.add(summary.id);
    const place = before ? before.nextSibling : list.firstChild;
    if (place !== row) list.insertBefore(row, place);
    before = row;
  }
  for (const [id, row] of rows) if (!kept.has(id)) { row.remove(); rows.delete(id); }
  const open = [...waiting.values()].filter((p) => p.status === "pending").length;
  $("waiting-count").textContent = String(open);
  badge(open);
  $("older").hidden = state.tab !== "history" || !state.hasOlder;
  const searching = $("search").value || state.statuses.size;
  $("nothing").hidden = shown.length > 0;
  $("nothing").textContent = searching ? "Nothing fits the search." : state.tab === "history" ? (state.historyLoaded ? "Nothing has been decided yet." : "Loading…") : "Nothing waits.";
  if (!view.proposal && document.body.dataset.state === "ready") showNothing(open);
}

function rowOf(p) {
  let row = rows.get(p.id);
  const seen = `${p.seq} ${p.status} ${state.tab}`;
  if (!row) {
    row = el("li", { class: "row" });
    rows.set(p.id, row);
  }
  if (row.dataset.seen !== seen) {
    const link = row.querySelector("a") || row.appendChild(el("a", { href: `#/${p.id}` }));
    const what = p.shown.about || "";
    link.replaceChildren(
      el("span", { class: "mark", "aria-hidden": "true" }, MARKS[p.kind] || "·"),
      el("span", { class: "what" },
        el("bdi", { class: "row-title" }, marked(p.shown.title)),
        el("span", { class: "row-more" },
          p.destructive && p.status === "pending" ? [el("span", { class: "danger-mark" }, "destructive"), " "] : null,
          el("bdi", {}, marked(p.shown.asked_by)), what && what !== p.shown.title ? [" · ", el("bdi", { class: "name" }, marked(what))] : null)),
      el("span", { class: "when" },
        p.status === "pending" ? countdown(p) : [pill(p.status), el("span", { class: "row-more" }, p.decided_by ? [el("bdi", {}, p.decided_by === me.name ? "you" : marked(p.shown.decided_by)), " · "] : null, moment(p.decided_at || p.expires_at))]),
      el("span", { class: "sr" }, ` ${p.kind}, ${p.status}`));
    row.dataset.seen = seen;
    row.dataset.id = p.id;
    row.classList.toggle("over", state.tab === "waiting" && p.status !== "pending");
  }
  const current = state.open === p.id;
  const link = row.firstChild;
  if (current) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current");
  return row;
}

/** Decided rows leave once nobody points at the list, and one at a time of rest has passed. */
function sweep() {
  if ($("rows").matches(":hover") && !narrow.matches) return;
  let gone = false;
  for (const [id, p] of waiting) if (p.status !== "pending" && now() > (p.lingers ?? 0) && state.open !== id) gone = waiting.delete(id);
  if (gone) paint();
}

// --- where we are ------------------------------------------------------------------------------------

function place() {
  const [, first = "", second = ""] = location.hash.split("/");
  if (first === "running") return { tab: first, id: second ? decodeURIComponent(second) : null };
  return first === "history" ? { tab: "history", id: second || null } : { tab: null, id: first || null };
}

function go(id, tab = state.tab) {
  const hash = tab !== "waiting" ? `#/${tab}${id ? `/${encodeURIComponent(id)}` : ""}` : id ? `#/${id}` : "#/";
  if (location.hash !== hash) location.hash = hash;
  follow(); // at once: the event comes later, and the next key may come before it
}

async function follow() {
  if (document.body.dataset.state !== "ready") return;
  const { tab, id } = place();
  const switched = (tab || "waiting") !== state.tab;
  if (switched) setTab(tab || "waiting");
  document.body.dataset.view = id ? "detail" : "list";
  if (tab === "running") { state.open = state.asked = null; ++state.wanted; running.open(id); paint(); return; }
  state.open = id;
  paint();
  rows.get(id)?.scrollIntoView({ block: "nearest" });
  if (id && state.asked === id) return; // the event, after we went there ourselves
  const wanted = ++state.wanted;
  state.asked = null;
  if (!id) { view.clear(); paint(); return; }
  if (view.proposal?.id === id) return;
  state.asked = id;
  try {
    const { proposal } = await ask("GET", `/${id}`);
    if (wanted !== state.wanted) return;
    state.asked = null;
    view.show(proposal);
    changed(proposal);
    if (state.then?.id === id) view.open(state.then.mode);
    state.then = null;
  } catch (refusal) {
    if (wanted !== state.wanted) return;
    state.asked = null;
    view.clear(el("div", { class: "blank" }, el("h2", {}, "It cannot be shown"), el("p", {}, complaint(refusal.message)), el("p", {}, el("a", { href: "#/" }, "Back to what waits"))));
    refused(refusal);
  }
}

function setTab(tab) {
  state.tab = tab;
  for (const name of ["waiting", "history", "running"]) $(`tab-${name}`).setAttribute("aria-selected", String(name === tab));
  $("panel").setAttribute("aria-labelledby", `tab-${tab}`);
  $("chips").hidden = tab !== "history";
  $("filter").hidden = tab === "running";
  $("rows").replaceChildren();
  rows.clear();
  delete $("detail").dataset.said;
  if (tab === "running") {
    $("older").hidden = $("nothing").hidden = true;
    view.clear();
  }
  running.show(tab === "running");
  if (tab === "history" && !state.historyLoaded) loadHistory().catch(refused);
}

function showNothing(open) {
  const said = open ? `${open} ${open === 1 ? "proposal waits" : "proposals wait"}` : "Nothing waits for you";
  if ($("detail").dataset.said === said && $("detail").firstChild) return;
  $("detail").dataset.said = said;
  view.clear(el("div", { class: "blank" },
    el("h2", {}, said),
    open ? el("p", {}, "Choose one, or press ", el("kbd", {}, "j"), ".")
      : [el("p", {}, "When an agent asks for something, it appears here by itself. You can leave this page open: its title counts what waits."),
        el("p", { class: "muted" }, "To try it, from a terminal on this machine:"),
        el("pre", {}, "shotclock inbox propose --title \"May I?\" --wait 1m")]));
}

function step(by) {
  if (state.tab === "running") return running.step(by);
  const ids = listed().map((p) => p.id);
  if (!ids.length) return;
  const at = ids.indexOf(state.open);
  const id = ids[at < 0 ? (by > 0 ? 0 : ids.length - 1) : Math.max(0, Math.min(ids.length - 1, at + by))];
  rows.get(id)?.firstChild.focus({ preventScroll: true });
  go(id);
}

// --- small things ------------------------------------------------------------------------------------

function say(words) {
  $("said").textContent = "";
  requestAnimationFrame(() => { $("said").textContent = words; });
}

function refused(refusal) {
  if (refusal.status === 401) signIn();
  else if (refusal.code !== "NO_ANSWER") say(refusal.message);
}

let badged = -1;
function badge(open) {
  document.title = `${open ? `(${open}) ` : ""}Inbox${state.served ? ` · ${state.served}` : ""}`;
  if (open === badged) return;
  badged = open;
  const label = open > 99 ? "99" : String(open);
  const svg = open
    ? `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="8" fill="#1f6feb"/><text x="16" y="23.500" font-family="system-ui,sans-serif" font-size="${label.length > 1 ? 19 : 22}" font-weight="700" fill="#fff" text-anchor="middle">${label}</text></svg>`
    : null;
  $("icon").href = svg ? `data:image/svg+xml,${encodeURIComponent(svg)}` : "/page/icon.svg";
}

const WAYS = {
  link: "Open the link that the server printed where it was started. It works once; after that the server prints the next one.",
  token: "Make a token on the server's machine: shotclock token create NAME --role operator",
};

function signIn(ways = ["token"]) {
  const ended = document.body.dataset.state === "ready";
  if (document.body.dataset.state === "signin") return;
  events.close();
  document.body.dataset.state = "signin";
  $("signin").hidden = false;
  keepPlace();
  $("lost").hidden = true;
  const failed = new URLSearchParams(location.search).get("key") === "used";
  $("signin-why").textContent = ended ? "Your session has ended. What you typed is still there once you are back." : failed ? "That link was used before, or belongs to a server that has ended." : "Agents propose here, people decide. This browser is not known as an operator's.";
  $("signin-how").textContent = ways.map((way) => WAYS[way]).filter(Boolean).join(" ");
  $("token").focus();
}

$("signin-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  $("signin-error").textContent = "";
  try {
    const { proof } = await ask("POST", "/session", { token: $("token").value.trim() });
    keepProof(proof);
    $("token").value = "";
    start();
  } catch (refusal) { $("signin-error").textContent = refusal.message; $("token").select(); }
});

$("sign-out").addEventListener("click", async () => {
  try { await ask("DELETE", "/session"); } catch (refusal) { say(`Still signed in: ${refusal.message}`); return; }
  keepProof("");
  document.body.dataset.state = "starting";
  waiting.clear(); history.clear(); state.historyLoaded = false;
  view.clear(); paint(); signIn();
});

$("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark"
    || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("theme", document.documentElement.dataset.theme); } catch { /* only for this visit, then */ }
});

for (const status of ENDED) {
  const chip = el("button", { type: "button", class: `chip ${status}`, "aria-pressed": "false" }, el("span", { class: "dot", "aria-hidden": "true" }, "●"), ` ${status}`);
  chip.addEventListener("click", () => {
    if (!state.statuses.delete(status)) state.statuses.add(status);
    chip.setAttribute("aria-pressed", String(state.statuses.has(status)));
    paint();
  });
  $("chips").append(chip);
}

$("tab-waiting").addEventListener("click", () => go(null, "waiting"));
$("tab-history").addEventListener("click", () => go(null, "history"));
$("tab-running").addEventListener("click", () => go(null, "running"));
$("search").addEventListener("input", paint);
$("older").addEventListener("click", () => {
  loadHistory(Math.min(...[...history.values()].map((p) => p.seq))).catch(refused);
});
$("lost-now").addEventListener("click", () => events.now());
$("help-open").addEventListener("click", () => $("help").showModal());
$("help").addEventListener("click", (event) => { if (event.target === $("help")) $("help").close(); });
$("rows").addEventListener("click", (event) => {
  const row = event.target.closest("li.row");
  if (state.tab === "running" || !row || event.metaKey || event.ctrlKey || event.shiftKey || event.button) return;
  event.preventDefault();
  go(row.dataset.id);
});
addEventListener("hashchange", follow);

/** Open a form for the proposal that is chosen, which may still be on its way: never for the one shown before it. */
function act(mode) {
  if (state.tab === "running") return;
  if (view.proposal && view.proposal.id === state.open) view.open(mode);
  else state.then = { id: state.open, mode };
}

const KEYS = {
  j: () => step(1), k: () => step(-1), w: () => go(null, "waiting"), h: () => go(null, "history"),
  n: () => go(null, "running"),
  a: () => act("approve"), m: () => act("modify"), r: () => act("reject"), e: () => act("extend"),
  "/": () => $("search").focus(), "?": () => $("help").showModal(),
};

document.addEventListener("keydown", (event) => {
  if (document.body.dataset.state !== "ready" || $("help").open) return;
  const typing = event.target.closest("input, textarea, select");
  if (event.key === "Escape") {
    if (event.target === $("search")) { $("search").value = ""; paint(); $("search").blur(); return; }
    if (!view.close() && narrow.matches && place().id) go(null);
    return;
  }
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && view.mode) { event.preventDefault(); view.submit(); return; }
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  if (event.target === $("search") && (event.key === "Enter" || event.key === "ArrowDown")) { event.preventDefault(); $("search").blur(); step(1); return; }
  if (typing) return;
  if (event.key === "Enter" && state.tab !== "running" && event.target.closest("li.row")) {
    event.preventDefault();
    go(event.target.closest("li.row").dataset.id);
    $("detail").focus({ preventScroll: true });
    return;
  }
  const action = KEYS[event.key];
  if (action) { event.preventDefault(); action(); }
});

setInterval(() => { tick(document); sweep(); if (document.body.dataset.link === "lost") showLost(); }, 1_000);

onProof(() => start());

// The first look says who we are, before a stream is opened that nobody here may be allowed to have.
async function start() {
  try {
    const seq = await load();
    if (document.body.dataset.state === "ready") events.open(seq);
  } catch (refusal) {
    if (refusal.status === 401) signIn();
    else events.open();
  }
}
start();
