"use strict";
// The page is whole without this. It adds: filter, search, keys, local times, and what belongs to what.
(() => {
  const $ = (id) => document.getElementById(id);
  const rows = [...document.querySelectorAll("details.row")];
  const said = rows.map((row) => row.querySelector(".who").textContent.toLowerCase());
  const chips = [...document.querySelectorAll(".chip[data-status]")];
  const search = $("search");
  let statuses = new Set();

  const isShown = (row) => !row.hidden;
  const summaryOf = (row) => row.querySelector("summary");

  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    rows.forEach((row, i) => {
      const fits = (!statuses.size || statuses.has(row.dataset.status)) && words.every((word) => said[i].includes(word));
      row.hidden = !fits;
      count += fits;
    });
    for (const chip of chips) {
      const own = chip.dataset.status;
      chip.setAttribute("aria-pressed", String(own ? statuses.has(own) : !statuses.size));
    }
    $("shown").textContent = count === rows.length ? "" : `${count} of ${rows.length} steps`;
    $("nothing").hidden = count > 0 || !rows.length;
    $("rows").hidden = !count;
  }

  for (const chip of chips) {
    chip.addEventListener("click", () => {
      const own = chip.dataset.status;
      if (!own) statuses.clear();
      else if (!statuses.delete(own)) statuses.add(own);
      filter();
    });
  }
  search.addEventListener("input", filter);

  $("unfold").addEventListener("click", () => {
    const open = $("unfold").getAttribute("aria-pressed") !== "true";
    for (const row of rows) if (isShown(row)) row.open = open;
    $("unfold").setAttribute("aria-pressed", String(open));
    $("unfold").textContent = open ? "close all" : "open all";
  });

  function go(row) {
    if (!row) return;
    if (row.hidden) { statuses.clear(); search.value = ""; filter(); }
    summaryOf(row).focus({ preventScroll: true });
    row.scrollIntoView({ block: "nearest" });
  }
  function step(by, wanted = () => true) {
    const at = rows.indexOf(document.activeElement.closest && document.activeElement.closest("details.row"));
    for (let i = at + by; i >= 0 && i < rows.length; i += by) {
      if (isShown(rows[i]) && wanted(rows[i])) return go(rows[i]);
    }
  }
  const bad = new Set(["failed", "timed_out", "cancelled", "interrupted"]);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") { statuses.clear(); search.value = ""; filter(); search.blur(); return; }
    if (event.target === search) { if (event.key === "Enter" || event.key === "ArrowDown") { step(1); event.preventDefault(); } return; }
    const onRow = event.target.closest("details.row > summary") || event.target === document.body;
    if (event.key === "/") search.focus();
    else if (event.key === "j" || (event.key === "ArrowDown" && onRow)) step(1);
    else if (event.key === "k" || (event.key === "ArrowUp" && onRow)) step(-1);
    else if (event.key === "n") step(1, (row) => bad.has(row.dataset.status));
    else return;
    event.preventDefault();
  });

  // What a step waits for is marked while one looks at it.
  let near = [];
  function mark(event) {
    const row = event.target.closest && event.target.closest("details.row");
    for (const one of near) one.classList.remove("near");
    near = row && row.dataset.after ? row.dataset.after.split(" ").map((n) => $("s" + n)).filter(Boolean) : [];
    for (const one of near) one.classList.add("near");
  }
  $("rows").addEventListener("focusin", mark);
  $("rows").addEventListener("mouseover", mark);
  $("rows").addEventListener("mouseleave", mark);

  const overview = $("overview");
  if (overview) {
    overview.addEventListener("click", (event) => {
      const box = overview.getBoundingClientRect();
      go(rows[Math.min(rows.length - 1, Math.floor((rows.length * (event.clientY - box.top)) / box.height))]);
    });
  }

  function follow() {
    const row = /^#s\d+$/.test(location.hash) && $(location.hash.slice(1));
    if (row) { row.open = true; go(row); }
  }
  addEventListener("hashchange", follow);

  for (const time of document.querySelectorAll("time")) {
    const at = new Date(time.dateTime);
    if (!isNaN(at)) { time.title = time.dateTime; time.textContent = at.toLocaleString(); }
  }
  const asked = new URLSearchParams(location.search);
  search.value = asked.get("q") || "";
  statuses = new Set(asked.getAll("status").filter((one) => chips.some((chip) => chip.dataset.status === one)));
  filter();
  follow();
  $("tools").hidden = false;
  document.querySelector(".keys").hidden = false;
  document.documentElement.dataset.ready = "yes";
})();
