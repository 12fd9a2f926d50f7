// Renews the page of a run that goes on. When the server has ended, the last page stays.
"use strict";
const EVERY = 2000;
let shown = "";

async function renew() {
  try {
    const answer = await fetch("/", { cache: "no-store" });
    const text = await answer.text();
    if (answer.ok && text !== shown) {
      shown = text;
      const next = new DOMParser().parseFromString(text, "text/html");
      const name = (details) => details.querySelector("summary").textContent;
      const open = new Map([...document.querySelectorAll("details")].map((d) => [name(d), d.open]));
      for (const details of next.querySelectorAll("details")) {
        details.open = open.get(name(details)) ?? details.open;
      }
      document.title = next.title;
      document.body.replaceChildren(...next.body.children);
    }
    document.body.classList.remove("stale");
  } catch {
    document.body.classList.add("stale");
  }
  setTimeout(renew, EVERY);
}

setTimeout(renew, EVERY);
