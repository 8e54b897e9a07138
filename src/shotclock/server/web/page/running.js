// What runs now: runs with their steps, jobs and calls of this server, their clocks, and what is decided about them.

import { askRunning } from "/page/api.js";
import { age, complaint, countdown, el, moment, setClock, span } from "/page/elements.js";

// How clocks stand is known to the processes that hold them, and they tell nobody of a change: so they are asked. Clocks run
// down here by themselves in between; this is how soon something new is seen. How old it is, is shown.
const LOOK_EVERY_MS = 1_500;
// What a button gives at once.
const AMOUNTS = [["+30 s", 30_000], ["+5 m", 300_000], ["+1 h", 3_600_000]];
// How long a button that ends something waits for the second press.
const SURE_MS = 4_000;
const KINDS = { run: "Run", job: "Job", call: "Call" };
const MARKS = { run: "⟳", job: "◍", call: "▸" };

export class RunningView {
  #list; #detail; #on;
  #items = [];
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
    const ids = this.#items.map((item) => item.id);
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
      ];
      this.#loaded = true;
    } catch (refusal) {
      if (await this.#on.onRefused(refusal)) return;
      this.#lost = refusal.message;
    }
    this.#on.onCount(this.#items.length);
    this.#paint();
    if (this.#isShown) this.#timer = setTimeout(() => this.#look(), LOOK_EVERY_MS);
  }

  #paint() {
    if (!this.#isShown) return;
    const had = document.activeElement?.dataset?.key;
    this.#list.replaceChildren(...this.#items.map((item) => this.#row(item)));
    const item = this.#items.find((one) => one.id === this.#open);
    this.#detail.replaceChildren(item ? this.#page(item) : this.#blank());
    if (had) [...document.querySelectorAll("[data-key]")].find((node) => node.dataset.key === had)?.focus({ preventScroll: true });
  }

  #row(item) {
    const link = el("a", { href: `#/running/${encodeURIComponent(item.id)}`, "data-key": `row ${item.id}` },
      el("span", { class: "mark", "aria-hidden": "true" }, MARKS[item.kind]),
      el("span", { class: "what" },
        el("bdi", { class: "row-title" }, complaint(item.name)),
        el("span", { class: "row-more" }, describe(item))),
      el("span", { class: "when" }, clockOf(item)),
      el("span", { class: "sr" }, ` ${KINDS[item.kind]}, running`));
    if (item.id === this.#open) link.setAttribute("aria-current", "true");
    return el("li", { class: "row" }, link);
  }

  #blank() {
    const words = !this.#loaded ? "Looking…" : this.#open ? "It does not run any more" : this.#items.length ? `${this.#items.length} running` : this.#lost ? "What runs is not known" : "Nothing runs now";
    return el("div", { class: "blank" }, el("h2", {}, words),
      this.#trouble(),
      this.#open ? el("p", {}, el("a", { href: "#/running" }, "Back to what runs")) : null,
      this.#loaded && !this.#items.length ? el("p", {}, "Runs, jobs and calls of this server appear here while they are under way.") : null);
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

  #step(run, step) {
    const call = step.calls[0];
    const more = step.calls.length > 1 ? ` × ${step.calls.length}` : "";
    return el("li", { class: `step ${step.status}` },
      el("div", { class: "step-head" },
        el("bdi", { class: "name" }, complaint(step.id)), el("span", { class: "muted" }, `${step.status.replace("_", " ")}${more}`),
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

function describe(item) {
  const steps = item.steps?.filter((step) => step.calls.length || step.status === "running").map((step) => step.id) ?? [];
  const said = item.call?.winding_down ? "winding down" : steps.length ? steps.slice(0, 3).join(", ") + (steps.length > 3 ? " …" : "") : item.kind;
  return complaint(said);
}

function clockOf(item, isLong = false) {
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
