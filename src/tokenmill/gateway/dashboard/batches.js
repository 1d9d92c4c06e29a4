// Batches: submit a file, show progress, cancel, and download results, through /v1/files and /v1/batches.

import { byId, clock, count, el, many, minute, seconds, share } from "/page/show.js";
import { ask, get, key, post } from "/page/api.js";

const OPEN = new Set(["validating", "in_progress", "finalizing", "cancelling"]);
const POLL_MS = 1000;
const WINDOW_S = 60; // the remaining time is estimated from the progress in this window
const shown = new Map(); // by batch ID: its elements and its progress over time
const names = new Map(); // file names by file ID
let timer = null, counted = null;

export async function refresh() {
  clearTimeout(timer);
  let list;
  try {
    list = (await get("/v1/batches?limit=20")).data;
  } catch (error) {
    timer = setTimeout(refresh, 5 * POLL_MS);
    return;
  }
  const place = byId("batches");
  if (!list.length && !shown.size) place.replaceChildren(el("p", { class: "empty" }, "No batches yet."));
  else if (!shown.size) place.replaceChildren();
  list.forEach((batch, at) => {
    const row = shown.get(batch.id) ?? made(batch);
    if (place.children[at] !== row.box) place.insertBefore(row.box, place.children[at] ?? null);
    update(row, batch);
  });
  const there = new Set(list.map((batch) => batch.id));
  for (const [id, row] of shown) if (!there.has(id)) { row.box.remove(); shown.delete(id); }
  finish();
  if (list.some((batch) => OPEN.has(batch.status))) timer = setTimeout(refresh, POLL_MS);
}

// In the header: when the last batch that runs now is done.
function finish() {
  const ends = [...shown.values()].map((row) => row.ends_s).filter(Boolean);
  byId("finish").textContent = ends.length ? `${many(ends.length, "batch", "batches")} running, finishes about ${minute(Math.max(...ends))}` : "";
}

// Called with every status event: batches may also be submitted by other clients.
export function noticed(byStatus) {
  const now = JSON.stringify(byStatus);
  if (now !== counted) { counted = now; refresh(); }
}

function made(batch) {
  const row = { box: el("div", { class: "batch", "data-batch": batch.id }), seen: [], acts: null };
  row.name = el("span", { class: "name" }, batch.id);
  row.pill = el("span", { class: "pill" });
  row.words = el("p", { class: "under" });
  row.buttons = el("div", { class: "acts" });
  row.done = el("i", { class: "done" });
  row.failed = el("i", { class: "failed" });
  row.why = el("p", { class: "bad why" });
  row.box.append(el("p", {}, row.name, row.pill), row.buttons,
    el("div", { class: "progress" }, row.done, row.failed), row.words, row.why);
  shown.set(batch.id, row);
  title(batch, row);
  return row;
}

async function title(batch, row) {
  try {
    if (!names.has(batch.input_file_id)) names.set(batch.input_file_id, (await get(`/v1/files/${batch.input_file_id}`)).filename);
    row.name.textContent = names.get(batch.input_file_id);
    row.name.title = batch.id;
  } catch { /* the file may have been deleted; show the batch ID instead */ }
}

function update(row, batch) {
  const { total, completed, failed } = batch.request_counts ?? { total: 0, completed: 0, failed: 0 };
  row.pill.textContent = batch.status.replace("_", " ");
  row.pill.className = `pill ${batch.status}`;
  row.done.style.width = share(completed, total);
  row.failed.style.width = batch.status === "failed" && !total ? "100%" : share(failed, total); // a refused file has no jobs
  const said = total ? [`${count(completed)} of ${many(total, "job")} answered`] : [];
  if (failed) said.push(`${count(failed)} failed`);
  const eta = batch.status === "in_progress" ? left(row, batch, completed + failed, total) : null;
  row.ends_s = eta === null ? null : Date.now() / 1000 + eta;
  if (eta !== null) said.push(`about ${seconds(eta)} left, finishes about ${minute(row.ends_s)}`);
  said.push(`since ${clock(batch.created_at)}`);
  const end = batch.completed_at ?? batch.cancelled_at ?? batch.failed_at ?? batch.expired_at;
  if (end > batch.created_at) said.push(`took ${seconds(end - batch.created_at)}`);
  row.words.textContent = said.join("; ");
  row.why.textContent = (batch.errors?.data ?? []).slice(0, 3).map((bad) => `${bad.line ? `line ${bad.line}: ` : ""}${bad.message}`).join("\n");
  buttons(row, batch);
}

