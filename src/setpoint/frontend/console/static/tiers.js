// What each engine's cache tiers have done, and on servers that compute one part of a request only,
// the requests that wait for the other server.

import { byId, make, setText } from "./dom.js";
import { bytes, exact, seconds } from "./format.js";

const QUEUES = {
  prefill: ["nobody has asked for", "on their way to a decode server"],
  decode: ["wait for room", "on their way from a prefill server"],
};

export class Tiers {
  constructor() {
    this.box = byId("tiers");
  }

  /** The facts about a server have one entry for each engine; those of a recording have none. */
  show({ tiers: all = [], handover: handovers = [] }) {
    const several = all.length > 1;
    const lines = all.flatMap((tiers, number) => {
      const of = several ? `Engine ${number}: ` : "";
      const handover = handovers[number];
      return [
        ...(tiers ? [[of + words(tiers), toneOf(tiers)]] : []),
        ...(handover ? [[of + queueWords(handover), ""]] : []),
      ];
    });
    this.box.hidden = !lines.length;
    while (this.box.children.length > lines.length + 1) this.box.lastChild.remove();
    while (this.box.children.length < lines.length + 1) this.box.append(make("p"));
    lines.forEach(([text, tone], number) => {
      const line = this.box.children[number + 1];
      line.dataset.tone = tone;
      setText(line, text);
    });
  }
}

const toneOf = (tiers) => (tiers.has_tier === false ? "" : tiers.off ? "bad" : tiers.is_thrifty ? "warn" : "good");

function words(tiers) {
  const place = tiers.place ? ` in ${tiers.place}` : "";
  if (tiers.has_tier === false) return "No storage in use";
  const name = tiers.backend ? `Storage ${tiers.backend}${place}` : "Host memory";
  if (tiers.off) return `${name}: off. ${tiers.off}`;
  const from = Object.entries(tiers.loaded_by_tier)
    .map(([tier, tokens]) => `${tier} ${exact(tokens)}`)
    .join(", ");
  return [
    `${name}: loaded ${exact(tiers.loaded_tokens)} tokens (${from}; ${bytes(tiers.loaded_bytes)}) in ${seconds(tiers.load_s)}`,
    `instead of computing for ${seconds(tiers.earned_s)}`,
    `saved ${exact(tiers.saved_tokens)} (${bytes(tiers.saved_bytes)}) in ${seconds(tiers.save_s)}`,
    ...(tiers.is_thrifty ? ["only blocks that were used twice are saved, because saving has not paid"] : []),
  ].join(" · ");
}

function queueWords({ role, num_waiting, num_moving, num_retracted }) {
  const [waiting, moving] = QUEUES[role];
  const retracted = role === "decode" ? `, ${exact(num_retracted)} retracted` : "";
  return `Requests of this ${role} server: ${exact(num_waiting)} ${waiting}, ${exact(num_moving)} ${moving}${retracted}`;
}
