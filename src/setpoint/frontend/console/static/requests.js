// The table of requests: those that are open, and the last that ended.

import { byId, setText } from "./dom.js";
import { exact, rate, seconds } from "./format.js";
import { Table } from "./tables.js";
import { endWord, reason, stateWord } from "./words.js";

const ORDER = ["running", "prefill", "retracted", "waiting", "preparing", "ended"];

const number = (label, name, text, title) => ({
  label,
  title,
  number: true,
  value: (row) => row[name],
  text: (row) => text(row[name]),
});

const COLUMNS = [
  {
    label: "State",
    className: "state",
    value: (row) => ORDER.indexOf(row.state),
    text: (row) => stateWord(row.state) + (row.dp_rank === undefined ? "" : ` on DP${row.dp_rank}`),
  },
  {
    label: "Request",
    className: "rid",
    value: (row) => row.rid,
    text: (row) => row.rid,
  },
  { label: "Route", value: (row) => row.route ?? "", text: (row) => row.route || "batch" },
  { label: "Why", className: "why", value: why, text: why },
  number("Prompt", "prompt", (value) => exact(value ?? 0), "Prompt tokens"),
  number("Cached", "cached", (value) => exact(value ?? 0), "Prompt tokens that the prefix cache supplied"),
  number("Output", "output", (value) => exact(value ?? 0), "Tokens generated so far"),
  number("Waited", "waited_s", seconds, "Until it was admitted"),
  number("Ran", "ran_s", seconds, "Since it was admitted"),
  number("First token", "ttft_s", seconds, "From its arrival to its first token"),
  number("Tokens/s", "tps", rate, "Output tokens per second since the first"),
];

function why(row) {
  if (row.state === "ended") return row.end ? endWord(row.end) : "";
  if (!row.why) return "";
  return row.place > 1 ? `${reason(row.why)}, place ${exact(row.place)}` : reason(row.why);
}

export class Requests {
  constructor() {
    this.table = new Table(byId("requests-table"), "Open and recent requests", COLUMNS, {
      key: (row) => row.rid,
      none: "There have been no requests yet.",
      noMatch: "No request matches",
    });
    byId("requests-filter").addEventListener("input", (event) => this.table.filter(event.target.value));
    this.show({ num_running: 0, num_queued: 0, num_preparing: 0, rows: [] });
  }

  show({ num_running: running, num_queued: queued, num_preparing: preparing, rows }) {
    this.table.show(rows);
    const open = rows.filter((row) => row.state !== "ended").length;
    const all = running + queued;
    const counts = `${exact(running)} running, ${exact(queued)} waiting`;
    const grammar = preparing ? `, ${exact(preparing)} of them for a grammar` : "";
    const part = open < all ? `; ${open} of them are shown` : "";
    setText(byId("requests-count"), counts + grammar + part);
  }
}
