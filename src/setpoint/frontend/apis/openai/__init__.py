"""OpenAI's API. ``table`` turns a body into a reply without HTTP, as the batch runner needs it;
``routes`` adds HTTP."""
