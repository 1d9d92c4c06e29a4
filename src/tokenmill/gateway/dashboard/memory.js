// Memory bars per tier: current use of the whole tier, then the engines' predicted and measured use.

import { byId, bytes, changing, el, share } from "/page/show.js";
import { swatch } from "/page/engines.js";

const NAMES = {
  weights: "weights", repack: "repacked weights", kv: "KV cache", compute: "compute", output: "output",
  prompt_cache: "prompt cache", runtime: "runtime", other: "other programs", free: "free",
};
const ORDER = Object.keys(NAMES);

const byItem = (parts, pick) => {
  const sums = new Map();
  for (const part of parts) sums.set(part.item, (sums.get(part.item) ?? 0) + (part[pick] ?? 0));
  return [...sums].filter(([, size]) => size > 0).sort((a, b) => ORDER.indexOf(a[0]) - ORDER.indexOf(b[0]));
};
const total = (sizes) => sizes.reduce((sum, [, size]) => sum + size, 0);

function row(words, sizes, whole, figure) {
  const said = sizes.map(([item, size]) => `${NAMES[item]} ${bytes(size)}`).join(", ");
  return el("div", { class: "row" }, el("span", {}, words),
    el("span", { class: "bytes", role: "img", "aria-label": `${words}: ${said}`, title: said },
      ...sizes.map(([item, size]) => el("i", { class: `fill-${item}`, width: share(size, whole), "data-item": item }))),
    el("span", {}, figure));
}

function tier(one) {
  const predicted = byItem(one.parts, "predicted_bytes");
  const measured = byItem(one.parts, "measured_bytes");
  const rows = [el("h3", {}, one.tier === "host" ? "Main memory" : one.tier)];
  const all = [...measured, ...[["other", one.other_bytes ?? 0], ["free", one.free_bytes ?? 0]].filter(([, size]) => size > 0)];
  // one axis for all bars of a memory: its size, if that is known
  const most = Math.max(one.capacity_bytes ?? 0, one.capacity_bytes === null ? 0 : total(all), total(predicted), total(measured), 1);
  if (one.capacity_bytes !== null) rows.push(row("now", all, most, bytes(one.capacity_bytes)));
  rows.push(row("predicted", predicted, most, bytes(total(predicted))));
  rows.push(row("measured", measured, most, bytes(total(measured))));
  for (const part of [...one.parts, ...one.sums])
    if (part.explanation) rows.push(el("p", { class: "note" }, `${part.engine}, ${NAMES[part.item] ?? part.item}: ${part.explanation}`));
  return el("div", { class: "tier", "data-tier": one.tier }, ...rows);
}

export const memory = changing((tiers) => {
  byId("memory").replaceChildren(...(tiers.length ? tiers.map(tier)
    : [el("p", { class: "empty" }, "The engines were not started by this gateway; their memory use is unknown.")]));
  const used = new Set(tiers.flatMap((one) => [...one.parts.map((part) => part.item),
    ...(one.capacity_bytes === null ? [] : ["other", "free"])]));
  byId("legend").replaceChildren(...ORDER.filter((item) => used.has(item))
    .map((item) => el("span", {}, swatch(item), NAMES[item])));
});
