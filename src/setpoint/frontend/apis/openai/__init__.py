"""OpenAI's API. A body becomes a reply without HTTP (``table``); ``routes`` puts HTTP around that,
and the batch runner needs none."""
