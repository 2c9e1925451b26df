// A chat with the model, over the same API that clients use.

import { keyHeaders } from "./access.js";
import { byId, make, setText } from "./dom.js";
import { exact, rate, seconds } from "./format.js";
import { eventsOf, refusalOf } from "./transport.js";

const ROUTE = "/v1/chat/completions";

export class Chat {
  constructor() {
    this.messages = [];
    this.stopper = null;
    this.model = "default";
    this.log = byId("chat-log");
    this.input = byId("chat-input");
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    byId("chat-stop").addEventListener("click", () => this.stopper?.abort());
    byId("chat-clear").addEventListener("click", () => this.clear());
    this.clear();
  }

  /** Takes the server's facts: the model's name, and whether it can chat at all. */
  know({ model, chats }) {
    this.model = model;
    this.input.disabled = byId("chat-send").disabled = !chats;
    this.input.placeholder = chats ? "Message the model" : "This model has no chat template.";
  }

  clear() {
    this.stopper?.abort();
    this.messages = [];
    this.log.replaceChildren(
      make("p", { class: "empty" }, "Ask something, and watch the charts. Enter sends, Shift+Enter begins a new line."),
    );
    setText(byId("chat-stats"), "");
  }

  async send() {
    const text = this.input.value.trim();
    if (!text || this.stopper) return;
    if (!this.messages.length) this.log.replaceChildren();
    this.input.value = "";
    this.messages.push({ role: "user", content: text });
    this.add("user", text);
    const answer = new Answer(this.add("assistant", ""), byId("chat-stats"), () => this.follow());
    this.busy(new AbortController());
    const messages = this.messages;
    await this.stream(answer);
    // What was said so far stays part of the conversation, also if it was stopped.
    if (messages === this.messages) {
      if (answer.text) this.messages.push({ role: "assistant", content: answer.text });
      else this.messages.pop();
    }
    this.busy(null);
    this.input.focus();
  }

  async stream(answer) {
    try {
      const response = await fetch(ROUTE + location.search, {
        method: "POST",
        headers: { "content-type": "application/json", ...keyHeaders() },
        body: JSON.stringify(this.body()),
        signal: this.stopper.signal,
      });
      if (!response.ok) return answer.fail(await refusalOf(response));
      for await (const [, data] of eventsOf(response)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) return answer.fail(chunk.error.message ?? "The answer was cut short.");
        answer.take(chunk);
      }
      answer.end();
    } catch (error) {
      if (error.name === "AbortError") answer.end("stopped");
      else answer.fail("The connection was lost before the answer was complete.");
    }
  }

  body() {
    const system = byId("chat-system").value.trim();
    const limit = Number.parseInt(byId("chat-limit").value, 10);
    const temperature = Number.parseFloat(byId("chat-temperature").value);
    return {
      model: this.model,
      messages: system ? [{ role: "system", content: system }, ...this.messages] : this.messages,
      stream: true,
      stream_options: { include_usage: true },
      ...(Number.isFinite(temperature) && { temperature }),
      ...(Number.isFinite(limit) && { max_tokens: limit }),
    };
  }

  add(role, text) {
    const body = make("p", { class: "said" }, text);
    this.log.append(
      make("div", { class: `turn ${role}` }, make("span", { class: "sr" }, role === "user" ? "You:" : "Model:"), body),
    );
    this.follow(true);
    return body;
  }

  /** Keeps the end in sight, unless the reader has scrolled back. */
  follow(always = false) {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    if (always || scrollHeight - scrollTop - clientHeight < 80) this.log.scrollTop = scrollHeight;
  }

  busy(stopper) {
    this.stopper = stopper;
    byId("chat-stop").hidden = !stopper;
    byId("chat-send").hidden = Boolean(stopper);
    this.log.setAttribute("aria-busy", Boolean(stopper));
  }
}

/** One answer while it arrives. */
class Answer {
  text = "";
  tokens = 0; // chunks until the server tells the number
  firstAt = null;

  constructor(body, stats, follow) {
    this.body = body;
    this.stats = stats;
    this.follow = follow;
    this.beganAt = performance.now();
    this.body.classList.add("arriving");
    setText(stats, "Waiting for the first token");
  }

  take(chunk) {
    const delta = chunk.choices?.[0]?.delta ?? {};
    if (delta.reasoning_content) this.think(delta.reasoning_content);
    if (delta.content) {
      this.text += delta.content;
      this.body.append(delta.content);
    }
    if (delta.content || delta.reasoning_content) {
      this.firstAt ??= performance.now();
      this.lastAt = performance.now();
      this.tokens += 1;
    }
    if (chunk.usage) this.tokens = chunk.usage.completion_tokens;
    this.tell();
    this.follow();
  }

  /** What a reasoning model thinks before it answers, folded. */
  think(text) {
    if (!this.thoughts) {
      this.thoughts = make("p", { class: "said" });
      this.body.before(make("details", { class: "thoughts" }, make("summary", {}, "Thoughts"), this.thoughts));
    }
    this.thoughts.append(text);
  }

  tell(how = "") {
    if (this.firstAt === null) return setText(this.stats, how);
    const parts = [`${exact(this.tokens)} tokens`];
    const ran = (this.lastAt - this.firstAt) / 1000;
    if (this.tokens > 1 && ran > 0) parts.push(`${rate((this.tokens - 1) / ran)} tokens/s`);
    parts.push(`first token after ${seconds((this.firstAt - this.beganAt) / 1000)}`);
    if (how) parts.push(how);
    setText(this.stats, parts.join(" · "));
  }

  end(how = "") {
    this.body.classList.remove("arriving");
    this.tell(how);
  }

  fail(sentence) {
    this.end("failed");
    this.body.parentElement.append(make("p", { class: "failure", role: "alert" }, sentence));
    this.follow();
  }
}
