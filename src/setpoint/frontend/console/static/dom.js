// Makes elements. Text always becomes text nodes: nothing that a server, a model or a client wrote
// is ever parsed as HTML.

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/**
 * A new element. `props`: attributes by name; "on…" a listener, "style" an object of CSS
 * properties, false or null for what is left out. `children`: strings and elements.
 */
export function make(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Sets the text if it differs, so that selections and screen readers are left alone. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A button that copies a text, and says so. */
export function copyButton(text, what) {
  const button = make("button", {
    type: "button",
    class: "button quiet copy",
    "aria-label": `Copy ${what}`,
    onclick: async () => {
      button.textContent = (await copied(text)) ? "Copied" : "Press Ctrl+C";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    },
  }, "Copy");
  return button;
}

/** Copies; browsers allow it only on pages from https or from this machine. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

/** Calls `work` in the next frame, once for however many calls before it. */
export function oncePerFrame(work) {
  let isDue = false;
  return () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      work();
    });
  };
}
