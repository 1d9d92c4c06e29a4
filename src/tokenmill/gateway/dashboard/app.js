// Entry point: asks for an API key if one is required, receives events, and passes them to the other modules.

import { byId, count, many, seconds } from "/page/show.js";
import { ask, events, key, keyRequired, storeKey } from "/page/api.js";
import * as engines from "/page/engines.js";
import { memory } from "/page/memory.js";
import { misses, prefixes } from "/page/prefixes.js";
import * as chat from "/page/chat.js";
import * as batches from "/page/batches.js";

const WORDS = { ok: "ready", degraded: "degraded", down: "no engine is ready", stopping: "stopping" };
const MOST_WAIT_MS = 8000;

function banner(words, mild = false) {
  const place = byId("banner");
  if (place.textContent !== words) place.textContent = words;
  place.classList.toggle("mild", mild);
  place.hidden = !words;
}

function stateIs(word, words) {
  byId("state").dataset.state = word;
  byId("state-words").textContent = words;
  document.title = word === "ok" ? "tokenmill" : `${words} · tokenmill`;
}

function troubles(status) {
  const bad = status.engines.filter((engine) => engine.state !== "ready");
  if (bad.length) {
    const died = { restarting: "exited and is restarting", failed: "has failed and will not be restarted" };
    return banner(bad.map((engine) => `${engine.name} ${died[engine.state] ?? `is ${engine.state}`}${engine.detail ? `: ${engine.detail}` : ""}`).join("\n"));
  }
  const last = status.notices[0];
  const fresh = last && status.now_s - last.when_s < 60;
  banner(fresh && last.state === "ready" ? `${last.backend} is back since ${new Date(last.when_s * 1000).toLocaleTimeString("en-GB")}` : "", true);
}

function status(now) {
  stateIs(now.status, WORDS[now.status] ?? now.status);
  byId("about").textContent = now.models.join(", ");
  byId("foot").textContent = `tokenmill ${now.version}, up for ${seconds(now.now_s - now.started_s)}; ${many(now.tokens.answers, "answer")}, ${count(now.tokens.generated)} tokens generated for single requests`;
  troubles(now);
  engines.tiles(now);
  engines.slots(now.engines.map(({ rates, counters, ...engine }) => ({ ...engine,
    counters: counters && { cells_used: counters.cells_used, cells_total: counters.cells_total, restarts: counters.restarts } })));
  engines.happened(now.notices, now.errors);
  memory(now.memory);
  misses(now.misses);
  chat.models(now.models);
  batches.noticed(now.batches);
}

async function listen() {
  for await (const [name, data] of events(await ask("/api/events"))) {
    const value = JSON.parse(data);
    if (name === "status") status(value);
    else if (name === "prefixes") prefixes(value);
    else if (name === "history") engines.remember(value);
    else if (name === "stopping") throw new Error("it is shutting down");
  }
}

async function live() {
  for (let wait_ms = 500; ; wait_ms = Math.min(MOST_WAIT_MS, 2 * wait_ms)) {
    const began = Date.now();
    let why = "the connection ended";
    try {
      await listen();
    } catch (error) {
      if (error.status === 401) { await askForKey(Boolean(key())); continue; }
      why = error.message;
    }
    if (Date.now() - began > 5000) wait_ms = 500;
    stateIs("lost", "not connected");
    banner(`The gateway does not answer (${why}). Reconnecting.`);
    await new Promise((go) => setTimeout(go, wait_ms));
  }
}

function askForKey(wrong) {
  const dialog = byId("ask-key");
  byId("key-wrong").hidden = !wrong;
  return new Promise((go) => {
    byId("key-form").addEventListener("submit", () => { storeKey(byId("key").value.trim()); byId("key").value = ""; go(); }, { once: true });
    dialog.addEventListener("cancel", (event) => event.preventDefault(), { once: true });
    dialog.showModal();
  });
}

chat.start();
batches.start();
if (keyRequired() && !key()) await askForKey(false);
live();
