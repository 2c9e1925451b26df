// The doctor's report: the verdict on top of the page, and its findings with what to type.

import { byId, copyButton, make, setText } from "./dom.js";
import { option, percent, setting } from "./format.js";
import { causeTone, causeWord } from "./words.js";

export class Doctor {
  /** `facts`: returns the latest facts about the server, or null. */
  constructor(facts) {
    this.facts = facts;
  }

  show(report) {
    this.verdict(report);
    const findings = report.findings ?? [];
    const parts = findings.map((finding, index) => this.finding(finding, index === 0));
    const missing = report.missing ?? [];
    if (missing.length) parts.push(listed("What would make the verdict more certain", missing));
    if (!parts.length) parts.push(make("p", { class: "empty" }, "No limit binds. There is nothing to change."));
    byId("findings").replaceChildren(...parts);
    const coverage = report.coverage ?? 1;
    setText(
      byId("doctor-hint"),
      coverage < 1
        ? `What limits this server, and what to change. ${percent(coverage)} of the observations were understood.`
        : "What limits this server, and what to change.",
    );
  }

  verdict(report) {
    byId("verdict").dataset.tone = causeTone(report.verdict);
    setText(byId("verdict-word"), causeWord(report.verdict));
    setText(byId("verdict-text"), proof(report.summary, report.verdict));
    byId("verdict-more").hidden = !(report.findings ?? []).length;
  }

  finding(finding, isFirst) {
    const { cause, confidence, summary, evidence = [], ruled_out: ruledOut = [] } = finding;
    return make(
      "article",
      { class: "finding", "data-tone": causeTone(cause) },
      make(
        "header",
        {},
        make("h3", {}, causeWord(cause)),
        make("code", { class: "id" }, cause),
        make("span", { class: "sure" }, `${percent(confidence)} sure`),
      ),
      make("p", {}, proof(summary, cause)),
      this.action(finding.action),
      effect(finding.effect),
      make(
        "details",
        { open: isFirst },
        make("summary", {}, "Evidence, alternatives and how to check"),
        listed("Evidence", evidence.map(line)),
        listed("Ruled out", ruledOut.map(({ cause: other, why }) => `${causeWord(other)}: ${why}`)),
        sentence("Risk", finding.risk),
        sentence("How to see that it helped", finding.verify),
        sentence("What would prove this wrong", finding.falsify),
      ),
    );
  }

  action(action) {
    if (!action) return null;
    const commands = this.commands(action);
    return make(
      "div",
      { class: "action" },
      make("p", {}, make("b", {}, "What to do: "), action.text),
      ...commands.map(([hint, command]) =>
        make(
          "div",
          { class: "command" },
          make("span", { class: "hint" }, hint),
          make("code", {}, command),
          copyButton(command, `the command: ${command}`),
        ),
      ),
    );
  }

  /** What to type, as [when, command]. */
  commands({ flag, value, live }) {
    if (!flag) return [];
    const isNamed = value === null || value === undefined;
    const typed = isNamed || value === true ? flag : `${flag} ${option(value)}`;
    const command = this.facts()?.command ?? "setpoint serve …";
    const next = value === false ? without(command, flag) : replaced(command, flag, typed);
    const restart = ["At the next start", next];
    if (!live || isNamed) return [restart];
    const name = flag.replace(/^--/, "").replaceAll("-", "_");
    return [["Now, without a restart", `setpoint set ${location.origin} ${name}=${setting(value)}`], restart];
  }
}

/** Matches a flag of a command, with its values if it has any. */
const given = (flag) => new RegExp(`(^| )${flag}(?:[ =](?!--)\\S+)*(?= |$)`);

/** The command with the flag as it is to be typed, in place of the one that it has, if any. */
function replaced(command, flag, typed) {
  return given(flag).test(command) ? command.replace(given(flag), `$1${typed}`) : `${command} ${typed}`;
}

const without = (command, flag) => command.replace(given(flag), "");

const capitalised = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/** The summary without the name of its cause, which stands above it. */
function proof(summary = "", cause) {
  const title = `${causeWord(cause)}: `;
  return summary.startsWith(title) ? capitalised(summary.slice(title.length)) : summary;
}

function effect(found) {
  if (!found?.figure) return null;
  const factor = (value) => Number(value.toFixed(value < 10 ? 2 : 0));
  return make(
    "p",
    {},
    make("b", {}, "What to expect: "),
    `${capitalised(found.figure)} should be ${factor(found.expected)} times today's `,
    `(between ${factor(found.low)} and ${factor(found.high)} times). `,
    make("span", { class: "hint" }, found.why ? `${capitalised(found.why)}.` : ""),
  );
}

const line = ({ line: number, text }) => (number ? `Line ${number}: ${text}` : text);

const sentence = (title, text) =>
  text ? make("p", {}, make("b", {}, `${title}: `), text) : null;

const listed = (title, texts) =>
  texts.length
    ? make("div", {}, make("h4", {}, title), make("ul", {}, ...texts.map((text) => make("li", {}, text))))
    : null;
