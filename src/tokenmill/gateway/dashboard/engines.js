// Engines: the tiles at the top, their slots, and recent events.

import { byId, changing, clock, count, el, many, rate, seconds, share, svg } from "/page/show.js";

const SPAN_S = 120, LEAST_SPAN_S = 30;
const history = [];

export function remember(entries) {
  history.length = 0;
  history.push(...entries);
}

const sum = (engines, pick) => {
  const known = engines.map(pick).filter((value) => value !== null && value !== undefined);
  return known.length ? known.reduce((a, b) => a + b, 0) : null;
};

export function tiles(status) {
  const engines = status.engines;
  const generated = sum(engines, (engine) => engine.rates.generated_tok_s);
  const prompt = sum(engines, (engine) => engine.rates.prompt_tok_s);
  byId("rate").textContent = rate(generated);
  byId("rate-under").textContent = prompt === null ? "" : `${rate(prompt)} prompt tokens/s`;
  history.push({ when_s: status.now_s, generated_tok_s: generated, prompt_tok_s: prompt });
  while (history.length && history[0].when_s < status.now_s - SPAN_S) history.shift();
  spark(status.now_s);
  reuse(engines, status.tokens);
  busySlots(engines);
  const first = status.times.first_token_s;
  byId("first").textContent = seconds(first.median);
  byId("first-under").textContent = first.of
    ? `median of ${count(first.of)}; p95 ${seconds(first.p95)}` : "no interactive request yet";
}

function reuse(engines, answered) {
  if (engines.some((engine) => engine.state !== "ready")) return; // its counters are reset by a restart
  const reused = sum(engines, (engine) => engine.counters?.prompt_tokens_reused) ?? answered.reused;
  const computed = sum(engines, (engine) => engine.counters?.prompt_tokens_computed) ?? answered.prompt - answered.reused;
  const all = reused + computed;
  byId("reuse").textContent = all ? `${(100 * reused / all).toFixed(0)} %` : "–";
  byId("reuse-under").textContent = all ? `${count(reused)} of ${count(all)} prompt tokens` : "no prompt yet";
  byId("reuse-meter").replaceChildren(el("i", { width: share(reused, all) }));
}

function busySlots(engines) {
  const busy = sum(engines, (engine) => engine.lanes.busy) ?? 0;
  const total = sum(engines, (engine) => engine.lanes.total);
  const waiting = sum(engines, (engine) => engine.lanes.waiting) ?? 0;
  const extra = total === null ? 0 : Math.max(0, busy - total); // an engine may have additional slots for interactive requests
  byId("busy").textContent = total === null ? count(busy) : `${busy - extra} / ${total}`;
  byId("busy-under").textContent = [extra ? `${extra} more interactive` : null,
    waiting ? `${count(waiting)} waiting` : "none waiting"].filter(Boolean).join(", ");
  byId("busy-meter").replaceChildren(el("i", { width: share(busy, total ?? 0) }));
}

function spark(now_s) {
  const most = Math.max(1, ...history.map((at) => Math.max(at.generated_tok_s ?? 0, at.prompt_tok_s ?? 0)));
  const span_s = Math.max(LEAST_SPAN_S, now_s - (history[0]?.when_s ?? now_s));
  const x = (at) => (100 - 100 * (now_s - at.when_s) / span_s).toFixed(2);
  const y = (value) => (58 - 54 * value / most).toFixed(2);
  const line = (name) => history.filter((at) => at[name] !== null && at[name] !== undefined)
    .map((at, place) => `${place ? "L" : "M"}${x(at)} ${y(at[name])}`).join("");
  const generated = line("generated_tok_s");
  const known = history.filter((at) => at.generated_tok_s !== null);
  const drawn = svg("svg", { viewBox: "0 0 100 60", preserveAspectRatio: "none", role: "img",
    "aria-label": `tokens per second over the last ${seconds(span_s)}, at most ${rate(most)}` });
  if (generated) drawn.append(
    svg("path", { class: "area", d: `${generated}L${x(known.at(-1))} 60L${x(known[0])} 60Z` }),
    svg("path", { class: "second", d: line("prompt_tok_s") || "M0 60" }),
    svg("path", { class: "line", d: generated }),
  );
  const key = el("span", { class: "key" }, el("span", {}, swatch("line"), "answers"),
    el("span", {}, swatch("prompt"), "prompts"), el("span", {}, `max ${rate(most)} tok/s`));
  byId("spark").replaceChildren(key, drawn);
}

