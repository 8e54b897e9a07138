// The one way to the server: requests that end, problems that say what is wrong, and events that come back.

// Longer than any wait of the server's for a request of this page; a server that hangs is told apart from one that works.
const ANSWER_WITHIN_MS = 45_000;
// Heartbeats come every 15 s: silence of this length is a connection that nobody is on the other end of.
const SILENCE_MS = 40_000;
const RETRY_MS = [400, 800, 1_500, 3_000, 5_000];

export class Refusal extends Error {
  constructor(status, code, message, error = {}) {
    super(message);
    Object.assign(this, { status, code, errors: error.errors || [], context: error.context || {}, suggestion: error.suggestion });
  }
}

// The half of the session that other ports of this host never see: storage belongs to this origin alone.
let proof = "";
try { proof = localStorage.getItem("proof") || ""; } catch { /* switched off: then signing in lasts for this visit */ }

export function keepProof(text) {
  proof = text;
  try { if (text) localStorage.setItem("proof", text); else localStorage.removeItem("proof"); } catch { /* as above */ }
}

/** Called when another page of this browser has signed in or out. */
export function onProof(changed) {
  addEventListener("storage", (event) => {
    if (event.key !== "proof") return;
    proof = event.newValue || "";
    changed();
  });
}

/** Remember the place in the page that this tab was opened at before it was signed in: the printed link returns to it. */
export function keepPlace() {
  try { if (location.hash.startsWith("#/")) sessionStorage.setItem("place", location.hash); } catch { /* then it opens the list */ }
}

function takePlace() {
  try {
    const place = sessionStorage.getItem("place") || "";
    sessionStorage.removeItem("place");
    return place.startsWith("#/") ? place : "";
  } catch { return ""; }
}

if (location.hash.startsWith("#proof=")) {
  const fresh = location.hash.slice(7);
  window.history.replaceState(null, "", `/${takePlace()}`);
  // Anybody can make such a link: one that does not belong to our cookie must not take the place of the one that does.
  if (!proof || (await isOperators(fresh))) keepProof(fresh);
}

async function isOperators(proof) {
  try {
    const response = await fetch("/api/inbox?limit=1", { headers: { "Shotclock-Proof": proof }, signal: AbortSignal.timeout(ANSWER_WITHIN_MS) });
    return (await response.json()).data.principal.role === "operator";
  } catch { return false; }
}

const headers = (more = {}) => ({ Accept: "application/json", "Shotclock-Proof": proof, ...more });

export const ask = (method, path, body) => request(method, `/api/inbox${path}`, body);

/** What runs now, and what is said to it. */
export const askRunning = (method, path = "", body = undefined) => request(method, `/api/running${path}`, body);

async function request(method, path, body) {
  let response, document;
  try {
    response = await fetch(path, {
      method,
      headers: headers(body === undefined ? {} : { "Content-Type": "application/json" }),
      body: body === undefined ? undefined : JSON.stringify(body),
      credentials: "same-origin",
      cache: "no-store",
      signal: AbortSignal.timeout(ANSWER_WITHIN_MS),
    });
    document = await response.json();
  } catch {
    throw new Refusal(0, "NO_ANSWER", "The server did not answer.");
  }
  const envelope = document.envelope || document;
  if (envelope.ok) return envelope.data;
  const error = envelope.error || {};
  throw new Refusal(response.status, error.code || "UNKNOWN", error.message || `The server answered ${response.status}.`, error);
}

/** Events of the inbox for as long as the page lives. Comes back by itself, from where it was.
 *
 * Read with fetch, because an EventSource cannot send our half of the session. */
export class Events {
  #abort = null;
  #after = null;
  #tries = 0;
  #timer = 0;
  #silence = 0;

  constructor({ onHello, onAlive, onProposal, onReminder, onLost, onRefused }) {
    this.on = { hello: onHello, alive: onAlive, proposal: onProposal, reminder: onReminder };
    this.onLost = onLost;
    this.onRefused = onRefused;
    addEventListener("online", () => this.now());
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.now(); });
    addEventListener("pagehide", () => this.close());
    addEventListener("pageshow", (event) => { if (event.persisted) this.open(); });
  }

  /** `after` is the number of the last change that we know of. */
  async open(after = this.#after) {
    this.close();
    this.#after = after;
    const abort = new AbortController();
    this.#abort = abort;
    this.#listen();
    try {
      const response = await fetch(`/api/inbox/events${after === null ? "" : `?after=${after}`}`, {
        headers: headers({ Accept: "text/event-stream" }), credentials: "same-origin", cache: "no-store", signal: abort.signal,
      });
      if (response.status === 401 && abort === this.#abort) { this.close(); this.onRefused(); return; }
      if (!response.ok) throw new Error(String(response.status));
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let rest = "", piece = await reader.read(); !piece.done; piece = await reader.read()) {
        this.#listen();
        const events = (rest + piece.value).split("\n\n");
        rest = events.pop();
        for (const event of events) if (abort === this.#abort) this.#heard(event);
      }
    } catch { /* whatever it was, it ends the same way */ }
    if (abort === this.#abort) this.#lost();
  }

  close() {
    clearTimeout(this.#timer);
    clearTimeout(this.#silence);
    this.#timer = 0;
    const abort = this.#abort;
    this.#abort = null;
    abort?.abort();
  }

  /** Try at once, if we are between two tries. */
  now() { if (this.#timer) this.open(); }

  #heard(text) {
    const fields = Object.fromEntries(text.split("\n").map((line) => [line.slice(0, line.indexOf(": ")), line.slice(line.indexOf(": ") + 2)]));
    if (fields.id) this.#after = fields.id;
    if (fields.event === "hello") this.#tries = 0;
    this.on[fields.event]?.(JSON.parse(fields.data));
  }

  #listen() {
    clearTimeout(this.#silence);
    this.#silence = setTimeout(() => this.#lost(), SILENCE_MS);
  }

  #lost() {
    this.close();
    const base = RETRY_MS[Math.min(this.#tries++, RETRY_MS.length - 1)];
    const wait = base * (0.8 + 0.4 * Math.random());
    this.onLost(wait);
    this.#timer = setTimeout(() => this.open(), wait);
  }
}
