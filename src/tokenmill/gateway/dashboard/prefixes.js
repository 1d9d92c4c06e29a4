// The prefixes in the KV caches of the engines, and recent cache misses.

import { byId, changing, clock, count, el, many } from "/page/show.js";

const STEP_PX = 14;

function row(one, most) {
  const twig = el("span", { class: "twig" },
    el("i", { width: `${Math.max(3, Math.round(60 * one.tokens / most))}px` }),
    one.digest ? el("b", {}, one.digest) : one.pinned ? el("b", {}, "pinned") : null,
    one.beginning ? el("q", {}, one.beginning.replace(/<\|[^|]*\|>/g, " ").replace(/\s+/g, " ").trim() || "…") : null);
  twig.style.paddingLeft = `${Math.min(8, one.depth) * STEP_PX}px`;
  return el("div", { class: `head${one.pinned ? " pinned" : ""}`, title: `tokens ${count(one.start)} to ${count(one.start + one.tokens - 1)}${one.locked ? "; in use" : ""}` },
    twig, el("span", { class: "tokens" }, many(one.tokens, "token")), el("span", { class: "hits" }, many(one.hits, "hit")));
}

export const prefixes = changing((trees) => {
  const drawn = trees.flatMap((one) => {
    const most = Math.max(1, ...one.segments.map((each) => each.tokens));
    const title = trees.length > 1 ? [el("h3", {}, one.engine)] : [];
    const left = one.total > one.segments.length ? [el("p", { class: "under" }, `${count(one.total - one.segments.length)} more`)] : [];
    return one.segments.length ? [...title, ...one.segments.map((each) => row(each, most)), ...left]
      : [...title, el("p", { class: "empty" }, "The cache is empty.")];
  });
  byId("prefixes").replaceChildren(drawn.length ? el("div", { class: "scroll" }, ...drawn)
    : el("p", { class: "empty" }, "No engine reports its cached prefixes."));
});

const found_of = (miss) => miss.cached_tokens === null ? many(miss.prompt_tokens, "token")
  : `${count(miss.cached_tokens)} of ${many(miss.prompt_tokens, "token")} found`;

export const misses = changing((found) => {
  byId("misses").replaceChildren(found.length
    ? el("ul", { class: "plain" }, ...found.map((miss) => el("li", {}, el("time", {}, clock(miss.when_s)),
      `${miss.words} (${miss.backend}, ${miss.lane}: ${found_of(miss)})`)))
    : el("p", { class: "empty" }, "None recorded."));
});
