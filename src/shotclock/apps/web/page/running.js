// What runs now: runs with their steps, jobs and calls of this server, their clocks, and what is decided about them.
// Below: open calls of wrapped MCP servers, and calls of them that failed in the last hour. They are only shown.

import { askRunning } from "/page/api.js";
import { age, complaint, countdown, el, moment, setClock, span } from "/page/elements.js";

// How clocks stand is known to the processes that hold them, and they tell nobody of a change: so they are asked. Clocks run
// down here by themselves in between; this is how soon something new is seen. How old it is, is shown.
const LOOK_EVERY_MS = 1_500;
// What a button gives at once.
const AMOUNTS = [["+30 s", 30_000], ["+5 m", 300_000], ["+1 h", 3_600_000]];
// How long a button that ends something waits for the second press.
const SURE_MS = 4_000;
const KINDS = { run: "Run", job: "Job", call: "Call", wrapped: "Call of an MCP server", failed: "Failed call of an MCP server" };
const MARKS = { run: "⟳", job: "◍", call: "▸", wrapped: "▸", failed: "✕" };
// Calls of wrapped servers that are not under way, in words.
const OUTCOMES = {
  waiting: "waits for its server, or for an approval", unknown: "may still run: its process cannot be seen from here",
  lost: "shotclock wrap was killed during the call, so how it ended is not known", tool_error: "error of the tool", error: "error of the protocol",
  TIMEOUT: "timeout reached", STALLED: "idle limit reached", QUEUE_TIMEOUT: "the server was not ready in time",
  CANCELLED: "cancelled by the client", CONNECTION_LOST: "the server ended",
};
const LIMITS = { timeout: "timeout", idle: "idle limit", queue: "limit for the server to be ready" };

export class RunningView {
  #list; #detail; #on;
  #items = [];
  #failed = [];
  #failedCommand = "";
  #hidden = 0; // open calls beyond those that are listed
  #kept = { key: "", node: null }; // the page of a call: not drawn again while it is the same, so that text can be selected
  #open = null;
  #timer = 0;
  #isShown = false;
  #loaded = false;
  #said = ""; // what a button was answered
  #lost = ""; // why what is shown is not what is there now
  #seenAt = null;
  #sure = new Map(); // what is to be wound down, once it is pressed again → until when

  constructor(list, detail, on) {
    this.#list = list;
    this.#detail = detail;
    this.#on = on;
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.#look(); });
  }

