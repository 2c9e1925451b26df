// Where the page's data come from. The page knows one interface:
//
//   source.subscribe(handler)   handler(name, data) is called with each event, in order:
//     "connection"  {state: "connecting" | "open" | "lost" | "denied", text}
//     "state"       facts about the server (docs/console.md#the-stream)
//     "engines"     how it stands with each engine
//     "moment"      what the server did in a second; of several engines, what each did, too
//     "requests"    the table of requests
//     "doctor"      the doctor's report
//
// LiveSource reads the server's stream. recorded.js is a source of the same events for a recording.

import { keyHeaders } from "./access.js";
import { eventsOf, refusalOf } from "./transport.js";

const SILENCE_MS = 20_000; // the server sends something at least every few seconds
const LONGEST_WAIT_MS = 5_000;

export class LiveSource {
  constructor(url, { askForKey }) {
    this.url = url;
    this.askForKey = askForKey;
  }

  subscribe(handler) {
    this.handler = handler;
    this.run();
  }

  async run() {
    let wait = 500;
    for (;;) {
      this.handler("connection", { state: "connecting" });
      const outcome = await this.read(() => (wait = 500));
      this.handler("connection", outcome);
      if (outcome.state === "denied") {
        await this.askForKey();
        continue;
      }
      await new Promise((resolve) => setTimeout(resolve, wait));
      wait = Math.min(wait * 2, LONGEST_WAIT_MS);
    }
  }

  /** Reads until the connection ends; returns how it ended. */
  async read(onOpen) {
    const stopper = new AbortController();
    let timer = setTimeout(() => stopper.abort(), SILENCE_MS);
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(() => stopper.abort(), SILENCE_MS);
    };
    try {
      const response = await fetch(this.url, {
        headers: keyHeaders(),
        signal: stopper.signal,
        cache: "no-store",
      });
      if (response.status === 401) return { state: "denied", text: "The server needs an API key." };
      if (!response.ok) return { state: "lost", text: await refusalOf(response) };
      onOpen();
      this.handler("connection", { state: "open" });
      for await (const [name, data] of eventsOf(response, heard)) {
        this.handler(name, JSON.parse(data));
      }
      return { state: "lost", text: "The server has ended the connection." };
    } catch {
      return { state: "lost", text: "The server cannot be reached." };
    } finally {
      clearTimeout(timer);
      stopper.abort();
    }
  }
}
