// Two strips below the charts: which limit bound at which time, and who has the KV pool's tokens.

import { make, setText } from "./dom.js";
import { clock, exact, percent } from "./format.js";
import { endOf, runsOf } from "./timeline.js";
import { causeColour, causeWord } from "./words.js";

const UNKNOWN = "unknown";
const NAMED_FROM = 0.13; // the share of the strip from which on a stretch has room for its name

/** The limit that bound over time, as a band. */
export class LimitBand {
  constructor(root, timeline) {
    this.timeline = timeline;
    this.band = make("div", { class: "band", role: "img" });
    this.legend = make("div", { class: "legend" });
    root.append(
      make("div", { class: "strip-head" }, make("h3", {}, "Binding limit over time"), this.legend),
      this.band,
    );
  }

  draw() {
    const [from, to] = this.timeline.range;
    const span = to - from;
    const limitOf = (moment) => moment.limit ?? UNKNOWN;
    const same = (one, other) => limitOf(one) === limitOf(other);
    const runs = runsOf(this.timeline.shown, same).map(([first, last]) => ({
      limit: limitOf(first),
      begin: Math.max(first.at, from),
      end: Math.min(endOf(last), to),
    }));
    this.band.replaceChildren(
      ...runs.map(({ limit, begin, end }) => {
        const share = (end - begin) / span;
        return make(
          "span",
          {
            title: `${causeWord(limit)}, ${clock(begin)} to ${clock(end)}`,
            style: {
              left: `${((begin - from) / span) * 100}%`,
              width: `${share * 100}%`,
              background: `var(${causeColour(limit)})`,
            },
          },
          share > NAMED_FROM && limit !== UNKNOWN ? causeWord(limit) : "",
        );
      }),
    );
    const shares = sharesOf(runs);
    const told = shares.map(([limit, share]) => `${causeWord(limit)} ${percent(share)}`);
    this.band.setAttribute("aria-label", told.join(", ") || "No moments yet");
    this.legend.replaceChildren(
      ...shares.map(([limit, share]) => item(causeColour(limit), causeWord(limit), percent(share))),
    );
  }
}

function sharesOf(runs) {
  const seconds = new Map();
  for (const { limit, begin, end } of runs) {
    seconds.set(limit, (seconds.get(limit) ?? 0) + end - begin);
  }
  const all = [...seconds.values()].reduce((sum, each) => sum + each, 0);
  return [...seconds].sort((one, other) => other[1] - one[1]).map(([limit, part]) => [limit, part / all]);
}

const PARTS = [
  ["locked", "Locked", "--s-blue", "in the prefix cache and in use by requests"],
  ["held", "Held", "--s-purple", "used by running requests only"],
  ["evictable", "Evictable", "--s-teal", "in the prefix cache, and freed when room is needed"],
  ["free", "Free", "--free", "empty"],
];

/** Who has the tokens of the KV pool. */
export class PoolMap {
  constructor(root, timeline) {
    this.timeline = timeline;
    this.total = make("span", { class: "unit" });
    this.parts = PARTS.map(([name, word, colour, meaning]) => ({
      name,
      word,
      bar: make("span", { title: `${word}: ${meaning}`, style: { background: `var(${colour})` } }),
      value: make("b", {}, "–"),
      colour,
      meaning,
    }));
    this.bar = make("div", { class: "band pool", role: "img" }, ...this.parts.map(({ bar }) => bar));
    const legend = this.parts.map(({ colour, word, value, meaning }) => {
      const each = item(colour, word, value);
      each.title = meaning;
      return each;
    });
    root.append(
      make(
        "div",
        { class: "strip-head" },
        make("h3", {}, "KV pool"),
        this.total,
        make("div", { class: "legend" }, ...legend),
      ),
      this.bar,
    );
  }

  draw() {
    const pool = this.timeline.present?.pool ?? {};
    const total = pool.total ?? 0;
    setText(this.total, total ? `${exact(total)} tokens` : "");
    for (const { name, bar, value } of this.parts) {
      bar.style.width = total ? `${(pool[name] / total) * 100}%` : "0";
      setText(value, total ? `${exact(pool[name])} (${percent(pool[name] / total)})` : "–");
    }
    const told = this.parts.map(({ name, word }) => `${word} ${exact(pool[name])} tokens`);
    this.bar.setAttribute("aria-label", total ? told.join(", ") : "Not known yet");
  }
}

const item = (colour, label, value) =>
  make(
    "span",
    { class: "item" },
    make("i", { class: "swatch", style: { background: `var(${colour})` } }),
    make("span", {}, label),
    typeof value === "string" ? make("b", {}, value) : value,
  );