  /** Begin to look, or stop it. */
  show(isShown) {
    this.#isShown = isShown;
    clearTimeout(this.#timer);
    if (isShown) this.#look();
  }

  open(id) {
    this.#open = id;
    this.#said = "";
    this.#paint();
  }

  step(by) {
    const ids = [...this.#items, ...this.#failed].map((item) => item.id);
    if (!ids.length) return;
    const at = ids.indexOf(this.#open);
    this.#on.onOpen(ids[at < 0 ? (by > 0 ? 0 : ids.length - 1) : Math.max(0, Math.min(ids.length - 1, at + by))]);
  }

  async #look() {
    clearTimeout(this.#timer);
    if (!this.#isShown || document.hidden) return;
    try {
      const data = await askRunning("GET");
      setClock(data.now);
      this.#seenAt = data.now;
      this.#lost = data.engine?.problem ?? "";
      this.#items = [
        ...data.runs.map((run) => ({ kind: "run", ...run })),
        ...data.jobs.map((job) => ({ kind: "job", ...job })),
        ...data.calls.map((call) => ({ kind: "call", id: call.request_id, name: call.name, started_at: call.started_at, call })),
        ...data.wrapped.map((call) => ({ kind: "wrapped", ...call, name: call.tool || "(no name)" })),
      ];
      this.#failed = data.failed.map((call) => ({ kind: "failed", ...call, name: call.tool || "(no name)" }));
      this.#failedCommand = data.failed_has_more ? data.failed_command : "";
      this.#hidden = data.wrapped_count - data.wrapped.length;
      this.#loaded = true;
    } catch (refusal) {
      if (await this.#on.onRefused(refusal)) return;
      this.#lost = refusal.message;
    }
    this.#on.onCount(this.#items.length + this.#hidden);
    this.#paint();
    if (this.#isShown) this.#timer = setTimeout(() => this.#look(), LOOK_EVERY_MS);
  }

  #paint() {
    if (!this.#isShown) return;
    const had = document.activeElement?.dataset?.key;
    this.#list.replaceChildren(
      ...this.#items.map((item) => this.#row(item)),
      ...(this.#failed.length && !this.#items.length ? [note("Nothing runs now.")] : []),
      ...(this.#hidden ? [note(`and ${this.#hidden} more open calls: `, "shotclock mcp log --running --limit 10000")] : []),
      ...(this.#failed.length ? [el("li", { class: "rows-head" }, el("h2", {}, "Failed in the last hour"))] : []),
      ...this.#failed.map((item) => this.#row(item)),
      ...(this.#failedCommand ? [note("There may be more: ", this.#failedCommand)] : []));
    this.#on.onEmpty(this.#loaded && !this.#items.length && !this.#failed.length);
    const item = [...this.#items, ...this.#failed].find((one) => one.id === this.#open);
    if (item?.kind === "wrapped" || item?.kind === "failed") this.#paintCall(item);
    else this.#detail.replaceChildren(item ? this.#page(item) : this.#blank());
    if (had) [...document.querySelectorAll("[data-key]")].find((node) => node.dataset.key === had)?.focus({ preventScroll: true });
  }

  #row(item) {
    const link = el("a", { href: `#/running/${encodeURIComponent(item.id)}`, "data-key": `row ${item.id}` },
      el("span", { class: "mark", "aria-hidden": "true" }, MARKS[item.kind]),
      el("span", { class: "what" },
        el("bdi", { class: "row-title" }, complaint(item.name)),
        el("span", { class: "row-more" }, describe(item))),
      el("span", { class: "when" }, item.kind === "failed" ? [outcomePill(item), el("span", { class: "row-more" }, moment(item.ended_at ?? item.started_at))] : clockOf(item)),
      el("span", { class: "sr" }, ` ${KINDS[item.kind]}, ${item.outcome ?? "running"}`));
    if (item.id === this.#open) link.setAttribute("aria-current", "true");
    return el("li", { class: "row" }, link);
  }

  #blank() {
    const words = !this.#loaded ? "Looking…" : this.#open ? "It does not run any more" : this.#items.length ? `${this.#items.length} running` : this.#lost ? "What runs is not known" : "Nothing runs now";
    return el("div", { class: "blank" }, el("h2", {}, words),
      this.#trouble(),
      this.#open ? el("p", {}, el("a", { href: "#/running" }, "Back to what runs")) : null,
      this.#loaded && !this.#items.length ? el("p", {}, "Runs, jobs, calls of this server and calls of MCP servers behind ", el("code", {}, "shotclock wrap"), " appear here while they are under way.") : null);
  }

  #trouble() {
    const said = this.#lost || this.#said;
    if (!said) return null;
    return el("p", { class: "error", role: "alert" }, complaint(said), this.#lost && this.#seenAt ? [" Shown as it was ", age(this.#seenAt), "."] : null);
  }

  #page(item) {
    const facts = [
      el("div", { class: "fact" }, el("span", { class: "label" }, "began"), moment(item.started_at)),
      el("div", { class: "fact" }, el("span", { class: "label" }, "time left"), clockOf(item, true)),
      el("div", { class: "fact" }, el("span", { class: "label" }, "as of"), age(this.#seenAt)),
      el("div", { class: "fact" }, el("span", { class: "label" }, "id"), el("bdi", { class: "name" }, complaint(item.id))),
    ];
    const target = item.kind === "call" ? { request_id: item.id } : { [item.kind]: item.id };
    return el("div", { class: "scroll" },
      el("button", { class: "quiet back", type: "button", onclick: this.#on.onBack }, "‹ Running"),
      el("div", { class: "title" }, el("h2", {}, el("bdi", {}, complaint(item.name))), el("span", { class: "pill pending" }, item.kind)),
      el("div", { class: "facts" }, facts),
      this.#trouble(),
      el("div", { class: "body" },
        item.call ? el("section", {}, news(item.call), this.#buttons(target, item.call, item.name))
          : el("p", { class: "muted" }, "Its process does not answer: how its clocks stand is not known."),
        item.steps ? el("section", {}, el("h3", {}, "Steps"), el("ul", { class: "steps" }, item.steps.map((step) => this.#step(item, step)))) : null));
  }

  #paintCall(item) {
    const { duration_ms, ...fixed } = item;
    const key = JSON.stringify([fixed, this.#lost, this.#said]);
    if (key !== this.#kept.key || this.#kept.node.parentNode !== this.#detail) {
      this.#kept = { key, node: this.#callPage(item) };
      this.#detail.replaceChildren(this.#kept.node);
    }
    this.#kept.node.querySelector("[data-as-of]")?.setAttribute("data-as-of", this.#seenAt);
    this.#kept.node.querySelector(".since")?.replaceChildren(span(duration_ms));
  }

  /** One call of a wrapped server. */
  #callPage(item) {
    const isOpen = item.kind === "wrapped";
    const facts = [
      ["server", el("bdi", { class: "name" }, complaint(item.server))],
      ["began", moment(item.started_at)],
      isOpen ? ["open for", el("span", { class: "since" })] : null,
      isOpen ? ["time left", clockOf(item, true)] : ["took", item.duration_ms == null ? "not known" : short(item.duration_ms)],
      ["timeout", item.timeout_ms ? span(item.timeout_ms) : "none"],
      ["idle limit", item.idle_ms ? span(item.idle_ms) : "none"],
      isOpen ? ["as of", age(this.#seenAt)] : null,
      ["process of shotclock wrap", String(item.pid)],
      item.call_id ? ["id", el("bdi", { class: "name" }, complaint(item.call_id))] : null,
    ];
    return el("div", { class: "scroll" },
      el("button", { class: "quiet back", type: "button", onclick: this.#on.onBack }, "‹ Running"),
      el("div", { class: "title" }, el("h2", {}, el("bdi", {}, complaint(item.name))), outcomePill(item)),
      el("div", { class: "facts" }, facts.filter(Boolean).map(([label, value]) =>
        el("div", { class: "fact" }, el("span", { class: "label" }, label), el("span", {}, value)))),
      this.#trouble(),
      el("div", { class: "body" },
        el("section", {}, el("p", {}, sentence(item))),
        el("section", {}, el("h3", {}, "More about it"), el("pre", { class: "action", tabindex: "0", role: "region", "aria-label": "Command that lists such calls" }, complaint(item.more)))));
  }

  #step(run, step) {
    const call = step.calls[0];
    const more = step.calls.length > 1 ? ` × ${step.calls.length}` : "";
    return el("li", { class: `step ${step.status}` },
      el("div", { class: "step-head" },
        el("bdi", { class: "name" }, complaint(step.id)), el("span", { class: "muted" }, step.waits_for.length ? ["waits for ", ...step.waits_for.slice(0, 3).flatMap((id) => [el("a", { href: `#/${encodeURIComponent(id)}` }, id), " "])] : `${step.status.replace("_", " ")}${more}`),
        step.duration_ms != null ? el("span", { class: "muted" }, span(step.duration_ms)) : null,
        el("span", { class: "spread" }),
        call ? clock(call, call.remaining_ms, true) : null),
      call ? news(call) : step.overtime.length ? el("ul", { class: "news" }, step.overtime.map((told) => el("li", {}, complaint(words(told))))) : null,
      call ? this.#buttons({ run: run.id, step: step.id }, call, step.id) : null);
  }

  #buttons(target, call, name) {
    const key = JSON.stringify(target);
    if (call.winding_down) return null;
    const sure = (this.#sure.get(key) ?? 0) > Date.now();
    return el("div", { class: "actions" },
      call.remaining_ms == null ? null : AMOUNTS.map(([label, by_ms]) => el("button", {
        type: "button", "data-key": `${key} ${label}`, title: `Give ${name} more time`, onclick: () => this.#tell("extend", { ...target, by_ms }, `${name}: ${label}`),
      }, label)),
      el("button", {
        type: "button", class: `danger${sure ? " solid" : ""}`, "data-key": `${key} stop`, onclick: () => {
          if (sure) { this.#sure.delete(key); this.#tell("stop", target, `${name} winds down`); return; }
          this.#sure.set(key, Date.now() + SURE_MS);
          this.#paint();
        },
      }, sure ? "Wind down: press again" : "Wind down"));
  }

  async #tell(what, body, said) {
    this.#said = "";
    try {
      await askRunning("POST", `/${what}`, body);
      this.#on.say(said);
    } catch (refusal) {
      if (await this.#on.onRefused(refusal)) return;
      this.#said = refusal.message;
      this.#on.say(refusal.message);
    }
    await this.#look();
  }
}

/** The outcome of a call as its code or word, which `shotclock mcp log` uses too. */
function outcomePill(item) {
  const look = item.outcome === "running" ? "pending" : ["waiting", "unknown", "CANCELLED"].includes(item.outcome) ? "withdrawn" : "rejected";
  return el("span", { class: `pill ${look}` }, item.outcome.toLowerCase().replaceAll("_", " "));
}

function sentence(item) {
  if (item.kind === "failed") return `${capital(OUTCOMES[item.outcome] ?? `failed with ${item.outcome}`)}.`;
  const state = item.outcome === "running" ? "The server has this call." : `${capital(`this call ${OUTCOMES[item.outcome]}`)}.`;
  return item.due_by ? `${state} Its ${LIMITS[item.due_by]} is reached next; it is answered with an error then.` : state;
}

const capital = (text) => text[0].toUpperCase() + text.slice(1);
const short = (ms) => (ms < 1_000 ? `${ms} ms` : span(ms));
const note = (text, command) => el("li", { class: "rows-note muted" }, text, command ? el("code", {}, command) : null);

function describe(item) {
  const steps = item.steps?.filter((step) => step.calls.length || step.status === "running").map((step) => step.id) ?? [];
  if (item.server !== undefined) {
    const server = el("bdi", {}, complaint(item.server));
    if (item.kind === "wrapped") return item.outcome === "running" ? [server, ` · for ${span(item.duration_ms)}`] : [`${item.outcome} · `, server];
    return item.duration_ms == null ? server : [server, ` · took ${short(item.duration_ms)}`];
  }
  const waits = item.steps?.flatMap((step) => step.waits_for) ?? [];
  const said = waits.length ? `waits for ${waits.slice(0, 3).join(", ")}` : item.call?.winding_down ? "winding down" : steps.length ? steps.slice(0, 3).join(", ") + (steps.length > 3 ? " …" : "") : item.kind;
  return complaint(said);
}

function clockOf(item, isLong = false) {
  if (item.kind === "wrapped") return item.due_at ? countdown({ created_at: item.started_at, expires_at: item.due_at }, { words: isLong }) : el("span", { class: "muted" }, "no limit");
  if (item.call) return clock(item.call, item.call.remaining_ms, isLong);
  return el("span", { class: "muted" }, "unknown");
}

/** What is left of a call, running down; where it winds down, of that. */
function clock(call, remaining_ms, isLong) {
  const left = call.winding_down ? call.winding_down.remaining_ms : remaining_ms;
  if (left == null) return el("span", { class: "muted" }, "no limit");
  const began = Date.parse(call.started_at);
  const until = began + call.elapsed_ms + left;
  return countdown({ created_at: new Date(began).toISOString(), expires_at: new Date(until).toISOString() }, { words: isLong });
}

function news(call) {
  const said = (call.overtime?.requests ?? []).map((request) => words({ event: "overtime", ...request }));
  if (call.soft_ms != null && !call.winding_down) said.push(`soft clock in ${span(call.soft_ms)}${call.overtime?.budget_ms ? `, ${span(call.overtime.budget_ms - call.overtime.used_ms)} of overtime left` : ""}`);
  if (call.winding_down) said.push(`winding down: ${call.winding_down.reason}`);
  if (call.progress) said.push(`progress: ${call.progress.done}${call.progress.total ? ` of ${call.progress.total}` : ""}${call.progress.message ? ` ${call.progress.message}` : ""}`);
  return said.length ? el("ul", { class: "news" }, said.map((text) => el("li", {}, complaint(text)))) : null;
}

/** What was decided about the time of a call, in words. */
function words(told) {
  const why = told.reason ? `: ${told.reason}` : "";
  if (told.event === "wind_down") return `wound down by the ${told.by}${why}`;
  if (told.verdict === "granted") return told.asked_by === "soft clock" || told.asked_by === "call" ? `${span(told.granted_ms)} of overtime granted${why}` : `${span(told.granted_ms)} more by ${told.asked_by}`;
  return `overtime ${told.verdict}${why}`;
}
