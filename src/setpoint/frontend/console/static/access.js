// The API key: asked for when the server wants one, kept for this tab, sent with every request.

import { byId } from "./dom.js";

const KEPT = "setpoint-api-key";
let key = sessionStorage.getItem(KEPT);

/** The headers that a request to the server needs. */
export const keyHeaders = () => (key ? { authorization: `Bearer ${key}` } : {});

/** Asks for the key; resolves when one is given. */
export function askForKey() {
  const dialog = byId("key");
  const text = byId("key-text");
  if (key !== null) text.textContent = "The server did not accept this key. Enter another one.";
  if (!dialog.open) dialog.showModal();
  byId("key-input").focus();
  return new Promise((resolve) => {
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      key = byId("key-input").value.trim();
      sessionStorage.setItem(KEPT, key);
      byId("key-input").value = "";
      dialog.close();
      resolve();
    };
    // Without a key there is nothing to show: Escape leaves the question open.
    dialog.oncancel = (event) => event.preventDefault();
  });
}
