// Light or dark: as the system says, until the switch is used.

import { byId } from "./dom.js";

const KEPT = "setpoint-theme";
const system = matchMedia("(prefers-color-scheme: dark)");
const listeners = [];

const chosen = () => localStorage.getItem(KEPT);
const present = () => chosen() ?? (system.matches ? "dark" : "light");

function apply() {
  const theme = present();
  document.documentElement.dataset.theme = theme;
  const other = theme === "dark" ? "light" : "dark";
  byId("theme").setAttribute("aria-label", `Use the ${other} theme`);
  byId("theme").title = `Use the ${other} theme`;
  listeners.forEach((listener) => listener());
}

/** Calls the listener whenever the colours change. */
export const onTheme = (listener) => listeners.push(listener);

/** The present value of a custom property that holds a colour, for a canvas. */
export function colour(name) {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

export function installTheme() {
  byId("theme").addEventListener("click", () => {
    localStorage.setItem(KEPT, present() === "dark" ? "light" : "dark");
    apply();
  });
  system.addEventListener("change", apply);
  apply();
}
