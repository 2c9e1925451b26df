// The words for what the server names by ids.

/** Cause of the doctor -> [what the page calls it, its tone, its colour in the band]. */
const CAUSES = {
  "healthy": ["Healthy", "good", "--good"],
  "client-bound": ["Waiting for requests", "calm", "--s-blue"],
  "not-enough-evidence": ["Not enough evidence", "wait", "--s-grey"],
  "idle": ["Idle", "calm", "--s-grey"],
  "unknown": ["Unknown", "wait", "--free"],
  "grammar-queue": ["Waiting for grammars", "warn", "--s-pink"],
  "admission-delayed": ["Admission delayed", "warn", "--s-olive"],
  "other-pool-full": ["Second pool full", "warn", "--s-orange"],
  "seq-cap": ["Request limit reached", "warn", "--s-purple"],
  "kv-conservative": ["Memory reserve too large", "warn", "--s-gold"],
  "kv-optimistic": ["Memory reserve too small", "warn", "--s-red"],
  "kv-full": ["KV pool full", "warn", "--s-orange"],
  "mem-underused": ["Memory left unused", "warn", "--s-pink"],
  "mem-headroom-low": ["Too little memory free", "warn", "--s-pink"],
  "prefill-budget": ["Prefill batches full", "warn", "--s-teal"],
  "long-prompt-blocking": ["Long prompts block others", "warn", "--s-teal"],
  "queue-too-long": ["Queue too long", "warn", "--s-red"],
  "graph-miss": ["Decode without CUDA graphs", "warn", "--s-olive"],
  "prefix-miss": ["Prefixes computed again", "warn", "--s-olive"],
  "batch-too-large": ["Batch too large", "warn", "--s-purple"],
  "oom-init": ["Out of memory at start", "bad", "--s-red"],
  "oom-prefill": ["Out of memory in prefill", "bad", "--s-red"],
  "oom-decode": ["Out of memory in decode", "bad", "--s-red"],
  "pool-leak": ["KV pool leak", "bad", "--s-red"],
  "rank-imbalance": ["Uneven ranks", "warn", "--s-olive"],
  "host-bound": ["Device waits for host", "warn", "--s-olive"],
  "backend-suboptimal": ["Slow attention backend", "warn", "--s-olive"],
  "cpu-contended": ["Other programs take the CPU", "warn", "--s-red"],
  "cache-tier": ["The cache tier is off or does not pay", "warn", "--s-olive"],
  "parallelism-suboptimal": ["Copies would be faster", "warn", "--s-olive"],
  "server-dead": ["Server ended", "bad", "--s-red"],
};

/** An id that this page does not know, as words: "grammar-queue" -> "Grammar queue". */
const spelled = (id) => id.charAt(0).toUpperCase() + id.slice(1).replaceAll(/[-_]/g, " ");

export const causeWord = (id) => CAUSES[id]?.[0] ?? spelled(id);
export const causeTone = (id) => CAUSES[id]?.[1] ?? "warn";
export const causeColour = (id) => CAUSES[id]?.[2] ?? "--s-olive";

/** Why a request waits -> the reason as the end of "It waits because …". */
const REASONS = {
  no_slot: "the limit on running requests is reached",
  no_memory: "the KV pool has no room for it",
  token_budget: "the prefill batch is full",
  chunk_budget: "the prefill chunk is full",
  prefill_limit: "the prefill batch has enough prompts",
  delayed: "admission waits for a larger batch",
  decode_turn: "it is the turn of decode",
  blocked: "other requests are ahead of it",
  grammar: "its grammar is being compiled",
  paused: "the server is paused",
  engine: "no engine is ready",
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

const ENGINES = {
  starting: "starting",
  restarting: "restarting",
  stopped: "stopped by a signal",
  ended: "ended for good",
};
export const engineWord = (id) => ENGINES[id] ?? spelled(id);

const ENDS = {
  stop: "complete",
  length: "token limit reached",
  abort: "aborted",
  left: "client left",
};
export const endWord = (id) => ENDS[id] ?? spelled(id);
