// The options as the server resolved them, each with its reason.

import { byId, setText } from "./dom.js";
import { option } from "./format.js";
import { Table } from "./tables.js";

const COLUMNS = [
  { label: "Option", className: "name", value: ({ field }) => field, text: ({ field }) => field },
  {
    label: "Value",
    className: "value",
    value: ({ value }) => option(value),
    text: ({ value }) => option(value),
  },
  { label: "Reason", value: ({ why }) => why, text: ({ why }) => why },
];

export class Options {
  constructor() {
    this.options = [];
    this.table = new Table(byId("options-table"), "Resolved options", COLUMNS, ({ field }) => field);
    byId("options-filter").addEventListener("input", (event) => this.table.filter(event.target.value));
    byId("options-all").addEventListener("change", () => this.draw());
  }

  show(options) {
    this.options = options;
    this.draw();
  }

  draw() {
    const all = byId("options-all").checked;
    const shown = all ? this.options : this.options.filter(({ why }) => why !== "default");
    this.table.show(shown);
    const rest = this.options.length - shown.length;
    setText(byId("options-count"), rest ? `${shown.length} resolved, ${rest} more at their defaults` : "");
  }
}
