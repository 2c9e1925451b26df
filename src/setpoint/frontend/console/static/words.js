// The words for what the server names by ids.

/** Cause of the doctor -> [what the page calls it, its tone, its colour in the band]. */
const CAUSES = {
  "healthy": ["Healthy", "good", "--good"],
  "client-bound": ["Waiting for work", "calm", "--s-blue"],
  "not-enough-evidence": ["Not enough evidence", "wait", "--s-grey"],
  "idle": ["Idle", "calm", "--s-grey"],
  "unknown": ["Not known", "wait", "--free"],
  "grammar-queue": ["Waiting for grammars", "warn", "--s-pink"],
  "admission-delayed": ["Admission delayed", "warn", "--s-olive"],
  "other-pool-full": ["Another pool full", "warn", "--s-orange"],
  "seq-cap": ["Request limit", "warn", "--s-purple"],
  "kv-conservative": ["Memory reserve too large", "warn", "--s-gold"],
  "kv-optimistic": ["Memory reserve too small", "warn", "--s-red"],
  "kv-full": ["KV pool full", "warn", "--s-orange"],
  "mem-underused": ["Memory left unused", "warn", "--s-pink"],
  "mem-headroom-low": ["Little memory to spare", "warn", "--s-pink"],
  "prefill-budget": ["Prompt budget", "warn", "--s-teal"],
  "long-prompt-blocking": ["Long prompt blocks others", "warn", "--s-teal"],
  "queue-too-long": ["Queue too long", "warn", "--s-red"],
  "graph-miss": ["Decode without graphs", "warn", "--s-olive"],
  "prefix-miss": ["Prefixes computed again", "warn", "--s-olive"],
  "batch-too-large": ["Batch too large", "warn", "--s-purple"],
  "oom-init": ["Out of memory at start", "bad", "--s-red"],
  "oom-prefill": ["Out of memory in prefill", "bad", "--s-red"],
  "oom-decode": ["Out of memory in decode", "bad", "--s-red"],
  "pool-leak": ["Accounting error", "bad", "--s-red"],
  "server-dead": ["Server ended", "bad", "--s-red"],
};

/** An id that this page does not know, as words: "grammar-queue" -> "Grammar queue". */
const spelled = (id) => id.charAt(0).toUpperCase() + id.slice(1).replaceAll(/[-_]/g, " ");

export const causeWord = (id) => CAUSES[id]?.[0] ?? spelled(id);
export const causeTone = (id) => CAUSES[id]?.[1] ?? "warn";
export const causeColour = (id) => CAUSES[id]?.[2] ?? "--s-olive";

/** Why a request waits -> the reason as the end of "It waits because …". */
const REASONS = {
  no_slot: "every slot is taken",
  no_memory: "the KV pool has no room for it",
  token_budget: "this step's prompt tokens are used up",
  chunk_budget: "another prompt is computed in pieces",
  prefill_limit: "this step has enough prompts",
  delayed: "a larger batch is gathered",
  decode_turn: "decode has its turn",
  blocked: "others are before it",
  grammar: "its grammar is compiled",
  paused: "the server is paused",
};
export const reason = (id) => REASONS[id] ?? spelled(id);

const STATES = {
  preparing: "Preparing",
  waiting: "Waiting",
  retracted: "Retracted",
  prefill: "Prefill",
  running: "Running",
  ended: "Ended",
};
export const stateWord = (id) => STATES[id] ?? spelled(id);

const ENDS = {
  stop: "complete",
  length: "reached its limit",
  abort: "aborted",
  left: "client left",
};
export const endWord = (id) => ENDS[id] ?? spelled(id);
