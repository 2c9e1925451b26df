// The options as the server resolved them, each with its reason. Those that can change while the
// server runs are changed here.

import { ChangeDialog } from "./change.js";
import { byId, setText } from "./dom.js";
import { option } from "./format.js";
import { Table } from "./tables.js";

const column = (label, text, className) => ({ label, className, value: text, text });

export class Options {
  constructor() {
    this.options = [];
    this.dialog = new ChangeDialog((changes) => this.changed(changes));
    const columns = [
      column("Option", ({ field }) => field, "name"),
      column("Value", ({ value }) => option(value), "value"),
      this.changeColumn(),
      column("Reason", ({ why }) => why),
    ];
    this.table = new Table(byId("options-table"), "Resolved options", columns, {
      key: ({ field }) => field,
      none: "No options are known yet.",
      noMatch: "No option matches",
    });
    byId("options-filter").addEventListener("input", (event) => this.table.filter(event.target.value));
    byId("options-all").addEventListener("change", () => this.draw());
  }

  changeColumn() {
    return {
      label: "Live",
      title: "Whether it can change while the server runs",
      value: ({ live }) => (live ? 0 : 1),
      text: ({ live }) => (live ? "Change" : ""),
      button: { press: (row) => this.dialog.open(row), title: ({ field }) => `Change ${field}` },
    };
  }

  show(options) {
    this.options = options;
    this.draw();
  }

  /** The server tells the reasons with its next facts. */
  changed(changes) {
    const now = new Map(changes.map((change) => [change.option, change.new]));
    const why = "changed just now";
    this.show(
      this.options.map((each) => (now.has(each.field) ? { ...each, value: now.get(each.field), why } : each)),
    );
  }

  draw() {
    const all = byId("options-all").checked;
    const shown = all ? this.options : this.options.filter(({ why }) => why !== "default");
    this.table.show(shown);
    const rest = this.options.length - shown.length;
    setText(byId("options-count"), rest ? `${shown.length} resolved, ${rest} more at their defaults` : "");
  }
}
