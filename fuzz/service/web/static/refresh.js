"use strict";
// Puts the new content in place of the old, unless a person is in the middle of something.
const seconds = Number(document.body.dataset.refresh);

function isInUse(main) {
  const at = document.activeElement;
  return document.hidden || String(getSelection()) !== "" ||
    (main.contains(at) && at !== main && at.matches("input, select, textarea, button"));
}

async function refresh() {
  const main = document.querySelector("main");
  if (isInUse(main)) return;
  const answer = await fetch(location.href, { redirect: "error" });
  if (!answer.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const fresh = page.querySelector("main");
  if (fresh === null || isInUse(main)) return;
  const all = (root, what) => [...root.querySelectorAll(what)];
  all(main, "details").forEach((old, i) => {
    const now = all(fresh, "details")[i];
    if (now) now.open = old.open;
  });
  const focused = all(main, "a, summary, [tabindex]").indexOf(document.activeElement);
  const scrolled = all(main, ".wide, .canvas").map((box) => [box.scrollLeft, box.scrollTop]);
  main.replaceChildren(...fresh.childNodes);
  document.querySelector("footer").replaceWith(page.querySelector("footer"));
  all(main, ".wide, .canvas").forEach((box, i) => {
    if (scrolled[i]) [box.scrollLeft, box.scrollTop] = scrolled[i];
  });
  if (focused >= 0) all(main, "a, summary, [tabindex]")[focused]?.focus({ preventScroll: true });
}

setInterval(() => refresh().catch(() => {}), seconds * 1000);
