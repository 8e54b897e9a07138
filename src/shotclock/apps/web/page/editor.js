// Modifying: the proposed file as text, or the arguments as a form made from their schema, or as JSON.
//
// Numbers never become JavaScript's: a value is the JSON that the server wrote or the operator typed, and goes back as
// text. What would be done with it is the server's to say.

import { fileChange, textChange } from "/page/change.js";
import { el, marked } from "/page/elements.js";

// How long the hands have to rest before what they typed is compared and checked.
const REST_MS = 250;

/** {node, read(), show(errors)}; `read` gives the part of a decision, or throws a Mistake. */
export class Mistake extends Error {
  constructor(field, message) { super(message); this.errors = [{ field, message }]; }
}

function rested(action) {
  let timer = 0;
  return () => { clearTimeout(timer); timer = setTimeout(action, REST_MS); };
}

const unchanged = () => el("p", { class: "muted" }, "You have changed nothing yet.");

/** `check` asks the server what it makes of it: {errors, modified, form}, or null where it does not answer. */
export function fileEditor(proposal, draft, check) {
  const file = proposal.shown.file;
  const text = el("textarea", { class: "editor code", "aria-label": `New text of ${file.path}`, spellcheck: "false", wrap: "off", rows: "14" });
  text.value = draft.file_text ?? proposal.file.proposed;
  const preview = el("div");
  const show = (after) => preview.replaceChildren(
    el("h3", {}, "With your changes"),
    fileChange(file, { after }),
    after === file.proposed ? unchanged()
      : el("details", {}, el("summary", {}, "What you changed in the proposal"), textChange(file.path, file.proposed, after)));
  const soon = rested(async () => { const checked = await check(); if (checked?.modified != null) show(checked.modified); });
  text.addEventListener("input", () => { draft.file_text = text.value; soon(); });
  show(file.proposed);
  if (draft.file_text != null) soon();
  return { node: el("div", {}, text, preview), focus: () => text.focus(), read: () => ({ file_text: text.value }), show: () => {} };
}

export function argumentsEditor(proposal, draft, check) {
  const holder = el("div", { class: "form" }), preview = el("div");
  let fields = null, json = null;

  const composed = () => {
    const said = fields.map((field) => [field.name, field.read()]).filter(([, text]) => text !== undefined);
    return said.length ? `{\n${said.map(([name, text]) => `  ${JSON.stringify(name)}: ${text}`).join(",\n")}\n}` : "{}";
  };
  const read = () => (fields ? composed() : json.value);
  const showPreview = (after) => preview.replaceChildren(
    after === proposal.shown.action ? unchanged() : textChange(proposal.shown.about, proposal.shown.action, after));
  const soon = rested(async () => {
    show([]);
    const checked = await check();
    if (checked?.modified != null) showPreview(checked.modified);
  });
  const changed = () => {
    try { draft.arguments_text = read(); } catch { /* half typed */ }
    soon();
  };

  function asForm(form) {
    json = null;
    fields = form.map((field) => fieldOf(field, changed));
    holder.replaceChildren(...fields.map((field) => field.node));
    toggle.textContent = "Edit as JSON";
  }
  function asJson(text) {
    fields = null;
    json = el("textarea", { class: "editor code", "aria-label": "Arguments as JSON", spellcheck: "false", rows: "12" });
    json.value = text;
    json.addEventListener("input", changed);
    holder.replaceChildren(json, el("p", { class: "error", "data-field": "arguments" }));
    toggle.textContent = "Edit as a form";
  }
  function show(errors) {
    for (const place of holder.querySelectorAll(".error")) place.textContent = "";
    for (const { field, message } of errors) {
      const name = field.replace(/^arguments\.?/, "");
      const place = [...holder.querySelectorAll(".error")].find((one) => one.dataset.field === name) || (json && holder.querySelector(".error"));
      if (place) place.textContent = json && name ? `${name}: ${message}` : message;
    }
  }
  const toggle = el("button", { type: "button", class: "quiet small" });
  toggle.addEventListener("click", async () => {
    try {
      if (fields) { asJson(read()); return; }
      const checked = await check();
      if (checked?.form.length) asForm(checked.form);
    } catch (mistake) { show(mistake.errors || []); }
  });
  if (draft.arguments_text != null) { asJson(draft.arguments_text); soon(); }
  else if (proposal.form.length) asForm(proposal.form);
  else asJson(proposal.arguments_text ?? "{}");
  toggle.hidden = !proposal.form.length;
  showPreview(proposal.shown.action);
  return {
    node: el("div", {}, holder, el("div", { class: "beside" }, toggle), preview),
    focus: () => holder.querySelector("input, select, textarea")?.focus(),
    read: () => ({ arguments_text: read() }),
    show,
  };
}

