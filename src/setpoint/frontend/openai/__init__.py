"""OpenAI's API without HTTP: a body goes in as a dict, a reply comes out as one. The HTTP routes
and the batch runner both call it."""
