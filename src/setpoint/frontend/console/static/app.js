// Puts the page together: one source of events, one timeline, and the parts that show them.

import { askForKey } from "./access.js";
import { Charts } from "./charts.js";
import { Chat } from "./chat.js";
import { Doctor } from "./doctor.js";
import { byId, make, oncePerFrame, setText } from "./dom.js";
import { Engines } from "./engines.js";
import { clock, count, exact } from "./format.js";
import { Options } from "./options.js";
import { RecordedSource } from "./recorded.js";
import { Requests } from "./requests.js";
import { LiveSource } from "./source.js";
import { LimitBand, PoolMap } from "./strips.js";
import { installTheme, onTheme } from "./theme.js";
import { Tiers } from "./tiers.js";
import { ALL, Timeline } from "./timeline.js";

const isRecording = document.body.dataset.source === "recording";
let facts = null;
let connection = { state: "connecting" };
let paused = null;

installTheme();
const timeline = new Timeline();
const charts = new Charts(byId("charts"), timeline);
const band = new LimitBand(byId("limits"), timeline);
const pool = new PoolMap(byId("pool"), timeline);
const doctor = new Doctor(() => facts);
const requests = new Requests();
const options = new Options();
const chat = new Chat();
const tiers = new Tiers();
const engines = new Engines((lane) => {
  timeline.lane = lane;
  draw();
});
byId("chat").hidden = isRecording;
byId("pause").hidden = isRecording; // the recording has its own bar

const draw = oncePerFrame(() => {
  charts.draw();
  band.draw();
  pool.draw();
});
onTheme(() => {
  charts.rebuild();
  draw();
});

const handlers = {
  connection(news) {
    connection = news;
    const isLost = news.state === "lost";
    byId("notice").hidden = !isLost;
    if (isLost) setText(byId("notice"), isRecording ? news.text : `${news.text} Trying again…`);
    showStatus();
  },
  note(text) {
    byId("notice").hidden = false;
    setText(byId("notice"), text);
  },
  state(news) {
    facts = news;
    paused = news.paused;
    showFacts();
    options.show(news.options);
    chat.know(news);
    tiers.show(news);
    showStatus();
  },
  engines(standings) {
    engines.show(standings);
    if (facts) showFacts();
    showStatus();
  },
  moment(moment) {
    if (!timeline.add(moment)) return;
    showStatus();
    if (timeline.cursor === null) draw();
  },
  requests(table) {
    paused = table.paused;
    requests.show(table);
    showStatus();
  },
  doctor(report) {
    doctor.show(report);
  },
};

function showFacts() {
  const name = facts.model.split("/").at(-1);
  setText(byId("model"), name);
  byId("model").title = facts.model_path;
  document.title = `${name} – Setpoint console`;
  const parts = [`Setpoint ${facts.version ?? ""}`, facts.device, facts.dtype];
  if (facts.context_len) parts.push(`context of ${exact(facts.context_len)} tokens`);
  const each = engines.count > 1 ? " in each engine" : "";
  if (engines.count > 1) parts.push(`${engines.count} engines`);
  if (facts.pool_tokens) parts.push(`KV pool of ${exact(facts.pool_tokens)} tokens${each}`);
  const most = facts.limits?.max_running_requests;
  if (most) parts.push(`at most ${exact(most)} running requests${each}`);
  if (facts.experts) parts.push(expertWords(facts.experts));
  setText(byId("about"), parts.filter(Boolean).join(" · "));
  showModels(facts.models ?? []);
}

/** All models of the server, if it has several; this page is about one of them. */
function showModels(models) {
  byId("models").hidden = models.length < 2;
  byId("models").replaceChildren(
    ...models.flatMap(({ name, state }, at) => {
      const isThis = name === facts.model ? "page" : null;
      const link = make("a", { href: `?model=${encodeURIComponent(name)}`, "aria-current": isThis }, name);
      return [at ? " · " : "", link, `: ${state}`];
    }),
  );
}

/** How evenly tokens use the experts, and the ranks that hold them: 1 is even. */
function expertWords(experts) {
  const { num_experts, num_layers, rank_tokens, num_rebalances } = experts;
  const words = `${exact(num_layers)} layers of ${exact(num_experts)} experts`;
  if (!experts.num_tokens) return words;
  if (rank_tokens.length === 1) return `${words}, balancedness ${experts.balancedness.toFixed(2)}`;
  const placed = num_rebalances ? `, placed anew ${exact(num_rebalances)} times` : "";
  return `${words} on ${exact(rank_tokens.length)} ranks, balancedness ${experts.eplb_balancedness.toFixed(2)}${placed}`;
}

/** The word beside the model's name. */
function showStatus() {
  const [state, word] = statusOf();
  byId("status").dataset.state = state;
  setText(byId("status"), word);
}

function statusOf() {
  if (connection.state === "recording") return ["idle", "Recording"];
  if (connection.state === "lost") return ["lost", "Connection lost"];
  if (connection.state === "denied") return ["lost", "API key needed"];
  if (connection.state === "connecting" || !facts) return ["connecting", "Connecting"];
  if (!engines.isServing) return ["connecting", "Waiting for an engine"];
  if (paused) return ["paused", "Paused by the operator"];
  const moment = timeline.lanes.get(ALL).at(-1);
  const [running, waiting] = [moment?.running_max, moment?.queue_max].map((most) => Math.round(most ?? 0));
  if (!running && !waiting) return ["idle", "Idle"];
  const ran = `${count(running)} ${running === 1 ? "request" : "requests"} running`;
  return ["serving", waiting ? `${ran}, ${count(waiting)} waiting` : ran];
}

byId("window").addEventListener("click", (event) => {
  const seconds = Number(event.target.dataset.seconds);
  if (!seconds) return;
  timeline.seconds = seconds;
  for (const button of byId("window").children) {
    button.setAttribute("aria-pressed", Number(button.dataset.seconds) === seconds);
  }
  draw();
});

byId("pause").addEventListener("click", () => {
  const isHeld = timeline.cursor === null;
  timeline.cursor = isHeld ? timeline.range[1] : null;
  byId("pause").setAttribute("aria-pressed", isHeld);
  setText(byId("pause"), isHeld ? "Resume" : "Pause");
  byId("pause").title = isHeld ? `The charts stand still at ${clock(timeline.cursor)}.` : "";
  draw();
});

document.addEventListener("visibilitychange", draw);

const source = isRecording
  ? new RecordedSource(timeline, draw)
  : new LiveSource(`/console/stream${location.search}`, { askForKey });
source.subscribe((name, data) => handlers[name]?.(data));
draw();
