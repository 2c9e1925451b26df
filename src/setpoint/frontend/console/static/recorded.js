// A recording as the page's source: all moments at once, and for the time cursor the table of
// requests and the doctor's report of that time.

import { byId, make, setText } from "./dom.js";
import { clock } from "./format.js";
import { refusalOf } from "./transport.js";

const SPEEDS = [1, 10, 60];
const TICK_MS = 250;
const PATH = "/console/recording";

export class RecordedSource {
  /** `timeline`: its cursor is moved; `draw`: shows what it moved to. */
  constructor(timeline, draw) {
    this.timeline = timeline;
    this.draw = draw;
    this.wanted = null;
    this.isAsking = false;
  }

  async subscribe(handler) {
    this.handler = handler;
    handler("connection", { state: "connecting" });
    try {
      const response = await fetch(PATH);
      if (!response.ok) throw new Error(await refusalOf(response));
      const { state, moments, notes } = await response.json();
      handler("connection", { state: "recording" });
      handler("state", state);
      this.timeline.kept = Infinity; // a recording of a day has 86,400
      for (const moment of moments) handler("moment", moment);
      if (notes.length) handler("note", notes.join(" "));
      const last = moments.at(-1);
      this.begin = moments[0].at;
      this.end = last.at + (last.seconds ?? 0);
      this.build();
      if (this.end - this.begin < 240) byId("window").querySelector("[data-seconds='60']").click();
      this.moveTo(this.begin + Math.min(60, this.end - this.begin));
    } catch (error) {
      handler("connection", { state: "lost", text: `The recording cannot be shown: ${error.message}` });
    }
  }

  /** The bar that moves the cursor. */
  build() {
    this.slider = make("input", {
      type: "range",
      id: "scrub",
      min: Math.floor(this.begin),
      max: Math.ceil(this.end),
      step: 1,
      "aria-label": "Time in the recording",
      oninput: () => this.moveTo(Number(this.slider.value)),
      onkeydown: (event) => this.key(event),
    });
    this.time = make("output", { class: "time", for: "scrub" });
    this.play = make("button", { type: "button", class: "button", id: "play", onclick: () => this.toggle() }, "Play");
    this.speed = make(
      "select",
      { "aria-label": "Speed", id: "speed" },
      ...SPEEDS.map((speed) => make("option", { value: speed }, `${speed}×`)),
    );
    this.speed.value = 10;
    byId("player").replaceChildren(this.play, this.speed, this.slider, this.time);
    byId("player").hidden = false;
  }

  key(event) {
    const minute = { PageUp: 60, PageDown: -60 }[event.key];
    if (!minute) return; // the browser moves by a second, and to the ends
    event.preventDefault();
    this.moveTo(this.timeline.cursor + minute);
  }

  toggle() {
    if (this.timer) return this.stop();
    if (this.timeline.cursor >= this.end) this.moveTo(this.begin);
    setText(this.play, "Stop");
    this.timer = setInterval(() => {
      this.moveTo(this.timeline.cursor + (Number(this.speed.value) * TICK_MS) / 1000);
      if (this.timeline.cursor >= this.end) this.stop();
    }, TICK_MS);
  }

  stop() {
    clearInterval(this.timer);
    this.timer = null;
    setText(this.play, "Play");
  }

  moveTo(time) {
    const at = Math.min(Math.max(time, this.begin), this.end);
    this.timeline.cursor = at;
    this.slider.value = Math.round(at);
    const text = `${clock(at)}, ${Math.round(at - this.begin)} of ${Math.round(this.end - this.begin)} s`;
    this.slider.setAttribute("aria-valuetext", text);
    setText(this.time, text);
    this.draw();
    this.wanted = at;
    this.ask();
  }

  /** One question at a time; the latest wins. */
  async ask() {
    if (this.isAsking) return;
    this.isAsking = true;
    try {
      while (this.wanted !== null) {
        const at = this.wanted;
        this.wanted = null;
        const response = await fetch(`${PATH}/at?time=${at}`);
        if (!response.ok) throw new Error(await refusalOf(response));
        const { requests, doctor } = await response.json();
        this.handler("requests", requests);
        this.handler("doctor", doctor);
      }
    } catch (error) {
      this.handler("connection", { state: "lost", text: `The recording is no longer served: ${error.message}` });
    } finally {
      this.isAsking = false;
    }
  }
}
