// Modifying: the proposed file as text, or the arguments as a form made from their schema, or as JSON.

import { argumentsShown, asText, fileChange } from "/page/change.js";
import { el, visible } from "/page/elements.js";

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

export function fileEditor(proposal, draft, check) {
  const text = el("textarea", { class: "editor code", "aria-label": `New text of ${proposal.file.path}`, spellcheck: "false", wrap: "off", rows: "14" });
  text.value = draft.file_text ?? proposal.file.proposed;
  const preview = el("div");
  const show = () => preview.replaceChildren(
    el("h3", {}, "With your changes"),
    fileChange(proposal.file.path, proposal.file.current, text.value),
    text.value === proposal.file.proposed ? el("p", { class: "muted" }, "You have changed nothing yet.")
      : el("details", {}, el("summary", {}, "What you changed in the proposal"), fileChange(proposal.file.path, proposal.file.proposed, text.value)));
  const soon = rested(() => { show(); check(); });
  text.addEventListener("input", () => { draft.file_text = text.value; soon(); });
  show();
  return { node: el("div", {}, text, preview), focus: () => text.focus(), read: () => ({ file_text: text.value }), show: () => {} };
}

export function argumentsEditor(proposal, draft, check) {
  const given = proposal.arguments || {};
  const schema = proposal.input_schema || {};
  const properties = (typeof schema.properties === "object" && schema.properties) || {};
  const required = new Set(Array.isArray(schema.required) ? schema.required : []);
  const names = [...new Set([...Object.keys(given), ...Object.keys(properties)])];
  const holder = el("div", { class: "form" }), preview = el("div");
  let fields = null, json = null;

  const read = () => (fields ? Object.fromEntries(fields.map((field) => [field.name, field.read()]).filter(([, value]) => value !== undefined)) : parsed(json.value, "arguments"));
  const showPreview = () => {
    try {
      const now = read();
      preview.replaceChildren(asText(now) === asText(given) ? el("p", { class: "muted" }, "You have changed nothing yet.") : argumentsShown(given, now));
    } catch (mistake) {
      preview.replaceChildren();
      show(mistake.errors || []);
    }
  };
  const soon = rested(() => { show([]); showPreview(); check(); });
  const changed = () => {
    try { draft.arguments = read(); } catch { /* half typed */ }
    soon();
  };

  function asForm(values) {
    json = null;
    fields = names.map((name) => fieldOf(name, properties[name] || {}, values[name], required.has(name), changed));
    holder.replaceChildren(...fields.map((field) => field.node));
    toggle.textContent = "Edit as JSON";
  }
  function asJson(values) {
    fields = null;
    json = el("textarea", { class: "editor code", "aria-label": "Arguments as JSON", spellcheck: "false", rows: "12" });
    json.value = asText(values);
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
  toggle.addEventListener("click", () => {
    try { const values = read(); if (fields) asJson(values); else asForm(values); } catch (mistake) { show(mistake.errors || []); }
  });
  if (names.length) asForm(draft.arguments ?? given); else asJson(draft.arguments ?? given);
  toggle.hidden = !names.length;
  showPreview();
  return {
    node: el("div", {}, holder, el("div", { class: "beside" }, toggle), preview),
    focus: () => holder.querySelector("input, select, textarea")?.focus(),
    read: () => ({ arguments: read() }),
    show,
  };
}

function parsed(text, field) {
  try { return JSON.parse(text); } catch (error) { throw new Mistake(field, `no JSON: ${error.message}`); }
}

let count = 0;

/** One argument: {name, node, read()}. `undefined` is "not given". */
function fieldOf(name, schema, value, required, changed) {
  const id = `field-${++count}`;
  const kinds = [].concat(schema.type ?? (value === undefined ? [] : kindOf(value)));
  const [control, read] = controlOf(name, schema, kinds, value, required);
  control.id = id;
  control.addEventListener(control.tagName === "SELECT" ? "change" : "input", changed);
  const about = typeof schema.description === "string" && schema.description;
  return {
    name, read,
    node: el("div", { class: "field" },
      el("label", { for: id }, el("bdi", { class: "name" }, visible(name)), required && el("span", { class: "muted" }, " required")),
      control,
      about && el("p", { class: "muted small" }, visible(about)),
      el("p", { class: "error", role: "alert", "data-field": name })),
  };
}

const kindOf = (value) => (value === null ? "null" : Array.isArray(value) ? "array" : typeof value);

function controlOf(name, schema, kinds, value, required) {
  const options = Array.isArray(schema.enum) ? schema.enum : kinds.length === 1 && kinds[0] === "boolean" ? [true, false] : null;
  if (options) {
    const all = options.some((one) => asText(one) === asText(value)) || value === undefined ? options : [...options, value];
    const select = el("select", {}, !required || value === undefined ? el("option", { value: "" }, "not set") : null,
      all.map((one, i) => el("option", { value: String(i) }, typeof one === "string" ? visible(one) : asText(one))));
    const at = all.findIndex((one) => asText(one) === asText(value));
    select.value = value === undefined ? "" : String(at);
    return [select, () => (select.value === "" ? undefined : all[Number(select.value)])];
  }
  if (kinds.length === 1 && kinds[0] === "string") {
    const long = typeof value === "string" && (value.includes("\n") || value.length > 80);
    const input = el(long ? "textarea" : "input", { spellcheck: "false", autocomplete: "off", placeholder: value === undefined ? "not set" : "", rows: long ? "6" : null });
    input.value = value ?? "";
    return [input, () => (input.value === "" && value === undefined ? undefined : input.value)];
  }
  if (kinds.length === 1 && (kinds[0] === "number" || kinds[0] === "integer")) {
    const input = el("input", { inputmode: kinds[0] === "integer" ? "numeric" : "decimal", autocomplete: "off", placeholder: value === undefined ? "not set" : "" });
    input.value = value === undefined ? "" : String(value);
    return [input, () => {
      const text = input.value.trim();
      if (text === "") { if (value === undefined || !required) return undefined; throw new Mistake(`arguments.${name}`, "a number is needed"); }
      if (!/^-?\d+(\.\d+)?([eE][-+]?\d+)?$/.test(text)) throw new Mistake(`arguments.${name}`, "this is no number");
      return Number(text);
    }];
  }
  const text = value === undefined ? "" : asText(value);
  const input = el("textarea", { class: "code", rows: String(Math.min(10, Math.max(2, text.split("\n").length))), spellcheck: "false", placeholder: value === undefined ? "not set" : "JSON" });
  input.value = text;
  return [input, () => (input.value.trim() === "" ? undefined : parsed(input.value, `arguments.${name}`))];
}
