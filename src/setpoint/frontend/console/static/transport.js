// Server-sent events over fetch. Not EventSource, because that cannot send an API key.

/**
 * The events of a response, as [name, data] with data as text. `onBytes` is called whenever
 * something arrives, comments included.
 */
export async function* eventsOf(response, onBytes = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      onBytes();
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        let name = "message";
        const data = [];
        for (const line of block.split("\n")) {
          if (line.startsWith("event:")) name = line.slice(6).trim();
          else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
        }
        if (data.length) yield [name, data.join("\n")];
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The sentence in a refusal, whichever of the server's APIs made it. */
export async function refusalOf(response) {
  let said = null;
  try {
    const body = await response.json();
    said = body?.error?.message ?? body?.message ?? body?.detail ?? null;
  } catch {
    // not JSON: something between this page and the server has answered
  }
  return typeof said === "string" && said ? said : `The server answered with status ${response.status}.`;
}
