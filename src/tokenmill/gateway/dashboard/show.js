// Creates elements and formats values. Text is always set as text; no module of this page writes markup.

export const byId = (id) => document.getElementById(id);

export function el(name, given = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(given)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "class") made.className = value;
    else if (key === "width") made.style.width = value; // set as a property, because the content security policy forbids style attributes
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function svg(name, given = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(given)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// Redraws only when the arguments change, so that text stays selected and buttons stay usable.
export function changing(draw) {
  let before;
  return (...given) => {
    const now = JSON.stringify(given);
    if (now === before) return;
    before = now;
    draw(...given);
  };
}

export const count = (value) => value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en");
export const many = (value, word, words = `${word}s`) => `${count(value)} ${value === 1 ? word : words}`;

export function rate(value) {
  if (value === null || value === undefined) return "–";
  return value >= 100 ? count(value) : value >= 10 ? value.toFixed(1) : value.toFixed(value === 0 ? 0 : 2);
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (value >= size * (unit === "TiB" ? 10 : 1)) return `${(value / size).toFixed(1)} ${unit}`;
  return `${value} B`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 99.5) return `${value.toFixed(value < 9.95 ? 2 : 1)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  return value < 129600 ? `${(value / 3600).toFixed(1)} h` : `${(value / 86400).toFixed(1)} days`;
}

// 06:40, or Tue 06:40 on another day.
export function minute(when_s) {
  const when = new Date(when_s * 1000);
  const day = when.toDateString() === new Date().toDateString() ? {} : { weekday: "short" };
  return when.toLocaleString("en-GB", { ...day, hour: "2-digit", minute: "2-digit" });
}

export const clock = (when_s) => new Date(when_s * 1000).toLocaleTimeString("en-GB");
export const share = (part, whole) => whole > 0 ? `${Math.min(100, 100 * part / whole)}%` : "0%";