let count = 0;

/** One argument: {name, node, read()}. `read` gives JSON as text; `undefined` is "not given". */
function fieldOf(field, changed) {
  const id = `field-${++count}`;
  const [control, read] = controlOf(field);
  control.id = id;
  control.addEventListener(control.tagName === "SELECT" ? "change" : "input", changed);
  return {
    name: field.name, read,
    node: el("div", { class: "field" },
      el("label", { for: id }, el("bdi", { class: "name" }, marked(field.label)), field.required && el("span", { class: "muted" }, " required")),
      control,
      field.description && el("p", { class: "muted small" }, marked(field.description)),
      el("p", { class: "error", role: "alert", "data-field": field.name })),
  };
}

function controlOf({ name, text, kind, options, required }) {
  const given = text !== null;
  options ??= kind === "boolean" ? ["true", "false"] : null;
  if (options) {
    const all = !given || options.includes(text) ? options : [...options, text];
    const select = el("select", {}, !required || !given ? el("option", { value: "" }, "not set") : null,
      all.map((one, i) => el("option", { value: String(i) }, one.startsWith('"') ? JSON.parse(one) : one)));
    select.value = given ? String(all.indexOf(text)) : "";
    return [select, () => (select.value === "" ? undefined : all[Number(select.value)])];
  }
  if (kind === "string" && (!given || text.startsWith('"'))) {
    const value = given ? JSON.parse(text) : "";
    const long = value.includes("\n") || value.length > 80;
    const input = el(long ? "textarea" : "input", { spellcheck: "false", autocomplete: "off", placeholder: given ? "" : "not set", rows: long ? "6" : null });
    input.value = value;
    // A browser may change what it is given, line ends for one: what nobody touched stays as it was.
    const shown = input.value;
    return [input, () => (input.value === shown && given ? text : input.value === "" && !given ? undefined : JSON.stringify(input.value))];
  }
  if (kind === "number" || kind === "integer") {
    const input = el("input", { inputmode: kind === "integer" ? "numeric" : "decimal", autocomplete: "off", placeholder: given ? "" : "not set" });
    input.value = text ?? "";
    return [input, () => {
      const typed = input.value.trim();
      if (typed === "") { if (!given || !required) return undefined; throw new Mistake(`arguments.${name}`, "a number is needed"); }
      if (typed !== text && !/^-?\d+(\.\d+)?([eE][-+]?\d+)?$/.test(typed)) throw new Mistake(`arguments.${name}`, "this is no number");
      return typed;
    }];
  }
  const input = el("textarea", { class: "code", rows: String(Math.min(10, Math.max(2, (text ?? "").split("\n").length))), spellcheck: "false", placeholder: given ? "JSON" : "not set" });
  input.value = text ?? "";
  return [input, () => {
    if (input.value.trim() === "") return undefined;
    try { JSON.parse(input.value); } catch (error) { throw new Mistake(`arguments.${name}`, `no JSON: ${error.message}`); }
    return input.value;
  }];
}