export const swatch = (item) => el("span", { class: `swatch fill-${item} ${item}` });

export const slots = changing((engines) => {
  byId("slots").replaceChildren(...engines.flatMap((engine) => [
    el("h3", {}, `${engine.name}: ${engine.model}`), ...rows(engine), foot(engine),
  ]));
});

function rows(engine) {
  if (engine.state !== "ready") return [el("p", { class: "bad" }, `${engine.state}: ${engine.detail ?? ""}`)];
  const working = engine.at_work;
  if (!working) return [el("p", { class: "empty" },
    `${count(engine.lanes.interactive)} interactive and ${count(engine.lanes.batch)} batch requests; this engine does not report its slots.`)];
  const idle = Math.max(0, Math.min(8, engine.lanes.total ?? 0) - working.length);
  return [...working.map(row), ...Array.from({ length: idle }, () => el("div", { class: "slot idle" },
    el("span", { class: "tag" }, "free"), el("span", { class: "bar" }), el("span", { class: "what" }, "")))];
}

function row(one) {
  const whole = one.prompt_tokens + one.generated_tokens;
  const computed = Math.max(0, one.ready_tokens - one.reused_tokens);
  const bar = el("span", { class: "bar", title: `${count(one.reused_tokens)} prompt tokens reused, ${count(computed)} computed, ${many(one.generated_tokens, "token")} generated` },
    el("i", { class: "fill-reused", width: share(one.reused_tokens, whole) }),
    el("i", { class: "fill-computed", width: share(computed, whole) }),
    el("i", { class: "fill-generated", width: share(one.generated_tokens, whole) }));
  const what = one.doing === "prompt" ? `reading: ${count(one.ready_tokens)} of ${many(one.prompt_tokens, "token")}`
    : one.doing === "answer" ? `writing: ${many(one.generated_tokens, "token")} (prompt ${count(one.prompt_tokens)})` : "waiting";
  return el("div", { class: "slot", "data-doing": one.doing },
    el("span", { class: `tag of-${one.priority}`, title: `${one.priority}${one.label ? `: ${one.label}` : ""}` }, one.label ?? one.priority), bar, el("span", { class: "what" }, what));
}

function foot(engine) {
  const counters = engine.counters ?? {};
  const said = [`${engine.kind}, ${engine.build}`];
  if (engine.context) said.push(`${count(engine.context)} tokens per sequence`);
  if (counters.cells_total) said.push((counters.cells_used ?? null) === null
    ? `${count(counters.cells_total)} KV cells` : `${count(counters.cells_used)} of ${count(counters.cells_total)} KV cells used`);
  if (engine.lanes.waiting) said.push(`${count(engine.lanes.waiting)} waiting`);
  if (counters.restarts) said.push(`${many(counters.restarts, "restart")}`);
  return el("div", { class: "slot-foot" },
    engine.at_work && el("p", { class: "legend" }, el("span", {}, swatch("reused"), "reused"), el("span", {}, swatch("computed"), "computed"),
      el("span", {}, swatch("answer"), "answer")),
    el("p", { class: "under" }, said.join("; ")));
}

const BECAME = { ready: "is back", restarting: "exited and is restarting", failed: "failed and will not be restarted" };

export const happened = changing((notices, errors) => {
  const all = [
    ...notices.map((one) => ({ when_s: one.when_s, words: `${one.backend} ${BECAME[one.state] ?? `is ${one.state}`}${one.words ? `: ${one.words}` : ""}`, bad: one.state !== "ready" })),
    ...errors.map((one) => ({ when_s: one.when_s, words: `${one.status} ${one.code} at ${one.route} (${one.id})`, bad: one.status >= 500 })),
  ].sort((a, b) => b.when_s - a.when_s).slice(0, 40);
  byId("events").replaceChildren(all.length
    ? el("ul", { class: "plain" }, ...all.map((one) => el("li", { class: one.bad ? "bad" : "" },
      el("time", {}, clock(one.when_s)), one.words)))
    : el("p", { class: "empty" }, "No errors or restarts."));
});
