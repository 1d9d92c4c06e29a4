// The chat box: a streamed conversation with interactive priority.

import { byId, count, el, rate, seconds } from "/page/show.js";
import { events, post } from "/page/api.js";

const messages = [];
let running = null;

function bubble(role, text = "") {
  const words = el("span", {}, text);
  const made = el("div", { class: `said ${role}` }, words);
  byId("talk").append(made);
  made.scrollIntoView({ block: "nearest" });
  return { made, words };
}

function follow() {
  const talk = byId("talk");
  if (talk.scrollHeight - talk.scrollTop - talk.clientHeight < 80) talk.scrollTop = talk.scrollHeight;
}

async function answer(model) {
  const { made, words } = bubble("assistant");
  const began = performance.now();
  let first = null, usage = null, text = "", engine = "";
  running = new AbortController();
  busy(true);
  try {
    const response = await post("/v1/chat/completions",
      { model, messages, stream: true, stream_options: { include_usage: true } }, { signal: running.signal });
    engine = response.headers.get("x-tokenmill-engine") ?? "";
    for await (const [, data] of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const piece = chunk.choices?.[0]?.delta?.content;
      if (!piece) continue;
      first ??= performance.now();
      text += piece;
      words.textContent = text;
      follow();
    }
  } catch (error) {
    made.append(el("span", { class: error.name === "AbortError" ? "under" : "bad" },
      error.name === "AbortError" ? "stopped" : error.message));
  } finally {
    running = null;
    busy(false);
  }
  if (text) messages.push({ role: "assistant", content: text });
  else messages.pop(); // an unanswered message is not part of the conversation
  const said = summary(usage, first === null ? null : (first - began) / 1000, (performance.now() - (first ?? began)) / 1000, engine);
  if (said) made.append(el("span", { class: "under stats" }, said));
  follow();
}

function summary(usage, first_s, rest_s, engine) {
  if (!usage) return "";
  const said = [`${count(usage.completion_tokens)} tokens`];
  if (usage.completion_tokens > 1 && rest_s > 0) said.push(`${rate((usage.completion_tokens - 1) / rest_s)} tokens/s`);
  if (first_s !== null) said.push(`first token after ${seconds(first_s)}`);
  const cached = usage.prompt_tokens_details?.cached_tokens;
  if (cached !== undefined && cached !== null) said.push(`${count(cached)} of ${count(usage.prompt_tokens)} prompt tokens reused`);
  if (engine) said.push(`by ${engine}`);
  return said.join(", ");
}

function busy(yes) {
  byId("send").hidden = yes;
  byId("halt").hidden = !yes;
}

export function models(names) {
  const select = byId("model");
  if (select.options.length === names.length) return;
  select.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
  select.hidden = names.length < 2;
}

export function start() {
  const words = byId("words");
  byId("say").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = words.value.trim();
    if (!text || running) return;
    words.value = "";
    messages.push({ role: "user", content: text });
    bubble("user", text);
    answer(byId("model").value || undefined);
  });
  words.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("say").requestSubmit();
    }
  });
  byId("halt").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", () => {
    running?.abort();
    messages.length = 0;
    byId("talk").replaceChildren();
  });
}
