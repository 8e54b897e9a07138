// One proposal: what is asked and why, what would change, and the bar below it with which a person decides.

import { Refusal, ask } from "/page/api.js";
import { actionShown, fileChange, textChange } from "/page/change.js";
import { argumentsEditor, fileEditor } from "/page/editor.js";
import { complaint, countdown, el, marked, moment, pill } from "/page/elements.js";

const EXTENSIONS = [["15 minutes", 900_000], ["1 hour", 3_600_000], ["1 day", 86_400_000]];
// What counts as "it is over" when somebody else was faster.
const OVER = new Set(["ALREADY_DECIDED", "PROPOSAL_EXPIRED", "PROPOSAL_WITHDRAWN"]);

// What became of what was approved. Only what is known is said.
const RUNS = {
  not_started: "Approved, waits for the agent to call again, or for its run", running: "Running", succeeded: "Succeeded", failed: "Failed",
  unknown: "It began, and its process is gone: nobody knows how far it came.",
};

// A run on Temporal, and one that still waits, continue by themselves.
function runState({ run, decided_at }) {
  if (run.state === "missed") return run.run_id ? "Not run: its run has ended, or has no time left" : "Not run: the agent did not call again in time";
  const until = run.until ? [" · ", countdown({ created_at: decided_at, expires_at: run.until }, { words: true })] : null;
  if (run.state !== "not_started") return RUNS[run.state];
  if (run.run_id) return ["Not run yet: its run continues by itself, a parked local one with: ", el("code", {}, `shotclock run --resume ${run.run_id}`), until];
  return [run.until ? "Approved, waits for the agent to call again" : RUNS.not_started, until];
}

const namedErrors = (errors) => errors.map(({ field, message }) => `${field.replace(/^arguments\./, "")}: ${message}`).join("; ");

export class ProposalView {
  #drafts = new Map(); // by id: what was typed and not sent survives a look elsewhere, and a lost race
  #proposal = null;
  #editor = null;
  #busy = false;

  constructor(root, { onChange, onBack, onRefused, me }) {
    this.root = root;
    this.onChange = onChange;
    this.onRefused = onRefused;
    this.onBack = onBack;
    this.me = me;
  }

