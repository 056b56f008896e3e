"use strict";
// Replaces the parts of the page that change by what the server sends. The server has escaped everything in it.
(() => {
  const root = document.documentElement;
  const live = document.querySelector("[data-live]");
  const light = document.getElementById("live");
  const filter = document.getElementById("filter");
  let source = null;
  let waiting = null; // parts that have come while the viewer selects or presses something
  let pressed = false;
  let retry = 0;

  // -- colours ------------------------------------------------------------------------------------
  const button = document.getElementById("theme");
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const paint = (theme) => {
    if (theme) root.dataset.theme = theme;
    button.textContent = dark() ? "Light" : "Dark";
  };
  let kept = null;
  try { kept = localStorage.getItem("aiodlock-theme"); } catch { /* no storage: the system's choice */ }
  paint(kept === "dark" || kept === "light" ? kept : null);
  button.hidden = false;
  button.addEventListener("click", () => {
    const theme = dark() ? "light" : "dark";
    paint(theme);
    try { localStorage.setItem("aiodlock-theme", theme); } catch { /* for this page alone */ }
  });

  // -- live ---------------------------------------------------------------------------------------
  if (!live) return;
  const tell = (text, kind) => {
    light.hidden = false;
    light.textContent = text;
    light.className = `live ${kind}`;
  };
  const busy = () => {
    const selection = getSelection();
    return pressed || (selection.type === "Range" && live.contains(selection.anchorNode));
  };
  const show = () => {
    if (waiting === null || busy()) return;
    const focused = live.contains(document.activeElement) && document.activeElement.getAttribute("href");
    for (const [id, html] of Object.entries(waiting)) {
      const part = document.getElementById(id);
      if (part) part.innerHTML = html;
    }
    waiting = null;
    live.dataset.looks = Number(live.dataset.looks || 0) + 1;
    if (focused) {
      for (const link of live.querySelectorAll("a")) {
        if (link.getAttribute("href") === focused) { link.focus({ preventScroll: true }); break; }
      }
    }
  };
  const close = () => {
    clearTimeout(retry);
    if (source) source.close();
    source = null;
  };
  const open = () => {
    close();
    if (document.hidden) { tell("paused", ""); return; } // nobody looks: the store is not asked
    source = new EventSource(live.dataset.live + location.search);
    source.addEventListener("look", (event) => {
      waiting = JSON.parse(event.data);
      tell("live", "on");
      show();
    });
    source.addEventListener("error", () => {
      if (source && source.readyState === EventSource.CLOSED) {
        tell("disconnected", "off");
        close();
        retry = setTimeout(open, 5000);
      } else {
        tell("connecting", "");
      }
    });
  };
  document.addEventListener("visibilitychange", open);
  document.addEventListener("selectionchange", show);
  // A link that is replaced between the press and the click would swallow the click.
  addEventListener("pointerdown", () => { pressed = true; });
  for (const end of ["pointerup", "pointercancel", "dragend"]) {
    addEventListener(end, () => setTimeout(() => { pressed = false; show(); }, 0));
  }

  // -- the filter ---------------------------------------------------------------------------------
  if (filter) {
    let typing = 0;
    const search = () => {
      const query = new URLSearchParams();
      for (const [field, value] of new FormData(filter)) if (value && !(field === "sort" && value === "wait")) query.set(field, value);
      history.replaceState(null, "", `${location.pathname}${query.size ? `?${query}` : ""}`);
      open();
    };
    filter.querySelector("button").hidden = true;
    filter.addEventListener("submit", (event) => { event.preventDefault(); search(); });
    filter.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(search, 250); });
  }
  open();
})();
