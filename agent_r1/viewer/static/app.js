// The viewer's behavior in the browser: theme, keyboard, figures of charts and tokens, and live pages.
// Text of runs reaches the page only as text: by textContent here, and escaped by the server.
"use strict";

const POLL_MS = 2000;
const GO_MS = 1200; // the time for the second key after g

const THEME = "agent-r1-theme", COLOR = "agent-r1-color";
const saved = (key) => { try { return localStorage.getItem(key); } catch { return null; } };
const save = (key, value) => { try { localStorage.setItem(key, value); } catch { /* private window */ } };

if (saved(THEME)) document.documentElement.dataset.theme = saved(THEME);

const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const element = (tag, className, text) => {
  const made = document.createElement(tag);
  made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
};

function switchTheme() {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  save(THEME, document.documentElement.dataset.theme);
}

// ---- a small window with figures beside the pointer or the focus

const tip = {
  box: null,
  // The window is below y; if there is no room there, it ends over the position "above".
  show(title, rows, x, y, above = y) {
    this.hide();
    this.box = element("div", "tip");
    this.box.append(element("div", "tip-title", title));
    for (const { label, value, color } of rows) {
      const row = element("div", "tip-row");
      if (color) row.append(element("span", `swatch ${color}`));
      row.append(element("span", "", label), element("span", "tip-value", value));
      this.box.append(row);
    }
    document.body.append(this.box);
    const { width, height } = this.box.getBoundingClientRect();
    const left = x + 14 + width > innerWidth - 8 ? x - width - 14 : x + 14;
    this.box.style.left = `${Math.max(8, left)}px`;
    this.box.style.top = `${y + 14 + height > innerHeight - 8 ? Math.max(8, above - height - 8) : y + 14}px`;
  },
  hide() { if (this.box) this.box.remove(); this.box = null; },
};

// ---- charts

const precise = (value) => {
  const rounded = Number(value.toPrecision(6));
  if (rounded && Math.abs(rounded) < 1e-4) return rounded.toExponential().replace(/e([+-])(\d)$/, "e$10$2");
  return rounded.toLocaleString("en-US", { maximumSignificantDigits: 6 });
};

const chartLines = (svg) => {
  // The points are parsed once per drawing of the chart.
  if (!svg.lines) {
    svg.lines = all(".line", svg).map((group) => ({
      label: group.dataset.label,
      color: [...group.classList].find((name) => /^c\d$/.test(name)),
      points: JSON.parse(group.dataset.values),
    }));
    svg.xs = [...new Map(svg.lines.flatMap((line) => line.points).map((point) => [point[1], point[0]]))]
      .sort((one, other) => one[0] - other[0]);
  }
  return svg.lines;
};

function showStep(svg, index) {
  const lines = chartLines(svg);
  svg.at = Math.max(0, Math.min(index, svg.xs.length - 1));
  const [step, x] = svg.xs[svg.at];
  const cursor = svg.querySelector(".cursor");
  cursor.removeAttribute("hidden");
  cursor.setAttribute("x1", x);
  cursor.setAttribute("x2", x);
  const rows = lines.flatMap((line) => line.points.filter((point) => point[1] === step).slice(0, 1)
    .map((point) => ({ label: line.label, value: precise(point[3]), color: line.color })));
  const box = svg.getBoundingClientRect();
  tip.show(`step ${step}`, rows, box.left + (x / 420) * box.width, box.top + box.height * 0.2);
}

function hideStep(svg) {
  const cursor = svg.querySelector(".cursor");
  if (cursor) cursor.setAttribute("hidden", "");
  tip.hide();
}

function pointAtStep(svg, event) {
  chartLines(svg);
  const box = svg.getBoundingClientRect();
  const x = ((event.clientX - box.left) / box.width) * 420;
  const distances = svg.xs.map((one) => Math.abs(one[1] - x));
  showStep(svg, distances.indexOf(Math.min(...distances)));
}

// ---- tokens

const FIGURES = ["token id", "log-prob, engine", "log-prob, trainer", "gap", "advantage", "loss weight", "entropy", "value"];