function left(row, batch, done, total) {
  const now_s = Date.now() / 1000;
  row.seen.push([now_s, done]);
  while (row.seen.length > 2 && row.seen[1][0] < now_s - WINDOW_S) row.seen.shift();
  const [first_s, before] = row.seen[0];
  let pace = now_s > first_s + 2 ? (done - before) / (now_s - first_s) : 0;
  if (pace <= 0 && batch.in_progress_at && now_s > batch.in_progress_at) pace = done / (now_s - batch.in_progress_at);
  return pace > 0 ? (total - done) / pace : null;
}

function buttons(row, batch) {
  const acts = JSON.stringify([batch.status, batch.output_file_id, batch.error_file_id]);
  if (acts === row.acts) return;
  row.acts = acts;
  const wanted = [];
  if (batch.output_file_id) wanted.push(download("Results", batch.output_file_id, `${batch.id}_output.jsonl`));
  if (batch.error_file_id) wanted.push(download("Errors", batch.error_file_id, `${batch.id}_errors.jsonl`));
  if (batch.status === "failed") wanted.push(el("button", { type: "button", onclick: () => byId("file").click() }, "Choose another file"));
  if (["validating", "in_progress", "finalizing"].includes(batch.status)) wanted.push(el("button", { type: "button", onclick: (event) => cancel(batch.id, event.target) }, "Cancel"));
  row.buttons.replaceChildren(...wanted);
}

async function cancel(id, button) {
  button.disabled = true;
  try {
    await post(`/v1/batches/${id}/cancel`);
  } catch (error) {
    tell(error.message, true);
  }
  refresh();
}

// Without a key, a plain link; with a key, the file is fetched first, because links cannot send a key.
function download(words, file, name) {
  const path = `/v1/files/${file}/content`;
  if (!key()) return el("a", { class: "button", href: path, download: name }, words);
  return el("button", { type: "button", onclick: async () => {
    try {
      const url = URL.createObjectURL(await (await ask(path)).blob());
      el("a", { href: url, download: name }).click();
      setTimeout(() => URL.revokeObjectURL(url), 60000);
    } catch (error) {
      tell(error.message, true);
    }
  } }, words);
}

function tell(words, bad = false) {
  const said = byId("submitted");
  said.textContent = words;
  said.classList.toggle("bad", bad);
}

// The endpoint of a batch, from its first line: all lines have the same one.
async function endpoint(file) {
  const line = (await file.slice(0, 1 << 20).text()).split("\n").find((text) => text.trim());
  try {
    const first = JSON.parse(line);
    return first.url ?? ("prompt" in (first.body ?? first) ? "/v1/completions" : "/v1/chat/completions");
  } catch {
    return "/v1/chat/completions"; // the gateway reports what is wrong with the file
  }
}

async function submit(file) {
  const form = new FormData();
  form.append("purpose", "batch");
  form.append("file", file, file.name);
  tell(`Uploading ${file.name}`);
  const sent = await (await ask("/v1/files", { method: "POST", body: form })).json();
  names.set(sent.id, file.name);
  await post("/v1/batches", { input_file_id: sent.id, endpoint: await endpoint(file), completion_window: "24h" });
  tell("");
}

export function start() {
  const chosen = byId("file"), button = byId("start"), label = byId("picked");
  const unpicked = label.textContent;
  const picked = () => {
    label.textContent = chosen.files[0]?.name ?? unpicked;
    button.disabled = !chosen.files.length;
  };
  chosen.addEventListener("change", picked);
  byId("submit").addEventListener("submit", async (event) => {
    event.preventDefault();
    const file = chosen.files[0];
    if (!file) return;
    button.disabled = true;
    try {
      await submit(file);
      chosen.value = "";
    } catch (error) {
      tell(error.message, true);
    }
    picked();
    refresh();
  });
}
