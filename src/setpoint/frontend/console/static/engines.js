// The engines of a server with several: how it stands with each, and which of them the charts show.

import { byId, make, setText } from "./dom.js";
import { exact } from "./format.js";
import { ALL } from "./timeline.js";
import { engineWord } from "./words.js";

export class Engines {
  /** `choose(lane)`: called with the rank that the charts are to show, or ALL. */
  constructor(choose) {
    this.choose = choose;
    this.standings = [];
    this.chosen = ALL;
    this.buttons = new Map();
  }

  get count() {
    return this.standings.length;
  }

  /** Whether a request would be processed now, as far as the page knows. */
  get isServing() {
    return !this.count || this.standings.some(({ state }) => state === "ready");
  }

  show(standings) {
    this.standings = standings;
    byId("engines").hidden = standings.length < 2;
    if (standings.length < 2) return;
    const total = standings.reduce((sum, { num_requests: open }) => sum + open, 0);
    this.button(ALL, "ready", "All engines", requests(total), "");
    for (const { dp_rank: rank, state, num_requests: open, num_restarts: restarts, death } of standings) {
      const times = restarts ? `, restarted ${restarts === 1 ? "once" : `${exact(restarts)} times`}` : "";
      const word = state === "ready" ? requests(open) + times : engineWord(state);
      this.button(rank, state, `DP${rank}`, word, death);
    }
  }

  button(lane, state, name, text, title) {
    if (!this.buttons.has(lane)) {
      const made = make(
        "button",
        { type: "button", "aria-pressed": lane === this.chosen, onclick: () => this.press(lane) },
        make("b", {}, name),
        make("span", {}),
      );
      this.buttons.set(lane, made);
      byId("engines").append(made);
    }
    const button = this.buttons.get(lane);
    button.dataset.state = state;
    button.title = title && `The engine before this one ended: ${title}`;
    if (state !== "ready" && title) button.title = title;
    setText(button.lastChild, text);
  }

  press(lane) {
    this.chosen = lane;
    for (const [each, button] of this.buttons) button.setAttribute("aria-pressed", each === lane);
    this.choose(lane);
  }
}

const requests = (count) => `${exact(count)} ${count === 1 ? "request" : "requests"}`;