function showToken(token) {
  all(".t.at").forEach((other) => other.classList.remove("at"));
  token.classList.add("at");
  const figures = JSON.parse(token.dataset.f);
  const rows = figures.map((value, index) => ({ label: FIGURES[index], value })).filter((row) => row.value !== "");
  const box = token.getClientRects()[0] || token.getBoundingClientRect();
  tip.show(JSON.stringify(token.textContent), rows, box.left, box.bottom - 8, box.top);
}

function hideToken() {
  all(".t.at").forEach((other) => other.classList.remove("at"));
  tip.hide();
}

function moveToken(box, by) {
  const tokens = all(".t", box);
  const at = tokens.findIndex((token) => token.classList.contains("at"));
  const next = tokens[Math.max(0, Math.min(at < 0 ? 0 : at + by, tokens.length - 1))];
  next.scrollIntoView({ block: "nearest" });
  showToken(next);
}

function colorTokens(code) {
  const place = document.querySelector("[data-conversation]");
  if (!place) return;
  const buttons = all(".segment", place);
  const chosen = buttons.find((button) => button.dataset.color === code) || buttons[0];
  for (const button of buttons) button.setAttribute("aria-checked", String(button === chosen));
  for (const scale of all(".scale", place)) scale.hidden = scale.dataset.scale !== chosen.dataset.color;
  for (const tokens of all(".tokens", place)) {
    tokens.className = tokens.className.replace(/ ?by-\w+/g, "") + ` by-${chosen.dataset.color}`;
  }
}

function nextColoring() {
  const buttons = all(".segment");
  if (!buttons.length) return;
  const at = buttons.findIndex((button) => button.getAttribute("aria-checked") === "true");
  buttons[(at + 1) % buttons.length].click();
}

// ---- rows, turns and other pages by the keyboard

let row = -1;

function moveRow(by) {
  const rows = all("[data-row]");
  if (!rows.length) return false;
  const next = row + by;
  const further = document.querySelector("[data-next]");
  if (next >= rows.length && further) { further.click(); return true; }
  row = Math.max(0, Math.min(next, rows.length - 1));
  rows.forEach((one, index) => one.classList.toggle("current", index === row));
  rows[row].scrollIntoView({ block: "nearest" });
  return true;
}

function openRow() {
  const rows = all("[data-row]");
  const link = row >= 0 && rows[row] && rows[row].querySelector("[data-open]");
  if (link) link.click();
}

function moveTurn(by) {
  const turns = all(".turn");
  const at = turns.findIndex((turn) => turn.getBoundingClientRect().top > 70);
  const here = at < 0 ? turns.length : at;
  const next = by > 0 ? turns.slice(here).find((turn) => turn.getBoundingClientRect().top > 80) : turns[here - 1];
  if (next) next.scrollIntoView({ block: "start" });
}

function follow(selector) {
  const link = document.querySelector(selector);
  if (link) link.click();
  return Boolean(link);
}

