// The dialog that changes an option of the running server, by the same route as `setpoint set`.

import { keyHeaders } from "./access.js";
import { byId, make, setText } from "./dom.js";
import { setting } from "./format.js";
import { refusalOf } from "./transport.js";

const ROUTE = "/set_internal_state";

export class ChangeDialog {
  /** `changed`: called with the changes that the server has made, as [{option, old, new}]. */
  constructor(changed) {
    this.changed = changed;
    this.adminKey = null; // forgotten with the page
    this.dialog = byId("change");
    byId("change-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("change-close").addEventListener("click", () => this.dialog.close());
  }

  /** option: as in the event "state", with `live`. */
  open(option) {
    const { field, value, live } = option;
    this.field = field;
    this.isBusy = false;
    setText(byId("change-title"), field);
    setText(byId("change-meaning"), live.meaning);
    const present = setting(value);
    setText(byId("change-present"), present);
    this.input = live.choices.length ? choice(live.choices, present) : make("input", { value: present });
    this.input.id = "change-value";
    this.input.autocomplete = "off";
    byId("change-value").replaceWith(this.input);
    byId("change-why").value = "";
    byId("change-admin").hidden = this.adminKey === null;
    byId("change-form").hidden = false;
    byId("change-outcome").replaceChildren();
    setText(byId("change-close"), "Cancel");
    this.dialog.showModal();
    this.input.focus();
    this.input.select?.();
  }

  async send() {
    if (this.isBusy) return;
    this.isBusy = true;
    this.adminKey = byId("change-key").value.trim() || this.adminKey;
    try {
      const response = await fetch(ROUTE + location.search, {
        method: "POST",
        headers: { "content-type": "application/json", ...this.keys() },
        body: JSON.stringify({
          server_args: { [this.field]: this.input.value.trim() },
          why: byId("change-why").value.trim() || "changed in the console",
        }),
      });
      if (response.ok) this.done((await response.json())[0]);
      else this.refused(response.status, await refusalOf(response));
    } catch {
      this.refused(0, "The server did not answer. Whether the option has changed is not known.");
    }
    this.isBusy = false;
  }

  keys() {
    return this.adminKey === null ? keyHeaders() : { authorization: `Bearer ${this.adminKey}` };
  }

  /** The question stays open: the value can be another one. */
  refused(status, sentence) {
    if (status === 401 || status === 403) {
      this.adminKey = null;
      byId("change-key").value = "";
      byId("change-admin").hidden = false;
    }
    byId("change-outcome").replaceChildren(make("p", { class: "failure", role: "alert" }, sentence));
  }

  done({ changes, warnings = [] }) {
    const rows = changes.map(({ option, old, new: now }) =>
      make("li", {}, make("code", {}, option), `: ${setting(old)} → ${setting(now)}`),
    );
    byId("change-outcome").replaceChildren(
      make("p", { role: "status" }, changes.length ? "Changed:" : "Nothing has changed: this is the present value."),
      make("ul", {}, ...rows),
      ...warnings.map((warning) => make("p", { class: "failure" }, `Warning: ${warning}`)),
    );
    byId("change-form").hidden = true;
    setText(byId("change-close"), "Close");
    byId("change-close").focus();
    this.changed(changes);
  }
}

function choice(values, present) {
  const select = make("select", {}, ...values.map((value) => make("option", { value }, value)));
  select.value = present;
  return select;
}