  get proposal() { return this.#proposal; }
  get mode() { return this.#proposal ? this.#draft().mode : null; }

  #draft() {
    const id = this.#proposal.id;
    if (!this.#drafts.has(id)) this.#drafts.set(id, { mode: null, notes: "" });
    return this.#drafts.get(id);
  }

  clear(...nodes) {
    this.#proposal = null;
    this.root.replaceChildren(...nodes);
  }

  /** Show it; what did not change stays as it is, so that nobody loses a cursor or a place. */
  show(proposal) {
    const before = this.#proposal;
    const same = before && before.id === proposal.id;
    // The server reads the file of an open proposal only: a decided one keeps the comparison that was shown.
    if (same && proposal.status !== "pending" && before.shown.file) proposal = { ...proposal, shown: { ...proposal.shown, file: before.shown.file } };
    this.#proposal = proposal;
    if (!same) {
      this.head = el("header", { class: "about" });
      this.body = el("div", { class: "body" });
      this.bar = el("div", { class: "bar" });
      this.root.replaceChildren(el("div", { class: "scroll" }, this.head, this.body), this.bar);
      this.root.firstChild.scrollTop = 0;
    }
    this.#showHead();
    if (!same || before.status !== proposal.status || before.run?.state !== proposal.run?.state) { this.#editor = null; this.#showBody(); this.#showBar(); }
  }

  // --- what is asked ------------------------------------------------------------------------------

  #showHead() {
    const p = this.#proposal;
    const fact = (label, ...value) => el("div", { class: "fact" }, el("span", { class: "label" }, label), el("span", { class: "value" }, ...value));
    const back = el("button", { type: "button", class: "quiet back", onclick: this.onBack }, "‹ All");
    const parts = [
      back,
      el("div", { class: "title" }, el("h2", { id: "proposal-title" }, el("bdi", {}, marked(p.shown.title))), p.status === "pending" ? null : pill(p.status)),
      p.policy.destructive && p.status === "pending" ? el("p", { class: "destructive" }, el("strong", {}, "Destructive."), " What this does cannot be undone. Approving asks you to type its name.") : null,
      el("div", { class: "facts" },
        fact("asked by", el("bdi", {}, marked(p.shown.asked_by))),
        p.status === "pending" ? fact("expires", countdown(p, { words: true })) : null,
        fact("asked", moment(p.created_at)),
        p.policy.deciders.length ? fact("for", marked(p.shown.deciders.join(", "))) : null,
        fact("id", el("code", {}, p.id))),
    ];
    this.head.replaceChildren(...parts.filter(Boolean));
  }

  #showBody() {
    const p = this.#proposal;
    const parts = [];
    if (p.status !== "pending") parts.push(this.#outcome());
    if (p.justification) parts.push(el("section", {}, el("h3", {}, "Reason given"), el("div", { class: "why" }, marked(p.shown.justification))));
    else if (p.kind !== "question") parts.push(el("p", { class: "muted" }, "No reason was given."));
    parts.push(el("section", {}, el("h3", {}, p.status === "pending" ? "What would be done" : "What was proposed"),
      p.kind === "question" ? el("p", {}, "This is a question: the asker gets the answer.") : null, actionShown(p.shown.action)));
    if (p.kind === "file") parts.push(el("section", {}, el("h3", {}, p.status === "pending" ? "What would change" : "What was to change"), fileChange(p.shown.file, { decided: p.status !== "pending" })));
    this.body.replaceChildren(...parts);
  }

  #outcome() {
    const p = this.#proposal, d = p.decision, draft = this.#draft();
    const said = {
      approved: "Approved", modified: "Approved with changes", rejected: "Rejected",
      expired: "Expired: nobody decided in time", withdrawn: "Withdrawn by whoever asked",
    }[p.status];
    const mine = p.decided_by === this.me.name;
    const box = el("section", { class: `outcome ${p.status}` },
      el("p", {}, el("strong", {}, said), p.decided_by ? [" by ", el("bdi", {}, mine ? "you" : marked(p.shown.decided_by)), p.decided_via ? [" via ", el("bdi", {}, marked(p.shown.decided_via))] : null, " · ", moment(p.decided_at)] : null),
      d && d.answer != null ? el("p", { class: "answer" }, "Answer: ", el("strong", {}, marked(p.shown.answer))) : null,
      d && d.notes ? el("blockquote", {}, marked(p.shown.notes)) : null);
    if (p.run) box.append(el("p", { class: `run ${p.run.state}` }, p.status === "expired" ? "It went on, as its rules say. " : null, el("strong", {}, runState(p)),
      p.run.at ? [" · ", moment(p.run.at)] : null,
      p.run.state === "failed" ? [": ", el("code", {}, p.run.code), " ", marked(p.shown.run || "")] : null));
    if (d && p.status === "modified") {
      box.append(el("h3", {}, "What the operator changed"),
        p.kind === "file" ? textChange(p.shown.file.path, p.shown.file.proposed, p.shown.modified) : textChange(p.shown.about, p.shown.action, p.shown.modified));
    }
    if (!draft.sent && (draft.notes || draft.file_text != null || draft.answer)) {
      const kept = el("textarea", { readonly: true, rows: "3", class: "kept", "aria-label": "Your notes, not sent" });
      kept.value = draft.notes || draft.answer || draft.file_text;
      box.append(el("div", { class: "not-sent" }, el("p", {}, el("strong", {}, "This was decided before yours was sent."), " What you had written is kept here:"), kept));
    }
    return box;
  }

  // --- deciding -----------------------------------------------------------------------------------

  /** Open a form in the bar: approve, modify, reject or extend. */
  open(mode) {
    const p = this.#proposal;
    if (!p || p.status !== "pending" || this.#busy || !p.may_decide) return;
    if (mode === "modify" && p.kind === "question") mode = "approve";
    const before = this.#draft().mode;
    this.#draft().mode = mode;
    if (this.#editor && before !== mode) { this.#editor = null; this.#showBody(); }
    this.#showBar();
    this.bar.querySelector("[data-focus]")?.focus();
    if (mode === "modify") this.#editor?.focus();
  }

  /** True if there was something to close. What was typed stays. */
  close() {
    if (!this.#proposal || !this.#draft().mode) return false;
    this.#draft().mode = null;
    if (this.#editor) { this.#editor = null; this.#showBody(); }
    this.#showBar();
    this.root.focus({ preventScroll: true });
    return true;
  }

  #showBar() {
    const p = this.#proposal, mode = this.#draft().mode;
    this.bar.className = `bar ${mode || ""}`;
    if (p.status !== "pending") { this.bar.replaceChildren(); this.bar.hidden = true; return; }
    this.bar.hidden = false;
    if (!p.may_decide) {
      this.bar.replaceChildren(el("p", { class: "muted" }, p.policy.deciders.length ? ["Only ", el("bdi", {}, marked(p.shown.deciders.join(", "))), " may decide this."] : "You may look, but not decide."));
      return;
    }
    const asked = p.kind === "question" ? "approve" : null; // its answers are the actions
    this.bar.replaceChildren(mode === "extend" ? this.#extending() : mode || asked ? this.#form(mode || asked) : this.#choices());
  }

  #button(label, key, kind, action) {
    return el("button", { type: "button", class: kind, "aria-keyshortcuts": key, onclick: action }, label, el("kbd", { "aria-hidden": "true" }, key));
  }

  #choices() {
    return el("div", { class: "actions" },
      this.#button("Approve", "a", "primary", () => this.open("approve")),
      this.#button("Modify", "m", "", () => this.open("modify")),
      this.#button("Reject", "r", "danger", () => this.open("reject")),
      el("span", { class: "spread" }),
      this.#button("Extend", "e", "quiet", () => this.open("extend")));
  }

  #extending() {
    return el("div", { class: "actions", role: "group", "aria-label": "Extend by" },
      el("span", { class: "muted" }, "Extend by"),
      EXTENSIONS.map(([label, ms], i) => el("button", { type: "button", "data-focus": i === 1, onclick: () => this.#send("extend", { by_ms: ms }) }, label)),
      el("span", { class: "spread" }),
      el("button", { type: "button", class: "quiet", onclick: () => this.close() }, "Cancel"));
  }

  #form(mode) {
    const p = this.#proposal, draft = this.#draft();
    const form = el("form", { class: "decide" });
    const error = el("p", { class: "error", role: "alert", "data-place": "form" });
    const parts = [];
    let answer = null, confirmation = null;
    if (mode === "modify") {
      this.#editor = (p.kind === "file" ? fileEditor : argumentsEditor)(p, draft, () => { error.textContent = ""; return this.#check(); });
      this.body.replaceChildren(el("section", {}, el("h3", {}, p.kind === "file" ? "Edit, then approve" : "Change the arguments, then approve"), this.#editor.node));
      this.root.firstChild.scrollTop = 0;
    }
    if (mode === "approve" && p.kind === "question") {
      if (p.choices.length) {
        parts.push(el("div", { class: "answers", role: "group", "aria-label": "Answer" }, p.choices.map((one, i) =>
          el("button", { type: "submit", class: one === p.default ? "choice suggested" : "choice", "data-focus": p.default == null ? i === 0 : one === p.default, onclick: () => { draft.answer = one; } }, el("bdi", {}, marked(p.shown.choices[i]))))));
      } else {
        answer = el("textarea", { rows: "2", "aria-label": "Answer", "data-focus": !p.policy.destructive, placeholder: p.default == null ? "Answer [yes]" : `Answer [yes] (unanswered it counts as: ${p.shown.default.slice(0, 200)})` });
        answer.value = draft.answer ?? "";
        answer.addEventListener("input", () => { draft.answer = answer.value; });
        parts.push(answer);
      }
    }
    if (mode !== "reject" && p.policy.destructive) {
      confirmation = el("input", { autocomplete: "off", autocapitalize: "none", spellcheck: "false", "data-focus": true, "aria-label": `Type ${p.shown.confirmation} to confirm` });
      parts.push(el("label", { class: "confirm" }, el("span", {}, "Type ", el("code", {}, marked(p.shown.confirmation)), " to confirm"), confirmation));
    }
    const notes = el("textarea", { rows: mode === "reject" ? "2" : "1", "aria-label": "Notes", placeholder: mode === "reject" ? "Why not? The agent reads this." : "Notes for the agent (optional)", "data-focus": mode !== "modify" && !answer && !confirmation && !(p.choices.length && mode === "approve") });
    notes.value = draft.notes;
    notes.addEventListener("input", () => { draft.notes = notes.value; });
    parts.push(notes);
    const label = { approve: p.kind === "question" ? "Answer" : "Approve", modify: "Approve with changes", reject: p.kind === "question" ? "Decline" : "Reject" }[mode];
    const answering = mode === "approve" && p.kind === "question";
    const choosing = answering && p.choices.length;
    form.append(...parts, error, el("div", { class: "actions" },
      choosing ? null : el("button", { type: "submit", class: mode === "reject" ? "danger solid" : "primary" }, label),
      answering ? this.#button("Decline", "r", "danger", () => this.open("reject"))
        : el("button", { type: "button", class: "quiet", onclick: () => this.close() }, "Cancel"),
      el("span", { class: "spread" }),
      answering ? this.#button("Extend", "e", "quiet", () => this.open("extend"))
        : el("span", { class: "muted small keys-hint" }, mode === "modify" ? "Ctrl+Enter sends" : "Enter sends, Shift+Enter is a new line")));
    form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.target.tagName !== "BUTTON") { event.preventDefault(); if (!choosing) form.requestSubmit(); }
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      let part = {};
      try { if (mode === "modify") part = this.#editor.read(); } catch (mistake) { this.#editor.show(mistake.errors || []); error.textContent = namedErrors(mistake.errors || []) || mistake.message; return; }
      if (mode === "approve" && p.kind === "question") part = { answer: answer ? answer.value.trim() ? answer.value : "yes" : draft.answer }; // empty: as `inbox approve` without --answer
      const status = { approve: "approved", modify: "modified", reject: "rejected" }[mode];
      this.#send("decision", { status, notes: draft.notes, action_hash: p.action_hash, ...part, ...(confirmation ? { confirmation: confirmation.value } : {}) });
    });
    return form;
  }

  /** Send the form that is open, whatever has the focus. */
  submit() { this.bar.querySelector("form")?.requestSubmit(); }

  async #check() {
    const p = this.#proposal, editor = this.#editor;
    if (!editor) return null;
    let part;
    try { part = editor.read(); } catch (mistake) { editor.show(mistake.errors || []); return null; }
    try {
      const checked = await ask("POST", `/${p.id}/check`, { status: "modified", action_hash: p.action_hash, ...part });
      if (editor !== this.#editor) return null;
      editor.show(checked.errors);
      return checked;
    } catch (refusal) {
      if (editor === this.#editor && refusal.errors?.length) editor.show(refusal.errors);
      return null; // it is checked again when it is sent
    }
  }

  async #send(action, body) {
    const p = this.#proposal, draft = this.#draft();
    if (this.#busy) return;
    this.#busy = true;
    this.bar.classList.add("busy");
    for (const button of this.bar.querySelectorAll("button")) button.disabled = true;
    draft.sent = true; // the event may come before the answer
    try {
      const { proposal } = await ask("POST", `/${p.id}/${action}`, body);
      Object.assign(draft, { mode: null, sent: false });
      if (action === "decision") this.#drafts.delete(p.id);
      this.onChange(proposal, { mine: true });
      if (this.#proposal?.id === p.id) { if (proposal.status === "pending") this.#showBar(); this.root.focus({ preventScroll: true }); }
    } catch (refusal) {
      draft.sent = false;
      await this.#refused(p, refusal);
    } finally {
      this.#busy = false;
      this.bar.classList.remove("busy");
      for (const button of this.bar.querySelectorAll("button")) button.disabled = false;
    }
  }

  async #refused(p, refusal) {
    if (!(refusal instanceof Refusal)) throw refusal;
    if (OVER.has(refusal.code) || refusal.code === "ACTION_CHANGED") {
      try {
        const { proposal } = await ask("GET", `/${p.id}`);
        this.onChange(proposal, { lost: true });
        if (this.#proposal?.id === p.id) this.#showBody(); // the news may have come before the refusal; the notes were held back
        return;
      } catch { /* then at least say what we know */ }
    }
    if (await this.onRefused(refusal) || this.#proposal?.id !== p.id) return;
    const place = this.bar.querySelector("[data-place=form]") || this.bar.appendChild(el("p", { class: "error", role: "alert" }));
    const lost = refusal.code === "NO_ANSWER" ? " It may or may not have arrived: this page will show which, once the server is back. Your notes are kept." : "";
    place.replaceChildren(complaint((namedErrors(refusal.errors) || refusal.message) + lost));
    this.#editor?.show(refusal.errors);
    this.bar.querySelector("[data-focus]")?.focus();
  }
}
