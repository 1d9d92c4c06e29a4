// The gateway's public interface: requests with the key of this tab, and streams of server-sent events.

const KEPT = "tokenmill-key";
export const key = () => sessionStorage.getItem(KEPT);
export const keep = (value) => sessionStorage.setItem(KEPT, value);
export const keyWanted = () => document.querySelector('meta[name="tokenmill-key"]').content === "wanted";

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
  const said = (await answer.json().catch(() => null))?.error;
  throw new Refused(answer.status, said?.message ?? `it answered ${answer.status}`, said?.code);
}

export const get = async (path) => (await ask(path)).json();

export const post = (path, body, more = {}) => ask(path, {
  method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body ?? {}), ...more,
});

// Events of a response: [name, data as text] one after the other. fetch, because EventSource cannot send a key.
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
