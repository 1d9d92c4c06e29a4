// Client of the gateway's public API: requests with the API key of this tab, and server-sent events.

const STORAGE_KEY = "tokenmill-key";
export const key = () => sessionStorage.getItem(STORAGE_KEY);
export const storeKey = (value) => sessionStorage.setItem(STORAGE_KEY, value);
export const keyRequired = () => document.querySelector('meta[name="tokenmill-key"]').content === "wanted";

export class Refused extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export async function ask(path, given = {}) {
  const headers = new Headers(given.headers);
  if (key()) headers.set("authorization", `Bearer ${key()}`);
  const answer = await fetch(path, { ...given, headers, cache: "no-store", credentials: "omit" });
  if (answer.ok) return answer;
  const error = (await answer.json().catch(() => null))?.error;
  throw new Refused(answer.status, error?.message ?? `status ${answer.status}`, error?.code);
}

export const get = async (path) => (await ask(path)).json();

export const post = (path, body, more = {}) => ask(path, {
  method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body ?? {}), ...more,
});

// Yields [name, data] for each event of a response. Based on fetch, because EventSource cannot send a key.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      const parts = rest.split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        let name = "message";
        const data = [];
        for (const line of part.split("\n")) {
          if (line.startsWith("event: ")) name = line.slice(7);
          else if (line.startsWith("data: ")) data.push(line.slice(6));
        }
        if (data.length) yield [name, data.join("\n")];
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