let went = 0;

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const help = document.getElementById("help");
  if (event.target.matches("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (help.open) return;
  const box = event.target.closest(".tokens");
  const svg = event.target.closest(".plot svg");
  const arrow = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (arrow && box) { moveToken(box, arrow); event.preventDefault(); return; }
  if (arrow && svg) { chartLines(svg); showStep(svg, (svg.at ?? -1) + arrow); event.preventDefault(); return; }
  if (Date.now() - went < GO_MS) {
    went = 0;
    if (event.key === "r") { location.href = "/"; return; }
    if ("oas".includes(event.key) && follow(`[data-go="${event.key}"]`)) return;
  }
  const actions = {
    j: () => moveRow(1) || follow("[data-following]"),
    k: () => moveRow(-1) || follow("[data-previous]"),
    n: () => moveTurn(1),
    p: () => moveTurn(-1),
    c: nextColoring,
    t: switchTheme,
    g: () => { went = Date.now(); },
    "?": () => help.showModal(),
    "/": () => {
      const search = document.querySelector("[data-search]");
      if (search) { search.focus(); search.select(); } else follow('[data-go="a"]');
    },
    Escape: () => { hideToken(); all(".plot svg").forEach(hideStep); },
  };
  if (event.key === "Enter" && !event.target.closest("a, button, summary")) openRow();
  if (!Object.hasOwn(actions, event.key)) return;
  actions[event.key]();
  if (event.key === "/") event.preventDefault();
}

// ---- live pages: when the run has new records, the parts of the page are fetched again

async function refresh() {
  const response = await fetch(location.href, { redirect: "error" });
  if (!response.ok) throw new Error(String(response.status));
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  const chosen = new Set(all("input[name=run]:checked").map((box) => box.value));
  const focused = document.activeElement;
  for (const part of all("[data-part]")) {
    const fresh = page.querySelector(`[data-part="${part.dataset.part}"]`);
    if (fresh) part.replaceWith(fresh);
  }
  for (const box of all("input[name=run]")) box.checked = box.checked || chosen.has(box.value);
  if (!focused.isConnected) {
    const same = all(focused.tagName).find((one) => one.outerHTML === focused.outerHTML);
    if (same) same.focus({ focusVisible: false });
  }
  updateCompare();
  all("[data-row]").forEach((one, index) => one.classList.toggle("current", index === row));
}

function watch(address) {
  const state = document.querySelector("[data-live-state]");
  let last = null, ended = false;
  const say = (text, on) => { state.hidden = false; state.textContent = text; state.className = `live ${on ? "on" : "off"}`; };
  const poll = async () => {
    if (!document.hidden && !ended) {
      try {
        const response = await fetch(address, { redirect: "error" });
        if (response.status === 403) ended = true;
        if (!response.ok) throw new Error(String(response.status));
        const revision = await response.text();
        if (last !== null && revision !== last) await refresh();
        last = revision;
        state.hidden = true;
        if (document.querySelector(".state-training")) say("live", true);
      } catch {
        say(ended ? "the viewer was started again: open its new address" : "the viewer does not answer", false);
      }
    }
    setTimeout(poll, POLL_MS);
  };
  poll();
}

function updateCompare() {
  const button = document.querySelector("[data-compare]");
  if (button) button.disabled = all("input[name=run]:checked").length < 2;
}

document.addEventListener("DOMContentLoaded", () => {
  document.addEventListener("keydown", onKey);
  document.addEventListener("click", (event) => {
    const action = event.target.closest("[data-action]");
    if (action && action.dataset.action === "theme") switchTheme();
    if (action && action.dataset.action === "help") document.getElementById("help").showModal();
    const segment = event.target.closest(".segment");
    if (segment) { colorTokens(segment.dataset.color); save(COLOR, segment.dataset.color); }
    const token = event.target.closest(".tokens .t");
    if (token) showToken(token);
  });
  document.addEventListener("change", (event) => {
    if (event.target.matches("input[name=run]")) updateCompare();
    if (event.target.matches("[data-filters] select")) event.target.form.requestSubmit();
  });
  document.addEventListener("submit", (event) => {
    // Empty conditions do not belong into the address.
    for (const field of all("input, select", event.target)) field.disabled = field.name !== "" && field.value === "";
  });
  document.addEventListener("pointermove", (event) => {
    const svg = event.target.closest && event.target.closest(".plot svg");
    const token = event.target.closest && event.target.closest(".tokens .t");
    if (svg) pointAtStep(svg, event);
    else if (token) showToken(token);
  });
  document.addEventListener("pointerout", (event) => {
    const svg = event.target.closest && event.target.closest(".plot svg");
    if (svg && !svg.contains(event.relatedTarget)) hideStep(svg);
    if (event.target.closest && event.target.closest(".tokens .t")) hideToken();
  });
  document.addEventListener("focusin", (event) => {
    if (event.target.matches(".tokens:focus-visible")) moveToken(event.target, 0);
    if (event.target.matches(".plot svg:focus-visible")) { chartLines(event.target); showStep(event.target, event.target.xs.length - 1); }
  });
  document.addEventListener("focusout", (event) => {
    if (event.target.matches(".tokens")) hideToken();
    if (event.target.matches(".plot svg")) hideStep(event.target);
  });
  const place = document.querySelector("[data-conversation]");
  if (place) colorTokens(place.dataset.colorFirst || saved(COLOR) || "a");
  updateCompare();
  if (document.body.dataset.poll) watch(document.body.dataset.poll);
});
