"""The text that a server prints when it is ready: its address, and two examples to paste, one for a
shell and one for Python."""

from __future__ import annotations

QUESTION = "Name three colours."
IDS = [5, 17, 99, 3]
"""Token ids that every vocabulary has."""
TEXTS = ["The capital of France is Paris.", "Paris lies on the Seine."]


def address(host: str, port: int) -> str:
    """A URL that works on this machine: a server that listens on all of its addresses also answers
    on the local one."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


NOT_FOR_CLIENTS = {
    "prefill": "This is a prefill server: clients talk to the router or to the decode server.",
    "decode": "This is a decode server without --disaggregation-prefill-servers: clients talk to"
    " the router in front of it.",
}
"""What a server says instead of examples that computes one part of each request."""


def address_only(url: str, why: str) -> str:
    """The text for a server that clients do not talk to."""
    return f"\nReady: {url}\nConsole: {url}/console\n\n{why}\n"


def invitation(
    url: str, *, has_key: bool, is_embedding: bool, is_ids_only: bool = False, model: str = ""
) -> str:
    """The text of the invitation. Each line stands alone, because indented or continued lines are
    hard to paste. is_ids_only: the server reads and writes token ids, no text.
    model: the one to name; "": the server has only one."""
    key = ' -H "Authorization: Bearer $API_KEY"' if has_key else ""
    if is_ids_only:
        return _with_ids(url, key, has_key=has_key, is_embedding=is_embedding)
    name, called = f'"model": "{model}", ' if model else "", f'"{model or "default"}"'
    if is_embedding:
        path, body = "embeddings", f'{{{name}"input": {_json(TEXTS)}}}'
        call = f"client.embeddings.create(model={called}, input={_json(TEXTS)})"
        result = "data[0].embedding[:8]"
    else:
        messages = f'[{{"role": "user", "content": "{QUESTION}"}}]'
        path, body = "chat/completions", f'{{{name}"messages": {messages}, "max_tokens": 64}}'
        call = f"client.chat.completions.create(model={called}, messages={messages}, max_tokens=64)"
        result = "choices[0].message.content"
    imported, api_key = ("import os\n", 'os.environ["API_KEY"]') if has_key else ("", '"none"')
    return f"""
Ready: {url}
Console: {url}/console

curl {url}/v1/{path} -H "Content-Type: application/json"{key} -d '{body}'

{imported}from openai import OpenAI  # pip install openai
client = OpenAI(base_url="{url}/v1", api_key={api_key})
print({call}.{result})
"""


def _with_ids(url: str, key: str, *, has_key: bool, is_embedding: bool) -> str:
    """The text for a server that takes token ids only, by the native routes."""
    if is_embedding:
        route, body, result = "encode", f'{{"input_ids": {IDS}}}', '["embedding"][:8]'
    else:
        body = f'{{"input_ids": {IDS}, "sampling_params": {{"max_new_tokens": 16}}}}'
        route, result = "generate", '["output_ids"]'
    imported, headers = "", ""
    if has_key:
        imported = "import os\n"
        headers = ', headers={"Authorization": "Bearer " + os.environ["API_KEY"]}'
    return f"""
Ready: {url}
Console: {url}/console

curl {url}/{route} -H "Content-Type: application/json"{key} -d '{body}'

{imported}import httpx  # pip install httpx
answer = httpx.post("{url}/{route}", json={body}{headers}, timeout=60)
print(answer.json(){result})
"""


def _json(texts: list[str]) -> str:
    return "[" + ", ".join(f'"{text}"' for text in texts) + "]"
